"""A float32 x beside 16-bit weights, as under autocast: the CUDA kernels of the triangle update and the transition."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from cuda_checks import assert_accurate, kernels, memory_of, poison
from test_cuda_transition_gradients import gradients
from test_cuda_transition_gradients import parameters as transition_parameters
from test_cuda_triangle_gradients import parameters as triangle_parameters
from torch import Tensor
from transition_samples import transition_reference
from triangle_reference import triangle_multiplicative_update as triangle_reference

import torchops

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

Weights = dict[str, Tensor]
OPERATORS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], Callable[..., Tensor]]] = {
    "triangle": (
        torchops.triangle_multiplicative_update,
        torchops.add_triangle_multiplicative_update_,
        triangle_reference,
    ),
    "transition": (torchops.transition, torchops.add_transition_, transition_reference),
}
DTYPES = [torch.bfloat16, torch.float16]
operators = pytest.mark.parametrize("name", OPERATORS)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def weights_of(name: str, dtype: torch.dtype, c: int = 128, wide: int = 128, **options: bool) -> Weights:
    """Norms of 1 and 0 apart from noise; `wide` features of the product, or as many times 4 hidden ones."""
    made = triangle_parameters(c, wide, **options) if name == "triangle" else transition_parameters(c, 4 * wide)
    return {key: w.to(dtype) for key, w in made.items()}


def doubles(weights: Weights) -> Weights:
    return {key: w.double() for key, w in weights.items()}


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda")


STREAMS: dict[str, Callable[[], Tensor]] = {
    "normal": lambda: normal(97, 97, 128),
    "far from 0": lambda: 100 + normal(97, 97, 128),
    "beyond float16": lambda: 1e5 * normal(97, 97, 128),
    "rows of all sizes": lambda: normal(97, 97, 128) * 10 ** (3 * normal(97, 97, 1)).clamp(-2, 6),
    "last digits of 100": lambda: 100 + (2 * normal(97, 97, 128)).round() * 2**-17,
}


def assert_added(y: Tensor, x: Tensor, update: Tensor) -> None:
    """The sum is in float32, of an update that need not have been rounded."""
    torch.testing.assert_close(y - x, update.float(), rtol=torch.finfo(update.dtype).eps, atol=1e-5)


@dtypes
@operators
@pytest.mark.parametrize("stream", STREAMS)
def test_values_and_gradients(name: str, stream: str, dtype: torch.dtype) -> None:
    """Relative error at most 1.1 times that of the same expression in eager mode, where the weights alone are cast."""
    torch.manual_seed(0)
    operator, _, reference = OPERATORS[name]
    x, weights = STREAMS[stream](), weights_of(name, dtype)
    grad = torch.randn_like(x, dtype=dtype)
    poison(*x.shape, dtype=dtype)
    got = operator(x, **weights)
    assert got.dtype == dtype
    exact = reference(x.double(), **doubles(weights))
    assert_accurate(got, reference(x, **weights), exact)
    want = gradients(reference, x.double(), grad.double(), doubles(weights))
    eager = gradients(reference, x, grad, weights)
    for key, value in gradients(operator, x, grad, weights).items():
        assert value.dtype == (torch.float32 if key == "x" else dtype)
        assert_accurate(value, eager[key], want[key])


@dtypes
@operators
@pytest.mark.parametrize(("c", "wide"), [(64, 64), (72, 40), (8, 128)])
def test_other_sizes(name: str, c: int, wide: int, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    operator, in_place, reference = OPERATORS[name]
    x, weights = 3 + torch.randn(2, 51, 51, c, device="cuda"), weights_of(name, dtype, c, wide)
    got = operator(x, **weights)
    assert_accurate(got, reference(x, **weights), reference(x.double(), **doubles(weights)))
    y = x.clone()
    assert in_place(y, **weights) is y
    assert_added(y, x, got)
    grad = torch.randn_like(got)
    want = gradients(reference, x.double(), grad.double(), doubles(weights))
    eager = gradients(reference, x, grad, weights)
    assert_accurate(gradients(operator, x, grad, weights)["x"], eager["x"], want["x"])


@operators
def test_strided_views(name: str) -> None:
    """Rows apart from each other, not aligned, transposed, or with features apart: as of a copy, of x and in place."""
    torch.manual_seed(2)
    operator, in_place, _ = OPERATORS[name]
    weights = weights_of(name, torch.bfloat16, 64, 64)
    memory = torch.randn(3, 60, 60, 160, device="cuda")
    views: list[Callable[[Tensor], Tensor]] = [
        lambda t: t[..., 32:96],
        lambda t: t[:, 3:40, 5:42, :64],
        lambda t: t[1, 3:40, 5:42, 4:68],
        lambda t: t[..., 1:65],
        lambda t: t[..., :128:2],
        lambda t: t.transpose(1, 2)[..., :64],
        lambda t: t[::2, ..., :64],
    ]
    for view in views:
        x = view(memory)
        want = operator(x.contiguous(), **weights)
        assert torch.equal(operator(x, **weights), want)
        target = view(memory.clone())
        in_place(target, **weights)
        assert_added(target, x, want)
        grad = torch.randn_like(want)
        assert torch.equal(
            gradients(operator, x, grad, weights)["x"], gradients(operator, x.contiguous(), grad, weights)["x"]
        )


@operators
def test_weights_that_only_some_kernels_read(name: str) -> None:
    """Rows of odd lengths, which TMA does not take: what cannot run is done by panels, from the same rows."""
    torch.manual_seed(7)
    operator, in_place, _ = OPERATORS[name]
    weights = weights_of(name, torch.bfloat16, 64, 64)
    last = {"triangle": "g_out_weight", "transition": "down_weight"}[name]
    odd = torch.nn.functional.pad(weights[last], (0, 1))[:, :-1]
    x = torch.randn(40, 40, 64, device="cuda")
    want = operator(x, **weights).double()
    got = operator(x, **weights | {last: odd}).double()
    assert (got - want).norm() <= 0.02 * want.norm()
    added = in_place(x.clone(), **weights | {last: odd}).double() - x.double()
    assert (added - want).norm() <= 0.02 * want.norm()
    grad = torch.randn(40, 40, 64, device="cuda", dtype=torch.bfloat16)
    expected = gradients(operator, x, grad, weights)["x"]
    leaf = x.clone().requires_grad_()
    for given in (weights, weights | {last: odd}):  # and x's gradient alone
        (dx,) = torch.autograd.grad(operator(leaf, **given), leaf, grad)
        assert dx.dtype == torch.float32
        assert (dx - expected).norm() <= 0.03 * expected.norm()


@dtypes
@operators
def test_in_place_in_training(name: str, dtype: torch.dtype) -> None:
    """The cotangent of the residual keeps the digits of float32."""
    torch.manual_seed(3)
    operator, in_place, _ = OPERATORS[name]
    weights = weights_of(name, dtype)
    x, grad = (torch.randn(60, 60, 128, device="cuda") for _ in range(2))
    got = gradients(lambda x, **w: in_place(x.clone(), **w), x, grad, weights)
    want = gradients(operator, x, grad.to(dtype), weights)
    assert torch.equal(got.pop("x"), want.pop("x") + grad)
    assert all(torch.equal(got[key], value) for key, value in want.items())


@dtypes
@operators
def test_autocast(name: str, dtype: torch.dtype) -> None:
    """The parameters stay float32 and so do their gradients; neither the stream nor a norm is ever rounded itself."""
    torch.manual_seed(4)
    operator, in_place, _ = OPERATORS[name]
    weights = {key: w.float() for key, w in weights_of(name, dtype).items()}
    low = {key: w if "norm" in key else w.to(dtype) for key, w in weights.items()}
    x = torch.randn(70, 70, 128, device="cuda")
    with torch.autocast("cuda", dtype):
        update = operator(x, **weights)
        y = in_place(x.clone(), **weights)
        got = gradients(operator, x, update, weights)
    assert torch.equal(update, operator(x, **low))
    assert_added(y, x, update)
    for key, value in gradients(operator, x, update, low).items():
        assert got[key].dtype == torch.float32
        assert torch.equal(got[key], value.float())


@dtypes
def test_rows_without_a_norm(dtype: torch.dtype) -> None:
    """Rows of one value, whose norm is 0; with values that are no numbers, whose norm is none; and so large that their
    variance is no number of float32."""
    torch.manual_seed(5)
    weights = weights_of("transition", dtype)
    x = torch.randn(200, 128, device="cuda")
    x[3], x[4, 7], x[5, 9], x[6], x[7] = 1e5, float("nan"), float("inf"), 0, 1e20 * x[7]
    operator, _, reference = OPERATORS["transition"]
    got, want = operator(x, **weights), reference(x, **weights)
    assert torch.equal(got.isnan(), want.isnan())
    assert got.isnan().any(-1).sum() == 2
    numbers = ~want.isnan().any(-1)
    distance = (got[numbers].double() - want[numbers].double()).norm(dim=-1)
    assert (distance <= 0.04 * want[numbers].double().norm(dim=-1)).all()


@operators
def test_what_runs_besides_the_kernels_for_16_bits(name: str) -> None:
    """Forward, a pass that centres the rows, and nothing else: no layer norm, no sum. Backward, another such pass, and
    one that makes x's gradient float32."""
    operator, in_place, _ = OPERATORS[name]
    weights = weights_of(name, torch.bfloat16)
    x = torch.randn(64, 64, 128, device="cuda")
    low = x.bfloat16()
    grad = torch.ones_like(low)
    for call in (operator, in_place):
        of_x, of_low = (kernels(functools.partial(call, t, **weights)) for t in (x, low))
        assert of_x == of_low + 1
    of_x, of_low = (kernels(functools.partial(gradients, operator, t, grad, weights)) for t in (x, low))
    assert of_x == of_low + 3  # with the forward pass


def test_memory() -> None:
    """In tensors of x's size: the triangle update takes 1.5, x and its result centred in one place, and a tenth of a
    pair tensor of 16 bits; the transition its result, or a panel of it."""
    mib = 1 << 20
    x = torch.randn(768, 768, 128, device="cuda")
    for name, limits in (("triangle", (1.55, 1.55)), ("transition", (0.5, 0.0))):
        weights = weights_of(name, torch.bfloat16)
        for call, limit in zip(OPERATORS[name][:2], limits, strict=True):
            taken = memory_of(functools.partial(call, x, **weights))
            assert taken <= limit * x.nbytes + 64 * mib, (name, call)


@dtypes
def test_panels_of_the_transition(dtype: torch.dtype) -> None:
    operator, in_place, _ = OPERATORS["transition"]
    weights = weights_of("transition", dtype)
    x = torch.randn(600_001, 128, device="cuda")
    y = in_place(x.clone(), **weights)
    assert_added(y, x, operator(x, **weights))


@operators
def test_the_same_bits(name: str) -> None:
    torch.manual_seed(6)
    operator, _, _ = OPERATORS[name]
    weights = weights_of(name, torch.float16)
    x = torch.randn(70, 70, 128, device="cuda")
    grad = torch.randn_like(x, dtype=torch.float16)
    first, second = (gradients(operator, x, grad, weights) for _ in range(2))
    assert all(torch.equal(value, second[key]) for key, value in first.items())

"""The gradients of a transition by its CUDA kernels: values, what they fall back for, bits and memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from cuda_checks import error, kernels, poison
from torch import Tensor
from transition_samples import transition_reference as reference

import torchops

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

OPS = torch.ops.myops
transition: Callable[..., Tensor] = OPS.transition
NAMES = ("norm_weight", "norm_bias", "gate_weight", "gate_bias", "up_weight", "up_bias", "down_weight", "down_bias")


def parameters(c: int, hidden: int, *, norm: bool = True, biases: bool = True) -> dict[str, Tensor]:
    """In float64, of the sizes that layers have after training."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.float64)

    made = {
        "norm_weight": 1 + 0.2 * random(c),
        "norm_bias": 0.2 * random(c),
        "gate_weight": random(hidden, c) / c**0.5,
        "gate_bias": random(hidden),
        "up_weight": random(hidden, c) / c**0.5,
        "up_bias": random(hidden),
        "down_weight": random(c, hidden) / hidden**0.5,
        "down_bias": random(c),
    }
    return {
        name: value
        for name, value in made.items()
        if (norm if name.startswith("norm_") else biases or name.endswith("_weight"))
    }


def gradients(
    function: Callable[..., Tensor], x: Tensor, grad: Tensor, weights: dict[str, Tensor]
) -> dict[str, Tensor]:
    x = x.detach().requires_grad_()
    leaves = {name: w.detach().clone().requires_grad_() for name, w in weights.items()}
    y = function(x, **leaves)
    return dict(zip(("x", *leaves), torch.autograd.grad(y, (x, *leaves.values()), grad), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("shape", "hidden", "options"),
    [
        ((64, 128), 512, {}),
        ((700, 128), 512, {"biases": False}),
        ((3, 331, 72), 264, {}),
        ((1023, 64), 64, {"norm": False}),
        ((5, 8), 8, {}),
        ((300, 128), 200, {"norm": False, "biases": False}),
        ((33001, 128), 512, {}),
    ],
)
def test_gradients_by_the_cuda_kernels(
    shape: tuple[int, ...], hidden: int, options: dict[str, bool], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    low = {name: w.to(dtype) for name, w in parameters(shape[-1], hidden, **options).items()}
    exact = {name: w.double() for name, w in low.items()}
    x = (2 * torch.randn(shape, device="cuda", dtype=torch.float64) + 1).to(dtype)
    grad = torch.randn_like(x)
    want = gradients(reference, x.double(), grad.double(), exact)
    eager = gradients(reference, x, grad, low)
    poison(*x.shape, dtype=dtype)
    got = gradients(transition, x, grad, low)
    few = x[..., 0].numel() < 32  # a handful of rows: neither rounding averages out
    for name, value in got.items():
        assert value.dtype == dtype
        assert value.shape == want[name].shape
        if few:
            assert (value.double() - want[name]).norm() <= 0.02 * want[name].norm(), name
        else:
            assert error(value, want[name]) <= 1.2 * error(eager[name], want[name]), name


@pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize(
    ("dtype", "of_x"),
    [
        *((dtype, dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)),
        (torch.bfloat16, torch.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("shape", "hidden", "options"),
    [
        ((301, 192), 768, {}),
        ((3, 77, 264), 520, {"biases": False}),
        ((2048, 256), 1024, {"norm": False}),
        ((40, 8), 24, {}),
    ],
)
def test_gradients_of_kept_products(
    shape: tuple[int, ...], hidden: int, options: dict[str, bool], dtype: torch.dtype, residual: bool, of_x: torch.dtype
) -> None:
    torch.manual_seed(0)
    low = {name: w.to(dtype) for name, w in parameters(shape[-1], hidden, **options).items()}
    exact = {name: w.double() for name, w in low.items()}
    x = (2 * torch.randn(shape, device="cuda", dtype=torch.float64) + 1).to(of_x)
    ours, plain = (OPS._add_transition if residual else OPS.transition), reference
    if residual:
        plain = lambda x, **w: x + reference(x, **w)  # noqa: E731
    grad = torch.randn(shape, device="cuda", dtype=torch.float64).to(of_x if residual else dtype)
    want = gradients(plain, x.double(), grad.double(), exact)
    eager = gradients(plain, x, grad.to(of_x), {name: w.to(of_x) for name, w in low.items()})
    poison(*x.shape, dtype=dtype)
    got = gradients(ours, x, grad, low)
    slack = 1 if of_x == dtype != torch.float64 else 4
    for name, value in got.items():
        assert value.dtype == (of_x if name == "x" else dtype)
        bound = 1.25 * error(eager[name].to(value.dtype), want[name])
        assert error(value, want[name]) <= bound + slack * torch.finfo(dtype).eps, name


@pytest.mark.parametrize("in_place", [False, True], ids=["new", "in_place"])
def test_a_few_kernels_make_all_gradients(in_place: bool) -> None:
    """Two read the rows and three the parameters, instead of dozens for each panel of rows."""
    weights = {name: w.to(torch.bfloat16) for name, w in parameters(128, 512).items()}
    x = torch.randn(300, 128, device="cuda", dtype=torch.bfloat16)

    def call() -> None:
        function = (lambda x, **w: torchops.add_transition_(x.clone(), **w)) if in_place else transition
        gradients(function, x, x, weights)

    with torchops.cuda.kernel_path("cublas"):
        by_panels = kernels(call)
    assert 2 * kernels(call) < by_panels  # with those of the forward pass and copies of the parameters, on both sides


def test_in_place_adds_the_cotangent() -> None:
    torch.manual_seed(1)
    weights = {name: w.to(torch.bfloat16) for name, w in parameters(128, 512).items()}
    x = torch.randn(500, 128, device="cuda", dtype=torch.bfloat16)
    grad = torch.randn_like(x)
    exact = gradients(
        lambda x, **w: x + reference(x, **w), x.double(), grad.double(), {k: w.double() for k, w in weights.items()}
    )
    eager = gradients(lambda x, **w: x + reference(x, **w), x, grad, weights)
    got = gradients(lambda x, **w: torchops.add_transition_(x.clone(), **w), x, grad, weights)
    for name, value in got.items():
        assert error(value, exact[name]) <= 1.2 * error(eager[name], exact[name]), name


@pytest.mark.parametrize("biases", [False, True], ids=["no_bias", "biases"])
def test_strided_arguments_have_the_gradients_of_their_copies(biases: bool) -> None:
    torch.manual_seed(2)
    weights = {name: w.to(torch.bfloat16) for name, w in parameters(128, 256, biases=biases).items()}
    x = torch.randn(40, 30, 160, device="cuda", dtype=torch.bfloat16)[..., 16:144]
    wide = torch.randn(512, 136, device="cuda", dtype=torch.bfloat16)
    strided = weights | {"gate_weight": wide[:256, 8:], "up_weight": wide[1::2, :128]}
    for grad in (
        torch.randn(40, 30, 256, device="cuda", dtype=torch.bfloat16)[..., ::2],
        torch.randn(40, 30, 136, device="cuda", dtype=torch.bfloat16)[..., 8:],
        torch.ones((), device="cuda", dtype=torch.bfloat16).expand(40, 30, 128),
        torch.randn(40 * 30 * 128 + 1, device="cuda", dtype=torch.bfloat16)[1:].view(40, 30, 128),  # not aligned
    ):
        given = [strided.get(name) for name in NAMES[:-1]]
        packed = [None if t is None else t.contiguous() for t in given]
        output_mask = [True, *(t is not None for t in given), biases]
        first = OPS._transition_backward(grad, x, *given, 1e-5, output_mask)
        second = OPS._transition_backward(
            grad.clone(memory_format=torch.contiguous_format), x.contiguous(), *packed, 1e-5, output_mask
        )
        assert all(map(torch.equal, first, second))


def test_the_same_bits() -> None:
    """Of more rows than go through the kernels at a time, too."""
    torch.manual_seed(3)
    weights = {name: w.to(torch.bfloat16) for name, w in parameters(128, 512).items()}
    x = torch.randn(600_001, 128, device="cuda", dtype=torch.bfloat16)
    grad = torch.randn_like(x)
    first = gradients(transition, x, grad, weights)
    halves = [gradients(transition, x[part], grad[part], weights) for part in (slice(300_000), slice(300_000, None))]
    assert torch.equal(first["x"], torch.cat([half["x"] for half in halves]))
    for name in weights:
        both = halves[0][name].double() + halves[1][name].double()
        assert (first[name].double() - both).norm() <= 4e-3 * both.norm(), name
    for _ in range(3):
        poison(*x.shape, dtype=x.dtype)
        again = gradients(transition, x, grad, weights)
        assert all(torch.equal(first[name], again[name]) for name in first)


def test_every_subset_of_gradients() -> None:
    """Those that the kernels are not for come from panels; what nobody wants is empty."""
    torch.manual_seed(4)
    weights = {name: w.to(torch.bfloat16) for name, w in parameters(64, 64).items()}
    x = torch.randn(300, 64, device="cuda", dtype=torch.bfloat16)
    grad = torch.randn_like(x)
    given = [weights[name] for name in NAMES[:-1]]
    whole = OPS._transition_backward(grad, x, *given, 1e-5, [True] * 9)
    for output_mask in itertools.product([False, True], repeat=9):
        for got, all_of_it, asked in zip(
            OPS._transition_backward(grad, x, *given, 1e-5, list(output_mask)), whole, output_mask, strict=True
        ):
            if asked:
                assert (got - all_of_it).norm() <= 0.02 * all_of_it.norm()
            else:
                assert got.shape == (0,)


def test_frozen_weights_cost_nothing() -> None:
    weights = {name: w.to(torch.bfloat16) for name, w in parameters(128, 512).items()}
    x = torch.randn(300, 128, device="cuda", dtype=torch.bfloat16).requires_grad_()
    trained = {name: w.clone().requires_grad_() for name, w in weights.items()}
    all_gradients = kernels(lambda: torch.autograd.grad(transition(x, **trained).sum(), [x, *trained.values()]))
    # By panels of rows, x's gradient alone would take more.
    assert kernels(lambda: torch.autograd.grad(transition(x, **weights).sum(), x)) < all_gradients


def test_memory_of_training() -> None:
    """Of a training step x alone is kept, and at its peak there are dx and 64 MiB beside what there was."""
    mib = 1 << 20
    weights = {name: w.to(torch.bfloat16).requires_grad_() for name, w in parameters(128, 512).items()}
    x = torch.randn(768, 768, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn_like(x)

    def run() -> tuple[int, int]:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        y = transition(x, **weights)
        kept = torch.cuda.memory_allocated() - before - y.nbytes
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        result = torch.autograd.grad(y, [x, *weights.values()], grad)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - base
        del result
        return kept, peak

    run()
    kept, peak = run()
    assert kept <= mib
    assert peak <= x.nbytes + 64 * mib

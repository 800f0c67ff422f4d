"""The gradients of a triangle update by its CUDA kernels: values, what they fall back for, bits and memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cuda_checks import error, poison
from torch import Tensor
from triangle_reference import triangle_multiplicative_update as reference

import torchops

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

update: Callable[..., Tensor] = torchops.triangle_multiplicative_update
add_update: Callable[..., Tensor] = torchops.add_triangle_multiplicative_update_
WEIGHTS = ("p_in_weight", "g_in_weight", "p_out_weight", "g_out_weight")


def parameters(c: int, d: int, *, norms: bool = True, biases: bool = True) -> dict[str, Tensor]:
    """In float64, of the sizes that layers have after training."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.float64)

    made = {"p_in_weight": random(2 * d, c), "g_in_weight": random(2 * d, c), "g_out_weight": random(c, c)}
    made = {name: w / c**0.5 for name, w in made.items()} | {"p_out_weight": random(c, d) / d**0.5}
    if norms:
        made |= {"norm_in_weight": 1 + 0.2 * random(c), "norm_in_bias": 0.2 * random(c)}
        made |= {"norm_out_weight": 1 + 0.2 * random(d), "norm_out_bias": 0.2 * random(d)}
    if biases:
        made |= {"p_in_bias": random(2 * d), "g_in_bias": random(2 * d)}
        made |= {"p_out_bias": random(c), "g_out_bias": random(c)}
    return made


def gradients(
    function: Callable[..., Tensor],
    x: Tensor,
    grad: Tensor,
    direction: str,
    mask: Tensor | None,
    weights: dict[str, Tensor],
) -> dict[str, Tensor]:
    x = x.detach().requires_grad_()
    leaves = {name: w.detach().clone().requires_grad_() for name, w in weights.items()}
    y = function(x, direction, mask=mask, **leaves)
    return dict(zip(("x", *leaves), torch.autograd.grad(y, (x, *leaves.values()), grad), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
@pytest.mark.parametrize(
    ("batch", "n", "c", "d", "options"),
    [
        ((), 64, 128, 128, {}),
        ((2,), 77, 128, 64, {}),
        ((), 129, 72, 128, {"norms": False}),
        ((2, 1), 33, 64, 32, {"biases": False}),
        ((), 5, 8, 8, {}),
        ((), 200, 128, 128, {"biases": False, "norms": False}),
    ],
)
@pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "masked"])
def test_gradients_by_the_cuda_kernels(
    batch: tuple[int, ...],
    n: int,
    c: int,
    d: int,
    options: dict[str, bool],
    direction: str,
    masked: bool,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    exact = parameters(c, d, **options)
    x = 2 * torch.randn(*batch, n, n, c, device="cuda", dtype=torch.float64) + 1
    mask = torch.rand(*batch, n, n, device="cuda").double() if masked else None
    grad = torch.randn_like(x)
    low = {name: w.to(dtype) for name, w in exact.items()}
    x16, grad16, mask16 = x.to(dtype), grad.to(dtype), None if mask is None else mask.to(dtype)
    exact = {name: w.double() for name, w in low.items()}
    exact_mask = None if mask16 is None else mask16.double()
    want = gradients(reference, x16.double(), grad16.double(), direction, exact_mask, exact)
    eager = gradients(reference, x16, grad16, direction, mask16, low)
    poison(*x.shape, dtype=dtype)
    got = gradients(update, x16, grad16, direction, mask16, low)
    few = n < 32  # a handful of positions: neither rounding averages out
    for name, value in got.items():
        assert value.dtype == dtype
        assert value.shape == want[name].shape
        if few:
            assert (value.double() - want[name]).norm() <= 0.02 * want[name].norm(), name
        else:
            # The gate of the kernels is within 2.5e-4, which float16 notices.
            gate = 3e-4 if dtype == torch.float16 else 0
            assert error(value, want[name]) <= 1.2 * error(eager[name], want[name]) + gate, name


@pytest.mark.parametrize("n", [48, 100])
def test_a_step_of_the_cuda_kernels_reads_what_it_is_given(n: int) -> None:
    """What is strided, expanded, or not aligned has the gradients of its copy."""
    torch.manual_seed(1)
    weights = {name: w.to(torch.bfloat16) for name, w in parameters(128, 128).items()}
    wide = torch.randn(n, n, 160, device="cuda", dtype=torch.bfloat16)
    x = wide[..., 16:144].transpose(0, 1)
    for grad in (
        torch.randn(n, n, 256, device="cuda", dtype=torch.bfloat16)[..., ::2],
        torch.randn(n, n, 136, device="cuda", dtype=torch.bfloat16)[..., 8:].transpose(0, 1),
        torch.ones((), device="cuda", dtype=torch.bfloat16).expand(n, n, 128),
        torch.randn(n * n * 128 + 1, device="cuda", dtype=torch.bfloat16)[1:].view(n, n, 128),
    ):
        copy = grad.clone(memory_format=torch.contiguous_format)
        for operator in (
            update,
            lambda x, *given, **w: torchops.add_triangle_multiplicative_update_(x.clone(), *given, **w),
        ):
            strided = gradients(operator, x, grad, "outgoing", None, weights)
            packed = gradients(operator, x.contiguous(), copy, "outgoing", None, weights)
            for name, value in strided.items():
                assert torch.equal(value, packed[name]), name


@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
def test_gradients_by_the_cuda_kernels_have_the_same_bits(direction: str) -> None:
    torch.manual_seed(2)
    weights = {name: w.to(torch.bfloat16) for name, w in parameters(128, 128).items()}
    x = torch.randn(300, 300, 128, device="cuda", dtype=torch.bfloat16)
    grad = torch.randn_like(x)
    first = gradients(update, x, grad, direction, None, weights)
    for _ in range(5):
        poison(*x.shape, dtype=x.dtype)
        again = gradients(update, x, grad, direction, None, weights)
        assert all(torch.equal(first[name], again[name]) for name in first)


def test_the_cuda_kernels_agree_with_panels() -> None:
    """Where a weight is frozen or the mask's gradient is wanted the panels run."""
    torch.manual_seed(3)
    weights = {name: w.to(torch.bfloat16) for name, w in parameters(128, 128).items()}
    x = torch.randn(80, 80, 128, device="cuda", dtype=torch.bfloat16)
    mask = torch.rand(80, 80, device="cuda", dtype=torch.bfloat16)
    grad = torch.randn_like(x)
    fused = gradients(update, x, grad, "outgoing", mask, weights)
    for frozen in (*WEIGHTS, "mask"):
        leaf = x.clone().requires_grad_()
        leaves = {name: w.clone().requires_grad_(name != frozen) for name, w in weights.items()}
        leaf_mask = mask.clone().requires_grad_(frozen == "mask")
        y = update(leaf, "outgoing", mask=leaf_mask, **leaves)
        wanted = {"x": leaf} | {name: w for name, w in leaves.items() if w.requires_grad}
        for name, value in zip(wanted, torch.autograd.grad(y, [*wanted.values()], grad), strict=True):
            assert (value - fused[name]).norm() <= 0.02 * fused[name].norm(), (frozen, name)


@pytest.mark.parametrize("n", [768, 769, 833])
@pytest.mark.parametrize("in_place", [False, True], ids=["new", "in_place"])
def test_memory_of_the_cuda_kernels_training(in_place: bool, n: int) -> None:
    """One pair tensor is kept for the backward pass, at whose peak there are three beside dx: d(o), a and b. In place
    the old x comes in addition."""
    mib = 1 << 20
    weights = {name: w.to(torch.bfloat16).requires_grad_() for name, w in parameters(128, 128).items()}
    x = torch.randn(n, n, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn_like(x)
    pair = x.nbytes

    def run() -> tuple[int, int]:
        given = x + 0
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        y = (add_update if in_place else update)(given, **weights)
        made = 0 if in_place else y.nbytes
        kept = torch.cuda.memory_allocated() - before - made
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated() - kept
        result = torch.autograd.grad(y, [x, *weights.values()], grad)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - base
        del result
        return kept, peak

    run()
    kept, peak = run()
    assert kept <= (1.1 + in_place) * pair + 64 * mib
    assert peak - pair <= (3.2 + in_place) * pair + 64 * mib

"""The triangle update by cuBLAS and passes over panels: float32 and float64, and 16 bits without the fused kernels.

Panels take tens of MiB, so only large pair tensors have several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from cuda_checks import error
from test_cuda_triangle_gradients import parameters
from test_cuda_triangle_padding import poison_all
from torch import Tensor
from triangle_reference import triangle_multiplicative_update as reference

import torchops

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

update: Callable[..., Tensor] = torchops.triangle_multiplicative_update
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _cublas() -> Iterator[None]:
    torch.manual_seed(0)
    with torchops.cuda.kernel_path("cublas"):
        yield
    torch.cuda.empty_cache()


def assert_close(got: Tensor, eager: Tensor, exact: Tensor, name: str, scale: float = 1.5) -> None:
    """Gradients add rounded terms, in float32 or wider, in another order than eager mode."""
    assert got.dtype == eager.dtype
    if got.dtype == torch.float64:
        assert error(got, exact) <= 1e-11, name  # the reference has rounding errors too
    else:
        rounding = 2 * torch.finfo(got.dtype).eps + 4 * torch.finfo(torch.float32).eps
        assert error(got, exact) <= scale * error(eager, exact) + rounding, name


def results(
    function: Callable[..., Tensor], x: Tensor, grad: Tensor, direction: str, given: dict[str, Tensor], wanted: set[str]
) -> dict[str, Tensor]:
    """The update and the gradients of what is wanted."""
    leaves = {name: t.detach().requires_grad_(name in wanted) for name, t in ({"x": x} | given).items()}
    y = function(direction=direction, **leaves)
    names = sorted(wanted)
    found = torch.autograd.grad(y, [leaves[name] for name in names], grad)
    return {"y": y.detach()} | dict(zip(names, found, strict=True))


@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
@pytest.mark.parametrize("of", ["all", "x", "weights", "mask"])
@pytest.mark.parametrize(
    ("n", "c", "d", "dtype", "biases"),
    [
        (440, 128, 128, torch.float32, False),  # several panels in every step
        (331, 66, 130, torch.float32, True),
        (360, 64, 80, torch.float64, True),
        (521, 128, 128, torch.bfloat16, True),
        (41, 33, 7, torch.float32, True),
    ],
)
def test_gradients(n: int, c: int, d: int, dtype: torch.dtype, biases: bool, of: str, direction: str) -> None:
    given = {name: w.to(dtype) for name, w in parameters(c, d, biases=biases).items()}
    if of in ("all", "mask"):
        given["mask"] = torch.rand(n, n, device="cuda").to(dtype)
    wanted = {"all": {"x", *given}, "x": {"x"}, "weights": set(given), "mask": {"mask", "p_in_weight"}}[of]
    x = torch.randn(n, n, c, device="cuda", dtype=dtype)
    grad = torch.randn(n, n, c, device="cuda", dtype=dtype).transpose(0, 1)
    exact = results(
        reference, x.double(), grad.double(), direction, {name: t.double() for name, t in given.items()}, wanted
    )
    eager = results(reference, x, grad, direction, given, wanted)
    poison_all(16 * x.nbytes)
    got = results(update, x, grad, direction, given, wanted)
    for name, value in got.items():
        assert_close(value, eager[name], exact[name], name)
    again = results(update, x, grad, direction, given, wanted)
    assert all(torch.equal(value, again[name]) for name, value in got.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("d", [1, 2, 15, 34, 64, 66, 96, 128, 130, 166, 168, 176, 200, 334, 336, 344, 350, 384, 400])
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
def test_layer_norm_of_any_number_of_channels(affine: bool, d: int, dtype: torch.dtype) -> None:
    """Up to some hundred channels, the transposition of the product normalises it."""
    for n in (38, 45):
        given = {name: w.to(dtype) for name, w in parameters(24, d, norms=affine, biases=False).items()}
        x = torch.randn(n, n, 24, device="cuda", dtype=dtype)
        exact = reference(x.double(), "outgoing", **{name: w.double() for name, w in given.items()})  # type: ignore[arg-type]
        eager = reference(x, "outgoing", **given)  # type: ignore[arg-type]
        poison_all(64 * x.nbytes)
        if d == 1:  # its layer norm is 0, or the bias, but for a rounding error that 1 / sqrt(eps) enlarges
            assert (update(x, **given).double() - exact).abs().max() <= 1e-2 * exact.abs().max().clamp(min=1)
        else:
            # Where two channels are nearly the same, their layer norm enlarges all rounding errors.
            assert_close(update(x, **given), eager, exact, f"{n} positions", scale=4 if d == 2 else 1.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("d", [15, 64, 128, 350])
def test_equal_channels_become_0(d: int, dtype: torch.dtype) -> None:
    """However far from 0 they are."""
    given = {name: w.to(dtype) for name, w in parameters(24, d, norms=False, biases=False).items()}
    for name in ("p_in_weight", "g_in_weight"):
        given[name] = given[name][:1].expand(2 * d, -1) * 8
    x = torch.randn(50, 50, 24, device="cuda", dtype=dtype)
    assert update(x, **given).abs().max() <= 1e-5


@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
@pytest.mark.parametrize(("n", "dtype"), [(500, torch.float32), (769, torch.float32), (513, torch.float64)], ids=str)
def test_memory(n: int, dtype: torch.dtype, direction: str) -> None:
    """A pair tensor is kept for the backward pass, at whose peak there are three more beside dx."""
    weights = {name: w.to(dtype).requires_grad_() for name, w in parameters(128, 128).items()}
    x = torch.randn(n, n, 128, device="cuda", dtype=dtype, requires_grad=True)
    grad, pair = torch.randn_like(x), x.nbytes
    with torch.no_grad():
        update(x, direction, **weights)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        update(x, direction, **weights)
        assert torch.cuda.max_memory_allocated() - before <= 2.1 * pair + 64 * MIB
    for _ in range(2):
        before = torch.cuda.memory_allocated()
        y = update(x, direction, **weights)
        made = torch.cuda.memory_allocated() - before
        torch.cuda.reset_peak_memory_stats()
        found = torch.autograd.grad(y, [x, *weights.values()], grad)
        peak = torch.cuda.max_memory_allocated() - before - y.nbytes
        del y, found
    assert made <= 2.1 * pair + 64 * MIB
    # Panels of a pair tensor below 128 MiB may take 256 MiB.
    room = 256 * MIB if pair <= 128 * MIB else 0
    assert peak - pair <= 4.2 * pair + 64 * MIB + room

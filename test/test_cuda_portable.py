"""What GPUs other than Hopper get, on any: the path "portable". Triangle updates by the kernels of sm80_pair.cuh (sizes
of tiles and chunks, strides, padding, the float32 stream), and how many kernels run. Tests of gates have this path
too."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cuda_checks import error, kernels
from test_cuda_triangle_gradients import gradients, parameters
from torch import Tensor
from triangle_reference import triangle_multiplicative_update as reference

import torchops
from torchops._core import _build_info

if not torch.cuda.is_available() or not _build_info.cuda_version:
    pytest.skip("needs a GPU and a build with CUDA", allow_module_level=True)

update: Callable[..., Tensor] = torchops.triangle_multiplicative_update
update_: Callable[..., Tensor] = torchops.add_triangle_multiplicative_update_
DTYPES = [torch.bfloat16, torch.float16, torch.float32]  # the last in TF32


@pytest.fixture(autouse=True)
def _portable() -> Iterator[None]:
    torch.manual_seed(0)
    matmul = torch.backends.cuda.matmul
    former, matmul.allow_tf32 = matmul.allow_tf32, True
    with torchops.cuda.kernel_path("portable"):
        yield
    matmul.allow_tf32 = former


def poison(x: Tensor) -> None:
    """The memory that the next tensors get is full of NaN."""
    blocks = [torch.full((x.numel(),), float("nan"), device="cuda", dtype=x.dtype) for _ in range(12)]
    torch.cuda.synchronize()
    del blocks


def like(x: Tensor) -> Tensor:
    """A copy with the strides of x, unless its elements overlap."""
    if 0 in x.stride():
        return x.clone()
    count = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return torch.zeros(count, device="cuda", dtype=x.dtype).as_strided(x.shape, x.stride()).copy_(x)


def assert_accurate(
    x: Tensor, weights: dict[str, Tensor], direction: str = "outgoing", mask: Tensor | None = None
) -> None:
    """The update, and the sum in place, are no further from float64 than eager mode is, but for chance."""
    exact = reference(x.double(), direction, mask=mask, **{k: w.double() for k, w in weights.items()})  # type: ignore[arg-type]
    eager = reference(x, direction, mask=mask, **weights)  # type: ignore[arg-type]
    poison(x)
    got = update(x, direction, mask=mask, **weights)
    assert torch.equal(got, update(x, direction, mask=mask, **weights))
    # cuBLAS doesn't take TF32 for all sizes, and the error of a few numbers is left to chance.
    dtype = weights["p_in_weight"].dtype
    floor = 2**-10 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
    floor *= 4 if x.numel() < 1000 else 1
    assert error(got, exact) <= max(1.1 * error(eager, exact), floor)
    poison(x)
    in_place = like(x)
    update_(in_place, direction, mask=mask, **weights)
    assert error(in_place, x + exact) <= max(1.1 * error(x + eager, x + exact), floor)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize(
    ("n", "c", "d"),
    [
        *((1, 8, 8), (7, 128, 128), (16, 64, 64), (33, 24, 40), (127, 128, 64)),
        *((128, 72, 128), (129, 120, 104), (200, 128, 128), (257, 32, 16), (300, 128, 32)),
    ],
)
def test_sizes(n: int, c: int, d: int, biases: bool, dtype: torch.dtype) -> None:
    weights = {name: w.to(dtype) for name, w in parameters(c, d, biases=biases).items()}
    x = torch.randn(n, n, c, device="cuda", dtype=dtype) * 2 + torch.randn(n, n, 1, device="cuda", dtype=dtype)
    mask = torch.rand(n, n, device="cuda").to(dtype)
    assert_accurate(x, weights, mask=mask)
    assert_accurate(x, weights, "incoming", mask=mask)
    assert_accurate(x, weights, "incoming")


@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
def test_strides(direction: str) -> None:
    n, c = 70, 64
    weights = {name: w.to(torch.bfloat16) for name, w in parameters(c, c).items()}
    wide = torch.randn(2, n, n, c + 8, device="cuda", dtype=torch.bfloat16)
    masks = torch.rand(n, 2 * n, device="cuda").bfloat16()
    for x in (wide[..., :c], wide[..., 8:], wide.transpose(1, 2)[..., :c], wide[:1, ..., :c].expand(2, -1, -1, -1)):
        assert_accurate(x, weights, direction, mask=masks[:, ::2].expand(2, -1, -1))
        assert_accurate(x, weights, direction, mask=masks[:, :n].T.expand(2, -1, -1))
    # Rows that the kernels cannot load go by panels.
    assert_accurate(wide[..., 1 : c + 1], weights, direction)
    # A norm's parameters may have any alignment.
    odd = {name: torch.cat([w[:1], w])[1:] if w.dim() == 1 else w for name, w in weights.items()}
    assert_accurate(wide[..., :c], odd, direction)


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_float32_stream(dtype: torch.dtype) -> None:
    weights = {name: w.to(dtype) for name, w in parameters(128, 128).items()}
    for n in (65, 130):
        x = 5 + torch.randn(n, n, 128, device="cuda") * torch.randn(n, n, 1, device="cuda").exp()
        assert_accurate(x, weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("n", [65, 144])
def test_gradients(n: int, dtype: torch.dtype) -> None:
    weights: Any = {name: w.to(dtype) for name, w in parameters(128, 64).items()}
    x, grad = (torch.randn(n, n, 128, device="cuda", dtype=dtype) for _ in range(2))
    exact: Any = {name: w.double() for name, w in weights.items()}
    want = gradients(reference, x.double(), grad.double(), "incoming", None, exact)
    eager = gradients(reference, x, grad, "incoming", None, weights)
    poison(x)
    for name, value in gradients(update, x, grad, "incoming", None, weights).items():
        factor = 1.2 if value.dim() > 1 else 1.6  # a few numbers are left to chance
        assert error(value, want[name]) <= max(factor * error(eager[name], want[name]), 2**-8), name


def test_one_kernel_for_each_step() -> None:
    """The first and the last of a triangle update, and the cotangents of a gate."""
    for dtype in DTYPES:
        weights = {name: w.to(dtype) for name, w in parameters(128, 128).items()}
        x = torch.randn(128, 128, 128, device="cuda", dtype=dtype)
        for call in (update, update_):
            # For the product between them, cuBLAS may fill memory first, and add up parts of sums afterwards. By
            # panels, the first step would take five kernels or more, and the last one four.
            assert 3 <= kernels(functools.partial(call, x, **weights)) <= 5
    x, weights = x.bfloat16(), {name: w.bfloat16() for name, w in weights.items()}
    rows, w, b = x.view(-1, 128), weights["p_out_weight"], x[0, 0].clone()
    gate_backward, glu_backward = torch.ops.myops._gate_backward, torch.ops.myops._glu_backward
    for backward in (
        lambda: gate_backward(rows, rows, rows, w, b, (True, True, True, False)),
        lambda: glu_backward(rows, rows, w, w, None, None, "silu", (True, True, True, False, False)),
    ):
        # The products of the cotangents are the same, but cuBLAS and a pass make these.
        with torchops.cuda.kernel_path("cublas"):
            by_cublas = kernels(backward)
        assert kernels(backward) < by_cublas

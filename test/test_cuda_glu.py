"""What only the CUDA kernels of glu and gate for sums of more than 256 features can get wrong: tile edges, turns and
clusters, strides, memory. Values and gradients of small sizes are tested by the generic suites."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cuda_checks import assert_accurate, double, error, poison, random
from product_samples import gate_reference, glu_reference
from torch import Tensor

import torchops
from torchops._core import _build_info
from torchops._core.devices import capability

if not torch.cuda.is_available() or not _build_info.cuda_version:
    pytest.skip("needs a GPU and a build with CUDA", allow_module_level=True)

DTYPES = [torch.bfloat16, torch.float16]
ACTIVATIONS = ["sigmoid", "silu"]
HAS_KERNELS = capability(0) == (9, 0) and "9.0a" in _build_info.gemm_architectures


def weights(n: int, k: int, dtype: torch.dtype) -> list[Tensor]:
    """The halves of a packed weight."""
    return list(random(2 * n, k, dtype=dtype, scale=k**-0.5).chunk(2))


def biases(n: int, dtype: torch.dtype) -> dict[str, tuple[Tensor | None, Tensor | None]]:
    """Of no alignment, and of a step."""
    b, bg = random(n + 1, dtype=dtype)[1:], random(2 * n, dtype=dtype)[::2]
    return {"none": (None, None), "value": (b, None), "gate": (None, bg), "both": (b, bg)}


@pytest.mark.parametrize("path", ["auto", "fused", "cublas"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        # Few tiles: small ones, of which the last have no columns, or no rows.
        (1, 264, 8),
        (16, 4096, 4096),
        (129, 520, 264),
        (777, 384, 1000),
        (5000, 2056, 72),
        (128, 8192, 1024),
        # One wave of large ones.
        (2000, 512, 768),
        (1024, 264, 2040),
        # Several waves of them, with sums that end inside of a step.
        (3001, 2056, 1032),
        (9001, 2056, 200),
        # Several waves of small ones: an odd number of tiles, and more than one group of rows.
        (2000, 520, 1544),
        (20001, 384, 512),
        # What TMA cannot read or write.
        (300, 260, 264),
        (300, 264, 260),
    ],
    ids=str,
)
def test_glu_of_long_sums(shape: tuple[int, int, int], dtype: torch.dtype, activation: Any, path: Any) -> None:
    rows, k, n = shape
    x, (w, wg) = random(rows, k, dtype=dtype), weights(n, k, dtype)
    for b, bg in biases(n, dtype).values():
        exact = glu_reference(*double(x, w, wg, b, bg), activation=activation)
        eager = glu_reference(x, w, wg, b, bg, activation=activation)
        poison(rows, n, dtype=dtype)
        with torchops.cuda.kernel_path(path):
            y = torchops.glu(x, w, wg, b, bg, activation=activation)
            assert torch.equal(y, torchops.glu(x, w, wg, b, bg, activation=activation))
        assert y.is_contiguous()
        assert_accurate(y, eager, exact)


@pytest.mark.parametrize("path", ["auto", "fused", "cublas"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape",
    # One tile; tiles without columns or rows at the end; an odd number of them; several waves; not for TMA.
    [(1, 264, 8), (129, 520, 264), (777, 384, 1000), (3001, 2056, 1032), (20001, 384, 384), (300, 264, 260)],
    ids=str,
)
def test_gate_of_long_sums(shape: tuple[int, int, int], dtype: torch.dtype, path: Any) -> None:
    rows, k, n = shape
    x, (w, _), v = random(rows, k, dtype=dtype), weights(n, k, dtype), random(rows, n + 8, dtype=dtype)[:, 8:]
    for b in (None, random(n + 1, dtype=dtype)[1:]):
        exact, eager = gate_reference(*double(v, x, w, b)), gate_reference(v, x, w, b)
        poison(rows, n, dtype=dtype)
        with torchops.cuda.kernel_path(path):
            y, overwritten = torchops.gate(v, x, w, b), v.clone()
            torchops.gate_(overwritten, x, w, b)
        assert y.is_contiguous()
        assert_accurate(y, eager, exact)
        assert error(overwritten, y.double()) <= torch.finfo(dtype).eps / 2


@pytest.mark.parametrize("n", [64, 128, 256, 384])
def test_gate_of_what_it_overwrites(n: int) -> None:
    """Several tiles of a row read all of it: none may be overwritten before."""
    x, (w, _) = random(100_000, n, dtype=torch.bfloat16), weights(n, n, torch.bfloat16)
    expected = torchops.gate(x, x, w)
    for _ in range(10):
        y = x.clone()
        torchops.gate_(y, y, w)
        assert error(y, expected.double()) <= torch.finfo(y.dtype).eps / 2


@pytest.mark.parametrize("rows", [98305, 99000, 99536, 99840])
def test_gate_of_columns_in_parts(rows: int) -> None:
    """A copy of v has 65536 rows, in two panels as long as the cache allows; the rest would fit a longer one."""
    v, x, w = (random(*size, dtype=torch.float32) for size in ((128, rows), (rows, 64), (128, 64)))
    v, w = v.T, w / 8
    expected = gate_reference(*double(v, x, w))
    torchops.gate_(v, x, w)
    assert error(v, expected) < 1e-6


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "columns": lambda t: t[:, 8:528],
    "unaligned": lambda t: t[:, 1:521],
    "row_step": lambda t: t[::2, :520],
    "column_step": lambda t: t[:, ::2][:, :520],
    "transposed": lambda t: t[:520, :1000].T,
    "expanded": lambda t: t[:1, :520].expand(700, 520),
    "batch": lambda t: t[:1500, :520].unflatten(0, (3, 5, -1)),
    "vector": lambda t: t[0, :520],
}


@pytest.mark.parametrize("path", ["fused", "cublas"])
@pytest.mark.parametrize("view", VIEWS)
def test_glu_of_views_of_long_rows(view: str, path: Any) -> None:
    x = VIEWS[view](random(2000, 1048, dtype=torch.bfloat16))
    w, wg = weights(1544, 520, x.dtype)
    with torchops.cuda.kernel_path(path):
        y = torchops.glu(x, w, wg, activation="silu")
    eager = glu_reference(x, w, wg, activation="silu")
    assert y.shape == eager.shape
    assert_accurate(y, eager, glu_reference(*double(x, w, wg), activation="silu"))


def test_glu_of_special_values_in_long_sums() -> None:
    """A NaN in a weight stays in its column, one in x in its row."""
    x, (w, wg) = random(3000, 512, dtype=torch.bfloat16), weights(1024, 512, torch.bfloat16)
    w[5, 5], wg[700, 300], x[1234, 7] = (float("nan"),) * 3
    with torchops.cuda.kernel_path("fused"):
        y = torchops.glu(x, w, wg)
    expected = torch.zeros_like(y, dtype=torch.bool)
    expected[:, [5, 700]], expected[1234] = True, True
    assert torch.equal(y.isnan(), expected)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(700, 520, 264), (2, 1500, 512, 1032), (3001, 2056, 1032)], ids=str)
def test_gradients_of_glu_of_long_sums(shape: tuple[int, ...], dtype: torch.dtype, activation: Any) -> None:
    *rows, k, n = shape
    b, bg = biases(n, dtype)["both"]
    tensors = [random(*rows, k, dtype=dtype), *weights(n, k, dtype), b, bg]
    grad = random(*rows, n, dtype=dtype)

    def gradients(function: Any, arguments: list[Any], grad: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in arguments]
        return torch.autograd.grad(function(*leaves, activation=activation), leaves, grad)

    exact = gradients(glu_reference, double(*tensors), grad.double())
    eager = gradients(glu_reference, tensors, grad)
    for got, other, value in zip(gradients(torchops.glu, tensors, grad), eager, exact, strict=True):
        assert (got.shape, got.dtype) == (other.shape, other.dtype)
        assert error(got, value) <= 1.5 * error(other, value)


@pytest.mark.skipif(not HAS_KERNELS, reason="needs compute capability 9.0 and its kernels")
@pytest.mark.parametrize("shape", [(2048, 1024, 4096), (8192, 2048, 2048), (65536, 128, 128)], ids=str)
def test_glu_has_no_tensor_but_its_result(shape: tuple[int, int, int]) -> None:
    rows, k, n = shape
    x, (w, wg) = random(rows, k, dtype=torch.bfloat16), weights(n, k, torch.bfloat16)
    b, _ = biases(n, x.dtype)["value"]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = torchops.glu(x, w, wg, b, activation="silu")
    assert torch.cuda.max_memory_allocated() - before <= y.nbytes + (1 << 20)

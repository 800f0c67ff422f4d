"""The kernel for 16-bit elements and rows of any alignment, on every GPU from compute capability 8.0 on: sizes,
alignments and strides, and when operators take it."""

from __future__ import annotations

import random as pseudorandom
from functools import partial
from typing import Any

import cuda_checks
import pytest
import torch
import torch.nn.functional as F
from cuda_checks import assert_accurate, double, poison, random
from product_samples import gate_reference, glu_reference
from torch import Tensor

import torchops
from torchops._core import _build_info

if not torch.cuda.is_available() or not _build_info.cuda_version:
    pytest.skip("needs a GPU and a build with CUDA", allow_module_level=True)

DTYPES = [torch.bfloat16, torch.float16]
PATHS: list[Any] = ["auto", "fused"]


def rows_in(offset: int, stride: int, values: Tensor) -> Tensor:
    """The same rows, `stride` elements apart, in a buffer of NaN from element `offset` on."""
    rows, columns = values.shape
    buffer = torch.full((offset + rows * stride + 8,), float("nan"), device="cuda", dtype=values.dtype)
    view = buffer[offset : offset + rows * stride].view(rows, stride)[:, :columns]
    return view.copy_(values)


def assert_dense(x: Tensor, w: Tensor, b: Tensor | None, path: Any) -> Tensor:
    """Each element within one rounding of the result, and the error of a sum in float32; where cuBLAS and a pass may be
    faster, as near as eager mode, which rounds the product too."""
    exact = torch.sigmoid(F.linear(x.double(), w.double(), None if b is None else b.double()))
    poison(x.shape[0], w.shape[0], dtype=x.dtype)
    with torchops.cuda.kernel_path(path):
        y = torchops.dense(x, w, b)
        assert torch.equal(y, torchops.dense(x, w, b))
    assert y.is_contiguous()
    if path == "auto":
        assert_accurate(y, torch.sigmoid(F.linear(x, w, b)), exact)
        return y
    unit = torch.finfo(x.dtype).eps / 2
    products = F.linear(x.double().abs(), w.double().abs(), None if b is None else b.double().abs())
    approximation = 3.2e-4 if x.dtype == torch.bfloat16 else 4e-6  # of the sigmoid
    allowed = (unit + approximation) * exact + 4 * torch.finfo(torch.float32).eps * products + 2.0**-25
    wrong = ~((y.double() - exact).abs() <= allowed)
    assert not bool(wrong.any()), f"{int(wrong.sum())} of {wrong.numel()}, first at {wrong.nonzero()[0].tolist()}"
    return y


def drawn(seed: int, dtype: torch.dtype, weights: int = 1) -> tuple[Tensor, list[Tensor], bool]:
    """x, the weights, and whether there is a bias."""
    draw = pseudorandom.Random(seed)
    # Alignments to 16, 8, 4 and 2 bytes occur equally often.
    unit = (8, 4, 2, 1)[seed % 4]
    rows, k, n = (draw.randint(1, 300) for _ in range(3))
    if draw.random() < 0.5:
        n = -(-n // unit) * unit
    (of_x, stride_x), (of_w, stride_w) = (
        (unit * draw.randint(0, 3), k + -k % unit + unit * draw.randint(0, 3)) for _ in range(2)
    )
    rows = max(rows, 17) if draw.random() < 0.8 else rows
    x = rows_in(of_x, stride_x, random(rows, k, dtype=dtype))
    ws = [rows_in(of_w, stride_w, random(n, k, dtype=dtype, scale=k**-0.5)) for _ in range(weights)]
    return x, ws, draw.random() < 0.5


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(48))
def test_dense_of_odd_sizes(seed: int, dtype: torch.dtype, path: Any) -> None:
    x, (w,), biased = drawn(seed, dtype)
    assert_dense(x, w, random(w.shape[0] + 1, dtype=dtype)[1:] if biased else None, path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("offset", [0, 1, 2, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        # Few outputs, whose sums the warps of a CTA share.
        (17, 4096, 1000),
        (32, 1032, 4096),
        (64, 4096, 520),
        (128, 1024, 1024),
        (256, 520, 264),
        (1024, 256, 256),
        # Many, to less and to more than a tile has; and rows of the result of any alignment.
        (20000, 100, 100),
        (33000, 64, 64),
        (33001, 72, 33),
        (40000, 128, 128),
        (17003, 256, 130),
        (9001, 264, 301),
        # A single row, and a single feature.
        (1, 300, 200),
        (300, 1, 77),
        (20000, 77, 1),
    ],
    ids=str,
)
def test_dense_of_tiles(shape: tuple[int, int, int], dtype: torch.dtype, offset: int, path: Any) -> None:
    rows, k, n = shape
    padding = 8 if offset == 0 else offset
    x = rows_in(offset, -(-k // padding) * padding, random(rows, k, dtype=dtype))
    w = rows_in(0, k, random(n, k, dtype=dtype, scale=k**-0.5))
    assert_dense(x, w, random(n, dtype=dtype), path)


@pytest.mark.parametrize("path", PATHS)
def test_dense_of_other_strides(path: Any) -> None:
    """Rows that overlap, or are far apart; columns that are not contiguous are left to cuBLAS."""
    x, w = random(200, 300, dtype=torch.bfloat16), random(100, 300, dtype=torch.bfloat16, scale=0.06)
    assert_dense(x[:1, :75].expand(200, 75), w[:, :75], None, path)
    assert_dense(x[3:4, 5:104], w[::2, 1:100], None, path)
    assert_dense(x.as_strided((150, 99), (2, 1)), w[:, 1:100], None, path)
    for a, b in [(x[:, ::4], w[:, ::4]), (x.T[:200, :100], w[:, :100]), (x[:, :99], w.T[:60, :99])]:
        with torchops.cuda.kernel_path(path):
            y = torchops.dense(a, b)
        assert_accurate(y, torch.sigmoid(F.linear(a, b)), torch.sigmoid(F.linear(a.double(), b.double())))


@pytest.mark.parametrize("activation", ["sigmoid", "silu"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(24))
def test_glu_of_odd_sizes(seed: int, dtype: torch.dtype, path: Any, activation: Any) -> None:
    x, (w, wg), biased = drawn(seed, dtype, weights=2)
    rows, n = x.shape[0], w.shape[0]
    biases = (random(n + 1, dtype=dtype)[1:], random(2 * n, dtype=dtype)[::2]) if biased else (None, None)
    exact = glu_reference(*double(x, w, wg, *biases), activation=activation)
    eager = glu_reference(x, w, wg, *biases, activation=activation)
    poison(rows, n, dtype=dtype)
    with torchops.cuda.kernel_path(path):
        y = torchops.glu(x, w, wg, *biases, activation=activation)
        assert torch.equal(y, torchops.glu(x, w, wg, *biases, activation=activation))
    assert_accurate(y, eager, exact)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(24))
def test_gate_of_odd_sizes(seed: int, dtype: torch.dtype, path: Any) -> None:
    x, (w,), biased = drawn(seed, dtype)
    rows, n = x.shape[0], w.shape[0]
    v = rows_in(seed % 3, n + seed % 5, random(rows, n, dtype=dtype))
    b = random(n + 1, dtype=dtype)[1:] if biased else None
    exact = gate_reference(*double(v, x, w, b))
    eager = gate_reference(v, x, w, b)
    poison(rows, n, dtype=dtype)
    with torchops.cuda.kernel_path(path):
        y = torchops.gate(v, x, w, b)
        torchops.gate_(v, x, w, b)
    assert_accurate(y, eager, exact)
    assert torch.equal(v, y)
    assert v._base is not None
    assert int(v._base.isnan().sum()) == v._base.numel() - v.numel()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("n", [30, 100, 301])
def test_gate_of_its_own_rows(n: int, path: Any) -> None:
    x, w = random(5000, n, dtype=torch.bfloat16), random(n, n, dtype=torch.bfloat16, scale=n**-0.5)
    eager, exact = gate_reference(x, x, w), gate_reference(x.double(), x.double(), w.double())
    with torchops.cuda.kernel_path(path):
        assert_accurate(torchops.gate(x, x, w), eager, exact)
        torchops.gate_(x, x, w)
    assert_accurate(x, eager, exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values(dtype: torch.dtype) -> None:
    x, w = random(100, 50, dtype=dtype), random(60, 50, dtype=dtype)
    x[7, 3], w[5, 49] = float("nan"), float("inf")
    with torchops.cuda.kernel_path("fused"):
        y = torchops.dense(x, w)
    assert bool(y[7].isnan().all())
    expected = torch.sigmoid(F.linear(x, w))
    assert torch.equal(y.isnan(), expected.isnan())
    assert torch.equal(y[:, 5].nan_to_num(), expected[:, 5].nan_to_num())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1001, 101, 99), (64, 2048, 512), (5000, 100, 104)], ids=str)
def test_gradients(shape: tuple[int, int, int], dtype: torch.dtype, path: Any) -> None:
    rows, k, n = shape
    leaves = [random(rows, k, dtype=dtype), random(n, k, dtype=dtype, scale=k**-0.5), random(n, dtype=dtype)]
    leaves = [t.requires_grad_() for t in leaves]
    grad = random(rows, n, dtype=dtype)
    with torchops.cuda.kernel_path(path):
        got = torch.autograd.grad(torchops.dense(*leaves), leaves, grad)
    eager = torch.autograd.grad(torch.sigmoid(F.linear(*leaves)), leaves, grad)
    doubles = [t.detach().double().requires_grad_() for t in leaves]
    exact = torch.autograd.grad(torch.sigmoid(F.linear(*doubles)), doubles, grad.double())
    for ours, theirs, value in zip(got, eager, exact, strict=True):
        assert_accurate(ours, theirs, value)


def kernels(x: Tensor, w: Tensor, path: Any) -> int:
    """How many kernels a call of dense runs."""
    with torchops.cuda.kernel_path(path):
        return cuda_checks.kernels(lambda: torchops.dense(x, w))


def test_product_and_epilogue_are_one_kernel() -> None:
    """Of rows of any alignment, except by cuBLAS."""
    for rows, k, n in [(20000, 100, 100), (128, 512, 1001), (300, 99, 101), (3000, 4001, 4000), (3000, 4002, 4000)]:
        x, w = random(rows, k, dtype=torch.bfloat16)[:, 1:], random(n, k, dtype=torch.bfloat16)[:, 1:]
        assert kernels(x, w, "fused") == 1
        assert kernels(x, w, "cublas") > 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "k", "n"), [(1, 64, 8), (37, 520, 264), (300, 1032, 1000), (5000, 72, 136)])
def test_every_tiling(rows: int, k: int, n: int, dtype: torch.dtype) -> None:
    """Also those that are not predicted to be fastest for such a size; k is also one that no tiling divides."""
    x, w, wg = (random(r, k, dtype=dtype, scale=k**-0.25) for r in (rows, n, n))
    v = random(rows, n, dtype=dtype)
    for columns in (k, k - 2, k - 3):
        a, b, bg = (t[:, :columns].contiguous() for t in (x, w, wg))
        calls: list[tuple[Any, Any, list[Tensor]]] = [
            (torchops.dense, lambda x, w: torch.sigmoid(F.linear(x, w)), [a, b]),
            (torchops.gate, gate_reference, [v, a, b]),
            (torchops.glu, glu_reference, [a, b, bg]),
        ]
        for call, reference, given in calls:
            eager, exact = reference(*given), reference(*double(*given))
            for tiling in range(5):
                with cuda_checks.only_candidate("kSm80", tiling):
                    assert_accurate(call(*given), eager, exact)


def test_gates_of_many_odd_rows() -> None:
    """Whose elements must be loaded one by one."""
    w, wg = random(33, 35, dtype=torch.bfloat16), random(33, 35, dtype=torch.bfloat16)
    for rows in (1000, 32000):
        v, x = random(rows, 33, dtype=torch.bfloat16), random(rows, 35, dtype=torch.bfloat16)
        for gated in (partial(torchops.gate, v, x, w), partial(torchops.glu, x, w, wg)):
            with torchops.cuda.kernel_path("fused"):
                assert cuda_checks.kernels(gated) == 1
        assert_accurate(torchops.gate(v, x, w), gate_reference(v, x, w), gate_reference(*double(v, x, w)))
        assert_accurate(torchops.glu(x, w, wg), glu_reference(x, w, wg), glu_reference(*double(x, w, wg)))

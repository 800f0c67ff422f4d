"""dense and its gradients on CUDA: paths, tile edges, strides, memory, and when the gradients are one pass.

Values, gradients and transforms are tested by the generic suites; sizes here lie around the kernels' switch-overs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cuda_checks import assert_accurate, error, kernel_names, poison, random
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import torchops
from torchops._core import _build_info
from torchops._core.devices import capability

if not torch.cuda.is_available() or not _build_info.cuda_version:
    pytest.skip("needs a GPU and a build with CUDA", allow_module_level=True)

DEVICE = "cuda"
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
PATHS: list[Any] = ["auto", "fused", "cublas"]
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _without_tf32_again() -> Iterator[None]:
    yield
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 1),
        (5, 3, 7),
        (3, 264, 384),
        (130, 520, 72),
        (1000, 100, 100),
        (513, 1032, 264),
        (2049, 128, 128),
        (300, 8, 16),
        (64, 8192, 64),
        (257, 250, 64),
        (4096, 1024, 1024),
        (70000, 128, 32),
        (8, 16, 8),
        (9, 1000, 264),
        (16, 40, 4104),
        (17, 40, 4104),
        (1100, 512, 512),
        (20000, 1000, 136),
        (1536, 768, 256),
        (2000, 1100, 128),
        (5001, 192, 72),
        (9001, 40, 520),
        (10000, 104, 264),
        (5000, 520, 64),
        (2049, 2048, 4104),
        # Each rule of the kernel that keeps its columns of w in shared memory.
        (4099, 1000, 128),
        (17001, 64, 40),
        (9001, 528, 64),
        (8191, 192, 192),
        (11003, 96, 96),
        (5003, 384, 128),
        (8209, 1040, 136),
        (5003, 640, 136),
        (6001, 336, 256),
        (9501, 112, 224),
        (70, 16384, 256),
        # Each width of tiles whose CTAs work in pairs.
        (9001, 184, 328),
        (9001, 208, 520),
        (9001, 248, 520),
        (17001, 264, 392),
        (17001, 312, 328),
        (13001, 376, 264),
        (6001, 264, 136),
        (4100, 2000, 264),
    ],
    ids=str,
)
def test_dense(shape: tuple[int, int, int], dtype: torch.dtype, path: Any) -> None:
    rows, out_features, in_features = shape
    x, w = (
        random(rows, in_features, dtype=dtype),
        random(out_features, in_features, dtype=dtype, scale=in_features**-0.5),
    )
    for b in (random(out_features, dtype=dtype), None):
        exact = torch.sigmoid(F.linear(x.double(), w.double(), None if b is None else b.double()))
        eager = torch.sigmoid(F.linear(x, w, b))
        poison(rows, out_features, dtype=dtype)
        with torchops.cuda.kernel_path(path):
            y = torchops.dense(x, w, b)
            assert torch.equal(y, torchops.dense(x, w, b))
        assert y.is_contiguous()
        assert_accurate(y, eager, exact)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("interface", "tf32"), [("allow_tf32", True), ("fp32_precision", "tf32")])
@pytest.mark.parametrize(
    ("rows", "out_features"), [(1000, 520), (9001, 184), (9001, 248), (17001, 312), (13001, 376)], ids=str
)
def test_dense_in_tf32(rows: int, out_features: int, interface: str, tf32: Any, path: Any) -> None:
    setattr(torch.backends.cuda.matmul, interface, tf32)
    x, w = random(rows, 264, dtype=torch.float32), random(out_features, 264, dtype=torch.float32, scale=0.06)
    b = random(out_features, dtype=torch.float32)
    with torchops.cuda.kernel_path(path):
        y = torchops.dense(x, w, b)
    assert_accurate(y, torch.sigmoid(F.linear(x, w, b)), torch.sigmoid(F.linear(x.double(), w.double(), b.double())))


DENSE_VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "sliced": lambda t: t[:, :256],
    "offset_1": lambda t: t[:, 1:257],
    "offset_8": lambda t: t[:, 8:264],
    "row_step": lambda t: t[::2, 100:356],
    "column_step": lambda t: t[:, ::2],
    "expanded": lambda t: t[:1, :256].expand(len(t), 256),
    "odd_columns": lambda t: t[:, :250],
    "vector": lambda t: t[0, :256],
}


@pytest.mark.parametrize("path", ["fused", "cublas"])
@pytest.mark.parametrize("rows", [300, 17001])
@pytest.mark.parametrize("view", DENSE_VIEWS)
def test_dense_of_views(view: str, rows: int, path: Any) -> None:
    x = DENSE_VIEWS[view](random(rows, 512, dtype=torch.bfloat16))
    w = random(128, 256, dtype=torch.bfloat16, scale=0.06)[:, : x.shape[-1]]
    b = random(256, dtype=torch.bfloat16)[::2]
    with torchops.cuda.kernel_path(path):
        y = torchops.dense(x, w, b)
    assert_accurate(y, torch.sigmoid(F.linear(x, w, b)), torch.sigmoid(F.linear(x.double(), w.double(), b.double())))


@pytest.mark.parametrize("path", ["fused", "cublas"])
@pytest.mark.parametrize("rows", [100, 20000])
def test_dense_of_special_values(rows: int, path: Any) -> None:
    w = random(64, 64, dtype=torch.bfloat16)
    w[5, 5] = float("nan")
    with torchops.cuda.kernel_path(path):
        y = torchops.dense(random(rows, 64, dtype=torch.bfloat16), w)
        tail = torchops.dense(torch.full((1, 8), -8.0, device=DEVICE, dtype=w.dtype), torch.eye(8, device=DEVICE).to(w))
    assert bool(y[:, 5].isnan().all())
    assert int(y.isnan().sum()) == rows
    expected = torch.sigmoid(torch.full_like(tail, -8.0).double())
    torch.testing.assert_close(tail.double(), expected, rtol=5e-3, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 1), (7, 5), (4097, 264), (33, 100, 17), (2, 100000), (100003, 8), (257,)], ids=str
)
def test_dense_backward_pass(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    grad, y = random(*shape, dtype=dtype), torch.rand(shape, device=DEVICE, dtype=dtype)
    exact = grad.double() * y.double() * (1 - y.double())
    poison(*shape, dtype=dtype)
    dz, db = torch.ops.myops._dense_backward(grad, y)
    again = torch.ops.myops._dense_backward(grad, y)
    assert torch.equal(dz, again[0])
    assert torch.equal(db, again[1])
    alone, none = torch.ops.myops._dense_backward(grad, y, [True, False])
    assert torch.equal(dz, alone)
    assert none.shape == (0,)
    assert error(dz, exact) <= 2 * torch.finfo(dtype).eps
    total = exact.reshape(-1, shape[-1])
    allowed = 4 * torch.finfo(dtype).eps * (total.abs().sum(0) + 1e-30)
    assert bool(((db.double() - total.sum(0)).abs() <= allowed).all())


def gradients(x: Tensor, w: Tensor, b: Tensor | None, grad: Tensor, **kwargs: Any) -> tuple[Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in (x, w, b) if t is not None]
    return torch.autograd.grad(torchops.dense(*leaves), leaves, grad, **kwargs)


def assert_accurate_gradients(x: Tensor, w: Tensor, b: Tensor | None, grad: Tensor) -> None:
    """As accurate as the products of a dz in memory, laid out like them, and the same bits in another call."""
    y = torchops.dense(x, w, b)
    dz, db = torch.ops.myops._dense_backward(grad, y)
    parts = dz @ w, dz.flatten(0, -2).T @ x.flatten(0, -2), db
    poison(*x.shape, dtype=x.dtype)
    poison(*y.shape, dtype=y.dtype)
    got, again = gradients(x, w, b, grad), gradients(x, w, b, grad)
    assert all(torch.equal(g, a) for g, a in zip(got, again, strict=True))
    exact_dz = (grad.double() * y.double() * (1 - y.double())).flatten(0, -2)
    exact = exact_dz @ w.double(), exact_dz.T @ x.double().flatten(0, -2), exact_dz.sum(0)
    for one, part, value in zip(got, parts[: len(got)], exact[: len(got)], strict=True):
        assert one.shape == part.shape
        assert one.stride() == part.stride()
        assert_accurate(one, part, value.view(one.shape))


def takes_one_pass(x: Tensor, w: Tensor, b: Tensor | None, grad: Tensor, *, path: Any = "auto", **kwargs: Any) -> bool:
    leaves = [t.detach().requires_grad_() for t in (x, w, b) if t is not None]
    with torchops.cuda.kernel_path(path):
        y = torchops.dense(*leaves)
    names = kernel_names(lambda: torch.autograd.grad(y, leaves, grad, retain_graph=True, **kwargs))
    return any(re.search("(OnePass|InputGradients)Kernel", name) for name in names)


HAS_ONE_PASS = capability(0) == (9, 0) and "9.0a" in _build_info.gemm_architectures
needs_one_pass = pytest.mark.skipif(not HAS_ONE_PASS, reason="needs compute capability 9.0 and its kernels")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        (1, 8, 8),
        (63, 128, 128),
        (64, 64, 64),
        (3, 5, 120, 72),
        (1000, 40, 128),
        (8449, 128, 128),
        (30000, 104, 96),
        (4097, 256, 128),
        (4097, 128, 256),
        (5003, 192, 192),
        (2000, 136, 160),
        (9000, 136, 8),
        (9000, 8, 200),
    ],
    ids=str,
)
def test_dense_gradients_in_one_pass(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    *rows, k, n = shape
    x, grad = random(*rows, k, dtype=dtype), random(*rows, n, dtype=dtype)
    w, b = random(n, k, dtype=dtype, scale=k**-0.5), random(n, dtype=dtype)
    assert_accurate_gradients(x, w, b, grad)


@needs_one_pass
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        (1, 256, 136),
        (63, 256, 264),
        (7, 9, 8, 264),
        (129, 136, 1000),
        (1000, 40, 328),
        (8449, 136, 1024),
        (17000, 200, 200),
        (33000, 128, 320),
    ],
    ids=str,
)
def test_dense_gradients_with_dz(shape: tuple[int, ...], dtype: torch.dtype, has_bias: bool) -> None:
    *rows, k, n = shape
    x, grad = random(*rows, k, dtype=dtype), random(*rows, n, dtype=dtype)
    w, b = random(n, k, dtype=dtype, scale=k**-0.5), random(n, dtype=dtype) if has_bias else None
    with torchops.cuda.kernel_path("fused"):
        assert_accurate_gradients(x, w, b, grad)
        names = kernel_names(lambda: gradients(x, w, b, grad))
    assert sum("InputGradientsKernel" in name for name in names) == 1


@needs_one_pass
@pytest.mark.parametrize(
    ("m", "k", "n", "path", "expected"),
    [
        (1000, 128, 512, "auto", True),
        (1000, 128, 520, "auto", False),
        (1000, 128, 520, "fused", True),
        (9000, 128, 520, "auto", True),
        (9000, 128, 520, "portable", False),
        (9000, 264, 520, "fused", False),
    ],
)
@pytest.mark.parametrize("view", ["contiguous", "unaligned", "expanded"])
def test_when_dx_comes_with_dz(view: str, m: int, k: int, n: int, path: Any, expected: bool) -> None:
    x, w = random(m, k + 1, dtype=torch.bfloat16), random(n, k, dtype=torch.bfloat16, scale=k**-0.5)
    x = x[:, :k].contiguous() if view == "contiguous" else x[:, 1:] if view == "unaligned" else x[:1, :k].expand(m, k)
    b, grad = random(n, dtype=torch.bfloat16), random(m, n, dtype=torch.bfloat16)
    y = torchops.dense(x, w, b)
    with torchops.cuda.kernel_path(path):
        call = partial(torch.ops.myops._dense_gradients, grad, y, x, w, [True, True, True])
        assert any("InputGradientsKernel" in name for name in kernel_names(call)) == expected
        got = call()
    with torchops.cuda.kernel_path("cublas"):
        parts = call()
    for one, part in zip(got, parts, strict=True):
        assert error(one, part.double()) < 4e-3


@needs_one_pass
def test_when_dense_gradients_are_one_pass() -> None:
    x, w = random(3000, 128, dtype=torch.bfloat16), random(64, 128, dtype=torch.bfloat16, scale=0.09)
    b, grad = random(64, dtype=torch.bfloat16), random(3000, 64, dtype=torch.bfloat16)
    assert takes_one_pass(x, w, b, grad)
    assert takes_one_pass(x, w, None, grad)
    assert takes_one_pass(x, w, b, grad[:1].expand(3000, 64))
    assert takes_one_pass(x, w.repeat(8, 1), b.repeat(8), grad.repeat(1, 8))
    assert not takes_one_pass(x.repeat(1, 3), w.repeat(9, 3), b.repeat(9), grad.repeat(1, 9))
    assert not takes_one_pass(x, w[:63], b[:63], grad[:, :63])
    assert not takes_one_pass(x.float(), w.float(), b.float(), grad.float())
    assert not takes_one_pass(x, w, b, grad, path="cublas")


@pytest.mark.parametrize("op", ["dense_dw", "dense_all", "square_matmul", "square_matmul_t"])
@pytest.mark.parametrize("shape", [(16897, 304, 784), (16897, 264, 224), (17089, 256, 1160), (2049, 200, 136)], ids=str)
def test_weight_gradients_have_all_rows(op: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of integers, the sums are exact, so a row that is left out shows, as in products of cuBLAS."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False)
    m, k, n = shape
    if op.startswith("square_matmul"):
        k = n
    integers = partial(torch.randint, -2, 3, device=DEVICE)
    x, grad = integers((m, k)).bfloat16(), integers((m, n)).bfloat16()
    x[-1], grad[-1] = 2, 2
    w = integers((n, k)).bfloat16().requires_grad_()
    if op.startswith("square_matmul"):
        got = torch.autograd.grad(torch.ops.myops.square_matmul(x, w, transpose_b=op == "square_matmul_t"), w, grad)[0]
        exact = grad.mT.double() @ x.double() if op == "square_matmul_t" else x.mT.double() @ grad.double()
    else:
        y = torch.full_like(grad, 0.5)
        output_mask = [op == "dense_all", True, True]
        got = torch.ops.myops._dense_gradients(4 * grad, y, x, w.detach(), output_mask)[1]
        exact = grad.mT.double() @ x.double()
    assert torch.equal(got, exact.bfloat16())


DENSE_COTANGENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded": lambda t: t[:1].expand_as(t),
    "transposed": lambda t: t.T.contiguous().T,
    "row_step": lambda t: t.repeat_interleave(2, 0)[::2],
    "negative": lambda t: torch._neg_view(-t),
}


@pytest.mark.parametrize("view", DENSE_COTANGENTS)
def test_dense_gradients_of_views(view: str) -> None:
    x, w = random(3000, 256, dtype=torch.bfloat16)[:, 64:192], random(64, 128, dtype=torch.bfloat16, scale=0.09)
    grad = DENSE_COTANGENTS[view](random(3000, 64, dtype=torch.bfloat16))
    expected = gradients(x.contiguous(), w, None, grad.clone(memory_format=torch.contiguous_format).resolve_neg())
    for got, value in zip(gradients(x, w, None, grad), expected, strict=True):
        assert error(got, value.double()) < 4e-3


@needs_one_pass
def test_dense_gradients_are_counted_and_batched() -> None:
    x, w = random(3000, 128, dtype=torch.bfloat16), random(64, 128, dtype=torch.bfloat16, scale=0.09)
    grad = random(3000, 64, dtype=torch.bfloat16)
    with FlopCounterMode(display=False) as counter:
        gradients(x, w, None, grad)
    assert counter.get_total_flops() == 3 * 2 * 3000 * 128 * 64
    expected = gradients(x, w, None, grad)
    batched = gradients(x, w, None, grad.expand(2, 3000, 64), is_grads_batched=True)
    for both, value in zip(batched, expected, strict=True):
        assert error(both[1], value.double()) < 4e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("features", [(64, 64), (520, 264), (33, 17)], ids=str)
def test_dense_without_a_bias_rounds_dz_once(features: tuple[int, int], dtype: torch.dtype) -> None:
    """And so do its gradients if not all of them are wanted."""
    k, n = features
    x, w, grad = random(4096, k, dtype=dtype), random(n, k, dtype=dtype, scale=k**-0.5), random(4096, n, dtype=dtype)
    y = torchops.dense(x, w)
    dz = (grad.double() * y.double() * (1 - y.double())).to(dtype)
    for leaf, product in ((x, lambda: dz @ w), (w, lambda: dz.T @ x)):
        leaf.requires_grad_()
        (got,) = torch.autograd.grad(torchops.dense(x, w), leaf, grad)
        leaf.requires_grad = False
        assert error(got.double(), product().double()) <= torch.finfo(dtype).eps / 8


def test_dense_bias_gradient_has_no_dz() -> None:
    y, grad = torch.rand(1 << 17, 128, device=DEVICE), random(1 << 17, 128, dtype=torch.float32)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    _, db = torch.ops.myops._dense_backward(grad, y, [False, True])
    assert torch.cuda.max_memory_allocated() - before < y.nbytes // 8
    torch.testing.assert_close(db, torch.ops.myops._dense_backward(grad, y)[1], rtol=1e-5, atol=1e-4)


@needs_one_pass
def test_dense_gradients_have_no_dz() -> None:
    x, w = random(1 << 17, 128, dtype=torch.bfloat16), random(128, 128, dtype=torch.bfloat16, scale=0.09)
    y, grad = torchops.dense(x.requires_grad_(), w.requires_grad_()), random(1 << 17, 128, dtype=torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(y, (x, w), grad)
    partial = 4 * torch.cuda.get_device_properties(0).multi_processor_count * (128 * 128 + 128)
    assert torch.cuda.max_memory_allocated() - before < x.nbytes + partial + MIB

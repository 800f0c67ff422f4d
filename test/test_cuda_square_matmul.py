"""square_matmul_ on CUDA: tile edges, memory, kernels that wait for others.

Values, gradients and transforms are tested by the generic suites; sizes here lie around the kernels' switch-overs.
"""

from __future__ import annotations

import pytest
import torch
from cuda_checks import assert_accurate, error, random
from test_profiler import kernels

import torchops
from torchops._core import _build_info
from torchops._core.devices import capability

if not torch.cuda.is_available() or not _build_info.cuda_version:
    pytest.skip("needs a GPU and a build with CUDA", allow_module_level=True)

DEVICE = "cuda"
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
MIB = 1 << 20

SQUARES = [(3, 7), (1, 64), (1000, 128), (129, 136), (777, 256), (4097, 264), (3000, 512), (300, 1024), (1001, 2048)]
SQUARES += [(20001, 192), (30000, 256), (700, 384), (600, 1000)]
LARGE_SQUARES = [(333, 6136), (333, 6144), (257, 8192), (200, 8448), (200, 8456), (130, 16384)]


@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [(d, s) for d in DTYPES for s in SQUARES] + [(torch.bfloat16, s) for s in LARGE_SQUARES],
    ids=str,
)
def test_square_matmul_(dtype: torch.dtype, shape: tuple[int, int], transpose_b: bool) -> None:
    rows, n = shape
    a, b = random(rows, n, dtype=dtype), random(n, n, dtype=dtype, scale=n**-0.5)
    factor = b.T if transpose_b else b
    got, again = a.clone(), a.clone()
    torchops.square_matmul_(got, b, transpose_b=transpose_b)
    torchops.square_matmul_(again, b, transpose_b=transpose_b)
    assert torch.equal(got, again)
    assert_accurate(got, a @ factor, a.double() @ factor.double())


@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "shape", [(40, 512, 512), (9, 1024, 1024), (5, 200, 1000), (3, 130, 400), (2, 100, 1024)], ids=str
)
def test_batches_share_both_factors(shape: tuple[int, int, int], dtype: torch.dtype, transpose_b: bool) -> None:
    """By clusters of 2 x 4 tiles where the rows have two tiles and the columns four, whole or not."""
    batch, rows, n = shape
    a, b = random(batch, rows, n, dtype=dtype), random(batch, n, n, dtype=dtype, scale=n**-0.5)
    factor = b.mT if transpose_b else b
    expected, exact = a @ factor, a.double() @ factor.double()
    with torchops.cuda.kernel_path("fused"):
        again = torchops.square_matmul_(a.clone(), b, transpose_b=transpose_b)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torchops.square_matmul_(a, b, transpose_b=transpose_b)
        assert torch.cuda.max_memory_allocated() - before < MIB
    assert torch.equal(a, again)
    assert_accurate(a, expected, exact)


@pytest.mark.parametrize("n", [64, 192, 256, 320, 512, 1024, 2048, 4096, 6144, 8192])
def test_square_matmul_has_no_second_buffer(n: int) -> None:
    """But few rows may be copied."""
    a, b = random(8192, n, dtype=torch.bfloat16), random(n, n, dtype=torch.bfloat16, scale=n**-0.5)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torchops.square_matmul_(a, b)
    assert torch.cuda.max_memory_allocated() - before < MIB


@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_square_matmul_packs_a_part_of_a_batch(dtype: torch.dtype, transpose_b: bool) -> None:
    """b has gaps in its rows and columns, and is copied by parts: the last one is smaller."""
    a, b = random(100, 64, 512, dtype=dtype), random(100, 512, 512, 2, dtype=dtype, scale=512**-0.5)[..., 0]
    factor = b.mT if transpose_b else b
    expected, exact = a @ factor, a.double() @ factor.double()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torchops.square_matmul_(a, b, transpose_b=transpose_b)
    assert torch.cuda.max_memory_allocated() - before < 20 * MIB
    assert_accurate(a, expected, exact)


@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "rows apart", "interleaved", "columns first", "gaps"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(70, 5, 96), (11, 1024, 1024), (3, 2300, 2048), (1, 40, 64)], ids=str)
def test_batches_by_panels(shape: tuple[int, int, int], dtype: torch.dtype, layout: str, transpose_b: bool) -> None:
    """Panels hold several matrices, one, or a part of one; the last panel is smaller."""
    batch, rows, n = shape
    rounds_alike = layout != "columns first"  # eager mode's result has rows first, and another kernel
    a = {
        "contiguous": lambda: random(batch, rows, n, dtype=dtype),
        "rows apart": lambda: random(batch, rows, n + 8, dtype=dtype)[..., :n],
        "interleaved": lambda: random(rows, batch, n, dtype=dtype).transpose(0, 1),
        "columns first": lambda: random(batch, n, rows, dtype=dtype).mT,
        "gaps": lambda: random(batch, rows, n, 2, dtype=dtype)[..., 0],
    }[layout]()
    b = random(batch, n, n, dtype=dtype, scale=n**-0.5)
    factor = b.mT if transpose_b else b
    expected, exact = a @ factor, a.double() @ factor.double()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torchops.cuda.kernel_path("portable"):
        torchops.square_matmul_(a, b, transpose_b=transpose_b)
    assert torch.cuda.max_memory_allocated() - before <= 33 * MIB
    if rounds_alike:
        assert_accurate(a, expected, exact)
    else:
        assert error(a, exact) <= 1.6 * error(expected, exact) + torch.finfo(torch.float32).eps


@pytest.mark.parametrize("n", [512, 2048, 8192, 16384])
def test_square_matmul_beside_itself_and_others(n: int) -> None:
    """Three of them at different priorities while other kernels fill the GPU: none waits for ever, none goes wrong."""
    b = random(n, n, dtype=torch.bfloat16, scale=n**-0.5)
    sources = [random(max(256, (1 << 24) // n), n, dtype=b.dtype) for _ in range(3)]
    expected = [torchops.square_matmul_(s.clone(), b) for s in sources]
    streams, other = [torch.cuda.Stream(priority=p) for p in (0, -1, -3)], torch.cuda.Stream()
    filling = torch.randn(1 << 26, device=DEVICE)
    for _ in range(3):
        got = [s.clone() for s in sources]
        torch.cuda.synchronize()
        with torch.cuda.stream(other):
            for _ in range(4):
                filling.sin_()
        for stream, a in zip(streams, got, strict=True):
            with torch.cuda.stream(stream):
                torchops.square_matmul_(a, b)
        torch.cuda.synchronize()
        assert all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))


def test_square_matmul_10000_times() -> None:
    """A permutation moves elements without rounding, so 5000 times there and back leaves every bit as it was."""
    permutation = torch.eye(1024, device=DEVICE, dtype=torch.bfloat16)[torch.randperm(1024, device=DEVICE)]
    start = random(512, 1024, dtype=torch.bfloat16)
    a = start.clone()
    for i in range(10_000):
        torchops.square_matmul_(a, permutation, transpose_b=bool(i & 1))
    assert torch.equal(a, start)


@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(128, 256, 256), (3, 200, 72), (150, 40, 8), (200, 1, 64), (2, 300, 2048)], ids=str)
def test_cuda_products_of_a_batch_are_one_kernel(
    shape: tuple[int, int, int], dtype: torch.dtype, transpose_b: bool
) -> None:
    """No memset precedes them where there are tiles for all multiprocessors."""
    batch, m, n = shape
    a, b = random(batch, m, n, dtype=dtype), random(batch, n, n, dtype=dtype, scale=n**-0.5)
    want = a @ (b.mT if transpose_b else b)
    exact = a.double() @ (b.mT if transpose_b else b).double()
    assert_accurate(torchops.square_matmul(a, b, transpose_b=transpose_b), want, exact)
    launched = kernels(lambda: torchops.square_matmul(a, b, transpose_b=transpose_b))
    if capability(0) >= (9, 0) and batch > 100:
        assert len(launched) == 1
    # The next product of torch has its workspace again.
    assert torch.equal(a @ (b.mT if transpose_b else b), want)


def test_cuda_float16_products_of_a_batch_have_float32_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_fp16_accumulation", True)
    a, b = random(150, 256, 1024, dtype=torch.float16), random(150, 1024, 1024, dtype=torch.float16)
    exact = a.double() @ b.double()
    assert error(torchops.square_matmul(a, b), exact) < 4e-4

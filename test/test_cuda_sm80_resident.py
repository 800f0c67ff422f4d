"""The kernel for many rows of few 16-bit features, on every GPU from compute capability 8.0 on: sizes that don't divide
into tiles, steps and columns, strides, operands that overlap, and when it can run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from cuda_checks import (
    assert_accurate,
    assert_same_bits,
    double,
    gradients,
    kernel_names,
    only_candidate,
    poison,
    random,
)
from product_samples import gate_reference, glu_reference
from test_cuda_sm80 import assert_dense, rows_in
from torch import Tensor

import torchops
from torchops._core import _build_info

if not torch.cuda.is_available() or not _build_info.cuda_version:
    pytest.skip("needs a GPU and a build with CUDA", allow_module_level=True)

DTYPES = [torch.bfloat16, torch.float16]
ACTIVATIONS: list[Any] = ["sigmoid", "silu"]
# Rows, features in and out. The steps have 64 columns; a warp has 16 or 64 rows, and 32 or 64 columns at a time.
SHAPES = [
    *((65536, 64, 64), (250001, 128, 8), (100003, 200, 104), (66000, 8, 128)),
    *((131073, 75, 72), (36001, 256, 256), (40000, 328, 264), (33000, 512, 512), (9001, 136, 1032)),
]


@pytest.fixture(autouse=True)
def _portable() -> Iterator[None]:
    torch.manual_seed(0)
    with torchops.cuda.kernel_path("portable"):
        yield


def is_resident(call: Callable[[], object]) -> bool:
    return any("sm80_resident_kernel" in name for name in kernel_names(call))


def resident(w_rows: int, gate: bool = False) -> AbstractContextManager[None]:
    """With 64 rows at a time where there are weights for it, which a gate has no kernel for, otherwise with 16."""
    return only_candidate("kSm80Resident", 0 if w_rows > 128 and not gate else 1)


def spread(k: int) -> int:
    """How far apart rows of k elements are, so that all are aligned."""
    return k + 8 + -k % 8


def weights(n: int, k: int, dtype: torch.dtype, biased: bool) -> tuple[Tensor, Tensor | None]:
    """Rows that are further apart than their length, and a bias of no alignment."""
    w = rows_in(8, spread(k), random(n, k, dtype=dtype, scale=k**-0.5))
    return w, random(n + 1, dtype=dtype)[1:] if biased else None


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dense(shape: tuple[int, int, int], dtype: torch.dtype, biased: bool) -> None:
    rows, k, n = shape
    x, (w, b) = rows_in(16, spread(k) + 16, random(rows, k, dtype=dtype)), weights(n, k, dtype, biased)
    with resident(n):
        assert_dense(x, w, b, "portable")
        assert is_resident(lambda: torchops.dense(x, w, b))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_glu(shape: tuple[int, int, int], dtype: torch.dtype, biased: bool, activation: Any) -> None:
    rows, k, n = shape
    x = rows_in(16, spread(k) + 16, random(rows, k, dtype=dtype))
    (w, b), (wg, bg) = weights(n, k, dtype, biased), weights(n, k, dtype, biased)
    exact = glu_reference(*double(x, w, wg, b, bg), activation=activation)
    poison(rows, n, dtype=dtype)
    with resident(2 * n):
        y = torchops.glu(x, w, wg, b, bg, activation=activation)
        assert is_resident(lambda: torchops.glu(x, w, wg, b, bg, activation=activation))
    assert_accurate(y, glu_reference(x, w, wg, b, bg, activation=activation), exact)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gate(shape: tuple[int, int, int], dtype: torch.dtype, biased: bool) -> None:
    rows, k, n = shape
    x, (w, b) = rows_in(16, spread(k), random(rows, k, dtype=dtype)), weights(n, k, dtype, biased)
    v = rows_in(8, n + 8, random(rows, n, dtype=dtype))
    eager, exact = gate_reference(v, x, w, b), gate_reference(*double(v, x, w, b))
    poison(rows, n, dtype=dtype)
    with resident(n, gate=True):
        y = torchops.gate(v, x, w, b)
        assert_accurate(y, eager, exact)
        assert is_resident(lambda: torchops.gate(v, x, w, b))
        torchops.gate_(v, x, w, b)
    assert torch.equal(v, y)
    assert v._base is not None
    assert int(v._base.isnan().sum()) == v._base.numel() - v.numel()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_of_glu(shape: tuple[int, int, int], dtype: torch.dtype, activation: Any) -> None:
    rows, k, n = shape
    x = rows_in(16, spread(k), random(rows, k, dtype=dtype))
    packed = rows_in(8, spread(k), random(2 * n, k, dtype=dtype, scale=k**-0.5))
    biases = random(2 * n, dtype=dtype)
    inputs, grad = [x, *packed.chunk(2), *biases.chunk(2)], random(rows, n, dtype=dtype)

    glu, reference = (partial(function, activation=activation) for function in (torchops.glu, glu_reference))
    poison(rows, 2 * n, dtype=dtype)
    with resident(2 * n):
        got = gradients(glu, inputs, grad)
        names = kernel_names(lambda: gradients(glu, inputs, grad))
    eager = gradients(reference, inputs, grad)
    exact = gradients(reference, double(*inputs), grad.double())
    for ours, theirs, value in zip(got, eager, exact, strict=True):
        assert_accurate(ours, theirs, value)
    assert sum("sm80_resident" in name for name in names) == 2, names


def test_strides() -> None:
    """Equal rows, of x or of w, rows that overlap, and rows that are far apart."""
    x, w = random(40000, 264, dtype=torch.bfloat16), random(128, 128, dtype=torch.bfloat16, scale=0.1)
    for strides in ((0, 1), (8, 1), (136, 1)):
        rows = x.as_strided((70000, 128), strides)
        with resident(128):
            assert_dense(rows, w, None, "portable")
            assert_dense(rows, w[:1].expand(128, 128), None, "portable")
            assert is_resident(partial(torchops.dense, rows, w))


@pytest.mark.parametrize("n", [8, 32, 40, 128])
def test_gate_of_its_own_rows(n: int) -> None:
    x, w = random(50001, n, dtype=torch.bfloat16), random(n, n, dtype=torch.bfloat16, scale=n**-0.5)
    eager, exact = gate_reference(x, x, w), gate_reference(x.double(), x.double(), w.double())
    with resident(n, gate=True):
        assert_accurate(torchops.gate(x, x, w), eager, exact)
        torchops.gate_(x, x, w)
    assert_accurate(x, eager, exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values(dtype: torch.dtype) -> None:
    """They stay in their rows and columns. What lies beyond the operands, here infinity, is not read."""
    x, w = (torch.full((rows, 80), float("inf"), device="cuda", dtype=dtype)[:, :72] for rows in (120001, 72))
    x.copy_(random(120001, 72, dtype=dtype))
    w.copy_(random(72, 72, dtype=dtype))
    x[120000, 3], w[5, 71] = float("nan"), float("inf")
    expected = torch.sigmoid(x @ w.T)
    with resident(72):
        y = torchops.dense(x, w)
        assert is_resident(lambda: torchops.dense(x, w))
    assert torch.equal(y.isnan(), expected.isnan())
    assert bool(y[120000].isnan().all())
    assert torch.equal(y[:, 5].nan_to_num(), expected[:, 5].nan_to_num())


def test_same_bits() -> None:
    """Of all calls, of both numbers of rows at a time, and of tiles whose warps don't share sums."""
    x, w = random(70001, 136, dtype=torch.bfloat16), random(200, 136, dtype=torch.bfloat16, scale=0.1)
    wg = random(200, 136, dtype=torch.bfloat16, scale=0.1)

    def calls() -> list[Tensor]:
        return [torchops.dense(x, w), torchops.glu(x, w, wg)]

    results = []
    for way, tiling in (("kSm80Resident", 0), ("kSm80Resident", 1), ("kSm80", 1)):
        with only_candidate(way, tiling):
            assert_same_bits(calls, times=20)
            results.append(calls())
            assert is_resident(calls) == (way == "kSm80Resident")
    for others in results[1:]:
        assert all(map(torch.equal, results[0], others))


def test_when_it_can_run() -> None:
    """Not with rows that are not aligned to 16 bytes, or where the columns of the result leave multiprocessors idle."""
    x, w = random(70001, 520, dtype=torch.bfloat16), random(128, 520, dtype=torch.bfloat16)
    columns = 128 * (torch.cuda.get_device_properties("cuda").multi_processor_count // 2 + 1)
    wide = random(columns, 8, dtype=torch.bfloat16)
    with only_candidate("kSm80Resident", 1):
        assert is_resident(lambda: torchops.dense(x[:, :512], w[:, :512]))
        assert is_resident(lambda: torchops.dense(x[:, :61], w[:, :61]))
        for a, b in [(x[:, 4:68], w[:, :64]), (x[:, :64], w[:126, :64]), (x[:5000, :8], wide)]:
            assert not is_resident(partial(torchops.dense, a, b))
        with torchops.cuda.kernel_path("auto"):
            # Equal rows are none that Hopper's kernels could read.
            assert is_resident(lambda: torchops.dense(x[:1, :512].expand(70001, 512), w[:, :512]))
        with torchops.cuda.kernel_path("cublas"):
            assert not is_resident(lambda: torchops.dense(x[:, :512], w[:, :512]))

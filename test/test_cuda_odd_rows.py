"""Gates on CUDA whose rows are no whole pieces of 16 bytes: by copies whose rows are, or in groups of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from cuda_checks import assert_accurate, double, kernel_names, kernels, memory_of, poisoned_memory, random
from product_samples import gate_reference, glu_reference
from torch import Tensor

import torchops
from torchops._core import _build_info

if not torch.cuda.is_available() or not _build_info.cuda_version:
    pytest.skip("needs a GPU and a build with CUDA", allow_module_level=True)

# Features in and out.
SIZES = [
    *[(9, 33), (7, 129), (129, 127), (100, 128), (128, 100), (128, 127), (65, 63)],
    *[(130, 257), (197, 64), (195, 66), (390, 386), (1001, 33)],
]
LEAST_WORK = 1 << 28


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    with poisoned_memory():
        yield


def _derived(function: Callable[..., Tensor], arguments: list[Any], grad: Tensor) -> tuple[Tensor, ...]:
    """The result and all gradients."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in arguments]
    y = function(*leaves)
    found = torch.autograd.grad(y, [t for t in leaves if t is not None], grad.to(y.dtype))
    return (y.detach(), *found)


def _assert_close(one: Tensor, other: Tensor, exact: Tensor) -> None:
    if one.element_size() == 2:
        assert_accurate(one, other, exact)
    else:  # eager mode in float64 is `exact`, and sums of few columns may cancel
        limit = {torch.float32: 1e-4, torch.float64: 1e-12}[one.dtype]
        torch.testing.assert_close(one.double(), exact, rtol=limit, atol=limit * float(exact.abs().max()))


def _assert_as_eager(dtype: torch.dtype, rows: int, k: int, n: int, *, biased: bool, gap: int = 0) -> None:
    x = random(rows, k + gap, dtype=dtype)[:, :k]
    w, wg = (random(n, k, dtype=dtype, scale=k**-0.5) for _ in range(2))
    b, bg = (random(n, dtype=dtype) if biased else None for _ in range(2))
    v, grad = random(rows, n + gap, dtype=dtype)[:, gap:], random(n, rows, dtype=dtype).T
    cases: list[tuple[Callable[..., Tensor], Callable[..., Tensor], list[Any]]] = [
        (torchops.gate, gate_reference, [v, x, w, b]),
        (
            partial(torchops.glu, activation="silu"),
            partial(glu_reference, activation="silu"),
            [x, w, wg, b, bg],
        ),
    ]
    for ours, eager, arguments in cases:
        got, theirs = _derived(ours, arguments, grad), _derived(eager, arguments, grad)
        exact = _derived(eager, list(double(*arguments)), grad)
        for one, other, value in zip(got, theirs, exact, strict=True):
            assert one.is_contiguous()
            _assert_close(one, other, value)
    target = v.clone()
    torchops.gate_(target, x, w, b)
    _assert_close(target, gate_reference(v, x, w, b), gate_reference(*double(v, x, w, b)))


@pytest.mark.parametrize("many", [True, False])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_values_and_gradients(sizes: tuple[int, int], dtype: torch.dtype, biased: bool, many: bool) -> None:
    k, n = sizes
    rows = -(-LEAST_WORK // (k * n)) if many else LEAST_WORK // (k * n) // 2
    _assert_as_eager(dtype, rows, k, n, biased=biased, gap=k % 3)


@pytest.mark.parametrize("rows", [5, 8, 4095])
@pytest.mark.parametrize("n", [1, 3, 33, 127, 255, 257, 301])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_groups_of_rows(dtype: torch.dtype, n: int, rows: int) -> None:
    """Rows without gaps, of which some together are whole pieces, by cuBLAS and a pass."""
    with torchops.cuda.kernel_path("cublas"):
        _assert_as_eager(dtype, rows, 16, n, biased=True)


@pytest.mark.parametrize("aligned", [0, 1])
def test_unaligned_views_of_whole_vectors(aligned: int) -> None:
    """The features are multiples of eight, but rows begin anywhere."""
    rows, k, n = LEAST_WORK // (64 * 72) + 3, 64, 72
    v, x = random(rows, n + 1, dtype=torch.bfloat16)[:, 1:], random(rows, k + 1 - aligned, dtype=torch.bfloat16)
    x = x[:, 1 - aligned :]
    w, grad = random(n, k, dtype=torch.bfloat16, scale=0.125), random(rows, n, dtype=torch.bfloat16)
    for one, other, exact in zip(
        _derived(torchops.gate, [v, x, w], grad),
        _derived(gate_reference, [v, x, w], grad),
        _derived(gate_reference, double(v, x, w), grad),
        strict=True,
    ):
        assert_accurate(one, other, exact)


def test_columns_in_place() -> None:
    """x has contiguous columns, and v rows of two matrices."""
    k, n = 129, 64
    rows = (LEAST_WORK // (k * n) // 2 + 1) * 2
    x, w = random(k, rows, dtype=torch.bfloat16).T, random(n, k, dtype=torch.bfloat16, scale=0.1)
    v = random(2, rows // 2, n, dtype=torch.bfloat16).transpose(0, 1)
    inputs = x.unflatten(0, (-1, 2))
    expected, exact = gate_reference(v, inputs, w), gate_reference(*double(v, inputs, w))
    assert_accurate(torchops.gate_(v.clone(memory_format=torch.preserve_format), inputs, w), expected, exact)
    assert_accurate(torchops.gate_(v, inputs, w), expected, exact)


@pytest.mark.parametrize("output_mask", [(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (1, 1, 0, 1)])
def test_only_what_is_asked_for(output_mask: tuple[int, ...]) -> None:
    k, n = 35, 33
    rows = LEAST_WORK // (k * n) + 1
    v, x, grad = (random(rows, size, dtype=torch.bfloat16) for size in (n, k, n))
    w, b = random(n, k, dtype=torch.bfloat16, scale=0.2), random(n, dtype=torch.bfloat16)
    got = torch.ops.myops._gate_backward(grad, v, x, w, b, [bool(m) for m in output_mask])
    for one, like, asked in zip(got, (v, x, w, b), output_mask, strict=True):
        assert one.numel() == (like.numel() if asked else 0)


@pytest.mark.parametrize(("k", "n"), [(36, 35), (40, 40), (64, 112), (128, 120), (136, 72), (129, 33)])
def test_infinities_stay_in_their_rows(k: int, n: int) -> None:
    """Where all gates of a row are closed or open, dx is 0: additional features add no NaN."""
    rows = LEAST_WORK // (k * n) + 1
    v, x, grad = (random(rows, size, dtype=torch.bfloat16) for size in (n, k, n))
    w = random(n, k, dtype=torch.bfloat16).abs()
    x[3, 5], x[9, 0] = torch.inf, -torch.inf
    for wants_dw in (True, False):  # dw has NaN in eager mode, too
        got = torch.ops.myops._gate_backward(grad, v, x, w, None, [True, True, wants_dw, False])[:2]
        for one, other in zip(got, _derived(gate_reference, [v, x, w], grad)[1:3], strict=True):
            assert other.isfinite().all()
            assert one.isfinite().all()


@pytest.mark.parametrize("rows", [129, 12104, 27655, 50001, 82965])
@pytest.mark.parametrize(("k", "n"), [(112, 1), (129, 127), (130, 130), (100, 36), (72, 67), (67, 72)])
def test_last_rows_count(k: int, n: int, rows: int) -> None:
    """cuBLAS leaves none out where rows are no whole pieces."""
    last = rows % 128
    v, x, grad = (random(rows, size, dtype=torch.float16) for size in (n, k, n))
    w, b = random(n, k, dtype=torch.float16, scale=k**-0.5), random(n, dtype=torch.float16)
    grad[:-last] = 0
    z = torch.nn.functional.linear(x, w, b)
    with torchops.cuda.kernel_path("cublas"):  # without copies
        got = torch.ops.myops._gate_backward(grad, v, x, w, b, [False, False, True, True], False, z)[2:]
    exact = _derived(gate_reference, double(v[-last:], x[-last:], w, b), grad[-last:])[3:]
    for one, value in zip(got, exact, strict=True):
        assert float((one.double() - value).norm() / value.norm()) < 2e-3


@pytest.mark.parametrize("layout", ["gaps", "overlap"])
def test_last_rows_of_copies_count(layout: str) -> None:
    """at::mm multiplies contiguous copies of such x, which TMA can read."""
    rows, n = 82965, 256
    last = rows % 128
    x = random(rows + 1, 2 * n, dtype=torch.float16)
    x = x[:rows, 1::2] if layout == "gaps" else x.flatten()[1:].unfold(0, n, 1)[:rows]
    v, grad = (random(rows, n, dtype=torch.float16) for _ in range(2))
    w, b = random(n, n, dtype=torch.float16, scale=1 / 16), random(n, dtype=torch.float16)
    grad[:-last] = 0
    with torchops.cuda.kernel_path("cublas"):
        got = torch.ops.myops._gate_backward(grad, v, x, w, b, [False, False, True, False])[2]
    exact = _derived(gate_reference, double(v[-last:], x[-last:], w, b), grad[-last:])[3]
    assert float((got.double() - exact).norm() / exact.norm()) < 2e-3


@pytest.mark.parametrize(("rows", "k", "n"), [(63072, 1064, 1052), (4133, 1000, 36)])
def test_long_sums_are_rounded_once(rows: int, k: int, n: int) -> None:
    """cuBLAS may round parts of a 16-bit product over many rows, and so scale a sum of equal terms."""
    v, x, grad = (torch.ones(rows, size, dtype=torch.bfloat16, device="cuda") for size in (n, k, n))
    w, b = torch.zeros(n, k, dtype=torch.bfloat16, device="cuda"), torch.zeros(n, dtype=torch.bfloat16, device="cuda")
    with torchops.cuda.kernel_path("cublas"):
        of_gate = torch.ops.myops._gate_backward(grad, v, x, w, b, [False, False, True, False])[2]
        of_glu = torch.ops.myops._glu_backward(grad, x, w, w, b + 1, b, "sigmoid", [False, True, True, False, False])
    for one, each in ((of_gate, 0.25), (of_glu[1], 0.5), (of_glu[2], 0.25)):
        assert (one == torch.tensor(rows * each, dtype=torch.bfloat16)).all()


def test_few_launches() -> None:
    """Between small kernels, launches take much of the time."""
    rows, k, n = 4095, 129, 127
    v, x, grad = (random(rows, size, dtype=torch.bfloat16) for size in (n, k, n))
    w, b = random(n, k, dtype=torch.bfloat16, scale=0.1), random(n, dtype=torch.bfloat16)
    z, everything = torch.nn.functional.linear(x, w, b), [True, True, True, True]
    torch.use_deterministic_algorithms(False)  # fills of new memory are launches, too
    # Two products, which cuBLAS may split, a copy to 16 bits, the pass and its sums.
    assert kernels(lambda: torch.ops.myops._gate_backward(grad, v, x, w, b, everything, False, z)) <= 7
    k, n = 127, 125
    rows = LEAST_WORK // (k * n) + 1
    v, x, grad = (random(rows, size, dtype=torch.bfloat16) for size in (n, k, n))
    w, b = random(n, k, dtype=torch.bfloat16, scale=0.1), random(n, dtype=torch.bfloat16)

    def copies(call: Callable[[], object]) -> int:
        return sum("resize_kernel" in name for name in kernel_names(call))

    assert copies(lambda: torch.ops.myops._gate_backward(grad, v, x, w, b, everything)) == 2
    assert copies(lambda: torch.ops.myops._glu_backward(grad, x, w, w, b, b, "sigmoid", [True, *everything])) == 2
    assert copies(lambda: torchops.glu(x, w, w, b, b)) == 2


def test_copies_are_scratch_of_panels() -> None:
    """Forward copies no more than 64 MiB of rows at a time, in place 32."""
    rows, k, n = 1 << 20, 129, 128
    v, x = random(rows, n, dtype=torch.bfloat16), random(rows, k, dtype=torch.bfloat16)
    w = random(n, k, dtype=torch.bfloat16, scale=0.1)
    result = v.numel() * v.element_size()
    unmerged = random(2, rows // 2, n, dtype=torch.bfloat16).transpose(0, 1)  # no matrix of rows without a copy
    inputs = x.view(rows // 2, 2, k)
    most = 66 << 20
    assert memory_of(lambda: torchops.gate_(v, x, w)) <= most // 2
    assert memory_of(lambda: torchops.gate_(unmerged, inputs[..., :128], w[:, :128])) <= most // 2
    assert memory_of(lambda: torchops.gate(v, x, w)) <= result + most
    assert memory_of(lambda: torchops.glu(x, w, w)) <= result + most

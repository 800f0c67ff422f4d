"""Float32 `x` or `v` beside 16-bit weights: one kernel rounds the rows of x as it reads them, on every path but that of
cuBLAS; where it cannot run, panels of x are rounded before. So they are for gradients, unless Hopper's kernel makes all
of them in one pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from cuda_checks import assert_accurate, assert_same_bits, gradients, kernel_names, memory_of, poison, random
from product_samples import gate_reference, glu_reference
from test_cuda_sm80 import rows_in
from test_cuda_sm80_resident import spread
from torch import Tensor

import torchops
from torchops._core import _build_info
from torchops._core.devices import capability

if not torch.cuda.is_available() or not _build_info.cuda_version:
    pytest.skip("needs a GPU and a build with CUDA", allow_module_level=True)

DTYPES = [torch.bfloat16, torch.float16]
ACTIVATIONS: list[Any] = ["sigmoid", "silu"]
# Rows, features in and out. Steps have 32 columns, of x, or 64, of w, and tiles of w 64 or 128 rows.
SHAPES = [
    *((1, 4, 8), (17, 36, 8), (257, 100, 40), (65536, 64, 64), (100003, 200, 104), (36001, 256, 256)),
    *((66000, 30, 136), (40000, 328, 264), (9001, 512, 520)),
]
# For the one-pass kernels: at most 128 features, in multiples of 8.
GRADIENT_SHAPES = [*SHAPES, (63, 128, 64), (1000, 72, 40), (30000, 40, 120), (70001, 128, 128)]
# x, v
MIXTURES = [(True, False), (False, True), (True, True)]


@pytest.fixture(autouse=True, params=["auto", "portable"])
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    torch.manual_seed(0)
    with torchops.cuda.kernel_path(request.param):
        yield request.param


def residents(call: Callable[[], object]) -> int:
    """How many kernels that read float32 rows beside 16-bit weights run."""
    return sum("sm80_resident_kernel" in name and ", float" in name for name in kernel_names(call))


def in_one_pass(call: Callable[[], object]) -> bool:
    """Whether Hopper's kernel for all gradients runs."""
    return any("GatedGradientsKernel" in name for name in kernel_names(call))


def has_hopper_kernels(path: str) -> bool:
    return path == "auto" and capability(0) == (9, 0)


def rows_of(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Aligned rows with gaps of NaN."""
    return rows_in(16, spread(columns), random(rows, columns, dtype=dtype))


def weights(n: int, k: int, dtype: torch.dtype, biased: bool, float32_x: bool = True) -> tuple[Tensor, Tensor | None]:
    """Beside float32, rows of w need only lie at multiples of four bytes."""
    offset, stride = (2, k + 2 + k % 2) if float32_x else (8, spread(k))
    w = rows_in(offset, stride, random(n, k, dtype=dtype, scale=k**-0.5))
    return w, random(n + 1, dtype=dtype)[1:] if biased else None


def exactly(reference: Any, dtype: torch.dtype, x: Tensor, *rest: Tensor | None, **kwargs: Any) -> Tensor:
    """The reference in float64, of x as it is rounded."""
    result: Tensor = reference(x.to(dtype).double(), *(None if t is None else t.double() for t in rest), **kwargs)
    return result


def gate_of_x(x: Tensor, v: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    return gate_reference(v, x, w, b)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_glu(shape: tuple[int, int, int], dtype: torch.dtype, biased: bool, activation: Any) -> None:
    rows, k, n = shape
    x, (w, b), (wg, bg) = (rows_of(rows, k, torch.float32), *(weights(n, k, dtype, biased) for _ in range(2)))
    eager = glu_reference(x.to(dtype), w, wg, b, bg, activation=activation)
    poison(rows, n, dtype=dtype)
    y = torchops.glu(x, w, wg, b, bg, activation=activation)
    assert y.dtype == dtype
    assert_accurate(y, eager, exactly(glu_reference, dtype, x, w, wg, b, bg, activation=activation))
    assert residents(lambda: torchops.glu(x, w, wg, b, bg, activation=activation)) == 1


@pytest.mark.parametrize(("float32_x", "float32_v"), MIXTURES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gate(shape: tuple[int, int, int], dtype: torch.dtype, biased: bool, float32_x: bool, float32_v: bool) -> None:
    rows, k, n = shape
    x, v = (rows_of(rows, of, torch.float32 if wide else dtype) for of, wide in [(k, float32_x), (n, float32_v)])
    w, b = weights(n, k, dtype, biased, float32_x)
    eager = gate_reference(v, x.to(dtype), w, b)
    poison(rows, n, dtype=v.dtype)
    y = torchops.gate(v, x, w, b)
    assert y.dtype == v.dtype
    assert_accurate(y, eager, exactly(gate_of_x, dtype, x, v, w, b))
    assert residents(lambda: torchops.gate(v, x, w, b)) == 1
    assert kernel_names(lambda: torchops.gate_(v.clone(), x, w, b))[-1].count("sm80_resident_kernel") == 1
    torchops.gate_(v, x, w, b)
    assert torch.equal(v, y)
    assert v._base is not None
    assert int(v._base.isnan().sum()) == v._base.numel() - v.numel()


def assert_gradients(ours: Any, reference: Any, dtype: torch.dtype, leaves: list[Any], cotangent: Tensor) -> None:
    """Those of x in float32, of eager and of float64, are of an x that is rounded."""
    rounded = [leaves[0].to(dtype), *leaves[1:]]
    got = gradients(ours, leaves, cotangent)
    eager = gradients(reference, rounded, cotangent)
    exact = gradients(reference, [None if t is None else t.double() for t in rounded], cotangent.double())
    for leaf, one, other, value in zip([t for t in leaves if t is not None], got, eager, exact, strict=True):
        assert one.dtype == leaf.dtype
        assert_accurate(one.to(other.dtype), other, value)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", GRADIENT_SHAPES, ids=str)
def test_gradients_of_glu(path: str, shape: tuple[int, int, int], dtype: torch.dtype, activation: Any) -> None:
    rows, k, n = shape
    x, (w, b), (wg, bg) = (
        rows_of(rows, k, torch.float32),
        *(weights(n, k, dtype, True, float32_x=False) for _ in range(2)),
    )
    cotangent = random(rows, n, dtype=dtype)

    ours, reference = (partial(function, activation=activation) for function in (torchops.glu, glu_reference))
    poison(rows, 2 * n, dtype=dtype)
    assert_gradients(ours, reference, dtype, [x, w, wg, b, bg], cotangent)
    fits = has_hopper_kernels(path) and k % 8 == 0 and max(n, k) <= 128
    assert in_one_pass(lambda: gradients(ours, [x, w, wg, b, bg], cotangent)) == fits
    assert residents(lambda: gradients(ours, [x, w, wg, b, bg], cotangent)) == 1  # forward


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("float32_x", "float32_v"), MIXTURES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", GRADIENT_SHAPES, ids=str)
def test_gradients_of_gate(
    path: str, shape: tuple[int, int, int], dtype: torch.dtype, float32_x: bool, float32_v: bool, biased: bool
) -> None:
    rows, k, n = shape
    x, v = (rows_of(rows, of, torch.float32 if wide else dtype) for of, wide in [(k, float32_x), (n, float32_v)])
    w, b = weights(n, k, dtype, biased, float32_x=False)
    cotangent = random(rows, n, dtype=v.dtype)

    def ours(x: Tensor, v: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return torchops.gate(v, x, w, b)

    poison(rows, n, dtype=dtype)
    assert_gradients(ours, gate_of_x, dtype, [x, v, w, b], cotangent)
    fits = has_hopper_kernels(path) and not float32_v and k % 8 == 0 and max(n, k) <= 128
    assert in_one_pass(lambda: gradients(ours, [x, v, w, b], cotangent)) == fits
    assert residents(lambda: gradients(ours, [x, v, w, b], cotangent)) == 1 + float32_v  # forward, and that reads v


@pytest.mark.parametrize("n", [8, 32, 40, 128])
def test_gate_of_its_own_rows(n: int) -> None:
    """x is v, which is overwritten: as if x were read first."""
    x, w = random(50001, n, dtype=torch.float32), random(n, n, dtype=torch.bfloat16, scale=n**-0.5)
    eager, exact = gate_reference(x, x.bfloat16(), w), gate_reference(x.double(), x.bfloat16().double(), w.double())
    assert_accurate(torchops.gate(x, x, w), eager, exact)
    torchops.gate_(x, x, w)
    assert_accurate(x, eager, exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values(dtype: torch.dtype) -> None:
    """They stay in their rows and columns, and what lies beyond the operands, here infinity, is not read. What is
    finite in float32 may round to infinity."""
    x = torch.full((5001, 80), float("inf"), device="cuda")[:, :70]
    w, wg = (torch.full((72, 80), float("inf"), device="cuda", dtype=dtype)[:, :70] for _ in range(2))
    for t in (x, w, wg):
        t.copy_(torch.randn_like(t))
    x[5000, 3], x[17, 5], x[18, 69], w[5, 69] = float("nan"), 3.4e38, float("inf"), float("inf")
    y, expected = torchops.glu(x, w, wg), exactly(glu_reference, dtype, x, w, wg)
    assert torch.equal(y.isnan(), expected.isnan())
    assert torch.equal(y.isinf(), expected.isinf())
    assert residents(lambda: torchops.glu(x, w, wg)) == 1


def test_memory(path: str) -> None:
    """No cast tensor of x's size: forward, only the result; backward, by Hopper's kernel also only that, or else panels
    of x and of both cotangents."""
    rows, n = 1 << 19, 128
    x, v = (random(rows, n, dtype=torch.float32) for _ in range(2))
    w = random(n, n, dtype=torch.bfloat16, scale=0.1)
    bytes_of_y = rows * n * 2
    slack = 1 << 21
    assert memory_of(lambda: torchops.glu(x, w, w)) <= bytes_of_y + slack
    assert memory_of(lambda: torchops.gate(v, x, w)) <= 2 * bytes_of_y + slack
    assert memory_of(lambda: torchops.gate_(v, x, w)) <= slack
    grad = random(rows, n, dtype=torch.bfloat16)
    scratch = (36 if has_hopper_kernels(path) else 196) << 20  # the sums of all multiprocessors, or panels
    arguments = (grad, x, w, w, None, None, "silu", [True] * 3 + [False] * 2)
    of_glu = memory_of(lambda: torch.ops.myops._glu_backward(*arguments))
    assert of_glu <= 2 * bytes_of_y + scratch  # dx is float32


@pytest.mark.parametrize(("k", "start"), [(520, 0), (640, 0), (127, 0), (128, 1)])
def test_rounded_panels(k: int, start: int) -> None:
    """Of long sums, and of rows that are not aligned to 16 bytes: other kernels multiply them."""
    rows, n = 70001, 64
    x = random(rows, k + start, dtype=torch.float32)[:, start:]
    w, wg = (random(n, k, dtype=torch.bfloat16, scale=k**-0.5) for _ in range(2))
    v, b = random(rows, n, dtype=torch.bfloat16), random(n, dtype=torch.bfloat16)
    rounded = x.bfloat16()
    assert residents(lambda: [torchops.gate(v, x, w, b), torchops.glu(x, w, wg)]) == 0
    y = torchops.glu(x, w, wg, b, b)
    assert_accurate(y, glu_reference(rounded, w, wg, b, b), exactly(glu_reference, w.dtype, x, w, wg, b, b))
    for of in (v, v.float()):
        eager, exact = gate_reference(of, rounded, w, b), exactly(gate_of_x, w.dtype, x, of, w, b)
        assert_accurate(torchops.gate(of, x, w, b), eager, exact)
        overwritten = of.clone()
        torchops.gate_(overwritten, x, w, b)
        assert_accurate(overwritten, eager, exact)
    assert_gradients(torchops.glu, glu_reference, w.dtype, [x, w, wg, b, b], random(rows, n, dtype=w.dtype))


def test_overlapping_rows() -> None:
    x, w = random(40000, 264, dtype=torch.float32), random(128, 128, dtype=torch.bfloat16, scale=0.1)
    for strides in ((0, 1), (8, 1), (132, 1)):
        rows = x.as_strided((70000, 128), strides)
        y, rounded = torchops.glu(rows, w, w), rows.bfloat16()
        assert_accurate(y, glu_reference(rounded, w, w), glu_reference(rounded.double(), w.double(), w.double()))
        assert residents(lambda rows=rows: torchops.glu(rows, w, w)) == 1  # type: ignore[misc]


def panels_of(n: int, k: int) -> tuple[int, Tensor, list[Tensor]]:
    """More rows of float32 than a panel has, and two weights, each with a bias."""
    rows = (64 << 20) // (2 * k) + 5_001
    x = random(rows, k, dtype=torch.float32)
    layers = [random(n, *of, dtype=torch.bfloat16, scale=k**-0.5) for of in ((k,), (k,), (), ())]
    return rows, x, layers


def assert_wanted(got: Any, function: Any, leaves: list[Tensor], cotangent: Tensor, output_mask: list[bool]) -> None:
    """Those that are asked for, and nothing else, beside eager's and float64's of a rounded x."""
    eager = gradients(function, leaves, cotangent)
    exact = gradients(function, [t.double() for t in leaves], cotangent.double())
    for one, other, value, asked in zip(got, eager, exact, output_mask, strict=True):
        assert one.numel() == (value.numel() if asked else 0)
        if asked:
            assert_accurate(one.to(other.dtype), other, value)


@pytest.mark.parametrize("wanted", ["wv", "v", "xw", "x", "b", "wb", "vc", "xwvbc"])
@pytest.mark.parametrize(("n", "k"), [(64, 64), (128, 128), (192, 192), (40, 127), (40, 264)])
def test_some_gradients_of_glu(n: int, k: int, wanted: str) -> None:
    """Only what is asked for; of more than one panel, the last of which is shorter."""
    rows, x, layers = panels_of(n, k)
    cotangent = random(rows, n, dtype=torch.bfloat16)
    output_mask = [c in wanted for c in "xwvbc"]
    got = torch.ops.myops._glu_backward(cotangent, x, *layers, "silu", output_mask)
    assert_wanted(got, partial(glu_reference, activation="silu"), [x.bfloat16(), *layers], cotangent, output_mask)


@pytest.mark.parametrize("wanted", ["w", "wb", "xw", "vw", "vxwb"])
@pytest.mark.parametrize("float32_v", [False, True])
@pytest.mark.parametrize(("n", "k"), [(64, 64), (192, 192), (40, 127), (40, 264)])
def test_some_gradients_of_gate(n: int, k: int, wanted: str, float32_v: bool) -> None:
    """The same, for a gate that reads v and for one that reads its result."""
    rows, x, (w, _, b, _) = panels_of(n, k)
    v = random(rows, n, dtype=torch.float32 if float32_v else torch.bfloat16)
    cotangent = random(rows, n, dtype=v.dtype)
    output_mask = [c in wanted for c in "vxwb"]

    def function(v: Tensor, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return gate_of_x(x, v, w, b)

    got = torch.ops.myops._gate_backward(cotangent, v, x, w, b, output_mask)
    assert_wanted(got, function, [v, x.bfloat16(), w, b], cotangent, output_mask)
    if float32_v:  # 16-bit results of gates are not as good as v
        y = torchops.gate(v, x, w, b)
        got = torch.ops.myops._gate_backward(cotangent, y, x, w, b, output_mask, v_is_y=True)
        assert_wanted(got, function, [v, x.bfloat16(), w, b], cotangent, output_mask)


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize(("n", "k"), [(64, 192), (33, 127)])
def test_like_rounded_rows(n: int, k: int, kept: bool) -> None:
    """About the gradients of an x that is rounded before, with products that were kept and without."""
    rows, x, (w, wg, b, bg) = panels_of(n, k)
    cotangent, rounded = random(rows, n, dtype=torch.bfloat16), x.bfloat16()
    products = torch.ops.myops._glu(rounded, w, wg, b, bg, "silu")[1:] if kept else ()
    got, expected = (
        torch.ops.myops._glu_backward(cotangent, of, w, wg, b, bg, "silu", [True] * 5, *products) for of in (x, rounded)
    )
    # Of rows that are no whole pieces of 16 bytes, cuBLAS rounds the products of x, but a kernel multiplies `rounded`.
    limit = 2e-2 if kept or k % 8 == 0 else 8e-2
    for one, other in zip(got, expected, strict=True):
        atol = limit * other.float().abs().mean().item()
        torch.testing.assert_close(one.to(other.dtype), other, rtol=2e-2, atol=atol)


def test_same_bits() -> None:
    """Of all calls, of any number of rows, and of an x that was rounded before, if the same kernel reads it."""
    x, w = random(70001, 136, dtype=torch.float32), random(200, 136, dtype=torch.bfloat16, scale=0.1)
    v = random(70001, 200, dtype=torch.float32)
    assert_same_bits(lambda: [torchops.glu(x, w, w), torchops.gate(v, x, w)], times=20)
    y = torchops.glu(x, w, w)
    assert torch.equal(torchops.glu(x[:300], w, w), y[:300])
    with torchops.cuda.kernel_path("portable"):
        torch.testing.assert_close(torchops.glu(x.bfloat16(), w, w), y)

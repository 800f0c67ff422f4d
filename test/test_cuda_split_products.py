"""Float32 products by tensor cores: layouts, accuracy on hard numbers, infinities and NaN."""

from __future__ import annotations

import random as pseudorandom
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cuda_checks import error, kernels, poison, random, splits_float32
from product_samples import gate_reference, glu_reference
from torch import Tensor

import torchops
from torchops._core import _build_info

if not torch.cuda.is_available() or not _build_info.cuda_version:
    pytest.skip("needs a GPU and a build with CUDA", allow_module_level=True)
if not splits_float32():
    pytest.skip("needs a GPU on which TF32 is more than three times as fast as float32", allow_module_level=True)

FLOAT = torch.float32
EPS = torch.finfo(FLOAT).eps


def matrices(batch: int, rows: int, columns: int, *, transposed: bool, gap: int, offset: int) -> Tensor:
    """Random matrices in a buffer of NaN, whose rows or columns are multiples of 4 elements apart."""
    lines, length = (columns, rows) if transposed else (rows, columns)
    stride = length + -length % 4 + 4 * gap
    buffer = torch.full((batch * lines * stride + 4 * offset,), float("nan"), device="cuda")
    view = buffer[4 * offset :].view(batch, lines, stride)[:, :, :length]
    view.copy_(torch.randn(view.shape, device="cuda"))
    return view.mT if transposed else view


@pytest.mark.parametrize("seed", range(32))
def test_layouts(seed: int) -> None:
    draw = pseudorandom.Random(seed)
    batch, rows = draw.choice([1, 1, 2, 5]), draw.randint(1, 300)
    n = draw.choice([4, 32, 64, 68, 100, 128, 132, 256, 300, 30, 33])
    a, b = (
        matrices(batch, size, n, transposed=draw.random() < 0.5, gap=draw.randint(0, 2), offset=draw.randint(0, 2))
        for size in (n, n)
    )
    if batch == 1:
        a = matrices(1, rows, n, transposed=draw.random() < 0.5, gap=1, offset=seed % 3)[0]
        b = b[0]
    for transpose_b in (False, True):
        factor = b.mT if transpose_b else b
        exact = a.double() @ factor.double()
        with torchops.cuda.kernel_path("fused"):
            poison(*a.shape, dtype=FLOAT)
            y = torchops.square_matmul(a, b, transpose_b=transpose_b)
            z = a.clone()
            torchops.square_matmul_(z, b, transpose_b=transpose_b)
        few = 4 if exact.numel() < 64 else 1
        for result in (y, z):
            assert error(result, exact) <= 1.1 * error(a @ factor, exact) + few * EPS


HARD: dict[str, Any] = {
    "normal": lambda a, b: (a, b),
    "positive": lambda a, b: (a.abs(), b.abs()),
    "scaled": lambda a, b: (a * 2.0 ** torch.randint_like(a, -20, 20), b * 2.0 ** torch.randint_like(b, -20, 20)),
    "near one": lambda a, b: (1 + 1e-3 * a, 1 + 1e-3 * b),
    "cancelling": lambda a, b: (
        torch.cat([a[:, ::2], a[:, ::2]], 1),
        torch.cat([b[::2], -b[::2] * (1 + 1e-6 * b[1::2])]),
    ),
}


@pytest.mark.parametrize("n", [64, 128, 512, 1024])
@pytest.mark.parametrize("kind", HARD)
def test_as_accurate_as_float32(kind: str, n: int) -> None:
    """Beside the sum of absolute products, which is what float32 sums err by."""
    torch.manual_seed(0)
    a, b = HARD[kind](torch.randn(n, n, device="cuda"), torch.randn(n, n, device="cuda"))
    exact, scale = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    with torchops.cuda.kernel_path("fused"):
        ours = (torchops.square_matmul(a, b).double() - exact) / scale
    theirs = ((a @ b).double() - exact) / scale
    # A single term is most of a scaled sum. With 512 columns, cuBLAS adds parts of a sum, which errs less than one sum.
    most = 1.5 if kind == "scaled" else 1.25
    assert ours.square().mean().sqrt() <= most * theirs.square().mean().sqrt()
    assert ours.abs().max() <= 2 * theirs.abs().max()


@pytest.mark.parametrize("seed", range(24))
def test_linear_layers(seed: int) -> None:
    """Views of buffers of NaN, odd sizes, and the rules after the products, of one weight and of two."""
    draw = pseudorandom.Random(seed)
    n, k = draw.choice([1, 3, 8, 62, 64, 97, 128, 200, 333, 768]), draw.choice([4, 31, 96, 770])
    m = draw.randint(1, 700)
    x, w, wg, v = (
        matrices(1, rows, columns, transposed=False, gap=draw.randint(0, 2), offset=draw.randint(0, 2))[0]
        for rows, columns in ((m, k), (n, k), (n, k), (m, n))
    )
    b, bg = (random(n, dtype=FLOAT) if draw.random() < 0.7 else None for _ in range(2))

    def layer(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return F.linear(x, w, b)

    def wide(*tensors: Tensor | None) -> list[Any]:
        return [None if t is None else t.double() for t in tensors]

    few = 8 if m * n < 64 else 2
    for ours, theirs, arguments in (
        (torch.ops.myops._linear, layer, (x, w, b)),
        (torchops.dense, lambda *a: layer(*a).sigmoid(), (x, w, b)),
        (torchops.gate, gate_reference, (v, x, w, b)),
        (torchops.glu, glu_reference, (x, w, wg, b, bg)),
    ):
        exact = theirs(*wide(*arguments))
        with torchops.cuda.kernel_path("fused"):
            poison(m, n, dtype=FLOAT)
            got = ours(*arguments)
        assert error(got, exact) <= 1.1 * error(theirs(*arguments), exact) + few * EPS
    with torchops.cuda.kernel_path("fused"):
        assert torch.equal(torchops.gate_(v.clone(), x, w, b), torchops.gate(v, x, w, b))


@pytest.mark.parametrize("sizes", [(1920, 768, 768), (700, 3072, 128), (4096, 256, 64)], ids=str)
@pytest.mark.parametrize("kind", HARD)
def test_layers_are_as_accurate_as_float32(kind: str, sizes: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    m, k, n = sizes
    a, b = HARD[kind](torch.randn(m, k, device="cuda"), torch.randn(k, n, device="cuda"))
    w = b.t().contiguous()
    exact, scale = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    with torchops.cuda.kernel_path("fused"):
        ours = (torch.ops.myops._linear(a, w).double() - exact) / scale
    theirs = ((a @ w.t()).double() - exact) / scale
    # A step of 32 columns is cut off in each instruction, by about a last digit, whatever cuBLAS does.
    assert ours.square().mean().sqrt() <= max(1.1 * theirs.square().mean().sqrt().item(), 2 * EPS)


def same(got: Tensor, expected: Tensor) -> bool:
    """Infinities and NaN in the same places."""
    return torch.equal(got.isnan(), expected.isnan()) and torch.equal(got[expected.isinf()], expected[expected.isinf()])


def test_what_is_not_finite_is_as_in_float32() -> None:
    inf, nan = float("inf"), float("nan")
    x, w, wg = (random(n, 256, dtype=FLOAT) for n in (300, 256, 256))
    v = random(300, 256, dtype=FLOAT)
    x[3, 5], x[9, 7], x[21, 4:8] = inf, nan, torch.tensor([inf, -inf, 1, 2])
    x[20] = 0
    x[20, 3] = torch.finfo(FLOAT).max  # rounds to infinity in TF32
    w[:, 3], wg[:, 3] = 0.1, 0.2
    w[100, 200], w[101, 3], wg[7, 255], wg[8, 5] = -inf, inf, nan, inf
    with torchops.cuda.kernel_path("fused"):
        assert same(torchops.square_matmul(x, w), x @ w)
        assert same(torchops.square_matmul(x, w, transpose_b=True), x @ w.T)
        torch.testing.assert_close(torchops.dense(x, w), torch.sigmoid(F.linear(x, w)), equal_nan=True)
        assert same(torchops.gate(v, x, w), gate_reference(v, x, w))
        assert same(torchops.glu(x, w, wg), glu_reference(x, w, wg))
        assert same(torch.ops.myops._linear(x, w, wg[:, 0]), F.linear(x, w, wg[:, 0]))


def test_a_gate_of_what_it_overwrites() -> None:
    """Sums that are not finite are made again of rows that other lanes overwrite."""
    for n in (4, 32):
        v, w = random(1000, n, dtype=FLOAT), random(n, n, dtype=FLOAT)
        v[::7, 1], v[::5, 3], w[n - 1, 2] = float("inf"), float("nan"), float("inf")
        expected = gate_reference(v, v, w)
        with torchops.cuda.kernel_path("fused"):
            assert same(torchops.gate(v, v, w), expected)
            torchops.gate_(v, v, w)
        assert same(v, expected)


def test_small_numbers() -> None:
    """Below 2^-114, what is left of a number after rounding to TF32 is subnormal, and digits are lost."""
    for scale, least, most in ((1e-30, 0.0, 1e-6), (1e-36, 1e-6, 1e-4), (1e-39, 1e-4, 1e-1)):
        a, b = random(128, 128, dtype=FLOAT) * scale, random(128, 128, dtype=FLOAT)
        with torchops.cuda.kernel_path("fused"):
            got = torchops.square_matmul(a, b)
        assert least <= error(got, a.double() @ b.double()) <= most


def test_what_multiplies() -> None:
    """Split products have other bits than cuBLAS; the path says which of them multiplies, forward and backward."""
    a, b, g = random(40000, 128, dtype=FLOAT), random(128, 128, dtype=FLOAT), random(40000, 128, dtype=FLOAT)
    a.requires_grad_()
    for path, splits in (("auto", True), ("fused", True), ("portable", False), ("cublas", False)):
        with torchops.cuda.kernel_path(path):  # type: ignore[arg-type]
            y = torchops.square_matmul(a, b)
        (da,) = torch.autograd.grad(y, a, g)
        assert torch.equal(y, a @ b) != splits
        assert torch.equal(da, g @ b.T) != splits
    x, w = random(4096, 256, dtype=FLOAT), random(256, 256, dtype=FLOAT)
    assert kernels(lambda: torchops.dense(x, w)) == 1
    assert kernels(lambda: torch.ops.myops._linear(x, w)) == 1
    assert not torch.equal(torch.ops.myops._linear(x, w), F.linear(x, w))
    with torchops.cuda.kernel_path("portable"):
        assert kernels(lambda: torchops.dense(x, w)) > 1

"""The kernel for exact float32: sizes, strides, gradients, a triangle update's channels, and when operators take it."""

from __future__ import annotations

import random as pseudorandom
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cuda_checks import double, error, poison, random
from product_samples import gate_reference, glu_reference
from test_cuda_sm80 import kernels, rows_in
from test_cuda_triangle_gradients import parameters
from test_cuda_triangle_panels import assert_close, results
from torch import Tensor
from triangle_reference import triangle_multiplicative_update as reference

import torchops
from torchops._core import _build_info

if not torch.cuda.is_available() or not _build_info.cuda_version:
    pytest.skip("needs a GPU and a build with CUDA", allow_module_level=True)

FLOAT = torch.float32
PATHS: list[Any] = ["auto", "fused", "portable"]  # the last one by FFMAs, where another GPU would
# Rows, features in and out: less and more than a tile, more than a step, sizes at which the path is chosen by itself.
SHAPES = [(1, 4, 4), (130, 33, 60), (257, 64, 64), (300, 31, 132), (1000, 300, 68), (40000, 128, 128), (17000, 96, 260)]


def assert_accurate(got: Tensor, eager: Tensor, exact: Tensor) -> None:
    """Twice the error of eager, and a rounding, or four of a few elements, where errors don't even out. The kernel with
    FFMAs adds 400 products one after the other, and cuBLAS and ATen add parts of a sum. TF32 would err by 1e-4."""
    few = 4 if exact.numel() < 16 else 1
    assert error(got, exact) <= 2 * error(eager, exact) + few * torch.finfo(FLOAT).eps


def drawn(seed: int, weights: int = 1) -> tuple[Tensor, list[Tensor], bool]:
    """x and the weights, in rows that are multiples of 16 bytes apart but for every fourth seed; and whether there is
    a bias."""
    draw = pseudorandom.Random(seed)
    unit = 1 if seed % 4 == 3 else 4
    rows, k, n = (draw.randint(1, 400) for _ in range(3))
    n = -(-n // unit) * unit

    def strided(of: int, scale: float) -> Tensor:
        stride = k + -k % unit + unit * draw.randint(0, 3)
        return rows_in(unit * draw.randint(0, 3), stride, random(of, k, dtype=FLOAT, scale=scale))

    return strided(rows, 1), [strided(n, k**-0.5) for _ in range(weights)], draw.random() < 0.5


def biases_of(n: int, wanted: bool) -> tuple[Tensor | None, Tensor | None]:
    return (random(n + 1, dtype=FLOAT)[1:], random(2 * n, dtype=FLOAT)[::2]) if wanted else (None, None)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("seed", range(24))
def test_values_of_odd_sizes(seed: int, path: Any) -> None:
    x, (w, wg), biased = drawn(seed, weights=2)
    rows, n = x.shape[0], w.shape[0]
    v = rows_in(4 * (seed % 2), n + -n % 4 + 4 * (seed % 3), random(rows, n, dtype=FLOAT))
    b, bg = biases_of(n, biased)
    with torchops.cuda.kernel_path(path):
        cases: list[tuple[Any, Any, tuple[Any, ...]]] = [
            (torchops.dense, lambda *t: torch.sigmoid(F.linear(*t)), (x, w, b)),
            (torchops.gate, gate_reference, (v, x, w, b)),
            (torchops.glu, glu_reference, (x, w, wg, b, bg)),
        ]
        for ours, theirs, args in cases:
            poison(rows, n, dtype=FLOAT)
            y = ours(*args)
            assert torch.equal(y, ours(*args))
            assert_accurate(y, theirs(*args), theirs(*double(*args)))
        for activation in ("sigmoid", "silu"):
            got = torchops.glu(x, w, wg, b, bg, activation=activation)
            exact = glu_reference(*double(x, w, wg, b, bg), activation=activation)
            assert_accurate(got, glu_reference(x, w, wg, b, bg, activation=activation), exact)
        y = torchops.gate(v, x, w, b)
        torchops.gate_(v, x, w, b)
    assert torch.equal(v, y)
    assert v._base is not None
    assert int(v._base.isnan().sum()) == v._base.numel() - v.numel()


@pytest.mark.parametrize("seed", range(12))
def test_values_by_ffma(seed: int) -> None:
    """The kernel of other GPUs, which "portable" takes for many rows, few features in, and some out."""
    draw = pseudorandom.Random(seed)
    rows, k, n = draw.randint(2048, 2400), draw.randint(1, 128), 4 * draw.randint(16, 40)
    x, w, wg = (
        rows_in(4 * draw.randint(0, 3), k + -k % 4 + 4 * draw.randint(0, 3), random(of, k, dtype=FLOAT))
        for of in (rows, n, n)
    )
    b, bg = biases_of(n, seed % 2 == 0)
    with torchops.cuda.kernel_path("portable"):
        poison(rows, n, dtype=FLOAT)
        y, u = torchops.dense(x, w, b), torchops.glu(x, w, wg, b, bg)
    assert_accurate(y, torch.sigmoid(F.linear(x, w, b)), torch.sigmoid(F.linear(*double(x, w, b))))
    assert_accurate(u, glu_reference(x, w, wg, b, bg), glu_reference(*double(x, w, wg, b, bg)))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients(shape: tuple[int, int, int], path: Any) -> None:
    rows, k, n = shape
    padded = -(-k // 4) * 4

    def weight() -> Tensor:
        return rows_in(0, padded, random(n, k, dtype=FLOAT, scale=k**-0.5))

    x, v, b, bg = rows_in(0, padded, random(rows, k, dtype=FLOAT)), random(rows, n, dtype=FLOAT), *biases_of(n, True)
    grad = random(rows, n, dtype=FLOAT)
    cases: list[tuple[Any, Any, tuple[Any, ...]]] = [
        (torchops.dense, lambda *t: torch.sigmoid(F.linear(*t)), (x, weight(), b)),
        (torchops.gate, gate_reference, (v, x, weight(), b)),
        (torchops.glu, glu_reference, (x, weight(), weight(), b, bg)),
        (
            lambda *t: torchops.glu(*t, activation="silu"),
            lambda *t: glu_reference(*t, activation="silu"),
            (x, weight(), weight(), b, bg),
        ),
    ]
    for ours, theirs, args in cases:
        leaves = [t.detach().requires_grad_() for t in args]
        with torchops.cuda.kernel_path(path):
            got = torch.autograd.grad(ours(*leaves), leaves, grad)
        eager = torch.autograd.grad(theirs(*leaves), leaves, grad)
        doubles = [t.detach().double().requires_grad_() for t in args]
        exact = torch.autograd.grad(theirs(*doubles), doubles, grad.double())
        for one, other, value in zip(got, eager, exact, strict=True):
            assert_accurate(one, other, value)


@pytest.mark.parametrize("n", [4, 32, 64, 128, 200])
def test_gate_of_its_own_rows(n: int) -> None:
    x, w = random(40000, n, dtype=FLOAT), random(n, n, dtype=FLOAT, scale=n**-0.5)
    eager, exact = gate_reference(x, x, w), gate_reference(x.double(), x.double(), w.double())
    for path in PATHS:
        with torchops.cuda.kernel_path(path):
            assert_accurate(torchops.gate(x, x, w), eager, exact)
            y = x.clone()
            torchops.gate_(y, y, w)
        assert_accurate(y, eager, exact)


def test_special_values() -> None:
    """The sigmoid of infinities and of what overflows, and its derivative."""
    x = torch.tensor([[-float("inf")], [-200.0], [-90.0], [-0.0], [90.0], [200.0], [float("inf")], [float("nan")]])
    x = F.pad(x, (0, 3)).cuda()
    w = torch.zeros(4, 4, device="cuda")
    w[:, 0] = 1
    with torchops.cuda.kernel_path("fused"):
        y = torchops.dense(x, w)
        exact = torch.sigmoid(x[:, :1].double()).expand(-1, 4)
        torch.testing.assert_close(y.double(), exact, rtol=1e-6, atol=1e-44, equal_nan=True)
        finite = x[1:-2].clone().requires_grad_()
        v = torch.ones(5, 4, device="cuda")
        (slope,) = torch.autograd.grad(torchops.gate(v, finite, w).sum(), finite)
    exact = 4 * torch.sigmoid(finite.double()) * torch.sigmoid(-finite.double())
    torch.testing.assert_close(slope[:, 0].double(), exact[:, 0], rtol=1e-6, atol=1e-38)


@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
@pytest.mark.parametrize(
    ("n", "c", "d", "batch", "masked", "biases"),
    [
        (256, 128, 128, 1, True, True),
        (255, 64, 64, 2, True, False),
        (130, 68, 36, 1, False, True),
        (260, 30, 30, 1, True, True),
        (1, 8, 8, 3, True, True),
    ],
)
@pytest.mark.parametrize("path", PATHS)
def test_triangle_update(
    n: int, c: int, d: int, batch: int, masked: bool, biases: bool, direction: str, path: Any
) -> None:
    torch.manual_seed(0)
    given = {name: t.float() for name, t in parameters(c, d, biases=biases).items()}
    if masked:
        given["mask"] = torch.rand(batch, n, n, device="cuda")
    x, grad = random(batch, n, n, c, dtype=FLOAT), random(batch, n, n, c, dtype=FLOAT)
    wanted = {"x"} | set(given)
    with torchops.cuda.kernel_path(path):
        got = results(torchops.triangle_multiplicative_update, x, grad, direction, given, wanted)
    eager = results(reference, x, grad, direction, given, wanted)
    doubles = {name: t.double() for name, t in given.items()}
    exact = results(reference, x.double(), grad.double(), direction, doubles, wanted)
    for name in got:
        assert_close(got[name], eager[name], exact[name], name)


def test_product_and_epilogue_are_one_kernel() -> None:
    """Except where cuBLAS is asked for, or faster: for few rows and long sums; and for rows that are not aligned."""
    x, w = random(40000, 128, dtype=FLOAT), random(128, 128, dtype=FLOAT)
    assert [kernels(x, w, path) for path in PATHS] == [1] * len(PATHS)
    assert kernels(x, w, "cublas") > 1
    assert kernels(x[:, 1:], w[:, 1:], "fused") > 1
    for rows, k, n in [(16, 4096, 128), (64, 8192, 64)]:
        a, b = random(rows, k, dtype=FLOAT), random(n, k, dtype=FLOAT)
        assert kernels(a, b, "auto") > 1
        assert kernels(a, b, "fused") == 1


def test_settings_of_torch_are_kept() -> None:
    """If torch may round to TF32, so may the operator; and if not, it doesn't."""
    x, w = random(4096, 128, dtype=FLOAT), random(128, 128, dtype=FLOAT, scale=128**-0.5)
    exact = torch.sigmoid(F.linear(x.double(), w.double()))
    former = torch.backends.cuda.matmul.allow_tf32
    errors = []
    try:
        for allowed in (False, True):
            torch.backends.cuda.matmul.allow_tf32 = allowed
            errors.append(error(torchops.dense(x, w), exact))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = former
    assert errors[0] < 1e-6 < 1e-5 < errors[1]

"""The outer product mean beyond what every operator is tested for: blocks of rows, and what they keep in memory."""

from __future__ import annotations

import pytest
import torch
from checks import assert_all_close, random_like
from memory_growth import A_FEW_MIB, growth, needs_proc
from outer_product_samples import outer_product_mean_reference
from torch import Tensor
from torch.func import vmap

from torchops import outer_product_mean

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"))]


def tensors(dtype: torch.dtype, device: str, sizes: tuple[int, ...], norm_dtype: torch.dtype) -> list[Tensor]:
    """For outer products of about 1, after they are divided."""
    s, n, m, c, d, out = sizes
    shapes = (2, s, n, c), (2, s, m, d), (out, c * d), (out,)
    a, b, weight, bias = (random_like(torch.empty(shape, dtype=torch.float64), i) for i, shape in enumerate(shapes))
    norm = torch.linspace(0.5, 2, 2 * n * m, dtype=torch.float64).reshape(2, n, m) * s**0.5
    values = [a, b, weight * (c * d) ** -0.5, bias]
    return [*(t.to(device, dtype) for t in values), norm.to(device, norm_dtype)]


def gradients(function: object, arguments: list[Tensor], cotangent: Tensor) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in arguments]
    y = function(*leaves)  # type: ignore[operator]
    return [y.detach(), *torch.autograd.grad(y, leaves, cotangent.to(y))]


# Several blocks of several rows, and blocks of a row; more sequences than a tile of cuBLAS, or few.
SIZES = [(150, 41, 257, 33, 31, 5), (7, 3, 4099, 40, 33, 9), (300, 9, 11, 8, 8, 128)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_blocks(dtype: torch.dtype, sizes: tuple[int, ...], device: str) -> None:
    """Result and gradients beside float64; PyTorch's, of all pairs at once, lose about as much."""
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    arguments = tensors(dtype, device, sizes, wide)
    cotangent = random_like(torch.empty(2, sizes[1], sizes[2], sizes[-1], dtype=torch.float64), 9).to(dtype).to(device)
    exact = gradients(outer_product_mean_reference, [t.double() for t in arguments], cotangent.double())
    plain = gradients(outer_product_mean_reference, arguments, cotangent)
    ours = gradients(outer_product_mean, arguments, cotangent)
    for got, of_pytorch, value in zip(ours, plain, exact, strict=True):
        assert got.dtype == of_pytorch.dtype
        error, expected = ((t.double() - value).norm() / value.norm() for t in (got, of_pytorch))
        assert error <= 1.5 * expected + (64 if dtype == torch.float64 else 1) * torch.finfo(got.dtype).eps


@pytest.mark.parametrize("asked", [(0,), (1,), (2,), (3,), (4,), (0, 4), (1, 2)], ids=str)
def test_gradients_asked(asked: tuple[int, ...]) -> None:
    """The same values as all of them together."""
    arguments = tensors(torch.float64, "cpu", (5, 7, 6, 3, 4, 2), torch.float64)
    cotangent = random_like(torch.empty(2, 7, 6, 2, dtype=torch.float64), 9)
    everything = gradients(outer_product_mean, arguments, cotangent)[1:]
    leaves = [t.detach().requires_grad_(i in asked) for i, t in enumerate(arguments)]
    got = torch.autograd.grad(outer_product_mean(*leaves), [leaves[i] for i in asked], cotangent)
    assert_all_close([*got], [everything[i] for i in asked])


def test_under_vmap_and_autocast() -> None:
    """Casts come before the operator is taken apart, and the divisors stay as they are."""
    a, b, weight, bias, norm = tensors(torch.float32, "cpu", (5, 7, 6, 3, 4, 2), torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got = vmap(outer_product_mean, in_dims=(0, 0, None, None, 0))(a, b, weight, bias, norm)
        expected = outer_product_mean(a, b, weight, bias, norm)
    assert got.dtype == expected.dtype == torch.bfloat16
    assert_all_close([got], [expected], rtol=0.016, atol=2**-8)


# The outer products of all pairs have 256 MiB.
PROGRAM = """
def arguments(n):
    return filled(16, n, 32), filled(16, n, 32), filled(8, 1024), filled(8), torch.full((n, n), 16.0)

def call(leaves):
    y = torchops.outer_product_mean(*leaves)
    if leaves[0].requires_grad:
        y.backward(torch.ones(1).expand_as(y))

for n in (64, 256):
    leaves = [t.requires_grad_({training}) for t in arguments(n)]
    if n == 64:
        call(leaves)
growth(lambda: call(leaves))
"""


@needs_proc
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_memory(training: bool) -> None:
    assert growth(PROGRAM.format(training=training)) <= 2 * A_FEW_MIB

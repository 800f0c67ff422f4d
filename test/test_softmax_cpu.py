"""softmax_ on the CPU: ATen's own kernel in place where it is fast and thrifty, panels and slices elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import torchops

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def of_torch(x: Tensor, dim: int) -> Tensor:
    """What `torch.softmax(out=)` makes of a contiguous copy."""
    y = x.contiguous().clone()
    return torch.softmax(y, dim, out=y)


def random(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return (4 * torch.randn(shape, dtype=torch.float64)).to(dtype)


# Lines of neighbours, and lines that lie side by side by at least a cache line, with and without a rest.
IN_PLACE = [
    ((), 0),
    ((7,), 0),
    ((1, 3), 0),
    ((33, 257), 1),
    ((33, 257), 0),
    ((5, 67, 32), 1),
    ((5, 67, 33), 1),
    ((4, 3, 5, 65), -2),
    ((8, 1, 5), 1),
    ((600, 1031), -1),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "dim"), IN_PLACE, ids=str)
def test_bit_equal(shape: tuple[int, ...], dim: int, dtype: torch.dtype) -> None:
    x = random(shape, dtype)
    expected = of_torch(x, dim)
    assert torch.equal(torchops.softmax_(x, dim), expected)


# Lines and blocks of lines beyond the 4 MiB of scratch that a thread may hold.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("shape", "dim"), [((1, 2**20 + 3), -1), ((2**17, 40), 0)], ids=str)
def test_bit_equal_in_long_lines(shape: tuple[int, ...], dim: int, dtype: torch.dtype) -> None:
    test_bit_equal(shape, dim, dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("shape", "dim"), [((1, 2**20 + 3), -1), ((2**17, 40), 0), ((5, 67, 3), 1)], ids=str)
def test_close_where_slices_or_panels_are_used(shape: tuple[int, ...], dim: int, dtype: torch.dtype) -> None:
    x = random(shape, dtype)
    expected = torch.softmax(x.double(), dim).to(dtype)
    torch.testing.assert_close(torchops.softmax_(x, dim), expected)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_layouts(dtype: torch.dtype, dim: int) -> None:
    def views(t: Tensor) -> list[Tensor]:
        return [t.transpose(1, 2), t.transpose(0, 2), t[:, ::3], t[:, :, 5:], t.permute(2, 0, 1)]

    wide = random((40, 96, 70), dtype)
    for i, x in enumerate(views(wide)):
        expected = torch.softmax(x.double(), dim).to(dtype)
        torch.testing.assert_close(torchops.softmax_(views(wide.clone())[i], dim), expected)


def test_transposed_lines_are_lines() -> None:
    x = random((257, 33), torch.float32).t()
    expected = of_torch(x.t(), 1).t()
    assert torch.equal(torchops.softmax_(x, 0), expected)


def test_a_view_leaves_the_rest_alone() -> None:
    base = torch.randn(30, 50)
    expected = base.clone()
    expected[5:20, 10:40] = torch.softmax(expected[5:20, 10:40], -1)
    torchops.softmax_(base[5:20, 10:40])
    torch.testing.assert_close(base, expected)

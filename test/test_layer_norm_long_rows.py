"""layer_norm_ on the CPU of rows longer than the 4 MiB of scratch of a thread, which are computed slice by slice."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torchops

MOST_BYTES = 4 << 20

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "every_second": lambda t: t[..., 1::2],
    "transposed": lambda t: t.transpose(-2, -1),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_values(dtype: torch.dtype, view: Callable[[Tensor], Tensor]) -> None:
    """Those of float64, rounded once; rows of several dimensions, of which the last is longer than a slice or not."""
    columns = MOST_BYTES // dtype.itemsize + 6
    for shape in ((2, 3, columns // 3 * 2), (2, columns // 2, 5)):
        x = view((3 + torch.randn(shape, dtype=torch.float64)).to(dtype))
        w, b = (torch.randn(x.shape[1:], dtype=torch.float64).to(dtype) for _ in range(2))
        exact = F.layer_norm(x.double(), w.shape, w.double(), b.double())
        assert torchops.layer_norm_(x, w.shape, w, b) is x
        of = torch.finfo(dtype)
        rtol = 1e-9 if dtype == torch.float64 else 0.51 * of.eps
        torch.testing.assert_close(x.double(), exact, rtol=rtol, atol=1e-9 + of.tiny * of.eps)


@pytest.mark.parametrize(("dtype", "tiny"), [(torch.float32, 1e-41), (torch.bfloat16, 1e-39)], ids=str)
def test_rstd_beyond_the_dtype_of_the_moments(dtype: torch.dtype, tiny: float) -> None:
    """It becomes infinite, where eager mode has it infinite too. An error would come too late: x is overwritten."""
    x = torch.zeros(1, MOST_BYTES // dtype.itemsize + 2, dtype=dtype)
    x[:, ::2] = tiny
    _, rstd = torch.ops.myops._layer_norm_(x, x.shape[1:], None, None, 0.0)
    assert rstd.item() == math.inf
    torch.testing.assert_close(x, torch.tensor([1, -1], dtype=dtype).repeat(x.shape[1] // 2)[None])


def test_square_of_the_mean_beyond_float64() -> None:
    """The moments of the first slice are merged with those of no elements: nothing comes of infinity times 0."""
    x = torch.full((1, MOST_BYTES // 8 + 1), 1e200, dtype=torch.float64)
    b = torch.randn(x.shape[1:], dtype=torch.float64)
    torchops.layer_norm_(x, b.shape, None, b)
    torch.testing.assert_close(x[0], b)

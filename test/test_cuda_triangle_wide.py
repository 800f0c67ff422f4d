"""The triangle update forward with more than 128 features or channels: sizes for each tiling of its kernels, whether
x stays in shared memory or not, tiles that are not full, and views.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cuda_checks import error
from test_cuda_triangle_gradients import parameters
from torch import Tensor
from triangle_reference import triangle_multiplicative_update as reference

import torchops

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

update: Callable[..., Tensor] = torchops.triangle_multiplicative_update
update_: Callable[..., Tensor] = torchops.add_triangle_multiplicative_update_
# One, two and three tiles of columns of the output step; x and o that stay in shared memory or don't; turns of a single
# step; features and channels of a few elements.
SIZES = [
    (256, 256), (384, 384), (128, 256), (256, 128), (64, 136), (136, 64), (264, 8), (8, 136), (384, 392), (392, 64),
    (448, 520), (520, 448), (640, 200), (1024, 1000),
]  # fmt: skip


@pytest.mark.parametrize("n", [1, 2, 65, 129, 200])
@pytest.mark.parametrize(("c", "d"), SIZES)
def test_values(c: int, d: int, n: int) -> None:
    torch.manual_seed(0)
    for dtype, direction in ((torch.bfloat16, "outgoing"), (torch.float16, "incoming")):
        low: Any = {name: w.to(dtype) for name, w in parameters(c, d, biases=n % 2 == 1).items()}
        exact: Any = {name: w.double() for name, w in low.items()}
        x = torch.randn(2, n, n, c, device="cuda", dtype=dtype) + 0.5
        mask = (torch.rand(2, n, n, device="cuda") > 0.1).to(dtype) if n % 2 == 1 else None
        of_double = None if mask is None else mask.double()
        want, eager = (
            reference(x.double(), direction, mask=of_double, **exact),
            reference(x, direction, mask=mask, **low),
        )
        most = 1.2 * error(eager, want)
        # As it is, transposed in memory, and with rows apart from each other.
        apart = torch.full((2, n, n, c + 8), float("nan"), device="cuda", dtype=dtype)[..., :c].copy_(x)
        for given in (x, x.transpose(1, 2).contiguous().transpose(1, 2), apart):
            assert error(update(given, direction, mask=mask, **low), want) <= most
        for given in (x.clone(), x.transpose(1, 2).clone().transpose(1, 2)):
            update_(given, direction, mask=mask, **low)
            assert error(given, want + x) <= max(1.2 * error(eager + x, want + x), 2**-9)

"""Every call of an operator has the same bits, whatever else runs on the GPU. If a tile is overwritten while a kernel
still reads it, a few rows of some calls are wrong, and no norm of an error shows it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import test_cuda_transition_gradients as of_transition
import torch
from cuda_checks import assert_same_bits, random
from test_cuda_triangle_gradients import parameters
from torch import Tensor
from triangle_reference import rows_weights

import torchops
from torchops.distributed.triangle.update import _in_order as in_order

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DTYPES = [torch.float16, torch.bfloat16]


def with_gradients(
    function: Callable[..., Tensor], x: Tensor, low: dict[str, Tensor], grad: Tensor
) -> Callable[[], list[Tensor]]:
    x = x.requires_grad_()
    leaves: Any = {name: w.requires_grad_() for name, w in low.items()}

    def call() -> list[Tensor]:
        y = function(x, **leaves)
        return [y.detach(), *torch.autograd.grad(y, (x, *leaves.values()), grad)]

    return call


def update(x: Tensor, direction: Any, mask: Tensor, low: dict[str, Any]) -> list[Tensor]:
    return [torchops.triangle_multiplicative_update(x, direction, mask=mask, **low)]


# Rows of an odd number of tiles of 64 positions, of which the last one is almost empty: then tiles that are almost full
# follow others at once, as often as the GPU can. More tiles than are in flight, so that they wait for each other.
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("c", "d", "n"),
    [
        (128, 64, 642), (128, 32, 642), (128, 128, 642), (64, 64, 642), (128, 64, 514), (128, 128, 512),
        (256, 256, 258), (384, 384, 258), (64, 136, 258),
    ],
)  # fmt: skip
def test_triangle_update(c: int, d: int, n: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    low: Any = {name: w.to(dtype) for name, w in parameters(c, d, biases=True).items()}
    x, mask = random(n, n, c, dtype=dtype), torch.rand(n, n, device="cuda") > 0.1
    for direction in ("outgoing", "incoming"):
        assert_same_bits(partial(update, x, direction, mask, low))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("c", "d", "rows", "n"), [(128, 64, 642, 130), (128, 32, 642, 130), (128, 128, 256, 642)])
def test_rows_of_a_triangle_update(c: int, d: int, rows: int, n: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weights = in_order(rows_weights(c, d, False, dtype))
    x, width = random(rows, n, c, dtype=dtype), -(-n // 16) * 16

    def call() -> list[Tensor]:
        a, b = (random(d, rows, width, dtype=dtype) for _ in range(2))
        if not torch.ops.myops._triangle_rows_in(x, None, weights, 1.0, 1e-5, a, b):
            pytest.skip("has no kernels on this GPU")
        return [a, b]

    assert_same_bits(call)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("c", "d", "n"), [(128, 128, 322), (128, 64, 322), (64, 64, 322), (256, 256, 130)])
def test_gradients_of_a_triangle_update(c: int, d: int, n: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    low = {name: w.to(dtype) for name, w in parameters(c, d, biases=True).items()}
    x, grad = (random(n, n, c, dtype=dtype) for _ in range(2))

    def in_place(x: Tensor, **low: Any) -> Tensor:
        y: Tensor = torchops.add_triangle_multiplicative_update_(x.clone(), "outgoing", **low)
        return y

    assert_same_bits(with_gradients(in_place, x, low, grad), 60)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("add_residual", [True, False])
@pytest.mark.parametrize(("c", "hidden"), [(128, 512), (64, 128)])
def test_transition(c: int, hidden: int, add_residual: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    low = {name: w.to(dtype) for name, w in of_transition.parameters(c, hidden).items()}
    x, grad = (random(40_001, c, dtype=dtype) for _ in range(2))

    def transition(x: Tensor, **low: Any) -> Tensor:
        y: Tensor = torchops.add_transition_(x.clone(), **low) if add_residual else torchops.transition(x, **low)
        return y

    assert_same_bits(with_gradients(transition, x, low, grad), 60)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["dense", "gate", "glu"])
@pytest.mark.parametrize(("c", "n"), [(128, 128), (64, 64), (256, 256), (128, 512)])
def test_gates(name: str, c: int, n: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, v, grad = (random(100_001, size, dtype=dtype) for size in (c, n, n))
    low = {"w": random(n, c, dtype=dtype) / c**0.5, "b": random(n, dtype=dtype)}
    if name == "glu":
        low |= {"wg": random(n, c, dtype=dtype) / c**0.5, "bg": random(n, dtype=dtype)}
    function = getattr(torchops, name)

    def call(x: Tensor, **low: Any) -> Tensor:
        y: Tensor = function(v, x, **low) if name == "gate" else function(x, **low)
        return y

    assert_same_bits(with_gradients(call, x, low, grad), 60)

"""The kernels for sharded rows of the triangle update, as two ranks would call them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from triangle_reference import rows_weights as weights
from triangle_reference import triangle_multiplicative_update as reference

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("triton")

import torch.distributed.tensor  # with it, torchops has rules for DTensor

from torchops.distributed.triangle import rows as by_rows
from torchops.distributed.triangle import triton as kernels
from torchops.distributed.triangle import update

GROUPS = 4
NAMES = by_rows.Layers._fields


def in_order(w: dict[str, Tensor]) -> Any:
    return by_rows.apart(update._in_order(w))


def by_two_ranks(
    x: Tensor, mask: Tensor | None, w: dict[str, Tensor], outgoing: bool, first: int, scale: float, add_residual: bool
) -> Tensor:
    n, dtype = x.shape[-2], w["p_out_weight"].dtype
    parts = slice(0, first), slice(first, n)
    sent: list[list[Tensor]] = [[], []]

    def call(
        rank: int, exchange: Callable[[Tensor], Callable[[], Tensor]], target: Tensor, add_residual: bool
    ) -> Tensor:
        rows = parts[rank]
        own, part = target if add_residual else x[:, rows], None if mask is None else mask[:, rows]
        return kernels.update(own, part, in_order(w), n, outgoing, scale, 1e-5, GROUPS, exchange, target, add_residual)

    for rank in range(2):  # what they send

        def exchange(t: Tensor, rank: int = rank) -> Callable[[], Tensor]:
            sent[rank].append(t)
            rows = parts[rank]
            return lambda: t.new_zeros((n if outgoing else rows.stop - rows.start, *t.shape[1:]))

        call(rank, exchange, torch.empty_like(x[:, parts[rank]], dtype=dtype), False)
    targets = []
    for rank in range(2):
        rows = parts[rank]
        whole = iter([torch.cat(pair) if outgoing else sum(pair)[rows] for pair in zip(*sent, strict=True)])
        target = x[:, rows].clone() if add_residual else torch.empty_like(x[:, rows], dtype=dtype)
        o = call(rank, lambda t, whole=whole: lambda: next(whole), target, add_residual)  # type: ignore[misc]
        assert o.shape == (len(x), w["p_out_weight"].shape[1], rows.stop - rows.start, n)
        targets.append(target)
    return torch.cat(targets, 1)


@pytest.mark.parametrize("outgoing", [True, False])
@pytest.mark.parametrize(
    ("n", "first", "c", "d", "dtype", "of_x", "full", "mask", "batch", "add_residual"),
    [
        (67, 34, 128, 128, torch.bfloat16, torch.bfloat16, False, "float", 1, True),
        (130, 66, 32, 64, torch.float16, torch.float32, True, "bool", 2, False),
        (64, 64, 64, 16, torch.bfloat16, torch.float32, True, None, 1, True),
        (3, 2, 16, 128, torch.float16, torch.float16, False, "float", 1, False),
    ],
)
def test_rows_cuda(
    outgoing: bool,
    n: int,
    first: int,
    c: int,
    d: int,
    dtype: torch.dtype,
    of_x: torch.dtype,
    full: bool,
    mask: str | None,
    batch: int,
    add_residual: bool,
) -> None:
    torch.manual_seed(0)
    w = weights(c, d, full, dtype)
    assert kernels.fits(in_order(w))
    x = torch.randn(batch, n, n, c, device="cuda").to(of_x)
    factors = None if mask is None else torch.rand(batch, n, n, device="cuda")
    if factors is not None and mask == "bool":
        factors = factors > 0.3
    exact: Any = {name: t.double() for name, t in w.items()}
    of_exact = None if factors is None else factors if mask == "bool" else factors.double()
    expected = reference(x.double(), "outgoing" if outgoing else "incoming", mask=of_exact, **exact)
    expected = expected + x.double() if add_residual else expected
    scale = 2.0**-3 if dtype == torch.float16 else 1.0
    got = by_two_ranks(x, factors, w, outgoing, first, scale, add_residual).double()
    assert (got - expected).norm() <= 8 * torch.finfo(dtype).eps * expected.norm()


@pytest.mark.parametrize("shape", [(2, 70, 16), (1, 128, 4161), (3, 4161, 128)])
def test_transposed_cuda(shape: tuple[int, ...]) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        t = torch.randn(shape, device="cuda").to(dtype)
        assert torch.equal(kernels.transposed(t), t.mT)

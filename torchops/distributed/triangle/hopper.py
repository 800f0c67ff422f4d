"""A rank's rows of the triangle update on GPUs of compute capability 9.0, in 16 bits: by the kernels that a whole pair
tensor has there, through the private operators ``_triangle_rows_in`` and ``_triangle_rows_out``.

A rank makes its rows of a and b. With these as matrices of a channel, and ranks r, its rows of the product are

    outgoing:  a @ (b of r).T in the columns of r,    incoming:  sum over r of (a of r)[:, own columns].T @ (b of r).

Outgoing, b is made in blocks of rows. As soon as one is made, it goes to the other ranks, while the next block is made
and this rank's own b is multiplied, and then while other blocks are. Incoming, a rank makes its part of each rank's
product, in groups of channels, which travel while other groups are multiplied (``distributed/symmetric_memory.py``).

Besides x and the result, a rank has b of all rows, and its own rows of a and o; or, incoming, its own rows of a, b and
o, parts of o for the others, and theirs for it but one (by collectives, parts for all). Parts are rounded before they
are added. In float16 they must be finite where only their sum had to: they are, unless it is only because they cancel.
Channels are the outermost dimension of all of these, and rows begin at multiples of 32 or 128 bytes, as in the operator
on one GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from torchops._core import _build_info, devices
from torchops.distributed.symmetric_memory import ALIGNMENT, Block, Collectives, Make, peers, room
from torchops.distributed.triangle.rows import GROUPS, P_OUT, arrived

__all__ = ["OwnRows", "elements", "multiply", "own_rows", "update"]

# Outgoing, a rank's rows are made in at most so many blocks, none of fewer rows, or all in one. Smaller blocks are sent
# earlier, but a product has the rows of one block as its columns.
BLOCKS, LEAST_ROWS = 2, 256
_MULTIPLE = 64

_rows_in = torch.ops.myops._triangle_rows_in.default
_rows_out = torch.ops.myops._triangle_rows_out.default


@cache
def _is_hopper(device: torch.device) -> bool:
    """A GPU of compute capability 9.0, for which this build has kernels."""
    built = bool(_build_info.gemm_architectures)
    return built and device.type == "cuda" and devices.capability(device) == (9, 0)


def _have_kernels(x: Tensor, p_out: Tensor) -> bool:
    """Whether there may be kernels, which ``_triangle_rows_in`` decides. Depends on what ranks share."""
    narrow = all(size <= 128 and size % 8 == 0 for size in p_out.shape)
    path = torch.ops.myops._kernel_path() in ("auto", "fused")
    return path and narrow and x.dtype == p_out.dtype and x.element_size() == 2 and _is_hopper(x.device)


def _blocks(own: int) -> list[slice]:
    size = max(-(-own // BLOCKS), LEAST_ROWS)
    size = -(-size // _MULTIPLE) * _MULTIPLE
    return [slice(first, min(first + size, own)) for first in range(0, own, size)]


def multiply(out: Tensor, a: Tensor, b: Tensor, accumulate: bool) -> None:
    """a @ b of each channel, added to `out` or written to it."""
    if accumulate:
        out.baddbmm_(a, b)
    else:
        torch.bmm(a, b, out=out)


class OwnRows:
    """A rank's rows of a call: what the elements of a batch share. `call` is a TriangleCall with product_shape()."""

    def __init__(self, call: Any, x: Tensor, mask: Tensor | None, group: Any) -> None:
        self.call, self.x, self.mask, self.group = call, x, mask, group
        self.parameters = [None if t is None else arrived(t) for t in call.parameters]
        self.scale, self.eps = call.scale(), call.eps
        self.eps_out = call.eps * self.scale**2
        *_, self.d, self.width, self.stride = call.product_shape()
        self.own, self.n, _ = x.shape[-3:]
        self.channels_shape = (self.d, self.own, self.stride)  # of a, b and o, with columns after N

    def channels(self, *batch: int) -> Tensor:
        return self.x.new_empty(*batch, *self.channels_shape)

    def ranks(self, trains: bool) -> Collectives:
        """To send a rank's own rows of b or d_o; and what it makes for others, which is at least as much: of o
        (incoming) or of db (in the gradient of an outgoing call that `trains`)."""
        rows = self.own if self.call.outgoing and not trains else self.n - self.own
        size = room(self.x, self.d, rows, self.stride) + max(BLOCKS, GROUPS) * ALIGNMENT
        return peers(self.group, self.x.device, size)

    def make(self, x: Tensor, mask: Tensor | None, a: Tensor, b: Tensor) -> bool:
        """Writes rows of a and b, (d, rows, width). False if there are no kernels."""
        made: bool = _rows_in(x, mask, self.parameters, self.scale, self.eps, a, b)
        return made

    def of_rank(self, block: Block, rank: int) -> Tensor:
        return block.parts[rank][..., : self.width]

    def columns(self, rank: int, rows: slice | None = None) -> slice:
        """Where a rank's rows are, or these of them, as columns."""
        start, stop = (0, self.own) if rows is None else (rows.start, rows.stop)
        return slice(rank * self.own + start, rank * self.own + stop)


def _outgoing(this: OwnRows, ranks: Collectives, x: Tensor, mask: Tensor | None, o: Tensor | None) -> Tensor | None:
    """This rank's rows of the product, which are written to `o` if it is given. None if there are no kernels."""
    ranks.begin()
    a = this.channels()[..., : this.width]
    sent: list[tuple[slice, Block]] = []
    for rows in _blocks(this.own):
        block = ranks.block(x, this.d, rows.stop - rows.start, this.stride)
        of_mask = None if mask is None else mask[rows]
        if not this.make(x[rows], of_mask, a[:, rows], this.of_rank(block, ranks.rank)):
            return None
        block.send()
        sent.append((rows, block))
    product = this.channels() if o is None else o

    def multiply_by(rank: int, rows: slice, block: Block) -> None:
        multiply(product[..., this.columns(rank, rows)], a, this.of_rank(block, rank).mT, accumulate=False)

    for each in sent:
        multiply_by(ranks.rank, *each)
    for rows, block in sent:
        block.wait()
        for rank in range(ranks.count):
            if rank != ranks.rank:
                multiply_by(rank, rows, block)
    return product


def _incoming(this: OwnRows, ranks: Collectives, x: Tensor, mask: Tensor | None, o: Tensor | None) -> Tensor | None:
    """The same in the other direction."""
    a, b = (this.channels()[..., : this.width] for _ in range(2))
    if not this.make(x, mask, a, b):
        return None
    ranks.begin()  # only now: a and b are no memory that others read
    product = this.channels() if o is None else o

    def maker_of(group: slice) -> Make:
        def make(out: Tensor, rank: int, accumulate: bool) -> None:
            multiply(out[..., : this.width], a[group, :, this.columns(rank)].mT, b[group], accumulate)

        return make

    size, waits = -(-this.d // GROUPS), []
    for first in range(0, this.d, size):
        group = slice(first, first + size)
        waits.append(ranks.summed(maker_of(group), product[group]))
    for wait in waits:
        wait()
    return product


def _element(
    this: OwnRows,
    ranks: Collectives,
    x: Tensor,
    mask: Tensor | None,
    o: Tensor | None,
    target: Tensor,
    add_residual: bool,
) -> bool:
    """Writes the update of x (own, N, c) to `target`, and the product to `o`. False if there are no kernels."""
    product = (_outgoing if this.call.outgoing else _incoming)(this, ranks, x, mask, o)
    if product is None:
        return False
    if not _rows_out(product[..., : this.n], x, this.parameters, this.eps, this.eps_out, target, add_residual):
        raise RuntimeError("_triangle_rows_out: expected arguments like those of _triangle_rows_in, got others")
    return True


def own_rows(call: Any) -> OwnRows | None:
    """None, on all ranks, if they have no kernels for a call or different numbers of rows."""
    x, mask = arrived(call.x), None if call.mask is None else arrived(call.mask)
    # Other types of tensors stand for something else than memory on this device.
    if type(x) is not Tensor or not x.numel() or not _have_kernels(x, call.parameters[P_OUT]):
        return None
    if call.placements.count(call.rows) != 1:
        return None
    mesh = call.whole.device_mesh
    dimension = call.placements.index(call.rows)
    if x.shape[-2] % mesh.size(dimension):
        return None
    return OwnRows(call, x, mask, mesh.get_group(dimension))


def elements(x: Tensor, *tensors: Tensor | None) -> Iterator[Sequence[Any]]:
    """The elements of the batch of these tensors, whose batch is that of x (*batch, rows, N, c)."""
    batch = x.shape[:-3]

    def flat(t: Tensor | None) -> Any:
        size = math.prod(batch)
        return [None] * size if t is None else t.reshape(size, *t.shape[len(batch) :])

    return zip(*map(flat, tensors), strict=True)


def update(call: Any, keep: bool, add_residual: bool) -> tuple[Tensor, Tensor] | None:
    """The update of a rank's rows, or x after adding the update to it, and the product if it is to be kept; None on all
    ranks, with nothing done, if they have no kernels for it or different numbers of rows."""
    this = own_rows(call)
    if this is None:
        return None
    x, mask = this.x, this.mask
    # In place, element by element, unless what is still to be read may lie in the memory of x.
    inside = add_residual and x.is_contiguous() and x.data_ptr() % 16 == 0 and not x.is_neg()
    others = (t for t in (mask, *this.parameters) if t is not None)
    inside = inside and all(t.untyped_storage().data_ptr() != x.untyped_storage().data_ptr() for t in others)
    target = x if inside else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    product = this.channels(*x.shape[:-3]) if keep else None
    try:
        with devices.on(x.device), this.ranks(keep) as ranks:
            for x_i, mask_i, o, to in elements(x, x, mask, product, target):
                if not _element(this, ranks, x_i, mask_i, o, to, add_residual):
                    return None
    except BaseException:
        if inside and not call.whole.is_inference():  # earlier elements may have been overwritten
            torch.autograd.graph.increment_version(call.whole)
        raise
    if add_residual and not inside:
        target = x.copy_(target)
    return target, x.new_empty(0) if product is None else product[..., : this.n]

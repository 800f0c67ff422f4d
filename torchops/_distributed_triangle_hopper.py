"""A rank's rows of the triangle update on GPUs of compute capability 9.0, in 16 bits: by the kernels that a whole pair
tensor has there, through the private operators ``_triangle_rows_in`` and ``_triangle_rows_out``.

Rows are made in blocks. As soon as one is made, its b goes to the other ranks, while the next block is made and this
rank's own b is multiplied, and then while other blocks are (``_distributed_peers.py``).

Besides x and the result, a rank has b of all rows, and its own rows of a and o; incoming, before o, also x as it is
sent and as it arrives. Channels are the outermost dimension of all blocks of a, b and o, whose rows begin at multiples
of 32 or 128 bytes, as in the operator on one GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from torchops import _attention_update_operators as operators
from torchops import _build_info
from torchops._distributed_peers import ALIGNMENT, Block, Collectives, peers, room
from torchops._distributed_triangle_rows import P_OUT, arrived

__all__ = ["OwnRows", "elements", "own_rows", "update"]

# A rank's rows are made in at most so many blocks, none of fewer rows, or all in one. Smaller blocks are sent earlier,
# but a product has the rows of one block as its columns.
BLOCKS, LEAST_ROWS = 2, 256
_MULTIPLE = 64

_rows_in = torch.ops.myops._triangle_rows_in.default
_rows_out = torch.ops.myops._triangle_rows_out.default


@cache
def _is_hopper(device: torch.device) -> bool:
    """A GPU of compute capability 9.0, for which this build has kernels."""
    built = bool(_build_info.gemm_architectures)
    return built and device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def _have_kernels(x: Tensor, p_out: Tensor) -> bool:
    """Whether there may be kernels, which ``_triangle_rows_in`` decides. Depends on what ranks share."""
    narrow = all(size <= 128 and size % 8 == 0 for size in p_out.shape)
    path = torch.ops.myops._dense_path() in ("auto", "fused")
    return path and narrow and x.dtype == p_out.dtype and x.element_size() == 2 and _is_hopper(x.device)


def _blocks(own: int) -> list[slice]:
    size = max(-(-own // BLOCKS), LEAST_ROWS)
    size = -(-size // _MULTIPLE) * _MULTIPLE
    return [slice(first, min(first + size, own)) for first in range(0, own, size)]


class OwnRows:
    """A rank's rows of a call: what the elements of a batch share. `call` is a TriangleCall with product_shape()."""

    def __init__(self, call: Any, x: Tensor, mask: Tensor | None, group: Any) -> None:
        self.call, self.x, self.mask, self.group = call, x, mask, group
        self.parameters = [None if t is None else arrived(t) for t in call.parameters]
        self.scale, self.eps = call.scale(), call.eps
        self.eps_out = call.eps * self.scale**2
        *_, self.d, self.width, self.stride = call.product_shape()
        self.own, self.n, self.c = x.shape[-3:]
        self.channels_shape = (self.d, self.own, self.stride)  # of a, b and o, with columns after N

    def channels(self, *batch: int) -> Tensor:
        return self.x.new_empty(*batch, *self.channels_shape)

    def ranks(self, trains: bool) -> Collectives:
        """To exchange b, or if the call `trains`, also its gradient; and, incoming, as much of x as others need."""
        size = room(self.x, self.d, max(self.own, self.n - self.own) if trains else self.own, self.stride)
        if not self.call.outgoing:
            size += room(self.x, self.n - self.own, self.own, self.c)
        return peers(self.group, self.x.device, size + 2 * BLOCKS * ALIGNMENT)

    def inputs(
        self, ranks: Collectives, x: Tensor, mask: Tensor | None, rows: slice
    ) -> Callable[[], tuple[Tensor, Tensor | None]]:
        """These rows of x and the mask, in the direction of the update. Both may be on their way until the result is
        called."""
        if self.call.outgoing:
            return lambda: (x[rows], None if mask is None else mask[rows])
        of_x, of_mask = ranks.turned(x, rows), None if mask is None else ranks.turned(mask, rows)
        return lambda: (of_x(), None if of_mask is None else of_mask())

    def make(self, x: Tensor, mask: Tensor | None, a: Tensor, b: Tensor) -> bool:
        """Writes rows of a and b, (d, rows, width). False if there are no kernels."""
        made: bool = _rows_in(x, mask, self.parameters, self.scale, self.eps, a, b)
        return made

    def columns(self, rank: int, rows: slice) -> slice:
        """Where these of a rank's rows are, as columns."""
        first = rank * self.own
        return slice(first + rows.start, first + rows.stop)


def _element(
    this: OwnRows, ranks: Collectives, x: Tensor, mask: Tensor | None, o: Tensor | None, target: Tensor, adds: bool
) -> bool:
    """Writes the update of x (own, N, c) to `target`, and the product to `o`. False if there are no kernels."""
    ranks.begin()
    a, blocks = this.channels()[..., : this.width], _blocks(this.own)
    coming = [this.inputs(ranks, x, mask, rows) for rows in blocks]
    sent: list[tuple[slice, Block]] = []
    for rows in blocks:
        y, of_y = coming.pop(0)()
        block = ranks.block(x, this.d, rows.stop - rows.start, this.stride)
        if not this.make(y, of_y, a[:, rows], block.parts[ranks.rank][..., : this.width]):
            for left in coming:
                left()
            return False
        block.send()
        sent.append((rows, block))
        del y, of_y
    if o is None:
        o = this.channels()

    def multiply(rank: int, rows: slice, block: Block) -> None:
        b = block.parts[rank][..., : this.width]
        torch.bmm(a, b.mT, out=o[..., this.columns(rank, rows)])

    for each in sent:
        multiply(ranks.rank, *each)
    for rows, block in sent:
        block.wait()
        for rank in range(ranks.count):
            if rank != ranks.rank:
                multiply(rank, rows, block)
    if not _rows_out(o[..., : this.n], x, this.parameters, this.eps, this.eps_out, target, adds):
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


def update(call: Any, keep: bool, adds: bool) -> tuple[Tensor, Tensor] | None:
    """The update of a rank's rows, or x after adding the update to it, and the product if it is to be kept; None on all
    ranks, with nothing done, if they have no kernels for it or different numbers of rows."""
    this = own_rows(call)
    if this is None:
        return None
    x, mask = this.x, this.mask
    # In place, element by element, unless what is still to be read may lie in the memory of x.
    inside = adds and x.is_contiguous() and x.data_ptr() % 16 == 0 and not x.is_neg()
    others = (t for t in (mask, *this.parameters) if t is not None)
    inside = inside and all(t.untyped_storage().data_ptr() != x.untyped_storage().data_ptr() for t in others)
    target = x if inside else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    product = this.channels(*x.shape[:-3]) if keep else None
    try:
        with operators._on(x.device), this.ranks(keep) as ranks:
            for x_i, mask_i, o, to in elements(x, x, mask, product, target):
                if not _element(this, ranks, x_i, mask_i, o, to, adds):
                    return None
    except BaseException:
        if inside and not call.whole.is_inference():  # earlier elements may have been overwritten
            torch.autograd.graph.increment_version(call.whole)
        raise
    if adds and not inside:
        target = x.copy_(target)
    return target, x.new_empty(0) if product is None else product[..., : this.n]

"""A rank's rows of the triangle update on GPUs of compute capability 9.0, in 16 bits: by the kernels that a whole pair
tensor has there, through the private operators ``_triangle_rows_in`` and ``_triangle_rows_out``.

Rows are made in blocks. As soon as one is made, its b goes to the other ranks, while the next block is made and this
rank's own b is multiplied, and then while other blocks are. Collectives are called without DTensor, whose
redistribution of a block would take longer on the host than the transfer does on the device.

Channels are the outermost dimension of all blocks, whose rows begin at multiples of 32 or 128 bytes, as in the operator
on one GPU. Besides x and the result, a rank has b of all rows, and its own rows of a and o; incoming, before o, also x
as it is sent and as it arrives.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchops import _attention_update_operators as operators
from torchops import _build_info
from torchops._distributed_triangle_rows import P_OUT, TriangleCall, arrived

__all__ = ["update"]

# A rank's rows are made in at most so many blocks, none of fewer rows, or all in one. Smaller blocks are sent earlier,
# but a product has the rows of one block as its columns.
BLOCKS, LEAST_ROWS = 2, 256
_MULTIPLE = 64

_rows_in = torch.ops.myops._triangle_rows_in.default
_rows_out = torch.ops.myops._triangle_rows_out.default
# all_gather_into_tensor is the name in older versions of torch.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


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


class _Ranks:
    """Those that share a pair tensor's rows evenly."""

    def __init__(self, call: TriangleCall) -> None:
        self.group = call.whole.device_mesh.get_group(call.placements.index(call.rows))
        self.rank, self.count = dist.get_rank(self.group), dist.get_world_size(self.group)

    def gathered(self, parts: Tensor) -> Any:
        """Fills `parts`, of which this rank has its own; the work to wait for, during which `parts` must be held."""
        return _all_gather(parts.flatten(0, 1), parts[self.rank], group=self.group, async_op=True)

    def turned(self, rows: Tensor, columns: slice) -> Callable[[], Tensor]:
        """These of a rank's own columns, as rows (columns, N, ...), from its rows (own, N, ...). The function that is
        returned waits for them."""
        sent = rows.unflatten(1, (self.count, -1))[:, :, columns].transpose(0, 1).contiguous()
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=self.group, async_op=True)

        def wait(_held: Tensor = sent) -> Tensor:
            work.wait()
            return received.flatten(0, 1).transpose(0, 1)

        return wait


class _Update:
    """What the elements of a batch share. `call` is a TriangleCall with product_shape()."""

    def __init__(self, call: Any, adds: bool) -> None:
        self.call, self.adds, self.ranks = call, adds, _Ranks(call)
        self.parameters = [None if t is None else arrived(t) for t in call.parameters]
        self.scale = call.scale()
        *_, self.d, self.width, self.stride = call.product_shape()

    def empty_product(self, x: Tensor) -> Tensor:
        """o of a batch (*batch, own, N, c), with columns after N."""
        *batch, own, _, _ = x.shape
        return x.new_empty(*batch, self.d, own, self.stride)

    def _block(self, x: Tensor, mask: Tensor | None, rows: slice) -> Callable[[], tuple[Tensor, Tensor | None]]:
        """These rows, in the direction of the update. Both may be on their way until the result is called."""
        if self.call.outgoing:
            return lambda: (x[rows], None if mask is None else mask[rows])
        of_x, of_mask = self.ranks.turned(x, rows), None if mask is None else self.ranks.turned(mask, rows)
        return lambda: (of_x(), None if of_mask is None else of_mask())

    def element(self, x: Tensor, mask: Tensor | None, o: Tensor | None, target: Tensor) -> bool:
        """Writes the update of x (own, N, c) to `target`, and the product to `o`. False if there are no kernels."""
        own, n, _ = x.shape
        a = x.new_empty(self.d, own, self.stride)[..., : self.width]
        blocks, sent = _blocks(own), []
        coming = [self._block(x, mask, rows) for rows in blocks]
        for rows in blocks:
            y, of_y = coming.pop(0)()
            parts = x.new_empty(self.ranks.count, self.d, rows.stop - rows.start, self.stride)
            b = parts[self.ranks.rank, ..., : self.width]
            if not _rows_in(y, of_y, self.parameters, self.scale, self.call.eps, a[:, rows], b):
                for left in coming:
                    left()
                return False
            sent.append((rows.start, parts, self.ranks.gathered(parts)))
            del y, of_y
        if o is None:
            o = self.empty_product(x)
        for first, parts, _ in sent:
            self._multiply(a, parts, self.ranks.rank, first, o)
        for first, parts, work in sent:
            work.wait()
            for rank in range(self.ranks.count):
                if rank != self.ranks.rank:
                    self._multiply(a, parts, rank, first, o)
        eps_out = self.call.eps * self.scale**2
        if not _rows_out(o[..., :n], x, self.parameters, self.call.eps, eps_out, target, self.adds):
            raise RuntimeError("_triangle_rows_out: expected arguments like those of _triangle_rows_in, got others")
        return True

    def _multiply(self, a: Tensor, parts: Tensor, rank: int, first: int, o: Tensor) -> None:
        """The columns of o that a block of a rank's rows makes."""
        b, start = parts[rank, ..., : self.width], rank * a.shape[1] + first
        torch.bmm(a, b.mT, out=o[..., start : start + b.shape[1]])


def update(call: Any, keep: bool, adds: bool) -> tuple[Tensor, Tensor] | None:
    """The update of a rank's rows, or x after adding the update to it, and the product if it is to be kept; None on all
    ranks, with nothing done, if they have no kernels for it or different numbers of rows."""
    x, mask, n = arrived(call.x), None if call.mask is None else arrived(call.mask), call.whole.shape[-2]
    # Other types of tensors stand for something else than memory on this device.
    if type(x) is not Tensor or not x.numel() or not _have_kernels(x, call.parameters[P_OUT]):
        return None
    if call.placements.count(call.rows) != 1:
        return None
    this = _Update(call, adds)
    if n % this.ranks.count:
        return None
    # In place, element by element, unless what is still to be read may lie in the memory of x.
    inside = adds and x.is_contiguous() and x.data_ptr() % 16 == 0 and not x.is_neg()
    others = (t for t in (mask, *this.parameters) if t is not None)
    inside = inside and all(t.untyped_storage().data_ptr() != x.untyped_storage().data_ptr() for t in others)
    target = x if inside else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    product = this.empty_product(x) if keep else None

    def elements(t: Tensor | None) -> Any:
        batch = math.prod(x.shape[:-3])
        return [None] * batch if t is None else t.reshape(batch, *t.shape[x.ndim - 3 :])

    try:
        with operators._on(x.device):
            for each in zip(*map(elements, (x, mask, product, target)), strict=True):
                if not this.element(*each):
                    return None
    except BaseException:
        if inside and not call.whole.is_inference():  # earlier elements may have been overwritten
            torch.autograd.graph.increment_version(call.whole)
        raise
    if adds and not inside:
        target = x.copy_(target)
    return target, x.new_empty(0) if product is None else product[..., :n]

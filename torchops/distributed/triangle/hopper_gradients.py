"""The gradients of a rank's rows of the triangle update where `distributed/triangle/hopper.py` has made them: by the
kernels that a whole pair tensor has, through the private operators ``_triangle_rows_out_backward``,
``_triangle_rows_in_backward`` and ``_triangle_rows_parameter_gradients``.

a and b are made again. With rows of a, b and d_o (the cotangent of the product) as matrices of a channel, and ranks r,

    outgoing:  da = sum over r of d_o[:, columns of r] @ b of r
               db = sum over r of (d_o of r)[:, own columns].T @ (a of r)
    incoming:  da = b @ (d_o of r).T in the columns of r
               db = sum over r of a[:, columns of r] @ d_o of r

Outgoing, b is gathered again, while the output step's gradients are made, and a rank makes a part of each rank's db,
which arrives while da is made. Besides x, the cotangent and x's gradient, a rank has its own rows of a, o, d_o and da,
b of all rows, and while that is there, the parts of db from all ranks (by collectives, also those for them).
Incoming, d_o is gathered, while a and b are made, and a rank has its own rows of a, b, o, da and db, and d_o of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchops._core import devices
from torchops.distributed.symmetric_memory import Collectives
from torchops.distributed.triangle.hopper import OwnRows, elements, multiply, own_rows
from torchops.distributed.triangle.rows import apart, arrived

__all__ = ["gradients"]

_out_backward = torch.ops.myops._triangle_rows_out_backward.default
_in_backward = torch.ops.myops._triangle_rows_in_backward.default
_parameter_gradients = torch.ops.myops._triangle_rows_parameter_gradients.default

_WEIGHTS = ("p_out", "g_out", "p_a", "g_a", "p_b", "g_b")


def _readable(this: OwnRows, product: Tensor) -> Tensor:
    """As `_triangle_rows_out` reads it: saved-tensor hooks may have returned a copy without the padding of its rows."""
    bytes_apart = (product.data_ptr(), *(n * product.element_size() for n in product.stride()[-3:-1]))
    if product.stride(-1) == 1 and all(n % 16 == 0 for n in bytes_apart):
        return product
    return this.channels(*product.shape[:-3])[..., : this.n].copy_(product)


def _sums(this: OwnRows, batch: int) -> Tensor:
    """What the parameters' gradients are made of: of each layer, w.shape and a bias."""
    layers = apart(this.parameters)
    size = sum(w.shape[0] * (w.shape[1] + 1) for w in (getattr(layers, name) for name in _WEIGHTS))
    return this.x.new_empty(batch, size, dtype=_moments_dtype(this.x))


def _moments_dtype(x: Tensor) -> torch.dtype:
    """float32 for what has kernels."""
    return torch.promote_types(x.dtype, torch.float32)


class _OutputStep(NamedTuple):
    """What the gradients of an element's output step read and write, besides what they share with the others."""

    grad: Tensor
    o: Tensor
    dz: Tensor
    sums: Tensor


class _Element:
    """The gradients of one pair tensor."""

    def __init__(self, this: OwnRows, ranks: Collectives, x: Tensor, mask: Tensor | None) -> None:
        self.this, self.ranks, self.x, self.mask = this, ranks, x, mask
        self.a = this.channels()[..., : this.width]
        self.moments = this.x.new_empty(this.own, this.n, 2, dtype=_moments_dtype(this.x))

    def _others(self) -> Iterator[int]:
        return (rank for rank in range(self.ranks.count) if rank != self.ranks.rank)

    def _make(self, b: Tensor) -> bool:
        """a and b again. False if there are no kernels."""
        return self.this.make(self.x, self.mask, self.a, b)

    def _output_step(self, step: _OutputStep, d_o: Tensor) -> bool:
        """d_o, the gate's part of dz, and the moments of x's rows. False if there are no kernels."""
        this = self.this
        read = (step.grad, step.o, self.x, this.parameters, this.eps, this.eps_out)
        done: bool = _out_backward(*read, d_o, step.dz, self.moments, step.sums)
        return done

    def outgoing(self, step: _OutputStep) -> tuple[Tensor, Tensor] | None:
        """Makes what the output step does; then da and db. None if there are no kernels."""
        this, ranks, own = self.this, self.ranks, self.ranks.rank
        of_b = ranks.block(self.x, *this.channels_shape)
        if not self._make(this.of_rank(of_b, own)):
            return None
        of_b.send()
        d_o = this.channels()[..., : this.width]
        if not self._output_step(step, d_o):
            of_b.wait()
            return None
        da, db = this.channels()[..., : this.width], this.channels()
        multiply(da, d_o[..., this.columns(own)], this.of_rank(of_b, own), accumulate=False)
        of_b.wait()
        ranks.begin()  # all have b: what was sent may be overwritten

        def part_of_db(out: Tensor, rank: int, accumulate: bool) -> None:
            multiply(out[..., : this.width], d_o[..., this.columns(rank)].mT, self.a, accumulate)

        arrive = ranks.summed(part_of_db, db)
        for rank in self._others():
            multiply(da, d_o[..., this.columns(rank)], this.of_rank(of_b, rank), accumulate=True)
        arrive()
        return da, db[..., : this.width]

    def incoming(self, step: _OutputStep) -> tuple[Tensor, Tensor] | None:
        """The same in the other direction."""
        this, own = self.this, self.ranks.rank
        of_d_o = self.ranks.block(self.x, *this.channels_shape)
        if not self._output_step(step, this.of_rank(of_d_o, own)):
            return None
        of_d_o.send()
        b, da, db = (this.channels()[..., : this.width] for _ in range(3))
        if not self._make(b):
            of_d_o.wait()
            return None

        def multiply_by(rank: int) -> None:
            d_o, columns = this.of_rank(of_d_o, rank), this.columns(rank)
            multiply(da[..., columns], b, d_o.mT, accumulate=False)
            multiply(db, self.a[..., columns], d_o, accumulate=rank != own)

        multiply_by(own)
        of_d_o.wait()
        for rank in self._others():
            multiply_by(rank)
        return da, db

    def input_step(self, da: Tensor, db: Tensor, dz: Tensor, residual: Tensor | None, sums: Tensor) -> None:
        """dx, which overwrites the gate's part of dz."""
        this = self.this
        step = (da, db, self.x, self.mask, this.parameters, this.scale, this.eps, self.moments)
        if not _in_backward(*step, dz, residual, sums):
            raise RuntimeError(
                "_triangle_rows_in_backward: expected arguments like those of the output step, got others"
            )


def gradients(
    call: Any, grad: Tensor, product: Tensor, output_mask: Sequence[bool], add_residual: bool
) -> list[Tensor | None] | None:
    """The gradients of x, the mask and the parameters; None on all ranks, with nothing done, if they have no kernels.
    The kernels compute all of them but the mask's, and apply if that is what is wanted."""
    this = own_rows(call)
    given = [t is not None for t in call.parameters]
    if this is None or not output_mask[0] or output_mask[1] or list(output_mask[2:]) != given:
        return None
    x = this.x.contiguous()
    grad, product = arrived(grad).contiguous(), _readable(this, arrived(product))
    dx = torch.empty_like(x)
    sums = _sums(this, x.shape[:-3].numel())
    with devices.on(x.device), this.ranks(trains=True) as ranks:
        batch = zip(elements(x, x, this.mask, grad, product, dx), sums.unbind(), strict=True)
        for (x_i, mask, grad_i, o, dz), sums_i in batch:
            ranks.begin()
            element, step = _Element(this, ranks, x_i, mask), _OutputStep(grad_i, o, dz, sums_i)
            made = (element.outgoing if call.outgoing else element.incoming)(step)
            if made is None:
                return None
            element.input_step(*made, dz, grad_i if add_residual else None, sums_i)
            del made  # before those of the next element
        of_parameters = _parameter_gradients(sums, this.parameters, output_mask[2:])
    return [dx, None, *(g if want else None for g, want in zip(of_parameters, output_mask[2:], strict=True))]

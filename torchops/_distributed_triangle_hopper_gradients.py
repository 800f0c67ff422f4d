"""The gradients of a rank's rows of the triangle update where `_distributed_triangle_hopper.py` has made them: by the
kernels that a whole pair tensor has, through the private operators ``_triangle_rows_out_backward``,
``_triangle_rows_in_backward`` and ``_triangle_rows_parameter_gradients``.

a and b are made again. With rows of a, b and d_o (the cotangent of the product) as matrices of a channel, and ranks r,

    da = sum over r of d_o[:, columns of r] @ b of r,    db = sum over r of (d_o of r)[:, own columns].T @ (a of r),

so b is gathered again, and a rank makes a part of each rank's db. b arrives while the output step's gradients are made,
and the parts of db while da is. Besides x, the cotangent and x's gradient, a rank has its own rows of a, o, d_o and da,
b of all rows, and while that is there, the parts of db from all ranks (by collectives, also those for them); incoming,
also x and its gradient in the other direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchops import _attention_update_operators as operators
from torchops._distributed_peers import Block, Collectives
from torchops._distributed_triangle_hopper import OwnRows, elements, own_rows
from torchops._distributed_triangle_rows import apart, arrived

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


class _Element:
    """The gradients of one pair tensor."""

    def __init__(self, this: OwnRows, ranks: Collectives, x: Tensor, mask: Tensor | None) -> None:
        self.this, self.ranks, self.x, self.mask = this, ranks, x, mask
        self.all_rows = slice(0, this.own)

    def make_factors(self) -> bool:
        """a and b again, in the direction of the update. False if there are no kernels."""
        this = self.this
        self.y, self.of_y = this.inputs(self.ranks, self.x, self.mask, self.all_rows)()
        self.a = this.channels()[..., : this.width]
        self.block: Block = self.ranks.block(self.x, *this.channels_shape)
        if not this.make(self.y, self.of_y, self.a, self._b(self.ranks.rank)):
            return False
        self.block.send()
        return True

    def output_step(self, grad: Tensor, o: Tensor, dz: Tensor, sums: Tensor) -> bool:
        """d_o, the gate's part of dz, and the moments of x's rows. False if there are no kernels."""
        this = self.this
        self.d_o = this.channels()[..., : this.width]
        self.moments = this.x.new_empty(this.own, this.n, 2, dtype=_moments_dtype(this.x))
        step = (grad, o, self.x, this.parameters, this.eps, this.eps_out, self.d_o, dz, self.moments, sums)
        done: bool = _out_backward(*step)
        if not done:
            self.block.wait()
        return done

    def _b(self, rank: int) -> Tensor:
        return self.block.parts[rank][..., : self.this.width]

    def _columns(self, rank: int) -> Tensor:
        return self.d_o[..., self.this.columns(rank, self.all_rows)]

    def _db_of(self, part: Tensor, rank: int, adds: bool) -> None:
        out, columns = part[..., : self.this.width], self._columns(rank).mT
        if adds:
            out.baddbmm_(columns, self.a)
        else:
            torch.bmm(columns, self.a, out=out)

    def factor_gradients(self) -> tuple[Tensor, Tensor]:
        """da and db."""
        this, ranks = self.this, self.ranks
        da = this.channels()[..., : this.width]
        torch.bmm(self._columns(ranks.rank), self._b(ranks.rank), out=da)
        self.block.wait()
        ranks.begin()  # all have b: what was sent may be overwritten
        db = ranks.summed(self._db_of, self.x, *this.channels_shape)
        for rank in range(ranks.count):
            if rank != ranks.rank:
                da.baddbmm_(self._columns(rank), self._b(rank))
        del self.block
        return da, db()[..., : this.width]

    def input_step(self, da: Tensor, db: Tensor, dz: Tensor, residual: Tensor | None, sums: Tensor) -> None:
        """dx, which overwrites the gate's part of dz."""
        this, ranks = self.this, self.ranks
        step = (da, db, self.y, self.of_y, this.parameters, this.scale, this.eps)
        if this.call.outgoing:
            _took(_in_backward(*step, self.moments, dz, residual, sums))
            return
        # What comes from y, in columns of x, and from the gate, in rows, go through the layer norm apart. dz is the
        # cotangent of the normalised rows, before their weight and bias.
        of_y = self.y.new_zeros(self.y.shape)
        _took(_in_backward(*step, ranks.turned(self.moments, self.all_rows)(), of_y, None, sums))
        ranks.begin()
        coming = ranks.turned(of_y, self.all_rows)
        rstd, shift = (t.unsqueeze(-1).contiguous() for t in self.moments.unbind(-1))
        norm = (self.x, (this.c,), -shift / rstd, rstd, None)
        through_gate = torch.ops.myops._layer_norm_backward(dz, *norm, [True, False, False])[0]
        torch.add(through_gate, coming(), out=dz)
        if residual is not None:
            dz.add_(residual)


def _took(done: bool) -> None:
    if not done:
        raise RuntimeError("_triangle_rows_in_backward: expected arguments like those of the output step, got others")


def gradients(
    call: Any, grad: Tensor, product: Tensor, wanted: Sequence[bool], adds: bool
) -> list[Tensor | None] | None:
    """The gradients of x, the mask and the parameters; None on all ranks, with nothing done, if they have no kernels.
    The kernels compute all of them but the mask's, and apply if that is what is wanted."""
    this = own_rows(call)
    given = [t is not None for t in call.parameters]
    if this is None or not wanted[0] or wanted[1] or list(wanted[2:]) != given:
        return None
    x = this.x.contiguous()
    grad, product = arrived(grad).contiguous(), _readable(this, arrived(product))
    dx = torch.empty_like(x)
    sums = _sums(this, x.shape[:-3].numel())
    with operators._on(x.device), this.ranks(trains=True) as ranks:
        batch = zip(elements(x, x, this.mask, grad, product, dx), sums.unbind(), strict=True)
        for (x_i, mask, grad_i, o, dz), sums_i in batch:
            element = _Element(this, ranks, x_i, mask)
            ranks.begin()
            if not (element.make_factors() and element.output_step(grad_i, o, dz, sums_i)):
                return None
            element.input_step(*element.factor_gradients(), dz, grad_i if adds else None, sums_i)
        of_parameters = _parameter_gradients(sums, this.parameters, wanted[2:])
    return [dx, None, *(g if asked else None for g, asked in zip(of_parameters, wanted[2:], strict=True))]

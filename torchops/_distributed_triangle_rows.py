"""A rank's rows of the triangle update of ``DTensor``, through layer_norm, glu and gate; for
:mod:`torchops._distributed_triangle`. The gradient is written out here, since DTensor's rules run below autograd.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.nn.functional import linear

from torchops import attention
from torchops._distributed_pair import PairCall, local, wrap
from torchops._gated_triangle import scale_of_product

_myops = torch.ops.myops


class Layers(NamedTuple):
    """The parameters in the order of the private operator: weights and biases alternate."""

    norm_in: Tensor | None
    norm_in_bias: Tensor | None
    p_a: Tensor
    p_a_bias: Tensor | None
    p_b: Tensor
    p_b_bias: Tensor | None
    g_a: Tensor
    g_a_bias: Tensor | None
    g_b: Tensor
    g_b_bias: Tensor | None
    norm_out: Tensor | None
    norm_out_bias: Tensor | None
    p_out: Tensor
    p_out_bias: Tensor | None
    g_out: Tensor
    g_out_bias: Tensor | None


class TriangleCall(PairCall):
    """A call, as its rows see it."""

    def __init__(
        self, op: str, x: Any, mask: Any, parameters: Sequence[Any], outgoing: bool, eps: float, writes: bool = False
    ) -> None:
        super().__init__(op, x, mask, parameters, writes)
        self.outgoing, self.eps = outgoing, eps

    def scale(self) -> float:
        """As in the operator: a, and with it eps, is scaled so that o stays in the range of float16."""
        return scale_of_product(self.whole.shape[-2], self.parameters[P_OUT].dtype)

    def moved_rows(self, t: Tensor, here: Any, there: Any, batch: Sequence[int]) -> Tensor:
        """(rows, *batch, channels, N) with rows placed `there` instead of `here`. The transfer may still be running."""
        moved = [Shard(p.dim + 1) if type(p) is Shard and p != self.rows else p for p in self.placements]
        places, targets = (
            [r if p == self.rows else q for p, q in zip(self.placements, moved, strict=True)] for r in (here, there)
        )
        whole = wrap(t, self.whole, places, (self.whole.shape[-2], *batch, *t.shape[-2:]))
        return whole.redistribute(placements=targets, async_op=True).to_local()


def kernels_for(x: Tensor) -> Any:
    if not (x.is_cuda and attention._has_bfloat16(x.device)):
        return None
    try:
        return importlib.import_module("torchops._distributed_triangle_triton")
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
    return None


def _channels(t: Tensor) -> Tensor:
    """(*batch, rows, N, d) -> (*batch, d, rows, N)."""
    *batch, rows, n, d = t.shape
    return _swapped(t.reshape(math.prod(batch), rows * n, d)).view(*batch, d, rows, n)


def _features(t: Tensor) -> Tensor:
    """(*batch, d, rows, N) -> (*batch, rows, N, d)."""
    *batch, d, rows, n = t.shape
    return _swapped(t.reshape(math.prod(batch), d, rows * n)).view(*batch, rows, n, d)


def _swapped(t: Tensor) -> Tensor:
    """(batch, m, n) -> (batch, n, m), as a copy."""
    kernels = kernels_for(t)
    if kernels is None:
        return t.mT.contiguous()
    return kernels.transposed(t.contiguous())


# Groups of channels. More would hide more of the first transfer, but make the products smaller.
GROUPS = 4


def arrived(t: Tensor) -> Tensor:
    return t.wait() if isinstance(t, AsyncCollectiveTensor) else t


P_OUT = Layers._fields.index("p_out")
_PACKED = ("p_a", "p_a_bias", "g_a", "g_a_bias")
_GRADIENTS = ("x", "mask", *Layers._fields)
_BEFORE_PRODUCT = _GRADIENTS[: _GRADIENTS.index("norm_out")]


def apart(parameters: Sequence[Any]) -> Layers:
    """Splits packed parameters, which are in the fields of a."""
    layers = Layers(*parameters)
    if layers.p_b is not None:
        return layers
    halves = {
        name.replace("_a", f"_{half}"): part
        for name in _PACKED
        if (packed := getattr(layers, name)) is not None
        for half, part in zip("ab", packed.chunk(2), strict=True)
    }
    return layers._replace(**halves)


class Rows:
    """The update of a rank's rows, and its gradient."""

    def __init__(self, call: TriangleCall) -> None:
        self.call, self.w = call, apart(call.parameters)
        self.dtype = self.w.p_out.dtype
        self.scale = call.scale()
        self.z_moments = self._norm(call.x, self.w.norm_in, self.w.norm_in_bias, call.eps)
        self.z = self.z_moments[0].to(self.dtype)
        # This rank's rows of y, which is x or its transpose.
        self.y = call.x if call.outgoing else self._transposed(call.dx)
        self.y_moments = (
            self.z_moments if call.outgoing else self._norm(self.y, self.w.norm_in, self.w.norm_in_bias, call.eps)
        )
        self.zy = self.y_moments[0].to(self.dtype)
        self.mask: Tensor | None = None
        if call.mask is not None:
            self.mask = (call.mask if call.outgoing else self._transposed(call.dmask)).to(self.dtype).unsqueeze(-1)
        w = self.w
        self.ungated = [
            _myops.glu(self.zy, p, g, pb, gb)
            for p, g, pb, gb in ((w.p_a, w.g_a, w.p_a_bias, w.g_a_bias), (w.p_b, w.g_b, w.p_b_bias, w.g_b_bias))
        ]
        a, b = (t if self.mask is None else t * self.mask for t in self.ungated)
        self.a = _channels(a if self.scale == 1 else a * self.scale)
        self.b = self._gathered(_channels(b))

    @staticmethod
    def _norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        weight, bias = (None if t is None else t.to(x.dtype) for t in (weight, bias))
        return _myops._layer_norm(x.contiguous(), x.shape[-1:], weight, bias, eps)

    def _transposed(self, t: Any) -> Tensor:
        """This rank's rows of the transpose of a pair tensor or a mask."""
        rows = self.call.rows.dim
        return local(t, self.call.with_rows_as(self.call.columns)).transpose(rows, rows + 1)

    def _transposed_back(self, t: Tensor, shape: Sequence[int]) -> Tensor:
        rows = self.call.rows.dim
        columns = t.transpose(rows, rows + 1).contiguous()
        whole = wrap(columns, self.call.whole, self.call.with_rows_as(self.call.columns), shape)
        return whole.redistribute(placements=self.call.placements).to_local()

    # b from other ranks, and their parts of its gradient, are sent as (rows, *batch, channels, N), so that each rank
    # sends and receives contiguous memory. While one group of channels is on its way, another is multiplied.

    def _in_groups(self, t: Tensor) -> tuple[Tensor, ...]:
        """Groups of the channels of (*batch, d, rows, N)."""
        return t.chunk(GROUPS, dim=-3)

    def _moved_rows(self, t: Tensor, here: Any, there: Any) -> Tensor:
        """(*batch, channels, rows, N) with rows placed `there` instead of `here`. The transfer may still be running."""
        blocks = t.movedim(-2, 0).contiguous()
        return self.call.moved_rows(blocks, here, there, self.call.whole.shape[:-3]).movedim(0, -2)

    def _gathered(self, b: Tensor) -> list[Tensor]:
        return [self._moved_rows(group, Shard(0), Replicate()) for group in self._in_groups(b)]

    def _product(self) -> Tensor:
        """o, (*batch, d, rows, N)."""
        o = self.a.new_empty(*self.a.shape[:-1], self.call.whole.shape[-2])
        for out, a, b in zip(self._in_groups(o), self._in_groups(self.a), self.b, strict=True):
            torch.matmul(a, arrived(b).mT, out=out)
        return o

    def _factor_gradients(self, do: Tensor) -> list[Tensor]:
        """The gradients of this rank's rows of a and of b, in the layout of x."""
        da, db = torch.empty_like(self.a), []
        groups = zip(self._in_groups(da), self._in_groups(do), self._in_groups(self.a), self.b, strict=True)
        for out, do_group, a, b in groups:
            db.append(self._moved_rows(do_group.mT @ a, Partial(), Shard(0)))
            torch.matmul(do_group, arrived(b), out=out)
        parts = (da * self.scale if self.scale != 1 else da, torch.cat([arrived(t) for t in db], -3))
        return [_features(t) for t in parts]

    def _projected(self, o: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Rows of o, their layer norm with its moments, and its projection."""
        rows, w = _features(o), self.w
        normed, mean, rstd = self._norm(rows, w.norm_out, w.norm_out_bias, self.call.eps * self.scale**2)
        return rows, normed, mean, rstd, linear(normed, w.p_out, w.p_out_bias)

    def update(self, keep: bool) -> tuple[Tensor, Tensor]:
        o = self._product()
        *_, projected = self._projected(o)
        update = _myops.gate(projected, self.z, self.w.g_out, self.w.g_out_bias)
        return update, o if keep else o.new_empty(0)

    def gradients(self, grad: Tensor, product: Tensor, wanted: Sequence[bool]) -> list[Tensor | None]:
        """The gradients of x, the mask and the parameters; None if not requested."""
        asked, w = _Asked(wanted), self.w
        packed = self.call.parameters[Layers._fields.index("p_b")] is None
        if packed:
            for name in _PACKED:
                asked.wanted[name.replace("_a", "_b")] = asked.wanted[name]
        out: dict[str, Tensor | None] = {}
        through_product, through_z = asked.any(*_BEFORE_PRODUCT), asked.any("x", "norm_in", "norm_in_bias")
        rows, normed, mean, rstd, projected = self._projected(product)
        dv_asked = through_product or asked.any("norm_out", "norm_out_bias", "p_out", "p_out_bias")
        dv, dz, out["g_out"], out["g_out_bias"] = _myops._gate_backward(
            grad, projected, self.z, w.g_out, w.g_out_bias, [dv_asked, through_z, *asked("g_out", "g_out_bias")]
        )
        if asked.any("p_out"):
            out["p_out"] = dv.flatten(0, -2).t() @ normed.flatten(0, -2)
        if asked.any("p_out_bias"):
            out["p_out_bias"] = dv.flatten(0, -2).sum(0)
        if through_product or asked.any("norm_out", "norm_out_bias"):
            norm_asked = [through_product, *asked("norm_out", "norm_out_bias")]
            do, out["norm_out"], out["norm_out_bias"] = _myops._layer_norm_backward(
                dv @ w.p_out, rows, rows.shape[-1:], mean, rstd, w.norm_out, norm_asked
            )
        dzy = self._through_product(do, asked, out) if through_product else None
        if through_z:
            assert dzy is not None
            self._through_norm_in(dz, dzy, asked, out)
        if packed:
            for name in _PACKED:
                of_b = out.pop(name.replace("_a", "_b"), None)
                if (of_a := out.get(name)) is not None and of_b is not None:
                    out[name] = torch.cat([of_a, of_b])
        return [out.get(name) for name in _GRADIENTS]

    def _through_product(self, do: Tensor, asked: _Asked, out: dict[str, Tensor | None]) -> Tensor:
        """Writes the gradients of the mask and the projections to `out`; returns that of z, in the layout of y."""
        dab = self._factor_gradients(_channels(do))
        if asked.any("mask"):
            dmask = sum((t * ungated).sum(-1) for t, ungated in zip(dab, self.ungated, strict=True))
            whole = self.call.dmask
            assert whole is not None
            out["mask"] = (dmask if self.call.outgoing else self._transposed_back(dmask, whole.shape)).to(whole.dtype)
        parts = []
        for t, name in zip(dab, "ab", strict=True):
            names = (f"p_{name}", f"g_{name}", f"p_{name}_bias", f"g_{name}_bias")
            weights = [getattr(self.w, n) for n in names]
            masked = (t if self.mask is None else t * self.mask).contiguous()
            part, *grads = _myops._glu_backward(masked, self.zy, *weights, "sigmoid", [True, *asked(*names)])
            out |= dict(zip(names, grads, strict=True))
            parts.append(part)
        return parts[0] + parts[1]

    def _through_norm_in(self, dz: Tensor, dzy: Tensor, asked: _Asked, out: dict[str, Tensor | None]) -> None:
        names = ("norm_in", "norm_in_bias")
        wanted = [asked.any("x"), *asked(*names)]
        weight = None if self.w.norm_in is None else self.w.norm_in.to(self.call.x.dtype)

        def backward(grad: Tensor, x: Tensor, moments: Sequence[Tensor]) -> list[Tensor]:
            arguments = (grad.to(x.dtype), x.contiguous(), x.shape[-1:], *moments[1:], weight, wanted)
            return list(_myops._layer_norm_backward(*arguments))

        if self.call.outgoing:
            dx, *affine = backward(dz + dzy, self.call.x, self.z_moments)
        else:
            dx, *affine = backward(dz, self.call.x, self.z_moments)
            dy, *others = backward(dzy, self.y, self.y_moments)
            affine = [t + u for t, u in zip(affine, others, strict=True)]
            if asked.any("x"):
                dx = dx + self._transposed_back(dy, self.call.whole.shape)
        out["x"] = dx
        out |= {name: t.to(self.dtype) for name, t in zip(names, affine, strict=True)}


class _Asked:
    """The requested gradients, by name."""

    def __init__(self, wanted: Sequence[bool]) -> None:
        self.wanted = dict(zip(_GRADIENTS, wanted, strict=True))

    def __call__(self, *names: str) -> list[bool]:
        return [self.wanted[name] for name in names]

    def any(self, *names: str) -> bool:
        return any(self(*names))

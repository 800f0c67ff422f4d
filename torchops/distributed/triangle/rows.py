"""A rank's rows of the triangle update of ``DTensor``, through layer_norm, glu and gate; for
:mod:`torchops.distributed.triangle.update`. The gradient is written out here, since DTensor's rules run below autograd.
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

from torchops._core import devices
from torchops._triangle_attention.update.arguments import norm_parameters
from torchops.distributed._dtensor import wrap
from torchops.distributed.pair import PairCall

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


def scale_of_product(n: int, dtype: torch.dtype) -> float:
    """The power of 2 that scales a, so that o fits float16; as ``triangle_scale()`` in C++."""
    return 1.0 if dtype != torch.float16 or n <= 1 else 2.0 ** -math.ceil(math.log2(n) / 2)


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
    if not (x.is_cuda and devices.has_bfloat16(x.device)):
        return None
    try:
        return importlib.import_module("torchops.distributed.triangle.triton")
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


def _joined(groups: Sequence[Tensor]) -> Tensor:
    """All channels, of groups that may be on their way."""
    return torch.cat([arrived(t) for t in groups], -3)


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
        self.moments = self._norm(call.x, self.w.norm_in, self.w.norm_in_bias, call.eps)
        self.z = self.moments[0].to(self.dtype)
        self.mask = None if call.mask is None else call.mask.to(self.dtype).unsqueeze(-1)
        w = self.w
        self.ungated = [
            _myops.glu(self.z, p, g, pb, gb)
            for p, g, pb, gb in ((w.p_a, w.g_a, w.p_a_bias, w.g_a_bias), (w.p_b, w.g_b, w.p_b_bias, w.g_b_bias))
        ]
        a, b = (t if self.mask is None else t * self.mask for t in self.ungated)
        self.a, b = _channels(a if self.scale == 1 else a * self.scale), _channels(b)
        self.b = self._gathered(b) if call.outgoing else self._in_groups(b)

    @staticmethod
    def _norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        return _myops._layer_norm(x.contiguous(), x.shape[-1:], *norm_parameters(x, weight, bias), eps)

    # What ranks gather (b; incoming, d_o) or add up (db; incoming, o) is sent as (rows, *batch, channels, N), so that
    # each rank sends and receives contiguous memory. While one group of channels is on its way, another is multiplied.

    def _in_groups(self, t: Tensor) -> tuple[Tensor, ...]:
        """Groups of the channels of (*batch, d, rows, N)."""
        return t.chunk(GROUPS, dim=-3)

    def _moved_rows(self, t: Tensor, here: Any, there: Any) -> Tensor:
        """(*batch, channels, rows, N) with rows placed `there` instead of `here`. The transfer may still be running."""
        blocks = t.movedim(-2, 0).contiguous()
        return self.call.moved_rows(blocks, here, there, self.call.whole.shape[:-3]).movedim(0, -2)

    def _gathered(self, t: Tensor) -> tuple[Tensor, ...]:
        return tuple(self._moved_rows(group, Shard(0), Replicate()) for group in self._in_groups(t))

    def _summed(self, part: Tensor) -> Tensor:
        """This rank's rows of the sum of what all ranks have; on its way."""
        return self._moved_rows(part, Partial(), Shard(0))

    def _product(self) -> Tensor:
        """o, (*batch, d, rows, N)."""
        factors = zip(self._in_groups(self.a), self.b, strict=True)
        if not self.call.outgoing:
            return _joined([self._summed(a.mT @ b) for a, b in factors])
        o = self.a.new_empty(*self.a.shape[:-1], self.call.whole.shape[-2])
        for out, (a, b) in zip(self._in_groups(o), factors, strict=True):
            torch.matmul(a, arrived(b).mT, out=out)
        return o

    def _factor_gradients(self, d_o: Tensor) -> list[Tensor]:
        """The gradients of this rank's rows of a and of b, in the layout of x."""
        da, of_b = torch.empty_like(self.a), []
        of_d_o = self._in_groups(d_o) if self.call.outgoing else self._gathered(d_o)
        for out, a, b, d in zip(self._in_groups(da), self._in_groups(self.a), self.b, of_d_o, strict=True):
            if self.call.outgoing:
                of_b.append(self._summed(d.mT @ a))
                torch.matmul(d, arrived(b), out=out)
            else:
                of_all = arrived(d)
                of_b.append(a @ of_all)
                torch.matmul(b, of_all.mT, out=out)
        return [_features(t) for t in (da * self.scale if self.scale != 1 else da, _joined(of_b))]

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

    def gradients(self, grad: Tensor, product: Tensor, output_mask: Sequence[bool]) -> list[Tensor | None]:
        """The gradients of x, the mask and the parameters; None if not requested."""
        requested, w = _Requested(output_mask), self.w
        packed = self.call.parameters[Layers._fields.index("p_b")] is None
        if packed:
            for name in _PACKED:
                requested.output_mask[name.replace("_a", "_b")] = requested.output_mask[name]
        out: dict[str, Tensor | None] = {}
        through_product, through_z = requested.any(*_BEFORE_PRODUCT), requested.any("x", "norm_in", "norm_in_bias")
        rows, normed, mean, rstd, projected = self._projected(product)
        needs_dv = through_product or requested.any("norm_out", "norm_out_bias", "p_out", "p_out_bias")
        dv, dz, out["g_out"], out["g_out_bias"] = _myops._gate_backward(
            grad, projected, self.z, w.g_out, w.g_out_bias, [needs_dv, through_z, *requested("g_out", "g_out_bias")]
        )
        if requested.any("p_out"):
            out["p_out"] = dv.flatten(0, -2).t() @ normed.flatten(0, -2)
        if requested.any("p_out_bias"):
            out["p_out_bias"] = dv.flatten(0, -2).sum(0)
        if through_product or requested.any("norm_out", "norm_out_bias"):
            norm_mask = [through_product, *requested("norm_out", "norm_out_bias")]
            do, out["norm_out"], out["norm_out_bias"] = _myops._layer_norm_backward(
                dv @ w.p_out, rows, rows.shape[-1:], mean, rstd, w.norm_out, norm_mask
            )
        of_product = self._through_product(do, requested, out) if through_product else None
        if through_z:
            assert of_product is not None
            self._through_norm_in(dz + of_product, requested, out)
        if packed:
            for name in _PACKED:
                of_b = out.pop(name.replace("_a", "_b"), None)
                if (of_a := out.get(name)) is not None and of_b is not None:
                    out[name] = torch.cat([of_a, of_b])
        return [out.get(name) for name in _GRADIENTS]

    def _through_product(self, do: Tensor, requested: _Requested, out: dict[str, Tensor | None]) -> Tensor:
        """Writes the gradients of the mask and the projections to `out`; returns that of z."""
        dab = self._factor_gradients(_channels(do))
        if requested.any("mask"):
            dmask = sum((t * ungated).sum(-1) for t, ungated in zip(dab, self.ungated, strict=True))
            out["mask"] = dmask.to(self.call.mask.dtype)
        parts = []
        for t, name in zip(dab, "ab", strict=True):
            names = (f"p_{name}", f"g_{name}", f"p_{name}_bias", f"g_{name}_bias")
            weights = [getattr(self.w, n) for n in names]
            masked = (t if self.mask is None else t * self.mask).contiguous()
            part, *grads = _myops._glu_backward(masked, self.z, *weights, "sigmoid", [True, *requested(*names)])
            out |= dict(zip(names, grads, strict=True))
            parts.append(part)
        return parts[0] + parts[1]

    def _through_norm_in(self, dz: Tensor, requested: _Requested, out: dict[str, Tensor | None]) -> None:
        x, names = self.call.x, ("norm_in", "norm_in_bias")
        weight, _ = norm_parameters(x, self.w.norm_in, None)
        output_mask = [requested.any("x"), *requested(*names)]
        out["x"], *affine = _myops._layer_norm_backward(
            dz.to(x.dtype), x.contiguous(), x.shape[-1:], *self.moments[1:], weight, output_mask
        )
        for name, t in zip(names, affine, strict=True):
            parameter = getattr(self.w, name)
            out[name] = t if parameter is None else t.to(parameter.dtype)


class _Requested:
    """The requested gradients, by name."""

    def __init__(self, output_mask: Sequence[bool]) -> None:
        self.output_mask = dict(zip(_GRADIENTS, output_mask, strict=True))

    def __call__(self, *names: str) -> list[bool]:
        return [self.output_mask[name] for name in names]

    def any(self, *names: str) -> bool:
        return any(self(*names))

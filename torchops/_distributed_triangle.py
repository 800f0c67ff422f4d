"""The triangle multiplicative update of ``DTensor``; imported by :mod:`torchops.distributed`.

Along each dimension of the mesh, ``x`` of ``(*batch, N, N, c)`` may be

- replicated, or sharded along the batch: every rank calls the operator on its part;
- sharded along rows, dimension -3: all that a rank needs of others' rows is ``b``, which is gathered. With row i of a
  and all of b it has row i of ``o[i, j] = sum_k a[i, k] b[j, k]``. The incoming direction is the outgoing one of ``x``
  transposed, so x goes from rows to columns first, by an all-to-all.

Anything else is moved to one of these. The operator itself takes whole pair matrices, so rows go through layer_norm,
glu and gate. Their gradient is written out here, since DTensor's rules run below autograd.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.functional import linear

from torchops import _attention_update_operators as operators
from torchops import attention
from torchops._distributed_pair import PairCall, local, moved, wrap

_myops = torch.ops.myops


class _Layers(NamedTuple):
    """The parameters in the order of the operator beneath, weight and bias by turns."""

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


def _padded(n: int, dtype: torch.dtype) -> int:
    step = 32 // dtype.itemsize
    return -(-n // step) * step


class _Call(PairCall):
    def __init__(
        self, op: str, x: Any, mask: Any, parameters: Sequence[Any], outgoing: bool, eps: float, writes: bool = False
    ) -> None:
        super().__init__(op, x, mask, parameters, writes)
        self.outgoing, self.eps = outgoing, eps

    def product_shape(self) -> tuple[int, ...]:
        """As the operator beneath has it."""
        *batch, n, _, _ = self.whole.shape
        dtype, d = self.parameters[_P_OUT].dtype, self.parameters[_P_OUT].shape[1]
        return (*batch, d, _padded(n, dtype), _padded(n, dtype))

    def wrapped(self, update: Tensor, product: Tensor, keep: bool) -> tuple[Any, Any]:
        out = wrap(update, self.whole, self.placements, self.whole.shape)
        # Rows of the pair matrix are the last but one of the product. Of sharded rows it is o without padding, which
        # none but `gradients` reads, on the same ranks.
        places = self.with_rows_as(Shard(self.whole.ndim - 2)) if keep else self.nowhere
        return out, wrap(product, self.whole, places, self.product_shape() if keep else (0,))

    def update(self, keep: bool, adds: bool = False) -> tuple[Tensor, Tensor]:
        """The update; with `adds`, of rows, x itself, to which it was added."""
        if self.by_rows:
            kernels = self._kernels()
            return self._by_operators(keep, adds) if kernels is None else self._by_kernels(kernels, keep, adds)
        arguments = (self.x, self.mask, self.parameters, self.outgoing, self.eps, keep)
        return _myops._triangle_multiplicative_update(*arguments)

    def _by_operators(self, keep: bool, adds: bool) -> tuple[Tensor, Tensor]:
        update, product = _Rows(self).update(keep)
        return self.x.add_(update) if adds else update, product

    def _kernels(self) -> Any:
        """Those for a GPU, where there are any for these parameters: the same on all ranks."""
        kernels = _kernels_for(self.x)
        return None if kernels is None or not kernels.fits(_apart(self.parameters)) else kernels

    def _by_kernels(self, kernels: Any, keep: bool, adds: bool) -> tuple[Tensor, Tensor]:
        w, rows, n = _apart(self.parameters), self.rows.dim, self.whole.shape[-2]
        y, mask = self.x, self.mask
        if not self.outgoing:
            places = self.with_rows_as(self.columns)
            y = local(self.dx, places).transpose(rows, rows + 1)
            mask = None if mask is None else local(self.dmask, places).transpose(rows, rows + 1)
        x, inside = self.x.contiguous(), adds and self.x.is_contiguous()
        target = x if inside else torch.empty(x.shape, dtype=w.p_out.dtype, device=x.device)
        sizes, batch = self.whole.shape[:rows], x.shape[:rows]
        flat = (math.prod(batch), *x.shape[rows:])

        def gather(t: Tensor) -> Callable[[], Tensor]:
            coming = self.moved_rows(t.unflatten(1, batch or (1,)), Shard(0), Replicate(), sizes or (1,))
            return lambda: _arrived(coming).flatten(1, -3)

        with operators._on(x.device):
            product = kernels.update(
                x.view(flat), y.reshape(flat), None if mask is None else mask.reshape(flat[:-1]), w, n, self.scale(),
                self.eps, _GROUPS, gather, target.view(flat), inside,
            )  # fmt: skip
        product = product.unflatten(0, batch or (1,)).flatten(0, 0 if batch else 1) if keep else x.new_empty(0)
        return self.x.add_(target) if adds and not inside else target, product

    def scale(self) -> float:
        """As in the operator: a is scaled so that o stays in the range of float16, and so is eps."""
        n, dtype = self.whole.shape[-2], self.parameters[_P_OUT].dtype
        return 2.0 ** -round(math.log2(max(n, 1)) / 2) if dtype == torch.float16 else 1.0

    def moved_rows(self, t: Tensor, here: Any, there: Any, batch: Sequence[int]) -> Tensor:
        """(rows, *batch, channels, N) with rows placed `there` and not `here`; the movement may still be under way."""
        moved = [Shard(p.dim + 1) if type(p) is Shard and p != self.rows else p for p in self.placements]
        places, targets = (
            [r if p == self.rows else q for p, q in zip(self.placements, moved, strict=True)] for r in (here, there)
        )
        whole = wrap(t, self.whole, places, (self.whole.shape[-2], *batch, *t.shape[-2:]))
        return whole.redistribute(placements=targets, async_op=True).to_local()

    def gradients(self, grad: Any, product: Any, wanted: Sequence[bool]) -> list[Any]:
        grad = local(grad, self.placements)
        product = local(product, self.with_rows_as(Shard(self.whole.ndim - 2)))
        gradients: list[Any]
        if self.by_rows:
            gradients = _Rows(self).gradients(grad, product, wanted)
        else:
            gradients = _myops._triangle_multiplicative_update_backward(
                grad, self.x, [product], self.mask, self.parameters, self.outgoing, self.eps, wanted
            )
        inputs = [self.whole, self.dmask, *self.parameters]
        return self.wrapped_gradients(gradients, inputs, [self.placements] * 2, wanted)


def _kernels_for(x: Tensor) -> Any:
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
    """(batch, m, n) -> (batch, n, m), a copy."""
    kernels = _kernels_for(t)
    if kernels is None:
        return t.mT.contiguous()
    return kernels.transposed(t.contiguous())


# Of channels; more would hide more of the first group, and make the products smaller.
_GROUPS = 4


def _arrived(t: Tensor) -> Tensor:
    return t.wait() if isinstance(t, AsyncCollectiveTensor) else t


_P_OUT = _Layers._fields.index("p_out")
_PACKED = ("p_a", "p_a_bias", "g_a", "g_a_bias")
_GRADIENTS = ("x", "mask", *_Layers._fields)
_BEFORE_PRODUCT = _GRADIENTS[: _GRADIENTS.index("norm_out")]


def _apart(parameters: Sequence[Any]) -> _Layers:
    """Packed parameters are in the places of a."""
    layers = _Layers(*parameters)
    if layers.p_b is not None:
        return layers
    halves = {
        name.replace("_a", f"_{half}"): part
        for name in _PACKED
        if (packed := getattr(layers, name)) is not None
        for half, part in zip("ab", packed.chunk(2), strict=True)
    }
    return layers._replace(**halves)


class _Rows:
    """The update of a rank's rows, and its gradient."""

    def __init__(self, call: _Call) -> None:
        self.call, self.w = call, _apart(call.parameters)
        self.dtype = self.w.p_out.dtype
        self.scale = call.scale()
        self.z_moments = self._norm(call.x, self.w.norm_in, self.w.norm_in_bias, call.eps)
        self.z = self.z_moments[0].to(self.dtype)
        # y: x, or its transpose; always this rank's rows of it.
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
        """This rank's rows of the transpose of a pair tensor or mask."""
        rows = self.call.rows.dim
        return local(t, self.call.with_rows_as(self.call.columns)).transpose(rows, rows + 1)

    def _transposed_back(self, t: Tensor, shape: Sequence[int]) -> Tensor:
        rows = self.call.rows.dim
        columns = t.transpose(rows, rows + 1).contiguous()
        whole = wrap(columns, self.call.whole, self.call.with_rows_as(self.call.columns), shape)
        return whole.redistribute(placements=self.call.placements).to_local()

    # b of other ranks comes, and their parts of its gradient go, as (rows, *batch, channels, N): whole blocks of
    # memory, which no copy has to put together. A group of channels is on its way while another is multiplied.

    def _in_groups(self, t: Tensor) -> tuple[Tensor, ...]:
        """Of (*batch, d, rows, N)."""
        return t.chunk(_GROUPS, dim=-3)

    def _moved_rows(self, t: Tensor, here: Any, there: Any) -> Tensor:
        """(*batch, channels, rows, N) with rows placed `there` and not `here`; the movement may still be under way."""
        blocks = t.movedim(-2, 0).contiguous()
        return self.call.moved_rows(blocks, here, there, self.call.whole.shape[:-3]).movedim(0, -2)

    def _gathered(self, b: Tensor) -> list[Tensor]:
        return [self._moved_rows(group, Shard(0), Replicate()) for group in self._in_groups(b)]

    def _product(self) -> Tensor:
        """(*batch, d, rows, N)"""
        o = self.a.new_empty(*self.a.shape[:-1], self.call.whole.shape[-2])
        for out, a, b in zip(self._in_groups(o), self._in_groups(self.a), self.b, strict=True):
            torch.matmul(a, _arrived(b).mT, out=out)
        return o

    def _factor_gradients(self, do: Tensor) -> list[Tensor]:
        """Of this rank's rows of a and of b, in the order of x."""
        da, db = torch.empty_like(self.a), []
        groups = zip(self._in_groups(da), self._in_groups(do), self._in_groups(self.a), self.b, strict=True)
        for out, do_group, a, b in groups:
            db.append(self._moved_rows(do_group.mT @ a, Partial(), Shard(0)))
            torch.matmul(do_group, _arrived(b), out=out)
        parts = (da * self.scale if self.scale != 1 else da, torch.cat([_arrived(t) for t in db], -3))
        return [_features(t) for t in parts]

    def _projected(self, o: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Rows of o, their norm with its moments, and the projection of that."""
        rows, w = _features(o), self.w
        normed, mean, rstd = self._norm(rows, w.norm_out, w.norm_out_bias, self.call.eps * self.scale**2)
        return rows, normed, mean, rstd, linear(normed, w.p_out, w.p_out_bias)

    def update(self, keep: bool) -> tuple[Tensor, Tensor]:
        o = self._product()
        *_, projected = self._projected(o)
        update = _myops.gate(projected, self.z, self.w.g_out, self.w.g_out_bias)
        return update, o if keep else o.new_empty(0)

    def gradients(self, grad: Tensor, product: Tensor, wanted: Sequence[bool]) -> list[Tensor | None]:
        """Of x, the mask and the parameters; None where none is wanted."""
        asked, w = _Asked(wanted), self.w
        packed = self.call.parameters[_Layers._fields.index("p_b")] is None
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
        """The gradients of the mask and the projections into `out`; returns that of z, in y's layout."""
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
    """Which gradients are wanted, by name."""

    def __init__(self, wanted: Sequence[bool]) -> None:
        self.wanted = dict(zip(_GRADIENTS, wanted, strict=True))

    def __call__(self, *names: str) -> list[bool]:
        return [self.wanted[name] for name in names]

    def any(self, *names: str) -> bool:
        return any(self(*names))


# --- what the operators become ---------------------------------------------------------------------------------------


def _beneath(_cls: type, _op: Any, _types: Any, args: Sequence[Any], kwargs: Any) -> Any:
    x, mask, parameters, outgoing, eps, keep = (*args, False)[:6]
    call = _Call("_triangle_multiplicative_update", x, mask, parameters, outgoing, eps)
    return call.wrapped(*call.update(keep), keep)


def _beneath_(_cls: type, _op: Any, _types: Any, args: Sequence[Any], kwargs: Any) -> Any:
    x, mask, parameters, outgoing, eps, keep = (*args, False)[:6]
    call = _Call("_triangle_multiplicative_update_", x, mask, parameters, outgoing, eps, writes=True)
    return _in_place(call, keep)


def _in_place(call: _Call, keep: bool) -> Any:
    if not call.by_rows:
        arguments = (call.x, call.mask, call.parameters, call.outgoing, call.eps, keep)
        product = _myops._triangle_multiplicative_update_(*arguments)
        return call.wrapped(call.x, product, keep)[1]
    return call.wrapped(*call.update(keep, adds=True), keep)[1]


def _backward(_cls: type, _op: Any, _types: Any, args: Sequence[Any], _kwargs: Any) -> Any:
    grad, x, (product,), mask, parameters, outgoing, eps, wanted = args
    call = _Call("_triangle_multiplicative_update_backward", x, mask, parameters, outgoing, eps)
    return call.gradients(grad, product, wanted)


def _parted(kwargs: Any) -> list[Any]:
    """The parameters of the public operators, in the order of those beneath."""

    def of(layer: str) -> list[Any]:
        return [kwargs.get(f"{layer}_weight"), kwargs.get(f"{layer}_bias")]

    def halves(t: Any) -> Sequence[Any]:
        if not isinstance(t, DTensor):
            return (t, t)  # none; or a tensor that _Call refuses
        return moved(t, [Replicate()] * len(t.placements)).chunk(2)

    p_in, g_in = (list(zip(*map(halves, of(layer)), strict=True)) for layer in ("p_in", "g_in"))
    ins = [t for weight_and_bias in (*p_in, *g_in) for t in weight_and_bias]
    return [*of("norm_in"), *ins, *of("norm_out"), *of("p_out"), *of("g_out")]


def _public_call(op: str, args: Sequence[Any], kwargs: Any, writes: bool) -> _Call:
    x, direction = (*args, kwargs.get("direction", "outgoing"))[:2]
    outgoing, eps = direction == "outgoing", kwargs.get("eps", 1e-5)
    return _Call(op, x, kwargs.get("mask"), _parted(kwargs), outgoing, eps, writes)


def _public(_cls: type, _op: Any, _types: Any, args: Sequence[Any], kwargs: Any) -> Any:
    call = _public_call("triangle_multiplicative_update", args, kwargs or {}, writes=False)
    return call.wrapped(*call.update(False), False)[0]


def _public_(_cls: type, _op: Any, _types: Any, args: Sequence[Any], kwargs: Any) -> None:
    _in_place(_public_call("triangle_multiplicative_update_", args, kwargs or {}, writes=True), False)


for _name, _rule in {
    "triangle_multiplicative_update": _public,
    "triangle_multiplicative_update_": _public_,
    "_triangle_multiplicative_update": _beneath,
    "_triangle_multiplicative_update_": _beneath_,
    "_triangle_multiplicative_update_backward": _backward,
}.items():
    torch.library.register_torch_dispatch(f"myops::{_name}", DTensor, _rule)

"""Triangle attention of ``DTensor``; imported by :mod:`torchops.distributed`.

Along each dimension of the mesh, ``x`` of ``(*batch, N, N, c)`` may be

- replicated, or sharded along the batch: every rank calls the operator on its part;
- sharded along rows, dimension -3: a row attends to its own edges, so a rank only needs the bias from other ranks'
  rows, which is gathered: ``heads / c`` of a pair tensor. Its gradient is summed by a reduce-scatter. For the ending
  node, an all-to-all first takes x from rows to columns, and another brings the update back.

Anything else is redistributed to one of these. The attention alone, of q, k and v, may also be sharded along heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard

from torchops._core import devices
from torchops._triangle_attention.attention.arguments import accumulator
from torchops._triangle_attention.update import operators, panels, panels_backward
from torchops._triangle_attention.update.arguments import TENSORS, Arguments, Inputs, Kept, flat, rows_of, weights_of
from torchops._triangle_attention.update.backends import steps_for
from torchops.distributed._dtensor import (
    Way,
    if_given,
    local,
    register_rule,
    register_ways,
    sharded,
    where_wanted,
    wrap,
)
from torchops.distributed.pair import PairCall, Placements


class _Call(PairCall):
    def __init__(self, op: str, *args: Any, writes: bool = False) -> None:
        whole = Arguments(*args)
        super().__init__(op, *whole[:3], writes)
        self.heads, self.ending, self.add_residual = whole.heads, whole.ending, whole.add_residual
        self.own = whole._replace(x=self.x, mask=self.mask, parameters=self.parameters)

    def kept_places(self) -> tuple[Placements, Placements]:
        """For the attention's result, (batch, N, N, heads * d), and the logarithms of the sums, (batch, i, heads,
        j)."""

        def with_rows(rows: Any) -> Placements:
            return tuple(rows if p == self.rows else Shard(0) if isinstance(p, Shard) else p for p in self.placements)

        return with_rows(Shard(2 if self.ending else 1)), with_rows(Shard(1))

    def wrapped_kept(self, kept: Sequence[Tensor]) -> list[Any]:
        *batch, n, _, _ = self.whole.shape
        flat, width = torch.Size(batch).numel(), self.parameters[TENSORS.index("q")].shape[0]
        shapes = (flat, n, n, width), (flat, n, self.heads, n)
        return [wrap(t, self.whole, p, s) for t, p, s in zip(kept, self.kept_places(), shapes, strict=True)]


class _Rows:
    """The update of a rank's rows (for the ending node: columns), and its gradient."""

    def __init__(self, call: _Call) -> None:
        self.call, self.ending = call, call.ending
        self.places = call.with_rows_as(call.columns) if self.ending else call.placements
        self.whole_x = local(call.dx, self.places)
        self.x, self.w = flat(self.whole_x, 3), weights_of(*call.own[2:5])
        mask = rows_of(local(call.dmask, self.places), self.ending)
        self.inputs = Inputs(self.x, mask, self.w, self.ending, call.add_residual)
        self.steps = steps_for(self.x, self.w.q, call.heads)
        self.own, self.n = panels.rows_and_keys(self.x, self.ending)

    def _returned(self, t: Tensor) -> Tensor:
        """Redistributes from the placements in which the update is computed to those of x."""
        t = t.view(self.whole_x.shape)
        if not self.ending:
            return t
        moved = wrap(t, self.call.whole, self.places, self.call.whole.shape)
        return moved.redistribute(placements=self.call.placements).to_local()

    def _moved_bias(self, t: Tensor, here: Any, there: Any) -> Tensor:
        """(batch, heads, j, k) with j placed `there` instead of `here`. Sent as (j, *batch, heads, k), so that each
        rank sends and receives contiguous memory."""
        batch = [Shard(p.dim + 1) if type(p) is Shard else p for p in self.call.placements]
        rows = [p == self.call.rows for p in self.call.placements]
        places, targets = ([r if is_rows else p for is_rows, p in zip(rows, batch, strict=True)] for r in (here, there))
        first = t.movedim(2, 0).contiguous().unflatten(1, self.whole_x.shape[:-3] or (1,))
        sizes = (self.n, *(self.call.whole.shape[:-3] or (1,)), *t.shape[1:2], self.n)
        moved = wrap(first, self.call.whole, places, sizes).redistribute(placements=targets).to_local()
        return moved.flatten(1, -3).movedim(0, 2)

    def bias(self) -> Tensor:
        """The bias of all rows."""
        if self.x.numel():
            made = self.steps.triangle_bias(self.x, self.w, self.ending)[..., : self.n]
        else:
            made = self.w.q.new_empty((len(self.x), self.w.heads, self.own, self.n))
        return self.steps.whole_bias(self._moved_bias(made, Shard(0), Replicate()))

    def _forward(self, target: Tensor, add_residual: bool, kept: Kept | None) -> None:
        with devices.on(self.x.device):
            panels.forward(self.inputs._replace(add_residual=add_residual), target, kept, self.steps, self.bias())

    def update(self, keep: bool) -> tuple[Tensor, ...]:
        add_residual = self.call.add_residual
        target = torch.empty(self.x.shape, dtype=self.x.dtype if add_residual else self.w.q.dtype, device=self.x.device)
        if not keep:
            self._forward(target, add_residual, None)
            return (self._returned(target),)
        sums = (len(self.x), self.own, self.w.heads, self.n)
        kept = Kept(
            self.w.q.new_empty((*self.x.shape[:-1], self.w.q.shape[0])),
            self.w.q.new_empty(sums, dtype=accumulator(self.w.q.dtype)),
        )
        self._forward(target, add_residual, kept)
        return self._returned(target), *kept

    def update_(self) -> None:
        target = self.call.x
        if self.ending:
            self._forward(self.x, True, None)
            target.copy_(self._returned(self.x))
        elif self.x.untyped_storage()._cdata == target.untyped_storage()._cdata:
            self._forward(self.x, True, None)
        else:  # strides that don't allow a single batch dimension
            target.add_(self.update(False)[0])

    def gradients(self, grad: Any, kept: Kept, output_mask: Sequence[bool]) -> list[Tensor | None]:
        inputs = dict(zip(panels_backward.GRADIENTS, (self.call.whole, *self.call.parameters), strict=True))
        by_name = {n: want and t is not None for (n, t), want in zip(inputs.items(), output_mask, strict=True)}
        shared = panels_backward.Shared(self.bias, lambda t: self._moved_bias(t, Partial(), Shard(0)))
        with devices.on(self.x.device):
            of_update = flat(local(grad, self.places), 3)
            made = panels_backward.backward(of_update, self.inputs, kept, by_name, self.steps, shared)
        if "x" in made:
            made["x"] = self._returned(made["x"])
        # A rank without rows contributes zeros to the sums.
        return [made.get(n, torch.zeros_like(t)) if by_name[n] else None for n, t in inputs.items()]


# --- what the operators become ---------------------------------------------------------------------------------------


def _update(_cls: type, _op: Any, _types: Any, args: Sequence[Any], _kwargs: Any) -> Any:
    call = _Call("_triangle_attention_update", *args)
    return call.wrapped(_Rows(call).update(False)[0] if call.by_rows else operators.update(*call.own))


def _update_(_cls: type, _op: Any, _types: Any, args: Sequence[Any], _kwargs: Any) -> None:
    call = _Call("_triangle_attention_update_", *args, writes=True)
    _Rows(call).update_() if call.by_rows else operators.update_(*call.own[:6])


def _update_kept(_cls: type, _op: Any, _types: Any, args: Sequence[Any], _kwargs: Any) -> Any:
    call = _Call("_triangle_attention_update_kept", *args)
    update, *kept = _Rows(call).update(True) if call.by_rows else operators.update_kept(*call.own)
    return call.wrapped(update), *call.wrapped_kept(kept)


def _update_backward(_cls: type, _op: Any, _types: Any, args: Sequence[Any], _kwargs: Any) -> Any:
    whole = operators.BackwardArguments.of(*args)
    call = _Call("_triangle_attention_update_backward", *whole.a)
    kept = Kept(*(local(t, p) for t, p in zip(whole.kept, call.kept_places(), strict=True)))
    gradients: list[Any]
    if call.by_rows:  # the panels for sharded rows have no `low_memory`
        gradients = _Rows(call).gradients(whole.grad, kept, whole.output_mask)
    else:
        x, *how, add_residual = call.own
        grad = local(whole.grad, call.placements)
        gradients = operators.update_backward(grad, x, *kept, *how, whole.output_mask, whole.low_memory, add_residual)
    return call.wrapped_gradients(gradients, [call.whole, *call.parameters], [call.placements], whole.output_mask)


for _suffix, _rule in {"": _update, "_": _update_, "_kept": _update_kept, "_backward": _update_backward}.items():
    register_rule(f"{operators.NAME}{_suffix}", _rule)


# --- the attention alone ---------------------------------------------------------------------------------------------

_HEADS = Shard(2)


def _ways(q: Any, mask: Any) -> list[tuple[Any, Any, Any, Any]]:
    """The possible placements of q, k, v and the result; of the bias; of its gradient; and of the mask."""
    alike = [Replicate(), *sharded(q, [0])]
    ways: list[tuple[Any, Any, Any, Any]] = [(p, p, p, if_given(mask, p)) for p in alike]
    ways += [(p, Replicate(), Partial(), if_given(mask, p)) for p in sharded(q, [1])]
    return [*ways, (_HEADS, _HEADS, _HEADS, if_given(mask))]


def _attention(q: Any, k: Any, v: Any, bias: Any, mask: Any = None, scale: float | None = None) -> list[Way]:
    return [([p], [p, p, p, b, m, None]) for p, b, _, m in _ways(q, mask)]


def _attention_with_sums(q: Any, k: Any, v: Any, bias: Any, mask: Any, scale: float) -> list[Way]:
    return [([p, p], [p, p, p, b, m, None]) for p, b, _, m in _ways(q, mask)]


def _attention_backward(
    grad: Any,
    q: Any,
    k: Any,
    v: Any,
    bias: Any,
    mask: Any,
    out: Any,
    logsumexp: Any,
    scale: float,
    output_mask: Sequence[bool],
) -> list[Way]:
    return [
        (where_wanted(output_mask, [p, p, p, d]), [p, p, p, p, b, m, p, p, None, None]) for p, b, d, m in _ways(q, mask)
    ]


register_ways("triangle_attention", _attention)
register_ways("_triangle_attention", _attention_with_sums)
register_ways("_triangle_attention_backward", _attention_backward, list_position=9)

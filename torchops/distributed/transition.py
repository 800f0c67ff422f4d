"""The transition of ``DTensor``; imported by :mod:`torchops.distributed`.

Along each dimension of the mesh, either ``x`` of ``(..., c)`` is replicated or sharded along rows, and every rank calls
the operator on its part; or the hidden features are sharded. Anything else is redistributed to one of these. DTensor
doesn't redistribute keyword arguments, so the public operators choose their placements here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from torchops.distributed._dtensor import (
    Way,
    check_stays,
    if_given,
    local,
    register_rule,
    register_ways,
    sharded,
    where_wanted,
    wrap,
)

_myops = torch.ops.myops

# Placements of the parameters, in the order of the operator, if the hidden features are sharded: gate and up are
# column-parallel and down is row-parallel, so the result is a partial sum, and only the first rank adds the bias.
_HIDDEN_PARALLEL: dict[str, Any] = {
    "norm_weight": Replicate(),
    "norm_bias": Replicate(),
    "gate_weight": Shard(0),
    "gate_bias": Shard(0),
    "up_weight": Shard(0),
    "up_bias": Shard(0),
    "down_weight": Shard(1),
    "down_bias": Replicate(),
}


def _transition_places(x: Any, parameters: dict[str, Any]) -> list[tuple[Any, dict[str, Any], Any]]:
    """The placements of x, the parameters and the result, for each dimension of the mesh."""
    places: list[tuple[Any, dict[str, Any], Any]] = []
    for i, p in enumerate(x.placements):
        weights = {name: parameters[name].placements[i] for name in ("gate_weight", "up_weight", "down_weight")}
        if p == Replicate() and all(_HIDDEN_PARALLEL[name] == q for name, q in weights.items()):
            places.append((Replicate(), _HIDDEN_PARALLEL, Partial()))
        else:
            rows = p if getattr(p, "dim", x.ndim - 1) < x.ndim - 1 else Replicate()
            places.append((rows, dict.fromkeys(_HIDDEN_PARALLEL, Replicate()), rows))
    return places


def _transition_of(
    name: str, x: Any, kwargs: dict[str, Any], operator: Any = _myops.transition
) -> tuple[Any, list[Any]]:
    """The result of ``operator`` for the part of each rank, and the placements of an update."""
    parameters = {key: value for key, value in kwargs.items() if key in _HIDDEN_PARALLEL and value is not None}
    mesh = getattr(x, "device_mesh", None)
    for t in (x, *parameters.values()):
        if not (isinstance(t, DTensor) and t.device_mesh == mesh):
            raise RuntimeError(f"{name}: expected DTensors on one mesh, got a {type(t).__name__} or another mesh")
    places = _transition_places(x, parameters)
    own = {key: local(t, [q[key] for _, q, _ in places]) for key, t in parameters.items()}
    coordinates = x.device_mesh.get_coordinate()
    if any(out == Partial() and i > 0 for (_, _, out), i in zip(places, coordinates, strict=True)):
        own.pop("down_bias", None)
    on_ranks = local(x, [p for p, _, _ in places])
    return operator(on_ranks, **own, eps=kwargs.get("eps", 1e-5)), [out for _, _, out in places]


def _transition(_cls: type, _op: Any, _types: Any, args: Sequence[Any], kwargs: Any) -> Any:
    (x,) = args
    update, placements = _transition_of("transition", x, kwargs)
    return wrap(update, x, placements, x.shape)


def _added(x: Any, update: Any, placements: list[Any]) -> Any:
    """``x`` plus the update."""
    rows = [Replicate() if p == Partial() else p for p in placements]
    if rows != placements:  # partial sums
        update = wrap(update, x, placements, x.shape).redistribute(placements=rows).to_local()
    return wrap(local(x, rows) + update, x, rows, x.shape)


def _add_transition(_cls: type, _op: Any, _types: Any, args: Sequence[Any], kwargs: Any) -> Any:
    (x,) = args
    return _added(x, *_transition_of("_add_transition", x, kwargs))


def _with_products(_cls: type, op: Any, _types: Any, args: Sequence[Any], _kwargs: Any) -> Any:
    x, *parameters, eps, add_residual = args
    given = dict(zip(_HIDDEN_PARALLEL, parameters, strict=True))

    def update_and_products(x: Any, *, eps: float, **own: Any) -> Any:
        return op(x, *(own.get(name) for name in _HIDDEN_PARALLEL), eps, False)

    (update, *products), placements = _transition_of("_transition", x, given | {"eps": eps}, update_and_products)
    y = _added(x, update, placements) if add_residual else wrap(update, x, placements, x.shape)
    of_hidden = [Shard(x.ndim - 1) if p == Partial() else p for p in placements]
    hidden = (*x.shape[:-1], given["gate_weight"].shape[0])
    return y, *(wrap(product, x, of_hidden, hidden) for product in products)


def _transition_(_cls: type, _op: Any, _types: Any, args: Sequence[Any], kwargs: Any) -> None:
    (x,) = args
    rows = [Replicate(), *sharded(x, range(x.ndim - 1))]
    check_stays("add_transition_", "x", x, rows, " along dimensions before the last")
    update, placements = _transition_of("add_transition_", x, kwargs)
    if list(x.placements) != placements:  # partial sums
        update = wrap(update, x, placements, x.shape).redistribute(placements=x.placements).to_local()
    x.to_local().add_(update)


def _transition_backward(
    grad: Any,
    x: Any,
    norm_weight: Any,
    norm_bias: Any,
    gate_weight: Any,
    gate_bias: Any,
    up_weight: Any,
    up_bias: Any,
    down_weight: Any,
    eps: float,
    output_mask: Sequence[bool],
    add_residual: bool = False,
    up: Any = None,
    gate: Any = None,
) -> list[Way]:
    parameters = [norm_weight, norm_bias, gate_weight, gate_bias, up_weight, up_bias, down_weight]
    ways: list[Way] = []
    for p in (Replicate(), *sharded(x, range(x.ndim - 1))):
        summed = Replicate() if p == Replicate() else Partial()
        inputs = [p, p, *map(if_given, parameters), None, None, None, if_given(up, p), if_given(gate, p)]
        ways.append((where_wanted(output_mask, [p, *[summed] * 8]), inputs))
    if add_residual:  # partial sums would each add grad: see _backward_in_parts
        return ways
    hidden = list(_HIDDEN_PARALLEL.values())
    products = [if_given(up, Shard(x.ndim - 1)), if_given(gate, Shard(x.ndim - 1))]
    inputs = [Replicate(), Replicate(), *map(if_given, parameters, hidden), None, None, None, *products]
    ways.append((where_wanted(output_mask, [Partial(), Partial(), Partial(), *hidden[2:]]), inputs))
    return ways


def _backward_in_parts(_cls: type, op: Any, _types: Any, args: Sequence[Any], _kwargs: Any) -> Any:
    """If the hidden features are sharded: the gradient of x as partial sums, to which grad is added only once."""
    given, output_mask, rest = args[:10], args[10], args[11:] or (False,)
    grad, gate_weight, add_residual, products = args[0], args[4], rest[0], rest[1:]
    if not (
        add_residual and output_mask[0] and isinstance(gate_weight, DTensor) and Shard(0) in gate_weight.placements
    ):
        return NotImplemented
    dx, *others = op(*given, output_mask, False, *products)
    return dx + grad, *others


register_ways("_transition_backward", _transition_backward, list_position=10)

for _name, _rule in {
    "transition": _transition,
    "add_transition_": _transition_,
    "_add_transition": _add_transition,
    "_transition": _with_products,
    "_transition_backward": _backward_in_parts,
}.items():
    register_rule(_name, _rule)

"""What the rules for ``DTensor`` are written in: placements, each rank's part, checks, registration."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor.experimental import register_sharding
from torch.utils._python_dispatch import _disable_current_modes

# What may happen along one dimension of a mesh: the placements of the outputs, and of the arguments (None where one is
# no tensor). DTensor combines these over the dimensions of the mesh and takes what moves the fewest bytes. `x: Any` in
# the functions that list them stands for DTensor's description of a tensor: shape, ndim, placements.
Way = tuple[list[Any], list[Any]]

REPLICATE = Replicate()


def sharded(x: Any, dims: Iterable[int]) -> list[Any]:
    """The placements that cut ``x`` along one of ``dims``, starting with those that it has (also strided ones)."""
    dims = list(dims)
    present = [p for p in x.placements if getattr(p, "dim", None) in dims]
    return list(dict.fromkeys([*present, *map(Shard, dims)]))


def if_given(argument: Any, placement: Any = REPLICATE) -> Any:
    return None if argument is None else placement


def where_wanted(output_mask: Sequence[bool], placements: Sequence[Any]) -> list[Any]:
    """The placements of gradients; those that nobody asked for are empty tensors, the same on every rank."""
    return [p if wanted else REPLICATE for wanted, p in zip(output_mask, placements, strict=True)]


def functional(op: str) -> str:
    """The name of the operator that makes a new tensor instead of overwriting x."""
    return op.removeprefix("add_").rstrip("_")


def check_stays(op: str, name: str, x: Any, allowed: Sequence[Any], expected: str) -> None:
    """An operator that overwrites ``x`` does so on each rank's part of it; it never moves ``x``."""
    if not all(p in allowed for p in x.placements):
        raise RuntimeError(
            f"{op}: expected {name} replicated or sharded{expected}, got shape {tuple(x.shape)} with placements "
            f"{tuple(x.placements)}; redistribute() it first, or use {functional(op)}"
        )


# --- each rank's part ------------------------------------------------------------------------------------------------


def moved(x: Any, placements: Sequence[Any]) -> Any:
    """redistribute() must not see that x requires a gradient: autograd is above the rules."""
    return x if x is None or x.placements == tuple(placements) else x.detach().redistribute(placements=placements)


def local(x: Any, placements: Sequence[Any]) -> Any:
    return None if x is None else moved(x, placements).to_local()


def wrap(local: Tensor, like: Any, placements: Sequence[Any], shape: Sequence[int]) -> Any:
    stride = [math.prod(max(size, 1) for size in shape[i + 1 :]) for i in range(len(shape))]
    return DTensor.from_local(
        local, like.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride)
    )


# --- checks of whole tensors ------------------------------------------------------------------------------------------

_accepted: set[Any] = set()


def _checked(rule: Callable[..., Any]) -> Callable[..., Any]:
    """`rule`, after the operator's own checks of the whole tensors: the parts may fit where these don't. With gradients
    on, the kernels for autograd, which are above the rules, have checked them."""

    def call(cls: type, op: Any, types: Any, args: Sequence[Any], kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            _check_whole(op, args, kwargs or {})
        return rule(cls, op, types, args, kwargs)

    return call


def _check_whole(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Calls `op` on tensors without data. Arguments that it accepted once pass again without a call."""
    try:
        key = op, _look(args), *((name, _look(value)) for name, value in kwargs.items())
        if key in _accepted:
            return
    except _PlainTensorError:
        return  # the rule refuses it
    except TypeError:  # symbolic sizes
        key = None
    with _disable_current_modes():
        op(*_without_data(args), **{name: _without_data(value) for name, value in kwargs.items()})
    if key is not None:
        if len(_accepted) >= 4096:
            _accepted.clear()
        _accepted.add(key)


class _PlainTensorError(Exception):
    pass


def _look(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, Tensor):
        raise _PlainTensorError
    return tuple(map(_look, value)) if isinstance(value, (list, tuple)) else value


def _without_data(value: Any) -> Any:
    if isinstance(value, DTensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return [_without_data(each) for each in value] if isinstance(value, (list, tuple)) else value


# --- registration ----------------------------------------------------------------------------------------------------


def register_ways(name: str, ways: Callable[..., list[Way]], list_position: int | None = None) -> None:
    """`ways` depend on the tensors and integers of a call; on a list too, if its position is given. (On torch 2.11,
    what register_sharding registers is remembered by tensors and integers alone.)"""
    op = getattr(torch.ops.myops, name).default
    register_sharding(op)(ways)
    if list_position is not None:
        schema_info = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
        schema_info[op] = RuntimeSchemaInfo(list_position, needs_pytree=True)


def register_rule(name: str, rule: Callable[..., Any]) -> None:
    """What the operator does with ``DTensor``. This comes before its ways; by returning NotImplemented, `rule` leaves a
    call to them."""
    torch.library.register_torch_dispatch(f"myops::{name}", DTensor, _checked(rule))

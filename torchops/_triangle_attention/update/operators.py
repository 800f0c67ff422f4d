"""The private operators of the triangle attention update. They are registered from Python because the CUDA kernels are
written in Triton. In inference, a caller's graph has one node for all panels (`aten.py`), for any
N. Gradients and transforms are in `autograd.py`.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from torchops._core.devices import on
from torchops._core.triton.plan import Found, Plan, Plans, UnplannableError
from torchops._triangle_attention.attention import aten as _attention_panels
from torchops._triangle_attention.attention import operators as attention
from torchops._triangle_attention.update import aten as panels
from torchops._triangle_attention.update.arguments import (
    Parameters,
    check,
    check_kept,
    check_wanted,
    check_writable,
    may_alias,
    without_alias,
)

__all__ = [
    "NAME",
    "is_first",
    "is_sparing",
    "library",
    "steps_for",
    "update",
    "update_",
    "update_backward",
    "update_kept",
]

NAME = "_triangle_attention_update"

# False if this module is imported again in the same process, which then has the operators already.
is_first = not hasattr(torch.ops.myops, NAME)
library = torch.library.Library("myops", "FRAGMENT")
_ARGUMENTS = "Tensor? mask, Tensor?[] parameters, int heads, float eps, bool ending"
for _schema in (
    # The update, or x plus the update, in the dtype of x.
    f"{NAME}(Tensor x, {_ARGUMENTS}, bool adds=False) -> Tensor",
    f"{NAME}_(Tensor(a!) x, {_ARGUMENTS}) -> ()",
    # The same, plus the result of the attention before its gate, and the logarithms of the sums.
    f"{NAME}_kept(Tensor x, {_ARGUMENTS}, bool adds=False) -> (Tensor, Tensor, Tensor)",
    f"{NAME}_backward(Tensor grad, Tensor x, Tensor product, Tensor logsumexp, {_ARGUMENTS}, "
    "bool[11] wanted, bool sparing=False, bool adds=False) -> Tensor[]",
):
    if is_first:
        library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
update = torch.ops.myops._triangle_attention_update.default
update_ = torch.ops.myops._triangle_attention_update_.default
update_kept = torch.ops.myops._triangle_attention_update_kept.default
update_backward = torch.ops.myops._triangle_attention_update_backward.default


# --- backends --------------------------------------------------------------------------------------------------------


def steps_for(x: Tensor, q: Tensor, heads: int) -> Any:
    """The module with the steps for this x. `q` is the weight."""
    *batch, rows, _, _ = x.shape
    body = attention.body_for(q, math.prod(batch), rows, heads, q.shape[0] // heads)
    if x.is_cuda and x.stride(-1) == 1 and body is not _attention_panels:
        return importlib.import_module("torchops._triangle_attention.update.triton_steps")
    return panels


def _weights(parameters: Parameters, heads: int, eps: float, overwritten: Tensor | None = None) -> panels.Weights:
    """The weights, contiguous and not in memory that is overwritten."""

    def usable(t: Tensor | None) -> Tensor | None:
        if overwritten is not None:
            t = without_alias(overwritten, t)
        return None if t is None else t.contiguous()

    made: list[Any] = [usable(t) for t in parameters]
    return panels.Weights._make([*made, heads, eps])


def is_sparing() -> bool:
    """Whether memory matters more than time: under saved-tensor hooks, which checkpointing installs, or when it
    recomputes inside a backward pass."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None or torch._C._current_graph_task_id() != -1


def _flat(t: Tensor, trailing: int) -> Tensor:
    """Flattens the batch dimensions into one; a view if the strides allow it."""
    return t.reshape(math.prod(t.shape[:-trailing]), *t.shape[-trailing:])


def _rows_of(mask: Tensor | None, ending: bool) -> Tensor | None:
    """The mask as (batch, i, k), in the order of the attention."""
    if mask is None:
        return None
    mask = _flat(mask, 2)
    return mask.mT if ending else mask


def _forward(
    x: Tensor,
    mask: Tensor | None,
    w: panels.Weights,
    ending: bool,
    target: Tensor,
    adds: bool,
    kept: tuple[Tensor, Tensor] | None,
    sparing: bool = True,
) -> None:
    steps = steps_for(x, w.q, w.heads)
    with on(x.device):
        if steps is not panels and _fused("").takes(x, w):
            _fused("").forward(x, mask, w, ending, target, adds, kept, sparing)
        else:
            panels.forward(x, mask, w, ending, target, adds, kept, steps)


@cache
def _fused(part: str) -> Any:
    return importlib.import_module(
        f"torchops._triangle_attention.update.triton_fused{part}"
    )  # Triton may not be installed


# --- plans -----------------------------------------------------------------------------------------------------------
#
# On a GPU, checking arguments and finding what to launch for them is done once for all calls with similar arguments.

plans = Plans()


def _planned(
    found: Found,
    launches: Callable[..., None],
    x: Tensor,
    parameters: Parameters,
    heads: int,
    tensors: Callable[[], Sequence[Tensor | None]],
) -> Plan | None:
    """The plan of a call that has passed its checks, if the fused kernels can use its tensors as they are."""
    plan = found.plan
    if plan is None and x.is_cuda and x.numel():
        q = parameters[3]
        assert q is not None
        unfused = steps_for(x, q, heads) is panels
        plan = False if unfused else plans.add(found, launches, tensors(), x.device)
    return plan if isinstance(plan, Plan) else None


def _usable(x: Tensor, parameters: Parameters, heads: int, eps: float) -> tuple[Tensor, panels.Weights]:
    x, w = _flat(x, 3), _weights(parameters, heads, eps)
    if not _fused("").takes(x, w):
        raise UnplannableError("x")
    return x, w


def _run(plan: Plan, found: Found, given: Sequence[Tensor | None], made: Sequence[Tensor]) -> None:
    with on(plan.device):
        plan.run([*given, *made], [*found.pointers, *(t.data_ptr() for t in made)])


# --- kernels ---------------------------------------------------------------------------------------------------------


def _kernel(
    x: Tensor,
    mask: Tensor | None,
    parameters: Parameters,
    heads: int,
    eps: float,
    ending: bool,
    adds: bool = False,
) -> Tensor:
    return _update(False, x, mask, parameters, heads, eps, ending, adds)[0]


def _kept_kernel(
    x: Tensor,
    mask: Tensor | None,
    parameters: Parameters,
    heads: int,
    eps: float,
    ending: bool,
    adds: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    made, product, logsumexp = _update(True, x, mask, parameters, heads, eps, ending, adds)
    return made, product, logsumexp


def _update(
    keeps: bool,
    x: Tensor,
    mask: Tensor | None,
    parameters: Parameters,
    heads: int,
    eps: float,
    ending: bool,
    adds: bool,
) -> list[Tensor]:
    given, sparing = (x, mask, *parameters), not keeps or is_sparing()
    found = plans.find(("update", keeps, heads, eps, ending, adds, sparing), given)
    if found.plan is None:
        check("triangle_attention_update", x, mask, parameters, heads)
    made = [_empty_update(x, parameters, adds)]
    if keeps:
        made += _empty_kept(x, parameters, heads)

    def launches(x: Tensor, mask: Tensor | None, *rest: Tensor) -> None:
        x, w = _usable(x, rest[:10], heads, eps)
        out, *kept = rest[10:]
        _fused("").forward(x, _rows_of(mask, ending), w, ending, _flat(out, 3), adds, kept or None, sparing)

    plan = _planned(found, launches, x, parameters, heads, lambda: [*given, *made])
    if plan is not None:
        _run(plan, found, given, made)
    elif x.numel():
        w = _weights(parameters, heads, eps)
        kept = (made[1], made[2]) if keeps else None
        _forward(_flat(x, 3), _rows_of(mask, ending), w, ending, _flat(made[0], 3), adds, kept, sparing)
    return made


def _kernel_(x: Tensor, mask: Tensor | None, parameters: Parameters, heads: int, eps: float, ending: bool) -> None:
    op, given = "triangle_attention_update_", (x, mask, *parameters)
    found = plans.find(("overwrite", heads, eps, ending), given)
    if found.plan is None:
        check(op, x, mask, parameters, heads)
        check_writable(op, x)

    def launches(x: Tensor, mask: Tensor | None, *parameters: Tensor) -> None:
        x, w = _usable(x, parameters, heads, eps)
        _fused("").forward(x, _rows_of(mask, ending), w, ending, x, True, None)

    plan = _planned(found, launches, x, parameters, heads, lambda: given)
    if plan is not None and not any(t is not None and may_alias(x, t) for t in given[1:]):
        _run(plan, found, given, ())
    elif x.numel():
        w = _weights(parameters, heads, eps, overwritten=x)
        kept_keys = _rows_of(without_alias(x, mask), ending)
        try:
            _overwrite(x, kept_keys, w, ending)
        except BaseException:  # such as out of memory: x is partly overwritten, and autograd must know
            if not x.is_inference():
                torch.autograd.graph.increment_version(x)
            raise


def _overwrite(x: Tensor, kept_keys: Tensor | None, w: panels.Weights, ending: bool) -> None:
    """Batch dimensions that cannot be merged into one are processed one by one."""
    try:
        flat = x.view(math.prod(x.shape[:-3]), *x.shape[-3:])
    except RuntimeError:
        part = None if kept_keys is None else kept_keys.unflatten(0, (len(x), -1))
        for i, each in enumerate(x):
            _overwrite(each, None if part is None else part[i], w, ending)
    else:
        _forward(flat, kept_keys, w, ending, flat, True, None)


def _empty_update(x: Tensor, parameters: Parameters, adds: bool) -> Tensor:
    q = parameters[3]
    assert q is not None
    return torch.empty(x.shape, dtype=x.dtype if adds else q.dtype, device=x.device)


def _empty_kept(x: Tensor, parameters: Parameters, heads: int) -> tuple[Tensor, Tensor]:
    q = parameters[3]
    assert q is not None
    batch, n = math.prod(x.shape[:-3]), x.shape[-2]
    wide = _attention_panels.accumulator(q.dtype)
    return q.new_empty((batch, n, n, q.shape[0])), q.new_empty((batch, n, heads, n), dtype=wide)


def _backward_kernel(
    grad: Tensor,
    x: Tensor,
    product: Tensor,
    logsumexp: Tensor,
    mask: Tensor | None,
    parameters: Parameters,
    heads: int,
    eps: float,
    ending: bool,
    wanted: Sequence[bool],
    sparing: bool = False,
    adds: bool = False,
) -> list[Tensor]:
    """Panels get a larger share of memory than in inference, or a smaller one if gradients are `sparing`."""
    given = grad, x, product, logsumexp, mask, *parameters
    found = plans.find(("gradients", heads, eps, ending, *wanted, sparing, adds), given)
    if found.plan is None:
        check_kept(grad, x, product, logsumexp, mask, parameters, heads)
        check_wanted(wanted)
    inputs = dict(zip(panels.WANTED, (x, *parameters), strict=True))
    asked = {name: want and inputs[name] is not None for name, want in zip(panels.WANTED, wanted, strict=True)}
    made: dict[str, Tensor] = {}
    if x.numel() == 0:
        of_each = {name: t for name, t in inputs.items() if t is not None}
        made = {name: torch.zeros(t.shape, dtype=t.dtype, device=t.device) for name, t in of_each.items()}
    elif any(asked.values()):
        made = _gradients(found, given, asked, heads, eps, ending, sparing, adds)
    return [made[name] if asked[name] else x.new_empty(0) for name in inputs]


def _gradients(
    found: Found,
    given: tuple[Tensor | None, ...],
    asked: dict[str, bool],
    heads: int,
    eps: float,
    ending: bool,
    sparing: bool,
    adds: bool,
) -> dict[str, Tensor]:
    _, x, _, _, mask, *parameters = given
    assert x is not None
    inputs = dict(zip(panels.WANTED, (x, *parameters), strict=True))
    like = {name: t for name, t in inputs.items() if t is not None}
    if all(asked[name] for name in like):

        def empty() -> list[Tensor]:
            return [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in like.values()]

        def launches(grad: Tensor, x: Tensor, o: Tensor, logsumexp: Tensor, mask: Tensor | None, *rest: Tensor) -> None:
            (x, w), grad = _usable(x, rest[:10], heads, eps), _flat(grad, 3)
            if not _fused("").aligned(grad):
                raise UnplannableError("grad")
            made = dict(zip(like, rest[10:], strict=True))
            kept = o.contiguous(), logsumexp.contiguous()
            _fused("_gradients").backward_into(made, grad, x, _rows_of(mask, ending), w, ending, *kept, adds, sparing)

        plan = _planned(found, launches, x, parameters, heads, lambda: [*given, *empty()])
        if plan is not None:
            empties = empty()
            _run(plan, found, given, empties)
            return dict(zip(like, empties, strict=True))
    grad, _, product, logsumexp, *_ = given
    assert grad is not None
    assert product is not None
    assert logsumexp is not None
    made: dict[str, Tensor]
    w = _weights(parameters, heads, eps)
    flat, steps = _flat(x, 3), steps_for(x, w.q, heads)
    arguments = _flat(grad, 3), flat, _rows_of(mask, ending), w, ending, product.contiguous(), logsumexp.contiguous()
    with on(x.device):
        if steps is not panels and all(asked[name] for name in like) and _fused("").takes(flat, w):
            made = _fused("_gradients").backward(*arguments, asked, adds, sparing)
        else:
            made = panels.backward(*arguments, asked, adds, steps)
    return {name: t.view(like[name].shape) for name, t in made.items()}


# --- fake kernels ----------------------------------------------------------------------------------------------------


def _fake(
    x: Tensor,
    mask: Tensor | None,
    parameters: Parameters,
    heads: int,
    eps: float,
    ending: bool,
    adds: bool = False,
) -> Tensor:
    check("triangle_attention_update", x, mask, parameters, heads)
    return _empty_update(x, parameters, adds)


def _fake_(x: Tensor, mask: Tensor | None, parameters: Parameters, heads: int, eps: float, ending: bool) -> None:
    check("triangle_attention_update_", x, mask, parameters, heads)
    check_writable("triangle_attention_update_", x)


def _kept_fake(
    x: Tensor,
    mask: Tensor | None,
    parameters: Parameters,
    heads: int,
    eps: float,
    ending: bool,
    adds: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    return _fake(x, mask, parameters, heads, eps, ending, adds), *_empty_kept(x, parameters, heads)


def _backward_fake(
    grad: Tensor,
    x: Tensor,
    product: Tensor,
    logsumexp: Tensor,
    mask: Tensor | None,
    parameters: Parameters,
    heads: int,
    eps: float,
    ending: bool,
    wanted: Sequence[bool],
    sparing: bool = False,
    adds: bool = False,
) -> list[Tensor]:
    check_kept(grad, x, product, logsumexp, mask, parameters, heads)
    check_wanted(wanted)
    return [
        torch.empty(t.shape, dtype=t.dtype, device=t.device) if t is not None and want else x.new_empty(0)
        for t, want in zip((x, *parameters), wanted, strict=True)
    ]


# --- registration ----------------------------------------------------------------------------------------------------


if is_first:
    for _suffix, _of_backends, _of_shapes in (
        ("", _kernel, _fake),
        ("_", _kernel_, _fake_),
        ("_kept", _kept_kernel, _kept_fake),
        ("_backward", attention._without_autocast(_backward_kernel), _backward_fake),
    ):
        for _key in ("CPU", "CUDA"):
            library.impl(NAME + _suffix, _of_backends, _key)
        torch.library.register_fake(f"myops::{NAME}{_suffix}", _of_shapes, lib=library)

"""The private operators of the triangle attention update. In inference, a caller's graph has one node for all panels
(`panels.py`), for any N. Gradients and transforms are in `autograd.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchops._core.devices import on
from torchops._core.registration import define
from torchops._core.triton.plan import Found, Plan, Plans, UnplannableError
from torchops._core.triton.refusal import again_if_refused, why_refused
from torchops._triangle_attention.attention.arguments import accumulator
from torchops._triangle_attention.update.arguments import (
    Arguments,
    Inputs,
    Kept,
    Weights,
    check,
    check_kept,
    check_output_mask,
    check_writable,
    flat,
    inputs_of,
    may_alias,
    rows_of,
    weights_of,
    without_alias,
)
from torchops._triangle_attention.update.backends import backend_for, load, why_not_triton
from torchops._triangle_attention.update.panels_backward import GRADIENTS

__all__ = ["NAME", "update", "update_", "update_backward", "update_kept", "wants_low_memory"]

NAME = "_triangle_attention_update"
_PUBLIC, _PUBLIC_, _BACKWARD = "triangle_attention_update", "triangle_attention_update_", f"{NAME}_backward"

_ARGUMENTS = "Tensor? mask, Tensor?[] parameters, int heads, float eps, bool ending"
# The update, or x plus the update, in the dtype of x.
update = define(f"{NAME}(Tensor x, {_ARGUMENTS}, bool add_residual=False) -> Tensor")
update_ = define(f"{NAME}_(Tensor(a!) x, {_ARGUMENTS}) -> ()")
# The same, plus what is kept for the backward pass.
update_kept = define(f"{NAME}_kept(Tensor x, {_ARGUMENTS}, bool add_residual=False) -> (Tensor, Tensor, Tensor)")
update_backward = define(
    f"{_BACKWARD}(Tensor grad, Tensor x, Tensor product, Tensor logsumexp, {_ARGUMENTS}, "
    "bool[11] output_mask, bool low_memory=False, bool add_residual=False) -> Tensor[]"
)


def wants_low_memory() -> bool:
    """Whether memory matters more than time: under saved-tensor hooks, which checkpointing installs, or when it
    recomputes inside a backward pass."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None or torch._C._current_graph_task_id() != -1


class BackwardArguments(NamedTuple):
    """Of the operator for gradients."""

    grad: Tensor
    kept: Kept
    a: Arguments
    output_mask: Sequence[bool]
    low_memory: bool

    @classmethod
    def of(cls, grad: Tensor, x: Tensor, product: Tensor, logsumexp: Tensor, *args: Any) -> BackwardArguments:
        """From the operator's arguments, in its order."""
        *how, output_mask, low_memory, add_residual = (*args, False, False)[:8]
        return cls(grad, Kept(product, logsumexp), Arguments._make((x, *how, add_residual)), output_mask, low_memory)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.grad, self.a.x, *self.kept, *self.a.tensors[1:]

    @property
    def inputs(self) -> dict[str, Tensor | None]:
        """What may get a gradient."""
        return dict(zip(GRADIENTS, (self.a.x, *self.a.parameters), strict=True))

    def check(self) -> None:
        check_kept(_BACKWARD, self.grad, self.kept, self.a)
        check_output_mask(_BACKWARD, self.output_mask)

    @property
    def requested(self) -> dict[str, Tensor]:
        """What is to get a gradient."""
        inputs = zip(self.inputs.items(), self.output_mask, strict=True)
        return {name: t for (name, t), want in inputs if want and t is not None}

    def empty(self) -> dict[str, Tensor]:
        return {name: torch.empty(t.shape, dtype=t.dtype, device=t.device) for name, t in self.requested.items()}

    def listed(self, made: dict[str, Tensor]) -> list[Tensor]:
        return [made[name] if name in made else self.a.x.new_empty(0) for name in GRADIENTS]


# --- plans -----------------------------------------------------------------------------------------------------------
#
# On a GPU, checking arguments and finding what to launch for them is done once for all calls with similar arguments.

plans = Plans()


def _planned(
    found: Found, launches: Callable[..., None], a: Arguments, tensors: Callable[[], Sequence[Tensor | None]]
) -> Plan | None:
    """The plan of a call that has passed its checks, if the fused kernels can use its tensors as they are."""
    plan = found.plan if why_refused() is None else None
    if plan is None and a.x.is_cuda and a.x.numel():
        unfused = why_not_triton(a.x, a.q, a.heads)
        plan = False if unfused else plans.add(found, launches, tensors(), a.x.device)
    return plan if isinstance(plan, Plan) else None


def _kernel_path(x: Tensor) -> str | None:
    """What decides, besides sizes, by which kernel a plan computes attention."""
    return torch.ops.myops._kernel_path.default() if x.is_cuda else None


def _fused_inputs(a: Arguments) -> Inputs:
    inputs = inputs_of(a)
    if reason := load("triton_fused").why_not(inputs):
        raise UnplannableError(reason)
    return inputs


def _run(plan: Plan, found: Found, given: Sequence[Tensor | None], made: Sequence[Tensor]) -> None:
    with on(plan.device):
        plan.run([*given, *made], [*found.pointers, *(t.data_ptr() for t in made)])


# --- kernels ---------------------------------------------------------------------------------------------------------


@again_if_refused
def kernel(*args: Any) -> Tensor:
    return _update(False, Arguments(*args))[0]


@again_if_refused
def kept_kernel(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    made, product, logsumexp = _update(True, Arguments(*args))
    return made, product, logsumexp


def _update(keeps: bool, a: Arguments) -> list[Tensor]:
    given, low_memory = a.tensors, not keeps or wants_low_memory()
    found = plans.find(("update", keeps, *a[3:], low_memory, _kernel_path(a.x)), given)
    if found.plan is None:
        check(_PUBLIC, a)
    made = [_empty_update(a)]
    if keeps:
        made += _empty_kept(a)

    def launches(x: Tensor, mask: Tensor | None, *rest: Tensor) -> None:
        inputs = _fused_inputs(a._replace(x=x, mask=mask, parameters=rest[:10]))
        out, *kept = rest[10:]
        load("triton_fused").forward(inputs, flat(out, 3), Kept(*kept) if kept else None, low_memory)

    plan = _planned(found, launches, a, lambda: [*given, *made])
    if plan is not None:
        _run(plan, found, given, made)
    elif a.x.numel():
        _forward(inputs_of(a), flat(made[0], 3), Kept(*made[1:]) if keeps else None, low_memory)
    return made


def _forward(inputs: Inputs, target: Tensor, kept: Kept | None, low_memory: bool = True) -> None:
    with on(inputs.x.device):
        backend_for(inputs).forward(inputs, target, kept, low_memory)


@partial(again_if_refused, overwrites=True)
def kernel_(*args: Any) -> None:
    a = Arguments._make((*args, True))
    x, given = a.x, a.tensors
    found = plans.find(("overwrite", *a[3:6], _kernel_path(x)), given)
    if found.plan is None:
        check(_PUBLIC_, a)
        check_writable(_PUBLIC_, x)

    def launches(x: Tensor, mask: Tensor | None, *parameters: Tensor) -> None:
        inputs = _fused_inputs(a._replace(x=x, mask=mask, parameters=parameters))
        load("triton_fused").forward(inputs, inputs.x, None)

    plan = _planned(found, launches, a, lambda: given)
    if plan is not None and not any(t is not None and may_alias(x, t) for t in given[1:]):
        _run(plan, found, given, ())
    elif x.numel():
        w = weights_of(a.parameters, a.heads, a.eps, overwritten=x)
        mask = rows_of(without_alias(x, a.mask), a.ending)
        try:
            _overwrite(x, mask, w, a.ending)
        except BaseException:  # such as out of memory: x is partly overwritten, and autograd must know
            if not x.is_inference():
                torch.autograd.graph.increment_version(x)
            raise


def _overwrite(x: Tensor, mask: Tensor | None, w: Weights, ending: bool) -> None:
    """Batch dimensions that cannot be merged into one are processed one by one."""
    try:
        merged = x.view(math.prod(x.shape[:-3]), *x.shape[-3:])
    except RuntimeError:
        part = None if mask is None else mask.unflatten(0, (len(x), -1))
        for i, each in enumerate(x):
            _overwrite(each, None if part is None else part[i], w, ending)
    else:
        _forward(Inputs(merged, mask, w, ending, True), merged, None)


def _empty_update(a: Arguments) -> Tensor:
    return torch.empty(a.x.shape, dtype=a.x.dtype if a.add_residual else a.q.dtype, device=a.x.device)


def _empty_kept(a: Arguments) -> tuple[Tensor, Tensor]:
    batch, n, q = math.prod(a.x.shape[:-3]), a.x.shape[-2], a.q
    return q.new_empty((batch, n, n, q.shape[0])), q.new_empty((batch, n, a.heads, n), dtype=accumulator(q.dtype))


@again_if_refused
def backward_kernel(*args: Any) -> list[Tensor]:
    """Panels get a larger share of memory than in inference, or a smaller one with `low_memory`."""
    b = BackwardArguments.of(*args)
    found = plans.find(("gradients", *b.a[3:], *b.output_mask, b.low_memory), b.tensors)
    if found.plan is None:
        b.check()
    if b.a.x.numel() == 0:
        return b.listed({name: t.zero_() for name, t in b.empty().items()})
    return b.listed(_gradients(found, b) if b.requested else {})


def _gradients(found: Found, b: BackwardArguments) -> dict[str, Tensor]:
    a, requested = b.a, b.requested
    if len(requested) == len(a.differentiable):
        names = tuple(requested)

        def launches(grad: Tensor, x: Tensor, o: Tensor, logsumexp: Tensor, mask: Tensor | None, *rest: Tensor) -> None:
            inputs = _fused_inputs(a._replace(x=x, mask=mask, parameters=rest[:10]))
            grad, fused = flat(grad, 3), load("triton_fused")
            if not fused.aligned(grad):
                raise UnplannableError("grad")
            made = dict(zip(names, rest[10:], strict=True))
            fused.backward_into(made, grad, inputs, Kept(o.contiguous(), logsumexp.contiguous()), b.low_memory)

        plan = _planned(found, launches, a, lambda: [*b.tensors, *b.empty().values()])
        if plan is not None:
            made = b.empty()
            _run(plan, found, b.tensors, list(made.values()))
            return made
    inputs, kept = inputs_of(a), Kept(*(t.contiguous() for t in b.kept))
    output_mask = {name: name in requested for name in GRADIENTS}
    with on(a.x.device):
        made = backend_for(inputs).backward(flat(b.grad, 3), inputs, kept, output_mask, b.low_memory)
    return {name: t.view(requested[name].shape) for name, t in made.items()}


# --- fake kernels ----------------------------------------------------------------------------------------------------


def fake(*args: Any) -> Tensor:
    a = Arguments(*args)
    check(_PUBLIC, a)
    return _empty_update(a)


def fake_(*args: Any) -> None:
    a = Arguments(*args)
    check(_PUBLIC_, a)
    check_writable(_PUBLIC_, a.x)


def kept_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    return fake(*args), *_empty_kept(Arguments(*args))


def backward_fake(*args: Any) -> list[Tensor]:
    b = BackwardArguments.of(*args)
    b.check()
    return b.listed(b.empty())

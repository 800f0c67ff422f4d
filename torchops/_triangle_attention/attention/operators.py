"""The operator ``myops::triangle_attention`` and its private ones. They need Python: C++ programs don't have them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchops._core.checks import expect
from torchops._core.registration import (
    AUTOCAST,
    below_autograd,
    define,
    needs_decomposition,
    needs_grad,
    no_derivatives,
    register,
    without_autocast,
)
from torchops._core.triton.refusal import again_if_refused
from torchops._triangle_attention.attention import aten
from torchops._triangle_attention.attention.arguments import (
    Inputs,
    OutputMask,
    Saved,
    accumulator,
    check,
    check_backward,
    checked,
    inputs_of,
)
from torchops._triangle_attention.attention.backends import backend_for

__all__ = ["triangle_attention"]

triangle_attention = define(
    "triangle_attention(Tensor q, Tensor k, Tensor v, Tensor bias, Tensor? mask=None, float? scale=None) -> Tensor"
)
_with_logsumexp = define(
    "_triangle_attention(Tensor q, Tensor k, Tensor v, Tensor bias, Tensor? mask, float scale) -> (Tensor, Tensor)"
)
_backward = define(
    "_triangle_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor bias, Tensor? mask, Tensor out, "
    "Tensor logsumexp, float scale, bool[4] output_mask) -> (Tensor, Tensor, Tensor, Tensor)"
)
_PUBLIC, _PRIVATE, _BACKWARD = "triangle_attention", "_triangle_attention", "_triangle_attention_backward"

_Gradients = tuple[Tensor, Tensor, Tensor, Tensor]


def _of_backward(grad: Tensor, *args: Any) -> tuple[Tensor, Inputs, Saved, OutputMask]:
    """The arguments of the backward operator, after a check."""
    *inputs_but_scale, out, logsumexp, scale, output_mask = args
    inputs, saved = checked(_BACKWARD, *inputs_but_scale, scale), Saved(out, logsumexp)
    check_backward(_BACKWARD, grad, inputs, saved, output_mask)
    return grad, inputs, saved, output_mask


# --- kernels and shapes ----------------------------------------------------------------------------------------------


@again_if_refused
def _forward(inputs: Inputs) -> Saved:
    return _empty(inputs) if inputs.empty else backend_for(inputs).forward(inputs)


def _empty(inputs: Inputs) -> Saved:
    q = inputs.q
    return Saved(torch.zeros_like(q), q.new_zeros(inputs.sizes, dtype=accumulator(q.dtype)))


@again_if_refused
def _gradients(*args: Any) -> _Gradients:
    grad, inputs, saved, output_mask = _of_backward(*args)
    made: Sequence[Tensor | None] = [None] * 4
    if inputs.empty:
        made = [*map(torch.zeros_like, inputs[:3]), inputs.bias.new_zeros(inputs.bias.shape)]
    elif any(output_mask):
        saved = saved._replace(logsumexp=saved.logsumexp.contiguous())
        made = backend_for(inputs).backward(grad, inputs, saved, tuple(output_mask))
    return _where_wanted(made, inputs.q, output_mask)


def _where_wanted(grads: Sequence[Tensor | None], q: Tensor, output_mask: OutputMask) -> _Gradients:
    """With a tensor of no elements in the place of a gradient that is not requested."""
    dq, dk, dv, dbias = (
        g if want and g is not None else q.new_empty(0) for g, want in zip(grads, output_mask, strict=True)
    )
    return dq, dk, dv, dbias


def _gradients_fake(*args: Any) -> _Gradients:
    _, inputs, _, output_mask = _of_backward(*args)
    shapes = *map(torch.empty_like, inputs[:3]), inputs.bias.new_empty(inputs.bias.shape)
    return _where_wanted(shapes, inputs.q, output_mask)


# --- autograd --------------------------------------------------------------------------------------------------------


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        with below_autograd():
            out, logsumexp = _with_logsumexp(*inputs)
        *tensors, ctx.scale = inputs
        ctx.save_for_backward(*tensors, out, logsumexp)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        output_mask = list(ctx.needs_input_grad[:4])
        grads = _backward(grad, *ctx.saved_tensors, ctx.scale, output_mask)
        return *(g if want else None for g, want in zip(grads, output_mask, strict=True)), None, None


def _autograd(*args: Any) -> Tensor:
    if not no_derivatives():
        check(_PUBLIC, *args)
        if needs_decomposition(*args[:4]):
            return aten.written_out(inputs_of(*args))
        if needs_grad(*args[:4]):
            return _Attention.apply(*inputs_of(*args))
    with below_autograd():
        return triangle_attention(*args)


def _fake(*args: Any) -> Tensor:
    check(_PUBLIC, *args)
    return torch.empty_like(args[0])


def _with_logsumexp_autograd(*args: Any) -> tuple[Tensor, Tensor]:
    inputs = checked(_PRIVATE, *args)
    expect(
        not (needs_decomposition(*inputs[:4]) or needs_grad(*inputs[:4])),
        lambda: f"{_PRIVATE}: expected no argument that needs a gradient or has a tangent, got one",
    )
    with below_autograd():
        return _with_logsumexp(*inputs)


def _backward_autograd(*args: Any) -> _Gradients:
    """Only double backward differentiates this one: through the result too, which is therefore computed again."""
    grad, inputs, _, output_mask = _of_backward(*args)
    given = grad, *inputs[:4]
    if needs_decomposition(*given) or needs_grad(*given):
        return _where_wanted(aten.written_out_gradients(grad, inputs), inputs.q, output_mask)
    with below_autograd():
        return _backward(*args)


# --- vmap and autocast -----------------------------------------------------------------------------------------------


def _folded(op: Any) -> Callable[..., Any]:
    """The rule of vmap: its dimension joins that of the batch, the first of every tensor."""

    def rule(info: Any, in_dims: Sequence[Any], *args: Any) -> Any:
        batch = args[0].shape[1 if in_dims[0] == 0 else 0]

        def fold(t: Any, dim: int | None) -> Any:
            if not isinstance(t, Tensor):
                return t
            return (t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)).flatten(0, 1)

        def unfold(t: Tensor) -> Tensor:
            return t.unflatten(0, (info.batch_size, batch)) if t.dim() > 1 else t

        out = op(*map(fold, args, in_dims))
        if isinstance(out, Tensor):
            return unfold(out), 0
        return tuple(map(unfold, out)), tuple(0 if t.dim() > 1 else None for t in out)

    return rule


def _autocast(op: Any, device_type: str) -> Callable[..., Any]:
    def cast(t: Any) -> Any:
        floating = isinstance(t, Tensor) and t.device.type == device_type and t.is_floating_point()
        return t.to(torch.get_autocast_dtype(device_type)) if floating and t.dtype != torch.float64 else t

    def kernel(*args: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(AUTOCAST):
            return op(*map(cast, args))

    return kernel


# --- registration ----------------------------------------------------------------------------------------------------

register(
    triangle_attention,
    kernel=lambda *args: _forward(checked(_PUBLIC, *args)).out,
    fake=_fake,
    autograd=_autograd,
    vmap=_folded(triangle_attention),
    autocast=_autocast,
)
register(
    _with_logsumexp,
    kernel=lambda *args: tuple(_forward(checked(_PRIVATE, *args))),
    fake=lambda *args: tuple(_empty(checked(_PRIVATE, *args))),
    autograd=_with_logsumexp_autograd,
)
register(
    _backward,
    kernel=without_autocast(_gradients),
    fake=_gradients_fake,
    autograd=without_autocast(_backward_autograd),
    vmap=_folded(_backward),
)

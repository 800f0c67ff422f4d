"""Gradients, transforms and autocast of the triangle attention update: all that is above the backends."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchops._triangle_attention.attention import operators as attention
from torchops._triangle_attention.attention.arguments import expect
from torchops._triangle_attention.update.arguments import (
    NORMS,
    Parameters,
    check,
    check_constant,
    check_kept,
    check_wanted,
    check_writable,
    norm_parameters,
    without_alias,
)
from torchops._triangle_attention.update.operators import (
    NAME,
    is_first,
    is_sparing,
    library,
    update,
    update_,
    update_backward,
    update_kept,
)

__all__: list[str] = []

_myops = torch.ops.myops


def _composite(
    x: Tensor,
    mask: Tensor | None,
    parameters: Parameters,
    heads: int,
    eps: float,
    ending: bool,
    adds: bool = False,
) -> Tensor:
    """In differentiable operators, with q, k and v for all rows at once."""
    norm_weight, norm_bias, bias_weight, q, k, v, gate_weight, gate_bias, out, out_bias = parameters
    assert bias_weight is not None
    assert q is not None
    assert k is not None
    assert v is not None
    assert out is not None
    if adds:
        return (x + _composite(x, mask, parameters, heads, eps, ending)).contiguous()
    if ending:
        x, mask = x.transpose(-2, -3), None if mask is None else mask.mT
    batch, (n, c) = math.prod(x.shape[:-3]), x.shape[-2:]
    parameters = norm_parameters(x, norm_weight, norm_bias)
    z = _myops.layer_norm(x, (c,), *parameters, eps).to(q.dtype).reshape(batch, n, n, c)
    q, k, v = (F.linear(z, t).unflatten(-1, (heads, -1)).transpose(-3, -2) for t in (q, k, v))
    of_scores = F.linear(z, bias_weight).movedim(-1, 1).unsqueeze(1)
    kept = None if mask is None else (mask != 0).reshape(batch, n, 1, 1, n)
    o = _myops.triangle_attention(q, k, v, of_scores, kept).transpose(-3, -2).flatten(-2)
    if gate_weight is not None:
        o = _myops.gate(o, z, gate_weight, gate_bias)
    made = F.linear(o, out, out_bias).view(x.shape)
    return made.transpose(-2, -3).contiguous() if ending else made


def _given(x: Tensor, parameters: Parameters) -> list[Tensor]:
    return [x, *(t for t in parameters if t is not None)]


class _Update(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        mask: Tensor | None,
        heads: int,
        eps: float,
        ending: bool,
        adds: bool,
        *parameters: Tensor | None,
    ) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            made, product, logsumexp = update_kept(x, mask, parameters, heads, eps, ending, adds)
        ctx.save_for_backward(x, product, logsumexp, mask, *parameters)
        ctx.how, ctx.adds = (heads, eps, ending), adds
        ctx.sparing = is_sparing()
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, product, logsumexp, mask, *parameters = ctx.saved_tensors
        needed = ctx.needs_input_grad
        wanted = [needed[0], *needed[6:]]
        dtype = parameters[3].dtype
        # The gradient of the layer, in the dtype of the parameters. If x is wider, its own gradient keeps the full
        # precision.
        adds, of_layer = ctx.adds and grad.dtype == dtype, grad.to(dtype)
        arguments = of_layer, x, product, logsumexp, mask, parameters, *ctx.how, wanted, ctx.sparing, adds
        if attention._only_values():
            with torch._C._AutoDispatchBelowAutograd():
                grads = update_backward(*arguments)
        else:
            grads = update_backward(*arguments)
        dx, *rest = (g if want else None for g, want in zip(grads, wanted, strict=True))
        if dx is not None and ctx.adds and not adds:
            dx = dx + grad
        return dx, None, None, None, None, None, *rest


def _autograd(
    x: Tensor,
    mask: Tensor | None,
    parameters: Parameters,
    heads: int,
    eps: float,
    ending: bool,
    adds: bool = False,
) -> Tensor:
    op, how = "triangle_attention_update", (heads, eps, ending, adds)
    if attention._only_values():
        with torch._C._AutoDispatchBelowAutograd():
            return update(x, mask, parameters, *how)
    check(op, x, mask, parameters, how[0])
    check_constant(op, mask)
    given = _given(x, parameters)
    if attention._needs_decomposition(*given):
        return _composite(x, mask, parameters, *how)
    if attention._needs_grad(*given):
        return _Update.apply(x, mask, *how, *parameters)
    with torch._C._AutoDispatchBelowAutograd():
        return update(x, mask, parameters, *how)


def _autograd_(x: Tensor, mask: Tensor | None, parameters: Parameters, *how: Any) -> None:
    op = "triangle_attention_update_"
    if attention._only_values():
        return _version_(x, mask, parameters, *how)
    check(op, x, mask, parameters, how[0])
    check_writable(op, x)
    check_constant(op, mask)
    given = _given(x, parameters)
    if attention._needs_decomposition(*given):
        _batched_(x, mask, parameters, *how)
    elif attention._needs_grad(*given):
        _check_in_place(x)  # before x is overwritten, since requires_grad is set last
        mask, *parameters = (without_alias(x, t) for t in (mask, *parameters))
        x.add_(update(torch.ops.myops._keep(x), mask, parameters, *how))
    else:
        with torch._C._AutoDispatchBelowAutograd():
            update_(x, mask, parameters, *how)


def _check_in_place(x: Tensor) -> None:
    if x.is_inference() and not torch.is_inference_mode_enabled():
        raise RuntimeError(
            "Inplace update to inference tensor outside InferenceMode is not allowed. You can make a clone to get a "
            "normal tensor before doing inplace update."
        )


def _version_(x: Tensor, *args: Any) -> None:
    _check_in_place(x)
    with torch._C._AutoDispatchBelowADInplaceOrView():
        update_(x, *args)
    torch.autograd.graph.increment_version(x)


def _functionalized_(x: Tensor, mask: Tensor | None, parameters: Parameters, *how: Any) -> None:
    """For the key Functionalize, as the mutating operators of C++ have one (src/autograd/recipe.h)."""
    check("triangle_attention_update_", x, mask, parameters, how[0])
    check_writable("triangle_attention_update_", x)
    with torch._C._AutoDispatchBelowADInplaceOrView():
        x.copy_(update(x, mask, parameters, *how, True))


def _kept_autograd(x: Tensor, mask: Tensor | None, parameters: Parameters, *how: Any) -> tuple[Tensor, Tensor, Tensor]:
    op = "_triangle_attention_update_kept"
    check(op, x, mask, parameters, how[0])
    given = _given(x, parameters)
    expect(
        not (attention._needs_decomposition(*given) or attention._needs_grad(*given)),
        lambda: f"{op}: expected no argument that needs a gradient or has a tangent, got one",
    )
    with torch._C._AutoDispatchBelowAutograd():
        return update_kept(x, mask, parameters, *how)


def _backward_autograd(
    grad: Tensor,
    x: Tensor,
    product: Tensor,
    logsumexp: Tensor,
    mask: Tensor | None,
    parameters: Parameters,
    *rest: Any,
) -> list[Tensor]:
    """Differentiated only by double backward, which goes through everything and so recomputes it."""
    check_kept(grad, x, product, logsumexp, mask, parameters, rest[0])
    given = [grad, *_given(x, parameters)]
    if attention._needs_decomposition(*given) or attention._needs_grad(*given):
        return _composite_gradients(grad, x, product, logsumexp, mask, parameters, *rest)
    with torch._C._AutoDispatchBelowAutograd():
        return update_backward(grad, x, product, logsumexp, mask, parameters, *rest)


def _composite_gradients(
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
    check_wanted(wanted)
    inputs = (x, *parameters)
    asked = [i for i, (t, want) in enumerate(zip(inputs, wanted, strict=True)) if want and t is not None]

    def of_those(*values: Tensor) -> Tensor:
        all_of_them: list[Any] = list(inputs)
        for i, value in zip(asked, values, strict=True):
            all_of_them[i] = value
        return _composite(all_of_them[0], mask, all_of_them[1:], heads, eps, ending)

    made = torch.func.vjp(of_those, *(inputs[i] for i in asked))[1](grad) if asked else ()
    by_input = dict(zip(asked, made, strict=True))
    if adds and 0 in by_input:
        by_input[0] = by_input[0] + grad
    return [by_input[i] if i in by_input else x.new_empty(0) for i in range(len(inputs))]


def _batched_(x: Tensor, mask: Tensor | None, parameters: Parameters, *how: Any) -> None:
    """In ATen operators, which save what they are given: none of that may be overwritten."""
    mask, *parameters = (without_alias(x, t) for t in (mask, *parameters))
    x.add_(_composite(torch.ops.myops._keep(x), mask, parameters, *how))


def _each_of_batch(*args: Any) -> list[Tensor]:
    """Gradients of a batch of cotangents (torch.autograd.grad(..., is_grads_batched=True)), one after another: the
    fallback of the Batched key doesn't support lists of tensors."""
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    sizes = {1}

    def physical(value: Any) -> Any:
        if isinstance(value, Tensor):
            value = torch._remove_batch_dim(value, level, 1, 0)  # adds a dimension of size 1 if it has none
            sizes.add(len(value))
            return value
        return [physical(each) for each in value] if isinstance(value, (list, tuple)) else value

    def at(value: Any, i: int) -> Any:
        if isinstance(value, Tensor):
            return value[i if len(value) > 1 else 0]
        return [at(each, i) for each in value] if isinstance(value, (list, tuple)) else value

    torch._C._vmapmode_decrement_nesting()
    try:
        given = physical(args)
        made = [update_backward(*at(given, i)) for i in range(max(sizes))]
        stacked = [torch.stack(each) for each in zip(*made, strict=True)]
    finally:
        torch._C._vmapmode_increment_nesting()
    return [torch._add_batch_dim(t, 0, level) for t in stacked]


def _materialized(op: Any) -> Callable[..., Any]:
    """`op` for the keys under which the memory of a tensor doesn't hold its values: views negated on read, such as the
    imaginary part of a conjugate, and zeros without memory. ATen's fallbacks for these keys don't look into lists of
    optional tensors, and expect an operator that overwrites to return its argument."""

    def held(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.clone() if value._is_zerotensor() else value.resolve_conj().resolve_neg()
        return [held(each) for each in value] if isinstance(value, (list, tuple)) else value

    def kernel(first: Tensor, *args: Any) -> Any:
        resolved = held(first)
        made = op(resolved, *held(args))
        if op is update_ and resolved is not first:
            first.copy_(resolved)
        return made

    return kernel


def _autocast(op: Any, device_type: str) -> Callable[..., Any]:
    """Casts the parameters, and x unless it is float32 or overwritten: then they get the dtype of a 16-bit x. Those of
    the norm stay float32, as those of F.layer_norm do."""

    def cast(t: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        floating = t is not None and t.device.type == device_type and t.is_floating_point() and t.dtype != torch.float64
        return t.to(dtype) if t is not None and floating else t

    def unless_float32(t: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        return t if t is None or t.dtype == torch.float32 else cast(t, dtype)

    def kernel(x: Tensor, mask: Tensor | None, parameters: Parameters, *how: Any) -> Any:
        keeps = op is update_ and x.dtype in (torch.float16, torch.bfloat16)
        dtype = x.dtype if keeps else torch.get_autocast_dtype(device_type)
        with torch._C._ExcludeDispatchKeyGuard(attention._AUTOCAST):
            given = x if op is update_ else unless_float32(x, dtype)
            norms = [unless_float32(t, dtype) for t in parameters[: len(NORMS)]]
            return op(given, mask, [*norms, *(cast(t, dtype) for t in parameters[len(NORMS) :])], *how)

    return kernel


# --- registration ----------------------------------------------------------------------------------------------------


def _register() -> None:
    for suffix, op, autograd, batched in (
        ("", update, _autograd, _composite),
        ("_", update_, _autograd_, _batched_),
        ("_kept", update_kept, _kept_autograd, None),
        (
            "_backward",
            update_backward,
            attention._without_autocast(_backward_autograd),
            attention._without_autocast(_composite_gradients),
        ),
    ):
        library.impl(NAME + suffix, autograd, "Autograd")
        for key in ("Negative", "Conjugate", "ZeroTensor"):
            library.impl(NAME + suffix, _materialized(op), key)
        if batched is not None:
            library.impl(NAME + suffix, batched, "FuncTorchBatched")
    library.impl(NAME + "_", _version_, "ADInplaceOrView")
    library.impl(NAME + "_", _functionalized_, "Functionalize")
    library.impl(NAME + "_backward", _each_of_batch, "Batched")
    for device, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
        for suffix, op in (("", update), ("_", update_)):
            library.impl(NAME + suffix, _autocast(op, device), key)


if is_first:
    _register()

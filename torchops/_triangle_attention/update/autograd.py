"""Gradients, transforms and autocast of the triangle attention update, and its registration."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchops._core.checks import expect
from torchops._core.registration import (
    AUTOCAST,
    below_autograd,
    needs_decomposition,
    needs_grad,
    no_derivatives,
    register,
    without_autocast,
)
from torchops._triangle_attention.update import operators
from torchops._triangle_attention.update.arguments import (
    NORMS,
    Arguments,
    Parameters,
    check,
    check_constant,
    check_output_mask,
    check_writable,
    norm_parameters,
    without_alias,
)
from torchops._triangle_attention.update.operators import (
    BackwardArguments,
    update,
    update_,
    update_backward,
    update_kept,
    wants_low_memory,
)

__all__: list[str] = []

_myops = torch.ops.myops


def _composite(*args: Any) -> Tensor:
    """In differentiable operators, with q, k and v for all rows at once."""
    a = Arguments(*args)
    x, mask, parameters, heads, eps, ending, add_residual = a
    if add_residual:
        return (x + _composite(*a[:6])).contiguous()
    norm_weight, norm_bias, bias_weight, q, k, v, gate_weight, gate_bias, out, out_bias = parameters
    assert bias_weight is not None
    assert q is not None
    assert k is not None
    assert v is not None
    assert out is not None
    if ending:
        x, mask = x.transpose(-2, -3), None if mask is None else mask.mT
    batch, (n, c) = math.prod(x.shape[:-3]), x.shape[-2:]
    norm = norm_parameters(x, norm_weight, norm_bias)
    z = _myops.layer_norm(x, (c,), *norm, eps).to(q.dtype).reshape(batch, n, n, c)
    q, k, v = (F.linear(z, t).unflatten(-1, (heads, -1)).transpose(-3, -2) for t in (q, k, v))
    of_scores = F.linear(z, bias_weight).movedim(-1, 1).unsqueeze(1)
    kept = None if mask is None else (mask != 0).reshape(batch, n, 1, 1, n)
    o = _myops.triangle_attention(q, k, v, of_scores, kept).transpose(-3, -2).flatten(-2)
    if gate_weight is not None:
        o = _myops.gate(o, z, gate_weight, gate_bias)
    made = F.linear(o, out, out_bias).view(x.shape)
    return made.transpose(-2, -3).contiguous() if ending else made


class _Update(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        mask: Tensor | None,
        heads: int,
        eps: float,
        ending: bool,
        add_residual: bool,
        *parameters: Tensor | None,
    ) -> Tensor:
        with below_autograd():
            made, product, logsumexp = update_kept(x, mask, parameters, heads, eps, ending, add_residual)
        ctx.save_for_backward(x, product, logsumexp, mask, *parameters)
        ctx.how, ctx.add_residual = (heads, eps, ending), add_residual
        ctx.low_memory = wants_low_memory()
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, product, logsumexp, mask, *parameters = ctx.saved_tensors
        needed = ctx.needs_input_grad
        output_mask = [needed[0], *needed[6:]]
        dtype = parameters[3].dtype
        # The gradient of the layer, in the dtype of the parameters. If x is wider, its own gradient keeps the full
        # precision.
        add_residual, of_layer = ctx.add_residual and grad.dtype == dtype, grad.to(dtype)
        how = *ctx.how, output_mask, ctx.low_memory, add_residual
        arguments = of_layer, x, product, logsumexp, mask, parameters, *how
        # Compiled autograd traces this, and Dynamo does not know the dispatcher's keys.
        if not torch.compiler.is_compiling() and no_derivatives():
            with below_autograd():
                grads = update_backward(*arguments)
        else:
            grads = update_backward(*arguments)
        dx, *rest = (g if want else None for g, want in zip(grads, output_mask, strict=True))
        if dx is not None and ctx.add_residual and not add_residual:
            dx = dx + grad
        return dx, None, None, None, None, None, *rest


def _autograd(*args: Any) -> Tensor:
    op, a = "triangle_attention_update", Arguments(*args)
    if not no_derivatives():
        check(op, a)
        check_constant(op, a.mask)
        if needs_decomposition(*a.differentiable):
            return _composite(*a)
        if needs_grad(*a.differentiable):
            return _Update.apply(a.x, a.mask, *a[3:], *a.parameters)
    with below_autograd():
        return update(*a)


def _autograd_(*args: Any) -> None:
    op, a = "triangle_attention_update_", Arguments(*args)
    x = a.x
    if no_derivatives():
        return _version_(*args)
    check(op, a)
    check_writable(op, x)
    check_constant(op, a.mask)
    if needs_decomposition(*a.differentiable):
        _batched_(*args)
    elif needs_grad(*a.differentiable):
        _check_in_place(x)  # before x is overwritten, since requires_grad is set last
        x.add_(update(*_copied(a)))
    else:
        with below_autograd():
            update_(*args)


def _copied(a: Arguments) -> Arguments:
    """With a copy of x, which is about to be overwritten, and of what shares its memory."""
    mask, *parameters = (without_alias(a.x, t) for t in a.tensors[1:])
    return a._replace(x=_myops._saved_copy(a.x), mask=mask, parameters=parameters)


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


def _functionalized_(*args: Any) -> None:
    """For the key Functionalize, as the mutating operators of C++ have one (src/autograd/recipe.h)."""
    a = Arguments(*args)
    check("triangle_attention_update_", a)
    check_writable("triangle_attention_update_", a.x)
    with torch._C._AutoDispatchBelowADInplaceOrView():
        a.x.copy_(update(*a._replace(add_residual=True)))


def _kept_autograd(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    op, a = "_triangle_attention_update_kept", Arguments(*args)
    check(op, a)
    expect(
        not (needs_decomposition(*a.differentiable) or needs_grad(*a.differentiable)),
        lambda: f"{op}: expected no argument that needs a gradient or has a tangent, got one",
    )
    with below_autograd():
        return update_kept(*args)


def _backward_autograd(*args: Any) -> list[Tensor]:
    """Differentiated only by double backward, which goes through everything and so recomputes it."""
    b = BackwardArguments.of(*args)
    b.check()
    given = [b.grad, *b.a.differentiable]
    if needs_decomposition(*given) or needs_grad(*given):
        return _composite_gradients(*args)
    with below_autograd():
        return update_backward(*args)


def _composite_gradients(*args: Any) -> list[Tensor]:
    b = BackwardArguments.of(*args)
    check_output_mask("_triangle_attention_update_backward", b.output_mask)
    requested = b.requested

    def of_those(*values: Tensor) -> Tensor:
        x, *parameters = (dict[str, Any](b.inputs) | dict(zip(requested, values, strict=True))).values()
        return _composite(*b.a._replace(x=x, parameters=parameters, add_residual=False))

    values = torch.func.vjp(of_those, *requested.values())[1](b.grad) if requested else ()
    made = dict(zip(requested, values, strict=True))
    if b.a.add_residual and "x" in made:
        made["x"] = made["x"] + b.grad
    return b.listed(made)


def _batched_(*args: Any) -> None:
    """In ATen operators, which save what they are given: none of that may be overwritten."""
    a = Arguments(*args)
    a.x.add_(_composite(*_copied(a)))


_MOST_LEVELS = 64  # of ATen's kVmapNumLevels


def _innermost_level(value: Any) -> int:
    """The highest level of `torch._vmap_internals.vmap` among tensors, 0 if there is none. The thread that runs a
    backward on a GPU doesn't know the level of the thread that called it."""
    if isinstance(value, (list, tuple)):
        return max(map(_innermost_level, value), default=0)
    if not isinstance(value, Tensor) or not torch._C._dispatch_keys(value).has("Batched"):
        return 0
    # A tensor without a level gets a dimension of the size that is given here.
    return next(level for level in range(_MOST_LEVELS, 0, -1) if len(torch._remove_batch_dim(value, level, 0, 0)))


def _each_of_batch(*args: Any) -> list[Tensor]:
    """Gradients of a batch of cotangents (torch.autograd.grad(..., is_grads_batched=True)), one after another: the
    fallback of the Batched key doesn't support lists of tensors."""
    level = _innermost_level(args)
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

    given = physical(args)
    made = [update_backward(*at(given, i)) for i in range(max(sizes))]
    return [torch._add_batch_dim(torch.stack(each), 0, level) for each in zip(*made, strict=True)]


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
        with torch._C._ExcludeDispatchKeyGuard(AUTOCAST):
            given = x if op is update_ else unless_float32(x, dtype)
            norms = [unless_float32(t, dtype) for t in parameters[: len(NORMS)]]
            return op(given, mask, [*norms, *(cast(t, dtype) for t in parameters[len(NORMS) :])], *how)

    return kernel


# --- registration ----------------------------------------------------------------------------------------------------


def _register(op: Any, vmap: Any, others: dict[str, Any], **kernels: Any) -> None:
    """`vmap` is for lists of optional tensors, which :func:`torch.library.register_vmap` does not know."""
    for key in ("Negative", "Conjugate", "ZeroTensor"):
        others[key] = _materialized(op)
    register(op, others=others | {"FuncTorchBatched": vmap}, untraceable="triangle_attention_update", **kernels)


_register(update, _composite, {}, kernel=operators.kernel, fake=operators.fake, autograd=_autograd, autocast=_autocast)
_register(
    update_,
    _batched_,
    {"ADInplaceOrView": _version_, "Functionalize": _functionalized_},
    kernel=operators.kernel_,
    fake=operators.fake_,
    autograd=_autograd_,
    autocast=_autocast,
)
_register(update_kept, None, {}, kernel=operators.kept_kernel, fake=operators.kept_fake, autograd=_kept_autograd)
_register(
    update_backward,
    without_autocast(_composite_gradients),
    {"Batched": _each_of_batch},
    kernel=without_autocast(operators.backward_kernel),
    fake=operators.backward_fake,
    autograd=without_autocast(_backward_autograd),
)

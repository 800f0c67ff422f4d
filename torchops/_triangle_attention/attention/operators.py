"""The operator ``myops::triangle_attention`` and its private ones, which need Python, so C++ programs don't have them.
On CUDA they run kernels in Triton (`triton.py`), elsewhere in panels of ATen operators (`aten.py`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from torchops._core.devices import has_bfloat16
from torchops._triangle_attention.attention import aten as panels
from torchops._triangle_attention.attention.arguments import check, check_backward, expect, numbers

# A process in which this module is imported again has its operators already.
_is_first = not hasattr(torch.ops.myops, "triangle_attention")
_library = torch.library.Library("myops", "FRAGMENT")
for _schema in (
    "triangle_attention(Tensor q, Tensor k, Tensor v, Tensor bias, Tensor? mask=None, float? scale=None) -> Tensor",
    "_triangle_attention(Tensor q, Tensor k, Tensor v, Tensor bias, Tensor? mask, float scale) -> (Tensor, Tensor)",
    "_triangle_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor bias, Tensor? mask, Tensor out, "
    "Tensor logsumexp, float scale, bool[4] wanted) -> (Tensor, Tensor, Tensor, Tensor)",
):
    if _is_first:
        _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
_op = torch.ops.myops.triangle_attention.default
_with_logsumexp = torch.ops.myops._triangle_attention.default
_backward = torch.ops.myops._triangle_attention_backward.default


# --- backends --------------------------------------------------------------------------------------------------------


_MOST_BLOCKS = 65535  # of a grid in its second and third dimension


def _body(q: Tensor) -> Any:
    """The module whose forward and backward run for such a q."""
    batch, rows, heads, _, d = q.shape
    return body_for(q, batch, rows, heads, d)


def body_for(like: Tensor, batch: int, rows: int, heads: int, d: int) -> Any:
    """The same for these sizes, on the device and in the dtype of `like`."""
    fits = max(batch * heads, rows) <= _MOST_BLOCKS
    if fits and like.is_cuda and like.dtype != torch.float64 and has_bfloat16(like.device):
        try:
            kernels = importlib.import_module("torchops._triangle_attention.attention.triton")
        except ModuleNotFoundError as error:
            if error.name != "triton":
                raise
        else:
            if d <= kernels.MAX_HEAD_DIM:
                return kernels
    return panels


def _scale(q: Tensor, scale: float | None) -> float:
    return float(max(q.shape[-1], 1)) ** -0.5 if scale is None else scale


def _forward_kernel(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    check("_triangle_attention", q, k, v, bias, mask)
    return _forward(q, k, v, bias, mask, scale)


def _forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    if q.numel() == 0:
        return torch.empty_like(q), q.new_zeros(numbers(q), dtype=panels.accumulator(q.dtype))
    out, lse = _body(q).forward(q, k, v, bias, mask, scale)
    return out, lse


def _public_kernel(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    check("triangle_attention", q, k, v, bias, mask)
    return _forward(q, k, v, bias, mask, _scale(q, scale))[0]


_Gradients = tuple[Tensor, Tensor, Tensor, Tensor]


def _backward_kernel(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    scale: float,
    wanted: Sequence[bool],
) -> _Gradients:
    check_backward(grad, q, k, v, bias, mask, out, logsumexp, wanted)
    if q.numel() == 0:
        return _where_wanted([torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), _zeros(bias)], q, wanted)
    if any(wanted):
        logsumexp = logsumexp.contiguous()
        grads = _body(q).backward(grad, q, k, v, bias, mask, out, logsumexp, scale, tuple(wanted))
    else:
        grads = [None] * 4
    return _where_wanted(grads, q, wanted)


def _zeros(bias: Tensor) -> Tensor:
    return bias.new_zeros(bias.shape)


def _where_wanted(grads: Sequence[Tensor | None], q: Tensor, wanted: Sequence[bool]) -> _Gradients:
    """With a tensor of no elements in the place of a gradient that is not wanted."""
    dq, dk, dv, dbias = (g if want and g is not None else q.new_empty(0) for g, want in zip(grads, wanted, strict=True))
    return dq, dk, dv, dbias


def _public_fake(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    check("triangle_attention", q, k, v, bias, mask)
    return torch.empty_like(q)


def _forward_fake(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    check("_triangle_attention", q, k, v, bias, mask)
    return torch.empty_like(q), q.new_empty(numbers(q), dtype=panels.accumulator(q.dtype))


def _backward_fake(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    scale: float,
    wanted: Sequence[bool],
) -> _Gradients:
    check_backward(grad, q, k, v, bias, mask, out, logsumexp, wanted)
    made = (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), bias.new_empty(bias.shape))
    return _where_wanted(made, q, wanted)


# --- autograd --------------------------------------------------------------------------------------------------------


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            out, logsumexp = _with_logsumexp(q, k, v, bias, mask, scale)
        ctx.save_for_backward(q, k, v, bias, mask, out, logsumexp)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        wanted = list(ctx.needs_input_grad[:4])
        grads = _backward(grad, *ctx.saved_tensors, ctx.scale, wanted)
        return *(g if want else None for g, want in zip(grads, wanted, strict=True)), None, None


def _needs_decomposition(*tensors: Tensor) -> bool:
    """Whether torch.func is active or there is a tangent: these know ATen operators only."""
    if torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.FuncTorchDynamicLayerBackMode):
        return True
    return forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def _only_values() -> bool:
    """Whether nothing but values can be asked for, of whatever arguments. Then the kernels beneath autograd, which
    check their arguments as well, are all that has to run."""
    asked = torch.is_grad_enabled() or forward_ad._current_level >= 0
    return not asked and not _needs_decomposition()


def _needs_grad(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _public_autograd(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    check("triangle_attention", q, k, v, bias, mask)
    if _needs_decomposition(q, k, v, bias):
        return panels.written_out(q, k, v, bias, mask, _scale(q, scale))
    if _needs_grad(q, k, v, bias):
        return _Attention.apply(q, k, v, bias, mask, _scale(q, scale))
    with torch._C._AutoDispatchBelowAutograd():
        return _op(q, k, v, bias, mask, scale)


def _forward_autograd(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    check("_triangle_attention", q, k, v, bias, mask)
    expect(
        not (_needs_decomposition(q, k, v, bias) or _needs_grad(q, k, v, bias)),
        lambda: "_triangle_attention: expected no argument that needs a gradient or has a tangent, got one",
    )
    with torch._C._AutoDispatchBelowAutograd():
        return _with_logsumexp(q, k, v, bias, mask, scale)


def _backward_autograd(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    scale: float,
    wanted: Sequence[bool],
) -> _Gradients:
    """Only double backward differentiates this one: through the result too, which is therefore computed again."""
    check_backward(grad, q, k, v, bias, mask, out, logsumexp, wanted)
    inputs = grad, q, k, v, bias
    if _needs_decomposition(*inputs) or _needs_grad(*inputs):
        return _where_wanted(panels.written_out_gradients(*inputs, mask, scale), q, wanted)
    with torch._C._AutoDispatchBelowAutograd():
        return _backward(grad, q, k, v, bias, mask, out, logsumexp, scale, wanted)


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


_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
_AUTOCAST = _AUTOCAST | torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)


def _without_autocast(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel of gradients, which has the dtypes of the forward pass also where backward() is called under
    autocast."""

    def call(*args: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return kernel(*args)

    return call


def _autocast(op: Any, device_type: str) -> Callable[..., Any]:
    def cast(t: Any) -> Any:
        floating = isinstance(t, Tensor) and t.device.type == device_type and t.is_floating_point()
        return t.to(torch.get_autocast_dtype(device_type)) if floating and t.dtype != torch.float64 else t

    def kernel(*args: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return op(*map(cast, args))

    return kernel


# --- registration ----------------------------------------------------------------------------------------------------


def _register() -> None:
    for name, kernel, fake, autograd in (
        ("triangle_attention", _public_kernel, _public_fake, _public_autograd),
        ("_triangle_attention", _forward_kernel, _forward_fake, _forward_autograd),
        ("_triangle_attention_backward", _backward_kernel, _backward_fake, _backward_autograd),
    ):
        if name.endswith("_backward"):
            kernel, autograd = _without_autocast(kernel), _without_autocast(autograd)
        for key in ("CPU", "CUDA"):
            _library.impl(name, kernel, key)
        torch.library.register_fake(f"myops::{name}", fake, lib=_library)
        _library.impl(name, autograd, "Autograd")
    for device, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
        _library.impl("triangle_attention", _autocast(_op, device), key)
    for called in (_op, _backward):
        torch.library.register_vmap(called, _folded(called), lib=_library)


if _is_first:
    _register()

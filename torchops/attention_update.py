"""The update of a pair tensor by triangle attention: layer norm, attention, gate and output product, with any parameters.

:class:`torchops.nn.TriangleAttention` and the modules of other packages share it. Beneath are private operators,
registered from here, because the kernels for CUDA are written in Triton: in inference a caller's graph has one node for
all panels (`_attention_update_panels.py`), whatever N.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchops import _attention_panels, attention
from torchops import _attention_update_panels as panels
from torchops.ops import gate, layer_norm

__all__ = ["AttentionWeights", "Node", "triangle_attention_update"]

Node = Literal["starting", "ending"]


class AttentionWeights(NamedTuple):
    """The parameters of triangle attention of ``c`` features in ``heads`` heads of ``d``."""

    norm_weight: Tensor | None
    """``(c,)``, as ``norm_bias``; ``None`` for 1 and 0."""
    norm_bias: Tensor | None
    bias_weight: Tensor
    """``(heads, c)``: makes the bias of the scores."""
    q: Tensor
    """``(heads * d, c)``, as ``k`` and ``v``."""
    k: Tensor
    v: Tensor
    gate: Tensor | None
    """``(heads * d, c)``; ``None`` for no gate."""
    gate_bias: Tensor | None
    """``(heads * d,)``, or ``None``."""
    out: Tensor
    """``(c, heads * d)``."""
    out_bias: Tensor | None
    """``(c,)``, or ``None``."""
    heads: int
    eps: float = 1e-5


def triangle_attention_update(
    x: Tensor,
    mask: Tensor | None,
    weights: AttentionWeights,
    node: Node = "starting",
    *,
    inplace: bool = False,
) -> Tensor:
    """What triangle attention adds to ``x``, a new contiguous tensor; or, with ``inplace``, ``x`` itself, to which that
    was added.

    .. code-block:: text

        z = layer_norm(x)
        q, k, v, bias = z @ q.T, z @ k.T, z @ v.T, z @ bias_weight.T
        o = triangle_attention(q, k, v, bias, mask)        of rows; for the ending node, of columns
        (o * sigmoid(z @ gate.T + gate_bias)) @ out.T + out_bias

    Args:
        x: pair tensor of shape ``(*batch, N, N, c)``, with any number of batch dimensions.
        mask: of shape ``(*batch, N, N)``, bool or floating-point, or ``None``. A key whose mask is 0 (``False``) has no
            weight; any other number keeps it. It gets no gradient.
        weights: of one dtype. Where that has 16 bits, ``x`` may be float32.
        node: ``"starting"``: the edges of a row attend to one another; ``"ending"``: those of a column.
        inplace: for inference; training copies ``x`` first.

    Memory: without gradients, at most a tensor of the size of ``x`` in the dtype of the weights and 64 MiB beside the
    result on CUDA, 32 MiB and the bias on the CPU; or one row, where rows are longer. Training keeps ``x`` and, of the
    size of ``heads * d`` features, the result of the attention; the rest is computed again.

    Raises:
        ValueError: there is no such node.
        RuntimeError: shapes do not match; devices differ; dtypes are not supported together; or ``x`` is to be
            overwritten, and has several elements in one place or is a leaf that requires grad.
    """
    if node not in ("starting", "ending"):
        raise ValueError(f"triangle_attention_update: expected node starting or ending, got {node}")
    parameters, heads, eps = list(weights[:10]), weights.heads, weights.eps
    if inplace:
        _op_(x, mask, parameters, heads, eps, node == "ending")
        return x
    return _op(x, mask, parameters, heads, eps, node == "ending")


# A process in which this module is imported again has its operators already.
_is_first = not hasattr(torch.ops.myops, "_triangle_attention_update")
_library = torch.library.Library("myops", "FRAGMENT")
_ARGUMENTS = "Tensor? mask, Tensor?[] parameters, int heads, float eps, bool ending"
for _schema in (
    f"_triangle_attention_update(Tensor x, {_ARGUMENTS}) -> Tensor",
    f"_triangle_attention_update_(Tensor(a!) x, {_ARGUMENTS}) -> ()",
    # The update, the result of the attention before its gate, and the logarithms of sums.
    f"_triangle_attention_update_kept(Tensor x, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
    f"_triangle_attention_update_backward(Tensor grad, Tensor x, Tensor product, Tensor logsumexp, {_ARGUMENTS}, "
    "bool[11] wanted) -> Tensor[]",
):
    if _is_first:
        _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
_op = torch.ops.myops._triangle_attention_update.default
_op_ = torch.ops.myops._triangle_attention_update_.default
_kept = torch.ops.myops._triangle_attention_update_kept.default
_backward = torch.ops.myops._triangle_attention_update_backward.default

_Parameters = Sequence[Tensor | None]


# --- checks ----------------------------------------------------------------------------------------------------------

_NAMES = AttentionWeights._fields[:10]
_OPTIONAL = ("norm_weight", "norm_bias", "gate", "gate_bias", "out_bias")
_name = attention._name
_expect = attention._expect
_check_layout = attention._check_layout


def _check(op: str, x: Tensor, mask: Tensor | None, parameters: _Parameters, heads: int) -> None:
    _expect(len(parameters) == 10, lambda: f"{op}: expected 10 parameters, got {len(parameters)}")
    given = dict(zip(_NAMES, parameters, strict=True))
    for name, t in given.items():
        _expect(t is not None or name in _OPTIONAL, lambda name=name: f"{op}: expected a tensor {name}, got None")
    q = given["q"]
    assert q is not None
    dtypes = attention._DTYPES
    _expect(
        q.dtype in dtypes,
        lambda: f"{op}: expected q of dtype float32, float64, float16 or bfloat16, got {_name(q.dtype)}",
    )
    either = " or float32" if q.element_size() == 2 else ""
    _expect(
        x.dtype == q.dtype or (bool(either) and x.dtype == torch.float32),
        lambda: f"{op}: expected x of dtype {_name(q.dtype)}{either} to match q, got {_name(x.dtype)}",
    )
    _expect(x.dim() >= 3, lambda: f"{op}: expected x of shape (*batch, N, N, c), got {tuple(x.shape)}")
    c, width = x.shape[-1], q.shape[0]
    _expect(x.shape[-3] == x.shape[-2], lambda: f"{op}: expected x of shape (*batch, N, N, c), got {tuple(x.shape)}")
    _check_layout(op, "x", x)
    _expect(heads >= 1, lambda: f"{op}: expected heads of at least 1, got {heads}")
    _expect(
        width % heads == 0,
        lambda: f"{op}: expected q of shape (heads * d, c) with heads = {heads}, got {tuple(q.shape)}",
    )
    shapes: dict[str, tuple[Any, ...]] = dict.fromkeys(("norm_weight", "norm_bias", "out_bias"), (c,))
    shapes |= dict.fromkeys(("q", "k", "v", "gate"), (width, c))
    shapes |= {"bias_weight": (heads, c), "gate_bias": (width,), "out": (c, width)}
    for name, t in given.items():
        if t is not None:
            _check_layout(op, name, t)
            _check_parameter(op, name, t, x, q, shapes[name])
    _expect(
        given["gate"] is not None or given["gate_bias"] is None,
        lambda: f"{op}: expected gate_bias None without gate, got a tensor",
    )
    if mask is not None:
        _check_mask(op, mask, x)


def _check_parameter(op: str, name: str, t: Tensor, x: Tensor, q: Tensor, shape: tuple[Any, ...]) -> None:
    _expect(
        t.dtype == q.dtype,
        lambda: f"{op}: expected {name} of dtype {_name(q.dtype)} to match q, got {_name(t.dtype)}",
    )
    _expect(
        t.device == x.device, lambda: f"{op}: expected {name} on device {x.device} to match x, got {t.device}"
    )
    _check_shape(op, name, t, x, shape)


def _check_mask(op: str, mask: Tensor, x: Tensor) -> None:
    _check_layout(op, "mask", mask)
    _expect(
        mask.dtype == torch.bool or mask.is_floating_point(),
        lambda: f"{op}: expected mask of dtype bool or floating-point, got {_name(mask.dtype)}",
    )
    _expect(
        mask.device == x.device, lambda: f"{op}: expected mask on device {x.device} to match x, got {mask.device}"
    )
    _check_shape(op, "mask", mask, x, tuple(x.shape[:-1]))


def _check_shape(op: str, name: str, t: Tensor, x: Tensor, shape: tuple[Any, ...]) -> None:
    def message() -> str:
        return f"{op}: expected {name} of shape {shape} to match x of shape {tuple(x.shape)}, got {tuple(t.shape)}"

    _expect(t.dim() == len(shape), message)
    for size, expected in zip(t.shape, shape, strict=True):
        _expect(size == expected, message)


def _check_writable(op: str, x: Tensor) -> None:
    shared = any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride(), strict=True))
    _expect(
        not shared,
        lambda: f"{op}: expected x without elements in one place, got strides {x.stride()} of {tuple(x.shape)}",
    )


def _check_kept(
    grad: Tensor, x: Tensor, product: Tensor, logsumexp: Tensor, mask: Any, parameters: _Parameters, heads: int
) -> None:
    op = "_triangle_attention_update_backward"
    _check(op, x, mask, parameters, heads)
    q = parameters[3]
    assert q is not None
    batch, n = math.prod(x.shape[:-3]), x.shape[-2]
    wide = _attention_panels.accumulator(q.dtype)
    for name, t, dtype, shape in (
        ("grad", grad, q.dtype, tuple(x.shape)),
        ("product", product, q.dtype, (batch, n, n, q.shape[0])),
        ("logsumexp", logsumexp, wide, (batch, n, heads, n)),
    ):
        _check_layout(op, name, t)
        _expect(
            t.dtype == dtype, lambda: f"{op}: expected {name} of dtype {_name(dtype)}, got {_name(t.dtype)}"  # noqa: B023
        )
        _expect(
            t.device == x.device,
            lambda: f"{op}: expected {name} on device {x.device} to match x, got {t.device}",  # noqa: B023
        )
        _check_shape(op, name, t, x, shape)


# --- backends --------------------------------------------------------------------------------------------------------


def _steps(x: Tensor, q: Tensor, heads: int) -> Any:
    """The module whose steps run for such an x."""
    if x.is_cuda and x.stride(-1) == 1 and attention._body(q.view(1, 1, heads, -1, 1).mT) is not _attention_panels:
        return importlib.import_module("torchops._attention_update_triton")
    return panels


def _weights(parameters: _Parameters, heads: int, eps: float, overwritten: Tensor | None = None) -> panels.Weights:
    """Contiguous, and not in memory that is overwritten."""

    def usable(t: Tensor | None) -> Tensor | None:
        if t is None:
            return None
        if overwritten is not None and t.untyped_storage()._cdata == overwritten.untyped_storage()._cdata:
            return t.clone(memory_format=torch.contiguous_format)
        return t.contiguous()

    made: list[Any] = [usable(t) for t in parameters]
    return panels.Weights(*made, heads, eps, torch.cat(made[3:6]))


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Kernels are launched on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _flat(t: Tensor, trailing: int) -> Tensor:
    """With one batch dimension; a view, where strides allow it."""
    return t.reshape(math.prod(t.shape[:-trailing]), *t.shape[-trailing:])


def _rows_of(mask: Tensor | None, ending: bool) -> Tensor | None:
    """Which keys are kept: bool, (batch, i, k) in the order of the attention."""
    if mask is None:
        return None
    mask = _flat(mask if mask.dtype == torch.bool else mask != 0, 2)
    return mask.mT if ending else mask


def _kernel(
    x: Tensor, mask: Tensor | None, parameters: _Parameters, heads: int, eps: float, ending: bool
) -> Tensor:
    _check("_triangle_attention_update", x, mask, parameters, heads)
    return _update(x, mask, parameters, heads, eps, ending, None)


def _update(
    x: Tensor,
    mask: Tensor | None,
    parameters: _Parameters,
    heads: int,
    eps: float,
    ending: bool,
    kept: tuple[Tensor, Tensor] | None,
) -> Tensor:
    w = _weights(parameters, heads, eps)
    out = torch.empty(x.shape, dtype=w.q.dtype, device=x.device)
    if out.numel():
        target, steps = _flat(out, 3), _steps(x, w.q, heads)
        with _on(x.device):
            panels.forward(_flat(x, 3), _rows_of(mask, ending), w, ending, target, False, kept, steps)
    return out


def _kernel_(
    x: Tensor, mask: Tensor | None, parameters: _Parameters, heads: int, eps: float, ending: bool
) -> None:
    _check("_triangle_attention_update_", x, mask, parameters, heads)
    _check_writable("_triangle_attention_update_", x)
    if x.numel():
        w = _weights(parameters, heads, eps, overwritten=x)
        if mask is not None and mask.dtype == torch.bool:
            mask = mask.clone() if mask.untyped_storage()._cdata == x.untyped_storage()._cdata else mask
        _overwrite(x, _rows_of(mask, ending), w, ending)


def _overwrite(x: Tensor, kept_keys: Tensor | None, w: panels.Weights, ending: bool) -> None:
    """Batch dimensions that cannot be one are taken one by one."""
    try:
        flat = x.view(math.prod(x.shape[:-3]), *x.shape[-3:])
    except RuntimeError:
        part = None if kept_keys is None else kept_keys.unflatten(0, (len(x), -1))
        for i, each in enumerate(x):
            _overwrite(each, None if part is None else part[i], w, ending)
    else:
        with _on(x.device):
            panels.forward(flat, kept_keys, w, ending, flat, True, None, _steps(x, w.q, w.heads))


def _kept_kernel(
    x: Tensor, mask: Tensor | None, parameters: _Parameters, heads: int, eps: float, ending: bool
) -> tuple[Tensor, Tensor, Tensor]:
    _check("_triangle_attention_update_kept", x, mask, parameters, heads)
    product, logsumexp = _empty_kept(x, parameters, heads)
    return _update(x, mask, parameters, heads, eps, ending, (product, logsumexp)), product, logsumexp


def _empty_kept(x: Tensor, parameters: _Parameters, heads: int) -> tuple[Tensor, Tensor]:
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
    parameters: _Parameters,
    heads: int,
    eps: float,
    ending: bool,
    wanted: Sequence[bool],
) -> list[Tensor]:
    _check_kept(grad, x, product, logsumexp, mask, parameters, heads)
    inputs = dict(zip(panels.WANTED, (x, *parameters), strict=True))
    asked = {name: want and inputs[name] is not None for name, want in zip(panels.WANTED, wanted, strict=True)}
    made: dict[str, Tensor] = {}
    if x.numel() == 0:
        made = {name: torch.zeros(t.shape, dtype=t.dtype, device=t.device) for name, t in inputs.items() if t is not None}
    elif any(asked.values()):
        w = _weights(parameters, heads, eps)
        with _on(x.device):
            made = panels.backward(
                _flat(grad, 3), _flat(x, 3), _rows_of(mask, ending), w, ending, product.contiguous(),
                logsumexp.contiguous(), asked, _steps(x, w.q, heads),
            )  # fmt: skip
    return [
        made[name].view(t.shape) if t is not None and asked[name] else x.new_empty(0) for name, t in inputs.items()
    ]


# --- fake kernels ----------------------------------------------------------------------------------------------------


def _fake(x: Tensor, mask: Tensor | None, parameters: _Parameters, heads: int, eps: float, ending: bool) -> Tensor:
    _check("_triangle_attention_update", x, mask, parameters, heads)
    assert parameters[3] is not None
    return torch.empty(x.shape, dtype=parameters[3].dtype, device=x.device)


def _fake_(x: Tensor, mask: Tensor | None, parameters: _Parameters, heads: int, eps: float, ending: bool) -> None:
    _check("_triangle_attention_update_", x, mask, parameters, heads)
    _check_writable("_triangle_attention_update_", x)


def _kept_fake(
    x: Tensor, mask: Tensor | None, parameters: _Parameters, heads: int, eps: float, ending: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return _fake(x, mask, parameters, heads, eps, ending), *_empty_kept(x, parameters, heads)


def _backward_fake(
    grad: Tensor,
    x: Tensor,
    product: Tensor,
    logsumexp: Tensor,
    mask: Tensor | None,
    parameters: _Parameters,
    heads: int,
    eps: float,
    ending: bool,
    wanted: Sequence[bool],
) -> list[Tensor]:
    _check_kept(grad, x, product, logsumexp, mask, parameters, heads)
    return [
        torch.empty(t.shape, dtype=t.dtype, device=t.device) if t is not None and want else x.new_empty(0)
        for t, want in zip((x, *parameters), wanted, strict=True)
    ]


# --- autograd and transforms -----------------------------------------------------------------------------------------


def _composite(
    x: Tensor, mask: Tensor | None, parameters: _Parameters, heads: int, eps: float, ending: bool
) -> Tensor:
    """In differentiable operators, with q, k and v whole."""
    norm_weight, norm_bias, bias_weight, q, k, v, gate_weight, gate_bias, out, out_bias = parameters
    assert bias_weight is not None and q is not None and k is not None and v is not None and out is not None
    if ending:
        x, mask = x.transpose(-2, -3), None if mask is None else mask.mT
    n, c = x.shape[-2:]
    affine = (t if t is None else t.to(x.dtype) for t in (norm_weight, norm_bias))
    z = layer_norm(x, (c,), *affine, eps).to(q.dtype).reshape(-1, n, n, c)
    q, k, v = (F.linear(z, t).unflatten(-1, (heads, -1)).transpose(-3, -2) for t in (q, k, v))
    bias = F.linear(z, bias_weight).movedim(-1, 1).unsqueeze(1)
    kept = None if mask is None else (mask != 0).reshape(-1, n, 1, 1, n)
    o = attention.triangle_attention(q, k, v, bias, kept).transpose(-3, -2).flatten(-2)
    if gate_weight is not None:
        o = gate(o, z, gate_weight, gate_bias)
    update = F.linear(o, out, out_bias).view(x.shape)
    return update.transpose(-2, -3).contiguous() if ending else update


def _given(x: Tensor, parameters: _Parameters) -> list[Tensor]:
    return [x, *(t for t in parameters if t is not None)]


class _Update(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mask: Tensor | None, heads: int, eps: float, ending: bool, *parameters: Tensor | None
    ) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            update, product, logsumexp = _kept(x, mask, parameters, heads, eps, ending)
        ctx.save_for_backward(x, product, logsumexp, mask, *parameters)
        ctx.how = heads, eps, ending
        return update

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, product, logsumexp, mask, *parameters = ctx.saved_tensors
        needed = ctx.needs_input_grad
        wanted = [needed[0], *needed[5:]]
        grads = _backward(grad, x, product, logsumexp, mask, parameters, *ctx.how, wanted)
        dx, *rest = (g if want else None for g, want in zip(grads, wanted, strict=True))
        return dx, None, None, None, None, *rest


def _check_constant(op: str, mask: Tensor | None) -> None:
    _expect(
        mask is None or not attention._needs_grad(mask),
        lambda: f"{op}: expected mask that needs no gradient, got one that does",
    )


def _autograd(x: Tensor, mask: Tensor | None, parameters: _Parameters, *how: Any) -> Tensor:
    op = "_triangle_attention_update"
    _check(op, x, mask, parameters, how[0])
    _check_constant(op, mask)
    given = _given(x, parameters)
    if attention._needs_decomposition(*given):
        return _composite(x, mask, parameters, *how)
    if attention._needs_grad(*given):
        return _Update.apply(x, mask, *how, *parameters)
    with torch._C._AutoDispatchBelowAutograd():
        return _op(x, mask, parameters, *how)


def _autograd_(x: Tensor, mask: Tensor | None, parameters: _Parameters, *how: Any) -> None:
    op = "_triangle_attention_update_"
    _check(op, x, mask, parameters, how[0])
    _check_writable(op, x)
    _check_constant(op, mask)
    given = _given(x, parameters)
    if attention._needs_decomposition(*given):
        x.add_(_composite(x, mask, parameters, *how))
    elif attention._needs_grad(*given):
        x.add_(_op(x.clone(), mask, parameters, *how))
    else:
        with torch._C._AutoDispatchBelowAutograd():
            _op_(x, mask, parameters, *how)


def _version_(x: Tensor, *args: Any) -> None:
    with torch._C._AutoDispatchBelowADInplaceOrView():
        _op_(x, *args)
    torch.autograd.graph.increment_version(x)


def _kept_autograd(x: Tensor, mask: Tensor | None, parameters: _Parameters, *how: Any) -> tuple[Tensor, Tensor, Tensor]:
    op = "_triangle_attention_update_kept"
    _check(op, x, mask, parameters, how[0])
    given = _given(x, parameters)
    _expect(
        not (attention._needs_decomposition(*given) or attention._needs_grad(*given)),
        lambda: f"{op}: expected no argument that needs a gradient or has a tangent, got one",
    )
    with torch._C._AutoDispatchBelowAutograd():
        return _kept(x, mask, parameters, *how)


def _backward_autograd(
    grad: Tensor,
    x: Tensor,
    product: Tensor,
    logsumexp: Tensor,
    mask: Tensor | None,
    parameters: _Parameters,
    *rest: Any,
) -> list[Tensor]:
    """Only double backward differentiates this one: through everything, which is therefore computed again."""
    _check_kept(grad, x, product, logsumexp, mask, parameters, rest[0])
    given = [grad, *_given(x, parameters)]
    if attention._needs_decomposition(*given) or attention._needs_grad(*given):
        return _composite_gradients(grad, x, product, logsumexp, mask, parameters, *rest)
    with torch._C._AutoDispatchBelowAutograd():
        return _backward(grad, x, product, logsumexp, mask, parameters, *rest)


def _composite_gradients(
    grad: Tensor,
    x: Tensor,
    product: Tensor,
    logsumexp: Tensor,
    mask: Tensor | None,
    parameters: _Parameters,
    heads: int,
    eps: float,
    ending: bool,
    wanted: Sequence[bool],
) -> list[Tensor]:
    inputs = (x, *parameters)
    asked = [i for i, (t, want) in enumerate(zip(inputs, wanted, strict=True)) if want and t is not None]

    def of_those(*values: Tensor) -> Tensor:
        all_of_them: list[Any] = list(inputs)
        for i, value in zip(asked, values, strict=True):
            all_of_them[i] = value
        return _composite(all_of_them[0], mask, all_of_them[1:], heads, eps, ending)

    made = dict(zip(asked, torch.func.vjp(of_those, *(inputs[i] for i in asked))[1](grad), strict=True)) if asked else {}
    return [made[i] if i in made else x.new_empty(0) for i in range(len(inputs))]


def _batched_(x: Tensor, *args: Any) -> None:
    x.add_(_composite(x, *args))


def _negative_(x: Tensor, mask: Tensor | None, parameters: _Parameters, *how: Any) -> None:
    """Of views that are negated as they are read, as an imaginary part of a conjugate is."""
    resolved = x.resolve_neg()
    _op_(resolved, mask if mask is None else mask.resolve_neg(), [t if t is None else t.resolve_neg() for t in parameters], *how)
    if resolved is not x:
        x.copy_(resolved)


def _autocast(op: Any, device_type: str) -> Callable[..., Any]:
    """Casts the parameters, and no float32 x, nor one that is overwritten."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    keys = keys | torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)

    def cast(t: Tensor | None) -> Tensor | None:
        floating = t is not None and t.device.type == device_type and t.is_floating_point() and t.dtype != torch.float64
        return t.to(torch.get_autocast_dtype(device_type)) if t is not None and floating else t

    def kernel(x: Tensor, mask: Tensor | None, parameters: _Parameters, *how: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            given = x if op is _op_ or x.dtype == torch.float32 else cast(x)
            return op(given, mask, [cast(t) for t in parameters], *how)

    return kernel


# --- registration ----------------------------------------------------------------------------------------------------


def _register() -> None:
    name = "_triangle_attention_update"
    for suffix, kernel, fake, autograd, batched in (
        ("", _kernel, _fake, _autograd, _composite),
        ("_", _kernel_, _fake_, _autograd_, _batched_),
        ("_kept", _kept_kernel, _kept_fake, _kept_autograd, None),
        ("_backward", _backward_kernel, _backward_fake, _backward_autograd, _composite_gradients),
    ):
        for key in ("CPU", "CUDA"):
            _library.impl(name + suffix, kernel, key)
        torch.library.register_fake(f"myops::{name}{suffix}", fake, lib=_library)
        _library.impl(name + suffix, autograd, "Autograd")
        if batched is not None:
            _library.impl(name + suffix, batched, "FuncTorchBatched")
    _library.impl(name + "_", _version_, "ADInplaceOrView")
    _library.impl(name + "_", _negative_, "Negative")
    for device, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
        for op in (_op, _op_):
            _library.impl(op._schema.name.removeprefix("myops::"), _autocast(op, device), key)


if _is_first:
    _register()

"""Parameters and argument checks of the triangle attention update, shared by all backends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from torchops._core.checks import DTYPES, check_device, check_dtype, check_layout, check_shape, expect, name_of
from torchops._core.registration import needs_grad
from torchops._triangle_attention.attention.arguments import accumulator

__all__ = [
    "NORMS",
    "TENSORS",
    "Arguments",
    "AttentionWeights",
    "Inputs",
    "Kept",
    "Node",
    "Parameters",
    "Weights",
    "check",
    "check_constant",
    "check_kept",
    "check_output_mask",
    "check_writable",
    "flat",
    "inputs_of",
    "may_alias",
    "norm_parameters",
    "rows_of",
    "weights_of",
    "without_alias",
]

Node = Literal["starting", "ending"]


class AttentionWeights(NamedTuple):
    """The parameters of triangle attention with ``c`` features and ``heads`` heads of ``d``."""

    norm_weight: Tensor | None
    """``(c,)``, like ``norm_bias``; ``None`` means 1 and 0. Either may be float32 beside 16-bit weights."""
    norm_bias: Tensor | None
    bias_weight: Tensor
    """``(heads, c)``: gives the bias of the scores."""
    q: Tensor
    """``(heads * d, c)``, like ``k`` and ``v``."""
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


Parameters = Sequence[Tensor | None]
"""The tensors of AttentionWeights, in its order; None for those not given."""


def norm_parameters(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Weight and bias as `torchops.layer_norm` takes them beside `x`: float32 beside 16 bits stays as it is."""
    weight, bias = (t if t is None or t.dtype == torch.float32 else t.to(x.dtype) for t in (weight, bias))
    return weight, bias


TENSORS = AttentionWeights._fields[:10]
"""Their names."""

NORMS = ("norm_weight", "norm_bias")

_OPTIONAL = (*NORMS, "gate", "gate_bias", "out_bias")


class Arguments(NamedTuple):
    """Of the private operators, whose names stand in `operators.py`."""

    x: Tensor
    mask: Tensor | None
    parameters: Parameters
    heads: int
    eps: float
    ending: bool
    add_residual: bool = False
    """The result is x plus the update."""

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.x, self.mask, *self.parameters

    @property
    def differentiable(self) -> list[Tensor]:
        return [self.x, *(t for t in self.parameters if t is not None)]

    @property
    def q(self) -> Tensor:
        q = self.parameters[3]
        assert q is not None
        return q


class Weights(AttentionWeights):
    """The weights, on x's device, and what is computed from them once per call."""

    @cached_property
    def packed(self) -> Tensor:
        return torch.cat((self.q, self.k, self.v))

    @property
    def scale(self) -> float:
        return float(max(self.q.shape[0] // self.heads, 1)) ** -0.5


class Inputs(NamedTuple):
    """What backends compute with."""

    x: Tensor
    """(batch, N, N, c). Of sharded rows i, only this rank's; for the ending node, columns."""
    mask: Tensor | None
    """(batch, i, k), in the order of the attention."""
    w: Weights
    ending: bool
    add_residual: bool = False


class Kept(NamedTuple):
    """What the forward pass keeps for the backward pass."""

    product: Tensor
    """The result of the attention before its gate, (batch, N, N, heads * d)."""
    logsumexp: Tensor
    """The logarithms of the sums, (batch, i, heads, j)."""


def flat(t: Tensor, trailing: int) -> Tensor:
    """Flattens the batch dimensions into one; a view if the strides allow it."""
    return t.reshape(math.prod(t.shape[:-trailing]), *t.shape[-trailing:])


def rows_of(mask: Tensor | None, ending: bool) -> Tensor | None:
    """The mask as (batch, i, k), in the order of the attention."""
    if mask is None:
        return None
    mask = flat(mask, 2)
    return mask.mT if ending else mask


def weights_of(parameters: Parameters, heads: int, eps: float, overwritten: Tensor | None = None) -> Weights:
    """The weights, contiguous and not in memory that is overwritten."""

    def usable(t: Tensor | None) -> Tensor | None:
        if overwritten is not None:
            t = without_alias(overwritten, t)
        return None if t is None else t.contiguous()

    made: list[Any] = [usable(t) for t in parameters]
    return Weights._make([*made, heads, eps])


def inputs_of(a: Arguments) -> Inputs:
    w = weights_of(a.parameters, a.heads, a.eps)
    return Inputs(flat(a.x, 3), rows_of(a.mask, a.ending), w, a.ending, a.add_residual)


# --- checks ----------------------------------------------------------------------------------------------------------

_passed: set[Any] = set()


def check(op: str, a: Arguments) -> None:
    """Checks the arguments. Arguments that passed once pass again without being looked at one by one, which takes the
    host tens of microseconds. `op` is the public name, without the underscore of the private operators, since users
    don't call these."""
    looks = [t if t is None else (t.is_nested or t.shape, t.dtype, t.device, t.layout) for t in a.tensors]
    key = a.heads, *looks
    try:
        if key in _passed:
            return
    except TypeError:  # symbolic sizes
        return _check(op, a)
    _check(op, a)
    if len(_passed) >= 4096:
        _passed.clear()
    _passed.add(key)


def _check(op: str, a: Arguments) -> None:
    x, mask, parameters, heads = a[:4]
    expect(len(parameters) == 10, lambda: f"{op}: expected 10 parameters, got {len(parameters)}")
    given = dict(zip(TENSORS, parameters, strict=True))
    missing = [name for name, t in given.items() if t is None and name not in _OPTIONAL]
    expect(not missing, lambda: f"{op}: expected a tensor {missing[0]}, got None")
    check_layout(op, "x", x)
    for name, t in given.items():
        if t is not None:
            check_layout(op, name, t)
    q = given["q"]
    assert q is not None
    expect(
        q.dtype in DTYPES,
        lambda: f"{op}: expected q of dtype float32, float64, float16 or bfloat16, got {name_of(q.dtype)}",
    )
    check_dtype(op, "x", x, q.dtype, "q", or_float32=True)
    expect(x.dim() >= 3, lambda: f"{op}: expected x of shape (*batch, N, N, c), got {tuple(x.shape)}")
    expect(q.dim() == 2, lambda: f"{op}: expected q of shape (heads * d, c), got {tuple(q.shape)}")
    c, width = x.shape[-1], q.shape[0]
    expect(x.shape[-3] == x.shape[-2], lambda: f"{op}: expected x of shape (*batch, N, N, c), got {tuple(x.shape)}")
    expect(heads >= 1, lambda: f"{op}: expected heads of at least 1, got {heads}")
    expect(
        width % heads == 0,
        lambda: f"{op}: expected q of shape (heads * d, c) with heads = {heads}, got {tuple(q.shape)}",
    )
    expect(width >= heads, lambda: f"{op}: expected heads of at least one feature, got q of shape {tuple(q.shape)}")
    shapes: dict[str, tuple[Any, ...]] = dict.fromkeys(("norm_weight", "norm_bias", "out_bias"), (c,))
    shapes |= dict.fromkeys(("q", "k", "v", "gate"), (width, c))
    shapes |= {"bias_weight": (heads, c), "gate_bias": (width,), "out": (c, width)}
    for name, t in given.items():
        if t is not None:
            _check_parameter(op, name, t, x, q, shapes[name])
    expect(
        given["gate"] is not None or given["gate_bias"] is None,
        lambda: f"{op}: expected gate_bias None without gate, got a tensor",
    )
    if mask is not None:
        _check_mask(op, mask, x)


def _check_parameter(op: str, name: str, t: Tensor, x: Tensor, q: Tensor, shape: tuple[Any, ...]) -> None:
    check_dtype(op, name, t, q.dtype, "q", or_float32=name in NORMS)
    _check_place(op, name, t, x, shape)


def _check_mask(op: str, mask: Tensor, x: Tensor) -> None:
    check_layout(op, "mask", mask)
    expect(
        mask.dtype == torch.bool or mask.is_floating_point(),
        lambda: f"{op}: expected mask of dtype bool or floating-point, got {name_of(mask.dtype)}",
    )
    _check_place(op, "mask", mask, x, tuple(x.shape[:-1]))


def _check_place(op: str, name: str, t: Tensor, x: Tensor, shape: tuple[Any, ...]) -> None:
    check_device(op, name, t, x.device, "x")
    check_shape(op, name, t, shape, f"x of shape {tuple(x.shape)}")


def check_writable(op: str, x: Tensor) -> None:
    """Checks that no two elements of x share memory."""
    sizes = [(stride, size) for size, stride in zip(x.shape, x.stride(), strict=True)]
    shared = any(stride == 0 and size > 1 for stride, size in sizes)
    if not shared and all(isinstance(number, int) for pair in sizes for number in pair):
        nested = True
        reach = 0  # of the dimensions with smaller strides
        for stride, size in sorted(pair for pair in sizes if pair[1] > 1):
            nested = nested and stride > reach
            reach += stride * (size - 1)
        shared = not nested and _overlaps(x)
    if shared and x.numel():
        expect(
            False,
            lambda: f"{op}: expected x without elements in one place, got strides {x.stride()} of {tuple(x.shape)}",
        )


def _overlaps(x: Tensor) -> bool:
    """Searches, as an operator in C++ does that overwrites its argument."""
    with _disable_current_modes():
        try:
            torch.ops.myops.sigmoid_(torch.empty_strided(x.shape, x.stride(), device="meta", dtype=torch.float32))
        except RuntimeError:
            return True
    return False


def without_alias(written: Tensor, read: Tensor | None) -> Tensor | None:
    """`read`, or a copy if it may share memory with the tensor that is overwritten. The wrappers of ``torch.func`` have
    no memory of their own that could be compared."""
    if read is None:
        return None
    is_wrapped = any(map(torch._C._functorch.is_functorch_wrapped_tensor, (written, read)))
    return torch.ops.myops._saved_copy(read) if is_wrapped or may_alias(written, read) else read


def may_alias(written: Tensor, read: Tensor) -> bool:
    """Whether the memory ranges of the two tensors overlap."""
    to, source = written.untyped_storage(), read.untyped_storage()
    if to._cdata == source._cdata:
        return True
    if type(written) not in _WITH_MEMORY or type(read) not in _WITH_MEMORY or written.device != read.device:
        return False
    first, second = to.data_ptr(), source.data_ptr()  # 0 on the device meta
    return first != 0 and first < second + source.nbytes() and second < first + to.nbytes()


_WITH_MEMORY = (Tensor, torch.nn.Parameter)  # not a subclass, such as a fake tensor


def check_kept(op: str, grad: Tensor, kept: Kept, a: Arguments) -> None:
    check(op, a)
    x, q, heads = a.x, a.q, a.heads
    batch, n = math.prod(x.shape[:-3]), x.shape[-2]
    wide = accumulator(q.dtype)
    for name, t, dtype, shape in (
        ("grad", grad, q.dtype, tuple(x.shape)),
        ("product", kept.product, q.dtype, (batch, n, n, q.shape[0])),
        ("logsumexp", kept.logsumexp, wide, (batch, n, heads, n)),
    ):
        check_layout(op, name, t)
        expect(
            t.dtype == dtype,
            lambda: f"{op}: expected {name} of dtype {name_of(dtype)}, got {name_of(t.dtype)}",  # noqa: B023
        )
        _check_place(op, name, t, x, shape)


def check_output_mask(op: str, output_mask: Sequence[bool]) -> None:
    expect(len(output_mask) == 11, lambda: f"{op}: expected output_mask of 11 elements, got {len(output_mask)}")


def check_constant(op: str, mask: Tensor | None) -> None:
    expect(
        mask is None or not needs_grad(mask),
        lambda: f"{op}: expected mask that needs no gradient, got one that does",
    )

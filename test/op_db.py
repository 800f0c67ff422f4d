"""One OpCase per public operator: what the generic suites know about it.

A suite never names an operator: it is parametrised over `OPS` (see `conftest.py`), so a new operator is tested by
adding its `OpCase` here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from product_samples import (
    GATE_ERRORS,
    GLU_ERRORS,
    SQUARE_MATMUL_ERRORS,
    gate_reference,
    gate_samples,
    glu_reference,
    glu_samples,
    square_matmul_reference,
    square_matmul_samples,
)
from row_samples import (
    LAYER_NORM_ERRORS,
    SOFTMAX_ERRORS,
    layer_norm_reference,
    layer_norm_samples,
    layer_norm_smooth,
    softmax_reference,
    softmax_samples,
    softmax_smooth,
)
from samples import (
    ZERO_DIM,
    Arguments,
    ErrorInput,
    Make,
    Sample,
    arguments,
    dtype_errors,
    every_second_column,
    every_third_row,
    match_errors,
    on_layouts,
    overlap_errors,
    swapped,
    wide,
)
from scaled_samples import (
    RESULTS,
    dense_scaled_reference,
    gate_scaled_reference,
    glu_scaled_reference,
    scaled_errors,
    scaled_samples,
)
from torch import Tensor
from transition_samples import (
    TRANSITION_ERRORS,
    TRANSITION_KEYWORDS,
    TRANSITION_OVERLAPS,
    transition_reference,
    transition_reference_,
    transition_samples,
    transition_smooth,
    transition_smooth_,
)

import torchops

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class OpCase:
    name: str  # with that of the overload, if it has one
    wrapper: Callable[..., Tensor]
    reference: Callable[..., Tensor]  # composed of ATen; returns the new value, also for an operator that mutates
    samples: tuple[Sample, ...]
    errors: tuple[ErrorInput, ...]
    # For derivatives beyond the first; None where `reference` serves.
    smooth_reference: Callable[..., Tensor] | None = None
    mutates: int | None = None  # the position of the argument that is overwritten
    twin: str | None = None  # the functional operator that computes the same
    dtypes: tuple[torch.dtype, ...] = DTYPES
    recomputes: float = 0  # the part of the products of the forward pass that the gradient computes again
    keywords: tuple[str, ...] = ()  # all arguments but the first, where they are passed by name alone
    differentiable: bool = True
    capability: tuple[int, int] = (0, 0)  # that a GPU needs
    casts_weights: bool = False  # under autocast its weights alone are cast, and it takes float32 inputs beside them
    # Multiples of eps that may be lost beyond 1.5 times what ATen itself loses in that dtype.
    slack: dict[torch.dtype, float] = field(
        default_factory=lambda: {torch.float32: 2.0, torch.float64: 256.0, torch.float16: 0.51, torch.bfloat16: 0.51}
    )

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """How hypothesis prints it."""
        printer.text(self.name)

    @property
    def op(self) -> torch._ops.OpOverload:
        packet, _, overload = self.name.partition(".")
        return getattr(getattr(torch.ops.myops, packet), overload or "default")

    @property
    def smooth(self) -> Callable[..., Tensor]:
        return self.smooth_reference or self.reference

    def mutated(self, args: Sequence[Any]) -> Tensor:
        """The argument that is overwritten."""
        assert self.mutates is not None
        return args[self.mutates]

    def call(self, function: Callable[..., Any], *values: Any, **others: Any) -> Any:
        """`function`, the operator or what stands for it, of values in the order of its schema."""
        if self.keywords:
            first, *rest = values
            return function(first, **dict(zip(self.keywords, rest)), **others)  # noqa: B905 (the last may be left out)
        return function(*values, **others)

    @property
    def qualified(self) -> str:
        return f"myops::{self.name}"

    @property
    def without_overload(self) -> str:
        return self.qualified.partition(".")[0]

    def devices(self) -> list[str]:
        cuda = torch.cuda.is_available() and torch._C._dispatch_has_kernel_for_dispatch_key(self.qualified, "CUDA")
        return ["cpu", "cuda"] if cuda and torch.cuda.get_device_capability() >= self.capability else ["cpu"]

    def pure(self, *args: Any, **kwargs: Any) -> Tensor:
        """The operator as a function: one that mutates runs on a copy of its argument, which is returned."""
        if self.mutates is None:
            return self.op(*args, **kwargs)
        values = list(args)
        values[self.mutates] = copy_like(args[self.mutates])
        self.op(*values, **kwargs)
        return values[self.mutates]


def copy_like(x: Tensor) -> Tensor:
    """A differentiable copy with the same strides (`clone` would fill the gaps of a view)."""
    if x.is_contiguous():
        return x.clone()
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)


# --- dense -----------------------------------------------------------------------------------------------------------


def dense_reference(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    return torch.sigmoid(F.linear(x, w, b))


DENSE_SAMPLES = (
    Sample("matrix", lambda t: arguments(t(5, 7), t(3, 7), t(3))),
    Sample("no_bias", lambda t: arguments(t(5, 7), t(3, 7))),
    Sample("vector", lambda t: arguments(t(7), t(3, 7), t(3))),
    Sample("vector_no_bias", lambda t: arguments(t(7), t(3, 7), None)),
    Sample("four_dims", lambda t: arguments(t(2, 3, 1, 7), t(5, 7), t(5))),
    Sample("one_by_one", lambda t: arguments(t(1, 1), t(1, 1), t(1))),
    Sample("transposed_x", lambda t: arguments(t(7, 5, view=Tensor.t), t(3, 7), t(3))),
    Sample("transposed_w", lambda t: arguments(t(5, 7), t(7, 3, view=Tensor.t), t(3))),
    Sample("strided", lambda t: arguments(t(5, 14, view=every_second_column), t(9, 7, view=every_third_row), t(3))),
    Sample("strided_bias", lambda t: arguments(t(5, 7), t(3, 7), t(6, view=every_second_column))),
    Sample("permuted_x", lambda t: arguments(t(7, 4, 3, view=swapped), t(5, 7), t(5))),
    Sample("expanded_x", lambda t: arguments(t(1, 7, view=lambda v: v.expand(5, 7)), t(3, 7), t(3))),
    Sample("expanded_w", lambda t: arguments(t(5, 7), t(1, 7, view=lambda v: v.expand(3, 7)), t(3))),
    Sample("expanded_bias", lambda t: arguments(t(5, 7), t(3, 7), t(1, view=lambda v: v.expand(3)))),
    Sample("zero_rows", lambda t: arguments(t(0, 7), t(3, 7), t(3))),
    Sample("zero_rows_inside", lambda t: arguments(t(2, 0, 7), t(3, 7), t(3))),
    Sample("zero_in", lambda t: arguments(t(5, 0), t(3, 0), t(3))),
    Sample("zero_in_no_bias", lambda t: arguments(t(5, 0), t(3, 0))),
    Sample("zero_in_vector", lambda t: arguments(t(0), t(3, 0), t(3))),
    Sample("zero_out", lambda t: arguments(t(5, 7), t(0, 7), t(0))),
    Sample("tall", lambda t: arguments(t(5003, 19), t(37, 19), t(37)), large=True),
    Sample("wide", lambda t: arguments(t(67, 61, scale=0.3), t(4099, 61), t(4099)), large=True),
    Sample("deep", lambda t: arguments(t(131, 1031, scale=0.1), t(257, 1031), t(257)), large=True),
)

_W = "expected w of shape (out, in) with in = {} to match x, got {}"
_BIAS = "expected b of shape (3,) to match w, got {}"

DENSE_ERRORS = (
    ErrorInput("zero_dim_x", lambda t: arguments(t(), t(3, 7), t(3)), ZERO_DIM.format("x")),
    ErrorInput("rank_w_1", lambda t: arguments(t(5, 7), t(7), t(3)), _W.format(7, "(7,)")),
    ErrorInput("rank_w_3", lambda t: arguments(t(5, 7), t(1, 3, 7), t(3)), _W.format(7, "(1, 3, 7)")),
    ErrorInput("zero_dim_w", lambda t: arguments(t(5, 7), t(), t(3)), _W.format(7, "()")),
    ErrorInput("inner_size", lambda t: arguments(t(5, 7), t(3, 6), t(3)), _W.format(7, "(3, 6)")),
    ErrorInput("w_not_transposed", lambda t: arguments(t(2, 5, 7), t(7, 3)), _W.format(7, "(7, 3)")),
    ErrorInput("inner_size_1", lambda t: arguments(t(1), t(3, 6)), _W.format(1, "(3, 6)")),
    ErrorInput("bias_size", lambda t: arguments(t(5, 7), t(3, 7), t(4)), _BIAS.format("(4,)")),
    ErrorInput("bias_size_1", lambda t: arguments(t(5, 7), t(3, 7), t(1)), _BIAS.format("(1,)")),
    ErrorInput("bias_rank", lambda t: arguments(t(5, 7), t(3, 7), t(1, 3)), _BIAS.format("(1, 3)")),
    ErrorInput("zero_dim_bias", lambda t: arguments(t(5, 7), t(3, 7), t()), _BIAS.format("()")),
    *dtype_errors("x", lambda t, d: arguments(t(5, 7, dtype=d), t(3, 7, dtype=d), t(3, dtype=d))),
    *match_errors("w", "x", lambda t, **other: arguments(t(5, 7), t(3, 7, **other), t(3))),
    *match_errors("b", "x", lambda t, **other: arguments(t(5, 7), t(3, 7), t(3, **other))),
)

# --- sigmoid ---------------------------------------------------------------------------------------------------------


def _sigmoid_samples(mutates: bool) -> tuple[Sample, ...]:
    return (
        *on_layouts(mutates, lambda t, x: arguments(x)),
        Sample("zero_dim", lambda t: arguments(t())),
        Sample("empty", lambda t: arguments(t(0))),
        Sample("saturated", lambda t: arguments(t(5, 7, scale=100.0)), large=True),
        Sample("large", lambda t: arguments(t(517, 1031)), large=True),
        Sample("large_strided", lambda t: arguments(t(1031, 517, view=Tensor.t)), large=True),
    )


# --- triangle attention ----------------------------------------------------------------------------------------------


def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """As papers write it, all scores at once. The exponential of -1000 is 0 in float64, and the number is small enough
    that a row without keys has the result which it has without a mask."""
    s = q @ k.mT * (max(q.shape[-1], 1) ** -0.5 if scale is None else scale) + bias
    if mask is not None:
        s = s - (~mask) * 1e3
    return torch.softmax(s, -1).to(v.dtype) @ v


def _attention(t: Make, *sizes: int, **kwargs: Any) -> Arguments:
    """Of tensors for batch, rows, heads, n and d."""
    batch, _, heads, n, _ = sizes
    return arguments(t(*sizes), t(*sizes), t(*sizes), t(batch, 1, heads, n, n), **kwargs)


ATTENTION_SAMPLES = (
    Sample("matrix", lambda t: _attention(t, 1, 3, 2, 3, 4)),
    Sample("four_dims", lambda t: _attention(t, 2, 3, 3, 5, 5, scale=0.7)),
    Sample("masked", lambda t: _attention(t, 1, 2, 2, 4, 3, mask=t(1, 2, 1, 1, 4) > -0.5)),
    Sample("float32_bias", lambda t: arguments(*(t(1, 2, 1, 4, 3) for _ in "qkv"), wide(t, 1, 1, 1, 4, 4))),
    Sample("zero_batch", lambda t: _attention(t, 0, 4, 2, 4, 8)),
    Sample("zero_rows", lambda t: _attention(t, 1, 0, 2, 4, 8)),
    Sample("zero_heads", lambda t: _attention(t, 1, 4, 0, 4, 8)),
    Sample("zero_rows_and_n", lambda t: _attention(t, 1, 0, 2, 0, 8)),
    Sample("zero_in", lambda t: _attention(t, 1, 4, 2, 4, 0)),
)


def _wrong(name: str, what: str, build: Callable[[Make], Tensor], text: str) -> ErrorInput:
    def given(t: Make) -> Arguments:
        args, _ = _attention(t, *_SIZES)
        return arguments(**dict(zip(("q", "k", "v", "bias"), args, strict=True)) | {name: build(t)})

    return ErrorInput(f"{name}_{what}", given, f"expected {name} {text}")


_SIZES = (1, 4, 2, 4, 8)
_LIKE_Q = f"of shape {_SIZES} to match q, got {{}}"

ATTENTION_ERRORS = (
    _wrong("q", "rank", lambda t: t(4, 2, 4, 8), "of shape (batch, R, H, N, d), got (4, 2, 4, 8)"),
    _wrong("k", "size", lambda t: t(1, 4, 2, 5, 8), _LIKE_Q.format("(1, 4, 2, 5, 8)")),
    _wrong("v", "size", lambda t: t(1, 4, 2, 4, 7), _LIKE_Q.format("(1, 4, 2, 4, 7)")),
    _wrong("bias", "rank", lambda t: t(1, 2, 4, 4), "of shape (1, 1, 2, 4, 4) to match q, got (1, 2, 4, 4)"),
    _wrong("mask", "rank", lambda t: t(1, 4, 4) > 0, "of shape (1, 4, 1, 1, 4) to match q, got (1, 4, 4)"),
    _wrong("mask", "float32", lambda t: t(1, 4, 1, 1, 4), "of dtype bool, got float32"),
    *dtype_errors("q", lambda t, d: arguments(t(*_SIZES, dtype=d), *_attention(t, *_SIZES)[0][1:])),
    *match_errors(
        "v", "q", lambda t, **other: arguments(t(*_SIZES), t(*_SIZES), t(*_SIZES, **other), t(1, 1, 2, 4, 4))
    ),
    *match_errors("bias", "q", lambda t, **other: arguments(*(t(*_SIZES),) * 3, t(1, 1, 2, 4, 4, **other))),
)

# --- all -------------------------------------------------------------------------------------------------------------

SIGMOID_ERRORS = dtype_errors("x", lambda t, d: arguments(t(5, 7, dtype=d)))

# Between product, factor and result they round twice, where bias and activation were not part of the product: each time
# half a digit.
SLACK_OF_GATES = {torch.float32: 2.0, torch.float64: 256.0, torch.float16: 1.5, torch.bfloat16: 1.5}
# Of float32 an H100 loses more in two products of which one follows the other.
SLACK_OF_TRANSITIONS = SLACK_OF_GATES | {torch.float32: 6.0}

OPS = (
    OpCase("dense", torchops.dense, dense_reference, DENSE_SAMPLES, DENSE_ERRORS),
    OpCase(
        "gate",
        torchops.gate,
        gate_reference,
        gate_samples(False),
        GATE_ERRORS,
        recomputes=1,
        casts_weights=True,
        slack=SLACK_OF_GATES,
    ),
    OpCase(
        "gate_",
        torchops.gate_,
        gate_reference,
        gate_samples(True),
        (*GATE_ERRORS, *overlap_errors("v", lambda t, rows: [t(rows, 2), t(4, 2)])),
        mutates=0,
        twin="gate",
        recomputes=1,
        casts_weights=True,
        slack=SLACK_OF_GATES,
    ),
    OpCase(
        "glu",
        torchops.glu,
        glu_reference,
        glu_samples("sigmoid") + glu_samples("silu"),
        GLU_ERRORS,
        recomputes=1,
        casts_weights=True,
        slack=SLACK_OF_GATES,
    ),
    OpCase("sigmoid", torchops.sigmoid, torch.sigmoid, _sigmoid_samples(False), SIGMOID_ERRORS),
    OpCase(
        "sigmoid_",
        torchops.sigmoid_,
        torch.sigmoid,
        _sigmoid_samples(True),
        (*SIGMOID_ERRORS, *overlap_errors("x", lambda t, rows: [])),
        mutates=0,
        twin="sigmoid",
    ),
    OpCase(
        "square_matmul",
        torchops.square_matmul,
        square_matmul_reference,
        square_matmul_samples(False, False) + square_matmul_samples(False, True),
        SQUARE_MATMUL_ERRORS,
    ),
    OpCase(
        "square_matmul_",
        torchops.square_matmul_,
        square_matmul_reference,
        square_matmul_samples(True, False) + square_matmul_samples(True, True),
        (*SQUARE_MATMUL_ERRORS, *overlap_errors("a", lambda t, rows: [t(4, 4)])),
        mutates=0,
        twin="square_matmul",
    ),
    OpCase("softmax", torchops.softmax, softmax_reference, softmax_samples(False), SOFTMAX_ERRORS, softmax_smooth),
    OpCase(
        "softmax_",
        torchops.softmax_,
        softmax_reference,
        softmax_samples(True),
        (*SOFTMAX_ERRORS, *overlap_errors("x", lambda t, rows: [])),
        softmax_smooth,
        mutates=0,
        twin="softmax",
    ),
    OpCase(
        "layer_norm",
        torchops.layer_norm,
        layer_norm_reference,
        layer_norm_samples(False),
        LAYER_NORM_ERRORS,
        layer_norm_smooth,
    ),
    OpCase(
        "layer_norm_",
        torchops.layer_norm_,
        layer_norm_reference,
        layer_norm_samples(True),
        (*LAYER_NORM_ERRORS, *overlap_errors("x", lambda t, rows: [[4]])),
        layer_norm_smooth,
        mutates=0,
        twin="layer_norm",
    ),
    OpCase(
        "triangle_attention",
        torchops.triangle_attention,
        attention_reference,
        ATTENTION_SAMPLES,
        ATTENTION_ERRORS,
        recomputes=1 / 2,
        slack=SLACK_OF_GATES,
    ),
    OpCase(
        "transition",
        torchops.transition,
        transition_reference,
        transition_samples(False),
        TRANSITION_ERRORS,
        transition_smooth,
        recomputes=2 / 3,
        keywords=TRANSITION_KEYWORDS,
        casts_weights=True,
        slack=SLACK_OF_TRANSITIONS,
    ),
    OpCase(
        "add_transition_",
        torchops.add_transition_,
        transition_reference_,
        transition_samples(True),
        (*TRANSITION_ERRORS, *TRANSITION_OVERLAPS),
        transition_smooth_,
        mutates=0,
        twin="transition",
        recomputes=2 / 3,
        keywords=TRANSITION_KEYWORDS,
        casts_weights=True,
        slack=SLACK_OF_TRANSITIONS,
    ),
)

# Their sums in tensor cores have fewer digits than float32.
SLACK_OF_SCALED = SLACK_OF_GATES | ({torch.float32: 2.0**12} if torch.cuda.is_available() else {})

# Products of eight bits, of which the dtypes are those of the result.
SCALED = (
    OpCase(
        "dense.scaled",
        torchops.dense_scaled,
        dense_scaled_reference,
        scaled_samples("dense"),
        scaled_errors("dense"),
        dtypes=RESULTS,
        differentiable=False,
        capability=(8, 9),
        slack=SLACK_OF_SCALED,
    ),
    OpCase(
        "gate.scaled",
        torchops.gate_scaled,
        gate_scaled_reference,
        scaled_samples("gate"),
        scaled_errors("gate"),
        dtypes=RESULTS,
        differentiable=False,
        capability=(8, 9),
        slack=SLACK_OF_SCALED,
    ),
    OpCase(
        "glu.scaled",
        torchops.glu_scaled,
        glu_scaled_reference,
        scaled_samples("glu"),
        scaled_errors("glu"),
        dtypes=RESULTS,
        differentiable=False,
        capability=(8, 9),
        slack=SLACK_OF_SCALED,
    ),
)

"""One OpCase per public operator: what the generic suites know about it.

A suite never names an operator: it is parametrised over `OPS` (see `conftest.py`), so a new operator is tested by
adding its `OpCase` here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import triangle_reference
from dense_samples import DENSE_ERRORS, DENSE_SAMPLES, SIGMOID_ERRORS, dense_reference, sigmoid_samples
from outer_product_samples import (
    OUTER_PRODUCT_ERRORS,
    OUTER_PRODUCT_SAMPLES,
    outer_product_mean_reference,
)
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
from samples import Arguments, ErrorInput, Sample, overlap_errors
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
    TRANSITION_OVERLAPS,
    transition_arguments,
    transition_reference,
    transition_reference_,
    transition_samples,
    transition_smooth,
    transition_smooth_,
)
from triangle_attention_samples import (
    ATTENTION_ERRORS,
    ATTENTION_SAMPLES,
    UPDATE_ERRORS,
    UPDATE_OVERLAPS,
    attention_reference,
    update,
    update_,
    update_arguments,
    update_reference,
    update_reference_,
    update_samples,
    update_smooth,
    update_smooth_,
)
from triangle_update_samples import (
    TRIANGLE_ERRORS,
    TRIANGLE_OVERLAPS,
    triangle_arguments,
    triangle_samples,
)

import torchops
from torchops._core.devices import capability

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class OpCase:
    name: str  # of the operator that a user calls, with that of the overload, if it has one
    wrapper: Callable[..., Tensor]
    reference: Callable[..., Tensor]  # composed of ATen; returns the new value, also for an operator that mutates
    samples: tuple[Sample, ...]
    errors: tuple[ErrorInput, ...]
    # For derivatives beyond the first; None where `reference` serves.
    smooth_reference: Callable[..., Tensor] | None = None
    private: bool = False  # a function calls the operator, whose name has an underscore in front
    mutates: int | None = None  # the position of the argument that is overwritten
    twin: str | None = None  # the functional operator that computes the same
    dtypes: tuple[torch.dtype, ...] = DTYPES
    # The part of the products of the forward pass that the gradient computes again; None where tests of the operator
    # alone count its gradient.
    recomputes: float | None = 0
    # The arguments that stand for values in the order of the schema, where that takes some by name alone, or in a list.
    pack: Callable[..., Arguments] | None = None
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
        packet, _, overload = self.registered.partition(".")
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
        args, kwargs = self.pack(*values) if self.pack else (values, {})
        return function(*args, **kwargs, **others)

    @property
    def qualified(self) -> str:
        return f"myops::{self.registered}"

    @property
    def registered(self) -> str:
        return f"_{self.name}" if self.private else self.name

    @property
    def without_overload(self) -> str:
        return self.qualified.partition(".")[0]

    def devices(self) -> list[str]:
        has_kernel = torch._C._dispatch_has_computed_kernel_for_dispatch_key  # perhaps one for any backend
        cuda = torch.cuda.is_available() and has_kernel(self.qualified, "CUDA")
        return ["cpu", "cuda"] if cuda and capability(0) >= self.capability else ["cpu"]

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


# Between product, factor and result they round twice, where bias and activation were not part of the product: each time
# half a digit.
SLACK_OF_GATES = {torch.float32: 2.0, torch.float64: 256.0, torch.float16: 1.5, torch.bfloat16: 1.5}
# Of float32 a GPU loses more in two products of which one follows the other, as attention has them.
SLACK_OF_TRANSITIONS = SLACK_OF_GATES | {torch.float32: 6.0}
# Updates of pair tensors round four times between x and their result, each time another number of 16 bits.
SLACK_OF_TRIANGLES = SLACK_OF_TRANSITIONS | {torch.float16: 4.0, torch.bfloat16: 4.0, torch.float32: 12.0}

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
    OpCase("sigmoid", torchops.sigmoid, torch.sigmoid, sigmoid_samples(False), SIGMOID_ERRORS),
    OpCase(
        "sigmoid_",
        torchops.sigmoid_,
        torch.sigmoid,
        sigmoid_samples(True),
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
        "outer_product_mean",
        torchops.outer_product_mean,
        outer_product_mean_reference,
        OUTER_PRODUCT_SAMPLES,
        OUTER_PRODUCT_ERRORS,
        recomputes=None,
        slack=SLACK_OF_TRANSITIONS,
    ),
    OpCase(
        "triangle_attention",
        torchops.triangle_attention,
        attention_reference,
        ATTENTION_SAMPLES,
        ATTENTION_ERRORS,
        recomputes=1 / 2,
        slack=SLACK_OF_TRANSITIONS,
    ),
    OpCase(
        "transition",
        torchops.transition,
        transition_reference,
        transition_samples(False),
        TRANSITION_ERRORS,
        transition_smooth,
        recomputes=2 / 3,
        pack=transition_arguments,
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
        pack=transition_arguments,
        casts_weights=True,
        slack=SLACK_OF_TRANSITIONS,
    ),
)

# Their sums in tensor cores have fewer digits than float32.
SLACK_OF_SCALED = SLACK_OF_GATES | ({torch.float32: 2.0**12} if torch.cuda.is_available() else {})

# Products of eight bits, of which the dtypes are those of the result.
SCALED = tuple(
    OpCase(
        f"{name}.scaled",
        getattr(torchops, f"{name}_scaled"),
        reference,
        scaled_samples(name),
        scaled_errors(name),
        dtypes=RESULTS,
        differentiable=False,
        capability=(8, 9),
        slack=SLACK_OF_SCALED,
    )
    for name, reference in (
        ("dense", dense_scaled_reference),
        ("gate", gate_scaled_reference),
        ("glu", glu_scaled_reference),
    )
)

# Updates of pair tensors. Those by attention are private, and those by products of matrices have more parameters than
# suites over all subsets of them can take.
UPDATES = (
    OpCase(
        "triangle_multiplicative_update",
        torchops.triangle_multiplicative_update,
        triangle_reference.triangle_multiplicative_update,
        triangle_samples(False),
        TRIANGLE_ERRORS,
        triangle_reference.smooth_update,
        recomputes=None,
        pack=triangle_arguments,
        casts_weights=True,
        slack=SLACK_OF_TRIANGLES,
    ),
    OpCase(
        "add_triangle_multiplicative_update_",
        torchops.add_triangle_multiplicative_update_,
        triangle_reference.add_triangle_multiplicative_update_,
        triangle_samples(True),
        (*TRIANGLE_ERRORS, *TRIANGLE_OVERLAPS),
        triangle_reference.add_smooth_update_,
        mutates=0,
        twin="triangle_multiplicative_update",
        recomputes=None,
        pack=triangle_arguments,
        casts_weights=True,
        slack=SLACK_OF_TRIANGLES,
    ),
    OpCase(
        "triangle_attention_update",
        update,
        update_reference,
        update_samples(False),
        UPDATE_ERRORS,
        update_smooth,
        private=True,
        recomputes=None,
        pack=update_arguments,
        casts_weights=True,
        slack=SLACK_OF_TRIANGLES,
    ),
    OpCase(
        "triangle_attention_update_",
        update_,
        update_reference_,
        update_samples(True),
        (*UPDATE_ERRORS, *UPDATE_OVERLAPS),
        update_smooth_,
        private=True,
        mutates=0,
        twin="triangle_attention_update",
        recomputes=None,
        pack=update_arguments,
        casts_weights=True,
        slack=SLACK_OF_TRIANGLES,
    ),
)

"""Programs that overwrite a tensor, written once and run with an operator in place or with its functional reference.

Each program takes `apply`, an input and the operator's parameters, and returns the tensors to compare. `apply.whole(t)`
gives the tensor that holds the new value: t itself in place, a new tensor for the reference. `apply.rows(t, rows)` does
so for a view of t.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from checks import random_like
from op_db import OPS, OpCase
from torch import Tensor


@dataclass(frozen=True)
class Variant:
    """One way to call an operator that mutates."""

    name: str
    case: OpCase
    parameters: Callable[[Tensor], tuple[Any, ...]]  # from the input, by shape and dtype
    keywords: tuple[tuple[str, Any], ...] = ()
    saves_output: bool = False  # the gradient reads the new value, where it stands
    saves_input: bool = False  # the gradient reads the old value, of which a copy is kept
    row_parameters: tuple[int, ...] = ()  # those that have a row for each row of what is overwritten

    def in_place(self) -> InPlace:
        return InPlace(self)

    def reference(self) -> Reference:
        return Reference(self)

    def fit(self, t: Tensor, parameters: tuple[Any, ...]) -> list[Any]:
        """The parameters for `t`, which may have fewer rows than the input."""
        return [p[: t.shape[0]] if i in self.row_parameters else p for i, p in enumerate(parameters)]

    def input(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """A leaf; what is overwritten must be computed from it."""
        return random_like(torch.empty(6, 5, dtype=dtype)).requires_grad_()

    def leaves(self, x: Tensor) -> tuple[Any, ...]:
        return tuple(p.requires_grad_() if isinstance(p, Tensor) else p for p in self.parameters(x))


@dataclass(frozen=True)
class InPlace:
    variant: Variant

    def whole(self, t: Tensor, *parameters: Any) -> Tensor:
        case, values = self.variant.case, self.variant.fit(t, parameters)
        case.call(case.op, t, *values, **dict(self.variant.keywords))
        return t

    def rows(self, t: Tensor, rows: slice, *parameters: Any) -> Tensor:
        self.whole(t[rows], *parameters)
        return t


@dataclass(frozen=True)
class Reference:
    variant: Variant

    def whole(self, t: Tensor, *parameters: Any) -> Tensor:
        case, values = self.variant.case, self.variant.fit(t, parameters)
        return case.call(case.reference, t, *values, **dict(self.variant.keywords))

    def rows(self, t: Tensor, rows: slice, *parameters: Any) -> Tensor:
        return torch.cat([t[: rows.start], self.whole(t[rows], *parameters), t[rows.stop :]])


def _square(x: Tensor) -> tuple[Any, ...]:
    return (random_like(x.new_empty(5, 5), 2) * 0.5,)


def _affine(x: Tensor) -> tuple[Any, ...]:
    return [5], random_like(x.new_empty(5), 3), random_like(x.new_empty(5), 4)


def _gating(x: Tensor) -> tuple[Any, ...]:
    return tuple(random_like(x.new_empty(shape), 5 + i) for i, shape in enumerate([(x.shape[0], 7), (5, 7), (5,)]))


_BY_NAME = {case.name: case for case in OPS}


def _transition(x: Tensor) -> tuple[Any, ...]:
    """Norms, then gate, up and down with a bias each."""
    shapes = [(5,), (5,), (7, 5), (7,), (7, 5), (7,), (5, 7), (5,)]
    return tuple(random_like(x.new_empty(shape), 5 + i) for i, shape in enumerate(shapes))


VARIANTS = (
    Variant("sigmoid_", _BY_NAME["sigmoid_"], lambda x: (), saves_output=True),
    Variant("gate_", _BY_NAME["gate_"], _gating, saves_output=True, row_parameters=(0,)),
    Variant("square_matmul_", _BY_NAME["square_matmul_"], _square, saves_input=True),
    Variant(
        "square_matmul_tb_", _BY_NAME["square_matmul_"], _square, keywords=(("transpose_b", True),), saves_input=True
    ),
    Variant("softmax_", _BY_NAME["softmax_"], lambda x: (), saves_output=True),
    Variant("softmax_dim0_", _BY_NAME["softmax_"], lambda x: (), keywords=(("dim", 0),), saves_output=True),
    Variant("layer_norm_", _BY_NAME["layer_norm_"], lambda x: ([5],), saves_output=True),
    Variant("layer_norm_affine_", _BY_NAME["layer_norm_"], _affine, saves_input=True),
    Variant("add_transition_", _BY_NAME["add_transition_"], _transition, saves_input=True),
)

Program = Callable[..., tuple[Tensor, ...]]


def intermediate(apply: Any, x: Tensor, *parameters: Any) -> tuple[Tensor, ...]:
    t = x * 2
    t = apply.whole(t, *parameters)
    return (t * 3,)


def view_of_intermediate(apply: Any, x: Tensor, *parameters: Any) -> tuple[Tensor, ...]:
    t = x * 2
    t = apply.rows(t, slice(2, 5), *parameters)
    return t * 3, t[1:4].sum(0)


def transposed_view(apply: Any, x: Tensor, *parameters: Any) -> tuple[Tensor, ...]:
    """The memory of the intermediate runs the other way round."""
    base = (x * 2).t().contiguous()
    t = apply.whole(base.t(), *parameters)
    return (t * 3,)


def two_mutations(apply: Any, x: Tensor, *parameters: Any) -> tuple[Tensor, ...]:
    """Both values are read, by operations that save neither."""
    t = x * 2
    before = t + 1
    t = apply.whole(t, *parameters)
    between = t * 3
    t = apply.whole(t, *parameters)
    return before, between, t * 5


def read_before_and_after(apply: Any, x: Tensor, *parameters: Any) -> tuple[Tensor, ...]:
    t = x * 2
    before = t * 3
    t = apply.whole(t, *parameters)
    return before, t - 1, before * t.detach()


def saved_then_overwritten(apply: Any, x: Tensor, *parameters: Any) -> tuple[Tensor, ...]:
    """Another operation has saved the value that is overwritten."""
    t = x * 2
    saved = t * t
    t = apply.whole(t, *parameters)
    return saved, t * 3


def output_overwritten(apply: Any, x: Tensor, *parameters: Any) -> tuple[Tensor, ...]:
    """What the operator wrote is overwritten, by ATen."""
    t = x * 2
    t = apply.whole(t, *parameters)
    t = t.mul_(3) if isinstance(apply, InPlace) else t * 3
    return (t + 1,)


def run(
    program: Program, apply: Any, variant: Variant, dtype: torch.dtype = torch.float64, compiler: Any = None
) -> list[Tensor]:
    """Outputs of a program, and the gradients of all leaves for random cotangents."""
    x = variant.input(dtype)
    parameters = variant.leaves(x)

    def function(x: Tensor, *parameters: Any) -> tuple[Tensor, ...]:
        return program(apply, x, *parameters)

    outputs = (compiler(function) if compiler else function)(x, *parameters)
    return list(outputs) + backward(outputs, [x, *(p for p in parameters if isinstance(p, Tensor))])


def backward(outputs: tuple[Tensor, ...], leaves: list[Tensor]) -> list[Tensor]:
    """The gradients that `backward` leaves in `leaves`, for random cotangents."""
    differentiable = [o for o in outputs if o.requires_grad]
    cotangents = [random_like(o.detach(), 30 + i) for i, o in enumerate(differentiable)]
    for leaf in leaves:
        leaf.grad = None
    torch.autograd.backward(differentiable, cotangents)
    assert all(leaf.grad is not None for leaf in leaves)
    return [leaf.grad for leaf in leaves if leaf.grad is not None]

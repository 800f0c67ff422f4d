"""What autograd knows of a tensor that is overwritten, in every state that it can be in: as after `copy_`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import triangle_reference
from checks import assert_all_close, random_like, tensors, with_tensors
from op_db import OpCase
from samples import Sample
from torch import Tensor
from triangle_samples import parameters as triangle_weights

import torchops


@dataclass(frozen=True)
class State:
    """What autograd knows of the tensor that is overwritten, and what happens around it."""

    x_requires_grad: bool
    parameters_require_grad: bool
    target: str  # of which the operator overwrites a part or the whole
    mode: str  # in which it runs
    saved_before: bool  # another operation has saved the tensor
    saved_after: bool
    twice: bool


MODES: dict[str, Callable[[], Any]] = {
    "grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}
TARGETS = ("leaf", "view of a leaf", "intermediate", "view", "view of a view", "detached")
STATES = [
    State(x, parameters, target, mode, before, after, twice)
    for x, parameters, before, after, twice in itertools.product((False, True), repeat=5)
    for target in TARGETS
    for mode in MODES
]


def outcome(state: State, overwrite: Callable[..., Any], x: Tensor, rest: Sequence[Tensor]) -> list[Any]:
    """Values, flags and gradients of a program that overwrites all but at most 4 rows of x; or where it raises."""
    rows = x.shape[0] - {"view of a view": 0, "view": 2, "view of a leaf": 2}.get(state.target, 4)
    x = x[:rows].clone().requires_grad_(state.x_requires_grad)
    rest = [t.clone().requires_grad_(state.parameters_require_grad) for t in rest]
    whole = x if state.target in ("leaf", "view of a leaf") else x.detach() if state.target == "detached" else x * 1
    t = whole[2:] if "view" in state.target else whole
    if state.target == "view of a view":
        t = t.transpose(0, 1)[:, :-2].transpose(0, 1)
    results: list[Any] = []
    try:
        outputs = [t * t] if state.saved_before else []
        with MODES[state.mode]():
            for _ in range(2 if state.twice else 1):
                overwrite(t, *rest)
        outputs += [t.sin()] if state.saved_after else []
        outputs += [t, whole]
        results += [out.detach().clone() for out in outputs]
        results += [(out.requires_grad, out.is_leaf, out._version) for out in outputs]
    except RuntimeError as error:
        return [*results, "overwriting raises", str(error).split(" ")[0:6]]
    leaves = [leaf for leaf in (x, *rest) if leaf.requires_grad]
    differentiable = [out for out in outputs if out.requires_grad]
    if not leaves or not differentiable:
        return results
    try:
        cotangents = [random_like(out.detach(), i) for i, out in enumerate(differentiable)]
        results += torch.autograd.grad(differentiable, leaves, cotangents, allow_unused=True)
    except RuntimeError as error:
        results += ["backward raises", "modified by an inplace operation" in str(error)]
    return results


@pytest.mark.ops(
    mutating=True,
    samples=["matrix", "four_dims", "five_dims"],
    # Of pair tensors, those of which a batch is overwritten.
    where=lambda case, sample, **_: (sample.name == "matrix") != case.private,
)
def test_autograd_state(case: OpCase, device: str, sample: Sample) -> None:
    """As `copy_` of the value that ATen computes: the same values, flags, versions, gradients and refusals.

    One thing differs, as for ATen's own in-place operators: a gradient that reads the result needs it where it was.
    """
    args, kwargs = sample(torch.float64, device)
    x = random_like(torch.empty(args[0].shape[0] + 4, *args[0].shape[1:], dtype=torch.float64, device=device))
    rest = tensors((args[1:], kwargs))

    def call(function: Callable[..., Any], t: Tensor, *parameters: Tensor) -> Any:
        rest, named = with_tensors((args[1:], kwargs), parameters)
        return function(t, *rest, **named)

    of_x = hasattr(call(case.reference, x[:-4].clone().requires_grad_(), *rest).grad_fn, "_saved_result")

    def reads_result(state: State) -> bool:
        return state.parameters_require_grad if case.name == "gate_" else of_x and state.x_requires_grad

    assert_states_as_of_copy_(
        lambda t, *p: call(case.op, t, *p), lambda t, *p: call(case.reference, t, *p), x, rest, reads_result
    )


def assert_states_as_of_copy_(
    overwrite: Callable[..., Any],
    reference: Callable[..., Tensor],
    x: Tensor,
    rest: Sequence[Tensor],
    reads_result: Callable[[State], bool] = lambda state: False,
) -> None:
    """In every state, `overwrite` does to a part of x what `copy_` of the value of `reference` does."""
    for state in STATES:
        got = outcome(state, overwrite, x, rest)
        if reads_result(state) and state.twice and state.mode == "grad" and got[-2:] == ["backward raises", True]:
            assert not (state.x_requires_grad and state.target in ("leaf", "view of a leaf")), state
            continue
        expected = outcome(state, lambda t, *p: t.copy_(reference(t.clone(), *p)), x, rest)
        assert [g for g in got if not isinstance(g, Tensor)] == [e for e in expected if not isinstance(e, Tensor)], (
            state
        )
        values = [[v for v in results if isinstance(v, Tensor)] for results in (got, expected)]
        if values[1]:
            assert_all_close(*values, msg=lambda text, state=state: f"{state}: {text}")


@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
def test_autograd_states_of_the_triangle_update(direction: Any) -> None:
    x, weights = random_like(torch.empty(7, 3, 3, 4, dtype=torch.float64)), triangle_weights(4, 2)
    assert_states_as_of_copy_(
        lambda x, *p: torchops.add_triangle_multiplicative_update_(x, direction, **dict(zip(weights, p, strict=True))),
        lambda x, *p: triangle_reference.add_triangle_multiplicative_update_(
            x, direction, **dict(zip(weights, p, strict=True))
        ),
        x,
        list(weights.values()),
    )

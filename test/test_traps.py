"""What goes silently wrong with operators that mutate, unless it is guarded against: traps A to D.

`test_traps_transforms.py` has E to I. Every test compares outputs and gradients, for random cotangents, with a program
of functional ATen operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mutations
import pytest
import torch
from checks import assert_all_close, random_like, tensors
from mutations import VARIANTS, InPlace, Program, Reference, Variant, backward, run
from torch import Tensor

variants = pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
# Compiling for Inductor takes seconds for each graph, so there it is one graph for all.
compiled_variants = pytest.mark.parametrize(
    ("together", "backend"),
    [*(([variant], "aot_eager") for variant in VARIANTS), (VARIANTS, "inductor")],
    ids=[*(f"aot_eager-{variant.name}" for variant in VARIANTS), "inductor"],
)


def compiler(backend: str, **kwargs: Any) -> Any:
    return lambda function: torch.compile(function, backend=backend, fullgraph=True, **kwargs)


# --- every program, eager and compiled -------------------------------------------------------------------------------

ALWAYS_RIGHT = (
    mutations.intermediate,
    mutations.view_of_intermediate,
    mutations.transposed_view,
    mutations.read_before_and_after,
)
# Eager autograd saves the output where it stands, so these must raise in eager where that is what the gradient reads.
# Compiled, every mutation becomes a new value and they are right.
RIGHT_WHEN_COMPILED = (mutations.two_mutations, mutations.output_overwritten)


@variants
@pytest.mark.parametrize("program", ALWAYS_RIGHT, ids=lambda p: p.__name__)
def test_eager_program(program: Program, variant: Variant) -> None:
    assert_all_close(run(program, InPlace(variant), variant), run(program, Reference(variant), variant))


@variants
@pytest.mark.parametrize("program", RIGHT_WHEN_COMPILED, ids=lambda p: p.__name__)
def test_eager_program_raises_where_the_saved_output_is_lost(program: Program, variant: Variant) -> None:
    if variant.saves_output:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            run(program, InPlace(variant), variant)
    else:
        assert_all_close(run(program, InPlace(variant), variant), run(program, Reference(variant), variant))


@variants
@pytest.mark.parametrize("program", ALWAYS_RIGHT + RIGHT_WHEN_COMPILED, ids=lambda p: p.__name__)
def test_aot_eager_program(program: Program, variant: Variant) -> None:
    got = run(program, InPlace(variant), variant, compiler=compiler("aot_eager"))
    assert_all_close(got, run(program, Reference(variant), variant))


@pytest.mark.parametrize("variant", [v for v in VARIANTS if not v.keywords], ids=lambda v: v.name)
def test_inductor_programs(variant: Variant) -> None:
    """All programs in one graph, which costs one compilation."""

    def everything(apply: Any, x: Tensor, *parameters: Any) -> tuple[Tensor, ...]:
        return tuple(out for program in ALWAYS_RIGHT + RIGHT_WHEN_COMPILED for out in program(apply, x, *parameters))

    got = run(everything, InPlace(variant), variant, compiler=compiler("inductor"))
    assert_all_close(got, run(everything, Reference(variant), variant))


@variants
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_overwriting_what_another_operation_saved_raises(variant: Variant, backend: str) -> None:
    """Compiled, AOTAutograd finds it while it traces the backward pass."""
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run(mutations.saved_then_overwritten, InPlace(variant), variant, compiler=compiler(backend))


def tensor_parameters(variant: Variant) -> list[Tensor]:
    return [p for p in variant.parameters(variant.input()) if isinstance(p, Tensor)]


@pytest.mark.parametrize("variant", [v for v in VARIANTS if tensor_parameters(v)], ids=lambda v: v.name)
def test_a_parameter_that_was_saved_and_overwritten_raises(variant: Variant) -> None:
    """The gradient of the mutated tensor reads the parameters."""
    x = variant.input()
    parameters = variant.parameters(x)
    changed = next(p for p in parameters if isinstance(p, Tensor))  # the matrix or the weight; no bias is read again
    t = InPlace(variant).whole(x * 2, *parameters)
    changed.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        t.sum().backward()


# --- A: a graph input that needs grad, in compiled code --------------------------------------------------------------


@compiled_variants
def test_trap_a_compiled_mutation_of_an_input_that_needs_grad(together: Sequence[Variant], backend: str) -> None:
    """Its history must reach the caller's tensor, and what the graph returns from it."""

    def overwrite(ts: list[Tensor], parameters: list[Any]) -> list[Tensor]:
        for variant, t, own in zip(together, ts, parameters, strict=True):
            InPlace(variant).whole(t, *own)
        return [t * 3 for t in ts]

    results = []
    for reference in (False, True):
        xs = [variant.input() for variant in together]
        parameters = [variant.leaves(x) for variant, x in zip(together, xs, strict=True)]
        ts = [x * 2 for x in xs]
        if reference:
            ts = [Reference(v).whole(t, *own) for v, t, own in zip(together, ts, parameters, strict=True)]
            outs = [t * 3 for t in ts]
        else:
            outs = compiler(backend)(overwrite)(ts, parameters)
        outputs = (*outs, *(t * 5 for t in ts))
        results.append([*outputs, *backward(outputs, [*xs, *tensors(parameters)])])
    assert_all_close(*results)


@variants
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_trap_a_compiled_mutation_of_a_view_that_needs_grad(variant: Variant, backend: str) -> None:
    """The input of the graph is part of a larger tensor, which is read afterwards."""

    def overwrite(t: Tensor, *parameters: Any) -> None:
        InPlace(variant).whole(t, *parameters)

    results = []
    for reference in (False, True):
        x = variant.input()
        parameters = variant.leaves(x)
        t = x * 2
        if reference:
            t = Reference(variant).rows(t, slice(1, 4), *parameters)
        else:
            compiler(backend)(overwrite)(t[1:4], *parameters)
        outputs = (t * 5,)
        results.append([*outputs, *backward(outputs, [x, *(p for p in parameters if isinstance(p, Tensor))])])
    assert_all_close(*results)


# --- B: double backward ----------------------------------------------------------------------------------------------


@variants
@pytest.mark.parametrize("part", ["whole", "view", "transposed"])
def test_trap_b_double_backward_reaches_the_old_value(variant: Variant, part: str) -> None:
    results = []
    for apply in (InPlace(variant), Reference(variant)):
        x = variant.input()
        parameters = variant.leaves(x)
        leaves = [x, *(p for p in parameters if isinstance(p, Tensor))]
        t = torch.sin(x)  # the old value depends on x, so the second derivative passes through it
        if part == "view":
            t = apply.rows(t, slice(1, 5), *parameters)
        else:
            base = t[:5].t().contiguous()  # as large as its transpose, so that a mix-up of the two has no wrong shape
            t = apply.whole(t if part == "whole" else base.t(), *parameters)
        first = torch.autograd.grad((t**2 * random_like(t.detach())).sum(), leaves, create_graph=True)
        total = torch.stack([(g * random_like(g.detach(), 5)).sum() for g in first]).sum()
        second = torch.autograd.grad(total, leaves)
        results.append([*first, *second])
    assert_all_close(*results)


# --- C: the old value of a graph input, in compiled code -------------------------------------------------------------


@compiled_variants
@pytest.mark.parametrize("frozen", [True, False], ids=["frozen_input", "trained_input"])
def test_trap_c_old_value_outlives_its_overwriting(together: Sequence[Variant], backend: str, frozen: bool) -> None:
    """The gradients of the parameters need what the input held before the compiled function overwrote it."""
    if frozen:
        together = [variant for variant in together if tensor_parameters(variant)]
        if not together:
            pytest.skip("without parameters nothing requires grad")
    xs = [variant.input() for variant in together]
    parameters = [variant.leaves(x) for variant, x in zip(together, xs, strict=True)]

    def overwrite(ts: list[Tensor], parameters: list[Any]) -> list[Tensor]:
        for variant, t, own in zip(together, ts, parameters, strict=True):
            InPlace(variant).whole(t, *own)
        return [t.sum(0) for t in ts]

    ts = [x.detach().clone() if frozen else x * 1 for x in xs]
    outs = compiler(backend)(overwrite)(ts, parameters)
    expected = [
        Reference(variant).whole(x.detach() if frozen else x, *own)
        for variant, x, own in zip(together, xs, parameters, strict=True)
    ]
    sums = [t.sum(0) for t in expected]
    assert_all_close([*outs, *ts], [*sums, *expected])
    wanted = tensors(parameters) if frozen else [*xs, *tensors(parameters)]
    # Something else lands in the input's memory before the backward pass runs.
    with torch.no_grad():
        for t in ts:
            t.detach().fill_(float("nan"))
    assert_all_close(backward(tuple(outs), wanted), backward(tuple(sums), wanted))


# --- D: what the schema promises -------------------------------------------------------------------------------------


@pytest.mark.ops(mutating=True)
def test_trap_d_schema_returns_nothing(case: Any) -> None:
    """An alias among the returns makes Inductor reuse the storage under a value that is still read."""
    assert list(case.op._schema.returns) == []
    assert getattr(torch.Tag, "inplace", None) not in case.op.tags  # torch 2.11 has no such tag
    mutated = [a.alias_info is not None and a.alias_info.is_write for a in case.op._schema.arguments]
    assert mutated == [i == case.mutates for i in range(len(mutated))]


@compiled_variants
def test_trap_d_compiled_inference_keeps_live_values(together: Sequence[Variant], backend: str) -> None:
    """Values from before, between and after two mutations of an intermediate, and an input, are read at the end."""

    def function(apply: Any, t: Tensor, *parameters: Any) -> tuple[Tensor, ...]:
        u = t + 1
        before = u.clone()
        u = apply.whole(u, *parameters)
        between = u * 2
        alias = u.view(-1)
        u = apply.whole(u, *parameters)
        t = apply.whole(t, *parameters)
        if isinstance(apply, Reference):
            alias = u.reshape(-1)
        return before, between, alias[3:9] + 1, u, t

    def all_of(apply: type[InPlace] | type[Reference], ts: list[Tensor]) -> list[tuple[Tensor, ...]]:
        rows = zip(together, ts, parameters, strict=True)
        return [function(apply(variant), t, *own) for variant, t, own in rows]

    xs = [variant.input().detach() for variant in together]
    parameters = [variant.parameters(x) for variant, x in zip(together, xs, strict=True)]
    expected = all_of(Reference, xs)
    with torch.no_grad():
        ts = [x.clone() for x in xs]
        got = compiler(backend)(lambda ts: all_of(InPlace, ts))(ts)
    assert_all_close([*tensors(got), *ts], [*tensors(expected), *(values[-1] for values in expected)])
    assert all(values[-1] is t for values, t in zip(got, ts, strict=True))


# --- leaves and inference tensors ------------------------------------------------------------------------------------


@variants
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_mutation_of_a_leaf_raises(variant: Variant, backend: str) -> None:
    x = variant.input()
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        compiler(backend)(lambda t, *p: InPlace(variant).whole(t, *p))(x, *variant.parameters(x))


@variants
@pytest.mark.parametrize("backend", ["none", "aot_eager"])
def test_inference_mode_mutates(variant: Variant, backend: str) -> None:
    x = variant.input()
    parameters = variant.leaves(x)
    expected = Reference(variant).whole(x, *parameters).detach()
    function: Any = InPlace(variant).whole
    if backend != "none":
        function = compiler(backend)(lambda t, *p: InPlace(variant).whole(t, *p) * 1)
    with torch.inference_mode():
        inside, outside = x.clone(), x.detach()
        function(inside, *parameters)
        function(outside, *parameters)
        assert_all_close([inside, outside], [expected, expected])
    assert inside.is_inference()
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor outside InferenceMode is not allowed"):
        InPlace(variant).whole(inside, *(p.detach() if isinstance(p, Tensor) else p for p in parameters))


@variants
def test_saved_output_in_inference_mode_is_noticed(variant: Variant) -> None:
    """A tensor that autograd saved, overwritten in inference mode, still makes backward raise."""
    x = variant.input()
    t = x * 2
    saved = t * t
    with torch.inference_mode():
        InPlace(variant).whole(t.detach(), *variant.parameters(x))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()

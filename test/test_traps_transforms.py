"""What goes silently wrong with operators that mutate, unless it is guarded against: traps E to I.

`test_traps.py` has A to D.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import assert_all_close, gradients, random_like, tensors
from mutations import VARIANTS, InPlace, Reference, Variant, backward
from op_db import OpCase
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad
from torch.func import grad, jacfwd, jvp, vjp, vmap

import torchops

variants = pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)


# --- E: compiled autograd --------------------------------------------------------------------------------------------


def through_compiled_autograd(outputs: tuple[Tensor, ...], leaves: list[Tensor], backend: str) -> list[Tensor]:
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend, fullgraph=True)):
        return backward(outputs, leaves)


@variants
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_trap_e_compiled_autograd(variant: Variant, backend: str) -> None:
    results = []
    for apply in (InPlace(variant), Reference(variant)):
        x = variant.input()
        parameters = variant.leaves(x)
        leaves = [x, *(p for p in parameters if isinstance(p, Tensor))]
        t = x * 2
        t = apply.whole(t, *parameters)
        u = apply.rows(torch.sin(x), slice(1, 4), *parameters)
        outputs = (t * 3, u)
        got = (
            through_compiled_autograd(outputs, leaves, backend)
            if isinstance(apply, InPlace)
            else backward(outputs, leaves)
        )
        results.append(got)
    assert_all_close(*results)


@variants
def test_trap_e_compiled_autograd_of_a_compiled_forward(variant: Variant) -> None:
    results = []
    for apply in (InPlace(variant), Reference(variant)):
        x = variant.input()
        parameters = variant.leaves(x)
        leaves = [x, *(p for p in parameters if isinstance(p, Tensor))]

        def forward(x: Tensor, *parameters: Any, apply: Any = apply) -> Tensor:
            return apply.whole(x * 2, *parameters) * 3

        if isinstance(apply, InPlace):
            out = torch.compile(forward, backend="aot_eager", fullgraph=True)(x, *parameters)
            results.append(through_compiled_autograd((out,), leaves, "aot_eager"))
        else:
            results.append(backward((forward(x, *parameters),), leaves))
    assert_all_close(*results)


@pytest.mark.ops(mutating=False, leaves=True, large=False, dtypes=[torch.float64], samples=["matrix"])
def test_trap_e_compiled_autograd_of_functional_operators(
    case: OpCase, device: str, dtype: torch.dtype, sample: Any
) -> None:
    args, kwargs = sample(dtype, device, requires_grad=True)
    out = case.op(*args, **kwargs)
    leaves = tensors((args, kwargs))
    got = through_compiled_autograd((out,), leaves, "aot_eager")
    cotangent = random_like(out.detach(), 30)
    assert_all_close(got, gradients(case.reference, sample(dtype, device, requires_grad=True), cotangent)[1])


# --- F: the mutated tensor is also another argument ------------------------------------------------------------------


def aliased(variant: Variant, apply: Any, t: Tensor, kind: str) -> Tensor:
    """The mutated square `t`, or a view of it, in the place of each parameter."""
    if variant.case.name == "square_matmul_":
        other = {"itself": t, "view": t.view(5, 5), "transposed": t.t(), "rows": t[:5]}[kind]
        return apply.whole(t, other)
    if variant.case.name == "gate_":
        other = {"itself": t, "view": t.view(5, 5), "transposed": t.t(), "rows": t[:5]}[kind]
        return apply.whole(t, other, other, other[2])
    if variant.case.name == "add_transition_":
        other = {"itself": t, "view": t.view(5, 5), "transposed": t.t(), "rows": t[:5]}[kind]
        return apply.whole(t, other[1], other[2], other, other[3], other, None, other, other[4])
    other = {"itself": t, "view": t.view(-1), "transposed": t.t(), "rows": t[:5]}[kind]
    return apply.whole(t, [5, 5], other.reshape(5, 5), None)


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v.saves_input], ids=lambda v: v.name)
@pytest.mark.parametrize("kind", ["itself", "view", "transposed", "rows"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_trap_f_argument_shares_memory_with_the_mutated_tensor(variant: Variant, kind: str, backend: str) -> None:
    results = []
    for apply in (InPlace(variant), Reference(variant)):
        x = random_like(torch.empty(5, 5, dtype=torch.float64)).requires_grad_()

        def function(x: Tensor, apply: Any = apply) -> Tensor:
            return aliased(variant, apply, x * 0.5, kind) * 3

        run = torch.compile(function, backend=backend, fullgraph=True) if isinstance(apply, InPlace) else function
        out = run(x)
        results.append([out, *backward((out,), [x])])
    assert_all_close(*results)


@pytest.mark.parametrize("requires_grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_trap_f_matrix_inside_the_mutated_tensor(requires_grad: bool, transpose_b: bool) -> None:
    """The matrix is a block of rows of what is overwritten: the result and gradients are as if it were read first."""
    variant = next(v for v in VARIANTS if v.case.name == "square_matmul_")
    results = []
    for apply in (InPlace(variant), Reference(variant)):
        x = random_like(torch.empty(12, 5, dtype=torch.float64)).requires_grad_(requires_grad)
        t = x * 2
        block = t[4:9]
        keywords = {"transpose_b": transpose_b}
        if isinstance(apply, InPlace):
            variant.case.op(t, block, **keywords)
        else:
            t = variant.case.reference(t, block, **keywords)
        results.append([t, *(backward((t,), [x]) if requires_grad else [])])
    assert_all_close(*results)


@pytest.mark.parametrize("requires_grad", [False, True], ids=["no_grad", "grad"])
def test_trap_f_parameters_inside_the_mutated_tensor(requires_grad: bool) -> None:
    """Weight and bias of a layer norm are rows of what is overwritten, in more rows than one panel holds."""
    start = random_like(torch.empty(3000, 257, dtype=torch.float64)).requires_grad_(requires_grad)
    results = []
    for in_place in (True, False):
        x = start * 2
        if in_place:
            y = torchops.layer_norm_(x, [257], x[7], x[1501])
        else:
            y = torch.nn.functional.layer_norm(x, [257], x[7], x[1501])
        results.append([y, *(backward((y,), [start]) if requires_grad else [])])
    assert_all_close(*results)


# --- G: tangents -----------------------------------------------------------------------------------------------------


@variants
@pytest.mark.parametrize("where", ["mutated", "parameters", "both"])
def test_trap_g_tangents_survive_without_gradients(variant: Variant, where: str) -> None:
    """Nothing requires a gradient, or recording is off; forward mode has to go on all the same."""
    results = []
    for apply in (InPlace(variant), Reference(variant)):
        x = variant.input().detach()
        parameters = variant.parameters(x)
        with torch.no_grad(), forward_ad.dual_level():
            t = x * 2
            if where != "parameters":
                t = forward_ad.make_dual(t, random_like(t, 5))
            if where != "mutated":
                parameters = tuple(
                    forward_ad.make_dual(p, random_like(p, 6 + i)) if isinstance(p, Tensor) else p
                    for i, p in enumerate(parameters)
                )
            out = forward_ad.unpack_dual(apply.whole(t, *parameters))
            results.append([part for part in out if part is not None])
    assert_all_close(*results)
    assert len(results[0]) == 2 or (where == "parameters" and not any(isinstance(p, Tensor) for p in parameters))


# --- H: torch.func ---------------------------------------------------------------------------------------------------


@variants
def test_trap_h_functorch(variant: Variant) -> None:
    """grad, jvp, vmap and a Jacobian over a function that mutates an intermediate."""
    x = variant.input().detach()
    parameters = variant.parameters(x)
    results = []
    for apply in (InPlace(variant), Reference(variant)):

        def function(x: Tensor, apply: Any = apply) -> Tensor:
            return apply.whole(x * 2, *parameters) * 3

        def loss(x: Tensor, f: Any = function) -> Tensor:
            return (f(x) ** 2).sum()

        batch = torch.stack([x, x + 1, x * 2])
        results.append(
            [
                grad(loss)(x),
                *jvp(function, (x,), (x + 1,)),
                vmap(function)(batch),
                vmap(grad(loss))(batch),
                grad(lambda b, f=function: (vmap(f)(b) ** 2).sum())(batch),
                jacfwd(function)(x),
            ]
        )
    assert_all_close(*results)


def by_grad(f: Callable[[Tensor], Tensor], x: Tensor) -> None:
    grad(f)(x)


def by_vjp(f: Callable[[Tensor], Tensor], x: Tensor) -> None:
    vjp(f, x)


def by_jvp(f: Callable[[Tensor], Tensor], x: Tensor) -> None:
    jvp(f, (x,), (torch.ones_like(x),))


@variants
@pytest.mark.parametrize("differentiate", [by_grad, by_vjp, by_jvp])
@pytest.mark.parametrize("view", [False, True])
def test_trap_h_captured_tensor(variant: Variant, differentiate: Callable[..., None], view: bool) -> None:
    """ATen raises for its own in-place operators. Those that return nothing slip through the check of torch.func, and
    their derivatives would be lost."""
    captured = variant.input().detach()
    before = captured.clone()
    parameters = [p.detach() if isinstance(p, Tensor) else p for p in variant.parameters(captured)]

    def f(x: Tensor) -> Tensor:
        t = captured.view(captured.shape) if view else captured
        return (InPlace(variant).whole(t, *parameters) * x).sum()

    with pytest.raises(RuntimeError, match=f"{variant.case.name}.* that would mutate a captured Tensor"):
        differentiate(f, torch.ones(6, 5, dtype=torch.float64))
    assert torch.equal(captured, before)
    assert captured._version == 0


def test_trap_h_tensor_captured_by_an_inner_function() -> None:
    def outer(y: Tensor) -> Tensor:
        captured = y * 2

        def inner(z: Tensor) -> Tensor:
            torchops.sigmoid_(captured)
            return (captured * z).sum()

        return grad(inner)(y).sum()

    with pytest.raises(RuntimeError, match="would mutate a captured Tensor"):
        grad(outer)(torch.ones(6, 5))


# --- I: symbolic sizes -----------------------------------------------------------------------------------------------

ROWS = (6, 7, 11, 64, 129, 1000)


@variants
@pytest.mark.parametrize("requires_grad", [False, True], ids=["no_grad", "grad"])
def test_trap_i_one_graph_for_all_sizes(variant: Variant, requires_grad: bool) -> None:
    counter = CompileCounterWithBackend("aot_eager")

    def function(x: Tensor, *parameters: Any) -> Tensor:
        t = x * 2
        InPlace(variant).whole(t, *parameters)
        return t + t.shape[0]

    compiled = torch.compile(function, backend=counter, fullgraph=True, dynamic=True)
    for rows in (*ROWS, 1, 0):
        x = random_like(torch.empty(rows, 5, dtype=torch.float64)).requires_grad_(requires_grad)
        parameters = variant.parameters(x)
        out = compiled(x, *parameters)
        expected = Reference(variant).whole(x * 2, *parameters) + rows
        assert_all_close([out], [expected])
        if requires_grad:
            assert_all_close(backward((out,), [x]), backward((expected,), [x]))
        if rows == ROWS[-1]:
            assert counter.frame_count == 1
    # PyTorch itself compiles again for the sizes 0 and 1.
    assert counter.frame_count <= 3


@variants
def test_trap_i_export_with_a_dynamic_size(variant: Variant) -> None:
    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parameters_ = variant.parameters(torch.empty(max(ROWS), 5, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            t = x * 2
            InPlace(variant).whole(t, *self.parameters_)
            return t

    x = variant.input().detach()
    module = Module()
    program = torch.export.export(module, (x,), dynamic_shapes=({0: torch.export.Dim("rows", max=max(ROWS))},))
    for rows in (*ROWS, 2):
        x = random_like(torch.empty(rows, 5, dtype=torch.float64))
        assert_all_close([program.module()(x)], [Reference(variant).whole(x * 2, *module.parameters_)])


@variants
def test_trap_i_unbacked_size(variant: Variant) -> None:
    """The number of rows depends on values: no kernel may ask for it while tracing."""

    def function(x: Tensor, *parameters: Any) -> Tensor:
        t = x[x.sum(1).gt(0).nonzero().squeeze(1)]
        InPlace(variant).whole(t, *parameters)
        return t * 2

    x = random_like(torch.empty(40, 5, dtype=torch.float64))
    parameters = variant.parameters(x)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        out = torch.compile(function, backend="aot_eager", fullgraph=True)(x, *parameters)
    chosen = x[x.sum(1) > 0]
    assert 0 < len(chosen) < 40
    assert_all_close([out], [Reference(variant).whole(chosen, *parameters) * 2])

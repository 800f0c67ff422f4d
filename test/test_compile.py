"""torch.compile(fullgraph=True): values, gradients, sizes, modules, and what compiled code allocates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import assert_all_close, gradients, random_like, tensors
from mutations import VARIANTS, InPlace, Reference, Variant
from op_db import OPS, OpCase
from samples import Sample
from torch import Tensor, nn
from torch._C._profiler import _EventType
from torch._dynamo.testing import CompileCounterWithBackend
from torch.profiler import ProfilerActivity, profile

import torchops

SAMPLES = [
    "matrix",
    "vector",
    "four_dims",
    "no_bias",
    "transposed",
    "transposed_x",
    "strided",
    "strided_columns",
    "two_dims",
    "two_dims_plain_permuted",
    "middle_dim",
    "matrix_tb",
    "zero_rows",
    "zero_in",
]


@pytest.mark.ops(leaves=True, large=False, dtypes=[torch.float64], samples=SAMPLES)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_aot_eager(case: OpCase, device: str, dtype: torch.dtype, sample: Sample, dynamic: bool) -> None:
    def function(*args: Any, **kwargs: Any) -> Tensor:
        return case.pure(*args, **kwargs) * 2

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    args, kwargs = sample(dtype, device, requires_grad=True)
    expected = case.reference(*args, **kwargs) * 2
    cotangent = random_like(expected.detach())
    grads = list(torch.autograd.grad(expected, tensors((args, kwargs)), cotangent))
    out, got = gradients(compiled, sample(dtype, device, requires_grad=True), cotangent)
    if case.mutates is None:
        assert out.is_contiguous()
    assert_all_close([out, *got], [expected, *grads])
    with torch.no_grad():
        assert_all_close([compiled(*args, **kwargs)], [expected])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_inductor(dtype: torch.dtype) -> None:
    """All operators in one graph, one compilation: values and gradients."""
    calls = []
    for case in OPS:
        sample = next(s for s in case.samples if s.name == "matrix")
        calls.append((case, sample))

    def function(reference: bool, arguments: list[Any]) -> list[Tensor]:
        outputs = []
        for (case, _), (args, kwargs) in zip(calls, arguments, strict=True):
            op = case.reference if reference else case.pure
            outputs.append(op(*args, **kwargs) * 2)
        return outputs

    results = []
    for reference in (False, True):
        arguments = [sample(dtype, "cpu", requires_grad=True) for _, sample in calls]
        compiled = torch.compile(function, fullgraph=True) if not reference else function
        outputs = compiled(reference, arguments)
        leaves = [t for pair in arguments for t in tensors(pair)]
        cotangents = [random_like(o.detach(), i) for i, o in enumerate(outputs)]
        results.append([*outputs, *torch.autograd.grad(outputs, leaves, cotangents)])
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 4e-2}[dtype]
    assert_all_close(*results, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("mode", ["no_grad", "grad"])
def test_one_graph_for_all_sizes(mode: str) -> None:
    """On inductor with every size dynamic: one compilation, then those for the sizes 0 and 1, which PyTorch fixes."""
    counter = CompileCounterWithBackend("inductor")

    def function(x: Tensor, w: Tensor, b: Tensor, m: Tensor) -> Tensor:
        t = torchops.dense(x, w, b)
        t = torchops.layer_norm(t, [t.shape[-1]], b)
        torchops.square_matmul_(t, m)
        torchops.softmax_(t, 0)
        return t

    def expected(x: Tensor, w: Tensor, b: Tensor, m: Tensor) -> Tensor:
        t = torch.sigmoid(nn.functional.linear(x, w, b))
        return torch.softmax(nn.functional.layer_norm(t, t.shape[-1:], b) @ m, 0)

    compiled = torch.compile(function, backend=counter, fullgraph=True, dynamic=True)
    sizes = [(5, 7, 3), (6, 11, 9), (17, 2, 5), (100, 64, 31), (1000, 13, 17)]
    for index, (rows, inner, outer) in enumerate([*sizes, (1, 7, 3), (5, 1, 3), (0, 7, 3), (5, 0, 3)]):
        x, w, b, m = (
            random_like(torch.empty(shape, dtype=torch.float64), i).requires_grad_(mode == "grad")
            for i, shape in enumerate([(rows, inner), (outer, inner), (outer,), (outer, outer)])
        )
        results = []
        for f in (compiled, expected):
            out = f(x, w, b, m)
            results.append([out])
            if mode == "grad":
                results[-1] += torch.autograd.grad(out, [x, w, b, m], random_like(out.detach()))
        assert_all_close(*results)
        if index == 0:
            first = counter.frame_count
        if index == len(sizes) - 1:
            assert counter.frame_count == first
    assert counter.frame_count <= first + 4


def test_automatic_dynamic() -> None:
    """Without `dynamic`, the second size compiles once more and the others reuse that graph."""
    counter = CompileCounterWithBackend("aot_eager")
    layer = torchops.nn.Dense(7, 3).requires_grad_(False)
    compiled = torch.compile(lambda x: torchops.softmax_(layer(x)), backend=counter, fullgraph=True)
    for rows in (5, 6, 17, 100, 1000):
        x = random_like(torch.empty(rows, 7))
        assert_all_close(
            [compiled(x)], [torch.softmax(torch.sigmoid(nn.functional.linear(x, *layer.parameters())), -1)]
        )
    assert counter.frame_count == 2


def test_functions_share_no_limit_of_graphs() -> None:
    """torch.compile counts the graphs of a code object, and with `fullgraph` refuses one more than the limit."""
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=1):
        for case in OPS:
            args, kwargs = case.samples[0](torch.float64, "cpu")
            compiled = torch.compile(case.wrapper, backend="eager", fullgraph=True)
            expected = case.reference(*args, **kwargs)
            assert_all_close([case.call(compiled, *args, **kwargs)], [expected])


class Gated(nn.Module):
    """A module that overwrites a buffer at each call."""

    state: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.gate = torchops.nn.Dense(6, 6, dtype=torch.float64)
        self.register_buffer("state", random_like(torch.empty(4, 6, dtype=torch.float64)))

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        torchops.square_matmul_(self.state, gate.detach()[:6])
        torchops.layer_norm_(self.state, [6])
        return gate * self.state.sum()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_module_with_a_mutated_buffer(backend: str) -> None:
    torch.manual_seed(3)
    eager = Gated()
    module = Gated()
    module.load_state_dict(eager.state_dict())
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    for step in range(3):
        x = random_like(torch.empty(6, 6, dtype=torch.float64), step)
        got, expected = compiled(x), eager(x)
        assert_all_close([got, module.state], [expected, eager.state])
        got.sum().backward()
        expected.sum().backward()
        assert_all_close(*([p.grad for p in m.parameters() if p.grad is not None] for m in (module, eager)))


# --- what compiled code allocates ------------------------------------------------------------------------------------


def allocations(function: Callable[[], Any]) -> tuple[list[int], set[str]]:
    """The bytes of everything that `function` allocates on the CPU, and the names of the operators that it calls."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    todo, sizes = list(profiler.profiler.kineto_results.experimental_event_tree()), []
    while todo:
        event = todo.pop()
        todo += event.children
        if event.tag == _EventType.Allocation and event.extra_fields.alloc_size > 0:
            sizes.append(event.extra_fields.alloc_size)
    return sizes, {event.name for event in profiler.events() or ()}


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
@pytest.mark.parametrize("what", ["input", "intermediate"])
def test_compiled_code_has_no_second_buffer(variant: Variant, what: str) -> None:
    """Compiled without grad, the operator runs on the tensor itself. The tensor is larger than any scratch."""

    def function(t: Tensor, *parameters: Any) -> Tensor:
        if what == "intermediate":
            t = t + 1
        InPlace(variant).whole(t, *parameters)
        return t

    x = random_like(torch.empty(1_200_007, 5))
    parameters = variant.parameters(x)
    expected = Reference(variant).whole(x + 1 if what == "intermediate" else x, *parameters)
    argument = x.clone()
    pointer = argument.data_ptr()
    compiled = torch.compile(function, fullgraph=True)
    with torch.no_grad():
        compiled(x.clone(), *parameters)
        outputs: list[Tensor] = []
        sizes, called = allocations(lambda: outputs.append(compiled(argument, *parameters)))
    assert_all_close(outputs, [expected], atol=1e-5, rtol=1e-5)
    assert variant.case.qualified in called
    assert len([size for size in sizes if size >= x.nbytes // 2]) == (1 if what == "intermediate" else 0)
    if what == "input":
        assert outputs[0] is argument
        assert argument.data_ptr() == pointer


def _chain(x: Tensor) -> Tensor:
    torchops.sigmoid_(x)
    torchops.softmax_(x, 1)
    torchops.layer_norm_(x, [x.shape[-1]])
    return x * 2


def _attention(x: Tensor) -> Tensor:
    scores = x @ x.mT
    torchops.softmax_(scores.view(-1, scores.shape[-1]))
    return scores @ x


def _pairs(x: Tensor) -> Tensor:
    w, v = torch.eye(x.shape[-1]).repeat(2, 1), torch.eye(x.shape[-1])
    weights: dict[str, Any] = {"p_in_weight": w, "g_in_weight": w, "p_out_weight": v, "g_out_weight": v}
    torchops.add_triangle_multiplicative_update_(x, "outgoing", **weights)
    torchops.add_triangle_multiplicative_update_(x, "incoming", **weights)
    torchops.add_transition_(x, gate_weight=v, up_weight=v, down_weight=v)
    return x


def _read_again(x: Tensor) -> Tensor:
    y = x.sum(0)
    torchops.softmax_(x)
    return y


IN_PLACE: dict[Callable[[Tensor], Tensor], set[str]] = {
    _chain: {"sigmoid_", "softmax_", "layer_norm_"},
    _attention: {"softmax_"},
    _pairs: {"_triangle_multiplicative_update_", "add_transition_"},
    # Right in place as well, but only if nobody moves the sum behind the softmax.
    _read_again: set(),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("program", IN_PLACE, ids=lambda p: p.__name__[1:])
def test_compiled_code_works_in_place_where_nothing_else_reads(
    program: Callable[[Tensor], Tensor], dynamic: bool
) -> None:
    x = random_like(torch.empty(3, 7, 7, 4) if program is _pairs else torch.empty(3, 7, 5))
    compiled = torch.compile(program, fullgraph=True, dynamic=dynamic)
    with torch.no_grad():
        eager, got = x.clone(), x.clone()
        expected = program(eager)
        outputs: list[Tensor] = []
        compiled(x.clone())
        _, called = allocations(lambda: outputs.append(compiled(got)))
    assert_all_close([*outputs, got], [expected, eager], atol=1e-5, rtol=1e-5)
    assert {name for name in called if name.startswith("myops::") and name.endswith("_")} == {
        f"myops::{name}" for name in IN_PLACE[program]
    }


@pytest.mark.parametrize("trained", [False, True])
def test_compiled_code_keeps_a_copy_only_where_it_must(trained: bool) -> None:
    """Training with a frozen matrix saves nothing of the size of the input; with a trained one, the old value."""

    def function(t: Tensor, b: Tensor) -> Tensor:
        torchops.square_matmul_(t, b)
        return t * 2

    x = random_like(torch.empty(1237, 5)).requires_grad_()
    b = random_like(torch.empty(5, 5), 2).requires_grad_(trained)
    compiled = torch.compile(function, fullgraph=True)
    saved: list[int] = []

    def pack(t: Tensor) -> Tensor:
        saved.append(t.numel())
        return t

    t = x * 1
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = compiled(t, b)
    assert (max(saved) >= x.numel()) == trained
    leaves = [x, b] if trained else [x]
    assert_all_close(torch.autograd.grad(y.sum(), leaves), torch.autograd.grad((x @ b * 2).sum(), leaves))

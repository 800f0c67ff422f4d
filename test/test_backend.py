"""``torch.compile(model, backend="torchops")``: the pass of `torchops.inductor` without code generation.

Forwards that decide by what no graph shows are here because a graph that was recorded once would be silently wrong.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checks import assert_all_close, random_like
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchops

sys.path.append(str(Path(__file__).parents[1] / "examples/models"))

from conditioned_transition import ConditionedTransition
from gated_attention import GatedAttention
from glu_stack import GLUStack
from triangle_update import TriangleBlock


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(model: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(model, backend="torchops", **options)


def t(*shape: int, dtype: torch.dtype = torch.float64, grad: bool = False) -> Tensor:
    return random_like(torch.empty(shape, dtype=dtype), seed=sum(shape)).requires_grad_(grad)


def values(function: Callable[..., Any], model: nn.Module, inputs: list[Tensor], train: bool) -> list[Tensor]:
    """The outputs, and in training the gradients."""
    if not train:
        with torch.no_grad():
            return [function(*inputs)]
    out = function(*inputs)
    leaves = [p for p in (*inputs, *model.parameters()) if p.requires_grad]
    return [out, *torch.autograd.grad(out, leaves, random_like(out.detach(), seed=3))]


def found(call: Callable[[], Any]) -> list[tuple[str, bool]]:
    """What the pass saw during a call."""
    before = len(torchops.inductor.report())
    call()
    return [(match.kind, match.replaced) for match in torchops.inductor.report()[before:]]


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[tuple[int, ...], ...], list[str]]] = {
    "triangle_update": (
        lambda: TriangleBlock(8, 8),
        ((2, 5, 5, 8),),
        ["gate", "gate", *["glu sigmoid"] * 4],
    ),
    "gated_attention": (lambda: GatedAttention(8, 2), ((2, 9, 8),), ["gate"]),
    "glu_stack": (lambda: GLUStack(8), ((37, 8),), ["glu sigmoid"] * 4),
    "conditioned_transition": (lambda: ConditionedTransition(8, 8), ((37, 8), (37, 8)), ["gate", "gate", "glu silu"]),
}


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, train: bool) -> None:
    """Every gate is found, also the one that Inductor would compute with the norm that it multiplies."""
    make, shapes, operators = MODELS[name]
    model, inputs = make().double(), [t(*shape, grad=train) for shape in shapes]
    expected, before = values(model, model, inputs, train), torchops.inductor.matches()
    got: list[Tensor] = []
    places = found(lambda: got.extend(values(compiled(model, fullgraph=True), model, inputs, train)))
    assert_all_close(got, expected, atol=1e-11, rtol=1e-11)
    assert sorted(places) == [(operator, True) for operator in operators]
    assert torchops.inductor.matches() - before == len(operators)


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", MODELS)
def test_models_under_autocast(name: str, train: bool) -> None:
    make, shapes, operators = MODELS[name]
    model, inputs = make(), [t(*shape, dtype=torch.float32, grad=train) for shape in shapes]
    exact = values(model, model, inputs, train)
    with torch.autocast("cpu", torch.bfloat16):
        eager = values(model, model, inputs, train)
        got: list[Tensor] = []
        places = found(lambda: got.extend(values(compiled(model, fullgraph=True), model, inputs, train)))
    assert len(places) == len(operators)
    assert all(rewritten for _, rewritten in places)
    for ours, theirs, judge in zip(got, eager, exact, strict=True):
        assert ours.dtype == theirs.dtype
        assert (ours - judge).norm() <= 1.5 * (theirs - judge).norm() + 1e-2 * judge.norm()


class SwiGLU(nn.Module):
    def __init__(self, features: int = 8) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(features, 16), nn.Linear(features, 16)
        self.down = nn.Linear(16, features)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def test_one_module_in_place() -> None:
    model, x = nn.Sequential(SwiGLU(), nn.Linear(8, 8)).double(), t(3, 8)
    expected = model(x)
    model[0].compile(backend="torchops")
    got: list[Tensor] = []
    assert found(lambda: got.append(model(x))) == [("glu silu", True)]
    assert_all_close(got, [expected])


def test_registered_when_dynamo_is_imported() -> None:
    """`import torchops` does not import it; `list_backends` knows the name."""
    program = """
import sys, torch, torchops
assert "torch._dynamo" not in sys.modules
assert "torchops" in torch._dynamo.list_backends()
assert "torch._inductor.compile_fx" not in sys.modules
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_saved_between_forward_and_backward() -> None:
    """No more than autograd keeps: the gate's product is neither kept nor computed outside its operator."""
    model, x = SwiGLU(), t(500, 8, dtype=torch.float32, grad=True)

    def saved(function: Callable[..., Tensor]) -> int:
        kept: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = function(x)
        del out
        return sum(kept.values())

    model(x)
    assert saved(compiled(model)) <= saved(model)


def test_arguments_are_released() -> None:
    """So that what the backward pass has read for the last time is gone before its end."""
    from torchops.inductor import eager_backend

    graph = torch.fx.symbolic_trace(lambda x, y: x + y)
    run = eager_backend._as_it_is(graph, ())
    arguments = [t(3), t(3)]
    assert_all_close([run(arguments)], [2 * t(3)])
    assert arguments == []


def test_checkpoint() -> None:
    model, x = SwiGLU().double(), t(3, 8, grad=True)

    def function(x: Tensor) -> Tensor:
        return checkpoint(model, x, use_reentrant=False).sin()

    expected = values(function, model, [x], True)
    assert_all_close(values(compiled(function, fullgraph=True), model, [x], True), expected)


def test_sizes_that_change() -> None:
    model = SwiGLU().double()
    function = compiled(model)
    for n in (3, 5, 1, 0, 7):
        x = t(n, 2, 8, grad=True)
        assert_all_close(values(function, model, [x], True), values(model, model, [x], True))


FROZEN: dict[str, Callable[[SwiGLU], list[Tensor | None]]] = {
    "gate": lambda m: [m.gate.weight, m.gate.bias],
    "up": lambda m: [m.up.weight, m.up.bias],
    "both weights": lambda m: [m.gate.weight, m.up.weight],
    "a bias": lambda m: [m.gate.bias],
    "all": lambda m: [*m.parameters()],
}


@pytest.mark.parametrize("of_input", [False, True])
@pytest.mark.parametrize("name", FROZEN)
def test_frozen_layers(name: str, of_input: bool) -> None:
    """The operator computes the gradients that are asked for."""
    model, x = SwiGLU().double(), t(3, 8, grad=of_input)
    for parameter in FROZEN[name](model):
        assert parameter is not None
        parameter.requires_grad_(False)
    train = of_input or name != "all"
    got: list[Tensor] = []
    places = found(lambda: got.extend(values(compiled(model), model, [x], train)))
    assert_all_close(got, values(model, model, [x], train))
    assert places == [("glu silu", True)]


@pytest.mark.parametrize(
    "asked", [(True, False, True), (False, True, True), (True, False, False), (False, True, False)]
)
def test_gates_of_frozen_layers(asked: tuple[bool, bool, bool]) -> None:
    gate = nn.Linear(8, 6).double()
    inputs = [t(3, 6, grad=asked[0]), t(3, 8, grad=asked[1])]
    gate.requires_grad_(asked[2])

    def function(v: Tensor, x: Tensor) -> Tensor:
        return v * gate(x).sigmoid()

    got: list[Tensor] = []
    places = found(lambda: got.extend(values(compiled(function), gate, inputs, True)))
    assert_all_close(got, values(function, gate, inputs, True))
    assert places == [("gate", True)]


HALVES: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda a, b: F.silu(a) * b,
    lambda a, b: a * b.sigmoid(),
    lambda a, b: F.glu(torch.cat([a, b], -1)),
]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("combine", HALVES)
def test_packed_layers(combine: Callable[[Tensor, Tensor], Tensor], grad: bool) -> None:
    layer, x = nn.Linear(8, 12).double(), t(3, 8, grad=grad)

    def function(x: Tensor) -> Tensor:
        return combine(*layer(x).chunk(2, -1))

    assert_all_close(values(compiled(function), layer, [x], True), values(function, layer, [x], True))

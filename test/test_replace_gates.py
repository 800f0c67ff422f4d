"""torchops.nn.replace: forwards that gate, and GLUs in an nn.Sequential. What is left is in test_replace_left.py."""

from __future__ import annotations

import copy
import importlib
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checks import assert_all_close, random_like
from torch import Tensor, nn
from torch.nn.utils import prune

from torchops.nn import Replacements, replace

# The module, whose name in its package is that of the function.
replacing: Any = importlib.import_module("torchops.nn.replace")


class SwiGLU(nn.Module):
    def __init__(self, features: int = 6, hidden: int = 8) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(features, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, features)
        self.scale = nn.Parameter(torch.ones(features))
        self.note = "kept"

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x)) * self.scale

    def doubled(self, x: Tensor) -> Tensor:
        return 2 * self(x)


class OutputGate(nn.Module):
    """v is a layer of its own input, and the gate a part of a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.gate = nn.Sequential(nn.Linear(6, 8), nn.Sigmoid())
        self.value = nn.Linear(5, 8)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor, o: Tensor) -> Tensor:
        return self.dropout(self.gate(self.norm(x)) * self.value(o))


class Packed(nn.Module):
    def __init__(self, combine: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.both = nn.Linear(6, 16)
        self.combine = combine

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.both(x).chunk(2, dim=-1)
        return self.combine(first, second)


class Functional(nn.Module):
    def __init__(self, function: Callable[[Any, Tensor], Tensor], out: int = 6) -> None:
        super().__init__()
        self.a, self.b, self.act = nn.Linear(6, out), nn.Linear(6, out), nn.SiLU()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def silu_first(a: Tensor, b: Tensor) -> Tensor:
    return F.silu(a) * b


def sigmoid_second(a: Tensor, b: Tensor) -> Tensor:
    return a * b.sigmoid()


FORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str, int]] = {
    "swiglu": (SwiGLU, (6,), "glu", 1),
    "output_gate": (OutputGate, (6, 5), "gate", 1),
    "chunk_silu": (lambda: Packed(silu_first), (6,), "glu", 1),
    "chunk_sigmoid": (lambda: Packed(sigmoid_second), (6,), "glu", 1),
    "functional_glu": (lambda: Functional(lambda m, x: F.glu(m.a(x))), (6,), "glu", 1),
    "module_silu": (lambda: Functional(lambda m, x: m.act(m.a(x)) * m.b(x)), (6,), "glu", 1),
    "sigmoid_glu": (lambda: Functional(lambda m, x: torch.mul(m.b(x), torch.sigmoid(m.a(x))) + x), (6,), "glu", 1),
    "two_gates": (lambda: Functional(lambda m, x: x * m.a(x).sigmoid() * m.b(x).sigmoid()), (6,), "gate", 2),
    "sequential": (lambda: nn.Sequential(nn.Linear(6, 8), nn.GLU(), nn.Linear(4, 6), nn.GLU(-1)), (6,), "glu", 2),
}


def same(model: nn.Module, original: nn.Module, sizes: tuple[int, ...]) -> None:
    results = []
    for m in (model, original):
        inputs = [random_like(torch.empty(3, 5, n), n).requires_grad_() for n in sizes]
        out = m(*inputs)
        leaves = [*inputs, *(p for p in m.parameters() if p.requires_grad)]
        results.append([out, *torch.autograd.grad(out, leaves, random_like(out.detach(), 1), allow_unused=True)])
    ours, theirs = ([t for t in r if t is not None] for r in results)
    assert len(ours) == len(theirs)
    assert_all_close(ours, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", FORMS)
def test_forms(name: str) -> None:
    """Values, gradients, parameters and names stay; the operator is called; doing it again does nothing."""
    make, sizes, operator, count = FORMS[name]
    model = nn.ModuleDict({"it": make().eval()})
    original = copy.deepcopy(model)
    parameters = dict(model.named_parameters())
    report = replace(model)
    assert report.replaced
    assert report.left == {}
    assert list(model.state_dict()) == list(original.state_dict())
    after = dict(model.named_parameters())
    assert all(after[name] is parameters[name] for name in parameters)
    same(model["it"], original["it"], sizes)
    with torch.profiler.profile() as profile:
        model["it"](*(random_like(torch.empty(3, 5, n)) for n in sizes))
    calls = {event.key: event.count for event in profile.key_averages()}
    assert calls[f"myops::{operator}"] == count
    assert "aten::sigmoid" not in calls
    assert replace(model) == Replacements((), {})
    same(copy.deepcopy(model)["it"], original["it"], sizes)


def test_the_class_stays() -> None:
    """Attributes, methods, hooks and pickles are those of the class that it was; the class itself is not touched."""
    model = SwiGLU()
    seen: list[Tensor] = []
    model.register_forward_hook(lambda module, args, out: seen.append(out))
    x = random_like(torch.empty(4, 6))
    expected = model.doubled(x)
    assert replace(model).replaced == ("",)
    assert isinstance(model, SwiGLU)
    assert type(model).__name__ == "SwiGLU"
    assert type(SwiGLU()) is SwiGLU
    assert model.note == "kept"
    assert_all_close([model.doubled(x)], [expected], atol=1e-6, rtol=1e-5)
    assert len(seen) == 2
    model._forward_hooks.clear()
    again = pickle.loads(pickle.dumps(model))
    assert_all_close([again(x)], [model(x)])
    assert_all_close([torch.compile(model, backend="eager", fullgraph=True)(x)], [model(x)])


def test_classes_that_are_known_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who knows a module by its class, whenever that was registered, sees it before its forward is changed."""
    seen: list[type] = []

    def known(model: nn.Module) -> Replacements:
        seen.append(type(model))
        return Replacements((), {})

    monkeypatch.setattr(replacing, "_swappers", list(replacing._swappers))
    replacing.swapper(known)
    assert replace(SwiGLU()).replaced == ("",)
    assert seen == [SwiGLU]
    replacing.swapper(lambda model: Replacements((), {"": "it is known"}))
    assert replace(SwiGLU()) == Replacements((), {"": "it is known"})


def test_broadcast_values() -> None:
    """No graph says that v has the gate's shape; where it has another, PyTorch multiplies as before."""
    model = Functional(lambda m, x: x[..., :1, :] * torch.sigmoid(m.a(x)))
    original = copy.deepcopy(model)
    assert replace(model).replaced == ("",)
    same(model, original, (6,))


def gates_of(model: nn.Module, *args: Tensor) -> int:
    """How many operators a call runs."""
    with torch.profiler.profile() as profile:
        model(*args)
    return sum(e.count for e in profile.key_averages() if e.key in ("myops::gate", "myops::glu", "myops::dense"))


class Multiplied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 8)

    def forward(self, x: Tensor, v: Tensor) -> Tensor:
        return v * torch.sigmoid(self.gate(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.int64, torch.complex64])
@pytest.mark.parametrize("of_weights", [torch.float32, torch.float64])
def test_values_of_other_dtypes(of_weights: torch.dtype, dtype: torch.dtype) -> None:
    model = Multiplied().to(of_weights)
    x, v = torch.randn(3, 6, dtype=of_weights), (3 * torch.randn(3, 8)).to(dtype)
    expected = model(x, v)
    assert replace(model).replaced == ("",)
    torch.testing.assert_close(model(x, v), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
def test_values_under_autocast(dtype: torch.dtype) -> None:
    """Autocast casts weights, so that v has the dtype of the product if it was computed there."""
    model = Multiplied()
    x, v = torch.randn(3, 6), torch.randn(3, 8).to(dtype)
    results = []
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16), torch.profiler.profile() as profile:
            results.append(model(x, v))
        replace(model)
    assert results[0].dtype == results[1].dtype
    torch.testing.assert_close(results[1], results[0], atol=2e-2, rtol=2e-2)
    assert ("myops::gate" in {event.key for event in profile.key_averages()}) == (dtype != torch.float16)


def test_values_without_data() -> None:
    """Autocast knows no meta tensors."""
    model = Multiplied().to("meta", torch.bfloat16)
    assert replace(model).replaced == ("",)
    x, v = (torch.empty(3, n, dtype=torch.bfloat16, device="meta") for n in (6, 8))
    assert model(x, v).shape == (3, 8)


def test_a_number_as_value() -> None:
    model = Multiplied()
    x = torch.randn(3, 6)
    expected = model(x, 2.5)
    assert replace(model).replaced == ("",)
    torch.testing.assert_close(model(x, 2.5), expected)


def test_beside_a_batch_norm() -> None:
    """Whose running variance no trial may make negative."""
    model = nn.ModuleDict({"it": Functional(lambda m, x: m.norm(m.a(x).sigmoid() * m.b(x)))})
    model["it"].norm = nn.BatchNorm1d(6)
    assert replace(model) == Replacements(("it",), {})


class LowRank(nn.Module):
    """A layer beside another one, as libraries for fine-tuning make it."""

    def __init__(self, base: nn.Module, features: int = 6, out: int = 8) -> None:
        super().__init__()
        self.base, self.extra = base, nn.Linear(features, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.extra(x)


def zeroed(m: Any) -> None:
    m.up.register_forward_hook(lambda module, args, out: 0 * out)


LATER: dict[str, Callable[[Any], object]] = {
    "another_layer": lambda m: setattr(m, "up", LowRank(m.up)),
    "hook": zeroed,
    "parametrization": lambda m: nn.utils.parametrizations.weight_norm(m.up),
    "pruning": lambda m: prune.l1_unstructured(m.up, "weight", 0.5),
    "own_forward": lambda m: setattr(m.up, "forward", lambda x: m.gate(x)),
}


@pytest.mark.parametrize("name", LATER)
def test_layers_that_change_later(name: str) -> None:
    """The former forward calls them."""
    model = SwiGLU()
    assert replace(model).replaced == ("",)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    x = torch.randn(3, 6)
    compiled(x)
    LATER[name](model)
    plain = SwiGLU()
    plain.__dict__.update(model.__dict__)
    torch.testing.assert_close(model(x), plain(x))
    if name == "another_layer":  # PyTorch does not guard hooks, either
        torch.testing.assert_close(compiled(x), plain(x))
    assert model(x).grad_fn is not None


class Stacked(SwiGLU):
    """With containers whose parts are called one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Linear(8, 6), nn.Tanh())  # type: ignore[assignment]
        self.last = nn.ModuleList([nn.Tanh()])

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        for layer in self.last:
            x = layer(x)
        return x


CONTAINERS_LATER: dict[str, Callable[[Any], object]] = {
    "hook": lambda m: m.down.register_forward_hook(lambda module, args, out: 0 * out),
    "another_container": lambda m: setattr(m, "down", LowRank(m.down, 8, 6)),
    "longer_sequential": lambda m: m.down.append(nn.Linear(6, 6)),
    "longer_list": lambda m: m.last.append(nn.Linear(6, 6)),
}


@pytest.mark.parametrize("name", CONTAINERS_LATER)
@pytest.mark.parametrize("later", [False, True])
def test_containers(name: str, later: bool) -> None:
    """Hooks and other parts count, whether they are there before or not."""
    model, x = Stacked(), torch.randn(3, 6)
    if not later:
        CONTAINERS_LATER[name](model)
    assert replace(model).replaced == ("",)
    if later:
        CONTAINERS_LATER[name](model)
    plain = Stacked()
    plain.__dict__.update(model.__dict__)
    torch.testing.assert_close(model(x), plain(x))


def test_other_traces() -> None:
    """Those of torch.fx and torch.jit, which keep the operators."""
    gate, glu = Multiplied(), SwiGLU()
    layers = nn.Sequential(nn.Linear(6, 8), nn.GLU(), nn.Linear(4, 6), nn.Sigmoid())
    x, v = torch.randn(3, 6), torch.randn(3, 8)
    for module, args, operator in (
        (gate, (x, v), "myops::gate"),
        (glu, (x,), "myops::glu"),
        (layers[:2], (x,), "myops::glu"),
        (layers[2:], (x[:, :4],), "myops::dense"),
    ):
        assert replace(module).replaced
        for traced in (torch.fx.symbolic_trace(module), torch.jit.trace(module, args)):
            with torch.profiler.profile() as profile:
                torch.testing.assert_close(traced(*args), module(*args))
            assert [e.key for e in profile.events()].count(operator) == 2
    assert type(copy.deepcopy(glu)) is type(glu)  # torch.fx keeps what belongs to a class


def test_arguments_of_the_former_forward() -> None:
    """All kinds of them."""

    class Kinds(SwiGLU):
        def forward(self, x: Tensor, /, y: Tensor, *, scale: float = 1.0) -> Tensor:  # type: ignore[override]
            return super().forward(x) * scale + y

    model, x, y = Kinds(), torch.randn(3, 6), torch.randn(3, 6)
    report = replace(model)
    assert report.replaced == ("",), report
    zeroed(model)
    torch.testing.assert_close(model(x, y=y, scale=2.0), 2 * model.down.bias.expand(3, 6) + y)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_whatever_surrounds_the_call(dtype: torch.dtype) -> None:
    model = nn.ModuleDict({"here": SwiGLU(), "meta": SwiGLU().to("meta"), "bits16": Packed(silu_first).half()})
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
            report = replace(model)
    finally:
        torch.set_default_dtype(before)
    assert report == Replacements(("here", "meta", "bits16"), {})


def test_a_trial_sees_what_the_graph_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator that computes something else is not put anywhere."""
    monkeypatch.setattr(torch.ops.myops, "glu", lambda x, w, wg, b, bg, *, activation: F.linear(x, w, b))
    model = SwiGLU()
    assert replace(model) == Replacements((), {"": "a trial gave other results"})
    assert type(model) is SwiGLU


class Beside(SwiGLU):
    """While its forward is traced, another thread computes."""

    dtype: str

    def forward(self, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as other:
            type(self).dtype = other.submit(self.compute).result()
        return super().forward(x)

    @staticmethod
    def compute() -> str:
        with torch.no_grad(), torch.autocast("cpu"):
            return str(torch.ones(1, 1).mm(torch.ones(1, 1)).dtype)


def test_other_threads_enter_contexts() -> None:
    methods = torch.no_grad.__enter__, torch.autocast.__enter__
    module = Beside()
    replace(module)
    assert module.dtype == "torch.bfloat16"
    assert (torch.no_grad.__enter__, torch.autocast.__enter__) == methods

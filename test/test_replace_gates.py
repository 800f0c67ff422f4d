"""torchops.nn.replace: forwards that gate, and GLUs in an nn.Sequential."""

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
from torch.utils.checkpoint import checkpoint

import torchops
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


class Doubled(nn.Linear):
    pass


def changed(change: Callable[[SwiGLU], object]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = SwiGLU()
        change(model)
        return model

    return make


def branches(m: Any, x: Tensor) -> Tensor:
    return m.a(x) * m.b(x).sigmoid() if x.sum() > 0 else x


def overwrites(m: Any, x: Tensor) -> Tensor:
    z = m.a(x)
    x.zero_()
    return z.sigmoid() * m.b(x)


def counts(m: Any, x: Tensor) -> Tensor:
    m.calls = getattr(m, "calls", 0) + 1
    return m.calls * (m.a(x) * m.b(x).sigmoid())


def hook(module: nn.Module) -> None:
    module.register_forward_hook(lambda *a: None)


class InFloat32(SwiGLU):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        with torch.autocast("cpu", enabled=False):
            return F.silu(gate.float()) * self.up(x).float()


class Checkpointed(SwiGLU):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * checkpoint(self.up, x, use_reentrant=False))


def makes_a_tensor(m: Any, x: Tensor) -> Tensor:
    return m.a(x) * m.b(x).sigmoid() * torch.ones(6)


class Masked(SwiGLU):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        out = self.down(F.silu(self.gate(x)) * self.up(x))
        return out * mask if isinstance(mask, Tensor) else out


class Residual(SwiGLU):
    def forward(self, x: Tensor, residual: bool = False) -> Tensor:
        out = super().forward(x)
        return x + out if residual is True else out


class Remembers(SwiGLU):
    seen: tuple[Any, ...]

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.all, self.by_name = self.nothing()

    @staticmethod
    def nothing() -> tuple[tuple[Any, ...], list[Any], dict[str, Any]]:
        return (), [0], {"": 0}

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.seen += (out,)
        self.all.append(out)
        self.by_name["out"] = out
        return out


LEFT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "autocast": (InFloat32, "its forward cannot be traced: it enters autocast, which no graph shows"),
    "checkpoint": (Checkpointed, "its forward cannot be traced: it enters"),
    "tensor": (lambda: Functional(makes_a_tensor), "its forward makes a tensor"),
    "hooked": (changed(lambda m: m.up.register_forward_hook(lambda *a: None)), "up: Linear has hooks"),
    "subclass": (changed(lambda m: setattr(m, "up", Doubled(6, 8))), "up: Doubled is not Linear itself"),
    "parametrized": (
        changed(lambda m: nn.utils.parametrizations.weight_norm(m.gate)),
        "gate: ParametrizedLinear is not Linear itself",
    ),
    "sizes": (changed(lambda m: setattr(m, "up", nn.Linear(6, 1))), "its layers are of several sizes"),
    "dtypes": (changed(lambda m: m.up.double()), "its layers are of several dtypes or devices"),
    "own_forward": (changed(lambda m: setattr(m, "forward", lambda x: x)), "SwiGLU has a forward of its own"),
    "branches": (lambda: Functional(branches), ""),
    "overwrites": (lambda: Functional(overwrites), "its forward overwrites tensors"),
    "training": (
        lambda: Functional(lambda m, x: m.a(x) * F.dropout(m.b(x).sigmoid(), 0.5, m.training) * m.b(x).sigmoid()),
        "its forward differs between training and evaluation",
    ),
    "counts": (lambda: Functional(counts), "its forward changes its attribute calls"),
    "remembers": (Remembers, "its forward changes its attribute all"),
    "masked": (Masked, "its forward cannot be traced: it asks for the type of its argument mask"),
    "residual": (Residual, "its graph does not read its argument residual"),
    "glu_dim": (lambda: nn.Sequential(nn.Linear(6, 6), nn.GLU(1)), "the GLU is along dimension 1, not the last one"),
    "glu_hook": (
        lambda: nn.Sequential(nn.Linear(6, 6), nn.GLU()).apply(hook),
        "Linear has hooks",
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_left(name: str) -> None:
    make, reason = LEFT[name]
    model = nn.ModuleDict({"it": make()})
    classes = [type(m) for m in model.modules()]
    report = replace(model)
    assert report.replaced == ()
    assert [type(m) for m in model.modules()] == classes
    if name != "branches":  # the source of a lambda elsewhere says nothing of gates
        assert reason in "; ".join(report.left.values())


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


@pytest.mark.parametrize("changes", [lambda m: None, lambda m: setattr(m, "forward", m.forward)])
def test_nothing_of_the_tracing_stays(changes: Callable[[Any], None]) -> None:
    model = Remembers()
    changes(model)
    before = copy.copy(vars(model))
    replace(model)
    assert vars(model) == before
    assert (model.seen, model.all, model.by_name) == Remembers.nothing()


def test_what_is_no_gate() -> None:
    """Layers that have another user, other activations, halves that are none, a gate of the same layer."""
    for function in (
        lambda m, x: (lambda z: z * torch.sigmoid(z))(m.a(x)),
        lambda m, x: (lambda s: s * m.b(x) + s)(torch.sigmoid(m.a(x))),
        lambda m, x: torch.tanh(m.a(x)) * m.b(x),
        lambda m, x: F.glu(m.a(x), 0),
        lambda m, x: (lambda a, b: a * torch.sigmoid(b))(*m.a(x).chunk(2, dim=0)),
    ):
        model = Functional(function)
        assert replace(model) == Replacements((), {})
        assert type(model) is Functional


def test_a_trial_sees_what_the_graph_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator that computes something else is not put anywhere."""
    monkeypatch.setattr(torchops.nn.gate_forms, "glu", lambda x, w, wg, b, bg, *, activation: F.linear(x, w, b))
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

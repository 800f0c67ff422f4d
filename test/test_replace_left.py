"""torchops.nn.replace: modules with gates that are left as they are, and why."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from test_replace_gates import Functional, SwiGLU
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from torchops.nn import Replacements, replace

TICKS = itertools.count()


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


def of_this_call(value: Callable[[Any], float]) -> Callable[[], nn.Module]:
    """A forward with a branch that not all calls take."""

    def function(m: Any, x: Tensor) -> Tensor:
        return m.a(x) * m.b(x).sigmoid() * (2 if value(m) > 0.5 else 3)

    return lambda: Functional(function)


class Slotted:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


class Buffered(SwiGLU):
    child: Any

    def __init__(self, change: Callable[[Any], object]) -> None:
        super().__init__()
        self.child, self.change = nn.Module(), change
        self.child.register_buffer("steps", torch.zeros(()))
        self.child.calls, self.child.log, self.child.slotted = 0, {"calls": [0]}, Slotted()

    def forward(self, x: Tensor) -> Tensor:
        self.change(self.child)
        return super().forward(x)


def counted(child: Any) -> None:
    child.calls += 1


def logged(child: Any) -> None:
    child.log["calls"][0] += 1


def catches(of_size: Callable[[Any], Any]) -> Callable[[], nn.Module]:
    """A forward that does something else for sizes that no trial has."""

    def function(m: Any, x: Tensor) -> Tensor:
        y = m.a(x) * m.b(x).sigmoid()
        try:
            return y * 2 if of_size(x.shape[0]) else y
        except Exception:
            return y

    return lambda: Functional(function)


class Drops(SwiGLU):
    """Stochastic depth."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.rand(()).item() < 0.3:
            return x
        return x + super().forward(x)


class Asks(SwiGLU):
    def forward(self, x: Tensor) -> Tensor:
        u = self.gate(x)
        return F.silu(u.float() if torch.is_autocast_enabled() else u) * self.up(x)


class AsksForMode(SwiGLU):
    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.gate(x)) * self.up(x)
        return y + 1 if torch.compiler.is_compiling() else y


def hook(module: nn.Module) -> None:
    module.register_forward_hook(lambda *a: None)


class InFloat32(SwiGLU):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        with torch.autocast("cpu", enabled=False):
            return F.silu(gate.float()) * self.up(x).float()


class InAttention(SwiGLU):
    """In a context that a generator makes."""

    def forward(self, x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            x = F.scaled_dot_product_attention(x, x, x)
        return super().forward(x)


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


class Optional(SwiGLU):
    def forward(self, x: Tensor, v: float = 2.0, w: float | None = None) -> Tensor:
        return super().forward(x) * (v if w is None else w)


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
    "attention": (InAttention, ""),
    "checkpoint": (Checkpointed, "its forward cannot be traced: it asks torch.is_autocast_enabled"),
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
    "stochastic_depth": (Drops, "its forward draws random numbers"),
    "random": (of_this_call(lambda m: random.random()), "its forward draws random numbers"),
    "numpy": (of_this_call(lambda m: float(numpy.random.rand())), "its forward draws random numbers"),
    "time": (
        of_this_call(lambda m: next(TICKS) % 2),
        "its forward differs between training and evaluation, or between",
    ),
    "asks": (Asks, "its forward cannot be traced: it asks torch.is_autocast_enabled"),
    "asks_for_mode": (AsksForMode, "its forward cannot be traced: it asks torch.compiler.is_compiling"),
    "asks_for_dtype": (of_this_call(lambda m: torch.get_default_dtype().itemsize), ""),
    "catches": (catches(lambda size: size > 100), ""),
    "catches_index": (catches(lambda size: ([0] * 100 + [1] * 100)[size]), ""),
    "child_counts": (lambda: Buffered(counted), "its forward changes its attribute child.calls"),
    "child_logs": (lambda: Buffered(logged), "its forward changes its attribute child.log.calls.0"),
    "child_slots": (
        lambda: Buffered(lambda child: counted(child.slotted)),
        "its forward changes its attribute child.slotted.calls",
    ),
    "buffer": (lambda: Buffered(lambda child: child.steps.add_(1)), "its forward overwrites tensors"),
    "buffer_data": (
        lambda: Buffered(lambda c: c._buffers["steps"].add_(1)),
        "its forward changes its attribute child.steps",
    ),
    "counts": (lambda: Functional(counts), "its forward changes its attribute calls"),
    "remembers": (Remembers, "its forward changes its attribute all"),
    "masked": (Masked, "its forward cannot be traced: it asks for the type of its argument mask"),
    "residual": (Residual, "its graph does not read its argument residual, but calls with other arguments"),
    "optional": (Optional, "its graph does not read its argument v, but calls with other arguments, such as None, may"),
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
    if reason:  # the source of a lambda elsewhere says nothing of gates
        assert reason in "; ".join(report.left.values())


def test_beside_scripted_modules() -> None:
    """Their tables of modules and parameters are not dicts."""
    scripted, traced = torch.jit.script(nn.Linear(3, 3)), torch.jit.trace(nn.Linear(3, 3), torch.zeros(1, 3))
    model, x = nn.Sequential(nn.Linear(3, 6), nn.GLU(), scripted, traced), torch.randn(5, 3)
    expected = model(x)
    assert replace(model).replaced == ("0",)
    torch.testing.assert_close(model(x), expected)
    assert model[2] is scripted
    assert model[3] is traced
    assert replace(torch.jit.script(nn.Sequential(nn.Linear(3, 6), nn.GLU()))).replaced == ()


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
    no_factor, other = "the sigmoid of its a is no factor of one product", "tanh computes neither a sigmoid nor a SiLU"
    for function, left in (
        (lambda m, x: (lambda z: z * torch.sigmoid(z))(m.a(x)), {"": no_factor}),
        (lambda m, x: (lambda s: s * m.b(x) + s)(torch.sigmoid(m.a(x))), {"": no_factor}),
        (lambda m, x: torch.tanh(m.a(x)) * m.b(x), {"": other}),
        (lambda m, x: F.glu(m.a(x), 0), {}),
        (lambda m, x: (lambda halves: halves[0] * torch.sigmoid(halves[1]))(m.a(x).chunk(2, dim=0)), {}),
    ):
        model = Functional(function)
        assert replace(model) == Replacements((), left)
        assert type(model) is Functional


class Lazy(SwiGLU):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LazyLinear(6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return F.silu(self.gate(x)) * self.up(x)


def test_uninitialized_parameters() -> None:
    """A module that cannot be tried stops no other one."""
    model = nn.ModuleDict({"glu": SwiGLU(), "lazy": Lazy()})
    report = replace(model)
    assert report.replaced == ("glu",)
    assert "uninitialized parameter" in report.left["lazy"]


def test_random_states_stay() -> None:
    """Also where a forward draws from them while it is traced or tried."""

    class Draws(SwiGLU):
        def forward(self, x: Tensor) -> Tensor:
            torch.rand(3), random.random(), numpy.random.rand()
            return super().forward(x)

    model, numbers = nn.ModuleList([Draws(), SwiGLU()]), []
    for i in range(2):
        torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
        if i:
            assert replace(model).replaced == ("1",)
        numbers.append((torch.rand(()).item(), random.random(), numpy.random.rand()))
    assert numbers[0] == numbers[1]

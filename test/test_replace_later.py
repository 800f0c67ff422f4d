"""torchops.nn.replace: what a forward decides or remembers outside its graph, and what changes after replacing it."""

from __future__ import annotations

import copy
import pickle
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchops.nn import replace


class Gated(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.up, self.gate = (nn.Linear(8, 8, bias=bias, dtype=torch.float64) for _ in range(2))
        self.more()

    def more(self) -> None:
        pass

    def gated(self, x: Tensor) -> Tensor:
        return self.up(x) * torch.sigmoid(self.gate(x))


def values(seed: int = 0) -> Tensor:
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer() -> nn.Linear:
    return nn.Linear(8, 8, dtype=torch.float64)


def parameter(value: float) -> nn.Parameter:
    return nn.Parameter(torch.full((8,), value, dtype=torch.float64))


class Chained(Gated):
    """Through containers that may be empty."""

    def more(self) -> None:
        self.first = nn.Sequential()
        self.adapters = nn.ModuleList()
        self.others = Others([layer()])
        self.scales = nn.ParameterList([parameter(0.5)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for part in (*self.adapters, *self.others):
            x = part(x)
        for scale in self.scales:
            x = x * scale
        return self.gated(x)


class Others(nn.ModuleList):
    pass


class Optional(Gated):
    scale: Tensor | None
    shift: Tensor | None

    def __init__(self) -> None:
        super().__init__(bias=False)

    def more(self) -> None:
        self.register_parameter("scale", None)
        self.register_buffer("shift", None)
        self.adapter: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.scale is None else x * self.scale
        x = x if self.shift is None else x + self.shift
        x = x if self.adapter is None else self.adapter(x)
        return self.gated(x)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8, dtype=torch.float64)

    def encode(self, x: Tensor) -> Tensor:
        return self.norm(x)


class Doubled(Encoder):
    def encode(self, x: Tensor) -> Tensor:
        return 2 * self.norm(x)


class Encodes(Gated):
    def more(self) -> None:
        self.encoder = Encoder()

    def forward(self, x: Tensor) -> Tensor:
        return self.gated(self.encoder.encode(x))


def twice(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return 2 * out


LATER: dict[str, tuple[type[nn.Module], Callable[[Any], object]]] = {
    "part of an empty ModuleList": (Chained, lambda m: m.adapters.append(layer())),
    "part of an empty Sequential": (Chained, lambda m: m.first.append(layer())),
    "hook of an empty Sequential": (Chained, lambda m: m.first.register_forward_hook(twice)),
    "part of a subclass": (Chained, lambda m: m.others.append(layer())),
    "parameter of a list": (Chained, lambda m: m.scales.append(parameter(2))),
    "bias": (Optional, lambda m: setattr(m.up, "bias", parameter(1))),
    "bias of the gate": (Optional, lambda m: setattr(m.gate, "bias", parameter(1))),
    "parameter": (Optional, lambda m: setattr(m, "scale", parameter(2))),
    "buffer": (Optional, lambda m: setattr(m, "shift", torch.ones(8, dtype=torch.float64))),
    "module": (Optional, lambda m: setattr(m, "adapter", layer())),
    "another encoder": (Encodes, lambda m: setattr(m, "encoder", Doubled())),
    "fewer rows of the gate": (Optional, lambda m: setattr(m.gate, "weight", nn.Parameter(m.gate.weight[:1].detach()))),
}


@pytest.mark.parametrize("name", LATER)
def test_parts_that_come_later(name: str) -> None:
    make, change = LATER[name]
    model, x = make(), values()
    former = copy.deepcopy(model)
    assert replace(model).replaced == ("",)
    before = former(x)
    torch.testing.assert_close(model(x), before)
    for changed in (former, model):
        torch.manual_seed(0)
        change(changed)
    assert not torch.allclose(former(x), before)
    torch.testing.assert_close(model(x), former(x))


def test_a_module_that_goes_later() -> None:
    model = Optional()
    model.adapter = layer()
    former = copy.deepcopy(model)
    assert replace(model).replaced == ("",)
    model.adapter = former.adapter = None
    x = values()
    torch.testing.assert_close(model(x), former(x))


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


def reverses(m: Any, x: Tensor) -> Tensor:
    return m.gated(Reverse.apply(x))


def drops(m: Any, x: Tensor) -> Tensor:
    return F.dropout(m.gated(x), 0.5, m.drop.training)


def is_alone(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return m.gated(2 * x if x is y else x + y) + (x if x is y else 0)


HELD: dict[str, tuple[Any, Callable[[Any], float]]] = {
    "random.Random": (random.Random(0), lambda held: held.random()),
    "torch.Generator": (torch.Generator().manual_seed(0), lambda held: torch.rand((), generator=held).item()),
    "iterator": (iter(range(100)), lambda held: float(next(held))),
}


def draws(name: str) -> Callable[[Any, Tensor], Tensor]:
    # The value decides nothing on any trace, so that only what it came from can tell.
    return lambda m, x: m.gated(x) * (1.0 if HELD[name][1](m.held) < 100 else 0.0)


LEFT: dict[str, tuple[Callable[..., Tensor], str]] = {
    "autograd.Function": (reverses, "calls Reverse, a torch.autograd.Function"),
    "training of a part": (drops, "differs between training and evaluation"),
    "identity": (is_alone, "compares by `is`"),
    **{name: (draws(name), "changes its attribute held") for name in HELD},
}


@pytest.mark.parametrize("name", LEFT)
def test_what_no_graph_shows(name: str) -> None:
    forward, reason = LEFT[name]
    model: Any = type("Model", (Gated,), {"forward": forward, "__module__": __name__})()
    model.drop, model.held = nn.Dropout(), copy.deepcopy(HELD.get(name, (None,))[0])
    model.eval()
    replacements = replace(model)
    assert not replacements.replaced
    assert reason in replacements.left[""]
    if name in HELD:
        start, value = HELD[name]
        assert value(model.held) == value(copy.deepcopy(start))
    apply: Any = torch.autograd.Function.apply
    assert apply.__func__.__module__ == "torch.autograd.function"


class Masked(Gated):
    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return self.gated(x) if mask is None else self.gated(x) * mask


class ScaledBy(Gated):
    def forward(self, x: Tensor, scale: Any = 2.0) -> Tensor:
        return self.gated(x) if scale is None else self.gated(x) * scale


@pytest.mark.parametrize("kind", [Masked, ScaledBy])
def test_none_for_an_argument(kind: type[Gated]) -> None:
    model = kind()
    former = copy.deepcopy(model)
    assert replace(model).replaced == ("",)
    x, mask = values(), values(1)
    torch.testing.assert_close(model(x, mask), former(x, mask))
    torch.testing.assert_close(model(x, None), former(x, None))


class Locked(Gated):
    def more(self) -> None:
        self.lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.lock = threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        return self.gated(x)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_states_of_their_own(copied: Callable[[nn.Module], nn.Module]) -> None:
    model, x = Locked(), values()
    assert replace(model).replaced == ("",)
    again = copied(model)
    assert type(again) is type(model)
    assert again.lock is not model.lock
    torch.testing.assert_close(again(x), model(x))


class Reduced(Gated):
    def __reduce__(self) -> Any:
        return type(self), (), vars(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.gated(x)


class WithArguments(Gated):
    size: int

    def __new__(cls, *args: Any, size: int = 0) -> WithArguments:
        made = super().__new__(cls)
        made.size = size
        return made

    def __init__(self, size: int = 0) -> None:
        super().__init__()

    def __getnewargs_ex__(self) -> Any:
        return (), {"size": self.size}

    def forward(self, x: Tensor) -> Tensor:
        return self.gated(x) * self.size


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("make", [Reduced, lambda: WithArguments(size=3)])
def test_pickled_in_ways_of_their_own(make: Callable[[], Gated], copied: Callable[[nn.Module], nn.Module]) -> None:
    model, x = make(), values()
    assert replace(model).replaced == ("",)
    again = copied(model)
    assert type(again) is type(model)
    torch.testing.assert_close(again(x), model(x))


REGISTERED: dict[str, type] = {}


class Registered(Gated):
    def __init_subclass__(cls) -> None:
        REGISTERED[cls.__name__] = cls


class Scaled(Registered):
    def forward(self, x: Tensor) -> Tensor:
        return self.gated(x)


def test_registries_of_classes_stay() -> None:
    assert replace(Scaled()).replaced == ("",)
    assert {"Scaled": Scaled} == REGISTERED


def test_sparse_values() -> None:
    class Product(Gated):
        def forward(self, v: Tensor, x: Tensor) -> Tensor:
            return v * torch.sigmoid(self.gate(x))

    model, x = Product(), values()
    former = copy.deepcopy(model)
    assert replace(model).replaced == ("",)
    v = torch.eye(3, 8, dtype=torch.float64).to_sparse()
    torch.testing.assert_close(model(v, x).to_dense(), former(v, x).to_dense())

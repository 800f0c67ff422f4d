"""replace() on models that repeat layers: each kind of layer is tried once, and no two kinds are taken for one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchops
from torchops import replace
from torchops.convert import declared
from torchops.convert.registry import identity
from torchops.convert.swapped import Swapped


class Scaled(nn.Module):
    """A gate that depends on attributes of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.gate = nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.scale, self.sizes, self.options = 2.0, [1, 2], {"shift": (0.5, "a")}

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.value(x) * self.gate(x).sigmoid()
        return out * self.scale * len(self.sizes) + self.options["shift"][0]


class Fused(nn.Module):
    def __init__(self, of: Any) -> None:
        super().__init__()
        self.value, self.gate, self.norm = of.value, of.gate, of.norm
        self.scale, self.sizes, self.options = of.scale, of.sizes, of.options

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.value, self.gate
        out = torchops.glu(x, value.weight, gate.weight, value.bias, gate.bias)
        return out * self.scale * len(self.sizes) + self.options["shift"][0]


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    modules: list[nn.Module] = []
    trial = declared._tried

    def counted(module: nn.Module, *others: Any) -> Any:
        modules.append(module)
        return trial(module, *others)

    monkeypatch.setattr(declared, "_tried", counted)
    return modules


def test_each_kind_is_tried_once(tried: list[nn.Module]) -> None:
    model: Any = nn.Sequential(*(Scaled() for _ in range(5)))
    model[2].train(False)
    model[3].requires_grad_(False)
    original = copy.deepcopy(model)
    assert replace(model, {Scaled: Fused}).replaced == tuple("01234")
    assert len(tried) == 1
    assert [layer.training for layer in model] == [True, True, False, True, True]
    x = torch.randn(3, 6)
    torch.testing.assert_close(model(x), original(x), rtol=1e-4, atol=1e-4)


CHANGES: dict[str, Callable[[Any], object]] = {
    "number": lambda m: setattr(m, "scale", 3.0),
    "type of a number": lambda m: setattr(m, "scale", 2),
    "list": lambda m: m.sizes.append(3),
    "value in a dict": lambda m: m.options.update(shift=(0.25, "a")),
    "another object": lambda m: setattr(m, "marker", object()),
    "hook": lambda m: m.gate.register_forward_hook(lambda *a: None),
    "dtype": lambda m: m.double(),
    "missing bias": lambda m: m.gate.register_parameter("bias", None),
    "missing part": lambda m: m.register_module("norm", None),
    "shape": lambda m: m.add_module("gate", nn.Linear(6, 1)),
    "class of a part": lambda m: m.add_module("norm", nn.LayerNorm(6)),
    "buffer": lambda m: m.register_buffer("counter", torch.zeros(())),
    "device": lambda m: m.to("meta"),
    "tied parameters": lambda m: setattr(m.gate, "weight", m.value.weight),
    "one part in two places": lambda m: setattr(m, "gate", m.value),
    "class of a parameter": lambda m: setattr(m.gate, "weight", type("Mine", (nn.Parameter,), {})(m.gate.weight)),
    "forward of its own": lambda m: vars(m).update(forward=lambda x: x),
}


@pytest.mark.parametrize("change", CHANGES)
def test_no_two_kinds_are_taken_for_one(change: str) -> None:
    module: Any = Scaled()
    other = copy.deepcopy(module)
    assert identity(module) == identity(other)
    CHANGES[change](other)
    assert identity(module) != identity(other)


def test_layers_that_differ(tried: list[nn.Module]) -> None:
    """Each keeps what its own forward does."""
    model: Any = nn.ModuleList(Scaled() for _ in range(6))
    model[1].scale = 5.0
    model[2].sizes = [1, 2, 3]
    model[3].gate.register_forward_hook(lambda *a: None)
    model[4].options["shift"] = (-1.0, "b")
    original = copy.deepcopy(model)
    report = replace(model, {Scaled: Fused})
    assert report.replaced == ("0", "1", "2", "4", "5")
    assert report.left == {"3": "gate: Linear has hooks"}
    assert len(tried) == 4
    assert sum(isinstance(module, Swapped) for module in model) == 5
    x = torch.randn(3, 6)
    for new, old in zip(model, original, strict=True):
        torch.testing.assert_close(new(x), old(x), rtol=1e-4, atol=1e-4)

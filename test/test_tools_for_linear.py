"""Tools that look for `nn.Linear` and put something else in its place: they change a model as they would change one of
PyTorch's own layers, or leave a layer as it is, or are told that they cannot have it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchops
from torchops.nn import (
    GLU,
    AttentionPairBias,
    Dense,
    Gate,
    PairLayer,
    Transition,
    TriangleAttention,
    TriangleMultiplicativeUpdate,
)


class Adapter(nn.Module):
    """Adds a product of low rank to a linear layer, and has its parameters, as the layers of PEFT do."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = layer
        self.down = nn.Linear(layer.in_features, 2, bias=False, dtype=layer.weight.dtype)
        self.up = nn.Linear(2, layer.out_features, bias=False, dtype=layer.weight.dtype)

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    @property
    def bias(self) -> Tensor:
        return self.base_layer.bias

    def forward(self, *args: Any) -> Tensor:
        return self.base_layer(*args) + self.up(self.down(args[0]))


class Observed(nn.Linear):
    """A subclass that computes something else, as that of quantization-aware training does."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, (self.weight * 8).round() / 8, self.bias)


def adapter(layer: nn.Linear) -> nn.Module:
    torch.manual_seed(layer.in_features)  # the same for the same layer of two models
    return Adapter(layer)


def observed(layer: nn.Linear) -> nn.Module:
    made = Observed.__new__(Observed)
    made.__dict__ = layer.__dict__  # with all that it holds, as PEFT and torchao make theirs of a layer
    return made


TOOLS = [adapter, observed]


def use(tool: Callable[[nn.Linear], nn.Module], model: nn.Module) -> nn.Module:
    """On every `nn.Linear` of `model`."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, tool(child))
    return model


def subclasses(kind: type[nn.Module]) -> Iterator[type[nn.Module]]:
    for each in kind.__subclasses__():
        yield each
        yield from subclasses(each)


def test_no_module_is_a_linear_layer_that_computes_something_else() -> None:
    ours = [kind for kind in subclasses(nn.Linear) if kind.__module__.partition(".")[0] == "torchops"]
    assert [kind for kind in ours if inspect.getattr_static(kind, "forward") is not nn.Linear.forward] == []


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("bias", [True, False])
def test_a_gate_is_left(tool: Callable[[nn.Linear], nn.Module], bias: bool) -> None:
    x, v = torch.randn(5, 6), torch.randn(5, 7)
    for layer, inputs in ((Dense(6, 7, bias), (x,)), (Gate(6, 7, bias), (v, x))):
        model = nn.ModuleDict({"layer": layer, "other": nn.Linear(7, 3)})
        expected = layer(*inputs)
        use(tool, model)
        assert model["layer"] is layer
        assert torch.equal(layer(*inputs), expected)
        assert type(model["other"]) is not nn.Linear


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize(
    "module",
    [
        GLU(4, 4),
        AttentionPairBias(4, 4, 2),
        Transition(4),
        TriangleMultiplicativeUpdate(4),
        TriangleAttention(4, 2, 2),
        PairLayer(4, 2, 2),
    ],
    ids=lambda module: type(module).__name__,
)
def test_a_layer_that_is_read_is_refused(tool: Callable[[nn.Linear], nn.Module], module: nn.Module) -> None:
    before = [type(each) for each in module.modules()]
    with pytest.raises(TypeError, match=r"^torchops\.nn\.\w+\.\w+: expected [\w.]+ to be a plain torch\.nn\.Linear, "):
        use(tool, nn.Sequential(module))
    assert [type(each) for each in module.modules()] == before


class SwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Gated(nn.Module):
    """A gate that `replace` finds twice: as a Dense, and as the factor that it is."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value = nn.Sequential(nn.Linear(6, 6), nn.Sigmoid()), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(x) * self.value(x)


def a_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 10), nn.Sigmoid(), nn.Linear(10, 12), nn.GLU(), SwiGLU(), nn.Tanh(), Gated()
    ).double()


@pytest.mark.parametrize("tool", TOOLS)
def test_before_replace(tool: Callable[[nn.Linear], nn.Module]) -> None:
    """What the tool has made of a layer is not replaced."""
    x = torch.randn(5, 6, dtype=torch.float64)
    model = use(tool, a_model())
    expected = model(x)
    assert not torch.allclose(expected, a_model()(x))
    assert torchops.replace(model).replaced == ()
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("tool", TOOLS)
def test_after_replace(tool: Callable[[nn.Linear], nn.Module]) -> None:
    """The tool takes the layers that are linear layers still, and they compute what it has made of them."""
    x = torch.randn(5, 6, dtype=torch.float64)
    model, written = a_model(), a_model()
    torchops.replace(model)
    left = [name for name, part in model.named_modules() if hasattr(part, "weight") and type(part) is not nn.Linear]
    assert left == ["0", "2", "6.gate.0"]
    use(tool, model)
    for parent, name in ((written, "0"), (written, "2"), (written.get_submodule("6.gate"), "0")):
        setattr(parent, name, _Hidden(parent.get_submodule(name)))
    use(tool, written)
    torch.testing.assert_close(model(x), written(x))
    assert not torch.allclose(written(x), a_model()(x))


class _Hidden(nn.Module):
    """A linear layer that no tool finds."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def test_replaced_models_exchange_state_dicts() -> None:
    x = torch.randn(5, 6, dtype=torch.float64)
    model, other = a_model(), a_model()
    torchops.replace(model)
    for one, two in ((model, other), (other, model)):
        for parameter in one.parameters():
            nn.init.normal_(parameter)
        two.load_state_dict(copy.deepcopy(one.state_dict()))
        torch.testing.assert_close(one(x), two(x))

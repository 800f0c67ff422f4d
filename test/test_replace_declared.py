"""torchops.replace: classes for which a replacement is declared, by the user and for packages."""

from __future__ import annotations

import copy
import importlib
import pickle
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checks import assert_all_close, random_like
from torch import Tensor, nn
from torch.nn.utils import prune

import torchops
from torchops import replace
from torchops.convert.swapped import Swapped


class SwiGLU(nn.Module):
    def __init__(self, features: int = 6, hidden: int = 8) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(features, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, features)
        self.scale = nn.Parameter(torch.ones(features))
        self.shift: Tensor
        self.register_buffer("shift", torch.zeros(features))
        self.note = "kept"

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x)) * self.scale + self.shift

    def doubled(self, x: Tensor) -> Tensor:
        return 2 * self(x)


class Fused(nn.Module):
    """What takes the place of a SwiGLU."""

    def __init__(self, of: SwiGLU) -> None:
        super().__init__()
        self.gate, self.up, self.down, self.scale = of.gate, of.up, of.down, of.scale
        self.register_buffer("shift", of.shift)

    def hidden(self, x: Tensor) -> Tensor:
        return torchops.glu(x, self.up.weight, self.gate.weight, activation="silu")

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.hidden(x)) * self.scale + self.shift


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = SwiGLU()
        self.rest = nn.Sequential(SwiGLU(), nn.Linear(6, 6), nn.Sigmoid())
        self.again = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.rest(self.first(x)))


def x(rows: int = 5) -> Tensor:
    return random_like(torch.empty(rows, 6))


def values(model: nn.Module, features: Tensor) -> list[Tensor]:
    leaf = features.clone().requires_grad_()
    out = model(leaf)
    leaves = [leaf, *(p for p in model.parameters() if p.requires_grad)]
    return [out, *torch.autograd.grad(out, leaves, random_like(out.detach(), 1), allow_unused=True)]


def glus(model: nn.Module, features: Tensor) -> int:
    """How many operators a call runs."""
    with torch.profiler.profile() as profile:
        model(features)
    return [event.name for event in profile.events()].count("myops::glu")


def test_declared() -> None:
    """Parameters, names, attributes, methods and hooks stay; values and gradients too; again does nothing."""
    model = Model()
    original = copy.deepcopy(model)
    parameters, names = dict(model.named_parameters()), list(model.state_dict())
    report = replace(model, {SwiGLU: Fused})
    assert report.replaced == ("first", "rest.0", "rest.1", "again")
    assert report.left == {}
    assert [(match.name, match.kind) for match in report][:2] == [("first", "SwiGLU"), ("rest.0", "SwiGLU")]
    assert isinstance(model.first, Swapped)
    assert model.again is model.first
    assert list(model.state_dict()) == names
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    for remade in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_all_close(values(remade, x()), values(original, x()), atol=1e-5, rtol=1e-4)
        assert glus(remade, x()) == 3
    assert model.first.note == "kept"
    assert_all_close([model.first.doubled(x())], [original.first.doubled(x())], atol=1e-5, rtol=1e-4)
    assert not replace(model, {SwiGLU: Fused})
    original.load_state_dict(model.state_dict())
    model.load_state_dict(original.state_dict())


def test_modes_dtypes_and_devices() -> None:
    """They reach what was swapped."""
    model = Model()
    original = copy.deepcopy(model)
    replace(model, {SwiGLU: Fused})
    for change in (nn.Module.eval, nn.Module.train, nn.Module.double, lambda m: m.requires_grad_(False)):
        for m in (model, original):
            change(m)
        features = x().to(model.first.scale.dtype)
        assert_all_close(values(model, features), values(original, features), atol=1e-5, rtol=1e-4)
        assert glus(model, features) == 3
    former = model.first.__dict__["_former"]
    assert model.eval().first.training is former.training is False
    meta: Any = Model().to("meta")
    assert replace(meta, {SwiGLU: Fused}).left == {}
    meta.to_empty(device="cpu")
    with torch.no_grad():
        for parameter, value in zip(meta.parameters(), Model().parameters(), strict=True):
            parameter.copy_(value)
        meta.first.shift.zero_()
        meta.rest[0].shift.zero_()
    assert glus(meta, x()) == 3
    assert_all_close([meta.first(x())], [meta.first.__dict__["_former"](x())], atol=1e-5, rtol=1e-4)


class LowRank(nn.Module):
    """A layer beside another one, as libraries for fine-tuning make it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.extra = base, nn.Linear(6, 8)

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.extra(x)


class Tagged(Tensor):
    """A weight whose layer computes something else, and which cannot be split."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.chunk, torch.chunk, torch.split):
            raise NotImplementedError(func)
        out = super().__torch_function__(func, types, args, kwargs or {})
        return 2 * out if func is F.linear else out


LATER: dict[str, Callable[[Any], object]] = {
    "another layer": lambda m: setattr(m, "up", LowRank(m.up)),
    "hook": lambda m: m.up.register_forward_hook(lambda module, args, out: 0 * out),
    "parametrization": lambda m: nn.utils.parametrizations.weight_norm(m.up),
    "pruning": lambda m: prune.l1_unstructured(m.up, "weight", 0.5),
    "own forward": lambda m: setattr(m.up, "forward", lambda x: m.gate(x)),
    "tensor subclass": lambda m: setattr(m.up, "weight", nn.Parameter(m.up.weight.detach().as_subclass(Tagged))),
    "bias": lambda m: setattr(m.up, "bias", nn.Parameter(torch.ones(8))),
    "hook of a layer that is called": lambda m: m.down.register_forward_hook(lambda module, args, out: 0 * out),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", LATER)
def test_layers_that_change_later(name: str, compiled: bool) -> None:
    """The former forward calls them."""
    model: Any = nn.ModuleList([SwiGLU()])
    original = copy.deepcopy(model)
    replace(model, {SwiGLU: Fused})
    for m in (model, original):
        torch.manual_seed(0)
        LATER[name](m[0])
    # TorchDynamo would take this subclass for a plain tensor, in the former forward, too.
    compiled = compiled and name != "tensor subclass"
    function = torch.compile(model[0], backend="eager") if compiled else model[0]
    with torch.no_grad():
        assert_all_close([function(x())], [original[0](x())], atol=1e-6, rtol=1e-5)
        assert glus(model[0], x()) == 0


def test_new_parameters() -> None:
    """Of a layer or of the module itself are read where they are."""
    model: Any = nn.ModuleList([SwiGLU()])
    original = copy.deepcopy(model)
    replace(model, {SwiGLU: Fused})
    for m in (model[0], original[0]):
        torch.manual_seed(0)
        m.up.weight = nn.Parameter(torch.randn(8, 6))
        m.scale = nn.Parameter(torch.full((6,), 3.0))
        m.shift = torch.ones(6)
    assert_all_close([model[0](x())], [original[0](x())], atol=1e-5, rtol=1e-4)
    assert glus(model[0], x()) == 1


# --- packages --------------------------------------------------------------------------------------------------------

MODELS = ["llama.Llama", "mistral.Mistral", "qwen2.Qwen2", "qwen3.Qwen3", "phi3.Phi3", "olmo.Olmo", "olmo2.Olmo2"]
MODELS += ["granite.Granite", "cohere.Cohere", "glm.Glm"]


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("name", MODELS)
def test_transformers(name: str, activation: str) -> None:
    """Whole models of it. With another activation, their layers stay."""
    transformers: Any = importlib.import_module("transformers")
    kind = name.partition(".")[2]
    sizes = {"hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "vocab_size": 31, "head_dim": 6}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = getattr(transformers, f"{kind}Config")(
        **sizes, **tokens, num_attention_heads=4, num_key_value_heads=2, hidden_act=activation
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    former, ids = copy.deepcopy(model), torch.randint(31, (2, 7))
    report = replace(model)
    assert report.replaced == (("model.layers.0.mlp", "model.layers.1.mlp") if activation == "silu" else ())
    assert report.left == {}
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, former(ids).logits)

"""torchops.nn.replace: which activations it recognises, and what it says of what looks like a gate and is left."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_layers_read import Doubles
from test_replace_gates import Functional, Packed, SwiGLU, gates_of, silu_first
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrize

from torchops.nn import replace
from torchops.nn.layers import LinearParameters


class OfFunction(nn.Module):
    """As transformers has its activations."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, input: Tensor) -> Tensor:
        return self.function(input)


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return grad * s * (1 + x * (1 - s))


class StraightThrough(Swish):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class DropsInTraining(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.silu(F.dropout(x, 0.5, self.training))


class Later(nn.Module):
    """What only a call in training does."""

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x) + 1 if self.training else F.silu(x)


class OfAll(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x - x.mean())


def hooked() -> nn.Module:
    module = OfFunction(F.silu)
    module.register_forward_hook(lambda m, args, out: None)
    return module


SWISH: Any = Swish.apply
STRAIGHT: Any = StraightThrough.apply
RECOGNISED: dict[str, Callable[[], nn.Module]] = {
    "silu": lambda: OfFunction(F.silu),
    "sigmoid": lambda: OfFunction(torch.sigmoid),
    "written": lambda: OfFunction(lambda x: x * torch.sigmoid(x)),
    "exponential": lambda: OfFunction(lambda x: x / (1 + torch.exp(-x))),
    "tanh": lambda: OfFunction(lambda x: 0.5 * (1 + torch.tanh(x / 2))),
    "float32": lambda: OfFunction(lambda x: F.silu(x.float()).to(x.dtype)),
    "autograd.Function": lambda: OfFunction(SWISH),
}
OTHERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "gelu": (nn.GELU, "GELU computes neither a sigmoid nor a SiLU"),
    "tanh": (nn.Tanh, "Tanh computes neither a sigmoid nor a SiLU"),
    "quick gelu": (lambda: OfFunction(lambda x: x * torch.sigmoid(1.702 * x)), "OfFunction computes neither"),
    "gradient": (lambda: OfFunction(STRAIGHT), "OfFunction computes neither"),
    "hook": (hooked, "act: OfFunction has hooks"),
    "in training": (Later, ""),
    "dropout": (DropsInTraining, ""),
    "of all elements": (OfAll, ""),
}


class Gated(nn.Module):
    def __init__(self, act: nn.Module, packed: bool = False) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(6, 16 if packed else 8), nn.Linear(6, 8)
        self.act, self.packed = act, packed

    def forward(self, x: Tensor) -> Tensor:
        if self.packed:
            gate, up = self.gate_proj(x).chunk(2, dim=-1)
            return self.up_proj(x) + up * self.act(gate)
        out: Tensor = self.act(self.gate_proj(x)) * self.up_proj(x)
        return out


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", RECOGNISED)
def test_recognised(name: str, packed: bool) -> None:
    """By what they compute; a hook of one that comes later is called."""
    model, x = Gated(RECOGNISED[name](), packed).double(), torch.randn(5, 6, dtype=torch.float64)
    former = copy.deepcopy(model)
    assert replace(model).replaced == ("",)
    assert gates_of(model, x) == 1
    torch.testing.assert_close(model(x), former(x), atol=1e-6, rtol=1e-6)
    model.act.register_forward_hook(lambda m, args, out: 2 * out)
    former.act.register_forward_hook(lambda m, args, out: 2 * out)
    torch.testing.assert_close(model(x), former(x))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", OTHERS)
def test_not_recognised(name: str, packed: bool) -> None:
    """What computes something else is left, and named."""
    make, reason = OTHERS[name]
    model, x = Gated(make(), packed), torch.randn(5, 6)
    former = copy.deepcopy(model)
    report = replace(model)
    assert report.replaced == ()
    assert reason in report.left.get("", "")
    results = []
    for m in (model, former):
        torch.manual_seed(0)
        results.append(torch.autograd.grad(m.train()(x).sum(), [*m.parameters()], allow_unused=True))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


FUNCTIONS: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "returned": (lambda m, x: torch.sigmoid(m.a(x)), "the sigmoid of its a is no factor of one product"),
    "method": (lambda m, x: m.a(x).sigmoid(), "the sigmoid of its a is no factor of one product"),
    "one minus": (lambda m, x: m.b(x) * (1 - torch.sigmoid(m.a(x))), "the sigmoid of its a is no factor"),
    "lerp": (lambda m, x: torch.lerp(x, m.b(x), torch.sigmoid(m.a(x))), "the sigmoid of its a is no factor"),
    "geglu": (lambda m, x: F.gelu(m.a(x)) * m.b(x), "gelu computes neither a sigmoid nor a SiLU"),
    "reglu": (lambda m, x: m.b(x) * m.a(x).relu(), "relu computes neither a sigmoid nor a SiLU"),
    "plain": (lambda m, x: m.b(F.gelu(m.a(x))), ""),
    "silu": (lambda m, x: m.b(m.act(m.a(x))), ""),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_said_of_functions(name: str) -> None:
    function, reason = FUNCTIONS[name]
    model = Functional(function)
    report = replace(model)
    assert report.replaced == ()
    assert reason in report.left.get("", "")
    assert bool(report.left) == bool(reason)


MODELS = ["llama.Llama", "mistral.Mistral", "qwen2.Qwen2", "qwen3.Qwen3", "phi3.Phi3", "olmo.Olmo", "olmo2.Olmo2"]


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("name", MODELS)
def test_transformers(name: str) -> None:
    """Whole models of it."""
    transformers: Any = importlib.import_module("transformers")
    kind = name.partition(".")[2]
    sizes = {"hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "vocab_size": 31, "head_dim": 6}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = getattr(transformers, f"{kind}Config")(
        **sizes, **tokens, num_attention_heads=4, num_key_value_heads=2, hidden_act="silu"
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    former, ids = copy.deepcopy(model), torch.randint(31, (2, 7))
    report = replace(model)
    assert report.replaced == ("model.layers.0.mlp", "model.layers.1.mlp")
    assert report.left == {}
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, former(ids).logits)


@pytest.fixture(scope="module")
def _one_rank() -> Iterator[None]:
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Halved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / 2


DERIVED: dict[str, Callable[[Any], object]] = {
    "FSDP": fully_shard,
    "Parametrized": lambda m: parametrize.register_parametrization(m, "scale", Halved()),
}


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("prefix", DERIVED)
def test_modules_of_a_derived_class(prefix: str) -> None:
    """Tools of torch derive it from the module's own."""
    for inner in (False, True):
        model: Any = nn.ModuleDict({"it": SwiGLU()})
        DERIVED[prefix](model["it"])
        if inner:
            model = model["it"]
        former = copy.deepcopy(model) if prefix == "Parametrized" else model
        report = replace(model)
        assert report.replaced == ()
        assert report.left == {"" if inner else "it": f"{prefix}SwiGLU is not SwiGLU itself"}
        x = torch.randn(3, 6)
        torch.testing.assert_close((model if inner else model["it"])(x), (former if inner else former["it"])(x))


SUBCLASS: dict[str, Callable[[], nn.Module]] = {
    "sequential glu": lambda: nn.Sequential(nn.Linear(6, 8), nn.GLU()),
    "sequential sigmoid": lambda: nn.Sequential(nn.Linear(6, 8), nn.Sigmoid()),
    "swiglu": SwiGLU,
    "packed": lambda: Packed(silu_first),
    "gate": lambda: Functional(lambda m, x: x * torch.sigmoid(m.a(x))),
    "functional glu": lambda: Functional(lambda m, x: F.glu(m.a(x))),
}


@pytest.mark.parametrize("name", SUBCLASS)
def test_weights_of_a_subclass_later(name: str) -> None:
    """One that knows ``linear`` alone: the former forward runs."""
    model, x = SUBCLASS[name](), torch.randn(3, 6)
    former = copy.deepcopy(model)
    assert replace(model).replaced
    for m in (model, former):
        for layer in m.modules():
            if isinstance(layer, (nn.Linear, LinearParameters)):
                layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Doubles), requires_grad=False)
    y = model(x)
    torch.testing.assert_close(y, former(x))
    assert y.requires_grad == former(x).requires_grad

"""Layers of diffusion transformers and attention with pair bias of public packages, as released, and torchops' in
their place.

The packages are those of test_adapters.py.
"""

from __future__ import annotations

import copy
import importlib
import pickle
import warnings
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from checks import assert_all_close
from test_adapters import randomised
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from torchops import replace
from torchops.convert.diffusion import AttentionPairBias, DiffusionLayer

pytestmark = [pytest.mark.xdist_group("adapters")]

C, SINGLE, PAIR, HEADS, DEPTH = 24, 20, 12, 2, 2
TRANSFORMERS = {
    "boltz": "boltz.model.modules.transformersv2",
    "boltzgen": "boltzgen.model.modules.transformers",
}
ATTENTIONS = {"boltz": "boltz.model.layers.attentionv2", "boltzgen": "boltzgen.model.layers.attention"}
packages = pytest.mark.parametrize("package", TRANSFORMERS)


def released(file: str, name: str, *args: Any, **kwargs: Any) -> nn.Module:
    if find_spec(file.partition(".")[0]) is None:
        pytest.skip(f"{file.partition('.')[0]} is not installed")
    return nn.ModuleList([randomised(getattr(importlib.import_module(file), name)(*args, **kwargs))])


class Products(TorchDispatchMode):
    """Collects the inputs of the linear layers that operators compute."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "myops":
            self.inputs.append(args[[a.name for a in func._schema.arguments].index("x")])
        return func(*args, **(kwargs or {}))


def transformer(package: str) -> tuple[nn.Module, nn.Module]:
    model = released(TRANSFORMERS[package], "DiffusionTransformer", DEPTH, HEADS, C, SINGLE)
    new = copy.deepcopy(model)
    assert replace(new).replaced == tuple(f"0.layers.{i}" for i in range(DEPTH))
    assert all(isinstance(layer, DiffusionLayer) for layer in new[0].layers)  # type: ignore[index]
    return model[0], new[0]  # type: ignore[index]


def attention(package: str) -> tuple[nn.Module, nn.Module]:
    model = released(ATTENTIONS[package], "AttentionPairBias", C, PAIR, HEADS)
    new = copy.deepcopy(model)
    assert replace(new).replaced == ("0",)
    assert isinstance(new[0], AttentionPairBias)  # type: ignore[index]
    return model[0], new[0]  # type: ignore[index]


def transformer_call(samples: int = 1, keys: int = 0) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    a, s = (torch.randn(2 * samples, 7, c, generator=generator) for c in (C, SINGLE))
    bias = torch.randn(2, 7, 7 + keys, HEADS * DEPTH, generator=generator)
    mask = (torch.rand(2, 7, generator=generator) > 0.3).float()
    mask[:, 0] = 1
    kwargs: dict[str, Any] = {"multiplicity": samples}
    if keys:
        kwargs["to_keys"] = lambda x: torch.cat([x, x[:, :keys]], 1)
    return (a, s, bias, mask.repeat_interleave(samples, 0)), kwargs


def results(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in args[:3]]
    y = module(*leaves, *args[3:], **kwargs)
    cotangent = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    return [y, *torch.autograd.grad(y, [*leaves, *module.parameters()], cotangent)]


@packages
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize(("samples", "keys"), [(1, 0), (3, 0), (1, 4)], ids=["one", "samples", "keys"])
def test_transformer(package: str, samples: int, keys: int, training: bool) -> None:
    model, new = transformer(package)
    args, kwargs = transformer_call(samples, keys)
    got, expected = (results(m.train(training), args, kwargs) for m in (new, model))
    assert_all_close(got, expected, atol=2e-4, rtol=2e-4)


@packages
def test_samples_of_one_noise_level_share_the_products_with_it(package: str) -> None:
    """Rows of the conditioning that share memory are read once, with the same results."""
    model, new = transformer(package)
    (a, s, bias, mask), kwargs = transformer_call(3)
    a, bias, s, mask = a[:3], bias[:1], s[:1].expand(3, -1, -1), mask[:1].expand(3, -1)
    with torch.no_grad():
        with Products() as products:
            got = new(a, s, bias, mask, **kwargs)
        assert {x.numel() // SINGLE for x in products.inputs if x.shape[-1] == SINGLE} == {s.shape[1]}
        assert_all_close([got], [model(a, s, bias, mask, **kwargs)], atol=1e-5, rtol=1e-5)
    got, expected = (results(m, (a, s, bias, mask), kwargs) for m in (new, model))
    assert_all_close(got, expected, atol=2e-4, rtol=2e-4)


@packages
def test_attention(package: str) -> None:
    model, new = attention(package)
    generator = torch.Generator().manual_seed(0)
    s, z, keys = (torch.randn(2, *shape, generator=generator) for shape in ((5, C), (5, 7, PAIR), (7, C)))
    mask = torch.ones(2, 7)
    mask[0, 3:] = mask[1, 2] = 0
    got, expected = (results(m, (s, z), {"mask": mask, "k_in": keys}) for m in (new, model))
    assert_all_close(got, expected, atol=2e-4, rtol=2e-4)


@packages
def test_digits_under_autocast(package: str) -> None:
    """As near to float32 as the released layers are."""
    model, new = transformer(package)
    args, kwargs = transformer_call()
    with torch.no_grad():
        exact = model(*args, **kwargs)
        with torch.autocast("cpu", torch.bfloat16):
            theirs, ours = (m(*args, **kwargs) for m in (model, new))
    assert ours.dtype == theirs.dtype
    assert (ours - exact).norm() <= 1.2 * (theirs - exact).norm()


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_compiled(grad: bool) -> None:
    model, new = transformer("boltz")
    args, kwargs = transformer_call(2)
    with torch.set_grad_enabled(grad):
        assert_all_close([torch.compile(new)(*args, **kwargs)], [model(*args, **kwargs)], atol=1e-4, rtol=1e-4)


def test_state_dict_copies_and_hooks() -> None:
    model, new = transformer("boltz")
    args, kwargs = transformer_call()
    assert new.state_dict().keys() == model.state_dict().keys()
    other = randomised(copy.deepcopy(model), 5)
    new.load_state_dict(other.state_dict())
    copies = (new, copy.deepcopy(new), pickle.loads(pickle.dumps(new)))
    with torch.no_grad():
        for each in copies:
            assert_all_close([each(*args, **kwargs)], [other(*args, **kwargs)], atol=1e-4, rtol=1e-4)


class Adapted(nn.Module):
    """What a tool that adapts models puts in place of a linear layer."""

    def __init__(self, of: Any) -> None:
        super().__init__()
        self.weight = of.weight

    def forward(self, x: Tensor) -> Tensor:
        return 2 * nn.functional.linear(x, self.weight)


CHANGES = {
    "hook": (lambda m: m.adaln.s_bias.register_forward_hook(lambda _, args, y: 3 * y), "a hook"),
    "pre-hook": (lambda m: m.transition.b_to_a.register_forward_pre_hook(lambda _, args: (3 * args[0],)), "a hook"),
    "hook of a part": (lambda m: m.transition.register_forward_hook(lambda _, args, y: 3 * y), "a hook"),
    "forward": (lambda m: setattr(m.pair_bias_attn.proj_g, "forward", lambda x: 3 * x), "of its own"),
    "adapter": (lambda m: setattr(m.pair_bias_attn, "proj_k", Adapted(m.pair_bias_attn.proj_k)), "is a Adapted"),
    "part": (lambda m: setattr(m, "post_lnorm", nn.Tanh()), "is a Tanh"),
}


@packages
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_added_afterwards_takes_the_released_forward(package: str, change: str) -> None:
    """And says so."""
    model, new = transformer(package)
    args, kwargs = transformer_call(3)
    do, reason = CHANGES[change]
    unchanged = model(*args, **kwargs)
    for each in (model, new):
        do(each.layers[1])  # type: ignore[index]
    with pytest.warns(UserWarning, match=f"DiffusionTransformerLayer runs as released: .* {reason}") as seen:
        got = new(*args, **kwargs)
    assert len(seen) == 1
    expected = model(*args, **kwargs)
    assert_all_close([got], [expected], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(expected, unchanged, atol=1e-2)


@packages
def test_arguments_that_fail_as_released_are_not_written_to(package: str) -> None:
    model, new = transformer(package)
    (a, s, bias, mask), kwargs = transformer_call(3)
    for given in ((a.double(), s, bias, mask), (a, s[:, :, :-1], bias, mask), (a, s, bias, mask[:, :-1])):
        copies = [t.clone() for t in given]
        for each in (model, new):
            with pytest.raises((RuntimeError, ValueError)):
                each(*given, **kwargs)
        assert all(map(torch.equal, given, copies))


def test_a_layer_with_a_last_norm_is_left() -> None:
    layer = released(TRANSFORMERS["boltz"], "DiffusionTransformerLayer", HEADS, C, SINGLE, post_layer_norm=True)
    assert "post_lnorm" in replace(layer).left["0"]


def test_a_layer_with_two_names_stays_one() -> None:
    """Whatever gives each layer new parameters."""
    model, new = transformer("boltz")
    args, kwargs = transformer_call()
    other = randomised(copy.deepcopy(model), 5)
    new.load_state_dict({name: t.clone() for name, t in other.state_dict().items()}, assign=True)
    assert len(list(new.parameters())) == len(list(model.parameters()))
    got, expected = (results(m, args, kwargs) for m in (new, other))
    assert_all_close(got, expected, atol=2e-4, rtol=2e-4)


class OfAten(Tensor):
    """A tensor that knows ATen's operators alone."""

    inside: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inside: Tensor) -> OfAten:
        new: OfAten = Tensor._make_wrapper_subclass(cls, inside.shape, strides=inside.stride(), dtype=inside.dtype)
        new.inside = inside
        return new

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.namespace not in ("aten", "prim"):
            return NotImplemented
        args, kwargs = pytree.tree_map_only(OfAten, lambda t: t.inside, (args, kwargs or {}))
        return pytree.tree_map_only(Tensor, OfAten, func(*args, **kwargs))


@pytest.mark.parametrize("which", ["a", "s", "bias", "mask", "weights", "biases"])
def test_tensors_that_know_atens_operators_alone(which: str) -> None:
    model, new = transformer("boltz")
    args, kwargs = transformer_call()
    names = ("a", "s", "bias", "mask")
    given = [OfAten(t) if name == which else t for name, t in zip(names, args, strict=True)]
    for module in new.modules():
        for name in ("weight",) if which == "weights" else ("bias",) if which == "biases" else ():
            if isinstance(parameter := module._parameters.get(name), nn.Parameter):
                module._parameters[name] = nn.Parameter(OfAten(parameter.data), requires_grad=False)
    with torch.no_grad():
        got = new(*given, **kwargs)
        assert_all_close([got.inside], [model(*args, **kwargs)], atol=1e-4, rtol=1e-4)


@packages
def test_no_tokens_and_one_sample_beside_many(package: str) -> None:
    model, new = transformer(package)
    (a, s, bias, mask), kwargs = transformer_call(3)
    with torch.no_grad():
        assert new(a[:, :0], s[:, :0], bias[:, :0, :0], mask[:, :0], **kwargs).shape == (6, 0, C)
        call = a[:1], s[:1].expand(3, -1, -1), bias[:1], mask[:1].expand(3, -1)
        assert_all_close([new(*call, **kwargs)], [model(*call, **kwargs)], atol=1e-4, rtol=1e-4)


def test_the_gradient_of_rows_that_share_memory() -> None:
    model, new = transformer("boltz")
    (a, s, bias, mask), kwargs = transformer_call(3)
    gradients: list[Tensor] = []
    for module in (new, model):
        rows = s[:1].clone().requires_grad_().expand(3, -1, -1)
        y = module(a[:3], rows, bias[:1], mask[:1].expand(3, -1), **kwargs)
        gradients += torch.autograd.grad(y.square().sum(), rows)
    assert_all_close(gradients[:1], gradients[1:], atol=1e-3, rtol=1e-3)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`:FutureWarning")
@pytest.mark.parametrize("tool", ["prune", "weight_norm", "parametrization"])
def test_weights_that_are_computed_before_each_call(tool: str) -> None:
    model, new = transformer("boltz")
    args, kwargs = transformer_call()
    apply: Any = {
        "prune": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
        "weight_norm": lambda layer: nn.utils.weight_norm(layer),
        "parametrization": lambda layer: nn.utils.parametrizations.weight_norm(layer),
    }[tool]
    for module in (model, new):
        apply(module.layers[0].adaln.s_scale)  # type: ignore[index, union-attr]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got, expected = (results(m, args, kwargs) for m in (new, model))
    assert_all_close(got, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_layer_has_the_operators(strict: bool) -> None:
    _, new = transformer("boltz")
    args, kwargs = transformer_call()
    program = torch.export.export(new.requires_grad_(False).eval(), args, kwargs, strict=strict)
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert {"myops._linear.default", "myops.dense.default", "myops.gate.default", "myops.glu.default"} <= targets

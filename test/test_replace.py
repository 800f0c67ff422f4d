"""torchops.replace: what it puts in the place of Linear and an activation after it, and what it leaves alone."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import assert_all_close, random_like
from torch import Tensor, nn
from torch.nn.utils import prune

from torchops import replace
from torchops.convert.sequential import Applied
from torchops.nn import Dense
from torchops.nn.gates import PackedGLU


def x(rows: int = 5, columns: int = 6) -> Tensor:
    return random_like(torch.empty(rows, columns))


def pair() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), nn.Sigmoid())


class Model(nn.Module):
    """Gates at three depths, a sigmoid that belongs to no Linear and a Linear with no sigmoid."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = pair()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Tanh(), pair(), nn.Linear(6, 6)) for _ in range(2)])
        self.mixed = nn.Sequential(
            nn.Linear(6, 8), nn.Sigmoid(), nn.Linear(8, 6, bias=False), nn.Sigmoid(), nn.Dropout(), nn.Sigmoid()
        )
        self.plain = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.mixed(x) * self.gate(self.plain(x))


NAMES = ("gate.0", "blocks.0.1.0", "blocks.1.1.0", "mixed.0", "mixed.2")


def test_replaces() -> None:
    """The same Parameter objects in the same order under the same names; values and gradients stay."""
    model = Model().eval()
    original = copy.deepcopy(model)
    parameters = dict(model.named_parameters())
    report = replace(model)
    assert report.replaced == NAMES
    assert report.left == {}
    for name in NAMES:
        assert type(model.get_submodule(name)) is Dense
    assert [type(m) for m in model.mixed] == [Dense, Applied, Dense, Applied, nn.Dropout, nn.Sigmoid]
    after = dict(model.named_parameters())
    assert list(after) == list(parameters)
    assert all(after[name] is parameters[name] for name in after)
    results = []
    for m in (model, original):
        out = m(x())
        results.append([out, *torch.autograd.grad(out, list(m.parameters()), random_like(out.detach(), 2))])
    assert_all_close(*results, atol=1e-6, rtol=1e-5)
    with torch.profiler.profile() as profile:
        model(x())
    calls = {event.key: event.count for event in profile.key_averages()}
    assert calls["myops::dense"] == 5
    assert calls["aten::sigmoid"] == 1


def test_glus() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.GLU(), nn.Linear(4, 6, bias=False), nn.GLU(-1)).double()
    original, inputs = copy.deepcopy(model), [x().double().requires_grad_() for _ in range(2)]
    names = list(model.state_dict())
    assert replace(model).replaced == ("0", "2")
    assert list(model.state_dict()) == names
    assert [type(m) for m in model] == [PackedGLU, Applied, PackedGLU, Applied]
    results = []
    for m, leaf in zip((model, original), inputs, strict=True):
        out = m(leaf)
        results.append([out, *torch.autograd.grad(out, [leaf, *m.parameters()], random_like(out.detach(), 2))])
    assert_all_close(*results)
    with torch.profiler.profile() as profile:
        model(inputs[0])
    assert [event.name for event in profile.events()].count("myops::glu") == 2


class Tagged(Tensor):
    """A weight whose layer computes something else."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs or {})
        return 2 * out if func is torch.nn.functional.linear else out


def another(model: nn.Sequential) -> None:
    torch.manual_seed(1)
    layer: Any = model[0]
    model[0] = nn.Linear(layer.in_features, layer.out_features, dtype=layer.weight.dtype)


AFTERWARDS: dict[str, Callable[[Any], object]] = {
    "another layer": another,
    "tensor subclass": lambda m: setattr(m[0], "weight", nn.Parameter(m[0].weight.detach().as_subclass(Tagged))),
    "parametrized": lambda m: nn.utils.parametrizations.weight_norm(m[0]),
    "pruned": lambda m: prune.l1_unstructured(m[0], "weight", 0.5),
}


@pytest.mark.parametrize("activation", [nn.Sigmoid, nn.GLU])
@pytest.mark.parametrize("name", AFTERWARDS)
def test_what_is_done_afterwards(name: str, activation: type[nn.Module]) -> None:
    """Is done to the layer before the activation."""
    model = nn.Sequential(nn.Linear(6, 6), activation()).double()
    original = copy.deepcopy(model)
    assert replace(model).replaced == ("0",)
    for m in (model, original):
        AFTERWARDS[name](m)
    for ours in (model, *([] if name in ("pruned", "tensor subclass") else [copy.deepcopy(model)])):
        assert_all_close([ours(x().double())], [original(x().double())])


def test_pickled_pairs() -> None:
    model = pair()
    replace(model)
    again = pickle.loads(pickle.dumps(model))
    another(again)
    expected = again[0](x()).sigmoid()
    assert_all_close([again(x())], [expected])


def test_again_does_nothing() -> None:
    model = Model()
    replace(model)
    before = {name: id(module) for name, module in model.named_modules()}
    assert not replace(model)
    assert {name: id(module) for name, module in model.named_modules()} == before


def test_state_dicts_load_both_ways() -> None:
    old, new = Model(), Model()
    replace(new)
    assert list(old.state_dict()) == list(new.state_dict())
    new.load_state_dict(old.state_dict())
    assert_all_close([new.eval()(x())], [old.eval()(x())])
    other = Model()
    other.load_state_dict(new.state_dict())
    assert_all_close([other.eval()(x())], [old(x())])


def test_optimizer_goes_on() -> None:
    """An optimizer made before, with its momenta, steps the same parameters."""
    models = [Model().eval(), Model().eval()]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.1) for m in models]
    for step in range(3):
        if step == 1:
            replace(models[1])
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(x()).square().sum().backward()
            optimizer.step()
    assert_all_close(*(list(m.parameters()) for m in models), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("training", [True, False])
def test_keeps_the_state_of_the_layer(training: bool) -> None:
    model = pair().to(torch.bfloat16).train(training)
    linear = model[0]
    linear.weight.requires_grad_(False)
    linear.note = "kept"  # type: ignore[assignment]
    linear.register_buffer("count", torch.tensor(3))
    names = list(model.state_dict())
    replace(model)
    dense = model[0]
    assert type(dense) is Dense
    assert dense.training == model[1].training == training
    assert not dense.weight.requires_grad
    assert dense.bias is not None
    assert dense.bias.requires_grad
    assert dense.weight.dtype == torch.bfloat16
    assert vars(dense)["note"] == "kept"
    assert (dense.in_features, dense.out_features) == (6, 6)
    assert list(model.state_dict()) == names
    # The layer that was taken out is a Linear still, and no part of the model.
    dense.register_buffer("other", torch.tensor(1))
    assert not hasattr(linear, "other")
    assert type(linear) is nn.Linear
    for remade in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_all_close([remade(x().bfloat16())], [model(x().bfloat16())])
    assert pair().to("meta")[0].weight.is_meta
    meta = pair().to("meta")
    assert replace(meta).replaced == ("0",)
    assert meta(x().to("meta")).shape == (5, 6)


def test_hooks_of_everything_else_are_kept() -> None:
    """A hook on the Sequential sees the value that it saw before."""
    model = pair()
    seen: list[Tensor] = []
    model.register_forward_hook(lambda module, args, out: seen.append(out))
    model(x())
    assert replace(model).replaced == ("0",)
    model(x())
    assert_all_close(seen[:1], seen[1:])


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Hard(nn.Sigmoid):
    pass


class Backwards(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        for module in reversed(self):
            input = module(input)
        return input


class Reversed(nn.Sequential):
    def __iter__(self):  # type: ignore[no-untyped-def]
        return reversed(list(self._modules.values()))


def changed(change: Callable[[nn.Sequential], object]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = pair()
        change(model)
        return model

    return make


def overwritten(model: nn.Sequential, index: int) -> None:
    forward = model[index].forward
    model[index].forward = lambda input: forward(input) + 1


def subclass_weight(model: nn.Sequential) -> None:
    class Tagged(Tensor):
        pass

    model[0].weight = nn.Parameter(torch.ones(6, 6).as_subclass(Tagged))


def with_parameter(name: str, make: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    def change(model: nn.Sequential) -> None:
        setattr(model[0], name, nn.Parameter(make(getattr(model[0], name).detach())))

    return changed(change)


def hooked_glu() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.GLU())
    model[1].register_forward_hook(lambda *a: None)
    return model


LEFT = {
    "forward_hook": (changed(lambda m: m[0].register_forward_hook(lambda *a: None)), "Linear has hooks"),
    "pre_hook": (changed(lambda m: m[0].register_forward_pre_hook(lambda *a: None)), "Linear has hooks"),
    "backward_hook": (changed(lambda m: m[0].register_full_backward_hook(lambda *a: None)), "Linear has hooks"),
    "state_dict_hook": (changed(lambda m: m[0].register_state_dict_post_hook(lambda *a: None)), "Linear has hooks"),
    "load_hook": (changed(lambda m: m[0].register_load_state_dict_post_hook(lambda *a: None)), "Linear has hooks"),
    "sigmoid_hook": (changed(lambda m: m[1].register_forward_hook(lambda *a: None)), "Sigmoid has hooks"),
    "pruned": (changed(lambda m: prune.l1_unstructured(m[0], "weight", 0.5)), "Linear has hooks"),
    "parametrized": (
        changed(lambda m: nn.utils.parametrizations.weight_norm(m[0])),
        "ParametrizedLinear is not Linear itself",
    ),
    "subclass": (lambda: nn.Sequential(Doubled(6, 6), nn.Sigmoid()), "Doubled is not Linear itself"),
    "sigmoid_subclass": (lambda: nn.Sequential(nn.Linear(6, 6), Hard()), "Hard is not Sigmoid itself"),
    "own_forward": (changed(lambda m: overwritten(m, 0)), "Linear has a forward of its own"),
    "own_sigmoid": (changed(lambda m: overwritten(m, 1)), "Sigmoid has a forward of its own"),
    "compiled_layer": (changed(lambda m: m[0].compile(backend="eager")), "Linear has a forward of its own"),
    "sequential_forward": (lambda: Backwards(nn.Linear(6, 6), nn.Sigmoid()), "Backwards has a forward of its own"),
    "sequential_order": (lambda: Reversed(nn.Linear(6, 6), nn.Sigmoid()), "Reversed has a forward of its own"),
    "tensor_subclass": (changed(subclass_weight), "weight is a Tagged"),
    "sparse": (with_parameter("weight", Tensor.to_sparse), "weight is of torch.sparse_coo"),
    "sparse_csr": (with_parameter("weight", Tensor.to_sparse_csr), "weight is of torch.sparse_csr"),
    "elsewhere": (with_parameter("bias", lambda t: t.to("meta")), "bias is of another dtype or device than weight"),
    "mixed": (with_parameter("bias", Tensor.double), "bias is of another dtype or device than weight"),
    "complex": (changed(lambda m: m.to(torch.complex64)), "weight is of torch.complex64"),
    "glu_of_rows": (
        lambda: nn.Sequential(nn.Linear(6, 6), nn.GLU(0)),
        "the GLU is along dimension 0, not the last one",
    ),
    "odd_glu": (lambda: nn.Sequential(nn.Linear(6, 5), nn.GLU()), "its layer has an odd number of features"),
    "glu_hook": (lambda: hooked_glu(), "GLU has hooks"),
}


@pytest.mark.filterwarnings("ignore:Complex modules", "ignore:Sparse CSR")
@pytest.mark.parametrize("name", LEFT)
def test_leaves(name: str) -> None:
    """What does more than nn.Linear and nn.Sigmoid stays, with the reason, and the rest is replaced."""
    make, reason = LEFT[name]
    model = nn.ModuleDict({"left": make(), "right": pair()})
    children = list(model["left"]._modules.values())
    report = replace(model)
    assert report.replaced == ("right.0",)
    assert report.left == {"left.0": reason}
    assert list(model["left"]._modules.values()) == children


def test_leaves_what_is_not_a_pair() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(), nn.Sigmoid(), nn.Linear(6, 6), nn.Hardsigmoid(), Dense(6, 6))
    model.append(nn.Sigmoid())
    types = [type(m) for m in model]
    assert not replace(model)
    assert [type(m) for m in model] == types
    linear = nn.Linear(6, 6)
    assert not replace(linear)


def test_shared_layers() -> None:
    """One layer in two pairs becomes one Dense; one that also stands alone stays; a sigmoid may serve many."""
    sigmoid, linear, alone, whole = nn.Sigmoid(), nn.Linear(6, 6), nn.Linear(6, 6), pair()
    model: Any = nn.ModuleDict(
        {
            "a": nn.Sequential(linear, sigmoid, linear, sigmoid),
            "b": nn.Sequential(nn.Tanh(), linear, sigmoid),
            "c": nn.Sequential(alone, sigmoid),
            "d": nn.Sequential(alone, nn.Tanh()),
            "e": whole,
            "f": whole,
            "g": sigmoid,
        }
    )
    original = copy.deepcopy(model)
    report = replace(model)
    assert report.replaced == ("a.0", "a.2", "b.1", "e.0")
    assert report.left == {"c.0": "no sigmoid follows it as d.0"}
    assert model["a"][0] is model["a"][2] is model["b"][1]
    assert model["c"][0] is model["d"][0] is alone
    assert model["f"] is whole
    assert list(model.state_dict()) == list(original.state_dict())
    for name in model:
        assert_all_close([model[name](x())], [original[name](x())], atol=1e-6, rtol=1e-5)


def test_compiled_model() -> None:
    """A compiled model is compiled anew."""
    model = Model().eval()
    compiled: Any = torch.compile(model, backend="eager")
    expected = compiled(x())
    assert replace(compiled).replaced == tuple("_orig_mod." + name for name in NAMES)
    assert_all_close([compiled(x())], [expected])
    assert type(model.gate[0]) is Dense

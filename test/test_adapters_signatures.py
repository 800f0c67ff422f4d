"""What a later release could add to a forward: the keywords of a module of Boltz, changed here in many ways."""

from __future__ import annotations

import copy
import inspect
import sys
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
import torch
from test_adapters_layers import _stack, _streams
from test_adapters_parts import CASES, INSTALLED, Case, inputs
from torch import Tensor, nn

from torchops import replace
from torchops.convert.module import Replacement

pytestmark = [
    pytest.mark.xdist_group("adapters"),
    pytest.mark.filterwarnings("ignore:Using a non-tuple sequence", "ignore:Triton is not available"),
]


def _update(file: str, direction: str) -> Case:
    return Case(file, lambda f: getattr(f, f"TriangleMultiplication{direction.title()}")(12), Replacement)


UPDATES = {
    f"{file.partition('.')[0]}_{direction}": _update(file, direction)
    for file in ("boltz.model.layers.triangular_mult", "boltzgen.model.layers.triangular")
    for direction in ("outgoing", "incoming")
    if find_spec(file.partition(".")[0])
}
MODULES = {name: CASES[name] for name in INSTALLED} | UPDATES


def with_keyword(monkeypatch: pytest.MonkeyPatch, kind: type[nn.Module], *, keyword_only: bool = False) -> list[float]:
    """Gives the forward a keyword of an unknown meaning: a factor. Returns a list of those that it is called with."""
    original, called = kind.forward, []

    def forward(self: Any, *args: Any, factor: float = 1.0, **kwargs: Any) -> Any:
        called.append(factor)
        out = original(self, *args, **kwargs)
        return tuple(factor * t for t in out) if isinstance(out, tuple) else factor * out

    former = inspect.signature(original)
    how = inspect.Parameter.KEYWORD_ONLY if keyword_only else inspect.Parameter.POSITIONAL_OR_KEYWORD
    taken, factor = list(former.parameters.values()), inspect.Parameter("factor", how, default=1.0)
    last = next((i for i, p in enumerate(taken) if p.kind > how), len(taken))
    forward.__signature__ = former.replace(parameters=[*taken[:last], factor, *taken[last:]])  # type: ignore[attr-defined]
    monkeypatch.setattr(kind, "forward", forward)
    return called


def swapped(module: nn.Module) -> Any:
    model = nn.Sequential(copy.deepcopy(module))
    report = replace(model)
    assert report.replaced == ("0",), report.left
    return model[0]


@pytest.mark.parametrize("keyword_only", [True, False])
@pytest.mark.parametrize("name", MODULES)
def test_a_keyword_that_is_not_known(name: str, keyword_only: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its default, the operator runs. Otherwise, the released forward, with what the module has now."""
    case = MODULES[name]
    module = case.module().eval()
    called = with_keyword(monkeypatch, type(module), keyword_only=keyword_only)
    new, args = swapped(module), inputs(case)
    called.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = [new(*args), new(*args, factor=1.0)]
    assert not called
    torch.testing.assert_close(plain[0], module(*args), rtol=1e-4, atol=1e-4)
    assert torch.equal(*plain)
    loaded = case.module(1).state_dict()
    for assign in (False, True):
        for m in (new, module):
            m.load_state_dict({k: v * (1 + assign) for k, v in loaded.items()}, assign=assign)
        for other in (new, copy.deepcopy(new)):
            with pytest.warns(UserWarning, match=r"runs as released: factor is not known to torchops, and not 1\.0"):
                got = other(*args, factor=2.0)
            assert torch.equal(got, module(*args, factor=2.0))
    assert called
    assert set(called) <= {1.0, 2.0}


@pytest.mark.parametrize("name", MODULES)
def test_the_released_forward_trains(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = MODULES[name]
    module = case.module().train()
    with_keyword(monkeypatch, type(module))
    new, args = swapped(module), inputs(case)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        grads = [torch.autograd.grad(m(*args, factor=3.0).square().sum(), list(m.parameters())) for m in (new, module)]
    assert all(torch.equal(got, expected) for got, expected in zip(*grads, strict=True))


@pytest.mark.parametrize("name", MODULES)
def test_calls_that_do_not_fit(name: str) -> None:
    """Raise what the released forward raises."""
    case = MODULES[name]
    module = case.module()
    new, (x, *rest) = swapped(module), inputs(case)
    bad: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((), {}),
        ((x, *rest), {"another": 1}),
        ((x, *rest, *[None] * 20), {}),
        ((x, *rest), {next(iter(inspect.signature(module.forward).parameters)): x}),
    ]
    for args, kwargs in bad:
        with pytest.raises(TypeError) as expected:
            module(*args, **kwargs)
        with pytest.raises(TypeError) as got:
            new(*args, **kwargs)
        assert str(got.value) == str(expected.value)


LAYERS = [package for package in ("boltz", "boltzgen") if find_spec(package)]


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("package", LAYERS)
def test_a_layer_with_a_keyword_that_is_not_known(package: str, whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its released forward calls the replacements of its parts."""
    sizes = {"token_s": 24, "num_heads": 2, "v2": True} if whole else {}
    (module,) = _stack(1, package, **sizes).eval()
    called = with_keyword(monkeypatch, type(module))
    new = nn.Sequential(copy.deepcopy(module))
    assert "0" in replace(new).replaced
    streams, masks = _streams(whole)
    masks = tuple(torch.ones_like(mask) for mask in masks)
    called.clear()
    with torch.no_grad():
        new[0](*streams, *masks)
        assert not called
        with pytest.warns(UserWarning, match="runs as released"):
            got = new[0](*streams, *masks, factor=2.0)
        assert called == [2.0]
        expected = module(*streams, *masks, factor=2.0)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(not LAYERS, reason="no package is installed")
def test_attributes_set_afterwards_reach_the_released_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    (module,) = _stack(1, LAYERS[0], dropout=0.0).train()
    with_keyword(monkeypatch, type(module))
    new = nn.Sequential(module)
    replace(new)
    vars(new[0])["dropout"] = 0.5
    (z,), (mask,) = _streams(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outs = []
        for seed in (0, 1):
            torch.manual_seed(seed)
            outs.append(new[0](z, mask, factor=2.0))
    assert not torch.equal(*outs)


Call = Callable[..., Tensor]


@pytest.mark.parametrize("name", MODULES)
def test_compiles(name: str) -> None:
    """In inference and in training, without a graph break."""
    case = MODULES[name]
    module = case.module().eval()
    new, args = swapped(module), inputs(case)
    torch._dynamo.reset()
    compiled: Call = torch.compile(new, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*args), module(*args), rtol=1e-4, atol=1e-4)
    for m in (new, module):
        m.train()
    x, *rest = args
    results = []
    for call in (compiled, module):
        leaf = x.clone().requires_grad_()
        out = call(leaf, *rest)
        cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(6))
        parameters = list(new.parameters() if call is compiled else module.parameters())
        results.append([out.detach(), *torch.autograd.grad(out, [leaf, *parameters], cotangent)])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-4, atol=2e-4)


def _run(stack: Any, streams: tuple[Tensor, ...], masks: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    for layer in stack:
        out = layer(*streams, *masks)
        streams = out if isinstance(out, tuple) else (out,)
    return streams


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("package", LAYERS)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_layers_compile(package: str, whole: bool, backend: str, training: bool) -> None:
    """In inference, they add in place."""
    sizes = {"token_s": 24, "num_heads": 2, "v2": True} if whole else {}
    original = _stack(2, package, dropout=0.0, **sizes).train(training)
    model = copy.deepcopy(original)
    replace(model)
    streams, masks = _streams(whole)
    masks = tuple(torch.ones_like(mask) for mask in masks)
    torch._dynamo.reset()
    results = []
    for run, stack in ((torch.compile(_run, backend=backend), model), (_run, original)):
        with torch.set_grad_enabled(training):
            leaves = tuple(t.clone().requires_grad_(training) for t in streams)
            results.append(list(run(stack, leaves, masks)))
        if training:
            total = torch.stack([out.square().mean() for out in results[-1]]).sum()
            results[-1] += torch.autograd.grad(total, [*leaves, *stack.parameters()])
    for got, expected in zip(*results, strict=True):
        assert (got - expected).norm() <= 1e-3 * expected.norm() + 1e-4


class FusedLayerNorm(nn.Module):
    """Stands for Protenix's, which cannot be compiled here: it has no kernel for a CPU."""

    def __init__(self, like: Any) -> None:
        super().__init__()
        self.normalized_shape, self.eps = torch.Size(like.c_in), like.eps
        self.weight, self.bias = like.weight, like.bias

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith("protenix")])
def test_norms_with_kernels_for_a_gpu_only(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = MODULES[name]
    file: Any = ModuleType("protenix.model.layer_norm.layer_norm")
    file.FusedLayerNorm = FusedLayerNorm
    monkeypatch.setitem(sys.modules, file.__name__, file)
    module = case.module()
    fused = copy.deepcopy(module)
    for child, norm in list(fused.named_children()):
        if hasattr(norm, "c_in") and "norm" in child:
            fused.add_module(child, FusedLayerNorm(norm))
    args = inputs(case)
    torch.testing.assert_close(swapped(fused)(*args), module(*args), rtol=1e-4, atol=1e-4)

"""Modules of public packages, as released, and torchops' in their place.

The dependency groups `adapters` and `adapters-bare` of pyproject.toml have the packages, but for OpenFold, of which
PyPI has no release that can be built: these tests need its `openfold/model` and `openfold/utils` on PYTHONPATH, beside
an empty `openfold/__init__.py` and an empty `attn_core_inplace_cuda.py`, its CUDA extension. A package that is not
installed is skipped, with the reason.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import io
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchops import replace
from torchops.convert import triangle_update
from torchops.convert.triangle import TriangleUpdate
from torchops.nn import TriangleMultiplicativeUpdate

# One process imports the packages, which takes seconds, for all tests.
pytestmark = [
    pytest.mark.xdist_group("adapters"),
    pytest.mark.filterwarnings("ignore:Using a non-tuple sequence", "ignore:Triton is not available"),
]


@dataclass(frozen=True)
class Package:
    """How a public package makes its modules."""

    name: str
    file: str
    make: Callable[[Any, str], nn.Module]
    in_place: bool = False
    optional_mask: bool = True


def _boltz(file: Any, direction: str) -> nn.Module:
    return getattr(file, f"TriangleMultiplication{direction.title()}")(12)


def _openfold(prefix: str) -> Callable[[Any, str], nn.Module]:
    def make(file: Any, direction: str) -> nn.Module:
        arguments = {}
        if prefix:
            arguments["linear_init_params"] = file.lin_init.fused_tri_mul_init
        return getattr(file, f"{prefix}TriangleMultiplication{direction.title()}")(12, 8, **arguments)

    return make


def _esmfold(file: Any, direction: str) -> nn.Module:
    class Config:
        pairwise_state_dim = 12

    return file.EsmFoldTriangleMultiplicativeUpdate(Config(), _outgoing=direction == "outgoing")


# Protenix compiles a kernel for its norms otherwise.
os.environ.setdefault("LAYERNORM_TYPE", "torch")

OPENFOLD3 = "openfold3.core.model.layers.triangular_multiplicative_update"
PACKAGES = {
    "boltz": Package("boltz", "boltz.model.layers.triangular_mult", _boltz, optional_mask=False),
    "boltzgen": Package("boltzgen", "boltzgen.model.layers.triangular", _boltz, optional_mask=False),
    "openfold": Package("openfold", "openfold.model.triangular_multiplicative_update", _openfold(""), in_place=True),
    "openfold3": Package("openfold3", OPENFOLD3, _openfold(""), in_place=True),
    "openfold3_fused": Package("openfold3", OPENFOLD3, _openfold("Fused"), in_place=True),
    "protenix": Package("protenix", "protenix.model.triangular.triangular", _openfold(""), in_place=True),
    "esmfold": Package("transformers", "transformers.models.esm.modeling_esmfold", _esmfold, in_place=True),
}


def imported(package: Package) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(package.file)


def installed(name: str) -> bool:
    return find_spec(PACKAGES[name].name) is not None


@pytest.mark.parametrize("name", PACKAGES)
def test_is_installed(name: str) -> None:
    if not installed(name):
        pytest.skip(f"{PACKAGES[name].name} is not installed, and no module of it is tested")
    assert imported(PACKAGES[name])


@pytest.fixture(params=[name for name in PACKAGES if installed(name)])
def package(request: pytest.FixtureRequest) -> Package:
    return PACKAGES[request.param]


def randomised(module: nn.Module, seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        value = torch.randn(parameter.shape, generator=generator)
        parameter.data.copy_(value / parameter.shape[-1] ** 0.5 if value.dim() > 1 else value + name.endswith("weight"))
    return module


class Block(nn.Module):
    """What calls them in these packages: the update goes through a dropout and is added by the model."""

    def __init__(self, package: Package, p: float = 0.25) -> None:
        super().__init__()
        file = imported(package)
        self.out, self.in_ = (package.make(file, direction) for direction in ("outgoing", "incoming"))
        self.drop = nn.Dropout(p)
        randomised(self)

    def forward(self, z: Tensor, mask: Tensor) -> Tensor:
        z = z + self.drop(self.out(z, mask))
        return z + self.drop(self.in_(z, mask))


NAMES = ("out", "in_")


def inputs(dtype: torch.dtype = torch.float32, n: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x, mask = torch.randn(2, n, n, 12, generator=generator), torch.rand(2, n, n, generator=generator)
    mask[mask < 0.2] = 0
    return x.to(dtype), mask.to(dtype)


def deviation(got: Tensor, expected: Tensor) -> float:
    return ((got.double() - expected.double()).abs().max() / expected.double().abs().max()).item()


@pytest.mark.parametrize("training", [True, False])
def test_same_values_and_gradients(package: Package, training: bool) -> None:
    """Behind the same dropout, and with the parameters, names and order that were there."""
    model = Block(package).train(training)
    original = copy.deepcopy(model)
    parameters, names = list(model.parameters()), list(model.state_dict())
    report = replace(model)
    assert report.replaced == NAMES
    assert report.left == {}
    assert all(isinstance(getattr(model, name), TriangleUpdate) for name in NAMES)
    assert model.training == model.out.training == training
    assert list(model.state_dict()) == names
    assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
    results = []
    for m in (original, model):
        x, mask = inputs()
        torch.manual_seed(5)
        out = m(x.requires_grad_(), mask)
        cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(6))
        results.append([out.detach(), *torch.autograd.grad(out, [x, *m.parameters()], cotangent)])
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-4, atol=2e-4)
    assert not replace(model)


def test_bfloat16(package: Package) -> None:
    """As these packages run in it: under autocast, with the stream in float32."""
    model = Block(package).eval()
    exact = copy.deepcopy(model)
    expected = exact(*inputs())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        before = model(*inputs())
        replace(model)
        after = model(*inputs())
        assert model.out(*inputs()).dtype == exact.out(*inputs()).dtype
    assert after.dtype == before.dtype
    assert deviation(after, expected) <= max(1.5 * deviation(before, expected), 0.02)


def test_state_dicts_and_optimizers_go_on(package: Package) -> None:
    model, other = Block(package, p=0), Block(package, p=0)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (model, other)]
    for step in range(4):
        if step == 2:
            assert replace(model).replaced == NAMES
        for m, optimizer in zip((model, other), optimizers, strict=True):
            optimizer.zero_grad()
            m(*inputs()).square().mean().backward()
            optimizer.step()
    for (name, got), expected in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3, msg=name)
    fresh = Block(package)
    fresh.load_state_dict(model.state_dict())
    model.load_state_dict(randomised(fresh, 1).state_dict())
    for ours, theirs in ((model.out, fresh.out), (model.in_, fresh.in_)):
        torch.testing.assert_close(ours(*inputs()), theirs(*inputs()), rtol=1e-4, atol=1e-4)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(*inputs()), model(*inputs()))
    assert torch.equal(copy.deepcopy(model)(*inputs()), model(*inputs()))


def test_whole_signature(package: Package) -> None:
    """In the package's order; what is overwritten there is overwritten here, and the same tensor is returned."""
    module = Block(package).eval().out
    model = nn.Sequential(copy.deepcopy(module))
    assert replace(model).replaced == ("0",)
    x, mask = inputs()
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [((mask,), {}), ((), {"mask": mask})]
    if package.optional_mask:
        calls += [((), {}), ((None,), {})]
    if "use_kernels" in inspect.signature(type(module).forward).parameters:
        calls += [((mask, False), {}), ((), {"mask": mask, "use_kernels": False})]
    if package.in_place:
        calls += [((mask, True), {}), ((mask,), {"inplace_safe": True, "_inplace_chunk_size": 2})]
        calls += [((mask,), {"inplace_safe": True, "_add_with_inplace": True, "_inplace_chunk_size": 3})]
        calls += [((mask,), {"_add_with_inplace": True})]
    if package.name == "openfold3":
        calls += [((mask, True, False, False, True, 4), {}), ((mask,), {"use_cueq_triangle_kernels": False})]
    if package.name == "protenix":
        calls += [((mask, True, True, 3, "torch"), {}), ((mask,), {"triangle_multiplicative": "torch"})]
    calls += [((mask[:1],), {}), ((mask > 0.5,), {}), (((3 * mask).long(),), {})]
    for args, kwargs in calls:
        theirs, ours = x.clone(), x.clone()
        with torch.no_grad():
            expected, got = module(theirs, *args, **kwargs), model[0](ours, *args, **kwargs)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        assert (got is ours) == (expected is theirs)
    with pytest.raises(TypeError, match="unexpected keyword"):
        model[0](x, mask, another=True)


@pytest.mark.parametrize("name", [name for name in PACKAGES if PACKAGES[name].in_place and installed(name)])
def test_update_in_place_can_be_trained(name: str) -> None:
    """Which these packages do not offer."""
    model: Any = nn.Sequential(Block(PACKAGES[name]).out)
    replace(model)
    x, mask = inputs()
    grads = []
    for in_place in (True, False):
        leaf = x.clone().requires_grad_()
        z = leaf * 1
        out = model[0](z, mask, True, _add_with_inplace=True) if in_place else z + model[0](z, mask)
        assert (out is z) == in_place
        grads.append(torch.autograd.grad(out.square().sum(), [leaf, *model.parameters()]))
    for got, expected in zip(*grads, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-3)


OPENFOLD = [name for name in PACKAGES if "openfold" in name and installed(name)]


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("name", OPENFOLD)
def test_openfold_computes_in_the_dtype_of_a_bfloat16_stream(name: str, autocast: bool) -> None:
    module = Block(PACKAGES[name]).eval().out
    model = nn.Sequential(copy.deepcopy(module))
    assert replace(model).replaced == ("0",)
    exact = module(*inputs())
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        theirs, ours = (m(*inputs(torch.bfloat16)) for m in (module, model[0]))
    assert ours.dtype == theirs.dtype == torch.bfloat16
    assert deviation(ours, exact) <= max(1.5 * deviation(theirs, exact), 0.02)


def test_from_module(package: Package) -> None:
    model = Block(package).eval()
    for module, direction in ((model.out, "outgoing"), (model.in_, "incoming")):
        layer = triangle_update(module)
        assert (layer.direction, layer.training) == (direction, False)
        torch.testing.assert_close(layer(*inputs()), module(*inputs()), rtol=1e-4, atol=1e-4)
        storages = {p.untyped_storage().data_ptr() for p in module.parameters()}
        assert storages.isdisjoint(p.untyped_storage().data_ptr() for p in layer.parameters())
    if package.name == "boltz":
        assert list(layer.state_dict()) == list(model.in_.state_dict())


def _subclass(module: nn.Module) -> None:
    module.__class__ = type("Mine", (type(module),), {})


def _own_forward(module: nn.Module) -> None:
    vars(module)["forward"] = lambda *args: args[0]


def _parametrized(module: nn.Module) -> None:
    nn.utils.parametrizations.weight_norm(_output(module))


def _quantized(module: nn.Module) -> None:
    name = next(name for name, child in module.named_children() if child is _output(module))
    linear = nn.Linear(12, 12)
    setattr(module, name, torch.ao.nn.quantized.dynamic.Linear.from_float(linear))


def _output(module: nn.Module) -> nn.Module:
    return module.p_out if hasattr(module, "p_out") else module.linear_z  # type: ignore[return-value]


CHANGES: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "subclass": (_subclass, "is a subclass of one in"),
    "hook": (lambda m: m.register_forward_hook(lambda *a: None), "has hooks"),
    "hook_inside": (lambda m: _output(m).register_forward_hook(lambda *a: None), "has hooks"),
    "own_forward": (_own_forward, "has a forward of its own"),
    "own_forward_inside": (lambda m: _own_forward(_output(m)), "has a forward of its own"),
    "compiled": (lambda m: setattr(m, "_compiled_call_impl", lambda *a: None), "has a forward of its own"),
    "parametrized": (_parametrized, "is not"),
    "another_layer": (lambda m: m.add_module("more", nn.Dropout()), "it has a layer more"),
    "buffer": (lambda m: m.register_buffer("scale", torch.ones(1)), "it has a tensor scale of its own"),
    "mixed": (lambda m: _output(m).double(), "is of another dtype or device"),
    "eps": (lambda m: setattr(m.norm_in if hasattr(m, "norm_in") else m.layer_norm_in, "eps", 1e-3), "different eps"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_refuses(change: str) -> None:
    """A module that does more than its class says, or is seen from outside, stays, with the reason."""
    name = next((name for name in PACKAGES if installed(name)), None)
    if name is None:
        pytest.skip("no package is installed")
    model = Block(PACKAGES[name])
    make, reason = CHANGES[change]
    make(model.out)
    kept = model.out
    report = replace(model)
    assert report.replaced == ("in_",)
    assert list(report.left) == ["out"]
    assert reason in report.left["out"]
    assert model.out is kept
    with pytest.raises(TypeError, match="expected a triangle update of a known package, got "):
        triangle_update(kept)


def test_from_module_of_another_kind() -> None:
    with pytest.raises(TypeError, match=r"got torchops\.nn\.pair\.TriangleMultiplicativeUpdate$"):
        triangle_update(TriangleMultiplicativeUpdate(8))


@pytest.mark.parametrize("name", OPENFOLD)
def test_refuses_a_linear_layer_with_a_precision_of_its_own(name: str) -> None:
    model: Any = Block(PACKAGES[name])
    model.out.linear_z.precision = torch.float32
    assert replace(model).left == {"out": "linear_z has a precision of its own"}

"""Transitions and triangle attention of public packages, as released, and torchops' in their place.

The packages are those of test_adapters.py.
"""

from __future__ import annotations

import copy
import importlib
import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from test_adapters import deviation, randomised
from torch import Tensor, nn
from torch.nn.utils import parametrize

from torchops import replace
from torchops.convert.attention import TriangleAttention
from torchops.convert.transition import Transition

pytestmark = [
    pytest.mark.xdist_group("adapters"),
    pytest.mark.filterwarnings("ignore:Using a non-tuple sequence", "ignore:Triton is not available"),
]

C, HEADS, HEAD = 12, 2, 4


@dataclass(frozen=True)
class Case:
    """A module of a released package, and the keywords with which its package calls it."""

    file: str
    make: Callable[[Any], nn.Module]
    kind: type[nn.Module]
    takes_mask: bool = True
    calls: tuple[dict[str, Any], ...] = ()
    package: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "package", self.file.partition(".")[0])

    def module(self, seed: int = 0) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            file = importlib.import_module(self.file)
        return randomised(self.make(file), seed)


BOLTZ, OPENFOLD3, ESMFOLD = (
    "boltz.model.layers",
    "openfold3.core.model.layers",
    "transformers.models.esm.modeling_esmfold",
)
CHUNKS = ({"chunk_size": 3},)
KERNELS = ({"chunk_size": 3, "inplace_safe": True}, {"use_lma": True}, {"transpose_bias": True})


def _attention(file: str, ending: bool, calls: tuple[dict[str, Any], ...], name: str = "TriangleAttention") -> Case:
    return Case(file, lambda f: getattr(f, name)(C, HEAD, HEADS, starting=not ending), TriangleAttention, calls=calls)


CASES = {
    "boltz_starting": _attention(f"{BOLTZ}.triangular_attention.attention", False, CHUNKS),
    "boltz_ending": Case(
        f"{BOLTZ}.triangular_attention.attention",
        lambda f: f.TriangleAttentionEndingNode(C, HEAD, HEADS),
        TriangleAttention,
        calls=CHUNKS,
    ),
    "boltzgen_starting": _attention("boltzgen.model.layers.triangular_attention.attention", False, CHUNKS),
    "boltzgen_ending": _attention("boltzgen.model.layers.triangular_attention.attention", True, CHUNKS),
    "protenix_starting": _attention("protenix.model.triangular.triangular", False, KERNELS[:1]),
    "protenix_ending": _attention("protenix.model.triangular.triangular", True, KERNELS[:1]),
    "openfold_starting": _attention("openfold.model.triangular_attention", False, KERNELS[:2]),
    "openfold_ending": _attention("openfold.model.triangular_attention", True, KERNELS[:2]),
    "openfold3_starting": _attention(f"{OPENFOLD3}.triangular_attention", False, KERNELS),
    "openfold3_ending": _attention(f"{OPENFOLD3}.triangular_attention", True, KERNELS),
    "esmfold_starting": _attention(ESMFOLD, False, KERNELS[:2], "EsmFoldTriangleAttention"),
    "esmfold_ending": _attention(ESMFOLD, True, KERNELS[:2], "EsmFoldTriangleAttention"),
    "boltz_transition": Case(f"{BOLTZ}.transition", lambda f: f.Transition(C, 20), Transition, False, CHUNKS),
    "boltzgen_transition": Case(
        "boltzgen.model.layers.transition", lambda f: f.Transition(C, 20), Transition, False, CHUNKS
    ),
    "protenix_transition": Case("protenix.model.modules.primitives", lambda f: f.Transition(C, 2), Transition, False),
    "openfold3_transition": Case(
        f"{OPENFOLD3}.transition",
        lambda f: f.SwiGLUTransition(C, 2),
        Transition,
        calls=({"chunk_size": 3}, {"ckpt_chunk_size": 2}),
    ),
}
INSTALLED = [name for name, case in CASES.items() if find_spec(case.package) is not None]


@pytest.fixture(params=INSTALLED)
def released(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def inputs(case: Case, n: int = 7) -> tuple[Tensor, ...]:
    """A pair tensor, and a mask that is not symmetric and keeps a key everywhere."""
    generator = torch.Generator().manual_seed(3)
    x, numbers = torch.randn(2, n, n, C, generator=generator), torch.rand(2, n, n, generator=generator)
    return (x, ((numbers > 0.3) | torch.eye(n).bool()).float()) if case.takes_mask else (x,)


def swapped(module: nn.Module) -> Any:
    """What takes the place of a copy."""
    model = nn.Sequential(copy.deepcopy(module))
    assert replace(model).replaced[:1] == ("0",)
    return model[0]


@pytest.mark.parametrize("training", [True, False])
def test_same_values_and_gradients(released: Case, training: bool) -> None:
    module = released.module().train(training)
    model = nn.Sequential(copy.deepcopy(module))
    parameters, names = list(model.parameters()), list(model.state_dict())
    report = replace(model)
    assert report.replaced == ("0",)
    assert report.left == {}
    assert isinstance(model[0], released.kind)
    assert model[0].training == training
    assert list(model.state_dict()) == names
    assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
    assert not replace(model)
    results = []
    for m in (module, model[0]):
        x, *mask = inputs(released)
        out = m(x.requires_grad_(), *mask)
        cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(6))
        results.append([out.detach(), *torch.autograd.grad(out, [x, *m.parameters()], cotangent)])
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-4, atol=2e-4)


def test_whole_signature(released: Case) -> None:
    module = released.module().eval()
    new = swapped(module)
    x, *mask = inputs(released)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [(tuple(mask), call) for call in released.calls]
    if mask:
        calls += [((), {}), ((None,), {}), ((mask[0][:1],), {}), ((mask[0].long(),), {})]
    for args, kwargs in calls:
        theirs, ours = x.clone(), x.clone()
        with torch.no_grad():
            expected, got = module(theirs, *args, **kwargs), new(ours, *args, **kwargs)
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours, theirs)
    with pytest.raises(TypeError, match="unexpected keyword"):
        new(x, *mask, another=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast(released: Case, dtype: torch.dtype) -> None:
    """With the stream in float32, as these packages run, and in bfloat16."""
    module = released.module().eval()
    new, (x, *mask) = swapped(module), inputs(released)
    exact = module(x, *mask)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        theirs, ours = (m(x.to(dtype), *(t.to(dtype) for t in mask)) for m in (module, new))
    assert ours.dtype == theirs.dtype
    assert deviation(ours, exact) <= max(1.5 * deviation(theirs, exact), 0.02)


def test_can_be_saved_and_loaded(released: Case) -> None:
    new, other, args = swapped(released.module()), released.module(1), inputs(released)
    assert not torch.allclose(new(*args), other(*args), atol=1e-2)
    new.load_state_dict(other.state_dict())
    torch.testing.assert_close(new(*args), other(*args), rtol=1e-4, atol=1e-4)
    file = io.BytesIO()
    torch.save(new, file)
    file.seek(0)
    for remade in (torch.load(file, weights_only=False), copy.deepcopy(new)):
        assert torch.equal(remade(*args), new(*args))


class _Doubled(nn.Module):
    def forward(self, parameter: Tensor) -> Tensor:
        return 2 * parameter


def test_parametrized_afterwards(released: Case) -> None:
    original, args = released.module(), inputs(released)
    new = swapped(original)
    for name, _ in list(original.named_parameters()):
        layer, _, kind = name.rpartition(".")
        for module in (original, new):
            parametrize.register_parametrization(module.get_submodule(layer), kind, _Doubled())
    torch.testing.assert_close(new(*args), original(*args), rtol=1e-4, atol=1e-4)


def _set(**attributes: Any) -> Callable[[Any], None]:
    return lambda module: vars(module).update(attributes)


def _other_width(module: Any) -> None:
    module.fc3 = nn.Linear(20, C + 1, bias=False)


REFUSED: dict[str, tuple[str, Callable[[Any], object], str]] = {
    "inf": ("boltz_starting", _set(inf=1e4), "its mask adds -10000.0 to scores, and not -1e9"),
    "heads": ("boltz_starting", lambda m: _set(no_heads=4)(m.mha), "4 heads of 4 do not fit its layers"),
    "scale": ("boltz_starting", lambda m: _set(c_hidden=16)(m.mha), "2 heads of 16 do not fit its layers"),
    "precision": (
        "boltz_starting",
        lambda m: _set(precision=torch.float32)(m.mha.linear_q),
        "mha.linear_q has a precision of its own",
    ),
    "hook_inside": (
        "openfold3_transition",
        lambda m: m.swiglu.register_forward_hook(lambda *a: None),
        "swiglu: SwiGLU has hooks",
    ),
    "out_features": ("boltz_transition", _other_width, "fc3.weight is of shape (13, 20) and not (12, 20)"),
    "activation": ("boltz_transition", lambda m: m.add_module("silu", nn.GELU()), "silu: GELU is not SiLU itself"),
}


@pytest.mark.parametrize("name", [name for name, (case, *_) in REFUSED.items() if case in INSTALLED])
def test_refuses(name: str) -> None:
    case, change, reason = REFUSED[name]
    model = nn.Sequential(CASES[case].module())
    change(model[0])
    kept = model[0]
    report = replace(model)
    assert report.replaced == ()
    assert report.left["0"] == reason
    assert model[0] is kept


def changed(module: Any, change: Callable[..., Any]) -> Callable[..., Any]:
    original = type(module).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return change(self, original, *args, **kwargs)

    forward.__wrapped__ = original  # type: ignore[attr-defined]  # so that inspect takes it for a forward of this signature
    return forward


def _minus_infinity(self: Any, original: Any, x: Tensor, mask: Any = None, *args: Any, **kwargs: Any) -> Tensor:
    """A mask that is added as it is: a scale that adds 0 and -1."""
    self.inf, before = 1.0, self.inf
    try:
        return original(self, x, mask, *args, **kwargs)
    finally:
        self.inf = before


CHANGED: dict[str, tuple[str, Callable[..., Any]]] = {
    "adds_x": ("boltz_transition", lambda self, f, x, *a, **k: x + f(self, x, *a, **k)),
    "detached": ("boltz_transition", lambda self, f, x, *a, **k: f(self, x.detach(), *a, **k) + 0 * x),
    "only_in_evaluation": ("boltz_transition", lambda self, f, x, *a, **k: f(self, x, *a, **k) * (1 + self.training)),
    "weak_mask": ("boltz_starting", _minus_infinity),
    "mask_transposed": (
        "boltz_ending",
        lambda self, f, x, m=None, *a, **k: f(self, x, m if m is None else m.mT, *a, **k),
    ),
    "masked_result": (
        "boltz_ending",
        lambda self, f, x, m=None, *a, **k: f(self, x, m, *a, **k) * (1 if m is None else m[..., None]),
    ),
    "other_node": (
        "boltz_ending",
        lambda self, f, x, m=None, *a, **k: f(self, x.mT.contiguous().mT.transpose(1, 2), m, *a, **k).transpose(1, 2),
    ),
    "overwrites": (
        "boltz_starting",
        lambda self, f, x, *a, **k: f(self, x if x.requires_grad else x.mul_(1.5), *a, **k),
    ),
    "draws_numbers": ("boltz_starting", lambda self, f, x, *a, **k: (f(self, x, *a, **k), torch.rand(1))[0]),
}


@pytest.mark.parametrize("name", [name for name, (case, _) in CHANGED.items() if case in INSTALLED])
def test_probe_sees_another_computation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a later release, under the same signature and with the same layers."""
    case, change = CHANGED[name]
    model = nn.Sequential(CASES[case].module())
    monkeypatch.setattr(type(model[0]), "forward", changed(model[0], change))
    report = replace(model)
    assert report.replaced == ()
    assert "it computes something else" in report.left["0"]


@pytest.mark.skipif(find_spec("boltz") is None, reason="boltz is not installed")
@pytest.mark.parametrize("dim", [-1, -2])
def test_probe_of_updates_has_empty_rows(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """There, an update by the operator is not 0."""
    file = importlib.import_module(f"{BOLTZ}.triangular_mult")
    model = nn.Sequential(randomised(file.TriangleMultiplicationOutgoing(C), 0))

    def zeroed(self: Any, original: Any, x: Tensor, mask: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return original(self, x, mask, *args, **kwargs) * (mask.sum(dim, keepdim=True).unsqueeze(-1) != 0)

    monkeypatch.setattr(type(model[0]), "forward", changed(model[0], zeroed))
    report = replace(model)
    assert report.replaced == ()
    assert "it computes something else" in report.left["0"]


RELU = {
    "openfold": ("openfold.model.pair_transition", lambda f: f.PairTransition(C, 2)),
    "openfold3": (f"{OPENFOLD3}.transition", lambda f: f.ReLUTransition(C, 2)),
    "esmfold": (ESMFOLD, lambda f: f.EsmFoldResidueMLP(C, 2 * C)),
}


@pytest.mark.parametrize("name", [name for name, (file, _) in RELU.items() if find_spec(file.partition(".")[0])])
def test_transitions_with_relu_stay(name: str) -> None:
    file, make = RELU[name]
    model = nn.Sequential(make(importlib.import_module(file)))
    kept = model[0]
    report = replace(model)
    assert report.replaced == ()
    assert report.left == {"0": "its activation is ReLU, without a gate, and torchops.transition has a gate by SiLU"}
    assert model[0] is kept

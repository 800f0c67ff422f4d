"""Whole layers of public packages, as released, and torchops' in their place.

The packages are those of test_adapters.py.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
import torch
from checks import assert_all_close
from test_adapters import randomised
from test_adapters_parts import BOLTZ, HEAD, HEADS, C, changed
from torch import Tensor, nn

from torchops import replace
from torchops.convert.layer import Layer

pytestmark = [
    pytest.mark.xdist_group("adapters"),
    pytest.mark.filterwarnings("ignore:Using a non-tuple sequence", "ignore:Triton is not available"),
]

needs_boltz = pytest.mark.skipif(find_spec("boltz") is None, reason="boltz is not installed")
PARTS = ("tri_mul_out", "tri_mul_in", "tri_att_start", "tri_att_end", "transition_z")


# Files with layers, of the releases that test_adapters_releases.py has, too.
FILES = {
    "boltz": f"{BOLTZ}.pairformer",
    "boltz1": "boltz.model.modules.trunk",
    "boltzgen": "boltzgen.model.layers.pairformer",
}


def _imported(package: str) -> Any:
    """The file, with a stub of what Boltz 1 imports and calls only if it is told to checkpoint."""
    if package == "boltz1" and "fairscale" not in sys.modules and find_spec("fairscale") is None:
        for name in ("fairscale", "fairscale.nn", "fairscale.nn.checkpoint"):
            sys.modules.setdefault(name, ModuleType(name)).__path__ = []
        stub: Any = ModuleType("fairscale.nn.checkpoint.checkpoint_activations")
        stub.checkpoint_wrapper = None
        sys.modules.setdefault(stub.__name__, stub)
    return importlib.import_module(FILES[package])


def _stack(depth: int = 2, package: str = "boltz", **arguments: Any) -> Any:
    file = _imported(package)
    sizes = {"token_z": C, "pairwise_head_width": HEAD, "pairwise_num_heads": HEADS, **arguments}
    layer = file.PairformerLayer if "token_s" in sizes else file.PairformerNoSeqLayer
    if "v2" not in inspect.signature(layer).parameters:
        sizes.pop("v2", None)
    return nn.ModuleList(randomised(layer(**sizes), seed) for seed in range(depth))


def _run(stack: Any, *streams: Tensor, masks: tuple[Tensor, ...], **kwargs: Any) -> tuple[Tensor, ...]:
    for layer in stack:
        out = layer(*streams, *masks, **kwargs)
        streams = out if isinstance(out, tuple) else (out,)
    return streams


def _streams(whole: bool, n: int = 7) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(7)
    s, z = torch.randn(2, n, 2 * C, generator=generator), torch.randn(2, n, n, C, generator=generator)
    mask = torch.ones(2, n)
    mask[1, -2:] = 0  # padding
    pair_mask = mask[:, :, None] * mask[:, None, :]
    pair_mask[0, 1, 4] = 0
    return ((s, z), (mask, pair_mask)) if whole else ((z,), (pair_mask,))


WHOLE = {"token_s": 2 * C, "num_heads": 2, "v2": True}
KINDS = [("boltz", False), ("boltz", True), ("boltz1", True), ("boltzgen", False), ("boltzgen", True)]
KINDS = [(package, whole) for package, whole in KINDS if find_spec(FILES[package].partition(".")[0])]


def _of(package: str, whole: bool) -> Any:
    return _stack(package=package, **(WHOLE if whole else {}))


@pytest.mark.parametrize(("package", "whole"), KINDS)
def test_layers_are_replaced(package: str, whole: bool) -> None:
    model = _of(package, whole)
    names, parameters = list(model.state_dict()), list(model.parameters())
    report = replace(model)
    whole_parts = ("transition_s",) if package == "boltz1" else ("transition_s", "attention")
    parts = (*PARTS, *(whole_parts if whole else ()))
    assert set(report.replaced) == {f"{i}{part and '.' + part}" for i in range(2) for part in ("", *parts)}
    assert all(isinstance(layer, Layer) for layer in model)
    assert list(model.state_dict()) == names
    assert {id(p) for p in model.parameters()} == {id(p) for p in parameters}
    assert replace(model).replaced == ()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("package", "whole"), KINDS)
def test_layers_compute_the_same(package: str, whole: bool, training: bool) -> None:
    """Behind the same dropout masks, and with the same random numbers left. Keys are kept in all rows here."""
    original = _of(package, whole).train(training)
    model = copy.deepcopy(original)
    replace(model)
    streams, masks = _streams(whole)
    masks = (*masks[:-1], (masks[-1].bool() | torch.eye(7).bool()).float())
    results = []
    for m in (original, model):
        leaves = [t.clone().requires_grad_() for t in streams]
        torch.manual_seed(5)
        outs = _run(m, *leaves, masks=masks)
        generator = torch.Generator().manual_seed(6)
        cotangents = [torch.randn(t.shape, generator=generator) for t in outs]
        grads = torch.autograd.grad(outs, [*leaves, *m.parameters()], cotangents)
        results.append([*(t.detach() for t in outs), torch.rand(1), *grads])
    for expected, got in zip(*results, strict=True):
        assert (got - expected).norm() <= 1e-4 * expected.norm() + 1e-4


class _Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * self.module(*args, **kwargs)


@needs_boltz
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("mode", ["training", "gradients", "inference"])
def test_what_is_put_on_parts_afterwards(mode: str, wrapped: bool) -> None:
    """Hooks and wrappers of parts run, as if nothing had been replaced."""
    original = _stack().train(mode == "training")
    model = copy.deepcopy(original)
    replace(model)
    (z,), _ = _streams(False)
    results = []
    for m in (original, model):
        for name in PARTS:
            part = m[0].get_submodule(name)
            if wrapped:
                m[0].add_module(name, _Wrapper(part))
            else:
                part.register_forward_hook(lambda module, args, out: 2 * out)
        torch.manual_seed(5)
        with torch.set_grad_enabled(mode != "inference"):
            results.append(_run(m, z, masks=(torch.ones(z.shape[:-1]),))[0])
    torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("package", "whole"), KINDS)
def test_layers_in_inference(package: str, whole: bool) -> None:
    """What the caller has is not overwritten; all but padding is the same, as is what is drawn afterwards."""
    original = _of(package, whole).eval()
    model = copy.deepcopy(original)
    replace(model)
    streams, masks = _streams(whole)
    kept, results = [t.clone() for t in streams], []
    for m in (original, model):
        torch.manual_seed(5)
        with torch.inference_mode():
            results.append((*_run(m, *streams, masks=masks, chunk_size_tri_attn=4), torch.rand(1)))
        assert all(torch.equal(a, b) for a, b in zip(streams, kept, strict=True))
    *_, expected, expected_next = results[0]
    *_, got, got_next = results[1]
    assert torch.equal(got_next, expected_next)
    there = (slice(None, 1),), (slice(1, 2), slice(None, -2), slice(None, -2))
    for part in there:
        torch.testing.assert_close(got[part], expected[part], rtol=1e-3, atol=1e-3)
    if whole:
        torch.testing.assert_close(results[1][0][:1], results[0][0][:1], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(results[1][0][1:, :-2], results[0][0][1:, :-2], rtol=1e-3, atol=1e-3)


@needs_boltz
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_under_autocast(dtype: torch.dtype) -> None:
    original = _stack().eval()
    model = copy.deepcopy(original)
    replace(model)
    (z,), (mask,) = _streams(False, 16)
    mask = torch.ones_like(mask)
    with torch.no_grad():
        (exact,) = _run(original, z, masks=(mask,))
        with torch.autocast("cpu", torch.bfloat16):
            (theirs,), (ours,) = (_run(m, z.to(dtype), masks=(mask,)) for m in (original, model))
    assert ours.dtype == theirs.dtype == torch.float32
    assert (ours - exact).norm() <= 1.1 * (theirs - exact).norm()


@needs_boltz
def test_layers_that_stay() -> None:
    """With a hook, of a subclass, or with a part that stays; the other parts are replaced."""
    model = _stack(4)
    model[0].register_forward_hook(lambda *a: None)
    model[1].tri_att_start.register_forward_hook(lambda *a: None)
    model[2].__class__ = type("Mine", (type(model[2]),), {})
    model[3].extra = nn.Dropout()
    report = replace(model)
    assert report.left == {
        "0": "PairformerNoSeqLayer has hooks",
        "1": "its tri_att_start is not replaced",
        "1.tri_att_start": "TriangleAttention has hooks",
        "1.tri_att_start.mha": report.left["1.tri_att_start.mha"],
        "2": "Mine is a subclass of one in boltz.model.layers.pairformer",
        "3": "it has a layer extra",
    }
    assert "may gate by Sigmoid" in report.left["1.tri_att_start.mha"]
    assert len(report.replaced) == 4 * len(PARTS) - 1


@needs_boltz
def test_a_layer_that_computes_something_else_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _stack(1)
    change = lambda self, f, z, *a, **k: f(self, z, *a, **k) - z  # noqa: E731
    monkeypatch.setattr(type(model[0]), "forward", changed(model[0], change))
    report = replace(model)
    assert "it computes something else: its result in training differs" in report.left["0"]
    assert report.replaced == tuple(f"0.{part}" for part in PARTS)


@needs_boltz
def test_a_model_that_is_a_layer() -> None:
    (model,) = _stack(1)
    report = replace(model)
    assert report.replaced == PARTS
    assert report.left == {"": "it is the model itself"}


@pytest.mark.skipif(find_spec("openfold3") is None, reason="openfold3 is not installed")
@pytest.mark.parametrize("in_place", [True, False])
def test_openfold3_pair_block(in_place: bool) -> None:
    """Whose own forward calls the parts, the ending node with a transposed pair tensor and bias."""
    file = importlib.import_module("openfold3.core.model.latent.base_blocks")
    original = randomised(file.PairBlock(C, 8, HEAD, HEADS, "swiglu", 2, 0.25, False, 1e9)).eval()
    model = copy.deepcopy(original)
    assert set(replace(model).replaced) == {*PARTS[:4], "pair_transition"}
    (z,), (mask,) = _streams(False)
    mask = (mask.bool() | torch.eye(7).bool()).float()
    with torch.no_grad():
        outs = [
            m(z.clone(), mask, inplace_safe=in_place, chunk_size=4 if in_place else None) for m in (original, model)
        ]
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-3, atol=1e-3)
    original.train()
    model.train()
    grads = []
    for m in (original, model):
        torch.manual_seed(1)
        out = m(z.clone(), mask)
        grads.append(torch.autograd.grad(out.square().mean(), list(m.parameters())))
    for expected, got in zip(*grads, strict=True):
        assert (got - expected).norm() <= 1e-3 * expected.norm() + 1e-5


@needs_boltz
def test_gates_beside_the_layers() -> None:
    """AdaLN and the conditioned transition, as one module with the norm inside."""
    modules = importlib.import_module("boltz.model.modules.transformersv2")
    attention = importlib.import_module("boltz.model.layers.attentionv2")
    makers = {
        "adaln": lambda: modules.AdaLN(C, C),
        "transition": lambda: modules.ConditionedTransitionBlock(C, C),
        "attention": lambda: attention.AttentionPairBias(C, 8, 2),
    }
    model: Any = nn.ModuleDict({name: randomised(make()) for name, make in makers.items()})
    original = copy.deepcopy(model)
    report = replace(model)
    assert set(report.replaced) == {"adaln", "transition", "attention"}
    assert report.left == {}
    a, s = torch.randn(2, 5, C), torch.randn(2, 5, C)
    for name in ("adaln", "transition"):
        results = []
        for m in (original, model):
            out = m[name](a, s)
            gradients = torch.autograd.grad(out.square().sum(), list(m[name].parameters()))
            results.append([out, *gradients])
        assert_all_close(*results, rtol=1e-4, atol=1e-4)


@needs_boltz
@pytest.mark.parametrize("checkpointed_from", [6, 7])
def test_benchmark(checkpointed_from: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """benchmarks/boltz.py on a stack of the release: nothing but rounding differs in float32."""
    boltz = importlib.import_module("benchmarks.boltz")
    monkeypatch.setattr(boltz, "CHECKPOINTED_FROM", checkpointed_from)
    cpu = torch.device("cpu")
    for result in boltz.measure(6, cpu, 32, 1):
        before, after = result["before"], result["after"]
        assert before["ms"] > 0
        for what, allowed in before["deviation"].items():
            limit = 1e-5 if result["precision"] == "float32" else 2 * allowed["norm"]
            assert after["deviation"][what]["norm"] <= limit, (result["task"], what)


@needs_boltz
def test_benchmark_of_modules() -> None:
    boltz = importlib.import_module("benchmarks.boltz")
    cpu = torch.device("cpu")
    rows = list(boltz.modules(cpu, 6, ["boltz"]))
    assert {row["module"] for row in rows} == {m for path, m, _ in boltz.MODULES if path.startswith("boltz.")}
    assert all(row["float32"]["greatest difference"] <= 1e-5 * row["greatest element"] for row in rows)

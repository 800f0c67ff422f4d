"""The layers of a diffusion transformer in 16 bits, where the user asks for them."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from test_adapters_sampling import TOKENS, C, conditions, packages, sampled, sampler
from test_adapters_step import graphs_on_the_cpu, layers_of, recording, stepped  # noqa: F401
from torch import Tensor

import torchops
from torchops.convert.conditioning import conditioned, given
from torchops.convert.diffusion import DiffusionLayer, attention

pytestmark = [pytest.mark.xdist_group("adapters")]

HALVES = [torch.bfloat16, torch.float16]
dtypes = pytest.mark.parametrize("dtype", HALVES, ids=str)


def distance(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@packages
@dtypes
def test_samples_in_16_bits(package: str, dtype: torch.dtype) -> None:
    model, new = sampler(package)
    torchops.replace(new, diffusion_dtype=dtype)
    expected, got = sampled(model, package), sampled(new, package)
    assert got.dtype == expected.dtype
    eps = torch.finfo(dtype).eps
    assert eps / 256 < distance(got, expected) < eps
    torchops.replace(new)
    assert distance(sampled(new, package), expected) < 2e-6


@dtypes
def test_layers_multiply_and_attend_in_it(dtype: torch.dtype) -> None:
    _, new = sampler("boltz")
    torchops.replace(new, diffusion_dtype=dtype)
    seen: dict[str, set[torch.dtype]] = {}

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func._schema.name
            if name in ("myops::_linear", "myops::dense", "myops::glu", "myops::gate") or "scaled_dot" in name:
                seen.setdefault(name, set()).update(t.dtype for t in args if isinstance(t, Tensor))
            return func(*args, **(kwargs or {}))

    layer = layers_of(new)[0]
    a, s = torch.randn(1, TOKENS, 2 * C), torch.randn(1, TOKENS, 2 * C)
    bias, mask = torch.randn(1, TOKENS, TOKENS, 2), torch.ones(1, TOKENS)
    with torch.no_grad(), Seen():
        result = layer(a, s, bias, mask)
    assert result.dtype == torch.float32
    assert len(seen) == 5
    assert set().union(*seen.values()) == {dtype}


@packages
def test_a_recorded_step_in_16_bits(package: str) -> None:
    """Casts of parameters are computed once. The graph is of the dtype."""
    _, new = sampler(package)
    plain = copy.deepcopy(new)
    plain.score_model.step_graphs = False
    call = conditions(package) | {"multiplicity": 3}
    for dtype in (None, *HALVES):
        for model in (new, plain):
            torchops.replace(model, diffusion_dtype=dtype)
        tolerance = 1e-3 if dtype is None else 16 * torch.finfo(dtype).eps
        with torch.no_grad():
            stepped(plain, new, package, call, steps=1, tolerance=tolerance)
            assert recording(new) is None
            stepped(plain, new, package, call, steps=4, tolerance=tolerance)
        kept = [t for step in recording(new).constants for t in step.kept.values()]
        assert dtype is None or sum(t.dim() == 2 and t.dtype == dtype for t in kept) > 10


@dtypes
def test_conditions_in_16_bits(dtype: torch.dtype) -> None:
    _, new = sampler("boltz")
    layers = layers_of(new)
    s = torch.randn(1, TOKENS, 2 * C)
    with torch.no_grad():
        exact = [layer._conditions(s, samples=1) for layer in layers]
        torchops.replace(new, diffusion_dtype=dtype)
        with conditioned(layers, s):
            found = [given(layer, s) for layer in layers]
    for got, want in zip(found, exact, strict=True):
        assert got is not None
        for t, of in zip(got, want, strict=True):
            assert t.dtype == dtype
            assert distance(t, of) < 4 * torch.finfo(dtype).eps


@dtypes
@pytest.mark.parametrize("samples", [1, 3])
def test_rows_without_any_key_stay_finite(dtype: torch.dtype, samples: int) -> None:
    q, k, v = (torch.randn(samples, 4, 2, 8) for _ in range(3))
    mask = torch.ones(samples, 4)
    mask[0] = 0
    assert attention(q, k, v, torch.randn(1, 4, 4, 2), mask, 1e6, samples, dtype).isfinite().all()


@dtypes
def test_training_in_16_bits(dtype: torch.dtype) -> None:
    _, new = sampler("boltz")
    layer = layers_of(new)[0]
    a, s = (torch.randn(2, TOKENS, 2 * C, requires_grad=True) for _ in range(2))
    bias, mask = torch.randn(2, TOKENS, TOKENS, 2, requires_grad=True), torch.ones(2, TOKENS)
    inputs = [a, s, bias, *layer.parameters()]
    cotangent = torch.randn(2, TOKENS, 2 * C)
    want = torch.autograd.grad(layer(a, s, bias, mask), inputs, cotangent)
    torchops.replace(new, diffusion_dtype=dtype)
    got = torch.autograd.grad(layer(a, s, bias, mask), inputs, cotangent)
    for g, w, leaf in zip(got, want, inputs, strict=True):
        assert g.dtype == leaf.dtype
        assert distance(g, w) < 32 * torch.finfo(dtype).eps


def test_copies_keep_it_and_new_layers_have_none() -> None:
    _, new = sampler("boltz")
    assert {layer.diffusion_dtype for layer in layers_of(new)} == {None}
    torchops.replace(new, diffusion_dtype=torch.bfloat16)
    for copied in (copy.deepcopy(new), pickle.loads(pickle.dumps(new))):
        of = [m for m in copied.modules() if isinstance(m, DiffusionLayer)]
        assert {layer.diffusion_dtype for layer in of} == {torch.bfloat16}


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, "bfloat16"], ids=str)
def test_other_dtypes_are_refused(dtype: Any) -> None:
    _, new = sampler("boltz")
    with pytest.raises(ValueError, match=r"replace: expected diffusion_dtype bfloat16, float16 or None, got "):
        torchops.replace(new, diffusion_dtype=dtype)


def test_layers_of_several_dtypes() -> None:
    _, new = sampler("boltz")
    plain = copy.deepcopy(new)
    plain.score_model.step_graphs = False
    for model in (new, plain):
        torchops.replace(layers_of(model)[1], diffusion_dtype=torch.bfloat16)
        layers_of(model)[1].diffusion_dtype = torch.bfloat16
    with torch.no_grad():
        stepped(plain, new, "boltz", conditions("boltz") | {"multiplicity": 3}, steps=5, tolerance=0.1)


@dtypes
@pytest.mark.parametrize("of_model", [torch.float32, *HALVES], ids=str)
def test_it_overrides_autocast_and_keeps_the_stream(dtype: torch.dtype, of_model: torch.dtype) -> None:
    _, new = sampler("boltz")
    torchops.replace(new, diffusion_dtype=dtype)
    layer = layers_of(new)[0].to(of_model)
    a, s = (torch.randn(1, TOKENS, 2 * C, dtype=of_model) for _ in range(2))
    bias, mask = torch.randn(1, TOKENS, TOKENS, 2), torch.ones(1, TOKENS)
    with torch.no_grad():
        plain = layer(a, s, bias, mask)
        for other in HALVES:
            with torch.autocast("cpu", other):
                assert torch.equal(layer(a, s, bias, mask), plain)
    assert plain.dtype == of_model

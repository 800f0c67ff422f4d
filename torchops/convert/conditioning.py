"""What the layers of a diffusion transformer compute from the conditioning s alone (Abramson et al. 2024, algorithms 25
and 26): factors and terms of adaptive norms, and gates. A step of a sampler gives all layers the same s, so products of
all layers are one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from torchops.convert.module import are_plain, once, without_autocast

_OPS: Any = torch.ops.myops

# Of a layer's attention and of its transition.
ADAPTIVE_NORMS = ("adaln", "transition.adaln")
GATES = ("output_projection_linear", "transition.output_projection.0")

_Linear = tuple[Tensor, Tensor | None]


class Conditions(NamedTuple):
    """Of a layer's attention and of its transition: factor and term of the adaptive norm, and the gate of the
    update."""

    scale: Tensor
    shift: Tensor
    gate: Tensor
    transition_scale: Tensor
    transition_shift: Tensor
    transition_gate: Tensor


class ConditionedLayer(Protocol):
    diffusion_dtype: torch.dtype | None

    def parameter(self, layer: str, name: str) -> Tensor | None: ...
    def cast(self, t: Tensor) -> Tensor: ...
    def eps(self, norm: str) -> float: ...


class _Given(threading.local):
    s: Tensor | None = None
    conditions: Mapping[int, Conditions] = {}


_given = _Given()


def given(layer: ConditionedLayer, s: Tensor) -> Conditions | None:
    """The conditions of a layer within :func:`conditioned`, if these are the layer and the conditioning of that."""
    return _given.conditions.get(id(layer)) if _given.s is s else None


@contextmanager
def conditioned(layers: Sequence[ConditionedLayer], s: Tensor) -> Iterator[None]:
    """Calls within it of these layers find their conditions computed, by three products for all of them if they are
    alike. It packs their weights, so it is for calls of which what depends on parameters alone is computed once."""
    former = _given.s, _given.conditions
    _given.s, _given.conditions = s, _of_all(layers, once(s))
    try:
        yield
    finally:
        _given.s, _given.conditions = former


def _of_all(layers: Sequence[ConditionedLayer], s: Tensor) -> Mapping[int, Conditions]:
    """With the norm w * xhat(s), the product of a layer's weight W is xhat(s) @ (W * w).T."""
    norms = [f"{at}.s_norm" for at in ADAPTIVE_NORMS]
    factors = [layer.parameter(norm, "weight") for layer in layers for norm in norms]
    terms = [layer.parameter(norm, "bias") for layer in layers for norm in norms]
    scales, shifts = (
        [_linear(layer, f"{at}.{name}") for layer in layers for at in ADAPTIVE_NORMS] for name in ("s_scale", "s_bias")
    )
    gates = [_linear(layer, name) for layer in layers for name in GATES]
    eps = {layer.eps(norm) for layer in layers for norm in norms}
    shapes = {weight.shape for weight, _ in (*scales, *shifts, *gates)}
    alike = all(len({bias is None for _, bias in linears}) == 1 for linears in (scales, shifts, gates))
    dtypes = {layer.diffusion_dtype for layer in layers}
    if len(dtypes) != 1 or len(eps) != 1 or len(shapes) != 1 or not alike or any(term is not None for term in terms):
        return {}
    if not are_plain(s, *factors, *(t for linear in (*scales, *shifts, *gates) for t in linear)):
        return {}
    cast = layers[0].cast
    with nullcontext() if dtypes == {None} else without_autocast(s.device.type):
        xhat = _OPS.layer_norm(s, s.shape[-1:], None, None, eps.pop())
        scale = _products(_OPS.dense, xhat, _times(scales, factors), cast)
        shift = _products(_OPS._linear, xhat, _times(shifts, factors), cast)
        gate = _products(_OPS.dense, s, gates, cast)
    parts = list(zip(scale, shift, gate, strict=True))
    return {id(layer): Conditions(*parts[2 * i], *parts[2 * i + 1]) for i, layer in enumerate(layers)}


def _linear(layer: ConditionedLayer, name: str) -> _Linear:
    weight = layer.parameter(name, "weight")
    assert weight is not None
    return weight, layer.parameter(name, "bias")


def _times(linears: Sequence[_Linear], factors: Sequence[Tensor | None]) -> Sequence[_Linear]:
    return [(w if by is None else w * by, bias) for (w, bias), by in zip(linears, factors, strict=True)]


def _products(
    operator: Any, x: Tensor, linears: Sequence[_Linear], cast: Callable[[Tensor], Tensor]
) -> Sequence[Tensor]:
    """Of linear layers of one size, all with a bias or none."""
    weights, biases = zip(*linears, strict=True)
    bias = None if biases[0] is None else cast(torch.cat(biases))
    result: Tensor = operator(cast(x), cast(torch.cat(weights)), bias)
    return result.chunk(len(linears), -1)

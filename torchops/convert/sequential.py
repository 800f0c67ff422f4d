"""The part of :func:`torchops.replace` that finds linear layers and the activations after them in an nn.Sequential."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchops._core.report import Match
from torchops.convert.registry import (
    Declared,
    Turn,
    join,
    like,
    module_reason,
    parameters_reason,
    sequential_reason,
    swapper,
)
from torchops.convert.swapped import outside
from torchops.nn.gates import Dense, PackedGLU

# By the activation: what computes both, and its operator.
_FUSED: dict[type[nn.Module], tuple[type[nn.Module], str]] = {
    nn.Sigmoid: (Dense, "myops::dense"),
    nn.GLU: (PackedGLU, "myops::glu"),
}


class Applied(nn.Identity):
    """An activation that the layer before it in an ``nn.Sequential`` applies. If another layer takes the place of that
    one, it is applied here."""

    def __init__(self, activation: nn.Module, parent: nn.Sequential, key: str, kind: type[nn.Module]) -> None:
        super().__init__()
        self.training = activation.training
        self._key, self._kind = key, kind
        vars(self).update(_activation=activation, _parent=parent)  # past nn.Module, which would register them

    def forward(self, input: Tensor) -> Tensor:
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            return input
        else:
            held = self.__dict__
            before = held["_parent"]._modules.get(self._key)
            return input if isinstance(before, self._kind) else held["_activation"](input)


class _Pair(NamedTuple):
    parent: nn.Sequential
    key: str
    next_key: str

    @property
    def layer(self) -> nn.Linear:
        return self.parent._modules[self.key]  # type: ignore[return-value]

    @property
    def activation(self) -> nn.Module:
        return self.parent._modules[self.next_key]

    @property
    def plain(self) -> type[nn.Module]:
        """The class of PyTorch that the activation is of, or derives from."""
        return next(kind for kind in _FUSED if isinstance(self.activation, kind))


def _pairs(parent: nn.Module) -> Iterator[_Pair]:
    if isinstance(parent, nn.Sequential):
        for (key, child), (next_key, following) in pairwise(parent._modules.items()):
            if isinstance(child, nn.Linear) and isinstance(following, tuple(_FUSED)):
                yield _Pair(parent, key, next_key)


@swapper(Turn.PAIRS)
def replace_pairs(model: nn.Module, declared: Declared, known: Collection[str]) -> Iterator[Match]:
    """One layer takes the place of a pair, and of several that share a layer, if nothing else follows that anywhere."""
    names = {parent: name for name, parent in outside(model)}
    pairs = [pair for parent in names for pair in _pairs(parent)]
    kinds: dict[tuple[nn.Module, str], type[nn.Module]] = {(pair.parent, pair.key): pair.plain for pair in pairs}
    reasons: dict[int, str] = {}
    for pair in pairs:
        if reason := _reason_to_leave(pair):
            reasons.setdefault(id(pair.layer), reason)
    layers = {id(pair.layer): pair.plain for pair in pairs}
    for parent, name in names.items():
        for key, child in parent._modules.items():
            expected = layers.get(id(child))
            if expected is not None and kinds.get((parent, key)) is not expected:
                said = "sigmoid" if expected is nn.Sigmoid else "GLU"
                reasons.setdefault(id(child), f"no {said} follows it as {join(name, key)}")

    fused: dict[int, nn.Module] = {}
    for pair in pairs:
        name, layer = join(names[pair.parent], pair.key), pair.layer
        if (reason := reasons.get(id(layer))) is None:
            kind, _ = _FUSED[pair.plain]
            applied = Applied(pair.activation, pair.parent, pair.key, kind)
            pair.parent._modules[pair.key] = fused.setdefault(id(layer), like(layer, kind))
            pair.parent._modules[pair.next_key] = applied
        yield Match(name, type(layer).__name__, reason is None, reason)


def _reason_to_leave(pair: _Pair) -> str | None:
    activation: Any = pair.activation
    if reason := sequential_reason(pair.parent):
        return reason
    for module, plain in ((pair.layer, nn.Linear), (activation, pair.plain)):
        if reason := module_reason(module, plain):
            return reason
    if pair.plain is nn.GLU and activation.dim != -1:
        return f"the GLU is along dimension {activation.dim}, not the last one"
    if pair.plain is nn.GLU and pair.layer.out_features % 2:
        return "its layer has an odd number of features"
    return parameters_reason(pair.layer._parameters, "weight", _FUSED[pair.plain][1])

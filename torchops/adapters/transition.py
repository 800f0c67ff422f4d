"""The transition of a public package, ``down(silu(gate(z)) * up(z))`` after a layer norm, and its replacement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

import torchops
from torchops.adapters.module import Replacement, Shape, random

# Why the feed-forward layers of the OpenFold family stay.
HAS_RELU = "its activation is ReLU, without a gate, and torchops.transition has a gate by SiLU"


class Names(NamedTuple):
    """What a package calls the layers, and further children without parameters."""

    norm: str
    gate: str
    up: str
    down: str
    others: Mapping[str, str]


class Transition(Replacement):
    """A transition."""

    names: ClassVar[Names]
    operator = "myops::transition"

    def __init_subclass__(cls) -> None:
        norm, *linears = cls.names[:4]
        cls.layers = {norm: "norm", **dict.fromkeys(linears, "linear"), **cls.names.others}

    def __init__(self, of: nn.Module) -> None:
        super().__init__(of)
        self._eps = float(of._modules[self.names.norm].eps)  # type: ignore[union-attr, arg-type]

    def weights(self) -> dict[str, Tensor | None]:
        """The parameters, by the keywords of :func:`torchops.transition`."""
        return {
            f"{keyword}_{kind}": self.parameter(layer, kind)
            for keyword, layer in zip(("norm", "gate", "up", "down"), self.names[:4], strict=True)
            for kind in ("weight", "bias")
        }

    def update(self, x: Tensor, weights: dict[str, Tensor | None] | None = None) -> Tensor:
        """The transition of ``x``, with `weights` instead of the module's own if given."""
        weights = self.weights() if weights is None else weights
        return torchops.transition(x, **weights, eps=self._eps)  # type: ignore[arg-type]

    def updated(self, x: Tensor) -> Tensor:
        """``x + update(x)``, a new tensor."""
        return torch.ops.myops._add_transition(x, **self.weights(), eps=self._eps)

    def update_(self, x: Tensor, weights: dict[str, Tensor | None] | None = None) -> Tensor:
        """``x += update(x)``; returns ``x``."""
        weights = self.weights() if weights is None else weights
        return torchops.transition_(x, **weights, eps=self._eps)  # type: ignore[arg-type]

    @classmethod
    def sizes(cls, parameters: Mapping[str, nn.Parameter | None]) -> Mapping[str, Shape]:
        norm, gate, up, down, _ = cls.names
        hidden, c = parameters[f"{gate}.weight"].shape  # type: ignore[union-attr]
        return {norm: (c,), gate: (hidden, c), up: (hidden, c), down: (c, hidden)}

    def example(self, generator: torch.Generator) -> Tensor:
        c = self.parameter(self.names.gate, "weight").shape[1]  # type: ignore[union-attr]
        return random(generator, 2, 5, 4, c)

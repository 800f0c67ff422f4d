"""Boltz 1 and 2: ``boltz.model.layers.triangular_mult``."""

from __future__ import annotations

from torch import Tensor

from torchops.adapters.triangle import PACKED, Direction, TriangleAdapter, TriangleUpdate


class BoltzTriangleUpdate(TriangleUpdate):
    """In the place of ``TriangleMultiplicationOutgoing`` and ``TriangleMultiplicationIncoming``."""

    names = PACKED

    def forward(self, x: Tensor, mask: Tensor, use_kernels: bool = False) -> Tensor:
        return self.update(x, mask)


class FirstBoltzTriangleUpdate(BoltzTriangleUpdate):
    """... of releases that do not have ``use_kernels``, 2.0.0 for one."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return self.update(x, mask)


def _adapter(name: str, direction: Direction) -> TriangleAdapter:
    """Only the class says the direction."""
    replacements = (BoltzTriangleUpdate, FirstBoltzTriangleUpdate)
    return TriangleAdapter("boltz.model.layers.triangular_mult", (name,), replacements, lambda module: direction)


TRIANGLE_UPDATES = (
    _adapter("TriangleMultiplicationOutgoing", "outgoing"),
    _adapter("TriangleMultiplicationIncoming", "incoming"),
)

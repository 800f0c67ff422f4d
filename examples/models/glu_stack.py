"""A stack of gated linear units.

Dauphin et al., "Language Modeling with Gated Convolutional Networks" (2017), with kernels of width 1; the packed layer
before ``nn.GLU`` is how PyTorch's models write it.
"""

from __future__ import annotations

from torch import Tensor, nn


class GLUStack(nn.Module):
    """``x + glu(glu(...glu(norm(x))))``.

    Args:
        features: of a row.
        depth: number of units.

    Shape:
        ``(rows, features)`` to the same.
    """

    DEPTH = 4
    GATES = DEPTH

    def __init__(self, features: int = 256, depth: int = DEPTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(features)
        units = [(nn.Linear(features, 2 * features), nn.GLU()) for _ in range(depth)]
        self.units = nn.Sequential(*(layer for unit in units for layer in unit))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.units(self.norm(x))

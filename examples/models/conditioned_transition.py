"""The transition block of AlphaFold 3's diffusion module, conditioned by adaptive layer norm.

Abramson et al., "Accurate structure prediction of biomolecular interactions with AlphaFold 3", Nature 630 (2024),
supplementary algorithms 25 (transition) and 26 (AdaLN).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class AdaLN(nn.Module):
    """``sigmoid(scale(norm(s))) * norm(a) + shift(norm(s))``."""

    def __init__(self, features: int, conditions: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(features, elementwise_affine=False)
        self.condition_norm = nn.LayerNorm(conditions, bias=False)
        self.scale = nn.Linear(conditions, features)
        self.shift = nn.Linear(conditions, features, bias=False)

    def forward(self, a: Tensor, s: Tensor) -> Tensor:
        s = self.condition_norm(s)
        return torch.sigmoid(self.scale(s)) * self.norm(a) + self.shift(s)


class ConditionedTransition(nn.Module):
    """``a + sigmoid(out_gate(s)) * down(silu(gate(z)) * up(z))`` with ``z = AdaLN(a, s)``: three gates.

    Shape:
        ``(rows, features)`` and ``(rows, conditions)`` to ``(rows, features)``.
    """

    GATES = 3

    def __init__(self, features: int = 128, conditions: int = 128, factor: int = 2) -> None:
        super().__init__()
        hidden = factor * features
        self.adaln = AdaLN(features, conditions)
        self.gate = nn.Linear(features, hidden, bias=False)
        self.up = nn.Linear(features, hidden, bias=False)
        self.down = nn.Linear(hidden, features, bias=False)
        self.out_gate = nn.Linear(conditions, features)

    def forward(self, a: Tensor, s: Tensor) -> Tensor:
        z = self.adaln(a, s)
        b = F.silu(self.gate(z)) * self.up(z)
        return a + torch.sigmoid(self.out_gate(s)) * self.down(b)

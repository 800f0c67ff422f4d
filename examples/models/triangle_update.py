"""Triangle multiplicative update of AlphaFold's pair representation.

Jumper et al., "Highly accurate protein structure prediction with AlphaFold", Nature 596 (2021), supplementary
algorithms 11 (outgoing edges) and 12 (incoming edges).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class TriangleUpdate(nn.Module):
    """Updates the edge (i, j) from the edges that it forms triangles with: (i, k) and (j, k), or (k, i) and (k, j).

    Three of its six linear layers are gates: ``sigmoid(linear(z))``.

    Args:
        pair_features: of an edge, c_z in the paper.
        hidden_features: of the product, c in the paper.
        outgoing: sum over outgoing edges (i, k), (j, k); otherwise over incoming ones (k, i), (k, j).

    Shape:
        ``(batch, n, n, pair_features)`` to the same.
    """

    def __init__(self, pair_features: int = 128, hidden_features: int = 128, outgoing: bool = True) -> None:
        super().__init__()
        self.equation = "bikc,bjkc->bijc" if outgoing else "bkic,bkjc->bijc"
        self.norm = nn.LayerNorm(pair_features)
        self.left = nn.Linear(pair_features, hidden_features)
        self.left_gate = nn.Linear(pair_features, hidden_features)
        self.right = nn.Linear(pair_features, hidden_features)
        self.right_gate = nn.Linear(pair_features, hidden_features)
        self.gate = nn.Linear(pair_features, pair_features)
        self.product_norm = nn.LayerNorm(hidden_features)
        self.out = nn.Linear(hidden_features, pair_features)

    def forward(self, z: Tensor) -> Tensor:
        z = self.norm(z)
        a = torch.sigmoid(self.left_gate(z)) * self.left(z)
        b = torch.sigmoid(self.right_gate(z)) * self.right(z)
        product = torch.einsum(self.equation, a, b)
        return torch.sigmoid(self.gate(z)) * self.out(self.product_norm(product))


class TriangleBlock(nn.Module):
    """Both updates, each added to what it read, as in the Evoformer (algorithm 6)."""

    GATES = 6

    def __init__(self, pair_features: int = 128, hidden_features: int = 128) -> None:
        super().__init__()
        self.outgoing = TriangleUpdate(pair_features, hidden_features, outgoing=True)
        self.incoming = TriangleUpdate(pair_features, hidden_features, outgoing=False)

    def forward(self, z: Tensor) -> Tensor:
        z = z + self.outgoing(z)
        return z + self.incoming(z)

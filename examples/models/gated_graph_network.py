"""A graph network whose nodes are updated by a gated recurrent unit.

The unit is that of Cho et al., "Learning Phrase Representations using RNN Encoder-Decoder" (2014); as the update of
the nodes of a graph it is used in Li et al., "Gated Graph Sequence Neural Networks" (2016).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class GRUCell(nn.Module):
    """``h' = u * h + (1 - u) * tanh(W [x, r * h])`` with the gates r and u, each ``sigmoid(W [x, h] + b)``.

    Written on the concatenation ``[x, h]``, each gate is one linear layer. (In the spelling with a product for `x` and
    one for `h` the sigmoid takes a sum of two products, which :func:`torchops.dense` does not compute.)

    Shape:
        ``(nodes, input_features)`` and ``(nodes, hidden_features)`` to ``(nodes, hidden_features)``.
    """

    def __init__(self, input_features: int, hidden_features: int) -> None:
        super().__init__()
        both = input_features + hidden_features
        self.reset = nn.Sequential(nn.Linear(both, hidden_features), nn.Sigmoid())
        self.update = nn.Sequential(nn.Linear(both, hidden_features), nn.Sigmoid())
        self.candidate = nn.Linear(both, hidden_features)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        both = torch.cat([x, h], -1)
        r, u = self.reset(both), self.update(both)
        candidate = torch.tanh(self.candidate(torch.cat([x, r * h], -1)))
        return u * h + (1 - u) * candidate


class GatedGraph(nn.Module):
    """`STEPS` rounds of messages between neighbours, here on a ring, followed by the gated update of every node.

    Shape:
        ``(nodes, features)`` to the same.
    """

    STEPS = 2
    GATES = 2 * STEPS

    def __init__(self, features: int = 128) -> None:
        super().__init__()
        self.message = nn.Linear(features, features)
        self.cell = GRUCell(features, features)

    def forward(self, h: Tensor) -> Tensor:
        for _ in range(self.STEPS):
            messages = self.message(h)
            h = self.cell(messages.roll(1, 0) + messages.roll(-1, 0), h)
        return h

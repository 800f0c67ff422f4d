"""The pair half of a layer of AlphaFold 3, as papers write it: what `torchops.nn.PairLayer` is compared with.

Abramson et al., "Accurate structure prediction of biomolecular interactions with AlphaFold 3", Nature 630 (2024),
supplementary algorithm 17, without its single representation; the parts are algorithms 11 to 15. The names of the
parameters are those of `torchops.nn.PairLayer`, so that each loads the state dict of the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class TriangleMultiplication(nn.Module):
    """The edge (i, j) hears of the edges (i, k) and (j, k), or of (k, i) and (k, j)."""

    def __init__(self, c: int, outgoing: bool) -> None:
        super().__init__()
        self.equation = "bikc,bjkc->bijc" if outgoing else "bkic,bkjc->bijc"
        self.norm_in, self.norm_out = nn.LayerNorm(c), nn.LayerNorm(c)
        self.p_in, self.g_in = (nn.Linear(c, 2 * c, bias=False) for _ in range(2))
        self.p_out, self.g_out = (nn.Linear(c, c, bias=False) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        z = self.norm_in(x)
        ab = self.p_in(z) * self.g_in(z).sigmoid() * mask.unsqueeze(-1)
        o = torch.einsum(self.equation, *ab.chunk(2, -1))
        return self.p_out(self.norm_out(o)) * self.g_out(z).sigmoid()


class TriangleAttention(nn.Module):
    """The edges of a row, or of a column, attend to one another."""

    def __init__(self, c: int, heads: int, head_dim: int, starting: bool) -> None:
        super().__init__()
        self.heads, self.starting = heads, starting
        self.layer_norm = nn.LayerNorm(c)
        self.linear = nn.Linear(c, heads, bias=False)
        self.mha = nn.Module()
        for name in "qkvg":
            self.mha.add_module(f"linear_{name}", nn.Linear(c, heads * head_dim, bias=False))
        self.mha.add_module("linear_o", nn.Linear(heads * head_dim, c, bias=False))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if not self.starting:
            x, mask = x.transpose(1, 2), mask.mT
        mha: Any = self.mha
        z = self.layer_norm(x)
        q, k, v = (
            linear(z).unflatten(-1, (self.heads, -1)).transpose(-3, -2)
            for linear in (mha.linear_q, mha.linear_k, mha.linear_v)
        )
        scores = (q / q.shape[-1] ** 0.5) @ k.mT
        scores = scores + 1e9 * (mask[:, :, None, None] - 1) + self.linear(z).permute(0, 3, 1, 2).unsqueeze(1)
        o = (scores.softmax(-1) @ v).transpose(-3, -2)
        o = mha.linear_o(o.flatten(-2) * mha.linear_g(z).sigmoid())
        return o if self.starting else o.transpose(1, 2)


class Transition(nn.Module):
    """A gated feed-forward layer."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(c)
        self.fc1, self.fc2 = (nn.Linear(c, 4 * c, bias=False) for _ in range(2))
        self.fc3 = nn.Linear(4 * c, c, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        z = self.norm(x)
        return self.fc3(nn.functional.silu(self.fc1(z)) * self.fc2(z))


class PairLayer(nn.Module):
    """Five updates, each added to what it read.

    Shape:
        ``x`` of ``(batch, N, N, c)`` and ``mask`` of ``(batch, N, N)``, of zeros and ones and the dtype of ``x``.
    """

    def __init__(self, c: int = 128, heads: int = 4, head_dim: int = 32) -> None:
        super().__init__()
        self.tri_mul_out = TriangleMultiplication(c, outgoing=True)
        self.tri_mul_in = TriangleMultiplication(c, outgoing=False)
        self.tri_att_start = TriangleAttention(c, heads, head_dim, starting=True)
        self.tri_att_end = TriangleAttention(c, heads, head_dim, starting=False)
        self.transition_z = Transition(c)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for update in (self.tri_mul_out, self.tri_mul_in, self.tri_att_start, self.tri_att_end):
            x = x + update(x, mask)
        return x + self.transition_z(x)

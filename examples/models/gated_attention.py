"""Self-attention whose output is gated by a sigmoid of its input.

The gate is that of AlphaFold's attention (Jumper et al., Nature 596 (2021), supplementary algorithm 7); the same gate
after the attention of language models is studied in Qiu et al., "Gated Attention for Large Language Models" (2025).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class GatedAttention(nn.Module):
    """``x + out(sigmoid(gate(norm(x))) * attention(norm(x)))``: one gate.

    Args:
        features: of a token.
        heads: number of attention heads; it divides `features`.
        causal: a token sees only those before it, and itself.

    Shape:
        ``(batch, tokens, features)`` to the same.
    """

    GATES = 1

    def __init__(self, features: int = 128, heads: int = 4, causal: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.norm = nn.LayerNorm(features)
        self.query_key_value = nn.Linear(features, 3 * features, bias=False)
        self.gate = nn.Linear(features, features)
        self.out = nn.Linear(features, features)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        q, k, v = self.query_key_value(normed).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        gate = self.gate(normed).sigmoid()
        return x + self.out(gate * attended.transpose(1, 2).flatten(2))

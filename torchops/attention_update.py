"""The update of a pair tensor by triangle attention: layer norm, attention, gate and output product, with any parameters.

:class:`torchops.nn.TriangleAttention` and the modules of other packages share it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchops.attention import triangle_attention
from torchops.ops import gate, layer_norm

__all__ = ["AttentionWeights", "Node", "triangle_attention_update"]

Node = Literal["starting", "ending"]


class AttentionWeights(NamedTuple):
    """The parameters of triangle attention of ``c`` features in ``heads`` heads of ``d``."""

    norm_weight: Tensor | None
    """``(c,)``, as ``norm_bias``; ``None`` for 1 and 0."""
    norm_bias: Tensor | None
    bias_weight: Tensor
    """``(heads, c)``: makes the bias of the scores."""
    q: Tensor
    """``(heads * d, c)``, as ``k`` and ``v``."""
    k: Tensor
    v: Tensor
    gate: Tensor | None
    """``(heads * d, c)``; ``None`` for no gate."""
    gate_bias: Tensor | None
    """``(heads * d,)``, or ``None``."""
    out: Tensor
    """``(c, heads * d)``."""
    out_bias: Tensor | None
    """``(c,)``, or ``None``."""
    heads: int
    eps: float = 1e-5


def triangle_attention_update(
    x: Tensor,
    mask: Tensor | None,
    weights: AttentionWeights,
    node: Node = "starting",
    *,
    inplace: bool = False,
) -> Tensor:
    """What triangle attention adds to ``x``, a new contiguous tensor; or, with ``inplace``, ``x`` itself, to which that
    was added.

    Args:
        x: pair tensor of shape ``(*batch, N, N, c)``, with any number of batch dimensions.
        mask: of shape ``(*batch, N, N)``, bool or of numbers, or ``None``. A key whose mask is 0 (``False``) has no
            weight; any other number keeps it.
        weights: of one dtype. Where that has 16 bits, ``x`` may be float32.
        node: ``"starting"``: the edges of a row attend to one another; ``"ending"``: those of a column.
    """
    update = _composite(x, mask, weights, node)
    return x.add_(update) if inplace else update


def _composite(x: Tensor, mask: Tensor | None, w: AttentionWeights, node: Node) -> Tensor:
    """In differentiable operators, with q, k and v whole."""
    if node == "ending":
        x, mask = x.transpose(-2, -3), None if mask is None else mask.mT
    n, c = x.shape[-2:]
    norm = (t if t is None else t.to(x.dtype) for t in w[:2])
    z = layer_norm(x, (c,), *norm, w.eps).to(w.q.dtype).reshape(-1, n, n, c)
    qkv = F.linear(z, torch.cat([w.q, w.k, w.v])).unflatten(-1, (3, w.heads, -1))
    q, k, v = (t.transpose(-3, -2) for t in qkv.unbind(-3))
    bias = F.linear(z, w.bias_weight).movedim(-1, 1).unsqueeze(1)
    kept = None if mask is None else (mask != 0).reshape(-1, n, 1, 1, n)
    o = triangle_attention(q, k, v, bias, kept).transpose(-3, -2).flatten(-2)
    if w.gate is not None:
        o = gate(o, z, w.gate, w.gate_bias)
    out = F.linear(o, w.out, w.out_bias).view(x.shape)
    return out.transpose(-2, -3).contiguous() if node == "ending" else out

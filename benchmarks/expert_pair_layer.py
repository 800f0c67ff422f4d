"""The pair layer as an expert would assemble it from PyTorch's parts: the products of the triangle updates on matrices
of positions, attention by FlexAttention, everything compiled.

FlexAttention takes seven times as long unless the bias has contiguous rows of keys (N = 768 on an H100: 9.8 ms instead
of 1.3). Inductor would remove a `contiguous()` before it, so a custom operator, which Inductor cannot see through,
makes that copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from alphafold3_pair_layer import PairLayer, TriangleAttention, TriangleMultiplication
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

__all__ = ["assembled", "compiled"]


@torch.library.custom_op("torchops_benchmarks::rows_of_keys", mutates_args=())
def _rows_of_keys(bias: Tensor) -> Tensor:
    return bias.clone(memory_format=torch.contiguous_format)


@_rows_of_keys.register_fake
def _(bias: Tensor) -> Tensor:
    return bias.new_empty(bias.shape)


_rows_of_keys.register_autograd(lambda ctx, grad: grad)


def _triangle(layer: TriangleMultiplication, x: Tensor, mask: Tensor) -> Tensor:
    z = layer.norm_in(x)
    ab = layer.p_in(z) * layer.g_in(z).sigmoid() * mask.unsqueeze(-1)
    a, b = ab.movedim(-1, -3).contiguous().chunk(2, -3)
    o = a @ b.mT if layer.equation.startswith("bik") else a.mT @ b
    return layer.p_out(layer.norm_out(o.movedim(-3, -1))) * layer.g_out(z).sigmoid()


def _attention(layer: TriangleAttention, x: Tensor, mask: Tensor) -> Tensor:
    if not layer.starting:
        x, mask = x.transpose(1, 2), mask.mT
    mha: Any = layer.mha
    batch, n, _, _ = x.shape
    z = layer.layer_norm(x)
    packed = F.linear(z, torch.cat([mha.linear_q.weight, mha.linear_k.weight, mha.linear_v.weight]))
    q, k, v = (t.unflatten(-1, (layer.heads, -1)).transpose(-3, -2).flatten(0, 1) for t in packed.chunk(3, -1))
    bias = _rows_of_keys(layer.linear(z).permute(0, 3, 1, 2))
    kept = mask.flatten(0, 1)

    def score(value: Tensor, row: Tensor, h: Tensor, j: Tensor, key: Tensor) -> Tensor:
        return value + bias[row // n, h, j, key] + (kept[row, key] - 1) * 1e9

    attended: Any = flex_attention(q, k, v, score_mod=score)
    o = attended.unflatten(0, (batch, n)).transpose(-3, -2).flatten(-2)
    o = mha.linear_o(o * mha.linear_g(z).sigmoid())
    return o if layer.starting else o.transpose(1, 2)


def assembled(layer: PairLayer) -> Callable[[Tensor, Tensor], Tensor]:
    """A function that computes the same as `layer`."""

    def forward(x: Tensor, mask: Tensor) -> Tensor:
        for triangle in (layer.tri_mul_out, layer.tri_mul_in):
            x = x + _triangle(triangle, x, mask)
        for attention in (layer.tri_att_start, layer.tri_att_end):
            x = x + _attention(attention, x, mask)
        return x + layer.transition_z(x)

    return forward


def compiled(layer: PairLayer) -> Callable[[Tensor, Tensor], Tensor]:
    return torch.compile(assembled(layer), dynamic=False)

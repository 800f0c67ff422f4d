"""The triangle attention update in ATen operators, in panels (`panels.py`): the steps of a panel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from torchops._triangle_attention.attention import aten as attention
from torchops._triangle_attention.attention.arguments import Inputs as AttentionInputs
from torchops._triangle_attention.attention.arguments import Saved
from torchops._triangle_attention.update import panels
from torchops._triangle_attention.update.arguments import Weights, norm_parameters

__all__ = ["add", "attend", "attend_backward", "norm", "prepared_mask", "triangle_bias", "whole_bias"]


def norm(x: Tensor, w: Weights) -> Tensor:
    """z, contiguous and of the weights' dtype."""
    parameters = norm_parameters(x, w.norm_weight, w.norm_bias)
    return torch.ops.myops.layer_norm(x, x.shape[-1:], *parameters, w.eps).to(w.q.dtype)


def triangle_bias(x: Tensor, w: Weights, ending: bool) -> Tensor:
    """``(batch, heads, j, k)``. A part of x gives part of the rows j."""
    batch, outer, inner, c = x.shape
    bias = w.q.new_empty((batch, w.heads, *((inner, outer) if ending else (outer, inner))))
    for b, rows in panels.panels(batch, outer, inner * c * (x.element_size() + bias.element_size()), panels.CPU_BYTES):
        made = F.linear(norm(x[b, rows], w), w.bias_weight)
        if ending:
            bias[b, :, :, rows] = made.permute(0, 3, 2, 1)
        else:
            bias[b, :, rows] = made.permute(0, 3, 1, 2)
    return bias


def whole_bias(bias: Tensor) -> Tensor:
    """Prepares a bias ``(batch, heads, j, k)`` for `attend`."""
    return bias.contiguous()


def prepared_mask(mask: Tensor, bias: Tensor) -> Tensor:
    """Prepares a mask ``(batch, i, k)`` of any dtype for `attend`. The result can be sliced by rows."""
    return (mask if mask.dtype == torch.bool else mask != 0)[:, :, None, None]


def attend(a: AttentionInputs, saved: Saved | None) -> Tensor:
    made, logsumexp = attention.forward(a._replace(bias=a.bias.unsqueeze(1)))
    if saved is None:
        return made
    saved.logsumexp.copy_(logsumexp)
    return saved.out.copy_(made)


def add(target: Tensor, x: Tensor | None, o: Tensor, z: Tensor, w: Weights) -> None:
    """Writes the product of the gated ``o`` with ``w.out``, plus ``x``, to ``target``, which may be ``x``. May
    overwrite ``o``."""
    if w.gate is not None:
        o = torch.ops.myops.gate(o, z, w.gate, w.gate_bias)
    update = F.linear(o, w.out, w.out_bias)
    target.copy_(update) if x is None else torch.add(x, update, out=target)


def attend_backward(
    grad: Tensor, a: AttentionInputs, saved: Saved, output_mask: Sequence[bool], into: tuple[Tensor, Tensor, Tensor]
) -> Tensor | None:
    *of_qkv, of_bias = attention.backward(grad, a._replace(bias=a.bias.unsqueeze(1)), saved, output_mask)
    for target, made in zip(into, of_qkv, strict=True):
        if made is not None:
            target.copy_(made)
    return None if of_bias is None else of_bias.squeeze(1)

"""A triangle update with the gate before the last projection: inference only, float32 with 16-bit products.

With z = layer_norm(x), a and b as in ``triangle_multiplicative_update`` and o[i, j] = sum_k a[i, k] b[j, k], it is
``(layer_norm(o) * sigmoid(z @ gate.T)) @ p_out.T``: the formula of GPU MODE's public task "TriMul", which
``benchmarks/trimul.py`` runs. No module of a public package computes it, so torchops has no operator for it.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Weights", "update", "written_out"]


class Weights(NamedTuple):
    """For c features and d channels: norm (c,), a to gate (d, c), norm_out (d,), p_out (c, d)."""

    norm: Tensor
    norm_bias: Tensor
    a: Tensor
    a_gate: Tensor
    b: Tensor
    b_gate: Tensor
    gate: Tensor
    norm_out: Tensor
    norm_out_bias: Tensor
    p_out: Tensor


def written_out(x: Tensor, mask: Tensor | None, weights: Weights, eps: float = 1e-5) -> Tensor:
    """In ATen operators, in the dtype of the arguments."""
    w = weights
    z = F.layer_norm(x, x.shape[-1:], w.norm, w.norm_bias, eps)
    factor = 1 if mask is None else mask.unsqueeze(-1)
    a = F.linear(z, w.a) * torch.sigmoid(F.linear(z, w.a_gate)) * factor
    b = F.linear(z, w.b) * torch.sigmoid(F.linear(z, w.b_gate)) * factor
    o = (a.movedim(-1, -3) @ b.movedim(-1, -3).mT).movedim(-3, -1)
    n = F.layer_norm(o, o.shape[-1:], w.norm_out, w.norm_out_bias, eps)
    return F.linear(n * torch.sigmoid(F.linear(z, w.gate)), w.p_out)


def fits(x: Tensor, weights: Weights, mask: Tensor | None = None) -> bool:
    """Whether the kernels support these arguments: float32 matrices of whole tiles, all on one device."""
    if x.dim() != 4:
        return False
    c, d = x.shape[3], 128
    shapes = ((c,), (c,), *[(d, c)] * 5, (d,), (d,), (c, d))
    return (
        x.dtype == torch.float32
        and x.shape[0] > 0
        and x.shape[1] == x.shape[2] > 1
        and (c in (64, 128) or (c % 128 == 0 and 0 < c <= 768))
        and (mask is None or (mask.shape == x.shape[:3] and mask.device == x.device))
        and all(w.dtype == torch.float32 and w.device == x.device and w.is_contiguous() for w in weights)
        and all(w.shape == shape for w, shape in zip(weights, shapes, strict=True))
    )


def _kernels() -> Any:
    """The module with the kernels, or None where Triton is not installed."""
    try:
        return importlib.import_module("benchmarks.gated_triangle_triton")
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        return None


def update(x: Tensor, mask: Tensor | None, weights: Weights, eps: float = 1e-5) -> Tensor:
    """The update of x (batch, N, N, c) with a mask (batch, N, N) of any dtype or None, shaped like x. Uses the kernels
    if they support the arguments and no gradient is needed."""
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, mask, *weights))
    if x.is_cuda and not needs_grad and (kernels := _kernels()):
        out = kernels.run(x, mask, weights, eps)
        if out is not None:
            return out
    return written_out(x, mask, weights, eps)

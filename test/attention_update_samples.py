"""Parameters for triangle_attention_update, and comparisons with it as papers write it."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from checks import random_like
from torch import Tensor
from triangle_attention_samples import update_reference

from torchops import AttentionWeights
from torchops._triangle_attention.update.arguments import Node

TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def reference(x: Tensor, mask: Tensor | None, w: AttentionWeights, node: Node) -> Tensor:
    return update_reference(x, mask, list(w[:10]), w.heads, w.eps, node == "ending")


def weights(
    c: int = 12, heads: int = 3, d: int = 5, *, gate: bool = True, biases: bool = True, dtype: Any = torch.float64,
    device: str = "cpu",
) -> AttentionWeights:  # fmt: skip
    seed = itertools.count()

    def random(*shape: int) -> Tensor:
        scale = shape[-1] ** -0.5 if len(shape) == 2 else 0.3
        return (random_like(torch.empty(shape, dtype=torch.float64), next(seed)) * scale).to(dtype).to(device)

    width = heads * d
    return AttentionWeights(
        norm_weight=random(c) + 1,
        norm_bias=random(c),
        bias_weight=random(heads, c),
        q=random(width, c),
        k=random(width, c),
        v=random(width, c),
        gate=random(width, c) if gate else None,
        gate_bias=random(width) if gate and biases else None,
        out=random(c, width),
        out_bias=random(c) if biases else None,
        heads=heads,
    )


def leaves_of(w: AttentionWeights, dtype: torch.dtype | None = None) -> AttentionWeights:
    made = (t.detach().to(dtype or t.dtype).requires_grad_() if isinstance(t, Tensor) else t for t in w)
    return AttentionWeights._make(made)


def with_gradients(function: Any, x: Tensor, mask: Tensor | None, w: AttentionWeights, node: Node) -> list[Tensor]:
    out = function(x, mask, w, node)
    cotangent = random_like(out.detach().cpu().double(), 7).to(out)
    leaves = [t for t in (x, *w) if isinstance(t, Tensor)]
    return [out.detach(), *torch.autograd.grad(out, leaves, cotangent)]


def assert_near(got: list[Tensor], exact: list[Tensor], tolerance: float) -> None:
    for i, (g, e) in enumerate(zip(got, exact, strict=True)):
        assert g.shape == e.shape
        distance = ((g.double() - e).norm() / e.norm().clamp_min(1e-3)).item()
        assert distance <= tolerance, f"{i}: {distance}"

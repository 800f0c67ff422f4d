"""Mode `py`: sigmoid, softmax, layer norm and the square product with their backward formulas; g is the cotangent."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

EPS = 1e-5


class SigmoidFunction(torch.autograd.Function):
    """y = 1 / (1 + exp(-x)),  dx = g * y * (1 - y)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = 1 / (1 + torch.exp(-x))
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Tensor:
        (g,) = cotangents
        (y,) = ctx.saved_tensors
        return g * y * (1 - y)


class SoftmaxFunction(torch.autograd.Function):
    """y = exp(x - max) / sum,  dx = y * (g - sum(g * y)), over the last dimension.

    The shift by the maximum changes nothing in the result, and keeps exp from overflowing.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        e = torch.exp(x - x.amax(-1, keepdim=True))
        y = e / e.sum(-1, keepdim=True)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Tensor:
        (g,) = cotangents
        (y,) = ctx.saved_tensors
        return y * (g - (g * y).sum(-1, keepdim=True))


def _normalise(x: Tensor) -> tuple[Tensor, Tensor]:
    var, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
    rstd = torch.rsqrt(var + EPS)
    return (x - mean) * rstd, rstd


class LayerNormFunction(torch.autograd.Function):
    """n = (x - mean) / sqrt(var + eps),  y = n * weight + bias, over the last dimension.

    dn = g * weight
    dx = (dn - mean(dn) - n * mean(dn * n)) / sqrt(var + eps)
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        n, _ = _normalise(x)
        ctx.save_for_backward(x, weight)
        return n * weight + bias

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple[Tensor, Tensor, Tensor]:
        (g,) = cotangents
        x, weight = ctx.saved_tensors
        # Recomputed, not saved: they are neither inputs nor outputs, so autograd would treat saved ones as constants,
        # and the second derivative would be silently wrong.
        n, rstd = _normalise(x)
        dn = g * weight
        dx = (dn - dn.mean(-1, keepdim=True) - n * (dn * n).mean(-1, keepdim=True)) * rstd
        rows = tuple(range(x.dim() - 1))
        return dx, (g * n).sum(rows), g.sum(rows)


class SquareMatmulFunction(torch.autograd.Function):
    """y = a @ b,  da = g @ b.T,  db = a.T @ g."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple[Tensor, Tensor]:
        (g,) = cotangents
        a, b = ctx.saved_tensors
        return g @ b.T, a.T @ g


FUNCTIONS = {
    "sigmoid": SigmoidFunction.apply,
    "softmax": SoftmaxFunction.apply,
    "layer_norm": LayerNormFunction.apply,
    "square_matmul": SquareMatmulFunction.apply,
}

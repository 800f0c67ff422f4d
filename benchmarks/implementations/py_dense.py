"""Mode `py`: a dense layer as an `autograd.Function`, with the backward formulas written out.

    z = x @ w.T + b        y = sigmoid(z)        and for a loss L with the cotangent g = dL/dy:

    dz = g * sigmoid'(z) = g * y * (1 - y)
    dx = dz @ w            every row of x meets w once
    dw = dz.T @ x          summed over the rows, which share w
    db = sum of dz over the rows, which share b

The derivative of the sigmoid is written in terms of y, so z need not be kept. Autograd over the eager formula keeps the
same tensors: x, w and y.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class DenseFunction(torch.autograd.Function):
    """`sigmoid(x @ w.T + b)` for x (rows, in), w (out, in), b (out,)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        y = torch.sigmoid(x @ w.T + b)
        # x and w are inputs and y is an output. Only inputs and outputs may be saved: autograd knows where they come
        # from, so the backward below, which consists of differentiable operators, can itself be differentiated.
        ctx.save_for_backward(x, w, y)
        return y

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple[Tensor, Tensor, Tensor]:
        (g,) = cotangents
        x, w, y = ctx.saved_tensors
        dz = g * y * (1 - y)
        return dz @ w, dz.T @ x, dz.sum(0)


def dense(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Called by `Dense(..., mode="py")` of this package; that module owns the parameters."""
    return DenseFunction.apply(x, w, b)


FUNCTIONS = {"dense": dense}

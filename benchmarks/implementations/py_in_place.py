"""Mode `py`: operators that overwrite their argument, and tell autograd so with `ctx.mark_dirty`.

That is enough in eager mode. Under `torch.compile`, a marked tensor that is a graph input and needs a gradient gets a
wrong one, which is why the operators of torchops use another recipe (`src/autograd/recipe.h`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .py_rows import SigmoidFunction, SoftmaxFunction

PANEL_ROWS = 8192


class SigmoidInPlace(SigmoidFunction):
    """The inherited gradient only needs the result, so overwriting the input loses nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.neg_().exp_().add_(1).reciprocal_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x


class SoftmaxInPlace(SoftmaxFunction):
    """Four passes over memory where one kernel needs one, but no second tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.sub_(x.amax(-1, keepdim=True)).exp_()
        x.div_(x.sum(-1, keepdim=True))
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x


class SquareMatmulInPlace(torch.autograd.Function):
    """`a @ b` over `a`, panel by panel: a row of the result only depends on that row of `a`.

    The second buffer has the size of a panel, not of `a`. The gradient of `b` needs the old `a`, which is copied only
    then. Autograd doesn't know where that copy comes from, so `once_differentiable` makes a second derivative raise
    instead of being silently wrong.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        old = a.clone() if ctx.needs_input_grad[1] else None
        for panel in a.split(PANEL_ROWS):
            panel.copy_(panel @ b)
        ctx.mark_dirty(a)
        ctx.save_for_backward(old, b)
        return a

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Any) -> tuple[Tensor, Tensor | None]:
        (g,) = cotangents
        old, b = ctx.saved_tensors
        return g @ b.T, None if old is None else old.T @ g


FUNCTIONS = {
    "sigmoid_": SigmoidInPlace.apply,
    "softmax_": SoftmaxInPlace.apply,
    "square_matmul_": SquareMatmulInPlace.apply,
}

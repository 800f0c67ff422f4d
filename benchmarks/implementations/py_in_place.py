"""Mode `py`: operators that overwrite their argument, which they tell autograd with `ctx.mark_dirty`.

That is enough in eager mode. Under `torch.compile` a marked tensor that is an input of the graph and needs a gradient
gets a wrong one, which is why the operators of torchops go another way (`src/autograd/recipe.h`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .py_rows import SigmoidFunction, SoftmaxFunction

PANEL_ROWS = 8192


class SigmoidInPlace(SigmoidFunction):
    """The gradient, inherited, needs the result alone, so overwriting the input loses nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.neg_().exp_().add_(1).reciprocal_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x


class SoftmaxInPlace(SoftmaxFunction):
    """Four passes over memory, where one kernel needs one; but no second tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.sub_(x.amax(-1, keepdim=True)).exp_()
        x.div_(x.sum(-1, keepdim=True))
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x


class SquareMatmulInPlace(torch.autograd.Function):
    """`a @ b` over `a`, panel by panel: a row of the result depends on that row of `a` alone.

    The second buffer has the size of a panel instead of that of `a`. The gradient of `b` needs the old `a`; only then
    is it copied. Autograd does not know where that copy comes from, hence `once_differentiable`: a second derivative
    would be wrong without a word, and now it raises.
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

"""Mode `py`: a gate and gated linear units as `autograd.Function`s that compute the gate again instead of saving it.

    s = sigmoid(x @ w.T + b)        y = v * s        and for the cotangent g of y:

    dv = g * s        dz = g * v * s * (1 - s)        dx, dw and db from dz as in a linear layer

s has the size of v. Saved, it would live until backward; computed again, it costs one product. The same goes for both
factors of a gated linear unit, y = z * act(u):

    dz = g * act(u)        du = g * z * act'(u)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _linear_gradients(dz: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return dz.T @ x, dz.sum(0)


class GateFunction(torch.autograd.Function):
    """`v * sigmoid(x @ w.T + b)` for v (rows, out), x (rows, in), w (out, in), b (out,)."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(v, x, w, b)
        return v * torch.sigmoid(x @ w.T + b)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple[Tensor, ...]:
        (g,) = cotangents
        v, x, w, b = ctx.saved_tensors
        s = torch.sigmoid(x @ w.T + b)
        dv = g * s
        dz = dv * v * (1 - s)
        return dv, dz @ w, *_linear_gradients(dz, x)


class GluFunction(torch.autograd.Function):
    """`(x @ w.T + b) * act(x @ wg.T + bg)` for x (rows, in), w and wg (out, in), b and bg (out,)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, wg: Tensor, b: Tensor, bg: Tensor, silu: bool) -> Tensor:
        ctx.save_for_backward(x, w, wg, b, bg)
        ctx.silu = silu
        u = x @ wg.T + bg
        gate = torch.sigmoid(u)
        return (x @ w.T + b) * (u * gate if silu else gate)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple[Tensor | None, ...]:
        (g,) = cotangents
        x, w, wg, b, bg = ctx.saved_tensors
        u = x @ wg.T + bg
        s = torch.sigmoid(u)
        dz = g * u * s if ctx.silu else g * s
        du = g * (x @ w.T + b) * s * (1 + u * (1 - s) if ctx.silu else 1 - s)
        (dw, db), (dwg, dbg) = _linear_gradients(dz, x), _linear_gradients(du, x)
        return dz @ w + du @ wg, dw, dwg, db, dbg, None


def glu(x: Tensor, w: Tensor, wg: Tensor, b: Tensor, bg: Tensor) -> Tensor:
    return GluFunction.apply(x, w, wg, b, bg, False)


def swiglu(x: Tensor, w: Tensor, wg: Tensor, b: Tensor, bg: Tensor) -> Tensor:
    return GluFunction.apply(x, w, wg, b, bg, True)


FUNCTIONS = {"gate": GateFunction.apply, "glu": glu, "swiglu": swiglu}

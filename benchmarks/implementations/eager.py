"""Mode `eager`: the formulas in PyTorch's operators, which are also what is compiled, and the reference for checks.

Each operator below is at least one pass over memory: `torch.sigmoid(F.linear(x, w, b))` writes the pre-activation,
reads it back and writes the result. `eager_in_place.py` shows what PyTorch can do without a new tensor for each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def dense(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.sigmoid(F.linear(x, w, b))


def gate(v: Tensor, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return v * torch.sigmoid(F.linear(x, w, b))


def gate_(v: Tensor, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return v.mul_(torch.sigmoid(F.linear(x, w, b)))


def glu(x: Tensor, w: Tensor, wg: Tensor, b: Tensor, bg: Tensor) -> Tensor:
    return F.linear(x, w, b) * torch.sigmoid(F.linear(x, wg, bg))


def swiglu(x: Tensor, w: Tensor, wg: Tensor, b: Tensor, bg: Tensor) -> Tensor:
    return F.linear(x, w, b) * F.silu(F.linear(x, wg, bg))


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias)


def transition(x: Tensor, weight: Tensor, bias: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    z = F.layer_norm(x, weight.shape, weight, bias)
    return F.linear(F.silu(F.linear(z, gate)) * F.linear(z, up), down)


# The plain way to overwrite: the result is a second tensor that is copied back.


def softmax_(x: Tensor) -> Tensor:
    return x.copy_(softmax(x))


def layer_norm_(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.copy_(layer_norm(x, weight, bias))


def square_matmul_(a: Tensor, b: Tensor) -> Tensor:
    return a.copy_(a @ b)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "dense": dense,
    "gate": gate,
    "gate_": gate_,
    "glu": glu,
    "swiglu": swiglu,
    "sigmoid": torch.sigmoid,
    "sigmoid_": torch.sigmoid_,
    "softmax": softmax,
    "softmax_": softmax_,
    "layer_norm": layer_norm,
    "layer_norm_": layer_norm_,
    "square_matmul": torch.matmul,
    "square_matmul_": square_matmul_,
    "transition": transition,
    "add_transition_": lambda x, *parameters: x.add_(transition(x, *parameters)),
}

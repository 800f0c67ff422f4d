"""Mode `eager-in-place`: PyTorch's operators, each overwriting what is no longer needed.

`F.linear(x, w, b).sigmoid_()` allocates no extra tensor for the pre-activation, and `torch.softmax(x, -1, out=x)` none
at all. Two operators are missing, since PyTorch has no such form of them: layer norm has no `out=`, and `torch.mm(a, b,
out=a)` overwrites what it still has to read.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def dense(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, w, b).sigmoid_()


def gate(v: Tensor, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return _times(dense(x, w, b), v)


def gate_(v: Tensor, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return v.mul_(dense(x, w, b))


def glu(x: Tensor, w: Tensor, wg: Tensor, b: Tensor, bg: Tensor) -> Tensor:
    return _times(dense(x, wg, bg), F.linear(x, w, b))


def swiglu(x: Tensor, w: Tensor, wg: Tensor, b: Tensor, bg: Tensor) -> Tensor:
    z = F.linear(x, wg, bg)
    # The gradient of SiLU needs z.
    return _times(F.silu(z, inplace=not z.requires_grad), F.linear(x, w, b))


def softmax_(x: Tensor) -> Tensor:
    return torch.softmax(x, -1, out=x)


def _times(gate: Tensor, value: Tensor) -> Tensor:
    # The gradient of the sigmoid needs the gate.
    return gate * value if gate.requires_grad else gate.mul_(value)


FUNCTIONS = {
    "dense": dense,
    "gate": gate,
    "gate_": gate_,
    "glu": glu,
    "swiglu": swiglu,
    "softmax_": softmax_,
}

"""Mode `eager-in-place`: PyTorch's operators, each overwriting what is no longer needed.

`F.linear(x, w, b).sigmoid_()` allocates no extra tensor for the pre-activation, `torch.softmax(x, -1, out=x)` none at
all, and `x.addmm_(h, w)` adds a product to x in the product itself. The `out=` of layer norm is a generated one: it
gives the right result over x too, by computing a new tensor and copying it. One operator is missing, since PyTorch has
no such form of it: `torch.mm(a, b, out=a)` overwrites what it still has to read.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .py_rows import EPS


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


def transition(x: Tensor, weight: Tensor, bias: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(_hidden(x, weight, bias, gate, up), down)


def add_transition_(x: Tensor, weight: Tensor, bias: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return x.addmm_(_hidden(x, weight, bias, gate, up), down.T)


def _hidden(x: Tensor, weight: Tensor, bias: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    z = F.layer_norm(x, weight.shape, weight, bias)
    h = F.linear(z, gate)
    return _times(F.silu(h, inplace=not h.requires_grad), F.linear(z, up))


def layer_norm_(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    # Buffers without elements take the size of the mean and of the reciprocal deviation of each row, but not the dtype.
    dtype = torch.float32 if x.is_cuda and x.dtype.itemsize == 2 else x.dtype
    mean, deviation = (x.new_empty(0, dtype=dtype) for _ in range(2))
    torch.ops.aten.native_layer_norm.out(x, weight.shape, weight, bias, EPS, out0=x, out1=mean, out2=deviation)
    return x


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
    "layer_norm_": layer_norm_,
    "transition": transition,
    "add_transition_": add_transition_,
}

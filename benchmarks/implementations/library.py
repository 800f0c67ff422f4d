"""Modes `cpp` and `cuda`: the operators of torchops, which choose their path themselves."""

from __future__ import annotations

from torch import Tensor

import torchops


def swiglu(x: Tensor, w: Tensor, wg: Tensor, b: Tensor, bg: Tensor) -> Tensor:
    return torchops.glu(x, w, wg, b, bg, activation="silu")


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torchops.layer_norm(x, weight.shape, weight, bias)


def layer_norm_(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torchops.layer_norm_(x, weight.shape, weight, bias)


def transition(x: Tensor, weight: Tensor, bias: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return torchops.transition(x, norm_weight=weight, norm_bias=bias, gate_weight=gate, up_weight=up, down_weight=down)


def add_transition_(x: Tensor, weight: Tensor, bias: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return torchops.add_transition_(
        x, norm_weight=weight, norm_bias=bias, gate_weight=gate, up_weight=up, down_weight=down
    )


FUNCTIONS = {
    "dense": torchops.dense,
    "gate": torchops.gate,
    "gate_": torchops.gate_,
    "glu": torchops.glu,
    "swiglu": swiglu,
    "sigmoid": torchops.sigmoid,
    "sigmoid_": torchops.sigmoid_,
    "softmax": torchops.softmax,
    "softmax_": torchops.softmax_,
    "layer_norm": layer_norm,
    "layer_norm_": layer_norm_,
    "square_matmul": torchops.square_matmul,
    "square_matmul_": torchops.square_matmul_,
    "transition": transition,
    "add_transition_": add_transition_,
}

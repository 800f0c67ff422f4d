"""layer_norm and layer_norm_, with weight and bias, over the last dimension."""

from __future__ import annotations

import torch
from torch import Tensor

from .case import Call, Shape
from .implementations.py_rows import EPS
from .rows import row_operators


def _make(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    weight = torch.rand(shape[-1], device=device, dtype=dtype)
    bias = torch.randn(shape[-1], device=device, dtype=dtype)
    return torch.randn(shape, device=device, dtype=dtype), weight, bias


def _into(x: Tensor, weight: Tensor, bias: Tensor) -> Call:
    """PyTorch's `out=` of layer norm, whose results are the mean and the reciprocal deviation of each row, too."""
    out = torch.native_layer_norm(x, weight.shape, weight, bias, EPS)

    def call(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        made: tuple[Tensor, ...] = torch.ops.aten.native_layer_norm.out(
            x, weight.shape, weight, bias, EPS, out0=out[0], out1=out[1], out2=out[2]
        )
        return made[0]

    return call


OPERATORS = row_operators("layer_norm", _make, into=_into)

"""layer_norm and layer_norm_, with weight and bias, over the last dimension."""

from __future__ import annotations

import torch
from torch import Tensor

from .case import Shape
from .rows import row_operators


def _make(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    weight = torch.rand(shape[-1], device=device, dtype=dtype)
    bias = torch.randn(shape[-1], device=device, dtype=dtype)
    return torch.randn(shape, device=device, dtype=dtype), weight, bias


OPERATORS = row_operators("layer_norm", _make)

"""layer_norm_ against `F.layer_norm`, which has no in-place form, and against copying its result back."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

import torchops

from .contenders import compiled, dtype_name
from .harness import OURS, Case, Workload, rotate


def _ours(x: Tensor, weight: Tensor, bias: Tensor) -> object:
    return torchops.layer_norm_(x, weight.shape, weight, bias)


def _out_of_place(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.layer_norm(x, weight.shape, weight, bias)


def _copy(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.copy_(functional.layer_norm(x, weight.shape, weight, bias))


def _make(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Workload:
    weight = torch.rand(columns, dtype=dtype, device=device)
    bias = torch.randn(columns, dtype=dtype, device=device)
    contenders = {
        OURS: _ours,
        "F.layer_norm (new tensor)": _out_of_place,
        "x.copy_(F.layer_norm(x))": _copy,
        **compiled(_copy),
    }
    return Workload(contenders, rotate(lambda: (torch.randn(rows, columns, dtype=dtype, device=device), weight, bias)))


def cases() -> list[Case]:
    """Affine, over the last dimension, in place without grad, with the peak memory."""
    shapes = [(16384, 4096, torch.float32), (1024, 1024, torch.float32), (16384, 4096, torch.bfloat16)]
    return [
        Case(f"({rows}, {columns}) {dtype_name(dtype)}", partial(_make, rows, columns, dtype), memory=True)
        for rows, columns, dtype in shapes
    ]

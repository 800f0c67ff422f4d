"""sigmoid_ against ATen's own in-place and out-of-place forms."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

import torchops

from .contenders import compiled, dtype_name
from .harness import OURS, Case, Workload, rotate


def _in_place(x: Tensor) -> Tensor:
    return torch.sigmoid_(x)


def _make(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Workload:
    contenders = {
        OURS: torchops.sigmoid_,
        "torch.sigmoid_": torch.sigmoid_,
        "torch.sigmoid (new tensor)": torch.sigmoid,
        **compiled(_in_place),
    }
    return Workload(contenders, rotate(lambda: (torch.randn(rows, columns, dtype=dtype, device=device),)))


def cases() -> list[Case]:
    """In place without grad, with the peak memory."""
    shapes = [(16384, 4096, torch.float32), (1024, 1024, torch.float32), (16384, 4096, torch.bfloat16)]
    return [
        Case(f"({rows}, {columns}) {dtype_name(dtype)}", partial(_make, rows, columns, dtype), memory=True)
        for rows, columns, dtype in shapes
    ]

"""softmax_ against `torch.softmax`, which has no in-place form, and against copying its result back."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

import torchops

from .contenders import compiled, dtype_name
from .harness import OURS, Case, Workload, rotate


def _out_of_place(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def _copy(x: Tensor) -> Tensor:
    return x.copy_(torch.softmax(x, -1))


def _make(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Workload:
    contenders = {
        OURS: torchops.softmax_,
        "torch.softmax (new tensor)": _out_of_place,
        "x.copy_(torch.softmax(x))": _copy,
        # Inductor 2.13 fails on the form that copies back (KeyError: 'buf1').
        **compiled(_out_of_place, " (new tensor)"),
    }
    return Workload(contenders, rotate(lambda: (torch.randn(rows, columns, dtype=dtype, device=device),)))


def cases() -> list[Case]:
    """Over the last dimension, in place without grad, with the peak memory."""
    shapes = [(16384, 4096, torch.float32), (1024, 1024, torch.float32), (16384, 4096, torch.bfloat16)]
    return [
        Case(f"({rows}, {columns}) {dtype_name(dtype)}", partial(_make, rows, columns, dtype), memory=True)
        for rows, columns, dtype in shapes
    ]

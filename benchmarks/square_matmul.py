"""square_matmul_ against `a.copy_(a @ b)` and against the product into a new tensor; pairs are (rows, n)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import torchops

from .contenders import compiled, dtype_name
from .harness import OURS, Case, Workload, rotate

COPY = "a.copy_(a @ b)"
PRODUCT = "a @ b (new tensor)"


def _copy(a: Tensor, b: Tensor) -> Tensor:
    return a.copy_(a @ b)


def _make(rows: int, n: int, dtype: torch.dtype, device: torch.device) -> Workload:
    # Every contender but one overwrites a: an orthogonal b keeps its values at one size however often that happens.
    b = torch.linalg.qr(torch.randn(n, n)).Q.to(device, dtype)
    contenders: dict[str, Callable[..., object]] = {
        OURS: torchops.square_matmul_,
        COPY: _copy,
        PRODUCT: torch.matmul,
        **compiled(_copy),
    }
    return Workload(contenders, rotate(lambda: (torch.randn(rows, n, dtype=dtype, device=device), b)))


def cases() -> list[Case]:
    """In place without grad, with the peak memory."""
    shapes = [
        (65536, 256, torch.float32),
        (8192, 1024, torch.float32),
        (524288, 64, torch.float32),
        (65536, 256, torch.bfloat16),
    ]
    return [
        Case(f"({rows}, {n}) {dtype_name(dtype)}", partial(_make, rows, n, dtype), {COPY: 1.0}, memory=True)
        for rows, n, dtype in shapes
    ]

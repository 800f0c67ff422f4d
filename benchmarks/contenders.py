"""Contenders that several operators share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

COMPILED = "torch.compile"
AUTOTUNED = "torch.compile max-autotune"


def compiled(formula: Callable[..., Any], note: str = "") -> dict[str, Callable[..., Any]]:
    """`formula` under `torch.compile` with default settings and with autotuning; `note` is added to their names."""
    return {
        COMPILED + note: torch.compile(formula, dynamic=False, fullgraph=True),
        AUTOTUNED + note: torch.compile(formula, dynamic=False, fullgraph=True, mode="max-autotune-no-cudagraphs"),
    }


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")

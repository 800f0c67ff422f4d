"""Checks of arguments of operators that are written in Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["DTYPES", "check_layout", "expect", "name_of"]

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def expect(holds: Any, message: Callable[[], str]) -> None:
    """Like torch._check, which takes a microsecond or more even if the condition holds, and is called only for symbolic
    ones."""
    if holds is not True:
        torch._check(holds, message)


def check_layout(op: str, name: str, t: Tensor | None) -> None:
    if t is None:  # the dispatcher takes it for an undefined tensor
        raise TypeError(f"{op}: expected {name} of type Tensor, got NoneType")
    expect(
        t.layout == torch.strided,
        lambda: f"{op}: expected {name} of layout strided, got {name_of(t.layout)}",
    )
    expect(not t.is_nested, lambda: f"{op}: expected {name} of layout strided, got a nested tensor")


def name_of(value: torch.dtype | torch.layout) -> str:
    return str(value).removeprefix("torch.")

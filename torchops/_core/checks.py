"""Checks of arguments of operators that are written in Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["DTYPES", "check_device", "check_dtype", "check_layout", "check_shape", "expect", "name_of"]

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def expect(holds: Any, message: Callable[[], str]) -> None:
    """Like torch._check, which takes a microsecond or more even if the condition holds, and is called only for symbolic
    ones. Dynamo, where it traces this itself, takes no text with sizes in it."""
    if isinstance(holds, Tensor):  # as sizes are in that
        raise RuntimeError(
            "torch.jit.trace cannot record this operator; use torch.export.export, and "
            "torch._inductor.aoti_compile_and_package to serve the program (docs/serving.md)"
        )
    if holds is True:
        return
    if holds is False:
        raise RuntimeError(message())
    torch._check(holds, *([] if torch.compiler.is_dynamo_compiling() else [message]))


def check_layout(op: str, name: str, t: Tensor | None) -> None:
    if t is None:  # the dispatcher takes it for an undefined tensor
        raise TypeError(f"{op}: expected {name} of type Tensor, got NoneType")
    expect(
        t.layout == torch.strided,
        lambda: f"{op}: expected {name} of layout strided, got {name_of(t.layout)}",
    )
    expect(not t.is_nested, lambda: f"{op}: expected {name} of layout strided, got a nested tensor")


def check_dtype(op: str, name: str, t: Tensor, of: torch.dtype, match: str, *, or_float32: bool = False) -> None:
    """Checks that t has the dtype `of`; with `or_float32`, float32 may stand beside 16 bits. `match` is what it has to
    match."""
    either = " or float32" if or_float32 and of.itemsize == 2 else ""
    expect(
        t.dtype == of or (bool(either) and t.dtype == torch.float32),
        lambda: f"{op}: expected {name} of dtype {name_of(of)}{either} to match {match}, got {name_of(t.dtype)}",
    )


def check_device(op: str, name: str, t: Tensor, of: torch.device, match: str) -> None:
    expect(t.device == of, lambda: f"{op}: expected {name} on device {of} to match {match}, got {t.device}")


def check_shape(op: str, name: str, t: Tensor, shape: Sequence[Any], match: str) -> None:
    """Checks the shape of t; a size that is not known yet is a letter, which `t` does not match."""

    def message() -> str:
        expected = str(tuple(shape)).replace("'", "")
        return f"{op}: expected {name} of shape {expected} to match {match}, got {tuple(t.shape)}"

    expect(t.dim() == len(shape), message)
    for size, expected in zip(t.shape, shape, strict=True):
        expect(size == expected, message)


def name_of(value: torch.dtype | torch.layout) -> str:
    return str(value).removeprefix("torch.")

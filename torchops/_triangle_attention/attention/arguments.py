"""Argument checks of `myops::triangle_attention` and its private operators, for all backends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchops._triangle_attention.attention import aten as panels

__all__ = ["DTYPES", "check", "check_backward", "check_layout", "expect", "name_of", "numbers"]

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def expect(holds: Any, message: Callable[[], str]) -> None:
    """Like torch._check, which takes a microsecond or more even if the condition holds, and is called only for symbolic
    ones."""
    if holds is not True:
        torch._check(holds, message)


def check(op: str, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None) -> None:
    for name, t in (("q", q), ("k", k), ("v", v), ("bias", bias)):
        check_layout(op, name, t)
    if mask is not None:
        check_layout(op, "mask", mask)
    expected = "float32, float64, float16 or bfloat16"
    expect(q.dtype in DTYPES, lambda: f"{op}: expected q of dtype {expected}, got {name_of(q.dtype)}")
    expect(
        q.dim() == 5,
        lambda: f"{op}: expected q of shape (batch, R, H, N, d), got {tuple(q.shape)}",
    )
    for name, t in (("k", k), ("v", v)):
        _check_matches(op, name, t, q, q.shape)
    batch, rows, heads, n, _ = q.shape
    _check_bias(op, "bias", bias, q, (batch, 1, heads, n, n))
    if mask is not None:
        expect(mask.dtype == torch.bool, lambda: f"{op}: expected mask of dtype bool, got {name_of(mask.dtype)}")
        _check_place(op, "mask", mask, q, (batch, rows, 1, 1, n))


def check_layout(op: str, name: str, t: Tensor | None) -> None:
    if t is None:  # the dispatcher takes it for an undefined tensor
        raise TypeError(f"{op}: expected {name} of type Tensor, got NoneType")
    expect(
        t.layout == torch.strided,
        lambda: f"{op}: expected {name} of layout strided, got {name_of(t.layout)}",
    )
    expect(not t.is_nested, lambda: f"{op}: expected {name} of layout strided, got a nested tensor")


def _check_bias(op: str, name: str, t: Tensor, q: Tensor, shape: Sequence[int]) -> None:
    either = " or float32" if q.element_size() == 2 else ""
    expect(
        t.dtype == q.dtype or (bool(either) and t.dtype == torch.float32),
        lambda: f"{op}: expected {name} of dtype {name_of(q.dtype)}{either} to match q, got {name_of(t.dtype)}",
    )
    _check_place(op, name, t, q, shape)


def _check_matches(op: str, name: str, t: Tensor, q: Tensor, shape: Sequence[int]) -> None:
    expect(
        t.dtype == q.dtype,
        lambda: f"{op}: expected {name} of dtype {name_of(q.dtype)} to match q, got {name_of(t.dtype)}",
    )
    _check_place(op, name, t, q, shape)


def _check_place(op: str, name: str, t: Tensor, q: Tensor, shape: Sequence[int]) -> None:
    expect(
        t.device == q.device,
        lambda: f"{op}: expected {name} on device {q.device} to match q, got {t.device}",
    )

    def message() -> str:
        return f"{op}: expected {name} of shape {tuple(shape)} to match q, got {tuple(t.shape)}"

    expect(t.dim() == len(shape), message)
    for size, expected in zip(t.shape, shape, strict=True):
        expect(size == expected, message)


def name_of(value: torch.dtype | torch.layout) -> str:
    return str(value).removeprefix("torch.")


def numbers(q: Tensor) -> tuple[int, ...]:
    return q.shape[:4]


def check_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    wanted: Sequence[bool],
) -> None:
    op = "_triangle_attention_backward"
    check(op, q, k, v, bias, mask)
    expect(len(wanted) == 4, lambda: f"{op}: expected wanted of 4 values, got {len(wanted)}")
    for name, t in (("grad", grad), ("out", out)):
        check_layout(op, name, t)
        _check_matches(op, name, t, q, q.shape)
    check_layout(op, "logsumexp", logsumexp)
    dtype = panels.accumulator(q.dtype)
    expect(
        logsumexp.dtype == dtype,
        lambda: f"{op}: expected logsumexp of dtype {name_of(dtype)} to match q, got {name_of(logsumexp.dtype)}",
    )
    _check_place(op, "logsumexp", logsumexp, q, numbers(q))

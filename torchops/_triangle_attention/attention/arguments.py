"""Arguments of `myops::triangle_attention` and its private operators, and their checks, for all backends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchops._core.checks import DTYPES, check_device, check_dtype, check_layout, check_shape, expect, name_of

__all__ = ["Inputs", "OutputMask", "Saved", "accumulator", "check", "check_backward", "checked", "inputs_of"]

OutputMask = Sequence[bool]
"""Which gradients are requested, of q, k, v and the bias."""


class Inputs(NamedTuple):
    """What the operator documents; the scale is a number here."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor
    mask: Tensor | None
    scale: float

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """batch, rows, heads, queries: of a number for each query and head."""
        return self.q.shape[:4]  # type: ignore[return-value]

    @property
    def empty(self) -> bool:
        """Whether there is nothing to sum."""
        return self.q.numel() == 0 or self.k.numel() == 0


class Saved(NamedTuple):
    """What the forward pass keeps for the backward pass."""

    out: Tensor
    logsumexp: Tensor
    """The logarithms of the sums of exponentials, (batch, rows, heads, queries)."""


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which scores and their exponentials are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def inputs_of(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None = None, scale: float | None = None
) -> Inputs:
    """Of arguments that were checked; the scale is that of the head dimension if none is given."""
    return Inputs(q, k, v, bias, mask, float(max(q.shape[-1], 1)) ** -0.5 if scale is None else scale)


def checked(op: str, *args: Any) -> Inputs:
    check(op, *args)
    return inputs_of(*args)


def check(
    op: str, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None = None, scale: float | None = None
) -> None:
    for name, t in (("q", q), ("k", k), ("v", v), ("bias", bias)):
        check_layout(op, name, t)
    if mask is not None:
        check_layout(op, "mask", mask)
    expected = "float32, float64, float16 or bfloat16"
    expect(q.dtype in DTYPES, lambda: f"{op}: expected q of dtype {expected}, got {name_of(q.dtype)}")
    expect(
        q.dim() == 5,
        lambda: f"{op}: expected q of shape (batch, R, H, Q, d), got {tuple(q.shape)}",
    )
    batch, rows, heads, queries, d = q.shape
    keys = k.shape[3] if k.dim() == 5 else "K"
    _check_matches(op, "k", k, q, (batch, rows, heads, keys, d))
    _check_matches(op, "v", v, q, k.shape, "k")
    _check_matches(op, "bias", bias, q, (batch, 1, heads, queries, keys), "q and k", or_float32=True)
    if mask is not None:
        expect(mask.dtype == torch.bool, lambda: f"{op}: expected mask of dtype bool, got {name_of(mask.dtype)}")
        _check_place(op, "mask", mask, q, (batch, rows, 1, 1, keys), "q and k")


def _check_matches(
    op: str, name: str, t: Tensor, q: Tensor, shape: Sequence[Any], of: str = "q", *, or_float32: bool = False
) -> None:
    """Checks that t has the dtype and the device of q, and the shape that `of` asks for."""
    check_dtype(op, name, t, q.dtype, "q", or_float32=or_float32)
    _check_place(op, name, t, q, shape, of)


def _check_place(op: str, name: str, t: Tensor, q: Tensor, shape: Sequence[Any], of: str = "q") -> None:
    check_device(op, name, t, q.device, "q")
    check_shape(op, name, t, shape, of)


def check_backward(op: str, grad: Tensor, inputs: Inputs, saved: Saved, output_mask: OutputMask) -> None:
    """Checks what a backward pass has besides the checked inputs."""
    q = inputs.q
    expect(len(output_mask) == 4, lambda: f"{op}: expected output_mask of 4 values, got {len(output_mask)}")
    for name, t in (("grad", grad), ("out", saved.out)):
        check_layout(op, name, t)
        _check_matches(op, name, t, q, q.shape)
    logsumexp = saved.logsumexp
    check_layout(op, "logsumexp", logsumexp)
    check_dtype(op, "logsumexp", logsumexp, accumulator(q.dtype), "q")
    _check_place(op, "logsumexp", logsumexp, q, inputs.sizes)

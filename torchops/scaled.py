"""Operators for eight-bit operands, with the scales that ``torch._scaled_mm`` takes.

They are overloads ``scaled`` of operators in :mod:`torchops.ops`, and raise the same errors."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from torchops.ops import with_type_errors

__all__ = ["dense_scaled", "gate_scaled", "glu_scaled"]

_dense_scaled = torch.ops.myops.dense.scaled
_gate_scaled = torch.ops.myops.gate.scaled
_glu_scaled = torch.ops.myops.glu.scaled


@with_type_errors
def dense_scaled(
    x: Tensor,
    w: Tensor,
    scale_x: Tensor,
    scale_w: Tensor,
    b: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """:func:`dense` of eight-bit operands: ``sigmoid((x @ w.T) * scale_x * scale_w + b)``.

    This is ``torch._scaled_mm(x, w.t(), scale_x, scale_w)`` followed by a sigmoid. It takes the same scales: what you
    divided ``x`` and ``w`` by before you rounded them to float8. Unlike in ``torch._scaled_mm``,

    - ``x`` may have any number of leading dimensions;
    - one scale may be for a whole tensor and the other for each row;
    - the features need not be multiples of 16.

    The operator is ``torch.ops.myops.dense.scaled``, an overload of ``dense``. It has its own function, because its
    results have another dtype and no gradients.

    Args:
        x: input of shape ``(..., in_features)``.
        w: weight of shape ``(out_features, in_features)``.
        scale_x: one element, for all of ``x``; or shape ``(..., 1)``, one for each of its rows, like
            ``x.abs().amax(-1, keepdim=True)``.
        scale_w: one element, for all of ``w``; or shape ``(1, out_features)``, one for each of its rows.
        b: bias of shape ``(out_features,)``, or ``None``.
        out_dtype: bfloat16, float16 or float32. Default: bfloat16.

    Dtypes: float8_e4m3fn ``x`` and ``w``, float32 scales, ``b`` of ``out_dtype`` or float32. Sums are float32. On
    compute capability 9.0, the tensor cores add up parts of a sum with fewer bits, and the parts are added up in
    float32, as in ``_scaled_mm`` without ``use_fast_accum``.

    Gradients: none, as with ``_scaled_mm``. An argument may require grad, but backward raises.

    Memory: the result, and copies of ``x`` and ``w`` if their rows are not adjacent and aligned. If there is no fused
    kernel (GPUs of other compute capabilities than 9.0, features that are not multiples of 16, results that are not
    bfloat16), also a panel of rows of at most 32 MiB, or one row, and, for such features, a copy of ``w`` in bfloat16.
    On the CPU, also the float32 weights of a few columns, 4 MiB or 64 columns, and panels of rows.

    Returns:
        A new contiguous tensor of shape ``(..., out_features)``.

    Raises:
        RuntimeError: the shapes do not match, or ``x`` is 0-dimensional; devices differ; the dtypes are not supported;
            or the GPU has a compute capability below 8.9.

    Example:

        >>> x, w = torch.ones(2, 3).to(torch.float8_e4m3fn), torch.ones(4, 3).to(torch.float8_e4m3fn)
        >>> torchops.dense_scaled(x, w, torch.tensor([0.0]), torch.tensor([2.0]), out_dtype=torch.float32)
        tensor([[0.5000, 0.5000, 0.5000, 0.5000],
                [0.5000, 0.5000, 0.5000, 0.5000]])
    """
    return _dense_scaled(x, w, scale_x, scale_w, b, out_dtype=out_dtype)


@with_type_errors
def gate_scaled(v: Tensor, x: Tensor, w: Tensor, scale_x: Tensor, scale_w: Tensor, b: Tensor | None = None) -> Tensor:
    """:func:`gate` with eight-bit operands of the gate: ``v * sigmoid((x @ w.T) * scale_x * scale_w + b)``.

    Args:
        v: the value to gate, of shape ``(..., out_features)``: bfloat16, float16 or float32.
        x: input of the gate, of shape ``(..., in_features)``, with the leading sizes of ``v``.
        w: weight of shape ``(out_features, in_features)``.
        scale_x: one element, or ``(..., 1)``, one for each row of ``x``.
        scale_w: one element, or ``(1, out_features)``, one for each row of ``w``.
        b: bias of shape ``(out_features,)``, or ``None``: of the dtype of ``v``, or float32.

    Dtypes: as in :func:`dense_scaled`. There are no gradients either.

    Memory: as in :func:`dense_scaled`; one kernel computes a bfloat16 result. ``v`` is copied if its rows are not
    adjacent and aligned.

    Returns:
        A new contiguous tensor of the shape and dtype of ``v``.

    Raises:
        RuntimeError: as :func:`dense_scaled`, or if the shape or dtype of ``v`` does not fit.

    Example:

        >>> x, w = torch.ones(2, 3).to(torch.float8_e4m3fn), torch.ones(4, 3).to(torch.float8_e4m3fn)
        >>> torchops.gate_scaled(torch.ones(2, 4), x, w, torch.tensor([0.0]), torch.tensor([2.0]))
        tensor([[0.5000, 0.5000, 0.5000, 0.5000],
                [0.5000, 0.5000, 0.5000, 0.5000]])
    """
    return _gate_scaled(v, x, w, scale_x, scale_w, b)


@with_type_errors
def glu_scaled(
    x: Tensor,
    w: Tensor,
    wg: Tensor,
    scale_x: Tensor,
    scale_w: Tensor,
    scale_wg: Tensor,
    b: Tensor | None = None,
    bg: Tensor | None = None,
    *,
    activation: Literal["sigmoid", "silu"] = "sigmoid",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """:func:`glu` of eight-bit operands, with ``s = scale_x`` and an activation ``act``:
    ``((x @ w.T) * s * scale_w + b) * act((x @ wg.T) * s * scale_wg + bg)``.

    Args:
        x: input of shape ``(..., in_features)``.
        w: weight of the value, of shape ``(out_features, in_features)``.
        wg: weight of the gate, of the same shape.
        scale_x: one element, or ``(..., 1)``, one for each row of ``x``.
        scale_w: one element, or ``(1, out_features)``, one for each row of ``w``.
        scale_wg: the same for ``wg``.
        b: bias of the value, of shape ``(out_features,)``, or ``None``.
        bg: bias of the gate, likewise.
        activation: ``"sigmoid"`` or ``"silu"``.
        out_dtype: bfloat16, float16 or float32. Default: bfloat16.

    Dtypes: as in :func:`dense_scaled`. There are no gradients either.

    Memory: as in :func:`dense_scaled`. On a GPU, the value is computed first, rounded to ``out_dtype``, and then
    multiplied by the gate in place; with a bfloat16 ``out_dtype``, by one kernel each. There is no other tensor of its
    size.

    Returns:
        A new contiguous tensor of shape ``(..., out_features)``.

    Raises:
        RuntimeError: as :func:`dense_scaled`.
        ValueError: there is no such activation.

    Example:

        >>> x, w = torch.ones(2, 3).to(torch.float8_e4m3fn), torch.ones(4, 3).to(torch.float8_e4m3fn)
        >>> torchops.glu_scaled(x, w, w, *torch.tensor([[1.0], [2.0], [0.0]]), out_dtype=torch.float32)
        tensor([[3., 3., 3., 3.],
                [3., 3., 3., 3.]])
    """
    return _glu_scaled(x, w, wg, scale_x, scale_w, scale_wg, b, bg, activation=activation, out_dtype=out_dtype)

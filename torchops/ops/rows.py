"""Softmax and layer norm. See :mod:`torchops.ops`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchops._core.errors import with_type_errors

__all__ = ["layer_norm", "layer_norm_", "softmax", "softmax_"]

# Not the overloads `.default`: calls of these can be compiled by torch.jit.script.
_softmax = torch.ops.myops.softmax
_softmax_ = torch.ops.myops.softmax_
_layer_norm = torch.ops.myops.layer_norm
_layer_norm_ = torch.ops.myops.layer_norm_


@with_type_errors
def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """Returns ``exp(x) / sum(exp(x))`` along ``dim``, computed after subtracting the maximum.

    The result is a new contiguous tensor of the shape of ``x``.

    Dtypes: float32, float64, float16 or bfloat16.

    Memory: the result, which backward reads.

    Raises:
        IndexError: ``dim`` is out of range.
        RuntimeError: the dtype is not supported.

    Example:

        >>> torchops.softmax(torch.zeros(1, 4))
        tensor([[0.2500, 0.2500, 0.2500, 0.2500]])
    """
    return _softmax(x, dim)


@with_type_errors
def softmax_(x: Tensor, dim: int = -1) -> Tensor:
    """Overwrites ``x``, of any shape, with ``softmax(x, dim)`` and returns it.

    Dtypes: float32, float64, float16 or bfloat16.

    Memory: scratch of at most 4 MiB per thread on the CPU and 32 MiB on a GPU. On a GPU, a longer line whose elements
    are not adjacent is copied as a whole. Training needs no more, since backward reads the result.

    Raises:
        IndexError: ``dim`` is out of range.
        RuntimeError: the dtype is not supported; ``x`` has several elements in one place, as after ``expand``; or ``x``
            is a leaf that requires grad.

    Example:

        >>> x = torch.zeros(1, 2)
        >>> torchops.softmax_(x)
        tensor([[0.5000, 0.5000]])
    """
    _softmax_(x, dim)
    return x


@with_type_errors
def layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Normalises the trailing dimensions ``normalized_shape``: ``(x - mean) / sqrt(var + eps) * weight + bias``.

    Args:
        x: input of shape ``(..., *normalized_shape)``.
        normalized_shape: the sizes of the dimensions over which mean and (biased) variance are taken.
        weight: scale of shape ``normalized_shape``, or ``None`` for 1.
        bias: shift of shape ``normalized_shape``, or ``None`` for 0.
        eps: added to the variance.

    Dtypes: float32, float64, float16 or bfloat16, one for all arguments. If that of ``x`` is float16 or bfloat16,
    ``weight`` and ``bias`` may each be float32.

    Memory: the result. Backward reads ``x`` and ``weight``, and two numbers per row.

    Returns:
        A new contiguous tensor of the shape of ``x``.

    Raises:
        RuntimeError: ``normalized_shape`` is empty, or not the trailing sizes of ``x``; ``weight`` or ``bias`` is not
            of that shape; dtypes or devices differ; or the dtype is not supported.

    Example:

        >>> torchops.layer_norm(torch.tensor([[1.0, 3.0]]), (2,), eps=0.0)
        tensor([[-1.,  1.]])
    """
    return _layer_norm(x, normalized_shape, weight, bias, eps)


@with_type_errors
def layer_norm_(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Overwrites ``x`` with ``layer_norm(x, ...)`` and returns it.

    Shapes and dtypes are those of :func:`layer_norm`. ``weight`` and ``bias`` may overlap ``x``. They are then copied
    first.

    Memory: two numbers per row, and scratch of at most 4 MiB per thread on the CPU and 32 MiB on a GPU. On a GPU, a
    longer row whose elements are not adjacent is copied as a whole. Training copies the old ``x``, except without
    ``weight`` and ``bias``, where backward reads the result as it was rounded. In 16 bits, the terms of a gradient that
    cancel then leave a rounding of the result times the incoming gradient times ``1 / sqrt(var + eps)``.

    Raises:
        RuntimeError: as :func:`layer_norm`; ``x`` has several elements in one place, as after ``expand``; or ``x`` is a
            leaf that requires grad.

    Example:

        >>> x = torch.tensor([[1.0, 3.0]])
        >>> torchops.layer_norm_(x, (2,), eps=0.0) is x
        True
    """
    _layer_norm_(x, normalized_shape, weight, bias, eps)
    return x

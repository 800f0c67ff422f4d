"""Products with square matrices. See :mod:`torchops.ops`."""

from __future__ import annotations

import torch
from torch import Tensor

from torchops._core.errors import with_type_errors

__all__ = ["square_matmul", "square_matmul_"]

# Not the overloads `.default`: calls of these can be compiled by torch.jit.script.
_square_matmul = torch.ops.myops.square_matmul
_square_matmul_ = torch.ops.myops.square_matmul_


@with_type_errors
def square_matmul(a: Tensor, b: Tensor, *, transpose_b: bool = False) -> Tensor:
    """Returns ``a @ b``, or ``a @ b.T`` with ``transpose_b``, for a square matrix ``b`` or a batch of them.

    Args:
        a: matrix, or stack of matrices, of shape ``(..., n)``.
        b: matrix of shape ``(n, n)``; or ``(*batch, n, n)`` for ``a`` of shape ``(*batch, m, n)``, with exactly these
            batch sizes.
        transpose_b: multiply by the transpose of ``b``, or of each matrix in it.

    Dtypes: float32, float64, float16 or bfloat16, one for both arguments.

    Memory: the result. Backward reads ``b`` if ``a`` requires a gradient, and ``a`` if ``b`` does.

    Returns:
        A new contiguous tensor of the shape of ``a``.

    Raises:
        RuntimeError: ``b`` is not of shape ``(n, n)``, or ``a`` is 0-dimensional; dtypes or devices differ; or the
            dtype is not supported.

    Example:

        >>> torchops.square_matmul(torch.ones(1, 2), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        tensor([[4., 6.]])
    """
    return _square_matmul(a, b, transpose_b=transpose_b)


@with_type_errors
def square_matmul_(a: Tensor, b: Tensor, *, transpose_b: bool = False) -> Tensor:
    """Overwrites ``a`` with ``square_matmul(a, b)`` and returns it, without a second buffer of its size.

    Shapes and dtypes are those of :func:`square_matmul`. ``b`` may overlap ``a``; it is then copied first.

    Memory: scratch of at most 4 MiB per thread on the CPU and 32 MiB on a GPU, where a small ``a`` is copied. ``b``
    is also copied if neither its rows nor its columns are contiguous: of a batch, one matrix at a time on the CPU,
    and on a GPU as many as fit 16 MiB, but at least one. Training copies the old ``a`` only if ``b`` requires a
    gradient.

    Raises:
        RuntimeError: as :func:`square_matmul`; ``a`` has several elements in one place, as after ``expand``; or ``a``
            is a leaf that requires grad.

    Example:

        >>> a = torch.ones(1, 2)
        >>> torchops.square_matmul_(a, torch.tensor([[1.0, 2.0], [3.0, 4.0]]), transpose_b=True)
        tensor([[3., 7.]])
        >>> a
        tensor([[3., 7.]])
    """
    _square_matmul_(a, b, transpose_b=transpose_b)
    return a

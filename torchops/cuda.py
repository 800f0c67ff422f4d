"""Switches of the CUDA kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

__all__ = ["dense_path"]


@contextmanager
def dense_path(path: Literal["auto", "fused", "cublas"]) -> Iterator[None]:
    """Within it, :func:`torchops.dense` takes one path on CUDA.

    ``"fused"`` is the kernel with bias and sigmoid in its epilogue, wherever it can run (compute capability 9.0;
    float16, bfloat16 or TF32; aligned rows); ``"cublas"`` a product by cuBLAS and a pass for bias and sigmoid;
    ``"auto"`` the faster of them. Gradients come from one pass over the rows, where there is a kernel for that (compute
    capability 9.0; float16 or bfloat16; multiples of 8 features, at most 128 in and out, or 256 of one of them), except
    on ``"cublas"``. The path is the process's, not the thread's. It starts as the environment variable
    ``TORCHOPS_DENSE_PATH`` says, or as ``"auto"``.

    Example::

        >>> with torchops.cuda.dense_path("cublas"):
        ...     y = torchops.dense(torch.zeros(2, 3), torch.ones(4, 3))
    """
    former = torch.ops.myops._dense_path(path)
    try:
        yield
    finally:
        torch.ops.myops._dense_path(former)

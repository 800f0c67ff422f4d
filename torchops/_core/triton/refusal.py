"""What happens if a Triton kernel cannot be compiled or launched here: PyTorch's operators stand in for it.

Reasons lie outside torchops: no C compiler for Triton's launcher, a cache folder that cannot be written, a GPU that
this Triton does not know. `src/cuda/base/refusal.h` does the same for kernels in CUDA.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

__all__ = ["RefusedError", "again_if_refused", "compiled", "why_refused"]

_Result = TypeVar("_Result")
_reason: str | None = None


class RefusedError(RuntimeError):
    """A kernel was refused. Calls from now on take another one."""


def why_refused() -> str | None:
    """Why no Triton kernel is tried any more in this process; None if they are."""
    return _reason


def compiled(launch: Callable[[], _Result]) -> _Result:
    """``launch()``, the first launch of a kernel, which compiles it.

    Raises:
        RefusedError: it cannot be compiled or launched.
        torch.OutOfMemoryError: as PyTorch's operators.
    """
    global _reason
    try:
        if "triton" in os.environ.get("TORCHOPS_PRETEND_REFUSED", ""):  # for tests
            raise RuntimeError("TORCHOPS_PRETEND_REFUSED names triton")
        return launch()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        of_error = f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"
        if _reason is None:
            warnings.warn(
                f"torchops: Triton's kernels don't run here ({of_error}), so slower operators do in this process. "
                "Please report it, with what `python -m torchops --check` prints.",
                stacklevel=2,
            )
        _reason = f"Triton's kernels don't run here ({of_error})"
        raise RefusedError(_reason) from error


def again_if_refused(kernel: Callable[..., _Result]) -> Callable[..., _Result]:
    """A kernel of an operator, called once more if one of Triton's is refused: then it takes another. A kernel that
    overwrites its argument may do so only after its last other launch."""

    @wraps(kernel)
    def call(*args: Any) -> _Result:
        try:
            return kernel(*args)
        except RefusedError:
            return kernel(*args)

    return call

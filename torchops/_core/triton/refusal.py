"""What happens if a Triton kernel cannot be compiled or launched here: PyTorch's operators stand in for it.

Reasons lie outside torchops: no C compiler for Triton's launcher, a cache folder that cannot be written, a GPU that
this Triton does not know. `src/cuda/base/refusal.h` does the same for kernels in CUDA.
"""

from __future__ import annotations

import os
import subprocess
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

__all__ = ["RefusedError", "again_if_refused", "compiled", "why_refused"]

_Result = TypeVar("_Result")
_reason: str | None = None
_launches = 0

# Of the RuntimeErrors of Triton's launcher, which name errors of the driver, and of its search for a compiler.
_MEANT = ("no kernel image", "kernel image is invalid", "invalid argument", "not supported", "ptx", "c compiler")


class RefusedError(RuntimeError):
    """A kernel was refused. Calls from now on take another one."""


def why_refused() -> str | None:
    """Why no Triton kernel is tried any more in this process; None if they are."""
    return _reason


def compiled(launch: Callable[[], _Result]) -> _Result:
    """``launch()``, the first launch of a kernel, which compiles it.

    Raises:
        RefusedError: it cannot be compiled or launched. Other errors, such as those of memory, come as they are.
    """
    global _reason, _launches
    try:
        if "triton" in os.environ.get("TORCHOPS_PRETEND_REFUSED", ""):  # for tests
            raise OSError("TORCHOPS_PRETEND_REFUSED names triton")
        result = launch()
    except Exception as error:
        if not _means_refusal(error):
            raise
        of_error = f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"
        if _reason is None:
            warnings.warn(
                f"torchops: Triton's kernels don't run here ({of_error}), so slower operators do in this process. "
                "Please report it, with what `python -m torchops --check` prints.",
                stacklevel=2,
            )
        _reason = f"Triton's kernels don't run here ({of_error})"
        raise RefusedError(_reason) from error
    _launches += 1
    return result


def _means_refusal(error: Exception) -> bool:
    if isinstance(error, torch.OutOfMemoryError):
        return False
    if isinstance(error, (OSError, ImportError, subprocess.SubprocessError)):
        return True
    if type(error).__module__.startswith("triton"):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _MEANT)


def again_if_refused(kernel: Callable[..., _Result], *, overwrites: bool = False) -> Callable[..., _Result]:
    """A kernel of an operator, called once more if one of Triton's is refused: then it takes another.

    If it `overwrites` an argument, only if nothing has been launched yet; otherwise the error is raised.
    """

    @wraps(kernel)
    def call(*args: Any) -> _Result:
        before = _launches
        try:
            return kernel(*args)
        except RefusedError:
            if overwrites and _launches != before:
                raise
            return kernel(*args)

    return call

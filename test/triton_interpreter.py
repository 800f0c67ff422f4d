"""Programs whose kernels in Triton run on the CPU, with NumPy: their arithmetic, not how they compile."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def interpreted(program: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, since Triton decides when a kernel is defined."""
    return subprocess.run(
        [sys.executable, "-c", "import triton_interpreter\ntriton_interpreter.patch()\n" + program],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
    )


def patch() -> None:
    """Version 3.6 makes a number of an array of one element by int(), which NumPy 2.4 refuses."""
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched

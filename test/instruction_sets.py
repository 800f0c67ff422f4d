"""Runs check_all() of a test file with another instruction set than ATen would choose."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch


def errors_with(capability: str, module: str) -> str:
    """How it failed, in a process of its own: ATen chooses when it is loaded."""
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("this processor has one instruction set that ATen chooses")
    script = (
        f"import torch, {module} as t; assert torch.backends.cpu.get_cpu_capability() == {capability.upper()!r};"
        " t.check_all()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "ATEN_CPU_CAPABILITY": capability},
        cwd=os.path.dirname(__file__),
        capture_output=True,
        text=True,
        check=False,
    )
    return f"status {done.returncode}: {done.stderr}" if done.returncode else ""  # a crash writes nothing

"""`import torchops` is cheap, and imports nothing that torch has not imported already."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_imports_nothing_but_itself() -> None:
    """No optional package (onnx, Triton, the FLOP counter that imports Triton, torch.distributed.tensor, ...)."""
    added = run("import sys, torch; old = set(sys.modules); import torchops; print(*(set(sys.modules) - old))").split()
    assert "torchops.ops" in added
    assert [name for name in added if name.partition(".")[0] != "torchops"] == []


@pytest.mark.serial
def test_takes_less_than_50_ms() -> None:
    """On top of torch; the best of several processes, since what counts is not how fast the disk is."""
    program = "import time, torch; start = time.perf_counter(); import torchops; print(time.perf_counter() - start)"
    assert min(float(run(program)) for _ in range(4)) < 0.050

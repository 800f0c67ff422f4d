"""`import torchops` is cheap: it imports nothing that torch has not imported, starts nothing, wakes no GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_imports_nothing_but_itself() -> None:
    """No optional package (onnx, Triton, the FLOP counter that imports Triton, torch.distributed.tensor, ...)."""
    added = run("import sys, torch; old = set(sys.modules); import torchops; print(*(set(sys.modules) - old))").split()
    assert "torchops.ops" in added
    assert [name for name in added if name.partition(".")[0] != "torchops"] == []


def test_starts_nothing() -> None:
    """No process (a compiler, nvidia-smi, ...), no thread, no connection; and CUDA is not initialised."""
    program = """
import sys, threading, torch
events = set()
sys.addaudithook(lambda event, args: events.add(event))
import torchops
assert "import" in events
slow = ("subprocess", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "socket", "_thread")
print(*sorted(event for event in events if event.startswith(slow)))
print(threading.active_count(), torch.cuda.is_initialized())
"""
    assert run(program).splitlines() == ["", "1 False"]

"""Peak resident memory of one contender, measured in a process of its own."""

from __future__ import annotations

import ctypes
import gc
import json
import subprocess
import sys
from pathlib import Path

from .harness import Workload

PROC = Path("/proc/self")


def supported() -> bool:
    """Whether the system can reset the peak of a process (Linux)."""
    return (PROC / "clear_refs").exists()


def peak_of(workload: Workload, contender: str) -> int:
    """Bytes of resident memory that one call needs at its peak on top of what was resident before it.

    The call before it is a warm-up: what compilation, thread start and library initialisation allocate does not count,
    and what the allocator kept of it goes back to the system first, so that reused memory does count.
    """
    call, args = workload.contenders[contender], workload.inputs[0]
    with workload.context():
        call(*args)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        (PROC / "clear_refs").write_text("5")
        before = _status_bytes("VmRSS")
        call(*args)
        return max(0, _status_bytes("VmHWM") - before)


def peak_in_subprocess(op: str, case: str, contender: str) -> int:
    """Runs `peak_of` in a fresh process, so that no other contender's memory is in the way."""
    command = [sys.executable, "-m", "benchmarks", "memory", "-o", op, "--case", case, "-m", contender]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return int(json.loads(output.splitlines()[-1])["peak_bytes"])


def _status_bytes(field: str) -> int:
    for line in (PROC / "status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise KeyError(field)

"""How much the peak resident memory of a program grows, measured in a process of its own."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

needs_proc = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc to measure peak memory"
)

# Stacks and heaps of threads, and pages of code that run for the first time.
A_FEW_MIB = 16

# The allocator gives back what is freed. By default, glibc raises this limit to the largest block freed so far, and how
# much it keeps below it differs from run to run, by 16 MiB now and then.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(2**16)}

PREAMBLE = """
import sys, torch, torchops
from pathlib import Path

def status(name):
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(name + ":"))
    return int(line.split()[1]) / 1024

def growth(function):
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident now
    before = status("VmRSS")
    result = function()
    print("growth", status("VmHWM") - before)
    return result

torch.set_num_threads(2)
def filled(*shape, dtype=torch.float32):
    t = torch.empty(*shape, dtype=dtype)
    t.copy_(torch.linspace(-2, 2, shape[-1]))
    return t
"""


def growth(program: str) -> float:
    """Runs `program`, which calls growth() once, and returns what it measured, in MiB."""
    return growths(program)[0]


@functools.cache
def growths(*programs: str) -> list[float]:
    """Of each, measured one after the other in one process, whose start takes longer than most of them. Tests that
    share a call should be of one xdist_group, or each worker runs it."""
    program = "\n".join(map(textwrap.dedent, programs))
    code = PREAMBLE + program
    # Not in the root folder, where the package's source would stand in for the installed one.
    folder = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, env=os.environ | MALLOC, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("growth ")]
    assert len(lines) == len(programs), done.stdout
    return [float(line.split()[1]) for line in lines]

"""Measures what a product needs on top of its input: overwriting the input, and into a new tensor."""

from __future__ import annotations

import ctypes
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

import torchops

MIB = 2**20
WIDTH = 256
CHECKED_ROWS = 1000


@dataclass(frozen=True)
class Usage:
    """Peak resident memory above the level before the call, and the time of the call."""

    peak_mib: float
    seconds: float


@dataclass(frozen=True)
class MemoryResult:
    """Both products on one tensor, and how far the in-place one is from the float64 product."""

    shape: tuple[int, int]
    tensor_mib: float
    in_place: Usage
    out_of_place: Usage
    max_error: float
    tolerance: float


def _status_mib(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) / 1024
    raise KeyError(field)


def _max_rss_mib() -> float:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MIB


def _reset_peak() -> bool:
    try:
        # What the allocator kept of freed memory would otherwise serve the call without being counted.
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except (AttributeError, OSError):
        return False
    return True


def measure(call: Callable[[], object]) -> Usage:
    """Runs `call` and measures its peak memory and time.

    Linux can reset the peak first. Elsewhere the peak of the whole process is compared, so that the thriftier of two
    calls has to be measured first.
    """
    resettable = _reset_peak()
    before = _status_mib("VmRSS") if resettable else _max_rss_mib()
    start = time.perf_counter()
    call()
    seconds = time.perf_counter() - start
    peak = _status_mib("VmHWM") if resettable else _max_rss_mib()
    return Usage(max(0.0, peak - before), seconds)


def compare_memory(mebibytes: int) -> MemoryResult:
    """Multiplies a float32 tensor of the given size by a square matrix, in place and out of place."""
    torch.manual_seed(0)
    rows = mebibytes * MIB // (4 * WIDTH)
    b = torch.randn(WIDTH, WIDTH) / WIDTH**0.5
    a = torch.randn(rows, WIDTH)
    expected = a[-CHECKED_ROWS:].double() @ b.double()
    # Starts the thread pool and the libraries' buffers, which belong to neither product.
    torchops.square_matmul_(torch.randn(CHECKED_ROWS, WIDTH), b)
    torch.matmul(torch.randn(CHECKED_ROWS, WIDTH), b)

    in_place = measure(lambda: torchops.square_matmul_(a, b))
    error = (a[-CHECKED_ROWS:] - expected).abs().max().item()
    out_of_place = measure(lambda: torch.matmul(a, b))
    return MemoryResult((rows, WIDTH), rows * WIDTH * 4 / MIB, in_place, out_of_place, error, tolerance=1e-4)

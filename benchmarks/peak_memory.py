"""How much memory a call takes at its peak.

On CUDA, the allocator counts. On the CPU, the system does, for the whole process.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import torch

PROC = Path("/proc/self")


def supported(device: torch.device) -> bool:
    """Whether peaks can be measured: on CUDA, and if the system can reset the peak of a process (Linux)."""
    return device.type == "cuda" or (PROC / "clear_refs").exists()


class Peak:
    """The most that is allocated from now on. Only one at a time counts, because it resets the former one's peak."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.before = torch.cuda.memory_allocated(device)
        else:
            ctypes.CDLL(None).malloc_trim(0)
            (PROC / "clear_refs").write_text("5")
            self.before = _status_bytes("VmRSS")

    def total(self) -> int:
        """Bytes, with what was allocated before."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return _status_bytes("VmHWM")

    def extra(self) -> int:
        """Bytes beyond what was allocated before."""
        return max(0, self.total() - self.before)


def peak_of(call: Callable[[], object], device: torch.device, warm_up: bool = True) -> int:
    """Bytes that a call allocates at its peak beyond what was allocated before, its result included.

    A warm-up call comes first, so memory for compilation, starting threads and initialising libraries doesn't count.
    What the allocator cached from it is returned to the system first, so reused memory does count.
    """
    if warm_up:
        call()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    peak = Peak(device)
    call()
    return peak.extra()


def _status_bytes(field: str) -> int:
    for line in (PROC / "status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise KeyError(field)

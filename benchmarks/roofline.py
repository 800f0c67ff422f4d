"""The least time that the machine allows, from two rates measured in the same run.

A case must move its bytes, at most at the bandwidth of a copy, and do its floating-point operations, at most at the
rate of a large bare product of the same dtype. The larger of the two times is the floor (Williams, Waterman and
Patterson, "Roofline: an insightful visual performance model", 2009).
"""

from __future__ import annotations

import statistics
import time

import torch

from .case import Case, Cost

COPIED_BYTES = {"cuda": 2**30, "cpu": 2**26}
REPEATS = 9
# Large enough for the full rate, small enough for the slowest dtype.
PRODUCT = {"cuda": 8192, "cpu": 1024}
SLOW_PRODUCT = {"cuda": 4096, "cpu": 512}


class Roofline:
    """Measures rates when first asked for them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rates: dict[str, float] = {}

    def bandwidth(self) -> float:
        """Bytes per second of a copy, read plus written."""
        if "copy" not in self._rates:
            size = COPIED_BYTES[self._device.type]
            source = torch.rand(size // 4, device=self._device)
            target = torch.empty_like(source)
            self._rates["copy"] = 2 * size / self._seconds(lambda: target.copy_(source))
        return self._rates["copy"]

    def rate(self, dtype: torch.dtype, name: str) -> float:
        """Floating-point operations per second of a bare product. `name` distinguishes float32 and TF32."""
        if name not in self._rates:
            slow = dtype == torch.float64 or (name == "float32" and self._device.type == "cuda")
            n = (SLOW_PRODUCT if slow else PRODUCT)[self._device.type]
            a, b = (torch.randn(n, n, device=self._device, dtype=dtype) for _ in range(2))
            out = torch.empty_like(a)
            self._rates[name] = 2 * n**3 / self._seconds(lambda: torch.mm(a, b, out=out))
        return self._rates[name]

    def floor(self, case: Case, cost: Cost) -> float:
        """The least possible time of a case, in seconds."""
        seconds = cost.elements * case.dtype.itemsize / self.bandwidth()
        return max(seconds, cost.flops / self.rate(case.dtype, case.dtype_name)) if cost.flops else seconds

    def measured(self) -> dict[str, float]:
        """What was measured so far: bytes per second as `copy`, operations per second by dtype."""
        return dict(self._rates)

    def _seconds(self, call: object) -> float:
        assert callable(call)
        samples = []
        for done in range(REPEATS + 2):
            if self._device.type == "cuda":
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                call()
                end.record()
                end.synchronize()
                seconds = start.elapsed_time(end) / 1e3
            else:
                begin = time.perf_counter()
                call()
                seconds = time.perf_counter() - begin
            if done >= 2:
                samples.append(seconds)
        return statistics.median(samples)

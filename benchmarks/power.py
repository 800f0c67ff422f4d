"""`python -m benchmarks power`: at which clock a chip at its power limit does the same work again and again, on CUDA.

Long products are often bound neither by arithmetic nor by memory, but by the power that the chip may take, and it runs
at a lower clock. How much power a product takes depends on the numbers: zeros flip no bits. So beside the triangle
update and its products there are products of zeros, and a copy. Clock and power are those that `nvidia-smi` reports.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch

import torchops

from . import options as shared
from .record import Record
from .timing import HOT_AFTER
from .triangle import Line, make, ours

N, C = 1024, 128
BATCH = 8  # calls between two events
SAMPLE_MS, SAMPLED_SECONDS = 50, 2.0  # nvidia-smi takes a part of them to start
FIELDS = ("clocks.sm", "power.draw.instant", "power.limit", "clocks.max.sm")


def works(device: torch.device) -> dict[str, Callable[[], object]]:
    """By name; each holds its own inputs."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).bfloat16()

    a, b, zeros = normal(C, N, N), normal(C, N, N), torch.zeros(C, N, N, dtype=torch.bfloat16, device=device)
    x, w = normal(8192, 8192), normal(8192, 8192)
    made, copy = make(Line("power", N, C), device), torch.empty_like(x)
    return {
        "triangle update": lambda: ours(made),
        "its products": lambda: torch.bmm(a, b.mT),
        "its products, of zeros": lambda: torch.bmm(zeros, zeros.mT),
        "linear, 8192": lambda: torch.nn.functional.linear(x, w),
        "dense, 8192": lambda: torchops.dense(x, w),
        "copy, 128 MiB": lambda: copy.copy_(x),
    }


def smi(device: torch.device, *options: str) -> list[str]:
    uuid = torch.cuda.get_device_properties(device).uuid
    query = ["--query-gpu=" + ",".join(FIELDS), "--format=csv,noheader,nounits"]
    return ["nvidia-smi", f"--id=GPU-{uuid}", *query, *options]


def medians(output: str) -> list[float]:
    """Of each field. The last line may be incomplete."""
    lines = output[: output.rfind("\n") + 1].splitlines()
    return [statistics.median(map(float, field)) for field in zip(*(line.split(", ") for line in lines), strict=True)]


def repeated(call: Callable[[], object], seconds: float) -> list[float]:
    """Microseconds of a call, of each batch until so many seconds have passed."""
    times, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(BATCH):
            call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / BATCH)
    return times


def measure(call: Callable[[], object], device: torch.device) -> dict[str, float]:
    repeated(call, HOT_AFTER)
    with subprocess.Popen(smi(device, f"--loop-ms={SAMPLE_MS}"), stdout=subprocess.PIPE, text=True) as sampler:
        times = repeated(call, SAMPLED_SECONDS)
        sampler.terminate()
        output, _ = sampler.communicate()
    clock, power, *_ = medians(output)
    return {"microseconds": statistics.median(times), "megahertz": clock, "watts": power}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    shared.add(parser, "json")


def run(options: argparse.Namespace) -> int:
    """Repeats each work until the chip is hot, and reads its clock."""
    device = torch.device("cuda", torch.cuda.current_device())
    now = subprocess.run(smi(device), check=True, capture_output=True, text=True).stdout.split(", ")
    limits: dict[str, Any] = {"most watts": float(now[2]), "most megahertz": float(now[3])}
    record = Record(options, device, **limits, results={})
    with torch.no_grad():
        for name, call in works(device).items():
            record.progress.case(name)
            record.document["results"][name] = result = measure(call, device)
            record.show(f"{name} {result}")
            record.save()
    return 0

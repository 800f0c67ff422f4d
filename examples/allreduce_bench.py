"""Measures the ring all-reduce beside the library's own: the `--bench` and `--table` of train_ddp.py."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from ring import PIECE_BYTES, ring_all_reduce_
from torch import Tensor

LIBRARY, RING, WHOLE = "library", "ring", "ring, whole chunks"
CALLS: dict[str, Callable[[Tensor], Any]] = {
    LIBRARY: dist.all_reduce,
    RING: ring_all_reduce_,
    WHOLE: lambda x: ring_all_reduce_(x, piece_bytes=2**62),
}
SIZES = {"cpu": [2**n for n in (12, 15, 18, 21, 24, 27)], "cuda": [2**n for n in (12, 15, 18, 21, 24, 27, 30)]}


def bench(device: torch.device, machine: str, sizes: list[int] | None = None, rounds: int = 25) -> dict[str, Any]:
    """Times all of them, interleaved, on float32 messages; all processes of the default group call it together.

    A time is the median over the rounds of the slowest process. Before it is timed, each contender has to give the
    exact sum. Returns what is written as JSON.
    """
    rows = []
    for size in sizes or SIZES[device.type]:
        count = size // 4
        x = torch.empty(count, device=device)
        for name, call in CALLS.items():
            _fill(x)
            expected = x.clone()
            dist.all_reduce(expected)
            call(x)
            if not torch.equal(x, expected):
                raise RuntimeError(f"{name}: wrong sum of {size} bytes")
        # A small message is sent many times in a row, so that the clock and the barrier do not count.
        repeats = min(20, max(1, 2**22 // size))
        samples: dict[str, list[float]] = {name: [] for name in CALLS}
        for _ in range(rounds):
            for name, call in CALLS.items():
                _fill(x)
                _synchronize(device)
                start = time.perf_counter()
                for _ in range(repeats):
                    call(x)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                samples[name].append((time.perf_counter() - start) / repeats)
        slowest = torch.tensor(list(samples.values()), dtype=torch.float64, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        medians = [statistics.median(values) for values in slowest.tolist()]
        rows.append({"bytes": size, "seconds": dict(zip(CALLS, medians, strict=True))})
        if dist.get_rank() == 0:
            print(rows[-1], flush=True)
    return {
        "machine": machine,
        "torch": torch.__version__,
        "backend": dist.get_backend(),
        "processes": dist.get_world_size(),
        "type": "float32",
        "piece_bytes": PIECE_BYTES,
        "command": f"torchrun --standalone --nproc-per-node {dist.get_world_size()} examples/train_ddp.py --bench",
        "rows": rows,
    }


def _fill(x: Tensor) -> None:
    # Whole numbers, so that every order of summation gives the same; not zeros, which some links compress.
    some = torch.randint(-8, 9, (4096,), dtype=x.dtype, device=x.device)
    x.copy_(some.repeat(-(-x.numel() // 4096))[: x.numel()])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()


def bus_factor(processes: int) -> float:
    """The bytes that each process of a ring sends, over those of the message."""
    return 2 * (processes - 1) / processes


def model(document: dict[str, Any]) -> Callable[[int], float]:
    """The cost model, seconds of bytes, through the smallest and the largest message of the ring.

    t = 2 (p - 1) latency + 2 (p - 1) / p * bytes / bandwidth
    """
    small, large = document["rows"][0], document["rows"][-1]
    slope = (large["seconds"][RING] - small["seconds"][RING]) / (large["bytes"] - small["bytes"])
    constant = small["seconds"][RING] - slope * small["bytes"]
    return lambda size: constant + slope * size


def report(document: dict[str, Any]) -> str:
    """What was measured where, and the table, as Markdown."""
    # The earliest results have no revision.
    revision = f", revision {document['revision of src']} of `src`" if "revision of src" in document else ""
    source = f"{document['machine']}, torch {document['torch']}{revision}"
    return f"{source}, `{document['command']}`:\n\n{table(document)}"


def table(document: dict[str, Any]) -> str:
    """Times, bus bandwidths and the cost model as Markdown."""
    from benchmarks import tables

    factor, predict = bus_factor(document["processes"]), model(document)
    head = [f"{document['processes']} processes, {document['backend']}", "model"]
    for name in CALLS:
        head += [name, "GB/s"]
    rows = []
    for row in document["rows"]:
        cells = [_size(row["bytes"]), _time(predict(row["bytes"]))]
        for seconds in row["seconds"].values():
            cells += [_time(seconds), f"{factor * row['bytes'] / seconds / 1e9:.3g}"]
        rows.append(cells)
    return "\n".join(tables.table(head, rows)) + "\n"


def _size(size: int) -> str:
    power = min(3, (size.bit_length() - 1) // 10)
    return f"{size >> 10 * power} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"

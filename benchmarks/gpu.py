"""Entry of `python -m benchmarks.gpu`: the operators on a CUDA device, against PyTorch and against a copy.

All contenders of a case take turns on the same inputs, and every call is timed by device events. The inputs are rotated
so that none is still in a cache when its turn comes again; what is timed is memory traffic, not launches. A copy of the
same tensor, in the same rounds, gives the bandwidth that the operators are held against. Writes
`benchmarks/results/<gpu>/rows.{json,md}`, or `build/benchmarks/<gpu>/` for a part of the cases.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import torchops

from . import machine
from .contenders import COMPILED, dtype_name

OURS, IN_PLACE, EAGER, COPY = "torchops", "torchops in place", "eager", "copy"
RESULTS = Path(__file__).parent / "results"
PART_RESULTS = Path(__file__).parents[1] / "build/benchmarks"
DEVICE = torch.device("cuda")
# Of one tensor; together, the rotated ones are several times any cache.
TENSOR_BYTES = 2**29
ROTATED = 3
WARM_UP = 3

Call = Callable[[Tensor], object]


@dataclass(frozen=True)
class Case:
    """One operator at one size: each contender is called with a matrix of `columns` columns."""

    op: str
    dtype: torch.dtype
    columns: int
    contenders: Mapping[str, Call]
    target: float  # least fraction of the copy bandwidth, in place

    @property
    def rows(self) -> int:
        return TENSOR_BYTES // self.dtype.itemsize // self.columns

    @property
    def name(self) -> str:
        return f"{self.op} {dtype_name(self.dtype)} ({self.rows}, {self.columns})"


def _sigmoid(columns: int, dtype: torch.dtype) -> dict[str, Call]:
    return {OURS: torchops.sigmoid, IN_PLACE: torchops.sigmoid_, EAGER: torch.sigmoid}


def _softmax(columns: int, dtype: torch.dtype) -> dict[str, Call]:
    return {OURS: torchops.softmax, IN_PLACE: torchops.softmax_, EAGER: lambda x: torch.softmax(x, -1)}


def _layer_norm(columns: int, dtype: torch.dtype) -> dict[str, Call]:
    weight = torch.rand(columns, dtype=dtype, device=DEVICE)
    bias = torch.randn(columns, dtype=dtype, device=DEVICE)
    return {
        OURS: lambda x: torchops.layer_norm(x, (columns,), weight, bias),
        IN_PLACE: lambda x: torchops.layer_norm_(x, (columns,), weight, bias),
        EAGER: lambda x: F.layer_norm(x, (columns,), weight, bias),
    }


COLUMNS = (128, 256, 512, 1000, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144)
# torch.compile is timed at some sizes only, since each compiles for seconds.
COMPILED_COLUMNS = (1024, 4096, 32768)


def cases() -> list[Case]:
    """Every operator in bfloat16 and float32, over the last dimension, without grad."""
    out = []
    for dtype in (torch.bfloat16, torch.float32):
        out.append(Case("sigmoid", dtype, 4096, _sigmoid(4096, dtype), 0.96))
        for op, make in (("softmax", _softmax), ("layer_norm", _layer_norm)):
            for columns in COLUMNS:
                target = 0.87 if 256 <= columns <= 32768 else 0.7 if columns == 131072 else 0.0
                out.append(Case(op, dtype, columns, make(columns, dtype), target))
    return out


@dataclass(frozen=True)
class Timing:
    """Seconds per call: median and quartiles over the rounds."""

    seconds: float
    low: float
    high: float


def measure(case: Case, rounds: int, compiled: bool) -> dict[str, Timing]:
    """Times the contenders of a case in turns."""
    inputs = [torch.randn(case.rows, case.columns, device=DEVICE).to(case.dtype) for _ in range(ROTATED)]
    target = torch.empty_like(inputs[0])
    calls: dict[str, Call] = {**case.contenders, COPY: lambda x: target.copy_(x)}
    if compiled and case.columns in COMPILED_COLUMNS:
        torch.compiler.reset()
        calls[COMPILED] = torch.compile(case.contenders[EAGER], dynamic=False, fullgraph=True)
    names = list(calls)
    samples: dict[str, list[float]] = {name: [] for name in names}
    turn = 0
    with torch.no_grad():
        for done in range(WARM_UP + rounds):
            events = {}
            for name in names[done % len(names) :] + names[: done % len(names)]:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                x = inputs[turn % ROTATED]
                turn += 1
                start.record()
                calls[name](x)
                end.record()
                events[name] = start, end
            torch.cuda.synchronize()
            if done >= WARM_UP:
                for name, (start, end) in events.items():
                    samples[name].append(start.elapsed_time(end) / 1e3)
    out = {}
    for name, values in samples.items():
        low, median, high = statistics.quantiles(values, n=4)
        out[name] = Timing(median, low, high)
    return out


def _fraction(timings: Mapping[str, Timing], name: str) -> float:
    """The bandwidth of a contender over that of the copy: each reads and writes the tensor once."""
    return timings[COPY].seconds / timings[name].seconds


def _row(case: Case, timings: Mapping[str, Timing]) -> str:
    cells = [case.name]
    for name in (OURS, IN_PLACE, EAGER, COMPILED):
        if name not in timings:
            cells.append("")
            continue
        cells.append(f"{timings[name].seconds * 1e6:.0f} µs, {_fraction(timings, name):.2f}")
    bandwidth = 2 * case.rows * case.columns * case.dtype.itemsize / timings[COPY].seconds
    return "| " + " | ".join([*cells, f"{timings[COPY].seconds * 1e6:.0f} µs, {bandwidth / 1e12:.2f} TB/s"]) + " |"


def _markdown(description: Mapping[str, str], rows: list[str], rounds: int) -> str:
    facts = "; ".join(value if name == "machine" else f"{name} {value}" for name, value in description.items())
    return "\n".join(
        [
            "# Row operators",
            "",
            f"{facts}. Command: `python -m benchmarks.gpu`.",
            "",
            f"Median of {rounds} calls, timed by device events, the contenders in turns on rotated inputs of",
            f"{TENSOR_BYTES // 2**20} MiB; after the comma the fraction of the bandwidth of a copy of the same tensor.",
            "",
            f"| case (rows, columns) | {OURS} | {IN_PLACE} | {EAGER} | {COMPILED} | {COPY} |",
            "|---" * 6 + "|",
            *rows,
            "",
        ]
    )


def main() -> int:
    """Measures and writes the results; the status is 1 when a target is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="Benchmarks on a CUDA device.")
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument("--rounds", type=int, default=30, help="timed calls of each contender")
    parser.add_argument("--seconds", type=float, default=480, help="stop before a case once this has passed")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--output", type=Path, help="folder for the results")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("python -m benchmarks.gpu needs a CUDA device", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    description = machine.describe(DEVICE)
    folder = (options.output or (PART_RESULTS if options.case else RESULTS)) / machine.slug(description)
    folder.mkdir(parents=True, exist_ok=True)
    rows, results, misses = [], [], []
    start = time.monotonic()
    for case in cases():
        if options.case not in case.name:
            continue
        if time.monotonic() - start > options.seconds:
            misses.append(f"{case.name}: no time left, and none for those after it")
            break
        timings = measure(case, options.rounds, not options.no_compile)
        rows.append(_row(case, timings))
        print(rows[-1], flush=True)
        results.append({"name": case.name, **{name: vars(timing) for name, timing in timings.items()}})
        if _fraction(timings, IN_PLACE) < case.target:
            misses.append(f"{case.name}: {_fraction(timings, IN_PLACE):.2f} of the copy, target {case.target}")
        # After every case: a run that is stopped leaves what it has measured.
        document = {**description, "rounds": options.rounds, "cases": results}
        (folder / "rows.json").write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
        (folder / "rows.md").write_text(_markdown(description, rows, options.rounds))
    print(f"written to {folder}")
    for miss in misses:
        print(f"MISSED  {miss}")
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())

"""What the operators of torchops save: time and peak memory of a call, beside PyTorch's way to do the same.

Contenders, inputs, checks against float64 and timing are those of `benchmarks/`: warm calls, interleaved, medians.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from progress import Progress

sys.path.append(str(Path(__file__).parents[1]))

from benchmarks import memory, peak_memory, timing, workload
from benchmarks.case import BACKWARD, Case
from benchmarks.implementations import MODES

MIB = 2**20
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
OURS = workload.ours(DEVICE.type)
# Seconds per way and per sample, and the least and the most rounds.
EFFORT = timing.Effort(0.5, 5e-3, 7, 51)
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32


@dataclass(frozen=True)
class Way:
    """One way to compute something: the median time of a call, over ours in the same rounds, and its peak memory."""

    label: str
    seconds: float
    ratio: float
    peak_mib: float | None


@dataclass(frozen=True)
class Gain:
    """What was computed, and the ways, ours first."""

    title: str
    ways: list[Way]


def _cases() -> list[tuple[Case, dict[str, str]]]:
    """Cases, and in each the contenders with the Python that they stand for."""
    rows = 2**20 if DEVICE.type == "cuda" else 2**17
    dense = (rows, 128, 128) if DEVICE.type == "cuda" else (4096, 64, 4096)
    gates = {
        OURS: "torchops.dense(x, w, b)",
        "eager": "torch.sigmoid(F.linear(x, w, b))",
        "eager-in-place": "F.linear(x, w, b).sigmoid_()",
    }
    return [
        (Case("dense", dense, DTYPE), gates),
        (Case("dense", dense, DTYPE, BACKWARD), gates),
        (
            Case("square_matmul_", (rows, 128 if DEVICE.type == "cuda" else 256), DTYPE),
            {OURS: "torchops.square_matmul_(a, b)", "out-of-place": "a @ b", "eager": "a.copy_(a @ b)"},
        ),
        (
            Case("layer_norm_", (16384, 4096), DTYPE),
            {
                OURS: "torchops.layer_norm_(x, ...)",
                "out-of-place": "F.layer_norm(x, ...)",
                "eager": "x.copy_(F.layer_norm(x, ...))",
            },
        ),
    ]


def measure() -> list[Gain]:
    """Checks every way against float64, then measures it; raises where one gives a wrong result."""
    cases = _cases()
    gains = []
    with Progress("time and memory", sum(len(labels) for _, labels in cases)) as bar:
        for case, labels in cases:
            gains.append(_gain(case, labels, bar))
    return gains


def _gain(case: Case, labels: dict[str, str], bar: Progress) -> Gain:
    modes = [name for name in labels if name in MODES]
    work = workload.build(case, modes, DEVICE)
    _, wrong = workload.check(work)
    if wrong:
        raise AssertionError(f"{case.op} {case.name}: {wrong}")
    contenders = {name: work.contenders[name] for name in labels}
    measured = timing.measure(contenders, work.inputs, case.task, DEVICE, EFFORT)
    if measured.errors:
        raise AssertionError(f"{case.op} {case.name}: {measured.errors}")
    del work, contenders
    alone = workload.build(case, modes, DEVICE, rotated=False)
    ways = []
    for name, label in labels.items():
        peak = memory.peak(alone, name, DEVICE) / MIB if peak_memory.supported(DEVICE) else None
        ways.append(Way(label, measured.timings[name].seconds, measured.timings[name].ratio, peak))
        bar.advance(f"{case.op} {case.shape}: {label}")
    return Gain(f"{case.op} {case.shape} {case.dtype_name}, {case.task}", ways)

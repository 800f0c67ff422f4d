"""Which kernel should compute a product? `python -m benchmarks candidates --seconds 300 --seed 1`, on CUDA.

Draws layers as the survey does, runs each candidate of `src/cuda/gemm/plan.h` by itself, and writes the times to
`candidates.jsonl`. `--fit FILE...` needs no GPU: it fits the predictions of `src/cuda/gemm/times.h` to such files,
prints how much slower the predicted candidate is than the fastest one, on draws that it was not fitted on, and with
`--write` writes `src/cuda/gemm/measured_times.h`, fitted on all draws.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch

from .. import options as shared
from .. import timing
from ..case import FORWARD
from ..progress import Progress
from ..survey.draws import SURVEYED, Draw, draw
from .table import CANDIDATES, CUBLAS, RULES, Candidate

_EFFORT = timing.Effort(0.0015, 1.5e-4, 4, 5)
_MOST_SETS = 20
_16_BITS = (torch.bfloat16, torch.float16)


def draws(seed: int, device_type: str) -> Iterator[Draw]:
    """Layers of 16 bits, without end. TF32 is predicted by the bytes of its numbers, and not measured."""
    for number in count():
        for name in RULES:
            drawn = draw(SURVEYED[name], FORWARD, seed, number, device_type)
            if drawn.dtype in _16_BITS:
                yield drawn


def seconds_of(drawn: Draw, device: torch.device) -> dict[str, float]:
    """The seconds of each candidate that can compute it, and of the one that is chosen, as "chosen"."""
    restrict = torch.ops.myops._only_candidate
    first = drawn.tensors(device)
    ours = drawn.ways()["torchops"]

    def alone(candidate: Candidate) -> Any:
        def call(*args: torch.Tensor) -> Any:
            restrict(*candidate.numbers)
            try:
                return ours(*args)
            finally:
                restrict(-2, 0)

        return call

    ways = {"chosen": ours}
    with torch.no_grad():
        for candidate in (*CANDIDATES, CUBLAS):
            alone(candidate)(*first)
            if tuple(restrict(-2, 0)) == candidate.numbers:
                ways[candidate.name] = alone(candidate)
    made = [first]
    sets = timing.rotate(lambda: made.pop() if made else tuple(t.clone() for t in first), _MOST_SETS)
    measured = timing.measure(ways, sets, FORWARD, device, _EFFORT)
    return {name: t.seconds for name, t in measured.timings.items()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    shared.add(parser, "device", "output", output=Path("build/candidates"))
    parser.add_argument("--seconds", type=float, default=300.0, help="how long to draw (default: 300)")
    parser.add_argument("--seed", type=int, default=1, help="default: 1")
    parser.add_argument("--fit", nargs="+", type=Path, metavar="FILE", help="fit the predictions to these times")
    parser.add_argument("--write", type=Path, metavar="HEADER", help="with --fit: write measured_times.h")


def run(options: argparse.Namespace) -> int:
    """Measures, or fits what was measured."""
    if options.fit:
        from . import fit, header  # which need SciPy

        draws_measured = [json.loads(line) for path in options.fit for line in path.read_text().splitlines()]
        print(fit.regret(draws_measured))
        if options.write:
            options.write.write_text(header.text(fit.fitted(draws_measured)))
        return 0
    device = shared.device_of(options)
    if device.type != "cuda":
        return shared.refused("candidates", f"expected --device cuda, got {device.type}")
    options.output.mkdir(parents=True, exist_ok=True)
    progress, end = Progress(0), time.monotonic() + options.seconds
    torch.manual_seed(options.seed)
    with (options.output / "candidates.jsonl").open("w") as file:
        for drawn in draws(options.seed, device.type):
            if time.monotonic() > end:
                return 0
            progress.case(f"{drawn.name}, {max(0.0, end - time.monotonic()):.0f} s left")
            found = {"rule": drawn.op.name, "sizes": drawn.sizes, "seconds": seconds_of(drawn, device)}
            file.write(json.dumps(found) + "\n")
            progress.finished()
    return 0

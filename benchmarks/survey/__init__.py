"""Is any operator slower than PyTorch at sizes that nobody listed? `python -m benchmarks survey --seed 1`.

Each draw is an operator at random sizes (`draws.py`), ours beside PyTorch's ways in eager mode to the same result:
time, host time on a GPU, and peak memory. Contenders are interleaved as in all benchmarks; those that are short on a
GPU, and all with gradients, are replayed as CUDA graphs. Sets of inputs rotate, so that large ones are in no cache. A
draw counts as slower if the ratio of ours to the best other way is above a limit in the median of three measurements,
and the difference is more than a microsecond. Judge a change by seeds that nothing was fitted on.

Writes `survey.json` after each draw, and `survey.md` and `survey.png` at the end. `--draw "glu, forward" 17` measures
one draw of a seed again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import machine, peak_memory, timing
from .. import options as shared
from ..case import FORWARD, OVERHEAD, OVERHEAD_GRAD
from ..progress import Progress
from ..record import write
from . import report
from .draws import SURVEYED, Draw, draw

OURS = "torchops"
# Differences below this do not count: a launch, or a cache line more or less.
LEAST_SECONDS = 1e-6
# Draws above this are measured again, so that a disturbance counts for nothing.
SUSPICIOUS = {"cuda": 1.03, "cpu": 1.07}
_EFFORT = {
    "cuda": timing.Effort(0.004, 2e-4, 9, 9),
    "cpu": timing.Effort(0.03, 5e-4, 7, 25),
}
# Sets of arguments: a GPU's cache holds those of some small calls, a processor's those of none for long.
_MOST_SETS = {"cuda": timing.MAX_ROTATED, "cpu": 4}
# Of host time: a queue that is full waits for the device.
_MOST_SECONDS_OF_HOST_TIME = 2e-4


@dataclass
class Outcome:
    """What was measured of a draw: seconds by contender, of the host too on a GPU, and bytes at the peak."""

    name: str
    number: int
    sizes: dict[str, Any]
    dtype: str
    seconds: dict[str, float]
    ratio: float
    host_seconds: dict[str, float] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


def seconds_of(drawn: Draw, device: torch.device) -> tuple[dict[str, float], dict[str, str]]:
    """Medians by contender, and why one has none."""
    sets = _sets(drawn, device)
    ways = {name: timing.contender(way, drawn.task) for name, way in drawn.ways().items()}
    measured = timing.measure(ways, sets, drawn.task, device, _EFFORT[device.type])
    return {name: t.seconds for name, t in measured.timings.items()}, measured.errors


def _sets(drawn: Draw, device: torch.device) -> list[tuple[Tensor, ...]]:
    """Sets of the arguments that leave the caches before their turn comes again. To draw random numbers for each would
    take longer than to measure."""
    first = drawn.tensors(device)
    drawn_sets = [first]

    def next_set() -> tuple[Tensor, ...]:
        if drawn_sets:
            return drawn_sets.pop()
        return tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in first)

    return timing.rotate(next_set, _MOST_SETS[device.type])


def ratio_of(seconds: dict[str, float]) -> float:
    """Ours over the best other way; 1 if they differ by less than what counts."""
    best = min(value for name, value in seconds.items() if name != OURS)
    return 1.0 if abs(seconds[OURS] - best) < LEAST_SECONDS else seconds[OURS] / best


def measure(drawn: Draw, device: torch.device) -> Outcome:
    """One draw. One that is slower is measured twice more, and the measurement in the middle is the outcome."""
    seconds, errors = seconds_of(drawn, device)
    outcome = Outcome(
        drawn.name, drawn.number, drawn.sizes, str(drawn.dtype).removeprefix("torch."), seconds, 0.0, errors=errors
    )
    if OURS not in seconds or len(seconds) == 1:
        return outcome
    outcome.ratio = ratio_of(seconds)
    if outcome.ratio > SUSPICIOUS[device.type]:
        again = [seconds_of(drawn, device)[0] for _ in range(2)]
        tries = sorted([seconds, *(t for t in again if OURS in t and len(t) > 1)], key=ratio_of)
        outcome.seconds = tries[len(tries) // 2]
        outcome.ratio = ratio_of(outcome.seconds)
    args = drawn.tensors(device)
    calls = {name: timing.contender(way, drawn.task) for name, way in drawn.ways().items() if name in seconds}
    with timing.context(drawn.task):
        if peak_memory.supported(device):
            for name, call in calls.items():
                outcome.peak_bytes[name] = peak_memory.peak_of(lambda call=call: call(*args), device)  # type: ignore[misc]
    if device.type == "cuda" and max(seconds.values()) < _MOST_SECONDS_OF_HOST_TIME:
        task = OVERHEAD if drawn.task == FORWARD else OVERHEAD_GRAD
        inputs = args if drawn.task == FORWARD else args[:-1]
        host = timing.measure(drawn.ways(), [inputs], task, device, _EFFORT["cuda"])
        outcome.host_seconds = {name: t.seconds for name, t in host.timings.items()}
    return outcome


def draws(seed: int, names: Sequence[str], device_type: str) -> Iterator[Draw]:
    """Draws without end, one of each operator and task in turn."""
    for number in count():
        for op in SURVEYED.values():
            for task in op.tasks:
                if not names or op.name in names or f"{op.name}, {task}" in names:
                    yield draw(op, task, seed, number, device_type)


def survey(
    seed: int, seconds: float, names: Sequence[str], device: torch.device, most: int | None = None
) -> Iterator[Outcome]:
    """The outcomes of as many draws as the time allows, and of at most `most`."""
    progress = Progress(0)
    end = time.monotonic() + seconds
    torch.manual_seed(seed)
    for drawn in islice(draws(seed, names, device.type), most):
        if time.monotonic() > end:
            break
        progress.case(f"{drawn.name}, {max(0.0, end - time.monotonic()):.0f} s left")
        try:
            outcome = measure(drawn, device)
        except Exception as error:  # also of tensors that do not fit: the other draws go on
            text = timing.first_line(error)
            outcome = Outcome(drawn.name, drawn.number, drawn.sizes, "", {}, 0.0, errors={"": text})
        progress.finished()
        yield outcome


def document(outcomes: Sequence[Outcome], seed: int, device: torch.device, command: str) -> dict[str, Any]:
    """What `survey.json` holds."""
    found = [vars(outcome) for outcome in outcomes]
    return {**machine.describe(device), "command": command, "device": device.type, "seed": seed, "draws": found}


def _known(text: str) -> list[str]:
    names = [name.strip() for name in text.split(";")]
    known = {*SURVEYED, *(f"{op.name}, {task}" for op in SURVEYED.values() for task in op.tasks)}
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(f"expected some of {'; '.join(sorted(known))}, got {'; '.join(unknown)}")
    return names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    shared.add(parser, "device", "output", "no-plots", output=Path("build/survey"))
    parser.add_argument("--seconds", type=float, default=300.0, help="how long to draw (default: 300)")
    parser.add_argument("--seed", type=int, default=1, help="default: 1")
    parser.add_argument("-o", "--op", type=_known, default=[], help="'dense; glu, forward': only these")
    parser.add_argument("--most", type=int, help="at most so many draws")
    parser.add_argument("--draw", nargs=2, metavar=("NAME", "NUMBER"), help="only this draw, as the JSON names it")


def run(options: argparse.Namespace) -> int:
    """Draws, measures, prints and writes. The status is 1 if something failed."""
    device = shared.device_of(options)
    if options.draw:
        name, number = options.draw
        known = {f"{op.name}, {task}": (op, task) for op in SURVEYED.values() for task in op.tasks}
        if name not in known or not number.isdecimal():
            return shared.refused("survey", f"expected one of {'; '.join(known)}, and a number, got {name} {number}")
        outcome = measure(draw(*known[name], options.seed, int(number), device.type), device)
        print(json.dumps(vars(outcome), indent=2))
        return int(bool(outcome.errors))
    written = document([], options.seed, device, options.command)
    for outcome in survey(options.seed, options.seconds, options.op, device, options.most):
        written["draws"].append(vars(outcome))
        write(options.output / "survey.json", written)
    text = report.to_markdown(written)
    print(text)
    (options.output / "survey.md").write_text(text)
    if not options.no_plots:
        print(report.draw(written, options.output / "survey.png"))
    return int(any(drawn["errors"] for drawn in written["draws"]))

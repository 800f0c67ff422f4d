"""Timing of several contenders on the same inputs.

The contenders of a case take turns: one sample each per round, starting with another one every round. A machine that
speeds up or slows down during the run therefore does so for all of them, and ratios are formed inside a round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor

OURS = "torchops"

# Inputs are rotated until together they are this much larger than the last-level cache of current server parts.
ROTATED_BYTES = 256 * 2**20
MAX_ROTATED = 64


@dataclass(frozen=True)
class Workload:
    """What a case runs: each contender is called as `contender(*args)` with every element of `inputs` in turn."""

    contenders: Mapping[str, Callable[..., object]]
    inputs: Sequence[tuple[Tensor, ...]]
    context: Callable[[], AbstractContextManager[object]] = torch.no_grad


@dataclass(frozen=True)
class Case:
    """A named workload of one operator.

    `make` builds the workload on a device; `targets` gives, by contender, the least ratio (its time over ours) that we
    hold ourselves to; `memory` asks for the peak memory of every contender as well.
    """

    name: str
    make: Callable[[torch.device], Workload]
    targets: Mapping[str, float] = field(default_factory=dict)
    memory: bool = False


@dataclass(frozen=True)
class Timing:
    """Seconds per call of one contender (median and quartiles over the rounds), and its time over ours."""

    seconds: float
    low: float
    high: float
    ratio: float


@dataclass(frozen=True)
class Effort:
    """How long to measure: seconds per contender and case, seconds per sample, and bounds on the rounds."""

    contender_seconds: float = 2.0
    sample_seconds: float = 5e-3
    min_rounds: int = 11
    max_rounds: int = 101


QUICK = Effort(contender_seconds=0.2, sample_seconds=1e-3, min_rounds=3, max_rounds=11)


def rotate(make: Callable[[], tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
    """Makes enough copies of the inputs that none is still in a cache when its turn comes again."""
    first = make()
    size = sum(tensor.numel() * tensor.element_size() for tensor in first)
    count = min(MAX_ROTATED, 1 + ROTATED_BYTES // max(1, size))
    return [first, *(make() for _ in range(count - 1))]


def _sample(call: Callable[..., object], batch: Sequence[tuple[Tensor, ...]]) -> float:
    start = time.perf_counter()
    for args in batch:
        call(*args)
    return (time.perf_counter() - start) / len(batch)


def _calls_per_sample(call: Callable[..., object], inputs: Sequence[tuple[Tensor, ...]], effort: Effort) -> int:
    # The first call compiles or starts threads, the second one may still specialise.
    for _ in range(3):
        _sample(call, inputs[:1])
    once = min(_sample(call, inputs[:3]) for _ in range(3))
    return max(1, round(effort.sample_seconds / once))


def measure(
    workload: Workload,
    effort: Effort,
    during_rounds: AbstractContextManager[object],
    on_round: Callable[[int, int], None],
) -> dict[str, Timing]:
    """Times all contenders of `workload`; `on_round(done, total)` is called after every round."""
    inputs = workload.inputs
    with workload.context():
        calls = {name: _calls_per_sample(call, inputs, effort) for name, call in workload.contenders.items()}
        batches = {name: [inputs[i % len(inputs)] for i in range(count)] for name, count in calls.items()}
        trial = max(_sample(call, batches[name]) * calls[name] for name, call in workload.contenders.items())
        rounds = min(effort.max_rounds, max(effort.min_rounds, round(effort.contender_seconds / trial)))

        names = list(workload.contenders)
        samples: dict[str, list[float]] = {name: [] for name in names}
        with during_rounds:
            for done in range(rounds):
                shift = done % len(names)
                for name in names[shift:] + names[:shift]:
                    samples[name].append(_sample(workload.contenders[name], batches[name]))
                on_round(done + 1, rounds)
    return {name: _summary(samples[name], samples[OURS]) for name in names}


def _summary(samples: list[float], ours: list[float]) -> Timing:
    low, median, high = statistics.quantiles(samples, n=4)
    ratio = statistics.median(theirs / own for theirs, own in zip(samples, ours, strict=True))
    return Timing(median, low, high, ratio)

"""Timing of several contenders on the same inputs.

The contenders of a case are interleaved: one sample each per round, with a different one first in every round. So if
the machine speeds up or slows down during the run, it does so for all of them, and ratios are taken within a round.

On the CPU, a sample is a batch of calls between two readings of a steady clock. On CUDA, it is the work between two
events on the device: some calls or, if a call is so short that its launch would show, the replay of a graph of them.
"""

from __future__ import annotations

import gc
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .case import BACKWARD, FORWARD, OVERHEAD, OVERHEAD_GRAD, STEP, Task

# Inputs are rotated until their total size exceeds the last cache of current processors and GPUs by far.
ROTATED_BYTES = 2**28
MAX_ROTATED = 64
# Above this, two inputs don't fit and aren't needed: a pass over one leaves nothing of its beginning in a cache.
LARGEST_ROTATED = 2**30
# Longer calls keep the device busy while the next ones are queued, so that events see no gap. What decides is the trial
# of a call, up to half of which may be the host's. Graphs are not always as fast, either: on an H100, copying 512 MiB
# takes a quarter longer as a graph node than as a call.
GRAPH_BELOW_SECONDS = 2e-4
# The time between two events, which themselves take some microseconds.
EVENT_SECONDS = 1e-3
# The device's queue holds about a thousand launches; a call on a full queue would wait.
OVERHEAD_CALLS = 100
# Other regimes: the seconds of the same work before and while a hot chip is measured, and of idleness before a call.
HOT_AFTER, HOT_MEASURED = 3.0, 1.0
IDLE_SECONDS = 0.01
REGIMES = ("hot", "single")

Inputs = Sequence[tuple[Tensor, ...]]


@dataclass(frozen=True)
class Effort:
    """How long to measure: seconds per contender and case, seconds per sample, and limits for the rounds."""

    contender_seconds: float
    sample_seconds: float
    min_rounds: int
    max_rounds: int


def effort(device_type: str, quick: bool) -> Effort:
    """CUDA needs less, because device events are steadier than the clock of a shared processor."""
    if device_type == "cuda":
        return Effort(0.005, 2e-4, 3, 5) if quick else Effort(0.06, 4e-4, 11, 51)
    return Effort(0.1, 1e-3, 3, 5) if quick else Effort(1.0, 5e-3, 11, 101)


@dataclass(frozen=True)
class Timing:
    """Seconds per call of one contender (median and quartiles over the rounds), and its time relative to the first
    one's."""

    seconds: float
    low: float
    high: float
    ratio: float


@dataclass(frozen=True)
class Measured:
    """Timings by contender, why others have none, and the method."""

    timings: dict[str, Timing]
    errors: dict[str, str]
    method: str


@dataclass(frozen=True)
class _Sampler:
    run: Callable[[], None]
    calls: int


def rotate(make: Callable[[], tuple[Tensor, ...]], most: int = MAX_ROTATED) -> list[tuple[Tensor, ...]]:
    """Makes enough sets of inputs, at most `most`, that none is still in a cache when its turn comes again."""
    first = make()
    return [first, *(make() for _ in range(min(most, _sets(_size(first))) - 1))]


def cold(inputs: tuple[Tensor, ...]) -> bool:
    """Whether a set of inputs, possibly on the meta device, has left the caches when its turn comes again."""
    return _sets(_size(inputs)) <= MAX_ROTATED


def larger_than_caches(inputs: tuple[Tensor, ...]) -> bool:
    """Whether one set of inputs, possibly on the meta device, leaves no cache with it when it is read again."""
    return _size(inputs) >= ROTATED_BYTES


def _size(inputs: tuple[Tensor, ...]) -> int:
    return sum(tensor.nbytes for tensor in inputs)


def _sets(size: int) -> int:
    return 1 + -(-ROTATED_BYTES // max(1, size)) if size < LARGEST_ROTATED else 1


def contender(function: Callable[..., Any], task: Task) -> Callable[..., Any]:
    """A callable for a set of inputs: the function, or the function and its backward with the last input as cotangent.

    Gradients are computed for the inputs that require them, and returned, not accumulated.
    """
    if task in (FORWARD, OVERHEAD, OVERHEAD_GRAD):
        return function

    def forward_backward(*args: Tensor) -> object:
        *inputs, cotangent = args
        return torch.autograd.grad(function(*inputs), [t for t in inputs if t.requires_grad], cotangent)

    return forward_backward


def context(task: Task) -> AbstractContextManager[object]:
    """Turns grad mode off for tasks without backward."""
    return torch.no_grad() if task in (FORWARD, OVERHEAD) else nullcontext()


def first_line(error: BaseException) -> str:
    """The first line of an error, for tables: without the pages that compilers add."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def measure(
    contenders: Mapping[str, Callable[..., Any]],
    inputs: Inputs,
    task: Task,
    device: torch.device,
    effort: Effort,
    on_round: Callable[[str], None] = lambda state: None,
    during_rounds: AbstractContextManager[object] | None = None,
    regime: str = "",
) -> Measured:
    """Times the contenders. One that fails doesn't affect the others.

    `on_round` is called with the progress. `during_rounds` is entered only while measuring. With `regime` "hot", each
    calls the same inputs for seconds before it is measured, and with "single", each call finds an idle chip.
    """
    by_events = device.type == "cuda" and task not in (STEP, OVERHEAD, OVERHEAD_GRAD)
    errors: dict[str, str] = {}
    trials: dict[str, float] = {}
    with context(task):
        for name, call in contenders.items():
            on_round(f"{name}, first calls")
            try:
                trials[name] = _trial(call, inputs, device)
            except Exception as error:
                errors[name] = first_line(error)
        if regime:
            ways = {name: contenders[name] for name in trials}
            with during_rounds or nullcontext(), _without_collections():
                if regime == "hot":
                    samples = _hot(ways, inputs, task, device, effort, trials, errors, on_round)
                else:
                    samples = _single(ways, inputs, device, effort, errors, on_round)
            first, summary = next(iter(samples.values()), []), _alone if regime == "hot" else _summary
            return Measured({name: summary(values, first) for name, values in samples.items()}, errors, regime)
        short = bool(trials) and min(trials.values()) < GRAPH_BELOW_SECONDS
        graph = by_events and (short or task == BACKWARD)
        samplers: dict[str, _Sampler] = {}
        for name, trial in trials.items():
            try:
                samplers[name] = _sampler(contenders[name], inputs, task, device, effort, trial, graph)
                _timed(samplers[name], by_events, device)
            except Exception as error:
                errors[name] = first_line(error)
                samplers.pop(name, None)
        with during_rounds or nullcontext():
            samples = _rounds(samplers, by_events, device, effort, on_round)
    method = "graph replay" if graph else "events" if by_events else "clock"
    ours = next(iter(samples.values()), [])
    return Measured({name: _summary(values, ours) for name, values in samples.items()}, errors, method)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def once(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call: between two events on CUDA, by the clock elsewhere."""
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    call()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3


def _trial(call: Callable[..., Any], inputs: Inputs, device: torch.device) -> float:
    # The first call compiles or starts threads, and the second one may still specialise.
    for _ in range(3):
        call(*inputs[0])
    # What a contender does once for each set of inputs must not be in a sample.
    for args in inputs[1:]:
        call(*args)
    seconds = []
    for args in itertools.islice(itertools.cycle(inputs), 3):
        _synchronize(device)
        start = time.perf_counter()
        call(*args)
        _synchronize(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _sampler(
    call: Callable[..., Any],
    inputs: Inputs,
    task: Task,
    device: torch.device,
    effort: Effort,
    trial: float,
    graph: bool,
) -> _Sampler:
    turn = itertools.cycle(inputs)
    if graph:
        return _graph(call, inputs, max(len(inputs), min(20, round(effort.sample_seconds / trial))))
    if device.type == "cuda" and task in (OVERHEAD, OVERHEAD_GRAD):
        calls = OVERHEAD_CALLS
    elif device.type == "cuda" and task != STEP:
        calls = max(1, round(EVENT_SECONDS / trial))
    else:
        calls = max(1, round(effort.sample_seconds / trial))
    batch = [next(turn) for _ in range(calls)]
    waits = device.type == "cuda" and task == STEP
    if calls == 1 and not waits:
        return _Sampler(lambda: call(*next(turn)), 1)

    def run() -> None:
        for args in batch:
            call(*args)
            if waits:
                torch.cuda.synchronize(device)

    return _Sampler(run, calls)


def _graph(call: Callable[..., Any], inputs: Inputs, calls: int) -> _Sampler:
    # Capture needs its own stream, on which everything has run before.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(*inputs[0])
        # All sets, because the graph must not include what a contender does once for each.
        for args in inputs:
            call(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for args in itertools.islice(itertools.cycle(inputs), calls):
            call(*args)
    return _Sampler(graph.replay, calls)


def _timed(sampler: _Sampler, by_events: bool, device: torch.device) -> Callable[[], float]:
    """Runs a sample, and returns a function that gives its seconds per call, once the device has finished."""
    if by_events:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        sampler.run()
        end.record()
        return lambda: start.elapsed_time(end) / 1e3 / sampler.calls
    _synchronize(device)
    begin = time.perf_counter()
    sampler.run()
    seconds = (time.perf_counter() - begin) / sampler.calls
    return lambda: seconds


@contextmanager
def _without_collections() -> Iterator[None]:
    """A garbage collection during a sample would count as the contender's time."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _rounds(
    samplers: Mapping[str, _Sampler],
    by_events: bool,
    device: torch.device,
    effort: Effort,
    on_round: Callable[[str], None],
) -> dict[str, list[float]]:
    names = list(samplers)
    trials = []
    for sampler in samplers.values():
        pending = _timed(sampler, by_events, device)
        _synchronize(device)
        trials.append(pending() * sampler.calls)
    rounds = max(effort.min_rounds, min(effort.max_rounds, round(effort.contender_seconds / max(trials, default=1.0))))
    pendings: dict[str, list[Callable[[], float]]] = {name: [] for name in names}
    order = random.Random(0)
    with _without_collections():
        for done in range(rounds if names else 0):
            # Who comes before matters: it leaves caches and the allocator's free memory behind.
            for name in order.sample(names, len(names)):
                pendings[name].append(_timed(samplers[name], by_events, device))
            on_round(f"round {done + 1}/{rounds}")
    _synchronize(device)
    return {name: [pending() for pending in values] for name, values in pendings.items()}


def _hot(
    contenders: Mapping[str, Callable[..., Any]],
    inputs: Inputs,
    task: Task,
    device: torch.device,
    effort: Effort,
    trials: Mapping[str, float],
    errors: dict[str, str],
    on_round: Callable[[str], None],
) -> dict[str, list[float]]:
    """One contender after the other, without a pause that would let the chip cool down."""
    samples: dict[str, list[float]] = {}
    for name, call in contenders.items():
        on_round(f"{name}, hot")
        try:
            sampler = _sampler(call, inputs[:1], task, device, effort, trials[name], graph=False)
            samples[name] = _hot_samples(sampler, device, 10 if trials[name] < EVENT_SECONDS else 2)
        except Exception as error:
            errors[name] = first_line(error)
    return samples


def _hot_samples(sampler: _Sampler, device: torch.device, at_once: int) -> list[float]:
    samples: list[float] = []
    begin = time.perf_counter()
    while (elapsed := time.perf_counter() - begin) < HOT_AFTER + HOT_MEASURED or len(samples) < 2:
        # As much as the queue takes at once, so that the chip hardly waits for the host.
        pendings = [_timed(sampler, device.type == "cuda", device) for _ in range(at_once)]
        _synchronize(device)
        if elapsed >= HOT_AFTER:
            samples += [pending() for pending in pendings]
    return samples


def _single(
    contenders: Mapping[str, Callable[..., Any]],
    inputs: Inputs,
    device: torch.device,
    effort: Effort,
    errors: dict[str, str],
    on_round: Callable[[str], None],
) -> dict[str, list[float]]:
    """Call by call, each after other memory has gone through the caches and the chip has had nothing to do."""
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    other, order, turn = torch.empty(ROTATED_BYTES // 4, device=device), random.Random(0), itertools.cycle(inputs)
    for done in range(effort.max_rounds):
        for name in order.sample([*samples], len(samples)):
            args = next(turn)
            other.zero_()
            _synchronize(device)
            time.sleep(IDLE_SECONDS)
            try:
                samples[name].append(once(partial(contenders[name], *args), device))
            except Exception as error:
                errors[name] = first_line(error)
                del samples[name]
        on_round(f"round {done + 1}/{effort.max_rounds}")
    return samples


def _alone(samples: list[float], first: list[float]) -> Timing:
    """Without common rounds, the ratio is that of the medians."""
    low, median, high = statistics.quantiles(samples, n=4)
    return Timing(median, low, high, median / statistics.median(first))


def _summary(samples: list[float], first: list[float]) -> Timing:
    low, median, high = statistics.quantiles(samples, n=4)
    ratio = statistics.median(theirs / ours for theirs, ours in zip(samples, first, strict=True))
    return Timing(median, low, high, ratio)

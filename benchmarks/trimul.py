"""GPU MODE's public task "TriMul": `python -m benchmarks trimul` (gpu-mode/reference-kernels, problems/bioml/trimul).

A triangle update from float32 to float32 that gates before its last projection, by the kernels of
`benchmarks.gated_triangle`. Its cases, inputs and tolerance are the task's, and so is the way of timing: synchronised
calls between two events, with inputs that stay where they are. The score is the geometric mean of the seven.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import gated_triangle as gated
from . import options as shared
from .record import Record

TOLERANCE = 2e-2  # relative and absolute
HIDDEN = 128


class Task(NamedTuple):
    n: int
    batch: int
    dim: int
    masked: bool
    cauchy: bool


# The task's own cases, in its order.
BENCHMARKS = (
    Task(256, 2, 128, False, False),
    Task(768, 1, 128, False, True),
    Task(256, 2, 384, True, False),
    Task(512, 1, 128, False, False),
    Task(1024, 1, 128, False, True),
    Task(768, 1, 384, True, False),
    Task(1024, 1, 384, False, False),
)
TESTS = (
    *(Task(32, 1, 128, masked, False) for masked in (False, True)),
    *(Task(64, 2, 256, masked, False) for masked in (False, True)),
    Task(128, 1, 768, False, False),
    *(Task(256, 1, 128, masked, False) for masked in (False, True)),
    Task(768, 2, 128, False, False),
    *(Task(1024, 1, dim, masked, False) for dim, masked in ((384, True), (768, False), (768, True))),
    Task(32, 1, 128, False, True),
    Task(64, 2, 256, False, True),
    Task(128, 1, 768, False, True),
    Task(256, 1, 128, False, True),
    Task(768, 2, 128, False, True),
    *(Task(1024, 1, dim, True, True) for dim in (384, 768)),
)


def make(task: Task, device: torch.device) -> tuple[Tensor, Tensor, gated.Weights]:
    """x, the mask and the weights, with the task's distributions."""
    shape = (task.batch, task.n, task.n)
    x = torch.empty(*shape, task.dim, device=device)
    x = x.cauchy_(0, 2) if task.cauchy else x.normal_()
    mask = torch.randint(0, 2, shape, device=device) if task.masked else torch.ones(shape, device=device)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device)

    def inner() -> Tensor:
        return random(HIDDEN, task.dim) / math.sqrt(HIDDEN)

    norm, of_x = (random(task.dim), random(task.dim)), (inner(), inner(), inner(), inner(), inner())
    p_out = random(task.dim, HIDDEN) / math.sqrt(task.dim)
    return x, mask, gated.Weights(*norm, *of_x, random(HIDDEN), random(HIDDEN), p_out)


Kernel = Callable[[Tensor, Tensor, gated.Weights], Tensor]


def check(kernel: Kernel, x: Tensor, mask: Tensor, weights: gated.Weights) -> float:
    """Raises unless the values are within the task's tolerance. Returns the share of it that the worst value needs."""
    got, want = kernel(x, mask, weights), gated.written_out(x, mask, weights)
    torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=TOLERANCE)
    return ((got - want).abs() / (TOLERANCE * (1 + want.abs()))).max().item()


def microseconds(kernel: Kernel, arguments: tuple[Any, ...], most_calls: int) -> list[float]:
    """Times calls until the error of the mean is 0.1%, as the task does."""
    times: list[float] = []
    while len(times) < most_calls:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        result = kernel(*arguments)
        end.record()
        torch.cuda.synchronize()
        del result
        times.append(start.elapsed_time(end) * 1e3)
        if len(times) > 2 and statistics.stdev(times) / math.sqrt(len(times)) < 1e-3 * statistics.mean(times):
            break
    return times


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    shared.add(parser, "json")
    parser.add_argument("--calls", type=int, default=100, help="at most, of each case")
    parser.add_argument("--no-tests", action="store_true", help="leave out the task's correctness cases")


def run(options: argparse.Namespace) -> int:
    """Checks the task's tests, then checks and times its cases."""
    if not torch.cuda.is_available():
        return shared.refused("trimul", "the task needs a GPU")
    device = torch.device("cuda")
    torch.manual_seed(0)
    kernel: Kernel = gated.update
    means: list[float] = []
    record = Record(options, device, len(BENCHMARKS), results=[])
    with torch.no_grad():
        record.progress.case("tests")
        tests = [] if options.no_tests else [check(kernel, *make(task, device)) for task in TESTS]
        record.document["tests"] = tests
        for task in BENCHMARKS:
            record.progress.case(str(task))
            arguments = make(task, device)
            worst = check(kernel, *arguments)
            times = microseconds(kernel, arguments, options.calls)
            del arguments
            mean = statistics.mean(times)
            means.append(mean)
            score = math.exp(statistics.mean(map(math.log, means)))
            # Only defined over all cases.
            record.document["geometric mean"] = score if len(means) == len(BENCHMARKS) else None
            result = task._asdict() | {"microseconds": mean, "calls": len(times), "of the tolerance": worst}
            record.add("results", result, f"{task}: {mean:.0f} us, {worst:.2f} of the tolerance")
    print(f"{len(tests)} tests pass; geometric mean {score:.0f} us")
    return 0

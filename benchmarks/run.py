"""`python -m benchmarks run`: measures operators and writes the results."""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import get_args

import torch

from . import implementations, machine, plots, report, timing, workload
from . import options as shared
from .case import BACKWARD, FORWARD, Case, Shape, Task
from .operators import OPERATORS
from .options import device_of
from .progress import Progress
from .report import Report, Result
from .roofline import Roofline

RESULTS = Path(__file__).parent / "results"
PART_RESULTS = Path(__file__).parents[1] / "build/benchmarks"
MAX_OTHER_LOAD = 0.05
DTYPES = ("float32", "float64", "float16", "bfloat16")


def refusal(options: argparse.Namespace, device: torch.device) -> str:
    """Why the requested measurements are impossible, or an empty string."""
    if device.type == "cuda" and not torch.cuda.is_available():
        return "--device cuda: torch finds no CUDA device"
    if (path := os.environ.get("TORCHOPS_KERNEL_PATH", "auto")) != "auto":
        return f"TORCHOPS_KERNEL_PATH={path} forces one path of dense; unset it, so that dense takes its own choice"
    reasons = (implementations.unavailable(mode, device.type) for mode in options.mode)
    return next((reason for reason in reasons if reason), "")


def selected(options: argparse.Namespace, device_type: str) -> list[Case]:
    """The cases of the chosen operators, or else the shapes and dtypes of the command line.

    `dense` includes the training step of the network that consists of it.
    """
    cases: list[Case] = []
    chosen = options.op or list(OPERATORS)
    if "dense" in chosen and "mlp" not in chosen:
        chosen = [*chosen, "mlp"]
    for op in chosen:
        operator = OPERATORS[op]
        dtypes = [getattr(torch, name) for name in options.dtype]
        if options.shape:
            cases += [
                Case(op, shape, dtype, options.task or FORWARD, compiled=True)
                for shape in options.shape
                for dtype in dtypes or [torch.float32]
                if len(shape) == len(operator.dims)
            ]
        else:
            cases += [case for case in operator.cases(device_type) if not dtypes or case.dtype in dtypes]
    if options.task and not options.shape:
        cases = [case for case in cases if case.task == options.task]
    if options.regime:  # of a chip: other tasks are timed by the host's clock
        cases = [case for case in cases if case.task in (FORWARD, BACKWARD)]
    return [case for case in cases if options.case in case.name]


def parse_shape(text: str) -> Shape:
    """`(128, 256, 64)` for `128,256,64`."""
    try:
        return tuple(int(size) for size in text.replace("x", ",").split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected sizes such as 128,256,64, got {text}") from None


@contextmanager
def precision(tf32: bool) -> Iterator[None]:
    former = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(former)


def _settle_inductor() -> None:
    """Keeps the compile processes alive between cases, and autotuning tables off the screen."""
    import torch._inductor.config as config

    for name, value in (("quiesce_async_compile_pool", False), ("autotune_num_choices_displayed", 0)):
        if hasattr(config, name):
            setattr(config, name, value)


def measure_case(
    case: Case,
    modes: list[str],
    device: torch.device,
    effort: timing.Effort,
    roofline: Roofline,
    load: machine.OtherLoad,
    progress: Progress,
    references: bool = True,
    regime: str = "",
) -> Result:
    """Builds, checks and times one case; whatever fails is recorded in the result."""
    # Otherwise compiled code of earlier cases would count towards the recompile limit.
    torch.compiler.reset()
    progress.case(f"{case.op} {case.name}")
    try:
        with precision(case.tf32):
            work = workload.build(case, modes, device, references)
            progress.state("check of the results")
            accuracy, wrong = workload.check(work)
            _free(device)  # exact values, which CUDA graphs could not claim back
            contenders = {name: call for name, call in work.contenders.items() if name not in wrong}
            measured = timing.measure(contenders, work.inputs, case.task, device, effort, progress.state, load, regime)
            cost = work.operator.cost(case.shape, case.task)
            floor = roofline.floor(case, cost)
            problems = {**wrong, **measured.errors}
            result = Result(case, cost, floor, measured.timings, problems, measured.method, accuracy)
    except Exception as error:
        # Such as out of memory: the other cases may still fit.
        result = Result(
            case, OPERATORS[case.op].cost(case.shape, case.task), 0.0, {}, {"all": timing.first_line(error)}
        )
    progress.finished()
    _free(device)
    return result


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def measure_cases(
    cases: list[Case], options: argparse.Namespace, device: torch.device, roofline: Roofline, load: machine.OtherLoad
) -> Iterator[Result]:
    """Measures one after another. After `--seconds`, skips what compiles unless it was requested."""
    effort = timing.effort(device.type, options.quick)
    progress = Progress(len(cases))
    begin = time.monotonic()
    for case in cases:
        left_out = {}
        chosen = options.mode or workload.default_modes(case, device.type)
        if options.seconds and time.monotonic() - begin > options.seconds and not options.mode:
            left_out = {mode: f"left out after {options.seconds:.0f} s" for mode in chosen if mode.startswith("comp")}
        modes = [mode for mode in chosen if mode not in left_out]
        result = measure_case(case, modes, device, effort, roofline, load, progress, regime=options.regime or "")
        yield replace(result, errors={**result.errors, **left_out})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    shared.add(parser, "op", "device", "mode", "case", "quick", "output", "no-plots")
    parser.add_argument("--shape", type=parse_shape, action="append", help="in place of the cases: 128,256,64")
    parser.add_argument("--dtype", type=shared.names(DTYPES), default=[], help=f"by comma: {', '.join(DTYPES)}")
    parser.add_argument("--task", choices=get_args(Task), help="only cases of this kind")
    parser.add_argument("--regime", choices=timing.REGIMES, help="a chip hot from the same work, or single calls")
    parser.add_argument("--seconds", type=float, help="compile nothing more once this much time has passed")


def run(options: argparse.Namespace) -> int:
    """Measures the chosen cases, prints and writes the results, and prints the missed targets.

    The status is 1 if one of our operators failed, gave a wrong result or was not measured.
    """
    device = device_of(options)
    cases = selected(options, device.type)
    if reason := refusal(options, device) or ("" if cases else "no case matches"):
        return shared.refused("run", reason)
    description = machine.describe(device)
    partial = any(getattr(options, name) for name in ("regime", "quick", "case", "mode", "shape", "dtype", "task"))
    folder = (options.output or (PART_RESULTS if partial else RESULTS)) / machine.slug(description)
    print("; ".join(f"{name} {value}" for name, value in description.items()))
    for mode in implementations.MODES:
        if not options.mode and (reason := implementations.unavailable(mode, device.type)):
            print(f"without {mode}: {reason}")
    print("time of a call, its time over that of the first, share of the roofline")

    if not options.mode or any(mode.startswith("compile") for mode in options.mode):
        _settle_inductor()
    roofline, load = Roofline(device), machine.OtherLoad()
    reports: list[Report] = []
    for result in measure_cases(cases, options, device, roofline, load):
        if device.type == "cpu" and (share := load.share()) is not None:
            description["other processes"] = f"{share:.1%} of the processor time"
        former: list[Result] = []
        if reports and reports[-1].op == result.case.op:
            former = reports.pop().results
        else:
            _draw(folder, reports[-1:], options, device)
            print(result.case.op)
        facts = dict(description), options.command, roofline.measured()
        reports.append(Report(result.case.op, *facts, [*former, result], options.regime or ""))
        print(report.to_text(result), flush=True)
        # After every case, so that a run that is stopped keeps its results.
        report.write(folder, reports[-1])
    _draw(folder, reports[-1:], options, device)
    print(f"written to {folder}")
    if device.type == "cpu" and (load.share() or 0.0) > MAX_OTHER_LOAD:
        print(f"WARNING: other processes used {load.share():.1%} of the processor time; the times say little")
    results = [result for item in reports for result in item.results]
    if misses := [miss for result in results for miss in result.misses()]:
        print("\n".join(["", *report.missed_table(misses)]))
    failures = _failures(results, workload.ours(device.type))
    print("\n".join(failures), end="\n" if failures else "")
    return 1 if failures else 0


def _draw(folder: Path, reports: list[Report], options: argparse.Namespace, device: torch.device) -> None:
    if reports and not options.no_plots and not options.regime:
        print(f"  {plots.draw(folder, reports, workload.ours(device.type))}")


def _failures(results: list[Result], ours: str) -> list[str]:
    """The cases in which ours has no time. Failures of others are notes in the report."""
    return [
        f"FAILED  {result.case.op}: {result.case.name}: {result.errors[name]}"
        for result in results
        for name in (ours, "all")
        if name in result.errors
    ]

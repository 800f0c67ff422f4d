"""Entry of `python -m benchmarks`.

`run` measures every operator and writes `benchmarks/results/<machine>/`; a run of part of the cases or with `--quick`
writes `build/benchmarks/<machine>/`. `list` prints the names of all cases.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import torch

from . import machine, memory, report
from .harness import OURS, QUICK, Case, Effort, Workload, measure
from .report import Result

OPS = ("dense", "sigmoid", "square_matmul", "softmax", "layer_norm")
RESULTS = Path(__file__).parent / "results"
ROUGH_RESULTS = Path("build/benchmarks")
SEED = 0
MAX_OTHER_LOAD = 0.05


def cases_of(op: str, part: str = "") -> list[Case]:
    """The cases of one operator whose name contains `part`."""
    module = importlib.import_module(f"benchmarks.{op}")
    return [case for case in module.cases() if part in case.name]


def _workload(case: Case, modes: list[str], device: torch.device) -> Workload:
    torch.manual_seed(SEED)
    # Compiled code of earlier cases would count towards the recompile limit.
    torch.compiler.reset()
    workload = case.make(device)
    chosen = {name: call for name, call in workload.contenders.items() if not modes or name == OURS or name in modes}
    return replace(workload, contenders=chosen)


def _show_progress(label: str, done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\r  {label}: round {done}/{total}\x1b[K", end="" if done < total else "\r\x1b[K", file=sys.stderr)


def _run_case(
    op: str, case: Case, modes: list[str], effort: Effort, device: torch.device, load: machine.OtherLoad
) -> Result:
    workload = _workload(case, modes, device)
    timings = measure(workload, effort, load, lambda done, total: _show_progress(case.name, done, total))
    names = list(workload.contenders)
    del workload
    peaks = {}
    if case.memory and memory.supported():
        peaks = {name: memory.peak_in_subprocess(op, case.name, name) for name in names}
    return Result(case, timings, peaks)


def _print_result(result: Result) -> None:
    print(f"  {result.case.name}")
    for name, timing in result.timings.items():
        peak = f"   +{result.peak_bytes[name] / 2**20:7.1f} MiB" if name in result.peak_bytes else ""
        print(f"    {name:<44} {report.format_seconds(timing.seconds):>10}   {timing.ratio:6.3f}x{peak}", flush=True)


def run(options: argparse.Namespace) -> int:
    """Measures the chosen operators, prints and writes the results; the status is 1 when a target is missed."""
    effort = QUICK if options.quick else Effort()
    device = torch.device("cpu")
    description = machine.describe(device)
    command = shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]])
    folder = options.output or (ROUGH_RESULTS if options.quick or options.case or options.mode else RESULTS)
    folder /= machine.slug(description)
    print("; ".join(f"{name} {value}" for name, value in description.items()))
    print(f"time of a call, its time over that of {OURS}, peak memory")

    misses: list[str] = []
    for op in options.op or OPS:
        print(op)
        load = machine.OtherLoad()
        results = []
        for case in cases_of(op, options.case):
            results.append(_run_case(op, case, options.mode, effort, device, load))
            _print_result(results[-1])
            misses += [f"{op} {miss}" for miss in results[-1].misses()]
        if (share := load.share()) is not None:
            description["other processes"] = f"{share:.1%} of the processor time"
            if share > MAX_OTHER_LOAD:
                print(f"WARNING: other processes used {description['other processes']}; the times say little")
        if results:
            report.write(folder, op, description, command, results)
    print(f"written to {folder}")
    for miss in misses:
        print(f"MISSED  {miss}")
    return 1 if misses else 0


def show_cases(options: argparse.Namespace) -> int:
    """Prints the names of all cases."""
    for op in options.op or OPS:
        for case in cases_of(op):
            print(f"{op}: {case.name}")
    return 0


def show_memory(options: argparse.Namespace) -> int:
    """Prints the peak memory of one contender as JSON; `run` calls this in a process of its own."""
    (case,) = (case for case in cases_of(options.op[0]) if case.name == options.case)
    workload = _workload(case, options.mode, torch.device("cpu"))
    print(json.dumps({"peak_bytes": memory.peak_of(workload, options.mode[0])}))
    return 0


def main() -> int:
    """Parses the command line and runs the chosen command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Benchmarks of the operators.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, function, text in (
        ("run", run, "measure operators"),
        ("list", show_cases, "print the names of all cases"),
        ("memory", show_memory, "print the peak memory of one contender of one case"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(function=function)
        command.add_argument(
            "-o", "--op", action="append", choices=OPS, help="operator; repeat for more (default: all)"
        )
        if name != "list":
            command.add_argument("--case", default="", help="only cases whose name contains this")
            command.add_argument("-m", "--mode", action="append", default=[], help="only this contender; repeatable")
        if name == "run":
            command.add_argument("--quick", action="store_true", help="few rounds, for a rough look")
            command.add_argument("--output", type=Path, help="folder for the results")
    options = parser.parse_args(sys.argv[1:] or ["run"])
    return int(options.function(options))


if __name__ == "__main__":
    sys.exit(main())

"""`python -m benchmarks memory`: peak memory of operators that overwrite their argument, and of those that don't.

On the CPU, each contender has a process of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

import torch

from . import implementations, machine, peak_memory, plots, report, timing, workload
from . import options as shared
from .case import Case
from .operators import OPERATORS
from .options import device_of
from .progress import Progress
from .record import write
from .run import PART_RESULTS, RESULTS, refusal
from .tables import table
from .workload import Workload

MIB = 2**20


def peak(work: Workload, contender: str, device: torch.device) -> int:
    """`peak_memory.peak_of` for one contender of a benchmark."""
    call, args = work.contenders[contender], work.inputs[0]
    with timing.context(work.case.task):
        return peak_memory.peak_of(lambda: call(*args), device)


def _contenders(case: Case, options: argparse.Namespace, device: torch.device) -> list[str]:
    modes = options.mode or workload.default_modes(case, device.type)
    existing = [mode for mode in modes if implementations.find(case.op, mode)]
    return existing + [name for name in OPERATORS[case.op].references if name == "out-of-place"]


def _one(case: Case, contender: str, device: torch.device) -> int:
    modes = [] if contender in OPERATORS[case.op].references else [contender]
    torch.compiler.reset()
    return peak(workload.build(case, modes, device, rotated=False), contender, device)


def _in_subprocess(case: Case, contender: str) -> int:
    command = [sys.executable, "-m", "benchmarks", "memory", "--device", "cpu", "-o", case.op]
    command += ["--case", case.name, "--only", contender]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no output"])[-1])
    return int(json.loads(done.stdout.splitlines()[-1])["peak_bytes"])


def _cases(options: argparse.Namespace, device_type: str) -> list[Case]:
    ops = options.op or OPERATORS
    return [case for op in ops for case in OPERATORS[op].memory(device_type) if options.case in case.name]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    shared.add(parser, "op", "device", "mode", "case", "output", "no-plots")
    parser.add_argument("--only", help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> int:
    """Measures, prints and writes `memory.{json,md,png}`. The status is 1 if ours failed."""
    device = device_of(options)
    cases = _cases(options, device.type)
    if not cases:
        return shared.refused("memory", "no case matches; `list` shows which operators have some")
    if reason := refusal(options, device) or (
        "" if peak_memory.supported(device) else "this system does not tell the peak"
    ):
        return shared.refused("memory", reason)
    if options.only:
        print(json.dumps({"peak_bytes": _one(cases[0], options.only, device)}))
        return 0

    progress = Progress(len(cases))
    rows, misses, failures = [], [], []
    for case in cases:
        progress.case(f"{case.op} {case.name}")
        peaks: dict[str, int] = {}
        errors: dict[str, str] = {}
        for name in _contenders(case, options, device):
            progress.state(name)
            try:
                peaks[name] = _in_subprocess(case, name) if device.type == "cpu" else _one(case, name, device)
            except Exception as error:
                errors[name] = timing.first_line(error)
        progress.finished()
        tensor = case.shape[0] * case.shape[1] * case.dtype.itemsize
        rows.append({"op": case.op, "name": case.name, "tensor_bytes": tensor, "peak_bytes": peaks, "errors": errors})
        print(f"{case.op} {case.name}, tensor of {tensor / MIB:.0f} MiB")
        for name, value in peaks.items():
            print(f"    {name:<14} {value / MIB:10.2f} MiB", flush=True)
        for name, problem in errors.items():
            print(f"    {name:<14} {problem}")
        ours = workload.ours(device.type)
        failures += [f"FAILED  {case.op} {case.name}: {errors[ours]}"] if ours in errors else []
        own = peaks.get(ours, 0)
        if case.most_bytes is not None and own >= case.most_bytes:
            misses.append([f"{case.op} {case.name}", f"{own / MIB:.2f} MiB", f"{case.most_bytes / MIB:.0f} MiB"])

    description = machine.describe(device)
    folder = options.output or (PART_RESULTS if options.op or options.case or options.mode else RESULTS)
    folder /= machine.slug(description)
    document = {**description, "command": options.command, "cases": rows}
    write(folder / "memory.json", document)
    (folder / "memory.md").write_text(report.memory_markdown(description, options.command, rows))
    if not options.no_plots:
        print(plots.draw_memory(folder, rows, description, workload.ours(device.type)))
    print(f"written to {folder}")
    if misses:
        print("\n".join(["", *table(["missed bound", "is", "bound"], misses)]))
    print("\n".join(failures), end="\n" if failures else "")
    return 1 if failures else 0

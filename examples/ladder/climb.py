"""Checks and measures the steps of docs/ladder.md side by side, with one thread and with all.

    make ladder                                   # into build/ladder
    python examples/ladder/climb.py --quick       # a rough look
    python examples/ladder/climb.py --save        # into benchmarks/results, where docs/ladder.md shows it

On a machine with a GPU it runs there, with the steps in Triton and CUDA; `--device cpu` keeps it on the processor.
Steps that lack a compiler or a package are skipped, and listed. The exit status is 1 if a step is wrong.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import steps
import torch

from benchmarks import ladder, machine, record, timing, workload
from benchmarks.case import Case
from benchmarks.run import MAX_OTHER_LOAD, RESULTS

CASES = {
    "cpu": Case("dense", (4096, 64, 4096)),
    "cuda": Case("dense", (262144, 128, 128), torch.bfloat16),
}


def available(device_type: str) -> tuple[dict[str, steps.Dense], dict[str, str]]:
    """The steps that run here, by name, and of those that don't, why."""
    found: dict[str, steps.Dense] = {}
    missing: dict[str, str] = {}
    for step in steps.STEPS:
        if device_type in step.devices:
            try:
                found[step.name] = step.make()
            except steps.UnavailableError as reason:
                missing[step.name] = str(reason)
            except Exception as error:  # a compiler that fails, say: the other steps may still be climbed
                missing[step.name] = timing.first_line(error)
    return found, missing


def climb(case: Case, device: torch.device, quick: bool) -> dict[str, Any]:
    """Measures all steps on one case with the present number of threads."""
    found, missing = available(device.type)
    work = replace(workload.build(case, [], device, references=False), contenders=found)
    _, wrong = workload.check(work)
    contenders = {name: call for name, call in found.items() if name not in wrong}
    load = machine.OtherLoad()
    measured = timing.measure(
        contenders, work.inputs, case.task, device, timing.effort(device.type, quick), during_rounds=load
    )
    return {
        "shape": list(case.shape),
        "dtype": case.dtype_name,
        "method": measured.method,
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "seconds": {name: timing.seconds for name, timing in measured.timings.items()},
        # The first step is the first contender, so this is a median of ratios within a round.
        "over the first": {name: timing.ratio for name, timing in measured.timings.items()},
        "other load": load.share() if device.type == "cpu" else None,
        "missing": missing,
        "wrong": {**wrong, **measured.errors},
    }


def main() -> int:
    """Climbs, prints the table and draws the picture; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda if there is one")
    parser.add_argument("--quick", action="store_true", help="few rounds, for a rough look")
    parser.add_argument("--shape", type=lambda text: tuple(int(size) for size in text.split(",")), help="rows,in,out")
    parser.add_argument("--output", type=Path, default=steps.BUILD, help="folder for the results")
    parser.add_argument("--save", action="store_const", dest="output", const=RESULTS, help="into benchmarks/results")
    options = parser.parse_args()
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    case = CASES[device.type]
    if options.shape:
        case = replace(case, shape=options.shape)

    # All threads first, so that none has to be started while one is measured.
    most = torch.get_num_threads()
    climbed = []
    for threads in sorted({most, 1}, reverse=True) if device.type == "cpu" else [most]:
        torch.set_num_threads(threads)
        climbed.append(climb(case, device, options.quick))
    torch.set_num_threads(most)

    description = machine.describe(device)
    document = {"ladder": description, "command": machine.command("examples/ladder/climb.py"), "cases": climbed[::-1]}
    folder = options.output / machine.slug(description)
    record.write(folder / "ladder.json", document)
    print(ladder.table(document))
    print(ladder.draw(folder.parent))
    for result in climbed:
        if result["other load"] and result["other load"] > MAX_OTHER_LOAD:
            print(f"WARNING: other processes used {result['other load']:.0%} of the processor time", file=sys.stderr)
    return 1 if any(result["wrong"] for result in climbed) else 0


if __name__ == "__main__":
    sys.exit(main())

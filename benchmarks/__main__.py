"""Entry of `python -m benchmarks`; `--help` lists the commands, and `COMMAND --help` the options of each."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import get_args

from . import compare, gradcheck, implementations, inductor, machine, memory, render, run, survey, timing, whole
from .case import Task
from .operators import OPERATORS

Command = Callable[[argparse.Namespace], int]


def show_cases(options: argparse.Namespace) -> int:
    """Prints the names of all cases."""
    device_type = run.device_of(options).type
    for op in options.op or OPERATORS:
        for case in OPERATORS[op].cases(device_type):
            print(f"{op}: {case.name}")
        for case in OPERATORS[op].memory(device_type):
            print(f"{op}: memory of {case.name}")
    return 0


def _names(known: tuple[str, ...] | list[str]) -> Callable[[str], list[str]]:
    """Splits `a,b`, and rejects unknown names."""

    def split(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(known)}, got {', '.join(unknown)}")
        return names

    return split


def parser() -> argparse.ArgumentParser:
    """The command line."""
    main = argparse.ArgumentParser(prog="python -m benchmarks", description="Benchmarks of the operators.")
    commands = main.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, function: Command, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(function=function)
        added.add_argument(
            "-o", "--op", type=_names(list(OPERATORS)), default=[], help="operators, by comma (default: all)"
        )
        added.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
        if name != "list":
            modes = f"implementations, by comma: {', '.join(implementations.MODES)}"
            added.add_argument("-m", "--mode", type=_names(implementations.MODES), default=[], help=modes)
        if name not in ("list", "gradcheck"):
            added.add_argument("--case", default="", help="only cases whose name contains this")
        if name in ("run", "compare"):
            added.add_argument("--quick", action="store_true", help="few rounds, for a rough look")
        if name in ("run", "memory"):
            added.add_argument("--output", type=Path, help="folder for the results")
            added.add_argument("--no-plots", action="store_true", help="no pictures")
        return added

    measure = command("run", run.run, "measure times; writes JSON, Markdown and pictures")
    measure.add_argument("--shape", type=run.parse_shape, action="append", help="in place of the cases: 128,256,64")
    measure.add_argument("--dtype", type=_names(run.DTYPES), default=[], help=f"by comma: {', '.join(run.DTYPES)}")
    measure.add_argument("--task", choices=get_args(Task), help="only cases of this kind")
    measure.add_argument("--regime", choices=timing.REGIMES, help="a chip hot from the same work, or single calls")
    measure.add_argument("--seconds", type=float, help="compile nothing more once this much time has passed")
    peaks = command("memory", memory.run, "measure peak memory, in place and out of place")
    peaks.add_argument("--only", help=argparse.SUPPRESS)
    command("gradcheck", gradcheck.run, "check values and derivatives in float64")
    ratios = command("compare", compare.run, "compare results with a baseline; fails where they are slower")
    ratios.add_argument("baseline", type=Path, help="JSON file of a run, or a folder of them")
    ratios.add_argument("new", help="JSON file, folder, or `run` to measure the cases of the baseline now")
    ratios.add_argument("--tolerance", type=float, default=0.1, help="how much slower is still equal (default: 0.1)")
    ratios.add_argument("--against", default="", metavar="CONTENDER", help="compare multiples of this one's time")
    command("list", show_cases, "print the names of all cases")
    text = "write every table and picture of the results anew, and the tables of the pages; measures nothing"
    pages = commands.add_parser("render", help=text, description=text)
    pages.set_defaults(function=render.run)
    pages.add_argument("--no-plots", action="store_true", help="no pictures")
    text = "measure where torchops.inductor wins over torch.compile, and write its table"
    gains = commands.add_parser("inductor", help=text, description=text)
    gains.set_defaults(function=inductor.run)
    inductor.add_arguments(gains)
    text = "measure a whole prediction of a released model before and after torchops.replace"
    models = commands.add_parser(
        "whole", help=text, description=whole.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    models.set_defaults(function=whole.run)
    whole.add_arguments(models)
    text = "draw random sizes of every operator, and see where PyTorch is faster"
    drawn = commands.add_parser(
        "survey", help=text, description=survey.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    drawn.set_defaults(function=survey.run)
    survey.add_arguments(drawn)
    return main


def main(arguments: list[str] | None = None) -> int:
    """Parses the command line and runs the chosen command."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser().parse_args(arguments)
    options.command = machine.command("benchmarks", arguments)
    return int(options.function(options))


if __name__ == "__main__":
    sys.exit(main())

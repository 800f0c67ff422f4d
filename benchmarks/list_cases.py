"""`python -m benchmarks list`: the names of all cases."""

from __future__ import annotations

import argparse

from . import options as shared
from .operators import OPERATORS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    shared.add(parser, "op", "device")


def run(options: argparse.Namespace) -> int:
    """Prints the names of all cases."""
    device_type = shared.device_of(options).type
    for op in options.op or OPERATORS:
        for case in OPERATORS[op].cases(device_type):
            print(f"{op}: {case.name}")
        for case in OPERATORS[op].memory(device_type):
            print(f"{op}: memory of {case.name}")
    return 0

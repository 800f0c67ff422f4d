"""The options that several commands have."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from .implementations import MODES
from .operators import OPERATORS


def names(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Splits `a,b`, and rejects unknown names."""

    def split(text: str) -> list[str]:
        found = text.split(",")
        if unknown := [name for name in found if name not in known]:
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(known)}, got {', '.join(unknown)}")
        return found

    return split


def numbers(text: str) -> list[int]:
    """`[384, 768]` for `384,768`."""
    try:
        return [int(number) for number in text.split(",") if number]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers such as 384,768, got {text}") from None


SHARED: dict[str, dict[str, Any]] = {
    "op": {"type": names(list(OPERATORS)), "default": [], "help": "operators, by comma (default: all)"},
    "mode": {"type": names(MODES), "default": [], "help": f"implementations, by comma: {', '.join(MODES)}"},
    "case": {"default": "", "help": "only cases whose name contains this"},
    "device": {"choices": ("cpu", "cuda"), "help": "default: cuda if there is one, or for what only CUDA has"},
    "sizes": {"type": numbers, "help": "N, by comma"},
    "features": {"type": int, "default": 128, "help": "of a position (default: %(default)s)"},
    "rounds": {"type": int, "help": "of measurements (default: %(default)s)"},
    "quick": {"action": "store_true", "help": "few rounds, for a rough look"},
    "jobs": {"type": int, "help": "processes that compile (default: 14 for CUDA, 1 for the CPU)"},
    "json": {"type": Path, "help": "where to write the results"},
    "output": {"type": Path, "help": "folder for the results"},
    "no-plots": {"action": "store_true", "help": "no pictures"},
}
SHORT = {"op": ("-o",), "mode": ("-m",)}


def add(parser: argparse.ArgumentParser, *shared: str, **defaults: object) -> None:
    """Adds some of the shared options, with defaults of the command's own."""
    for name in shared:
        parser.add_argument(*SHORT.get(name, ()), f"--{name}", **SHARED[name])
    parser.set_defaults(**defaults)


def device_of(options: argparse.Namespace) -> torch.device:
    """The requested device, or else CUDA if there is one."""
    return torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))


def refused(command: str, reason: str) -> int:
    """The status of a command that cannot do what was asked for; says why."""
    print(f"python -m benchmarks {command}: {reason}", file=sys.stderr)
    return 2

"""Entry of `python -m benchmarks`; `--help` lists the commands, and `COMMAND --help` the options of each."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

from . import machine


class Command(NamedTuple):
    """A command. Its module has `add_arguments(parser)`, and `run(options)`, which returns the exit status."""

    name: str
    module: str
    help: str


COMMANDS = (
    Command("run", "run", "measure times; writes JSON, Markdown and pictures"),
    Command("memory", "memory", "measure peak memory, in place and out of place"),
    Command("gradcheck", "gradcheck", "check values and derivatives in float64"),
    Command("compare", "compare", "compare results with a baseline; fails where they are slower"),
    Command("list", "list_cases", "print the names of all cases"),
    Command("render", "render", "write all tables and pictures of the results anew; measures nothing"),
    Command("gates", "gates", "gates, gated linear units and batched products in place, beside what bounds them"),
    Command("eight_bits", "eight_bits", "dense_scaled beside torch._scaled_mm, and beside dense in bfloat16"),
    Command("triangle", "triangle", "the triangle update against PyTorch's ways to write it"),
    Command("stages", "stages", "the stages of the triangle update that gate, alone, on CUDA"),
    Command("trimul", "trimul", 'GPU MODE\'s public task "TriMul", on CUDA'),
    Command("triangle_attention", "triangle_attention", "triangle attention beside PyTorch's ways to compute it"),
    Command("pair_layer", "pair_layer", "the pair layer beside PyTorch's own operators"),
    Command("triangle_sharded", "triangle_sharded", "a triangle update over several GPUs, under torchrun"),
    Command("pair_layer_sharded", "pair_layer_sharded", "the pair layer over several GPUs, under torchrun"),
    Command("power", "power", "the clock of a chip at its power limit, on CUDA"),
    Command("boltz", "boltz", "layers of the released Boltz before and after torchops.replace"),
    Command("survey", "survey", "every operator at random sizes, beside PyTorch's ways"),
    Command("candidates", "candidates", "each kernel that could multiply on CUDA, alone; fits predicted times"),
    Command("whole", "whole", "a prediction or a training step of a released model before and after torchops.replace"),
    Command("inductor", "inductor", "where torchops.inductor wins over torch.compile; writes its table"),
)


def parser(chosen: str) -> argparse.ArgumentParser:
    """The command line, with the options of the chosen command; the modules of the others may need what is missing."""
    main = argparse.ArgumentParser(prog="python -m benchmarks", description="Benchmarks of the operators.")
    commands = main.add_subparsers(required=True, metavar="COMMAND")
    for name, module, text in COMMANDS:
        added = commands.add_parser(name, help=text, formatter_class=argparse.RawDescriptionHelpFormatter)
        if name == chosen:
            command = import_module(f".{module}", __package__)
            added.description = command.__doc__
            added.set_defaults(function=command.run)
            command.add_arguments(added)
    return main


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line and runs the chosen command."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options = parser(next(iter(arguments), "")).parse_args(arguments)
    processes = int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else 0  # torchrun sets both
    options.command = machine.command("benchmarks", arguments, processes)
    return int(options.function(options))


if __name__ == "__main__":
    sys.exit(main())

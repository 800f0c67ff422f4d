"""The pair layer beside PyTorch's own operators as papers write them: `python -m benchmarks pair_layer`.

Times are device time between two events, or those of the clock on the CPU, medians of rounds in which all ways take
turns. Memory is what a call takes beside its inputs, results and gradients included (on the CPU what the process grows
by), in pair tensors of N * N * c elements of the compute dtype; on CUDA the GiB of all that is allocated, too.
`--parts` measures the parts of the layer as well, `--check` compares each with float64 where it overwrites x, at some
positions.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import torchops

from . import options as shared
from . import peak_memory, sampled, timing
from .record import Record

sys.path.append(str(Path(__file__).parents[1] / "examples/models"))

import alphafold3_pair_layer as written

from . import expert_pair_layer

C = 128
FORWARD, TRAINING = "forward", "forward + backward"


def parameters_(module: nn.Module, seed: int = 0) -> nn.Module:
    """Fills the parameters with random values, so that no update is 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            values = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(values / parameter.shape[-1] ** 0.5 if parameter.dim() == 2 else 1 + 0.1 * values)
    return module


class Case:
    """Calls for one N, task and precision. `bf16-mixed` is a float32 x under autocast."""

    def __init__(self, n: int, task: str, precision: str, device: torch.device) -> None:
        self.n, self.task, self.precision, self.device = n, task, precision, device
        self.mixed = precision == "bf16-mixed"
        stored = torch.float32 if self.mixed else getattr(torch, precision)
        self.compute = torch.bfloat16 if self.mixed else stored
        self.x = torch.randn(1, n, n, C, device=device).to(stored)
        self.grad = torch.randn_like(self.x) if task == TRAINING else None
        self.mask = (torch.rand(1, n, n, device=device) > 0.1).to(stored)
        plain: Any = parameters_(written.PairLayer(C)).to(device, stored)
        self.plain = plain
        self.ours = torchops.nn.PairLayer(C, dropout=0).to(device, stored)
        self.ours.load_state_dict(plain.state_dict())
        self.checkpointed = copy.copy(self.ours)
        self.checkpointed.checkpoint = True
        # Collected once, as optimizers do: a walk through the modules between forward and backward would make a GPU
        # wait.
        self.weights = {module: list(module.parameters()) for module in (self.plain, *self.ours.modules())}

    def call(self, way: Callable[..., Tensor], module: nn.Module, in_place: bool) -> None:
        """Calls `way`, which computes `module`."""
        with torch.autocast(self.device.type, self.compute, enabled=self.mixed):
            if self.grad is None:
                with torch.no_grad():
                    way(self.x, self.mask, inplace=True) if in_place else way(self.x, self.mask)
                return
            x = self.x.detach().requires_grad_()
            out = way(x, self.mask)
        torch.autograd.grad(out, [x, *self.weights[module]], self.grad.to(out.dtype))

    def deviations(self) -> dict[str, float]:
        """Deviations from float64, with each part of our layer overwriting x. Autocast rounds what is float32."""
        with torch.autocast(self.device.type, self.compute, enabled=self.mixed):
            made = sampled.errors(self.ours, self.x, self.mask)
        if not max(made.values()) < 8 * torch.finfo(self.compute).eps:
            raise AssertionError(f"too far from float64: {made}")
        return made

    def pair_bytes(self) -> int:
        return self.n * self.n * C * self.compute.itemsize

    def ways(self, eager: bool, compiled: bool, expert: bool) -> dict[str, Callable[[], None]]:
        ways = {"torchops": lambda: self.call(self.ours, self.ours, True)}
        if self.task == TRAINING:
            ways["torchops, checkpointed"] = lambda: self.call(self.checkpointed, self.ours, False)
        if eager:
            ways["eager"] = lambda: self.call(self.plain, self.plain, False)
        if compiled:
            graph = torch.compile(self.plain, dynamic=False)
            ways["torch.compile"] = lambda: self.call(graph, self.plain, False)
        if expert:
            by_hand = expert_pair_layer.compiled(self.plain)
            ways["assembled by an expert"] = lambda: self.call(by_hand, self.plain, False)
        return ways

    def parts(self) -> dict[str, Callable[[], None]]:
        def part(name: str, module: Any) -> Callable[[], None]:
            if name == "transition_z":
                return lambda: self.call(lambda x, mask, **how: module(x, **how), module, True)
            return lambda: self.call(module, module, True)

        return {name: part(name, module) for name, module in self.ours.named_children()}


def sample(call: Callable[[], None], device: torch.device) -> tuple[float, int, int]:
    """Microseconds and, on CUDA, the bytes allocated by the call alone and in total."""
    if device.type == "cpu":
        return timing.once(call, device) * 1e6, 0, 0
    torch.cuda.synchronize()
    peak = peak_memory.Peak(device)
    microseconds = timing.once(call, device) * 1e6
    return microseconds, peak.extra(), peak.total()


def measure(case: Case, ways: dict[str, Callable[[], None]], rounds: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {name: [] for name in ways}
    peaks: dict[str, int] = {}
    totals: dict[str, int] = {}
    errors: dict[str, str] = {}
    for done in range(rounds + 2):
        for name, call in ways.items():
            if name in errors:
                continue
            try:
                microseconds, peaks[name], totals[name] = sample(call, case.device)
            except torch.cuda.OutOfMemoryError as error:
                errors[name] = str(error).split(". ")[0]
                torch.cuda.empty_cache()
                continue
            if done >= 2:
                times[name].append(microseconds)
    if case.device.type == "cpu" and peak_memory.supported(case.device):
        # After all timing: memory returned to the system must be requested again.
        peaks = {name: peak_memory.peak_of(call, case.device) for name, call in ways.items() if name not in errors}
    return {
        "n": case.n,
        "task": case.task,
        "precision": case.precision,
        "microseconds": {name: statistics.median(values) for name, values in times.items() if values},
        "pair tensors": {name: peak / case.pair_bytes() for name, peak in peaks.items() if name not in errors},
        "GiB in all": {name: total / 2**30 for name, total in totals.items() if name not in errors},
        "errors": errors,
    }


def summary(result: dict[str, Any], cuda: bool) -> str:
    """A line for each way."""
    pairs, totals = result["pair tensors"], result["GiB in all"]
    lines = [f"N = {result['n']}, {result['task']}, {result['precision']}"]
    for name, us in result["microseconds"].items():
        total = f", {totals[name]:6.2f} GiB in all" * cuda
        lines.append(f"    {name:28} {us / 1e3:9.3f} ms  {pairs[name]:6.2f} pair tensors{total}")
    lines += [f"    {name:28} {error}" for name, error in result["errors"].items()]
    if "deviations" in result:
        lines.append("    deviations: " + ", ".join(f"{k} {v:.1e}" for k, v in result["deviations"].items()))
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    numbers = shared.numbers
    shared.add(parser, "device", "sizes", "rounds", "json", rounds=7)
    parser.add_argument("--tasks", type=lambda text: text.split(","), default=[FORWARD, TRAINING])
    parser.add_argument("--precisions", type=lambda text: text.split(","), help="bfloat16, bf16-mixed, float32, ...")
    parser.add_argument("--eager", type=numbers, help="N of PyTorch's own")
    parser.add_argument("--compile", type=numbers, default=[])
    parser.add_argument("--expert", type=numbers, default=[], help="N of expert_pair_layer.py")
    parser.add_argument("--parts", action="store_true", help="the parts of our layer, too")
    parser.add_argument("--check", action="store_true", help="errors at some positions")


def run(options: argparse.Namespace) -> int:
    """Measures each precision, N and task."""
    device = shared.device_of(options)
    cuda = device.type == "cuda"
    sizes = options.sizes or ([384, 768, 769, 1024, 2048] if cuda else [64, 128])
    eager = options.eager if options.eager is not None else [n for n in sizes if n <= 768 and n % 2 == 0]
    record = Record(options, device)
    for precision in options.precisions or (["bfloat16", "bf16-mixed"] if cuda else ["float32"]):
        for n in sizes:
            for task in options.tasks:
                if task == TRAINING and cuda and n > 1024:
                    continue
                record.progress.case(f"N = {n}, {task}, {precision}")
                case = Case(n, task, precision, device)
                ways = case.ways(n in eager, n in options.compile, n in options.expert)
                if options.parts:
                    ways |= case.parts()
                result = measure(case, ways, options.rounds)
                if options.check and task == FORWARD:
                    result["deviations"] = case.deviations()
                record.add("results", result, summary(result, cuda))
                del case, ways
                # Otherwise compiled code of earlier cases would count towards the recompile limit.
                torch.compiler.reset()
                if cuda:
                    torch.cuda.empty_cache()
    return 0

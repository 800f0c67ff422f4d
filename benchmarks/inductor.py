"""The rows of the table of `torchops.inductor`: each form compiled with the pass and without it, where it stands alone
and where Inductor fuses what reads its result, for inference and for training.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import torchops
from torchops.inductor import table

from . import machine, parallel, timing
from . import options as shared
from .case import BACKWARD, FORWARD
from .progress import Progress

OPERATORS = ("gate", "glu sigmoid", "glu silu", "dense")
# Anything less is measurement noise.
LEAST_RATIO = 1.05


@dataclass(frozen=True)
class Case:
    """One form at one size."""

    operator: str
    dtype: str
    features: tuple[int, int]
    rows: int
    training: bool
    fused: bool

    @property
    def name(self) -> str:
        n_in, n_out = self.features
        return (
            f"{self.operator} {self.rows} rows {n_in} to {n_out} {self.dtype} "
            f"{'training' if self.training else 'inference'}{', fused' * self.fused}"
        )


@dataclass(frozen=True)
class Result:
    """Medians in microseconds, from the repeat in which the operator did worst."""

    case: Case
    ours: float
    compiled: float
    rewritten: bool

    @property
    def wins(self) -> bool:
        return self.rewritten and self.compiled > LEAST_RATIO * self.ours


def _function(case: Case) -> Callable[..., Tensor]:
    """A new function per case, since compiled code belongs to the function."""

    def gate(v: Tensor, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return v * torch.sigmoid(F.linear(x, w, b))

    def glu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.glu(F.linear(x, w, b))

    def silu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        up, gate = F.linear(x, w, b).chunk(2, dim=-1)
        return up * F.silu(gate)

    def dense(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.sigmoid(F.linear(x, w, b))

    forms: dict[str, Callable[..., Tensor]] = {"gate": gate, "glu sigmoid": glu, "glu silu": silu, "dense": dense}
    form = forms[case.operator]

    def alone(*arguments: Tensor) -> Tensor:
        return form(*arguments)

    def fused(residual: Tensor, mask: Tensor, *arguments: Tensor) -> Tensor:
        return residual + mask * form(*arguments)

    return fused if case.fused else alone


def _inputs(case: Case, device: torch.device) -> tuple[Tensor, ...]:
    n_in, n_out = case.features
    dtype = getattr(torch, case.dtype)

    def make(*shape: int, grad: bool = True) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype).requires_grad_(grad and case.training)

    columns = n_out * (2 if "glu" in case.operator else 1)
    weight = (make(columns, n_in, grad=False) / n_in**0.5).requires_grad_(case.training)
    surroundings = [make(case.rows, n_out), make(case.rows, n_out, grad=False)] if case.fused else []
    gated = [make(case.rows, n_out)] if case.operator == "gate" else []
    cotangent = [make(case.rows, n_out, grad=False)] if case.training else []
    return (*surroundings, *gated, make(case.rows, n_in), weight, make(columns), *cotangent)


class _Contenders:
    """Both ways to compile a case, each called once."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device = case, device
        self.task = BACKWARD if case.training else FORWARD
        options = torchops.inductor.options()
        before = torchops.inductor.matches()
        self.calls = {
            "ours": timing.contender(
                torch.compile(_function(case), dynamic=False, fullgraph=True, options=options), self.task
            ),
            "compile": timing.contender(torch.compile(_function(case), dynamic=False, fullgraph=True), self.task),
        }
        inputs = _inputs(case, device)
        with timing.context(self.task):
            for call in self.calls.values():
                call(*inputs)
        self.rewritten = torchops.inductor.matches() == before + 1

    def measure(self, repeats: int) -> Result:
        inputs = timing.rotate(lambda: _inputs(self.case, self.device))
        effort = timing.effort(self.device.type, quick=False)
        if self.device.type == "cuda":
            effort = replace(effort, contender_seconds=0.03, max_rounds=31)
        worst: tuple[float, float] | None = None
        for _ in range(repeats):
            measured = timing.measure(self.calls, inputs, self.task, self.device, effort)
            if measured.errors:
                raise RuntimeError(f"{self.case.name}: {measured.errors}")
            ours, compiled = (measured.timings[name].seconds * 1e6 for name in ("ours", "compile"))
            if worst is None or compiled / ours < worst[1] / worst[0]:
                worst = ours, compiled
        assert worst is not None
        return Result(self.case, *worst, self.rewritten)


def _prepared(case: Case, device: torch.device, repeats: int) -> Callable[[], Result]:
    """Compiles everything for a case, and returns a function that measures it."""
    table.TABLE = table.Everywhere()
    torch._inductor.config.force_disable_caches = True
    contenders = _Contenders(case, device)
    return lambda: contenders.measure(repeats)


def _rows(results: list[Result], device: torch.device, source: str) -> list[table.Row]:
    """Merges adjacent numbers of rows at which the operator wins into one row."""
    kind, capability = table.runs_on(device)

    def group(result: Result) -> tuple[Any, ...]:
        case = result.case
        return (case.operator, case.dtype, case.features, case.training, case.fused)

    rows = []
    for _, members in itertools.groupby(sorted(results, key=lambda r: (group(r), r.case.rows)), key=group):
        for wins, run in itertools.groupby(members, key=lambda result: result.wins):
            found = list(run)
            if not wins:
                continue
            case, last = found[0].case, found[-1]
            rows.append(
                table.Row(
                    case.operator,
                    kind,
                    capability,
                    case.dtype,
                    *case.features,
                    case.training,
                    case.fused,
                    case.rows,
                    last.case.rows,
                    round(last.ours, 1),
                    round(last.compiled, 1),
                    source,
                )
            )
    return rows


def cases_of(options: argparse.Namespace) -> list[Case]:
    """The most important cases first, in case time runs out."""
    return [
        Case(operator, dtype, features, rows, training, fused)
        for dtype in options.dtype
        for features in options.features
        for operator in options.operator
        for training in options.training
        for fused in (False, True)
        for rows in options.rows
        if not (fused and operator == "dense")
    ]


def run(options: argparse.Namespace) -> int:
    """Measures, prints each case, and writes the table, in which the new rows replace those of the same cases."""
    device = shared.device_of(options)
    options.jobs = options.jobs or parallel.jobs(device.type)
    if options.repeats is None:
        options.repeats = 1 if device.type == "cuda" else 3
    description = machine.describe(device)
    revisions = machine.revisions(description).replace("`", "")
    source = f"{description['machine']}, torch {description['torch']}, {revisions}"
    cases, results = cases_of(options), []
    prepared = partial(_prepared, device=device, repeats=options.repeats)
    progress = Progress(len(cases))
    for _, result in parallel.measured(prepared, cases, options.jobs, options.seconds, progress):
        progress.finished()
        results.append(result)
        ratio = result.compiled / result.ours
        verdict = "wins" if result.wins else "loses" if result.rewritten else "not rewritten"
        print(f"{result.case.name}: {result.ours:.1f} / {result.compiled:.1f} us, {ratio:.2f}x, {verdict}", flush=True)
    kind, capability = table.runs_on(device)
    measured = {(r.case.operator, r.case.dtype, *r.case.features, r.case.training, r.case.fused) for r in results}
    output = options.output or table.PATH
    kept = [
        row
        for row in table.read(output if output.exists() else table.PATH).rows
        if (row.device, row.capability) != (kind, capability)
        or (row.operator, row.dtype, row.n_in, row.n_out, row.training, row.fused) not in measured
    ]
    new = table.Table((*kept, *_rows(results, device, source)))
    table.write(new, output)
    print(f"{sum(r.wins for r in results)} of {len(results)} cases win; {output}")
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""

    def switches(text: str) -> list[bool]:
        return [bool(number) for number in shared.numbers(text)]

    def pairs(text: str) -> list[tuple[int, int]]:
        sizes = [part.split("x") for part in text.split(",")]
        return [(int(size[0]), int(size[-1])) for size in sizes]

    shared.add(parser, "device", "jobs")
    parser.add_argument(
        "--operator", type=shared.names(OPERATORS), default=list(OPERATORS), help=f"by comma: {', '.join(OPERATORS)}"
    )
    parser.add_argument(
        "--dtype", type=lambda text: text.split(","), default=["bfloat16"], help="by comma: bfloat16,float16"
    )
    parser.add_argument("--features", type=pairs, default=pairs("128,64,256"), help="by comma: 128,128x256 (in x out)")
    parser.add_argument(
        "--training", type=switches, default=[False, True], help="by comma: 0 (inference), 1 (default: both)"
    )
    parser.add_argument("--rows", type=shared.numbers, default=[65536, 1048576], help="by comma: 65536,1048576")
    parser.add_argument("--repeats", type=int, help="a case has to win in each (default: 1 for CUDA, 3 for the CPU)")
    parser.add_argument("--seconds", type=float, default=600, help="what is not compiled by then is left out")
    parser.add_argument(
        "--output", type=Path, help="the table to change, or a copy of it (default: that of the package)"
    )

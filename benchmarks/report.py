"""Results as JSON, for programs, and as text and Markdown, for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from . import record, tables, timing
from .case import OVERHEAD, OVERHEAD_GRAD, Case, Cost
from .operators import OPERATORS
from .timing import Timing

# How samples are taken, by the `method` of a result.
METHODS = {
    "clock": "clock: calls one after the other, between two readings of the processor's clock.",
    "events": "events: about 1 ms of calls queued back to back, or one longer call, between two events on the device.\n"
    "  The chip is neither idle, as before a single call, nor as hot as after seconds of the same work.",
    "graph replay": "graph replay: the same for a CUDA graph of at most 64 calls, so that launches don't show.",
    "hot": "hot: calls with the same inputs for about four seconds, of which the last is measured. One contender\n"
    "  comes after the other, so a ratio is that of two medians. Launches may show in short calls.",
    "single": "single: one call at a time on an idle chip, between two events on a GPU, after other memory has gone\n"
    "  through the caches. Launches are part of it.",
}
# How a page explains its times, by whether contenders have common rounds.
_INTERLEAVED = """\
Contenders are interleaved, one sample each per round. In brackets: the
median over the rounds of that time over the first contender's in the same round (above 1: the first is
faster), which can differ from the quotient of the medians. Names that begin with `compile` are called
through `torch.compile`, all others eagerly."""
_IN_TURN = """\
Contenders are measured one after the other. In brackets: that time over
the first contender's (above 1: the first is faster). Names that begin with `compile` are called through
`torch.compile`, all others eagerly."""
# What its rows call cold and warm, by regime; "" is none.
_CACHES = {
    "": """\
- cold: calls rotate through sets of inputs of more than 256 MiB, so that none finds its inputs in a cache;
  warm: calls rotate through 64 small sets, which may stay in a cache.""",
    "hot": """\
- cold: the inputs, the same in every call, have at least 256 MiB, so that no cache holds them;
  warm: they are smaller, and may stay in a cache.""",
    "single": "- cold: no call finds its inputs in a cache.",
}
# Two measurements of the same thing differ by about this much, so only a larger difference misses a target.
NOISE = 0.01


@dataclass(frozen=True)
class Result:
    """What was measured for one case, by contender.

    `floor` is the least time that the roofline allows. `errors` says why a contender has no time. `accuracy` is the
    relative error of its result against float64, or that of the worst gradient.
    """

    case: Case
    cost: Cost
    floor: float
    timings: dict[str, Timing] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    method: str = ""
    accuracy: dict[str, float] = field(default_factory=dict)

    @property
    def first(self) -> str:
        """The contender that the others are compared with: ours, unless it was left out or failed."""
        return next(iter(self.timings), "")

    @property
    def cold(self) -> bool:
        """Whether the inputs have left the caches before each call."""
        if self.method == "single":
            return True
        inputs = OPERATORS[self.case.op].make(self.case.shape, self.case.dtype, torch.device("meta"))
        return timing.larger_than_caches(inputs) if self.method == "hot" else timing.cold(inputs)

    @property
    def bytes(self) -> int:
        return self.cost.elements * self.case.dtype.itemsize

    def share(self, name: str) -> float | None:
        """The least possible time over that of a contender; None if calls are too small for it to mean anything."""
        if self.case.task in (OVERHEAD, OVERHEAD_GRAD) or not self.floor:
            return None
        return self.floor / self.timings[name].seconds

    def missed(self, name: str) -> bool:
        """Whether ours misses the target against a contender."""
        ours = self.first in ("cuda", "cpp")
        return ours and self.timings[name].ratio < self.case.targets[name] * (1 - NOISE)

    def misses(self) -> list[tuple[str, str, float, float]]:
        """The missed targets: case, contender, ratio and target."""
        return [
            (f"{self.case.op} {self.case.name}", name, self.timings[name].ratio, target)
            for name, target in self.case.targets.items()
            if name in self.timings and self.missed(name)
        ]


@dataclass(frozen=True)
class Report:
    """All results of one operator in one run. `rates` are the two sides of the roofline."""

    op: str
    description: dict[str, str]
    command: str
    rates: dict[str, float]
    results: list[Result]
    regime: str = ""

    @property
    def stem(self) -> str:
        """The name of its files. Those of a regime are beside the others."""
        return f"{self.op}-{self.regime}" if self.regime else self.op


def format_seconds(seconds: float) -> str:
    """Three significant digits with a unit: `29.1 ms`."""
    unit, scale = ("s", 1.0) if seconds >= 1.0 else ("ms", 1e3) if seconds >= 1e-3 else ("µs", 1e6)
    value = seconds * scale
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f} {unit}"


def format_rates(rates: Mapping[str, float]) -> str:
    """`copy 2.98 TB/s, bfloat16 product 745 TFLOP/s`."""
    parts = []
    for name, rate in rates.items():
        what, unit = (name, "B/s") if name == "copy" else (f"{name} product", "FLOP/s")
        scale, prefix = (1e12, "T") if rate >= 1e12 else (1e9, "G")
        value = rate / scale
        parts.append(f"{what} {value:.{2 if value < 10 else 1 if value < 100 else 0}f} {prefix}{unit}")
    return ", ".join(parts)


def to_text(result: Result) -> str:
    """A few lines for the terminal."""
    lines = [f"  {result.case.name}"]
    for name, time in result.timings.items():
        share = result.share(name)
        roofline = "" if share is None else f"   {share:6.1%}"
        lines.append(f"    {name:<14} {format_seconds(time.seconds):>10}   {time.ratio:6.3f}x{roofline}")
    lines += [f"    {name:<14} {error}" for name, error in result.errors.items()]
    lines += [f"    MISSED {ratio:.2f}x of {name}, target {target:.2f}x" for _, name, ratio, target in result.misses()]
    return "\n".join(lines)


def to_document(report: Report) -> dict[str, Any]:
    """Everything measured for one operator."""
    cases = [
        {
            "name": result.case.name,
            "shape": result.case.shape,
            "dtype": result.case.dtype_name,
            "task": result.case.task,
            "bytes": result.bytes,
            "flops": result.cost.flops,
            "floor_seconds": result.floor,
            "method": result.method,
            "targets": dict(result.case.targets),
            "timings": {name: asdict(time) for name, time in result.timings.items()},
            "relative_errors": result.accuracy,
            "errors": result.errors,
        }
        for result in report.results
    ]
    return {
        "op": report.op,
        **({"regime": report.regime} if report.regime else {}),
        **report.description,
        "command": report.command,
        "rates": report.rates,
        "cases": cases,
    }


def from_document(document: Mapping[str, Any]) -> Report:
    """Reads what :func:`to_document` made. What it lacks for plots comes from the case of the same name."""
    document = dict(document)
    op, command, rates, cases = (document.pop(key) for key in ("op", "command", "rates", "cases"))
    regime = document.pop("regime", "")
    known = {case.name: case for device in ("cpu", "cuda") for case in OPERATORS[op].cases(device)}
    results = [
        Result(
            case_of(op, entry, known),
            Cost(entry["bytes"] // case_of(op, entry, known).dtype.itemsize, entry["flops"]),
            entry["floor_seconds"],
            {name: Timing(**time) for name, time in entry["timings"].items()},
            entry["errors"],
            entry["method"],
            entry["relative_errors"],
        )
        for entry in cases
    ]
    return Report(op, document, command, rates, results, regime)


def case_of(op: str, entry: Mapping[str, Any], known: Mapping[str, Case]) -> Case:
    """The case of a JSON entry, with its time targets."""
    dtype, _, tf32 = entry["dtype"].partition(" ")
    case = Case(op, tuple(entry["shape"]), getattr(torch, dtype), entry["task"], entry["targets"], tf32=bool(tf32))
    return replace(case, sweep=known[case.name].sweep) if case.name in known else case


def facts(description: Mapping[str, str], command: str) -> str:
    """A line with machine, versions and command."""
    items = "; ".join(value if name == "machine" else f"{name} {value}" for name, value in description.items())
    return f"{items}. Command: `{command}`."


def to_markdown(report: Report) -> str:
    """Tables of times and targets, and a note for each contender that failed."""
    dims = ", ".join(OPERATORS[report.op].dims)
    methods = dict.fromkeys(result.method for result in report.results if result.method)
    lines = [
        f"# {report.op}" + (f", {report.regime}" if report.regime else ""),
        "",
        facts(report.description, report.command),
        "",
        f"Median time of a call for ({dims}). {_IN_TURN if report.regime == 'hot' else _INTERLEAVED}",
        "",
        *(f"- {METHODS[method]}" for method in methods),
        _CACHES[report.regime],
        "",
        f"Roofline: the least time that {format_rates(report.rates)}",
        "(measured in this run) allow, over the time of the first contender. A target is the least ratio that we aim",
        f"for. It counts as missed beyond {NOISE:.0%}, the noise of the measurement.",
        "",
    ]
    header: list[str] = []
    for result in report.results:
        columns = list(result.timings)
        if columns != header:
            lines += [""] if header else []
            header = columns
            lines += tables.table(["case", *columns, "roofline", "targets", "measured"], [])
        how = f"{result.method}, {'cold' if result.cold else 'warm'}" if result.method else ""
        lines.append(tables.row([result.case.name, *_times(result), *_judgement(result), how]))
    failed = [(result, name, error) for result in report.results for name, error in result.errors.items()]
    if failed:
        lines += ["", "No time for:", ""]
        lines += [f"- {result.case.name}, {name}: {error}" for result, name, error in failed]
    return "\n".join([*lines, ""])


def _times(result: Result) -> list[str]:
    return [
        format_seconds(time.seconds) + ("" if name == result.first else f" ({time.ratio:.2f}x)")
        for name, time in result.timings.items()
    ]


def _judgement(result: Result) -> list[str]:
    share = result.share(result.first) if result.first else None
    targets = [
        ("**MISSED** " if result.missed(name) else "") + f"{name} {target:.2f}"
        for name, target in result.case.targets.items()
        if name in result.timings
    ]
    return ["" if share is None else f"{share:.0%}", ", ".join(targets)]


def write(folder: Path, report: Report) -> None:
    """Writes `<op>.json` and `<op>.md`, or `<op>-<regime>.json` and so on, into `folder`."""
    record.write(folder / f"{report.stem}.json", to_document(report))
    (folder / f"{report.stem}.md").write_text(to_markdown(report))


def missed_table(misses: list[tuple[str, str, float, float]]) -> list[str]:
    """A Markdown table of missed targets: operator and case, contender, ratio and target."""
    rows = ([case, name, f"{ratio:.2f}x", f"{target:.2f}x"] for case, name, ratio, target in misses)
    return tables.table(["missed target", "contender", "is", "target"], rows)


def memory_markdown(description: Mapping[str, str], command: str, rows: list[dict[str, Any]]) -> str:
    """A table of peaks, in MiB. A cell is empty if a contender doesn't exist."""
    names = list(dict.fromkeys(name for row in rows for name in row["peak_bytes"]))
    lines = [
        "# Peak memory",
        "",
        facts(description, command),
        "",
        "Peak memory of a call on top of what was allocated before it, in MiB.",
        "",
    ]
    shown = []
    for row in rows:
        peaks = [f"{row['peak_bytes'][name] / 2**20:.1f}" if name in row["peak_bytes"] else "" for name in names]
        shown.append([f"{row['op']} {row['name']}", f"{row['tensor_bytes'] / 2**20:.0f}", *peaks])
    lines += tables.table(["case", "tensor", *names], shown)
    lines += [
        f"\nWithout a value: {row['op']} {row['name']}, {name}: {error}"
        for row in rows
        for name, error in row["errors"].items()
    ]
    return "\n".join([*lines, ""])

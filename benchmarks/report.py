"""Results as JSON, for programs, and as Markdown, for people."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

from .harness import OURS, Case, Timing

T = TypeVar("T")


@dataclass(frozen=True)
class Result:
    """What was measured for one case, by contender."""

    case: Case
    timings: dict[str, Timing]
    peak_bytes: dict[str, int] = field(default_factory=dict)

    def misses(self) -> list[str]:
        """The targets that were missed, one sentence each."""
        return [
            f"{self.case.name}: {self.timings[name].ratio:.2f}x of {name}, target {target:.2f}x"
            for name, target in self.case.targets.items()
            if name in self.timings and self.timings[name].ratio < target
        ]


def format_seconds(seconds: float) -> str:
    """Three significant digits with a unit: `29.1 ms`."""
    unit, scale = ("s", 1.0) if seconds >= 1.0 else ("ms", 1e3) if seconds >= 1e-3 else ("µs", 1e6)
    value = seconds * scale
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f} {unit}"


def to_json(op: str, description: dict[str, str], command: str, results: list[Result]) -> str:
    """Everything measured for one operator."""
    cases = [
        {
            "name": result.case.name,
            "targets": dict(result.case.targets),
            "timings": {name: asdict(timing) for name, timing in result.timings.items()},
            "peak_bytes": result.peak_bytes,
        }
        for result in results
    ]
    return json.dumps({"op": op, **description, "command": command, "cases": cases}, indent=2, ensure_ascii=False)


def to_markdown(op: str, description: dict[str, str], command: str, results: list[Result]) -> str:
    """One table of times and, where it was measured, one of peak memory."""
    facts = "; ".join(f"{name} {value}" if name != "machine" else value for name, value in description.items())
    lines = [
        f"# {op}",
        "",
        f"{facts}. Command: `{command}`.",
        "",
        "Median time of a call; in brackets that time over the time of torchops (above 1: torchops is faster), as the",
        "median of the ratios within the rounds.",
        "",
    ]
    lines += _tables(results, lambda result: result.timings, _time_cell)
    with_memory = [result for result in results if result.peak_bytes]
    if with_memory:
        lines += ["Peak resident memory of a call on top of what was resident before it:", ""]
        lines += _tables(with_memory, lambda result: result.peak_bytes, _memory_cell)
    return "\n".join(lines)


def _time_cell(name: str, timing: Timing) -> str:
    ratio = "" if name == OURS else f" ({timing.ratio:.2f}x)"
    return format_seconds(timing.seconds) + ratio


def _memory_cell(name: str, peak: int) -> str:
    return f"{peak / 2**20:.1f} MiB"


def _tables(
    results: list[Result], values: Callable[[Result], Mapping[str, T]], cell: Callable[[str, T], str]
) -> list[str]:
    # Contenders may differ from case to case; a table ends where they change.
    lines: list[str] = []
    header: list[str] = []
    for result in results:
        row = values(result)
        if list(row) != header:
            lines += [""] if header else []
            header = list(row)
            lines += [f"| case | {' | '.join(header)} |", "|---" * (len(header) + 1) + "|"]
        lines.append(f"| {result.case.name} | {' | '.join(cell(name, value) for name, value in row.items())} |")
    return [*lines, ""]


def write(folder: Path, op: str, description: dict[str, str], command: str, results: list[Result]) -> None:
    """Writes `<op>.json` and `<op>.md` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{op}.json").write_text(to_json(op, description, command, results) + "\n")
    (folder / f"{op}.md").write_text(to_markdown(op, description, command, results))

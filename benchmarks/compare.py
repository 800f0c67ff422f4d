"""`python -m benchmarks compare`: results against a baseline, with an exit status for regressions."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import machine, report, timing
from . import options as shared
from .operators import OPERATORS
from .options import device_of
from .progress import Progress
from .record import read
from .report import Report
from .roofline import Roofline
from .run import measure_case, refusal
from .tables import table as markdown

Document = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """One contender of one case: its baseline, its new value, and new over old."""

    case: str
    contender: str
    old: float
    new: float

    @property
    def ratio(self) -> float:
        return self.new / self.old


def load(path: Path) -> list[Document]:
    """The results in a file, or in all files of a folder."""
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    documents = [read(file) for file in files]
    return [document for document in documents if "op" in document]


def rows_of(
    old: Sequence[Document], new: Sequence[Document], contenders: Sequence[str], against: str
) -> tuple[list[Row], list[str]]:
    """Rows for cases in both, and the names of the cases that only the baseline has.

    With `against`, times are multiples of that contender's time in the same run, which makes machines of different
    speed comparable.
    """
    found = {(_title(document), case["name"]): case for document in new for case in document["cases"]}
    rows, missing = [], []
    for document in old:
        for case in document["cases"]:
            name = f"{_title(document)} {case['name']}"
            other = found.get((_title(document), case["name"]))
            names = [c for c in case["timings"] if c in contenders and other and c in other["timings"]]
            if other is None or not names:
                missing.append(name)
                continue
            for contender in names:
                pair = [_value(timings, contender, against) for timings in (case["timings"], other["timings"])]
                if pair[0] is not None and pair[1] is not None:
                    rows.append(Row(name, contender, pair[0], pair[1]))
    return rows, missing


def _title(document: Document) -> str:
    """The operator, and the regime if it is not the usual one."""
    return ", ".join(filter(None, (document["op"], document.get("regime"))))


def _value(timings: Mapping[str, Any], contender: str, against: str) -> float | None:
    seconds: float = timings[contender]["seconds"]
    if not against:
        return seconds
    return seconds / timings[against]["seconds"] if against in timings else None


def table(rows: list[Row], tolerance: float, against: str) -> list[str]:
    """A Markdown table, slowest change first."""
    unit = f"times {against}" if against else "time"
    found = []
    for row in sorted(rows, key=lambda row: -row.ratio):
        values = [f"{v:.3f}" if against else report.format_seconds(v) for v in (row.old, row.new)]
        verdict = "**slower**" if row.ratio > 1 + tolerance else "faster" if row.ratio < 1 - tolerance else ""
        found.append([row.case, row.contender, *values, f"{row.ratio:.3f}", verdict])
    return markdown(["case", "contender", f"baseline ({unit})", "new", "new / baseline", ""], found)


def _measure(old: list[Document], options: argparse.Namespace, contenders: list[str]) -> list[Document]:
    """Measures the cases of the baseline."""
    device = device_of(options)
    effort, roofline, busy = timing.effort(device.type, options.quick), Roofline(device), machine.OtherLoad()
    progress = Progress(sum(len(document["cases"]) for document in old))
    new: list[Document] = []
    for document in old:
        operator, regime = OPERATORS[document["op"]], document.get("regime", "")
        known = {case.name: case for case in operator.cases(device.type)}
        results = []
        for entry in document["cases"]:
            case = known.get(entry["name"]) or report.case_of(document["op"], entry, known)
            modes = [c for c in entry["timings"] if c in contenders and c not in operator.references]
            references = any(c in operator.references for c in contenders)
            results.append(measure_case(case, modes, device, effort, roofline, busy, progress, references, regime))
        new.append(report.to_document(Report(operator.name, {}, "", {}, results, regime)))
    return new


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    shared.add(parser, "op", "device", "mode", "case", "quick")
    parser.add_argument("baseline", type=Path, help="JSON file of a run, or a folder of them")
    parser.add_argument("new", help="JSON file, folder, or `run` to measure the cases of the baseline now")
    parser.add_argument("--tolerance", type=float, default=0.1, help="how much slower is still equal (default: 0.1)")
    parser.add_argument("--against", default="", metavar="CONTENDER", help="compare multiples of this one's time")


def run(options: argparse.Namespace) -> int:
    """Prints the table. The status is 1 if something is slower than the tolerance allows, or was not measured."""
    paths = [options.baseline, *([] if options.new == "run" else [Path(options.new)])]
    if absent := [str(path) for path in paths if not path.exists()]:
        return shared.refused("compare", f"there is no {' and no '.join(absent)}")
    old = load(options.baseline)
    if options.case or options.op:
        old = [
            {**document, "cases": [case for case in document["cases"] if options.case in case["name"]]}
            for document in old
            if not options.op or document["op"] in options.op
        ]
    contenders = options.mode or ["cuda", "cpp"]
    if options.new == "run":
        if reason := refusal(options, device_of(options)):
            return shared.refused("compare", reason)
        new = _measure(old, options, [*contenders, *([options.against] if options.against else [])])
        machines = {machine.describe(device_of(options))["machine"]} | {document["machine"] for document in old}
    else:
        new = load(Path(options.new))
        machines = {document["machine"] for document in [*old, *new]}
    if len(machines) > 1 and not options.against:
        print(f"WARNING: different machines ({'; '.join(sorted(machines))}); --against eager compares better")
    rows, missing = rows_of(old, new, contenders, options.against)
    print("\n".join(table(rows, options.tolerance, options.against)))
    slower = [row for row in rows if row.ratio > 1 + options.tolerance]
    print(
        f"{len(rows)} compared, {len(slower)} slower by more than {options.tolerance:.0%}, {len(missing)} not measured"
    )
    for name in missing:
        print(f"NOT MEASURED  {name}")
    return 1 if slower or missing or not rows else 0

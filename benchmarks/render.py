"""`python -m benchmarks render`: every table and picture anew, from the JSON of the results; nothing is measured.

Pages show results between `<!-- benchmarks NAME -->` and `<!-- end -->`; `TABLES` has the names.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from . import eight_bits, gates, ladder, layer_tables, pair_plots, plots, record, report, stages, triangle_attention
from . import options as shared
from .case import BACKWARD, FORWARD, OVERHEAD, OVERHEAD_GRAD
from .gate_lines import UNALIGNED_SIZES
from .layer_tables import REVISION, read
from .machine import revisions
from .operators import OPERATORS
from .report import Report, Result
from .run import RESULTS as RESULTS
from .tables import row, table
from .whole import report as whole

PYTHON_REVISION = "revision of torchops"

ROOT = Path(__file__).parents[1]
H100, EPYC = "nvidia-h100-80gb-hbm3", "2-core-amd-epyc-avx-512"
PAGES = (
    *(RESULTS / machine / "README.md" for machine in (H100, EPYC)),
    *(
        ROOT / "docs" / f"{page}.md"
        for page in (
            "benchmarks",
            "compiler",
            "eight_bits",
            "gate_tables",
            "ladder",
            "pair_layer",
            "ptx",
            "ring_allreduce",
            "triangle_attention",
            "triangle_update",
            "triangle_update_stages",
        )
    ),
)
BLOCK = re.compile(r"(?<=<!-- benchmarks )(?P<name>[\w-]+)( -->\n)(?P<table>.*?)(?=<!-- end -->)", re.DOTALL)

OURS = ("cuda", "cpp")
# Bounds: they compute less than the operator, so they don't replace it.
BOUNDS = frozenset(name for operator in OPERATORS.values() for name in operator.bounds)
# In the order of the columns.
NAMES = {
    "eager": "eager",
    "eager-in-place": "eager, in place",
    "out-of-place": "eager, new tensor",
    "preallocated": "eager, `out=`",
    "packed": "eager, packed weights",
    "compile": "`torch.compile`",
    "compile-max": "its max-autotune",
    "compile-ours": "torchops, compiled",
    "triton": "Triton",
    "quack": "quack",
    "liger": "Liger",
    "py": "`autograd.Function`",
    "linear": "`F.linear` alone",
    "packed product": "one matmul with both weights",
}
# How calls are made, by regime; "" is the usual one.
CALLS = {"": "queued", "single": "single", "hot": "hot"}


def documents(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The results of one machine that are rendered here: of `run`, of `memory`, and of `gates`."""
    for path in sorted(folder.glob("*.json")):
        document = record.read(path)
        if "op" in document or path.stem == "memory" or path.stem.startswith("gates"):
            yield path, document


def markdown(document: dict[str, Any]) -> str:
    """The page for a file of results."""
    if "op" in document:
        return report.to_markdown(report.from_document(document))
    if "contenders" in document:
        return gates.page(document)
    description, rows = dict(document), document["cases"]
    command = description.pop("command")
    del description["cases"]
    return report.memory_markdown(description, command, rows)


@cache
def reports(machine: str, regime: str = "") -> dict[str, Report]:
    """The reports of one machine in one regime by operator."""
    items = (report.from_document(document) for _, document in documents(RESULTS / machine) if "op" in document)
    return {item.op: item for item in items if item.regime == regime}


def source(items: Iterable[Report]) -> str:
    """The machine, versions and revisions behind a table."""
    used = [item.description for item in items]
    (name,) = {description["machine"] for description in used}
    torch = ", ".join(sorted({description["torch"] for description in used}))
    keys = (REVISION, PYTHON_REVISION)
    found = {key: sorted({each for d in used if key in d for each in d[key].split(", ")}) for key in keys}
    return f"{name}, torch {torch}, {revisions({key: ', '.join(of) for key, of in found.items()})}."


def chosen(machine: str, what: str, columns: Sequence[str], rows: Sequence[tuple[str, str]]) -> str:
    """A row for each of some cases: `(operator, name of the case)`."""
    cases = {(op, result.case.name): result for op, item in reports(machine).items() for result in item.results}
    head = [what, "torchops", *(NAMES[name] for name in columns)]
    lines = table(head, [])
    for op, case in rows:
        result = cases[op, case]
        label = case.removeprefix("forward ") if case.startswith("forward (") else case
        cells = [_cell(result, name) for name in columns]
        lines.append(
            row([f"`{op}` {label}{_warm(result)}", report.format_seconds(result.timings[result.first].seconds), *cells])
        )
    used = [reports(machine)[op] for op in dict.fromkeys(op for op, _ in rows)]
    return "\n".join([*lines, "", source(used), ""])


def summary(machine: str, rows: Sequence[tuple[str, str]], layers: bool = False) -> str:
    """How many times faster than PyTorch some cases are: of `run`, and with `layers` of AlphaFold's."""
    reported = reports(machine)
    cases = {(op, result.case.name): result for op, item in reported.items() for result in item.results}
    lines = table(["operator and shape", "torchops", "than eager PyTorch", "than `torch.compile`"], [])
    for op, case in rows:
        result = cases[op, case]
        label = case.removeprefix("forward ") if case.startswith("forward (") else case
        over_ours = (result.timings[name].ratio if name in result.timings else None for name in ("eager", "compile"))
        seconds = report.format_seconds(result.timings[result.first].seconds)
        lines.append(row([f"`{op}` {label}{_warm(result)}", seconds, *map(_faster, over_ours)]))
    sources = [source(reported[op] for op in dict.fromkeys(op for op, _ in rows))]
    for what, name, compiled, eager, keep in _LAYERS if layers else ():
        document = read(machine, name)
        for result in filter(keep, document["results"]):
            times = result["microseconds"]
            over_ours = (times[way] / times["torchops"] for way in (eager, compiled))
            seconds = report.format_seconds(times["torchops"] / 1e6)
            lines.append(row([what.format(**result), seconds, *map(_faster, over_ours)]))
        sources.append(layer_tables.where(document))
    return "\n".join([*lines, "", *dict.fromkeys(sources), ""])


def _faster(ratio: float | None) -> str:
    """What a contender's time over that of torchops says of torchops."""
    if ratio is None:
        return "not measured"
    if abs(ratio - 1) <= report.NOISE:
        return "as fast"
    return f"{ratio:.2f} × faster" if ratio > 1 else f"{1 / ratio:.2f} × slower"


def _warm(result: Result) -> str:
    """What a row adds to its name: nothing if inputs are cold, as is the rule, or where the host is measured."""
    return "" if result.cold or result.case.task in (OVERHEAD, OVERHEAD_GRAD) else ", warm"


def _cell(result: Result, name: str) -> str:
    if name not in result.timings:
        return ""
    return f"{report.format_seconds(result.timings[name].seconds)} ({result.timings[name].ratio:.2f}x)"


def ratios(machine: str) -> str:
    """By operator and task, the time of every other way over ours: median, least and most over the cases."""
    groups: dict[str, list[Result]] = {}
    for op, item in reports(machine).items():
        for result in item.results:
            if result.first in OURS:
                groups.setdefault(f"`{op}`, {result.case.task}{_warm(result)}", []).append(result)
    present = {name for results in groups.values() for result in results for name in result.timings}
    columns = [name for name in NAMES if name in present and name not in BOUNDS]
    head = ["operator", "cases", *(NAMES[name] for name in columns), "share of the roofline"]
    lines = table(head, [])
    for name_of_row, results in groups.items():
        cells = [
            _spread([r.timings[name].ratio for r in results if name in r.timings], "{:.2f}x", "{:.2f}")
            for name in columns
        ]
        shares = [share for r in results if (share := r.share(r.first)) is not None]
        lines.append(row([name_of_row, str(len(results)), *cells, _spread(shares, "{:.0%}", "{:.0%}")]))
    return "\n".join([*lines, "", source(reports(machine).values()), ""])


def _spread(values: list[float], one: str, several: str) -> str:
    if not values:
        return ""
    middle = one.format(statistics.median(values))
    least, most = several.format(min(values)), several.format(max(values))
    return middle if least == most else f"{middle} ({least} to {most})"


def behind(machine: str) -> str:
    """Every case in which other ways are faster than ours by more than the noise, the least time over ours first."""
    found, no_other = [], {*OURS, *BOUNDS, "compile-ours"}
    for op, item in reports(machine).items():
        for result in item.results:
            others = [(t.ratio, name) for name, t in result.timings.items() if name not in no_other]
            faster = sorted(other for other in others if other[0] < 1 - report.NOISE)
            if result.first in OURS and faster:
                found.append((faster, f"`{op}` {result.case.name}{_warm(result)}"))
    lines = table(["case", "faster, with its time over that of torchops"], [])
    for faster, case in sorted(found, key=lambda each: each[0][0][0]):
        lines.append(row([case, "; ".join(f"{NAMES[name]} {ratio:.2f}" for ratio, name in faster)]))
    return "\n".join([*lines, ""])


def regimes(machine: str, op: str, what: str, columns: Sequence[str]) -> str:
    """The cases that were measured in another regime, in each."""
    items = {regime: item for regime in CALLS if (item := reports(machine, regime).get(op))}
    if not any(items):
        return "Not measured on this machine yet. `make results-gpu` measures it.\n"
    found = {(r.case.name, regime): r for regime, item in items.items() for r in item.results if r.timings}
    head = [what, "calls", "torchops", *(NAMES[name] for name in columns)]
    lines = table(head, [])
    for case in dict.fromkeys(case for case, regime in found if regime):
        for result, calls in ((found[case, regime], CALLS[regime]) for regime in items if (case, regime) in found):
            ours = report.format_seconds(result.timings[result.first].seconds)
            cells = [_cell(result, name) for name in columns]
            lines.append(row([f"`{op}` {case.removeprefix('forward ')}", f"{calls}{_warm(result)}", ours, *cells]))
    return "\n".join([*lines, "", source(items.values()), ""])


def unchecked(machine: str) -> str:
    """Which results have times of what no check has seen; nothing if there are none."""
    ops = [f"`{op}`" for op, item in reports(machine).items() if any(_unchecked(result) for result in item.results)]
    if not ops:
        return ""
    names = " and ".join(filter(None, (", ".join(ops[:-1]), ops[-1])))
    text = f"Results of {names} are older: there, neither gradients nor references such as `out=` were checked."
    return textwrap.fill(text, 128) + "\n"


def _unchecked(result: Result) -> set[str]:
    return {*result.timings} - {*result.accuracy} - BOUNDS if result.case.task in (FORWARD, BACKWARD) else set()


def gated(machine: str, name: str, contenders: Sequence[str], keep: Callable[[dict[str, Any]], bool]) -> str:
    """Results of `python -m benchmarks gates`."""
    return gates.to_markdown(read(machine, name), contenders, keep)


def staged(machine: str) -> str:
    """Results of `python -m benchmarks stages`."""
    return stages.to_markdown(read(machine, "stages"))


def scaled(machine: str) -> str:
    """Results of `python -m benchmarks eight_bits`."""
    return eight_bits.to_markdown(read(machine, "eight_bits"))


def attended(machine: str) -> str:
    """Results of `python -m benchmarks triangle_attention`."""
    return triangle_attention.to_markdown(read(machine, "triangle_attention"))


def all_reduces() -> str:
    """Results of `examples/train_ddp.py --bench` on every machine; the example makes their tables."""
    if (folder := str(ROOT / "examples")) not in sys.path:
        sys.path.append(folder)
    bench = importlib.import_module("allreduce_bench")
    machines = sorted(path.parent.name for path in RESULTS.glob("*/allreduce.json"))
    return "\n".join(bench.report(read(machine, "allreduce")) for machine in machines)


def models(machine: str) -> str:
    """Results of `examples/models/measure.py`, which writes its own Markdown."""
    _, body = (RESULTS / machine / "models.md").read_text().split("\n\n", 1)
    return body.rstrip("\n") + "\n"


def ptx(machine: str, which: int) -> str:
    """One of the tables of results of `examples/ptx/ptx_errors.py`."""
    if (folder := str(ROOT / "examples/ptx")) not in sys.path:
        sys.path.append(folder)
    document = read(machine, "ptx")
    tables: str = importlib.import_module("ptx_errors").table(document)
    source = f"\n{layer_tables.where(document)}\n" if REVISION in document else ""
    return tables.strip().split("\n\n")[which] + "\n" + source


def climbed(machine: str) -> str:
    """Results of `examples/ladder/climb.py`."""
    path = RESULTS / machine / "ladder.json"
    if not path.exists():
        return "Not measured on this machine yet. Run `make ladder` or `make ladder-gpu` with `LADDER_FLAGS=--save`.\n"
    return ladder.table(record.read(path))


_DENSE = [
    ("dense", "forward (1048576, 128, 128) bfloat16"),
    ("dense", "forward (262144, 128, 128) bfloat16"),
    ("dense", "forward (65536, 256, 1024) bfloat16"),
    ("dense", "forward (4096, 4096, 4096) bfloat16"),
    ("dense", "forward and backward (1048576, 128, 128) bfloat16"),
]
_GATES = [
    ("gate", "forward (1048576, 128, 128) bfloat16"),
    ("gate", "forward and backward (1048576, 128, 128) bfloat16"),
    ("glu", "forward (1048576, 128, 128) bfloat16"),
    ("glu", "forward and backward (1048576, 128, 128) bfloat16"),
    ("swiglu", "forward (4096, 1024, 4096) bfloat16"),
    ("swiglu", "forward (8192, 4096, 11008) bfloat16"),
    ("swiglu", "forward and backward (8192, 4096, 11008) bfloat16"),
]
_IN_PLACE = [
    ("square_matmul_", "forward (1048576, 128) bfloat16"),
    ("square_matmul_", "forward (131072, 1024) bfloat16"),
    ("softmax_", "forward (65536, 4096) bfloat16"),
    ("layer_norm_", "forward (65536, 4096) bfloat16"),
]
_TRANSITION = [
    (op, f"{task} ({rows}, 128, 512) bfloat16")
    for op, task in (("add_transition_", "forward"), ("transition", "forward and backward"))
    for rows in (384**2, 768**2, 1024**2)
]
_CPU = [
    ("dense", "forward (4096, 64, 4096) float32"),
    ("square_matmul_", "forward (65536, 256) float32"),
    ("layer_norm_", "forward (4096, 4096) float32"),
]
_SUMMARY = [
    ("dense", "forward (1048576, 128, 128) bfloat16"),
    ("dense", "forward (8192, 8192, 8192) bfloat16"),
    ("gate", "forward (1048576, 128, 128) bfloat16"),
    ("gate", "forward and backward (1048576, 128, 128) bfloat16"),
    ("glu", "forward (1048576, 128, 128) bfloat16"),
    ("glu", "forward and backward (1048576, 128, 128) bfloat16"),
    ("swiglu", "forward (8192, 4096, 11008) bfloat16"),
    ("swiglu", "forward and backward (8192, 4096, 11008) bfloat16"),
    ("transition", "forward and backward (1048576, 128, 512) bfloat16"),
    ("softmax", "forward and backward (65536, 4096) bfloat16"),
    ("layer_norm", "forward (65536, 4096) bfloat16"),
    ("layer_norm", "forward and backward (65536, 4096) bfloat16"),
    ("sigmoid", "forward (65536, 4096) bfloat16"),
    ("square_matmul_", "forward (131072, 1024) bfloat16"),
]
_SUMMARY_OF_CPU = [
    ("dense", "forward (4096, 64, 4096) float32"),
    ("gate", "forward (65536, 128, 128) float32"),
    ("gate", "forward and backward (65536, 128, 128) float32"),
    ("gate", "forward and backward (65536, 128, 128) bfloat16"),
    ("glu", "forward (65536, 128, 128) float32"),
    ("glu", "forward and backward (65536, 128, 128) float32"),
    ("glu", "forward and backward (65536, 128, 128) bfloat16"),
    ("transition", "forward and backward (16384, 128, 512) float32"),
    ("softmax", "forward (4096, 4096) float32"),
    ("layer_norm", "forward (4096, 4096) float32"),
    ("layer_norm_", "forward (4096, 4096) float32"),
    ("sigmoid", "forward (1024, 4096) float32"),
    ("square_matmul_", "forward (65536, 256) float32"),
]
# What a row is called, where it is from, and the names of the contenders there.
_LAYERS: list[tuple[str, str, str, str, Callable[[dict[str, Any]], bool]]] = [
    (
        "triangle update {task}, N = {n}, 128 features, bfloat16",
        "triangle",
        "channels first, torch.compile",
        "as written",
        lambda r: r["n"] == 1024 and r.get("section") in ("forward", "backward"),
    ),
    (
        "pair layer {task}, N = {n}, 128 features, {precision}",
        "pair_layer",
        "torch.compile",
        "eager",
        lambda r: r["n"] == 768 and r["precision"] == "bfloat16",
    ),
]
_CONTENDERS = (gates.OURS, gates.COMPILED, gates.PACKED, gates.TRITON)

TABLES: dict[str, Callable[[], str]] = {
    "all-reduces": all_reduces,
    "dense-h100": partial(chosen, H100, "(rows, in, out)", ("eager", "compile", "compile-max", "linear"), _DENSE),
    "gates-h100": partial(chosen, H100, "(rows, in, out)", ("eager", "compile", "packed product"), _GATES),
    "in-place-h100": partial(chosen, H100, "in place", ("eager", "out-of-place"), _IN_PLACE),
    "cpu": partial(chosen, EPYC, "on two cores", ("eager", "out-of-place", "compile"), _CPU),
    "summary-h100": partial(summary, H100, _SUMMARY, layers=True),
    "summary-cpu": partial(summary, EPYC, _SUMMARY_OF_CPU),
    "ratios-h100": partial(ratios, H100),
    "behind-h100": partial(behind, H100),
    "ratios-cpu": partial(ratios, EPYC),
    "behind-cpu": partial(behind, EPYC),
    "unchecked-h100": partial(unchecked, H100),
    "regimes-h100": partial(regimes, H100, "dense", "(rows, in, out)", ("eager", "compile", "linear")),
    "triangle-h100": partial(layer_tables.triangle, H100),
    "triangle-paths-h100": partial(layer_tables.triangle_paths, H100),
    "triangle-cpu": partial(layer_tables.triangle_cpu, EPYC),
    "pair-layer-h100": partial(layer_tables.pair_layer, H100),
    "transition-h100": partial(chosen, H100, "(rows, c, hidden)", ("eager", "compile"), _TRANSITION),
    "triangle-attention-h100": partial(attended, H100),
    "released-h100": partial(layer_tables.released, H100),
    "swapped-cpu": partial(layer_tables.swapped, EPYC),
    "gate-sizes-h100": partial(gated, H100, "gates", _CONTENDERS, lambda line: line["compiled"]),
    "gate-odd-h100": partial(
        gated, H100, "gates", (gates.OURS, gates.EAGER), lambda line: tuple(line["shape"]) in UNALIGNED_SIZES
    ),
    "trimul-h100": partial(layer_tables.trimul, H100),
    "stages-h100": partial(staged, H100),
    "gates-by-cublas-h100": partial(
        gated, H100, "gates-by-cublas", _CONTENDERS[:3], lambda line: line["shape"][0] in (65536, 1048576)
    ),
    "gates-portable-h100": partial(
        gated, H100, "gates-portable", _CONTENDERS[:3], lambda line: line["op"] not in ("dense", "square_matmul_")
    ),
    "gates-stream-h100": partial(
        gated, H100, "gates-stream", (gates.OURS, gates.CAST, gates.COMPILED), lambda line: line["compiled"]
    ),
    "dense-portable-h100": partial(
        gated, H100, "gates-portable", (gates.OURS, gates.LINEAR, gates.EAGER), lambda line: line["op"] == "dense"
    ),
    "eight-bits-h100": partial(scaled, H100),
    "models-h100": partial(models, H100),
    "ptx-instructions-h100": partial(ptx, H100, 0),
    "ptx-sigmoids-h100": partial(ptx, H100, 1),
    "ptx-times-h100": partial(ptx, H100, 2),
    "ladder-h100": partial(climbed, H100),
    "ladder-cpu": partial(climbed, EPYC),
}


def rendered(text: str) -> str:
    """The text of a page, with its tables as the results have them."""
    return BLOCK.sub(lambda block: block["name"] + block[2] + "\n" + TABLES[block["name"]]() + "\n", text)


def pictures() -> Iterator[str]:
    """Draw every picture of the results, and tell of each folder and operator what was drawn."""
    for folder in sorted(path for path in RESULTS.iterdir() if path.is_dir()):
        for path, document in documents(folder):
            if "op" in document and "regime" not in document:
                item = report.from_document(document)
                yield f"{folder.name}: {plots.draw(folder, [item], item.results[0].first)}"
            elif path.stem == "memory":
                ours = next(name for name in OURS if name in document["cases"][0]["peak_bytes"])
                yield f"{folder.name}: {plots.draw_memory(folder, document['cases'], document, ours)}"
        yield f"{folder.name}: {pair_plots.draw(folder)}"
        for path in sorted(folder.glob("whole-*.json")):
            prediction = json.loads(path.read_text())
            if len(prediction["variants"]) > 1:
                yield f"{folder.name}: {whole.draw(prediction, path.with_suffix('.png'))}"
    yield ladder.draw(RESULTS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    shared.add(parser, "no-plots")


def run(options: argparse.Namespace) -> int:
    """Writes the Markdown and the plots of all results, and the tables in the pages that show them."""
    reports.cache_clear()
    for folder in sorted(path for path in RESULTS.iterdir() if path.is_dir()):
        for path, document in documents(folder):
            path.with_suffix(".md").write_text(markdown(document))
    if not options.no_plots:
        for drawn in pictures():
            print(drawn)
    for page in PAGES:
        page.write_text(rendered(page.read_text()))
    return 0

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
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from . import eight_bits, gates, ladder, pair_plots, plots, report, stages, triangle_attention
from .machine import revisions
from .operators import OPERATORS
from .report import Report, Result
from .run import RESULTS as RESULTS

REVISION = "revision of src"  # of a document's machine, or of a result from another revision
PYTHON_REVISION = "revision of torchops"

ROOT = Path(__file__).parents[1]
PAGES = tuple(
    ROOT / "docs" / f"{page}.md"
    for page in (
        "benchmarks",
        "eight_bits",
        "existing_models",
        "gates",
        "ladder",
        "pair_layer",
        "ptx",
        "triangle_attention",
        "triangle_update",
        "triangle_update_stages",
    )
)
BLOCK = re.compile(r"(?<=<!-- benchmarks )(?P<name>[\w-]+)( -->\n)(?P<table>.*?)(?=<!-- end -->)", re.DOTALL)

H100, EPYC = "nvidia-h100-80gb-hbm3", "2-core-amd-epyc-avx-512"
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
    "packed product": "one product with both weights",
}


def documents(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The results of one machine that are rendered here: of `run`, of `memory`, and of `benchmarks.gates`."""
    for path in sorted(folder.glob("*.json")):
        document = json.loads(path.read_text())
        if "op" in document or path.stem == "memory" or path.stem.startswith("gates"):
            yield path, document


def markdown(path: Path, document: dict[str, Any]) -> str:
    """The page for a file of results."""
    if "op" in document:
        return report.to_markdown(report.from_json(path.read_text()))
    if "contenders" in document:
        return gates.page(document)
    description, rows = dict(document), document["cases"]
    command = description.pop("command")
    del description["cases"]
    return report.memory_markdown(description, command, rows)


@cache
def reports(machine: str) -> dict[str, Report]:
    """The reports of one machine by operator."""
    found = (path for path, document in documents(RESULTS / machine) if "op" in document)
    return {path.stem: report.from_json(path.read_text()) for path in found}


def source(machine: str, ops: Sequence[str]) -> str:
    """The machine, versions and revisions behind a table."""
    used = [reports(machine)[op].description for op in ops]
    (name,) = {description["machine"] for description in used}
    torch = ", ".join(sorted({description["torch"] for description in used}))
    found = {key: sorted({d[key] for d in used if key in d}) for key in (REVISION, PYTHON_REVISION)}
    return f"{name}, torch {torch}, {revisions({key: ', '.join(of) for key, of in found.items()})}."


def chosen(machine: str, what: str, columns: Sequence[str], rows: Sequence[tuple[str, str]]) -> str:
    """A row for each of some cases: `(operator, name of the case)`."""
    cases = {(op, result.case.name): result for op, item in reports(machine).items() for result in item.results}
    head = [what, "torchops", *(NAMES[name] for name in columns)]
    lines = [_row(head), "|---" * len(head) + "|"]
    for op, case in rows:
        result = cases[op, case]
        label = case.removeprefix("forward ") if case.startswith("forward (") else case
        cells = [_cell(result, name) for name in columns]
        lines.append(_row([f"`{op}` {label}", report.format_seconds(result.timings[result.first].seconds), *cells]))
    used = dict.fromkeys(op for op, _ in rows)
    return "\n".join([*lines, "", source(machine, list(used)), ""])


def _cell(result: Result, name: str) -> str:
    if name not in result.timings:
        return ""
    return f"{report.format_seconds(result.timings[name].seconds)} ({result.timings[name].ratio:.2f}x)"


def ratios(machine: str) -> str:
    """By operator and task, the time of every other way over ours: median, least and most over the cases."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for op, item in reports(machine).items():
        for result in item.results:
            if result.first in OURS:
                groups.setdefault((op, result.case.task), []).append(result)
    present = {name for results in groups.values() for result in results for name in result.timings}
    columns = [name for name in NAMES if name in present and name not in BOUNDS]
    head = ["operator", "cases", *(NAMES[name] for name in columns), "share of the roofline"]
    lines = [_row(head), "|---" * len(head) + "|"]
    for (op, task), results in groups.items():
        cells = [
            _spread([r.timings[name].ratio for r in results if name in r.timings], "{:.2f}x", "{:.2f}")
            for name in columns
        ]
        shares = [share for r in results if (share := r.share(r.first)) is not None]
        lines.append(_row([f"`{op}`, {task}", str(len(results)), *cells, _spread(shares, "{:.0%}", "{:.0%}")]))
    return "\n".join([*lines, "", source(machine, list(reports(machine))), ""])


def _spread(values: list[float], one: str, several: str) -> str:
    if not values:
        return ""
    middle = one.format(statistics.median(values))
    least, most = several.format(min(values)), several.format(max(values))
    return middle if least == most else f"{middle} ({least} to {most})"


def behind(machine: str) -> str:
    """Every case in which another way is faster than ours by more than the noise."""
    lines = ["| case | faster | its time over ours |", "|---|---|---|"]
    for op, item in reports(machine).items():
        for result in item.results:
            for name, time in result.timings.items():
                if result.first in OURS and name not in (*OURS, *BOUNDS) and time.ratio < 1 - report.NOISE:
                    lines.append(_row([f"`{op}` {result.case.name}", NAMES[name], f"{time.ratio:.2f}"]))
    return "\n".join([*lines, ""])


def _where(about: dict[str, Any], results: Sequence[dict[str, Any]] = (), name: Callable[[Any], str] = str) -> str:
    """The machine and revision, and those of results of earlier revisions."""
    earlier = "; ".join(f"{name(result)}: {result[REVISION]}" for result in results if REVISION in result)
    others = f" From earlier revisions: {earlier}." if earlier else ""
    return f"{about['machine']}, torch {about['torch']}, {revisions(about)}.{others}"


def _triangle_row(result: dict[str, Any], call: str) -> str:
    times, memory = result["microseconds"], result["pair tensors"]
    names = ("torchops", "channels first, torch.compile", "as written")
    cells = {n: f"{report.format_seconds(times[n] / 1e6)} ({memory[n]:.1f})" for n in names if times.get(n) is not None}
    return _row([str(result["n"]), call, *(cells.get(name, "") for name in names)])


_TRIANGLE_HEAD = [
    "| N | call | torchops | channels first, `torch.compile` | as papers write it, eager |",
    "|---|---|---|---|---|",
]


def triangle(machine: str) -> str:
    """Results of `python -m benchmarks.triangle`: times, and memory in pair tensors."""
    document = json.loads((RESULTS / machine / "triangle.json").read_text())
    results = [r for r in document["results"] if r.get("section", "forward") in ("forward", "backward")]
    results.sort(key=lambda r: (r["n"], r["task"] == "forward and backward"))
    lines = [*_TRIANGLE_HEAD, *(_triangle_row(result, result["task"]) for result in results)]
    where = _where(document["machine"], results, lambda r: f"{r['n']} {r['task']}")
    return "\n".join([*lines, "", where, ""])


def triangle_paths(machine: str) -> str:
    """Its results by the kernels that other GPUs have, and in other dtypes."""
    document = json.loads((RESULTS / machine / "triangle-paths.json").read_text())
    lines = [*_TRIANGLE_HEAD]
    for result in document["results"]:
        if result["path"] != "cublas":
            dtype = "TF32" if result["tf32"] else result["dtype"]
            where = ", other GPUs" if result["path"] == "portable" else ""
            lines.append(_triangle_row(result, f"{dtype}{where}, {result['task']}"))
    return "\n".join([*lines, "", _where(document["machine"]), ""])


def pair_layer(machine: str) -> str:
    """Results of `python -m benchmarks.pair_layer`: times, and memory in pair tensors."""
    document = json.loads((RESULTS / machine / "pair_layer.json").read_text())
    titles = {
        "torchops": "torchops",
        "torchops, checkpointed": "checkpointed",
        "assembled by an expert": "assembled by an expert",
        "torch.compile": "`torch.compile`",
        "eager": "eager",
    }
    titles = {k: v for k, v in titles.items() if any(k in result["microseconds"] for result in document["results"])}
    lines = [f"| N | call | {' | '.join(titles.values())} |", "|---|---|" + "---|" * len(titles)]
    for result in document["results"]:
        times, memory = result["microseconds"], result["pair tensors"]
        cells = {name: f"{report.format_seconds(times[name] / 1e6)} ({memory[name]:.1f})" for name in times}
        call = f"{result['task']}, {result['precision']}"
        lines.append(_row([str(result["n"]), call, *(cells.get(name, "") for name in titles)]))
    where = _where(document["machine"], document["results"], lambda r: f"{r['n']} {r['task']} {r['precision']}")
    return "\n".join([*lines, "", where, ""])


def released(machine: str) -> str:
    """Results of `python -m benchmarks.boltz` for a stack of layers before and after `torchops.nn.replace`."""
    document = json.loads((RESULTS / machine / "boltz.json").read_text())
    lines = ["| N | call | as released | after `replace` | deviation before, after |", "|---|---|---|---|---|"]
    for result in document["results"]:
        before, after = result["before"], result["after"]
        cells = [f"{report.format_seconds(way['ms'] / 1e3)}, {way['MiB']:.0f} MiB" for way in (before, after)]
        deviations = ", ".join(f"{way['deviation']['result']['norm']:.1e}" for way in (before, after))
        lines.append(_row([str(result["n"]), f"{result['task']}, {result['precision']}", *cells, deviations]))
    return "\n".join([*lines, "", _where(document["machine"]), ""])


def swapped(machine: str) -> str:
    """Results of `python -m benchmarks.boltz` for single modules before and after `torchops.nn.replace`."""
    document = json.loads((RESULTS / machine / "boltz.json").read_text())
    lines = [
        "| package | module | largest element | difference in float32 | in bf16-mixed | distance before, after |",
        "|---|---|---|---|---|---|",
    ]
    for row in document["modules"]:
        mixed = row["bf16-mixed"]
        lines.append(
            _row(
                [
                    f"{row['package']} {row['version']}",
                    row["module"],
                    f"{row['greatest element']:.2f}",
                    f"{row['float32']['greatest difference']:.1e}",
                    f"{mixed['greatest difference']:.3f}",
                    ", ".join(f"{mixed[f'deviation {when}']['norm']:.1e}" for when in ("before", "after")),
                ]
            )
        )
    return "\n".join([*lines, "", _where(document["machine"]), ""])


def gated(machine: str, file: str, contenders: Sequence[str], keep: Callable[[dict[str, Any]], bool]) -> str:
    """Results of `python -m benchmarks.gates`."""
    document = json.loads((RESULTS / machine / file).read_text())
    return gates.to_markdown(document, contenders, keep)


def trimul(machine: str) -> str:
    """Results of `python -m benchmarks.trimul`."""
    document = json.loads((RESULTS / machine / "trimul.json").read_text())
    lines = [_row(("N", "batch", "c", "mask", "inputs", "time", "largest error, of the tolerance")), "|---" * 7 + "|"]
    for r in document["results"]:
        kinds = "random" if r["masked"] else "ones", "Cauchy" if r["cauchy"] else "normal"
        cells = [*(str(r[key]) for key in ("n", "batch", "dim")), *kinds]
        lines.append(_row([*cells, report.format_seconds(r["microseconds"] / 1e6), f"{r['of the tolerance']:.2f}"]))
    mean, tests = report.format_seconds(document["geometric mean"] / 1e6), document["tests"]
    score = f"Geometric mean {mean}; in the task's {len(tests)} tests of values, the error is at most {max(tests):.2f}."
    return "\n".join([*lines, "", f"{score} {_where(document['machine'])}", ""])


def staged(machine: str) -> str:
    """Results of `python -m benchmarks.stages`."""
    return stages.to_markdown(json.loads((RESULTS / machine / "stages.json").read_text()))


def scaled(machine: str) -> str:
    """Results of `python -m benchmarks.eight_bits`."""
    return eight_bits.to_markdown(json.loads((RESULTS / machine / "eight_bits.json").read_text()))


def attended(machine: str) -> str:
    """Results of `python -m benchmarks.triangle_attention`."""
    return triangle_attention.to_markdown(json.loads((RESULTS / machine / "triangle_attention.json").read_text()))


def models(machine: str) -> str:
    """Results of `examples/models/measure.py`, which writes its own Markdown."""
    _, body = (RESULTS / machine / "models.md").read_text().split("\n\n", 1)
    return body.rstrip("\n") + "\n"


def ptx(machine: str, which: int) -> str:
    """One of the tables of results of `examples/ptx/ptx_errors.py`."""
    if (folder := str(ROOT / "examples/ptx")) not in sys.path:
        sys.path.append(folder)
    tables: str = importlib.import_module("ptx_errors").table(json.loads((RESULTS / machine / "ptx.json").read_text()))
    return tables.strip().split("\n\n")[which] + "\n"


def climbed(machine: str) -> str:
    """Results of `examples/ladder/climb.py`."""
    path = RESULTS / machine / "ladder.json"
    if not path.exists():
        return "Not measured on this machine yet. Run `make ladder` or `make ladder-gpu` with `LADDER_FLAGS=--save`.\n"
    return ladder.table(json.loads(path.read_text()))


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


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
    for op, task in (("transition_", "forward"), ("transition", "forward and backward"))
    for rows in (384**2, 768**2, 1024**2)
]
_CPU = [
    ("dense", "forward (4096, 64, 4096) float32"),
    ("square_matmul_", "forward (65536, 256) float32"),
    ("layer_norm_", "forward (4096, 4096) float32"),
]
_CONTENDERS = (gates.OURS, gates.COMPILED, gates.PACKED, gates.TRITON)
TABLES: dict[str, Callable[[], str]] = {
    "dense-h100": partial(chosen, H100, "(rows, in, out)", ("eager", "compile", "compile-max", "linear"), _DENSE),
    "gates-h100": partial(chosen, H100, "(rows, in, out)", ("eager", "compile", "packed product"), _GATES),
    "in-place-h100": partial(chosen, H100, "in place", ("eager", "out-of-place"), _IN_PLACE),
    "cpu": partial(chosen, EPYC, "on two cores", ("eager", "out-of-place", "compile"), _CPU),
    "ratios-h100": partial(ratios, H100),
    "behind-h100": partial(behind, H100),
    "ratios-cpu": partial(ratios, EPYC),
    "behind-cpu": partial(behind, EPYC),
    "triangle-h100": partial(triangle, H100),
    "triangle-paths-h100": partial(triangle_paths, H100),
    "pair-layer-h100": partial(pair_layer, H100),
    "transition-h100": partial(chosen, H100, "(rows, c, hidden)", ("eager", "compile"), _TRANSITION),
    "triangle-attention-h100": partial(attended, H100),
    "released-h100": partial(released, H100),
    "swapped-cpu": partial(swapped, EPYC),
    "gate-sizes-h100": partial(gated, H100, "gates.json", _CONTENDERS, lambda line: line["compiled"]),
    "trimul-h100": partial(trimul, H100),
    "stages-h100": partial(staged, H100),
    "gates-by-cublas-h100": partial(
        gated, H100, "gates-by-cublas.json", _CONTENDERS[:3], lambda line: line["shape"][0] in (65536, 1048576)
    ),
    "gates-portable-h100": partial(
        gated, H100, "gates-portable.json", _CONTENDERS[:3], lambda line: line["op"] != "square_matmul_"
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


def run(options: argparse.Namespace) -> int:
    """Writes the Markdown and the plots of all results, and the tables in the pages that show them."""
    reports.cache_clear()
    for folder in sorted(path for path in RESULTS.iterdir() if path.is_dir()):
        for path, document in documents(folder):
            path.with_suffix(".md").write_text(markdown(path, document))
            if options.no_plots:
                continue
            if "op" in document:
                item = report.from_json(path.read_text())
                print(f"{folder.name}: {plots.draw(folder, [item], item.results[0].first)}")
            elif path.stem == "memory":
                ours = next(name for name in OURS if name in document["cases"][0]["peak_bytes"])
                print(f"{folder.name}: {plots.draw_memory(folder, document['cases'], document, ours)}")
        if not options.no_plots:
            print(f"{folder.name}: {pair_plots.draw(folder)}")
    if not options.no_plots:
        print(ladder.draw(RESULTS))
    for page in PAGES:
        page.write_text(rendered(page.read_text()))
    return 0

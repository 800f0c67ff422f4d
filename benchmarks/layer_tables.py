"""Tables of the pair layer and its parts, from the results of `triangle`, `pair_layer`, `boltz` and `trimul`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from . import record, report
from .case import BACKWARD, FORWARD
from .machine import where as machine_of
from .run import RESULTS
from .tables import table
from .triangle import VIEW

REVISION = "revision of src"  # of a document's machine, or of a result from another revision


def read(machine: str, name: str) -> dict[str, Any]:
    """The results of one machine in one file."""
    return record.read(RESULTS / machine / f"{name}.json")


def where(about: dict[str, Any], results: Sequence[dict[str, Any]] = (), name: Callable[[Any], str] = str) -> str:
    """The machine and revision, and those of results of earlier revisions."""
    earlier = "; ".join(f"{name(result)}: {result[REVISION]}" for result in results if REVISION in result)
    others = f" From earlier revisions: {earlier}." if earlier else ""
    return f"{machine_of(about)}{others}"


def _triangle_row(result: dict[str, Any], call: str) -> list[str]:
    times, memory = result["microseconds"], result["pair tensors"]
    names = ("torchops", "channels first, torch.compile", "as written")
    cells = {n: f"{report.format_seconds(times[n] / 1e6)} ({memory[n]:.1f})" for n in names if times.get(n) is not None}
    return [str(result["n"]), call, *(cells.get(name, "") for name in names)]


_TRIANGLE_HEAD = ("N", "call", "torchops", "channels first, `torch.compile`", "as papers write it, eager")


def triangle(machine: str) -> str:
    """Results of `python -m benchmarks triangle`: times, and memory in pair tensors."""
    document = read(machine, "triangle")
    results = [r for r in document["results"] if r.get("section", "forward") in ("forward", "backward")]
    results.sort(key=lambda r: (r["n"], r["task"] == "forward and backward"))
    lines = table(_TRIANGLE_HEAD, (_triangle_row(result, result["task"]) for result in results))
    source = where(document, results, lambda r: f"{r['n']} {r['task']}")
    return "\n".join([*lines, "", f"{_host(document)}{source}", ""])


def _host(document: dict[str, Any]) -> str:
    results = [r for r in document["results"] if r.get("section") == "host"]
    times = {r["task"]: r["microseconds"] for r in results}
    if not {FORWARD, BACKWARD, VIEW} <= times.keys():
        return ""
    return (
        f"For N = {results[0]['n']}, a call takes {times[FORWARD]:.0f} µs of the host's time forward, and "
        f"{times[BACKWARD]:.0f} µs forward and backward, where a view, which computes nothing, takes "
        f"{times[VIEW]:.0f} µs. "
    )


def triangle_cpu(machine: str) -> str:
    """The results of its section `cpu`."""
    document = read(machine, "triangle")
    rows = (_triangle_row(result, f"{result['dtype']}, {result['task']}") for result in document["results"])
    return "\n".join([*table(_TRIANGLE_HEAD, rows), "", where(document), ""])


def triangle_paths(machine: str) -> str:
    """Its results by the kernels that other GPUs have, and in other dtypes."""
    document = read(machine, "triangle-paths")
    rows = []
    for result in document["results"]:
        if result["path"] != "cublas":
            dtype = "TF32" if result["tf32"] else result["dtype"]
            on = ", other GPUs" if result["path"] == "portable" else ""
            rows.append(_triangle_row(result, f"{dtype}{on}, {result['task']}"))
    return "\n".join([*table(_TRIANGLE_HEAD, rows), "", where(document), ""])


def pair_layer(machine: str) -> str:
    """Results of `python -m benchmarks pair_layer`: times, and memory in pair tensors."""
    document = read(machine, "pair_layer")
    titles = {
        "torchops": "torchops",
        "torchops, checkpointed": "checkpointed",
        "assembled by an expert": "assembled by an expert",
        "torch.compile": "`torch.compile`",
        "eager": "eager",
    }
    titles = {k: v for k, v in titles.items() if any(k in result["microseconds"] for result in document["results"])}
    rows = []
    for result in document["results"]:
        times, memory = result["microseconds"], result["pair tensors"]
        cells = {name: f"{report.format_seconds(times[name] / 1e6)} ({memory[name]:.1f})" for name in times}
        call = f"{result['task']}, {result['precision']}"
        rows.append([str(result["n"]), call, *(cells.get(name, "") for name in titles)])
    source = where(document, document["results"], lambda r: f"{r['n']} {r['task']} {r['precision']}")
    return "\n".join([*table(["N", "call", *titles.values()], rows), "", source, ""])


def released(machine: str) -> str:
    """Results of `python -m benchmarks boltz` for a stack of layers before and after `torchops.replace`."""
    document = read(machine, "boltz")
    head = ("N", "call", "as released", "after `replace`", "deviation before, after")
    rows = []
    for result in document["results"]:
        before, after = result["before"], result["after"]
        cells = [f"{report.format_seconds(way['ms'] / 1e3)}, {way['MiB']:.0f} MiB" for way in (before, after)]
        deviations = ", ".join(f"{way['deviation']['result']['norm']:.1e}" for way in (before, after))
        rows.append([str(result["n"]), f"{result['task']}, {result['precision']}", *cells, deviations])
    return "\n".join([*table(head, rows), "", where(document), ""])


def swapped(machine: str) -> str:
    """Results of `python -m benchmarks boltz` for single modules before and after `torchops.replace`."""
    document = read(machine, "boltz")
    head = ("package", "module", "largest element", "difference in float32", "in bf16-mixed", "distance before, after")
    rows = []
    for module in document["modules"]:
        mixed = module["bf16-mixed"]
        rows.append(
            [
                f"{module['package']} {module['version']}",
                module["module"],
                f"{module['greatest element']:.2f}",
                f"{module['float32']['greatest difference']:.1e}",
                f"{mixed['greatest difference']:.3f}",
                ", ".join(f"{mixed[f'deviation {when}']['norm']:.1e}" for when in ("before", "after")),
            ]
        )
    return "\n".join([*table(head, rows), "", where(document), ""])


def trimul(machine: str) -> str:
    """Results of `python -m benchmarks trimul`."""
    document = read(machine, "trimul")
    head = ("N", "batch", "c", "mask", "inputs", "time", "largest error, of the tolerance")
    rows = []
    for r in document["results"]:
        kinds = "random" if r["masked"] else "ones", "Cauchy" if r["cauchy"] else "normal"
        cells = [*(str(r[key]) for key in ("n", "batch", "dim")), *kinds]
        rows.append([*cells, report.format_seconds(r["microseconds"] / 1e6), f"{r['of the tolerance']:.2f}"])
    mean, tests = report.format_seconds(document["geometric mean"] / 1e6), document["tests"]
    score = f"Geometric mean {mean}; in the task's {len(tests)} tests of values, the error is at most {max(tests):.2f}."
    return "\n".join([*table(head, rows), "", f"{score} {where(document)}", ""])

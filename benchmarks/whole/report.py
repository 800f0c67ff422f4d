"""The page and the picture of a document that `benchmarks.whole` wrote."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from .. import machine, plots
from ..report import facts
from ..tables import table

MOST_CLASSES = 6  # of a part that the page shows
LEAST = 0.01  # of the time: less is not shown


def page(document: dict[str, Any]) -> str:
    """The tables."""
    variants = document["variants"]
    sizes = ", ".join(f"{name} {value}" for name, value in document["sizes"].items())
    lines = [
        f"# {document['package']} {document['version']}, {document['precision']}",
        "",
        facts(machine.described(document), document["command"]),
        "",
        f"{sizes}. The package's own optional kernels are off. Random weights, synthetic features.",
        "",
    ]
    if _of_training(document):
        lines += ["A step is a forward with its losses, and a backward pass. It adds to the gradients.", ""]
    lines += table(["", *variants], _step(document) if _of_training(document) else _prediction(variants))
    lines += _deviations(variants) + _classes(variants) + _kernels(variants) + _replace(document)
    return "\n".join([*lines, ""])


def _of_training(document: dict[str, Any]) -> bool:
    return "gradients, bytes" in document


def _against(value: float, base: float) -> str:
    return f"{value:.3f} s ({base / value:.2f} x)" if value else ""


def _prediction(variants: dict[str, Any]) -> list[list[str]]:
    first = next(iter(variants.values()))
    best = {name: min(result["seconds"]) for name, result in variants.items()}
    base = next(iter(best.values()))
    rows = [["whole", *(_against(value, base) for value in best.values())]]
    parts = list(dict.fromkeys(part for result in variants.values() for part in result["parts, s"]))
    for part in parts:
        if first["parts, s"].get(part, 0) < LEAST * base:
            continue
        times = [result["parts, s"].get(part, 0.0) for result in variants.values()]
        rows.append([part, *(_against(value, times[0]) for value in times)])
    if first["peak, bytes"]:
        peaks = [f"{result['peak, bytes'] / 2**30:.2f} GiB" for result in variants.values()]
        rows.append(["peak memory, parameters included", *peaks])
    rows.append(["first call", *(f"{result['first call, s']:.1f} s" for result in variants.values())])
    return rows


def _step(document: dict[str, Any]) -> list[list[str]]:
    """Medians, and memory."""
    results = list(document["variants"].values())
    rows = []
    for name, key in (("step", "seconds"), ("forward", "forward, s"), ("backward", "backward, s")):
        times = [median(result[key]) for result in results]
        rows.append([f"{name}, median of {len(results[0][key])}", *(_against(value, times[0]) for value in times)])
    for name in ("parameters", "gradients"):
        rows.append([name, *([f"{document[f'{name}, bytes'] / 2**30:.2f} GiB"] * len(results))])
    if "peak beyond, bytes" in results[0]:
        peaks = [f"{result['peak beyond, bytes'] / 2**30:.2f} GiB" for result in results]
        rows.append(["peak memory beyond these", *peaks])
    return [*rows, ["first call", *(f"{result['first call, s']:.1f} s" for result in results)]]


def _deviations(variants: dict[str, Any]) -> list[str]:
    judged = {name: result["deviations"] for name, result in variants.items() if "deviations" in result}
    if not judged:
        return []
    head = ["", "Deviations from the released model in float32, by norms:", ""]
    names = next(iter(judged.values()))
    rows = ([name, *(f"{found[name]['norm']:.2e}" for found in judged.values())] for name in names)
    return head + table(["", *judged], rows)


def _classes(variants: dict[str, Any]) -> list[str]:
    lines = []
    for name, result in variants.items():
        if "classes, s" not in result:
            continue
        total = sum(result["classes, s"].values())
        lines += ["", f"Exclusive time by class, {name}:", ""]
        rows = []
        for part in result["parts, s"]:
            own = {k.split("|")[1]: v for k, v in result["classes, s"].items() if k.split("|")[0] == part}
            if sum(own.values()) < LEAST * total:
                continue
            shown = sorted(own.items(), key=lambda item: -item[1])[:MOST_CLASSES]
            rows.append([part, ", ".join(f"{kind} {value * 1e3:.1f} ms" for kind, value in shown)])
        lines += table(["part", "classes"], rows)
    return lines


def _kernels(variants: dict[str, Any]) -> list[str]:
    lines = []
    for name, result in variants.items():
        if "kernels" not in result:
            continue
        kernels = result["kernels"]
        of = ", ".join(f"{what} {count}" for what, count in kernels["of"].items())
        lines += ["", f"Kernels, {name} ({of}):", ""]
        rows = []
        for part, elapsed in sorted(kernels["elapsed, s"].items(), key=lambda item: -item[1]):
            busy = kernels["busy, s"].get(part, 0.0)
            count = str(kernels["launches"].get(part, 0))
            rows.append([part, f"{elapsed * 1e3:.1f} ms", f"{busy * 1e3:.1f} ms", count])
        lines += table(["part", "elapsed", "busy", "kernels"], rows)
    return lines


def _replace(document: dict[str, Any]) -> list[str]:
    if "replace" not in document:
        return []
    found = document["replace"]
    lines = ["", f"`torchops.replace` took {found['seconds']:.1f} s.", ""]
    rows = []
    for share in found["shares"]:
        fate = share["fate"] + (f": {share['reason']}" if share["reason"] else "")
        rows.append([f"{share['parameters']:.1%}", share["kind"], str(share["modules"]), fate])
    lines += table(["share of the parameters", "class", "modules", "fate"], rows)
    for what in ("replaced", "left"):
        lines += ["", f"{what.capitalize()}:", "", *(f"- {count} x {name}" for name, count in found[what].items())]
    return lines


def draw(document: dict[str, Any], path: Path) -> str:
    """Stacked bars of the parts, one bar for each variant; what was drawn, or why nothing was."""
    if problem := plots.missing():
        return problem
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    variants = document["variants"]
    total = max(sum(result["parts, s"].values()) for result in variants.values())
    parts = list(dict.fromkeys(part for result in variants.values() for part in result["parts, s"]))
    shown = [part for part in parts if any(r["parts, s"].get(part, 0) > LEAST * total for r in variants.values())]
    figure = Figure(figsize=(11, 1.6 + 0.6 * len(variants)), layout="constrained")
    axes = figure.subplots()
    starts = dict.fromkeys(variants, 0.0)
    for i, part in enumerate([*shown, "others"]):
        for row, (name, result) in enumerate(variants.items()):
            times = result["parts, s"]
            value = times.get(part, 0.0) if part in shown else sum(v for k, v in times.items() if k not in shown)
            color = colormaps["tab20"](i % 20)
            label = part if row == 0 else None
            bar = axes.barh(row, value, 0.7, starts[name], color=color, edgecolor="white", label=label)
            if value > 0.06 * total:
                axes.bar_label(bar, [f"{value:.2f}"], label_type="center", fontsize=7)
            starts[name] += value
    for row, name in enumerate(variants):
        axes.text(starts[name], row, f" {starts[name]:.2f} s", va="center", fontsize=8)
    axes.set_yticks(range(len(variants)), list(variants), fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.09)
    sizes = document["sizes"]
    what = "training step" if _of_training(document) else "prediction"
    axes.set_xlabel(f"time of a {what} [s]: {sizes['tokens']} tokens, {sizes['samples']} samples")
    figure.legend(fontsize=8, loc="outside upper center", ncols=4)
    axes.set_title(f"{document['package']} {document['version']}, {document['precision']}", fontsize=10)
    plots._caption(figure, document)
    figure.savefig(path, dpi=plots.DPI)
    return f"picture: {path.name}"

"""Plots of the triangle update's stages and of the pair layer over N, from the results on disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import plots, record, stages
from .case import FORWARD
from .gate_lines import RATE

# The kernels of a stage, by parts of their names; a name must contain all parts of one tuple. Anything else is the
# rest.
KERNELS: dict[str, tuple[tuple[str, ...], ...]] = {
    "layer norm, projections, gates": (("PairInKernel",),),
    "products of channels": (("nvjet",), ("gemm_",), ("cutlass_",)),
    "layer norm, product, gate": (("PairOutKernel",),),
    "gradients of the last stage": (("PairGradientsKernel", "Sigmoid, true"),),
    "gradients of the first stage": (("PairGradientsKernel", "Sigmoid, false"),),
}
REST = "rest"
COLORS = dict(zip((*KERNELS, REST), ("#1f77b4", "#7f7f7f", "#2ca02c", "#98df8a", "#aec7e8", "#d9d9d9"), strict=True))

# The names in the JSON of `pair_layer`, with the labels and styles of the other plots.
WAYS = {
    "torchops": ("torchops", "cuda"),
    "torchops, checkpointed": ("torchops, checkpointed", "compile-ours"),
    "assembled by an expert": ("assembled by an expert", "triton"),
    "torch.compile": ("torch.compile", "compile"),
    "eager": ("eager", "eager"),
}


def _stage(kernel: str) -> str:
    for stage, names in KERNELS.items():
        if any(all(part in kernel for part in parts) for parts in names):
            return stage
    return REST


def by_stage(kernels: dict[str, float]) -> dict[str, float]:
    """Microseconds per stage, from microseconds per kernel."""
    sums = dict.fromkeys(COLORS, 0.0)
    for kernel, us in kernels.items():
        sums[_stage(kernel)] += us
    return {stage: us for stage, us in sums.items() if us}


def draw_stages(document: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    n, c, times = document["n"], document["features"], document["microseconds"]
    names = list(KERNELS)
    bounds = [stages.bound(n, c, stage, FORWARD) for stage in (stages.GLUS, stages.OUT)]
    at_the_limit = {names[0]: bounds[0], names[1]: 2 * n**3 * c / RATE * 1e6, names[2]: bounds[1]}
    rows = {"forward, at the limits of\nmemory and arithmetic": at_the_limit}
    for task in ("forward", "in place", "forward and backward"):
        rows[task] = by_stage(times[f"kernels, {task}"])
    figure = Figure(figsize=(11, 1.2 + 0.6 * len(rows)), layout="constrained")
    axes = figure.subplots()
    labelled: set[str] = set()
    for row, sums in enumerate(rows.values()):
        start = 0.0
        for stage, us in sums.items():
            label = None if stage in labelled else stage
            bar = axes.barh(row, us, 0.7, start, color=COLORS[stage], edgecolor="white", label=label)
            if us > 100:
                axes.bar_label(bar, [f"{us:.0f}"], label_type="center", fontsize=7)
            labelled.add(stage)
            start += us
        axes.text(start, row, f" {start:.0f} µs", va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), list(rows), fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.09)
    axes.set_xlabel("time of kernels [µs]")
    figure.legend(fontsize=8, loc="outside upper center", ncols=3)
    plots._caption(figure, document)
    figure.savefig(path, dpi=plots.DPI)


def draw_layer(document: dict[str, Any], path: Path) -> None:
    """Time and memory over N in bfloat16, forward and with backward."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    figure = Figure(figsize=(11, 7.6), layout="constrained")
    axes = figure.subplots(2, 2)
    for column, task in enumerate(("forward", "forward + backward")):
        # Sizes of a round number plus one have their own figures in the table; the line here has the round ones.
        results = [r for r in document["results"] if (r["task"], r["precision"]) == (task, "bfloat16")]
        results = sorted((r for r in results if r["n"] % 2 == 0), key=lambda r: r["n"])
        for way, (label, look) in WAYS.items():
            style = plots._style(look, "cuda") | {"label": label}
            _line(axes[0][column], results, "microseconds", way, 1e-3, style)
            _line(axes[1][column], results, "pair tensors", way, 1.0, style)
        plots._finish(axes[0][column], "N", "time of a call [ms]")
        plots._finish(axes[1][column], "N", "memory of a call [pair tensors]")
        axes[0][column].set_title(f"{task}, bfloat16", fontsize=10)
        for one in axes[:, column]:
            one.set_xticks([r["n"] for r in results], [str(r["n"]) for r in results], fontsize=8)
            one.xaxis.set_minor_locator(NullLocator())
    handles: dict[str, Any] = {}
    for one in axes.flat:
        handles |= {label: handle for handle, label in zip(*one.get_legend_handles_labels(), strict=True)}
    plots.legend_above(figure, list(handles.values()), list(handles))
    plots._caption(figure, document)
    figure.savefig(path, dpi=plots.DPI)


def _line(
    axes: Any, results: Sequence[dict[str, Any]], what: str, way: str, scale: float, style: dict[str, Any]
) -> None:
    points = [(r["n"], r[what][way] * scale) for r in results if way in r[what]]
    if points:
        axes.plot(*zip(*points, strict=True), **style)


def draw(folder: Path) -> str:
    """Draws `stages.png` and `pair_layer.png` of one machine, if it has results for more than one N."""
    if problem := plots.missing():
        return problem
    drawn = []
    for name, draw_one in (("stages", draw_stages), ("pair_layer", draw_layer)):
        source = folder / f"{name}.json"
        document = record.read(source) if source.exists() else {"results": []}
        if name == "pair_layer" and len({result["n"] for result in document["results"]}) < 2:
            continue
        if source.exists():
            draw_one(document, source.with_suffix(".png"))
            drawn.append(f"{name}.png")
    return f"pictures: {', '.join(drawn) or 'none of pairs'}"

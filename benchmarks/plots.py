"""Plots of results, if matplotlib is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .operators import OPERATORS
from .report import Report, Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FEWEST_POINTS = 3
DPI = 90
MIB = 2**20

# Every contender has the same style in all plots; ours is thicker and drawn last.
COLORS = {
    "cuda": "#d62728",
    "cpp": "#d62728",
    "compile-ours": "#e377c2",
    "quack": "#2ca02c",
    "liger": "#98df8a",
    "triton": "#9467bd",
    "compile": "#1f77b4",
    "compile-max": "#17becf",
    "eager": "#ff7f0e",
    "eager-in-place": "#ffbb78",
    "py": "#8c564b",
    "linear": "#7f7f7f",
    "products": "#7f7f7f",
    "packed product": "#7f7f7f",
    "out-of-place": "#bcbd22",
    "preallocated": "#dbdb8d",
    "packed": "#c49c94",
    "copy": "#7f7f7f",
}
LABELS = {
    "compile-ours": "torchops, torch.compile",
    "eager-in-place": "eager, out=x and the like",
    "out-of-place": "eager, new tensor",
    "preallocated": "eager, out= another tensor",
    "packed": "eager, packed weights",
    "cuda": "torchops (cuda)",
    "cpp": "torchops (cpp)",
    "compile": "torch.compile",
    "compile-max": "torch.compile, max-autotune",
    "py": "py (autograd.Function)",
    "linear": "linear (product and bias alone)",
}


def missing() -> str:
    """Why there are no plots, or an empty string."""
    if importlib.util.find_spec("matplotlib"):
        return ""
    return "no pictures: matplotlib is not installed (dependency group demo)"


def draw(folder: Path, reports: Sequence[Report], ours: str) -> str:
    """Draws whatever has at least three sizes, and returns what was drawn, or why nothing was.

    A sweep goes to `<op>-<size>-<dtype>.png`, and the ratios of cases with several targets to `<op>-shapes.png`.
    """
    if problem := missing():
        return problem
    drawn = []
    for report in reports:
        sweeps: dict[tuple[str, str], list[Result]] = {}
        for result in report.results:
            if result.case.sweep and result.timings:
                sweeps.setdefault((result.case.sweep, result.case.dtype_name), []).append(result)
        for (size, dtype), results in sweeps.items():
            if len(results) >= FEWEST_POINTS:
                path = folder / f"{report.op}-{size}-{dtype}.png"
                _draw_sweep(path, report, size, results, ours)
                drawn.append(path.name)
        with_targets = [result for result in report.results if len(result.case.targets) > 1 and result.first == ours]
        if len(with_targets) >= FEWEST_POINTS:
            path = folder / f"{report.op}-shapes.png"
            _draw_ratios(path, report, with_targets)
            drawn.append(path.name)
    return f"pictures: {', '.join(drawn) or 'none, no sweep has three sizes'}"


def _draw_sweep(path: Path, report: Report, size: str, results: list[Result], ours: str) -> None:
    from matplotlib.figure import Figure

    dims = OPERATORS[report.op].dims
    position = dims.index(size)
    results = sorted(results, key=lambda result: result.case.shape[position])
    sizes = [result.case.shape[position] for result in results]
    # Products are plotted by operations, everything else by bytes. The roofline takes both into account.
    bound_by_flops = any(result.cost.flops for result in results) and report.op.startswith("square")
    scale, prefix = (1e12, "T") if report.rates.get("copy", 0.0) > 1e12 else (1e9, "G")
    work = [(result.cost.flops if bound_by_flops else result.bytes) / scale for result in results]
    unit = f"{prefix}FLOP/s" if bound_by_flops else f"{prefix}B/s"

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    times, rates = figure.subplots(1, 2)
    names = sorted({name for result in results for name in result.timings}, key=_order)
    for name in names:
        measured = [(i, result.timings[name].seconds) for i, result in enumerate(results) if name in result.timings]
        at = [sizes[i] for i, _ in measured]
        style = _style(name, ours)
        times.plot(at, [seconds * 1e6 for _, seconds in measured], **style)
        rates.plot(at, [work[i] / seconds for i, seconds in measured], **style)
    floors = [result.floor for result in results]
    roofline: dict[str, Any] = {"color": "black", "linestyle": "--", "linewidth": 1.2, "label": "roofline"}
    times.plot(sizes, [floor * 1e6 for floor in floors], **roofline)
    rates.plot(sizes, [w / floor for w, floor in zip(work, floors, strict=True)], **roofline)

    others = [f"{name} {results[0].case.shape[i]}" for i, name in enumerate(dims) if name != size and _same(results, i)]
    for axes, label in ((times, "time of a call [µs]"), (rates, f"{unit}, counting what must be done at least")):
        _finish(axes, size + (f"  ({', '.join(others)})" if others else ""), label)
    figure.legend(*times.get_legend_handles_labels(), fontsize=8, loc="outside right upper")
    figure.suptitle(f"{report.op}, {_kind(results[0])}")
    _caption(figure, report.description)
    figure.savefig(path, dpi=DPI)


def _draw_ratios(path: Path, report: Report, results: list[Result]) -> None:
    from matplotlib.figure import Figure

    names = sorted({name for result in results for name in result.timings if name != result.first}, key=_order)
    figure = Figure(figsize=(11, 1.4 + 0.55 * len(results)), layout="constrained")
    axes = figure.subplots()
    height = 0.84 / len(names)
    for i, name in enumerate(names):
        at = [k + i * height for k, result in enumerate(results) if name in result.timings]
        ratios = [result.timings[name].ratio for result in results if name in result.timings]
        axes.barh(at, ratios, height, color=COLORS[name], label=LABELS.get(name, name))
    ours = results[0].first
    axes.axvline(1, color=COLORS[ours], linewidth=2.6, label=LABELS.get(ours, ours))
    kinds = {_kind(result) for result in results}
    labels = [f"{result.case.shape}" + ("" if len(kinds) == 1 else f"\n{_kind(result)}") for result in results]
    axes.set_yticks([k + 0.42 - height / 2 for k in range(len(results))], labels, fontsize=7)
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.set_xlabel("time over that of torchops: right of the line, torchops is faster")
    axes.grid(True, axis="x", linewidth=0.3, alpha=0.6)
    figure.legend(fontsize=8, loc="outside right upper")
    dims = ", ".join(OPERATORS[report.op].dims)
    figure.suptitle(f"{report.op} ({dims})" + (f", {kinds.pop()}" if len(kinds) == 1 else ""))
    _caption(figure, report.description)
    figure.savefig(path, dpi=DPI)


def _kind(result: Result) -> str:
    return f"{result.case.dtype_name}, {result.case.task}"


def _order(name: str) -> int:
    return list(COLORS).index(name)


def _same(results: list[Result], dimension: int) -> bool:
    return len({result.case.shape[dimension] for result in results}) == 1


def _style(name: str, ours: str) -> dict[str, Any]:
    style: dict[str, Any] = {"color": COLORS[name], "label": LABELS.get(name, name), "marker": "o", "markersize": 3}
    if name == ours:
        return style | {"linewidth": 2.6, "zorder": 5, "markersize": 4.5}
    return style | {"linewidth": 1.2, "linestyle": ":" if name in ("linear", "copy") else "-"}


def _finish(axes: Axes, xlabel: str, ylabel: str) -> None:
    from matplotlib.ticker import LogLocator

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.tick_params(axis="y", which="both", labelsize=8)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.grid(True, which="both", linewidth=0.3, alpha=0.6)


def _caption(figure: Any, description: dict[str, str]) -> None:
    revision = f", revision {description['revision of src']}" if "revision of src" in description else ""
    figure.supxlabel(f"{description['machine']}, torch {description['torch']}{revision}", fontsize=7, color="gray")


def legend_above(figure: Figure, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """A legend above all axes, in as many columns as the width of the figure has room for."""
    for columns in range(len(labels), 0, -1):
        legend = figure.legend(handles, labels, fontsize=8, loc="outside upper center", ncols=columns)
        figure.draw_without_rendering()
        if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            return
        legend.remove()


def draw_memory(folder: Path, rows: Sequence[dict[str, Any]], description: dict[str, str], ours: str) -> str:
    """Draws the peaks of all cases as bars into `memory.png`, as multiples of the tensor that an operator works on."""
    if problem := missing():
        return problem
    from matplotlib.figure import Figure

    names = sorted({name for row in rows for name in row["peak_bytes"]}, key=_order)
    figure = Figure(figsize=(11, 0.9 + 0.75 * len(rows)), layout="constrained")
    axes = figure.subplots()
    height = 0.8 / len(names)
    for i, name in enumerate(names):
        at = [k + i * height for k, row in enumerate(rows) if name in row["peak_bytes"]]
        present = [row for row in rows if name in row["peak_bytes"]]
        peaks = [row["peak_bytes"][name] / row["tensor_bytes"] for row in present]
        label = LABELS.get(name, name) + (", in place" if name == ours else "")
        bars = axes.barh(at, peaks, height, color=COLORS[name], label=label)
        mib = [
            f" {row['peak_bytes'][name] / MIB:.{1 if row['peak_bytes'][name] < 10 * MIB else 0}f} MiB"
            for row in present
        ]
        axes.bar_label(bars, mib, fontsize=6.5)
    axes.set_yticks([k + 0.4 - height / 2 for k in range(len(rows))], [f"{row['op']}\n{_short(row)}" for row in rows])
    axes.tick_params(axis="y", labelsize=7.5)
    axes.invert_yaxis()
    axes.margins(x=0.1, y=0.01)
    axes.set_xlabel("peak memory of a call, in multiples of the tensor")
    axes.grid(True, axis="x", linewidth=0.3, alpha=0.6)
    legend_above(figure, *axes.get_legend_handles_labels())
    _caption(figure, description)
    figure.savefig(folder / "memory.png", dpi=DPI)
    return "picture: memory.png"


def _short(row: dict[str, Any]) -> str:
    return f"{str(row['name']).removeprefix('forward ')}, {row['tensor_bytes'] / MIB:.0f} MiB"

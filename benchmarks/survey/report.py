"""The tables and the picture of a survey."""

from __future__ import annotations

from math import prod
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from .. import machine, plots
from ..report import format_seconds
from ..tables import table

OURS = "torchops"
# Above the first, a draw is slower; on a CPU of few cores, times scatter more.
LIMITS = {"cuda": (1.05, 1.25), "cpu": (1.1, 1.25)}
# What may be allocated beyond the best other way at the peak, whatever the size.
FREE_BYTES = 64 << 20
_WORST = 3
_COLUMNS = 4


def by_name(document: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The draws that have a ratio, the worst first, by operator and task."""
    found: dict[str, list[dict[str, Any]]] = {}
    for draw in document["draws"]:
        if draw["ratio"]:
            found.setdefault(draw["name"], []).append(draw)
    return {name: sorted(draws, key=lambda d: -d["ratio"]) for name, draws in found.items()}


def _limits(document: dict[str, Any]) -> tuple[float, float]:
    return LIMITS[document["device"]]


def to_markdown(document: dict[str, Any]) -> str:
    """A row for each operator and task, and what failed."""
    slow, very = _limits(document)
    head = [
        "operator",
        "draws",
        f"above {slow}",
        f"above {very}",
        "geometric mean",
        "host time",
        "more memory",
        "worst",
    ]
    lines = table(head, [_cells(name, draws, slow, very) for name, draws in by_name(document).items()])
    failed = [draw for draw in document["draws"] if draw["errors"]]
    lines += ["", *(f"- failed: {draw['name']} {draw['number']} {draw['sizes']}: {draw['errors']}" for draw in failed)]
    lines += [""] if failed else []
    lines += [
        "Ratios are the time of torchops over that of the fastest of PyTorch's ways in eager mode. Host time is the",
        "geometric mean of such ratios for calls without backward, where measured; with gradients, of calls that",
        f"record them. More memory: draws of {FREE_BYTES >> 20} MiB more at the peak than the least of the others.",
        "",
        f"{document['machine']}, torch {document['torch']}, {machine.revisions(document)}. `{document['command']}`",
    ]
    return "\n".join(lines) + "\n"


def _cells(name: str, draws: list[dict[str, Any]], slow: float, very: float) -> list[str]:
    ratios = [draw["ratio"] for draw in draws]

    def above(limit: float) -> str:
        count = sum(ratio > limit for ratio in ratios)
        return f"{count} ({count / len(ratios):.1%})"

    host = [_least_ratio(times) for draw in draws if len(times := draw["host_seconds"]) > 1 and OURS in times]
    worst = "; ".join(_said(draw) for draw in draws[:_WORST] if draw["ratio"] > slow)
    return [
        name,
        str(len(draws)),
        above(slow),
        above(very),
        f"{geometric_mean(ratios):.2f}",
        f"{geometric_mean(host):.2f}" if host else "",
        str(sum(takes_more(draw["peak_bytes"]) for draw in draws)),
        worst,
    ]


def _least_ratio(values: dict[str, float]) -> float:
    return values[OURS] / min(value for name, value in values.items() if name != OURS)


def takes_more(peaks: dict[str, int]) -> bool:
    """Whether ours needs more memory than the way that needs least."""
    return len(peaks) > 1 and peaks[OURS] > FREE_BYTES + min(v for name, v in peaks.items() if name != OURS)


def _said(draw: dict[str, Any]) -> str:
    best = min(value for name, value in draw["seconds"].items() if name != OURS)
    sizes = ", ".join(f"{name} {value}" for name, value in draw["sizes"].items())
    times = f"{format_seconds(draw['seconds'][OURS])} / {format_seconds(best)}"
    return f"{draw['ratio']:.2f}: {times} at {sizes}, {draw['dtype']} (draw {draw['number']})"


def draw(document: dict[str, Any], path: Path) -> str:
    """The ratio of each draw over its size, a panel for each operator and task; what was drawn, or why nothing was."""
    if problem := plots.missing():
        return problem
    from matplotlib.figure import Figure

    if not (found := by_name(document)):
        return "no picture: nothing was measured"
    slow, _ = _limits(document)
    count = -(-len(found) // _COLUMNS)
    figure = Figure(figsize=(3.2 * _COLUMNS, 2.3 * count), layout="constrained")
    grid = figure.subplots(count, _COLUMNS, sharey=True, squeeze=False)
    panels = [axes for row in grid for axes in row]
    dtypes = sorted({drawn["dtype"] for drawn in document["draws"] if drawn["dtype"]})
    for axes, (name, draws) in zip(panels, found.items(), strict=False):
        for i, dtype in enumerate(dtypes):
            own = [drawn for drawn in draws if drawn["dtype"] == dtype]
            axes.scatter([_size(d) for d in own], [d["ratio"] for d in own], 6, f"C{i}", label=dtype)
        axes.axhline(1.0, color="black", linewidth=0.6)
        axes.axhline(slow, color="black", linewidth=0.6, linestyle=":")
        axes.set(xscale="log", yscale="log", title=name)
        axes.title.set_fontsize(8)
        axes.tick_params(labelsize=7)
    for axes in panels[len(found) :]:
        axes.set_axis_off()
    figure.supxlabel("product of the sizes", fontsize=8)
    figure.supylabel("time of torchops / time of the fastest way in eager mode", fontsize=8)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper right", ncols=len(dtypes), fontsize=8)
    figure.savefig(path, dpi=plots.DPI)
    return f"drew {path.name}"


def _size(drawn: dict[str, Any]) -> int:
    return prod(v for v in drawn["sizes"].values() if isinstance(v, int) and not isinstance(v, bool))

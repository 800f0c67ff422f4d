"""The picture of the demo."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
import torch
from gains import DEVICE, Gain

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

if TYPE_CHECKING:
    from demo import Curve

OURS, THEIRS = "#d95f02", "#8c8c8c"
# The three curves lie on top of each other, so the later ones are thinner and the earlier stay visible beneath.
STYLES: list[dict[str, Any]] = [
    {"color": "#c6dbef", "linewidth": 8},
    {"color": OURS, "linewidth": 3},
    {"color": "#1b1b1b", "linewidth": 1.2, "linestyle": (0, (4, 3))},
]


def _bars(axes: Axes, gain: Gain, values: list[float], texts: list[str]) -> None:
    positions = list(range(len(values)))
    colors = [OURS] + [THEIRS] * (len(values) - 1)
    bars = axes.barh(positions, values, color=colors)
    axes.bar_label(bars, texts, padding=3, fontsize=8)
    axes.set_yticks(positions, [way.label for way in gain.ways], fontsize=8, family="monospace")
    axes.invert_yaxis()
    axes.set_xlim(0, 1.35 * max(*values, 1e-9))
    axes.spines[["top", "right"]].set_visible(False)


def _plot_losses(axes: Axes, curves: list[Curve]) -> None:
    for curve, style in zip(curves, STYLES, strict=True):
        label = f"{curve.label}: {curve.accuracies[-1]:.1%} of the test digits"
        axes.plot(range(1, len(curve.losses) + 1), curve.losses, label=label, **style)
    axes.set_yscale("log")
    axes.set_title("the same model on handwritten digits: training loss by epoch", fontsize=9)
    axes.legend(frameon=False, handlelength=3, fontsize=8)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def draw(path: Path, gains: list[Gain], curves: list[Curve]) -> None:
    """Writes bars of time and of memory for each gain, and the loss curves, to a PNG."""
    figure = plt.figure(figsize=(13, 2.6 + 1.5 * len(gains)), layout="constrained")
    rows: Any = figure.subfigures(2, 1, height_ratios=[1.5 * len(gains), 2.6])
    for row, gain in zip(rows[0].subplots(len(gains), 2, squeeze=False), gains, strict=True):
        times, peaks = row
        times.set_title(f"{gain.title}: time [ms]", fontsize=9, loc="left")
        _bars(
            times,
            gain,
            [way.seconds * 1e3 for way in gain.ways],
            [f"{way.seconds * 1e3:.2f} ({way.ratio:.2f}x)" for way in gain.ways],
        )
        values = [way.peak_mib for way in gain.ways if way.peak_mib is not None]
        if len(values) == len(gain.ways):
            peaks.set_title("memory beside the arguments [MiB]", fontsize=9, loc="left")
            _bars(peaks, gain, values, [f"{value:.1f}" for value in values])
        peaks.set_yticks([])
    _plot_losses(rows[1].subplots(), curves)
    where = torch.cuda.get_device_name() if DEVICE.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    figure.suptitle(f"{where}, torch {torch.__version__}", fontsize=9, color="#555555")
    figure.savefig(path, dpi=130, bbox_inches="tight", pad_inches=0.15)
    plt.close(figure)

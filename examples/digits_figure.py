"""The picture of the digits demo."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter
from torch import Tensor

if TYPE_CHECKING:
    from digits import Curve
    from memory import MemoryResult

# The three curves lie on top of each other, so the later ones are thinner and the earlier stay visible beneath.
STYLES: list[dict[str, Any]] = [
    {"color": "#c6dbef", "linewidth": 8},
    {"color": "#d95f02", "linewidth": 3},
    {"color": "#1b1b1b", "linewidth": 1.2, "linestyle": (0, (4, 3))},
]
SHOWN_DIGITS = 14


def _plot_curves(axes: Axes, curves: list[Curve], values: str) -> None:
    for curve, style in zip(curves, STYLES, strict=True):
        series = getattr(curve, values)
        axes.plot(range(1, len(series) + 1), series, label=curve.label, **style)
    axes.set_xlabel("epoch")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _plot_memory(axes: Axes, memory: MemoryResult) -> None:
    names = ["torchops.\nsquare_matmul_", "torch.\nmatmul"]
    usages = [memory.in_place, memory.out_of_place]
    bars = axes.bar(names, [usage.peak_mib for usage in usages], width=0.55, color=["#d95f02", "#8c8c8c"])
    axes.bar_label(bars, [f"{u.peak_mib:.1f} MiB\n{u.seconds:.2f} s" for u in usages], padding=3, fontsize=9)
    axes.set_ylim(0, 1.25 * max(usage.peak_mib for usage in usages))
    axes.set_title(f"memory on top of a {memory.tensor_mib:.0f} MiB input")
    axes.set_ylabel("MiB")
    axes.spines[["top", "right"]].set_visible(False)


def draw(
    path: Path, curves: list[Curve], images: Tensor, labels: Tensor, memory: MemoryResult, min_accuracy: float
) -> None:
    """Writes the loss and accuracy curves, the memory bars and some test digits to a PNG.

    The digits shown are those that the first model got wrong, then right ones up to the end of the row.
    """
    figure = plt.figure(figsize=(13, 6.2), layout="constrained")
    rows: Any = figure.subfigures(2, 1, height_ratios=[4, 1.25])
    upper, lower = rows
    loss_axes, accuracy_axes, memory_axes = upper.subplots(1, 3, width_ratios=[4, 4, 3])

    _plot_curves(loss_axes, curves, "losses")
    loss_axes.set_yscale("log")
    loss_axes.set_title("training loss (mean of an epoch)")
    loss_axes.legend(frameon=False, handlelength=3)
    apart = max(abs(a - b) for curve in curves for a, b in zip(curve.losses, curves[-1].losses, strict=True))
    loss_axes.text(0.04, 0.05, f"at most {apart:.1g} apart", transform=loss_axes.transAxes, color="#555555")

    _plot_curves(accuracy_axes, curves, "accuracies")
    accuracy_axes.axhline(min_accuracy, color="#777777", linewidth=1, linestyle=":")
    accuracy_axes.text(len(curves[0].losses), min_accuracy - 0.008, "required", ha="right", va="top", color="#555555")
    accuracy_axes.set_ylim(min(0.8, *(min(curve.accuracies[1:]) for curve in curves)), 1.0)
    accuracy_axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    accuracy_axes.set_title(f"test accuracy (last: {curves[0].accuracies[-1]:.1%})")

    _plot_memory(memory_axes, memory)

    predictions = curves[0].predictions
    wrong_first = (predictions == labels).int().argsort(stable=True)[:SHOWN_DIGITS].tolist()
    missed = int((predictions != labels).sum())
    lower.suptitle(f"test digits and the class given to them: {missed} of {len(labels)} wrong, shown first", y=1.02)
    for axes, index in zip(lower.subplots(1, SHOWN_DIGITS), wrong_first, strict=True):
        given, true = int(predictions[index]), int(labels[index])
        axes.imshow(images[index].view(8, 8), cmap="gray_r")
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_xlabel(
            f"{given}" if given == true else f"{given}, not {true}", color="#1b1b1b" if given == true else "#c00000"
        )
    figure.savefig(path, dpi=130, bbox_inches="tight", pad_inches=0.15)
    plt.close(figure)

"""Compares `torchops.nn.PairLayer` in inference, in place, with the pair layer of AlphaFold 3 as papers write it.

Prints the time and the peak memory of a call over N, and draws both. On the CPU, in float32:

    python examples/pair_layer.py

On a GPU, in bfloat16, at other sizes:

    python examples/pair_layer.py --device cuda --sizes 256,384,512
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import matplotlib
import torch
from progress import Progress
from torch import Tensor

import torchops

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parent / "models")]

import alphafold3_pair_layer as written

from benchmarks.peak_memory import peak_of, supported

matplotlib.use("Agg")
import matplotlib.pyplot as plt

MIB = 2**20
ROUNDS = 3
COLORS = {"torchops, in place": "#d95f02", "as written": "#8c8c8c"}


class Cost(NamedTuple):
    """Of a call."""

    seconds: float
    mib: float | None


def calls(n: int, c: int, device: torch.device) -> dict[str, Callable[[], Tensor]]:
    """The ways to compute the layer, with the same parameters; raises where their results differ."""
    plain = written.PairLayer(c).eval()
    with torch.no_grad():
        for parameter in plain.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
    ours = torchops.nn.PairLayer(c).eval()
    ours.load_state_dict(plain.state_dict())
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    plain, ours = plain.to(device, dtype), ours.to(device, dtype)
    x, mask = torch.randn(1, n, n, c).to(device, dtype), (torch.rand(1, n, n) > 0.1).to(device, dtype)
    with torch.no_grad():
        expected = plain(x, mask)
        torch.testing.assert_close(ours(x, mask), expected, rtol=0.1, atol=0.02 * float(expected.abs().max()))
    return {"torchops, in place": lambda: ours(x, mask, inplace=True), "as written": lambda: plain(x, mask)}


def seconds(call: Callable[[], Tensor], device: torch.device) -> float:
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def measure(sizes: Sequence[int], c: int, device: torch.device) -> dict[str, list[Cost]]:
    """By way, for each N; the ways are interleaved."""
    costs: dict[str, list[Cost]] = {name: [] for name in COLORS}
    with Progress("pair layer", len(sizes) * len(COLORS)) as bar, torch.no_grad():
        for n in sizes:
            ways = calls(n, c, device)
            times: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(ROUNDS):
                for name, call in ways.items():
                    times[name].append(seconds(call, device))
            for name, call in ways.items():
                peak = peak_of(call, device) / MIB if supported(device) else None
                costs[name].append(Cost(median(times[name]), peak))
                bar.advance(f"N = {n}: {name}")
    return costs


def draw(path: Path, sizes: Sequence[int], costs: dict[str, list[Cost]], title: str) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    panels: tuple[tuple[Any, str, list[list[Any]]], ...] = (
        (axes[0], "time of a call [ms]", [[cost.seconds * 1e3 for cost in made] for made in costs.values()]),
        (axes[1], "memory beside x [MiB]", [[cost.mib for cost in made] for made in costs.values()]),
    )
    for ax, label, curves in panels:
        for name, values in zip(costs, curves, strict=True):
            if None not in values:
                ax.plot(sizes, values, "o-", color=COLORS[name], label=name)
        ax.set_xlabel("N")
        ax.set_title(label, fontsize=9, loc="left")
        ax.set_ylim(bottom=0)
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sizes", type=lambda text: [int(n) for n in text.split(",")], default=[32, 64, 96], help="N")
    parser.add_argument("--features", type=int, default=128, help="features of x")
    parser.add_argument("--picture", type=Path, default=Path("build/pair_layer.png"))
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    device = torch.device(options.device)
    costs = measure(options.sizes, options.features, device)
    for i, n in enumerate(options.sizes):
        for name, made in costs.items():
            memory = "" if made[i].mib is None else f"{made[i].mib:9.1f} MiB beside x"
            print(f"N = {n:4}  {name:20} {made[i].seconds * 1e3:9.2f} ms {memory}")
    draw(options.picture, options.sizes, costs, f"PairLayer, c = {options.features}, {device.type}")
    print(f"Picture: {options.picture}")


if __name__ == "__main__":
    main()

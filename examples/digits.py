"""Trains torchops.nn.Dense on handwritten digits and shows what an in-place product saves.

The same classifier is trained three times from one seed: from `torchops.nn.Dense` layers, from the same layers under
`torch.compile(fullgraph=True)`, and from `nn.Linear` followed by `torch.sigmoid`. The exit status is 1 when a test
accuracy is under 95% or when the losses do not agree.

Run it with `make demo`, or with `python examples/digits.py` where torchops, scikit-learn and matplotlib are installed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from digits_figure import draw
from memory import MemoryResult, compare_memory
from progress import Progress
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import torchops

SEED = 0
BATCH = 64
LEARNING_RATE = 1e-2
MIN_ACCURACY = 0.95
# Three summation orders of float32, fed back through every optimiser step, drift apart by far less than this; a wrong
# gradient moves the losses by tenths.
LOSS_TOLERANCE = 5e-3


class LinearSigmoid(nn.Linear):
    """What `torchops.nn.Dense` replaces: `nn.Linear`, then `torch.sigmoid`."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.sigmoid(super().forward(input))


@dataclass(frozen=True)
class Digits:
    """Train and test part of the data: 64 pixels in [0, 1] a row, and the class of each row."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


@dataclass(frozen=True)
class Curve:
    """One training run: a value per epoch, the predictions at the end and the times."""

    label: str
    losses: list[float]
    accuracies: list[float]
    predictions: Tensor
    first_step_seconds: float
    step_seconds: float


def load() -> Digits:
    """Loads scikit-learn's 1797 scanned digits (8 by 8 grey pixels) and holds out a fifth of each class."""
    images, labels = load_digits(return_X_y=True)
    train_x, test_x, train_y, test_y = train_test_split(
        images, labels, test_size=0.2, stratify=labels, random_state=SEED
    )
    return Digits(
        torch.tensor(train_x / 16.0, dtype=torch.float32),
        torch.tensor(train_y),
        torch.tensor(test_x / 16.0, dtype=torch.float32),
        torch.tensor(test_y),
    )


def make_model(layer: Callable[[int, int], nn.Module]) -> nn.Module:
    """Builds the 64-64-32-10 classifier; every call starts from the same weights."""
    torch.manual_seed(SEED)
    return nn.Sequential(layer(64, 64), layer(64, 32), nn.Linear(32, 10))


def train(label: str, model: nn.Module, data: Digits, epochs: int) -> Curve:
    """Trains `model` with Adam on cross entropy; the order of the samples depends on the seed alone."""
    shuffle = torch.Generator().manual_seed(SEED)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    losses: list[float] = []
    accuracies: list[float] = []
    step_seconds: list[float] = []
    with Progress(label, epochs) as bar:
        for _ in range(epochs):
            epoch_losses = []
            order = torch.randperm(len(data.train_x), generator=shuffle)
            # A last, smaller batch would be one more shape to compile for.
            for rows in order[: len(order) // BATCH * BATCH].split(BATCH):
                start = time.perf_counter()
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(data.train_x[rows]), data.train_y[rows])
                loss.backward()
                optimizer.step()
                epoch_losses.append(loss.item())
                step_seconds.append(time.perf_counter() - start)
            with torch.no_grad():
                predictions = model(data.test_x).argmax(dim=1)
            losses.append(statistics.fmean(epoch_losses))
            accuracies.append((predictions == data.test_y).double().mean().item())
            bar.advance(f"loss {losses[-1]:.4f}  test accuracy {accuracies[-1]:.1%}")
    return Curve(label, losses, accuracies, predictions, step_seconds[0], statistics.median(step_seconds[1:]))


def max_loss_difference(one: Curve, other: Curve) -> float:
    """Largest difference between two loss curves over all epochs."""
    return max(abs(a - b) for a, b in zip(one.losses, other.losses, strict=True))


def report_training(curves: list[Curve]) -> list[str]:
    """Prints accuracies, agreement and times; returns what is wrong with them, one sentence each."""
    reference = curves[-1]
    failures = []
    print(f"\n{'model':<28} {'test accuracy':>13} {'max |Δ loss|':>13} {'first step':>11} {'median step':>12}")
    for curve in curves:
        accuracy, difference = curve.accuracies[-1], max_loss_difference(curve, reference)
        shown = "reference" if curve is reference else f"{difference:.1e}"
        print(
            f"{curve.label:<28} {accuracy:>13.1%} {shown:>13} {curve.first_step_seconds:>9.2f} s"
            f" {curve.step_seconds * 1e6:>9.0f} µs"
        )
        if accuracy < MIN_ACCURACY:
            failures.append(f"{curve.label}: test accuracy {accuracy:.1%} is under {MIN_ACCURACY:.0%}")
        # Written so that a NaN fails.
        if not difference <= LOSS_TOLERANCE:
            failures.append(f"{curve.label}: the losses differ by {difference:.1e}, more than {LOSS_TOLERANCE:.0e}")
    print(f"Losses of all epochs are held to agree within {LOSS_TOLERANCE:.0e}.")
    return failures


def report_memory(result: MemoryResult) -> list[str]:
    """Prints what both products needed on top of their input; returns what is wrong with it."""
    rows, n = result.shape
    print(f"\nProduct of a float32 tensor ({rows}, {n}), {result.tensor_mib:.0f} MiB, with a ({n}, {n}) matrix:")
    for name, usage in (("square_matmul_(a, b)", result.in_place), ("torch.matmul(a, b)", result.out_of_place)):
        print(f"  {name:<22} peak memory +{usage.peak_mib:7.1f} MiB   {usage.seconds:6.2f} s")
    if not result.max_error <= result.tolerance:
        return [f"square_matmul_: off by {result.max_error:.1e}, more than {result.tolerance:.0e}"]
    if not result.in_place.peak_mib < result.out_of_place.peak_mib / 2:
        return ["square_matmul_: needed as much memory as the out-of-place product"]
    return []


def main() -> int:
    """Runs the demo; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--mebibytes", type=int, default=512, help="size of the tensor multiplied in place")
    parser.add_argument("--output", type=Path, default=Path("build/demo/digits.png"), help="where the picture goes")
    options = parser.parse_args()

    start = time.monotonic()
    data = load()
    print(f"{len(data.train_x)} digits to train on, {len(data.test_x)} to test; torch {torch.__version__}\n")
    eager = make_model(torchops.nn.Dense)
    compiled = make_model(torchops.nn.Dense)
    compiled.compile(fullgraph=True)
    reference = make_model(LinearSigmoid)
    # For layers this small, handing work to a second thread costs more than it saves.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    curves = [
        train("torchops, eager", eager, data, options.epochs),
        train("torchops, torch.compile", compiled, data, options.epochs),
        train("nn.Linear + torch.sigmoid", reference, data, options.epochs),
    ]
    failures = report_training(curves)
    torch.set_num_threads(threads)
    memory = compare_memory(options.mebibytes)
    failures += report_memory(memory)

    options.output.parent.mkdir(parents=True, exist_ok=True)
    draw(options.output, curves, data.test_x, data.test_y, memory, MIN_ACCURACY)
    print(f"\nCurves: {options.output.resolve()}   ({time.monotonic() - start:.0f} s in all)")
    for failure in failures:
        print(f"FAILED  {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

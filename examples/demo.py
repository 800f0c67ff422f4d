"""Shows what torchops saves in time and memory, and that a model with its layers learns the same.

It measures time and memory beside PyTorch's, at sizes where they differ. Then it trains a classifier of handwritten
digits three times from one seed: with `torchops.nn.Dense`, with the same layers under `torch.compile(fullgraph=True)`,
and with `nn.Linear` followed by `torch.sigmoid`. The model is too small to gain time; loss and accuracy must be the
same. The exit status is 1 if a test accuracy is under 95% or the losses do not agree.

Run it with `make demo`, or with `python examples/demo.py` where torchops, scikit-learn and matplotlib are installed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gains
import torch
from demo_figure import draw
from gains import Gain
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
    """One training run: the mean loss of each epoch, and the test accuracy after it."""

    label: str
    losses: list[float]
    accuracies: list[float]


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
    with Progress(label, epochs) as bar:
        for _ in range(epochs):
            epoch_losses = []
            order = torch.randperm(len(data.train_x), generator=shuffle)
            # A last, smaller batch would be one more shape to compile for.
            for rows in order[: len(order) // BATCH * BATCH].split(BATCH):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(data.train_x[rows]), data.train_y[rows])
                loss.backward()
                optimizer.step()
                epoch_losses.append(loss.item())
            with torch.no_grad():
                right = model(data.test_x).argmax(dim=1) == data.test_y
            losses.append(statistics.fmean(epoch_losses))
            accuracies.append(right.double().mean().item())
            bar.advance(f"loss {losses[-1]:.4f}  test accuracy {accuracies[-1]:.1%}")
    return Curve(label, losses, accuracies)


def problems(curves: list[Curve]) -> list[str]:
    """What is wrong with the trained models, one sentence each; the last is what the others must agree with."""
    reference = curves[-1]
    found = []
    for curve in curves:
        accuracy = curve.accuracies[-1]
        if accuracy < MIN_ACCURACY:
            found.append(f"{curve.label}: test accuracy {accuracy:.1%} is under {MIN_ACCURACY:.0%}")
        difference = max(abs(a - b) for a, b in zip(curve.losses, reference.losses, strict=True))
        # Written so that a NaN fails.
        if not difference <= LOSS_TOLERANCE:
            found.append(f"{curve.label}: the losses differ by {difference:.1e}, more than {LOSS_TOLERANCE:.0e}")
    return found


def report(measured: list[Gain]) -> None:
    """Prints the tables of times and peaks."""
    for gain in measured:
        print(f"\n{gain.title}")
        for way in gain.ways:
            peak = "" if way.peak_mib is None else f"   {way.peak_mib:7.1f} MiB"
            print(f"  {way.label:<34} {way.seconds * 1e3:9.3f} ms   {way.ratio:5.2f}x{peak}")
    print("\nEach line has the median time of a warm call, its ratio to the first line's time (the median over")
    print("interleaved rounds), and the most memory that a call takes beside its arguments.")


def main() -> int:
    """Runs the demo; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--output", type=Path, default=Path("build/demo/gains.png"), help="where the picture goes")
    options = parser.parse_args()

    start = time.monotonic()
    measured = gains.measure()
    report(measured)

    data = load()
    print(f"\n{len(data.train_x)} handwritten digits to train on, {len(data.test_x)} to test")
    compiled = make_model(torchops.nn.Dense)
    compiled.compile(fullgraph=True)
    # For layers this small, handing work to a second thread costs more than it saves.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    curves = [
        train("torchops, eager", make_model(torchops.nn.Dense), data, options.epochs),
        train("torchops, torch.compile", compiled, data, options.epochs),
        train("nn.Linear + torch.sigmoid", make_model(LinearSigmoid), data, options.epochs),
    ]
    torch.set_num_threads(threads)
    failures = problems(curves)
    if not failures:
        print(f"All three learn the same: losses agree within {LOSS_TOLERANCE:.0e} in every epoch.")

    options.output.parent.mkdir(parents=True, exist_ok=True)
    draw(options.output, measured, curves)
    print(f"\nPicture: {options.output.resolve()}   ({time.monotonic() - start:.0f} s in all)")
    for failure in failures:
        print(f"FAILED  {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

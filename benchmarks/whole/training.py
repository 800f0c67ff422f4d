"""A training step: the forward with its losses, and the backward pass.

The variants are copies of one model. They share its parameters, and so its gradients, to which every step adds; a round
measures each of them once. All steps draw the same random numbers, so their gradients can be compared.
"""

from __future__ import annotations

import argparse
import copy
import gc
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ..peak_memory import Peak, supported
from ..progress import Progress
from . import deviations
from .frame import Subject, Trained, cast, settings
from .measure import prepared

Gradients = dict[str, Tensor]


def run(subject: Subject, precision: str, mark: Callable[[], None] = lambda: None) -> Tensor:
    """One step; its loss. As in Lightning, autocast ends before the backward pass. Calls `mark` before, between and
    after the two."""
    package = subject.package
    assert isinstance(package, Trained)
    with torch.no_grad():
        for parameter in subject.model.parameters():
            parameter.mul_(1)  # an optimizer changes them, so nothing that was prepared from them may be kept
    torch.manual_seed(2)
    with settings(precision, subject.device):
        mark()
        with cast(precision, subject.device):
            loss = package.loss(subject.model, dict(subject.features), subject.sizes)
        mark()
        loss.backward()
        mark()
    return loss.detach()


def measured(subject: Subject, options: argparse.Namespace, document: dict[str, Any], progress: Progress) -> None:
    """What each variant takes, and how far its gradients are from those of the released model in float32."""
    judge = None
    progress.case("float32" if not options.no_deviations else options.package)
    progress.state("the first step")
    if options.no_deviations:
        run(subject, options.precision)
    else:
        judge = Judge(subject)
    progress.finished()
    parameters = [*subject.model.parameters()]
    document["parameters, bytes"] = sum(p.nbytes for p in parameters)
    document["gradients, bytes"] = sum(p.grad.nbytes for p in parameters if p.grad is not None)
    shared = {id(p): p for p in parameters}
    subjects = {v: subject._replace(model=copy.deepcopy(subject.model, dict(shared))) for v in options.variants}
    results: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        for variant, one in subjects.items():
            progress.case(variant)
            before = _allocated(one.device)
            stack.enter_context(prepared(one, variant, options.backend, document, progress))
            results[variant] = _started(one, options.precision, before, progress)
        for i in range(options.rounds):
            for variant, one in subjects.items():
                progress.case(variant)
                progress.state(f"round {i + 1} of {options.rounds}")
                for name, seconds in _timed(one, options.precision).items():
                    results[variant][name].append(seconds)
        for variant, one in subjects.items():
            result = results[variant]
            result["parts, s"] = {part: median(result[f"{part}, s"]) for part in ("forward", "backward")}
            # Compiled layers draw other random numbers.
            if judge is not None and variant != "compiled":
                progress.state("deviations")
                result["deviations"] = judge.deviations(one, options.precision)
            progress.finished()
    document["variants"] = results


def _started(subject: Subject, precision: str, before: int | None, progress: Progress) -> dict[str, Any]:
    """The first call, and the peak of the second beyond the parameters, the gradients and the features."""
    progress.state("first call")
    start = time.perf_counter()
    run(subject, precision)
    _wait(subject.device)
    result: dict[str, Any] = {"first call, s": time.perf_counter() - start}
    if before is not None:
        progress.state("memory")
        gc.collect()
        peak = Peak(subject.device)
        run(subject, precision)
        result["peak beyond, bytes"] = max(0, peak.total() - before)
    return result | {"seconds": [], "forward, s": [], "backward, s": []}


def _allocated(device: torch.device) -> int | None:
    gc.collect()
    return Peak(device).before if supported(device) else None


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _timed(subject: Subject, precision: str) -> dict[str, float]:
    """Seconds of one step, and of its two parts."""
    cuda, marks = subject.device.type == "cuda", []

    def mark() -> None:
        at: Any = torch.cuda.Event(enable_timing=True) if cuda else time.perf_counter()
        if cuda:
            at.record()
        marks.append(at)

    _wait(subject.device)
    run(subject, precision, mark)
    _wait(subject.device)
    start, middle, end = marks

    def seconds(since: Any, until: Any) -> float:
        return since.elapsed_time(until) / 1e3 if cuda else until - since

    return {
        "seconds": seconds(start, end),
        "forward, s": seconds(start, middle),
        "backward, s": seconds(middle, end),
    }


class Judge:
    """Holds loss and gradients of a subject in float32."""

    def __init__(self, subject: Subject) -> None:
        self._loss, gradients = _differentiated(subject, "float32")
        self._gradients = {name: gradient.to("cpu", copy=True) for name, gradient in gradients.items()}
        self._parts = [name for name, _ in subject.model.named_children()]

    def deviations(self, subject: Subject, precision: str) -> dict[str, dict[str, float]]:
        """Of the loss, of all gradients together, and of those of each child of the model."""
        loss, gradients = _differentiated(subject, precision)
        found = {"loss": deviations.of(loss, self._loss), "all gradients": self._of(gradients, "")}
        parts = {f"gradients of {part}": self._of(gradients, f"{part}.") for part in self._parts}
        return found | {name: far for name, far in parts.items() if far["of"]}

    def _of(self, gradients: Gradients, prefix: str) -> dict[str, float]:
        names = [name for name in dict.fromkeys([*self._gradients, *gradients]) if name.startswith(prefix)]
        none = torch.zeros(())
        return _distance((gradients.get(name, none), self._gradients.get(name, none)) for name in names)


def _differentiated(subject: Subject, precision: str) -> tuple[Tensor, Gradients]:
    subject.model.zero_grad(set_to_none=True)
    loss = run(subject, precision)
    return loss, {name: p.grad for name, p in subject.model.named_parameters() if p.grad is not None}


def _distance(pairs: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """As `deviations.of`, of all tensors together."""
    far, size, greatest, of = 0.0, 0.0, 0.0, 0.0
    for got, exact in pairs:
        there = exact.to(got.device).double()
        difference = got.double() - there
        far += difference.square().sum().item()
        size += there.square().sum().item()
        greatest = max(greatest, difference.abs().max().item())
        of = max(of, there.abs().max().item())
    return {"norm": (far / size) ** 0.5 if size else 0.0, "greatest": greatest, "of": of}

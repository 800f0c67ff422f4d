"""Time, memory and kernels of a prediction, split by part and class."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch

import torchops

from ..progress import Progress
from .clock import Clock
from .frame import Subject

SHORT = {"recycling": 0, "steps": 3}  # what the profiler sees: one pass of the trunk and three steps


def classes(subject: Subject) -> dict[str, str]:
    """The class of every module, by name."""
    return {name: type(module).__name__ for name, module in subject.model.named_modules(remove_duplicate=False)}


def measured(
    subject: Subject, precision: str, rounds: int, kernels: bool, kinds: Mapping[str, str], progress: Progress
) -> dict[str, Any]:
    """What one variant of the model takes, by part and, with `kinds`, by the classes that these give the modules."""
    cuda = subject.device.type == "cuda"
    progress.state("first call")
    start = time.perf_counter()
    _run(subject, precision, **_least(subject))
    result: dict[str, Any] = {"first call, s": time.perf_counter() - start}
    held = torch.cuda.memory_allocated() if cuda else None
    progress.state("parts")
    clock = Clock(subject, memory=True)
    try:
        _run(subject, precision)
    finally:
        seconds = clock.finish()
    parts: Counter[str] = Counter()
    for (part, _), value in seconds.items():
        parts[part] += value
    result |= {"parts, s": dict(parts.most_common()), "peak of parts, bytes": dict(clock.peaks)}
    result |= {"peak, bytes": max(clock.peaks.values(), default=None), "held, bytes": held}
    result["seconds"] = [sum(parts.values())]
    for _ in range(rounds):
        progress.state("the whole again")
        start = time.perf_counter()
        _run(subject, precision)
        result["seconds"].append(time.perf_counter() - start)
    if kinds:
        progress.state("classes")
        clock = Clock(subject, kinds)
        try:
            _run(subject, precision)
        finally:
            seconds = clock.finish()
        result["classes, s"] = {"|".join(owner): value for owner, value in seconds.most_common()}
    if kernels and cuda:
        progress.state("kernels")
        result["kernels"] = _kernels(subject, precision, kinds)
    return result


def _run(subject: Subject, precision: str, **changed: int) -> None:
    subject.run(precision, **changed)
    if subject.device.type == "cuda":
        torch.cuda.synchronize()


def _least(subject: Subject) -> dict[str, int]:
    return {"recycling": 0, "steps": min(2, subject.sizes.steps)}


def _kernels(subject: Subject, precision: str, kinds: Mapping[str, str]) -> dict[str, Any]:
    """How long the GPU is busy, by part and class, and its longest kernels; beside what elapses without the profiler,
    which is the host's time where that is more."""
    short = SHORT | {"steps": min(SHORT["steps"], subject.sizes.steps)}
    wall: Counter[str] = Counter()
    clock = Clock(subject)
    _run(subject, precision, **short)
    for (part, _), value in clock.finish().items():
        wall[part] += value
    clock = Clock(subject, kinds, ranges=True)
    with torch.profiler.profile() as profiler:
        _run(subject, precision, **short)
    clock.finish()
    busy: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    by: Counter[str] = Counter()
    longest: Counter[str] = Counter()
    for event in profiler.events() or ():
        owner: Any = event
        while owner is not None and not owner.name.startswith("in:"):
            owner = owner.cpu_parent
        where = "(rest)|(rest)" if owner is None else owner.name[3:]
        for kernel in event.kernels if owner is not event else ():
            seconds = kernel.duration / 1e6
            busy[where.split("|")[0]] += seconds
            launches[where.split("|")[0]] += 1
            by[where] += seconds
            longest[kernel.name[:120]] += seconds
    return {
        "of": short,
        "elapsed, s": dict(wall),
        "busy, s": dict(busy),
        "launches": dict(launches),
        "classes, s": dict(by.most_common()),
        "longest, s": dict(longest.most_common(30)),
    }


def replaced(subject: Subject, diffusion_dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Calls `replace`; what it did, by name without numbers, and how long it took."""
    kinds = classes(subject)
    start = time.perf_counter()
    found = torchops.replace(subject.model, diffusion_dtype=diffusion_dtype)
    seconds = time.perf_counter() - start

    def counted(names: Any) -> dict[str, int]:
        return dict(sorted(Counter(re.sub(r"\b\d+\b", "*", name) for name in names).items()))

    return {
        "seconds": seconds,
        "replaced": counted(f"{name} {kinds[name]}" for name in found.replaced),
        "left": counted(f"{name} {kinds[name]}: {why}" for name, why in found.left.items()),
        "shares": [asdict(share) for share in found.shares],
    }


@contextmanager
def prepared(
    subject: Subject, variant: str, backend: str, document: dict[str, Any], progress: Progress
) -> Iterator[None]:
    """The model as a variant wants it. What `replace` does is not undone."""
    compiled = []
    if variant.startswith("replaced"):
        progress.state("replace")
        done = replaced(subject, torch.bfloat16 if variant == "replaced-16" else None)
        document.setdefault("replace", done)
    elif variant == "compiled":
        compiled = [
            layer for name in subject.package.compiled for layer in subject.model.get_submodule(name).children()
        ]
        for layer in compiled:
            layer.compile(dynamic=False, backend=backend)
    try:
        yield
    finally:
        for layer in compiled:
            layer._compiled_call_impl = None
        if compiled:
            torch._dynamo.reset()

"""Splits the time of a forward between the parts of a model and the classes of its modules."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from torchops.convert.module import Parameters
from torchops.convert.step_graph import StepGraph

from ..peak_memory import Peak
from .frame import Subject

REST = "(rest)"
Owner = tuple[str, str]  # a part and a class


class Clock:
    """Attributes the time between two marks to the innermost module entered, and peak memory to its part.

    Args:
        subject: whose modules to mark, until `finish`.
        kinds: the classes by name of the modules to mark besides the parts.
        memory: reads peak memory of CUDA at each mark.
        ranges: marks also in the profiler's trace.
    """

    def __init__(
        self, subject: Subject, kinds: Mapping[str, str] | None = None, *, memory: bool = False, ranges: bool = False
    ) -> None:
        kinds = kinds or {}
        self._cuda, self._ranges = subject.device.type == "cuda", ranges
        self._memory, self._device = memory and self._cuda, subject.device
        if self._memory:
            self._peak = Peak(self._device)
        self._stack: list[Owner] = [(REST, type(subject.model).__name__)]
        self._open: list[AbstractContextManager[Any]] = []
        self._marks: list[tuple[Any, Owner]] = []
        self.peaks: Counter[str] = Counter()
        self._undo: list[Callable[[], Any]] = []
        self._mark_modules(subject, kinds)
        self._mark()

    def _mark_modules(self, subject: Subject, kinds: Mapping[str, str]) -> None:
        package, of = subject.package, {}
        patched: set[type[nn.Module]] = set()
        if package.sampler:
            owner, _, sample = package.sampler.rpartition(".")
            sampler = subject.model.get_submodule(owner)
            sampled = kinds.get(owner, type(sampler).__name__)
            vars(sampler)[sample] = self._wrapped(getattr(sampler, sample), "sampling", lambda _: sampled)
            self._undo.append(lambda: vars(sampler).pop(sample))
        for name, module in _callable(subject.model):
            part, kind = name if name in package.parts else None, kinds.get(name, type(module).__name__)
            inner = name in kinds and type(module).__module__.split(".")[0] in (package.root, "torchops")
            if part is None and inner and hasattr(type(module), "update_"):
                # A hook would change how the layer calls it.
                of[id(module)] = kind
                patched.add(type(module))
            elif part or (inner and not isinstance(module, nn.Linear) and "Norm" not in kind and "Linear" not in kind):
                enter = module.register_forward_pre_hook(lambda *_, part=part, kind=kind: self._push(part, kind))
                leave = module.register_forward_hook(lambda *_: self._pop())
                self._undo += [enter.remove, leave.remove]
        for new in patched:
            for method in ("forward", "updated", "update_"):
                old, own = getattr(new, method), method in vars(new)
                setattr(new, method, self._wrapped(old, None, lambda module: of.get(id(module))))
                undo: Any = (
                    (lambda n=new, m=method, o=old: setattr(n, m, o))
                    if own
                    else (lambda n=new, m=method: delattr(n, m))
                )
                self._undo.append(undo)

    def _mark(self) -> None:
        if self._memory:
            part = self._marks[-1][1][0] if self._marks else REST
            self.peaks[part] = max(self.peaks[part], self._peak.total())
            self._peak = Peak(self._device)
        at: Any = torch.cuda.Event(enable_timing=True) if self._cuda else time.perf_counter()
        if self._cuda:
            at.record()
        self._marks.append((at, self._stack[-1]))

    def _push(self, part: str | None, kind: str) -> None:
        self._stack.append((part or self._stack[-1][0], kind))
        name = "in:" + "|".join(self._stack[-1])
        self._open.append(torch.profiler.record_function(name) if self._ranges else nullcontext())
        self._open[-1].__enter__()
        self._mark()

    def _pop(self) -> None:
        self._stack.pop()
        self._open.pop().__exit__(None, None, None)
        self._mark()

    def _wrapped(self, function: Callable[..., Any], part: str | None, kind: Callable[[Any], str | None]) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            of = kind(args[0] if args else None)
            if of is None:  # of the same class as one that is marked
                return function(*args, **kwargs)
            self._push(part, of)
            with ExitStack() as stack:
                stack.callback(self._pop)
                return function(*args, **kwargs)

        return call

    def finish(self) -> Counter[Owner]:
        """Removes the marks; seconds by part and class."""
        self._mark()
        for undo in reversed(self._undo):
            undo()
        if self._cuda:
            torch.cuda.synchronize()
        seconds: Counter[Owner] = Counter()
        for (start, owner), (end, _) in pairwise(self._marks):
            seconds[owner] += start.elapsed_time(end) / 1e3 if self._cuda else end - start
        return seconds


def _callable(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that are called, and may have hooks: none that only holds parameters for an operator, and none inside
    of a step that runs as a graph, which has no calls."""
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if isinstance(module, Parameters) or module in inside:
            continue
        if isinstance(module, StepGraph):
            inside.update(child for child in module.modules() if child is not module)
        yield name, module

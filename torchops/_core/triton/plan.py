"""Plans: the launches of many Triton kernels, recorded once for tensors of given shapes.

The host side of a function with several launches depends only on shapes, strides and dtypes: views of tensors, scratch
memory, grids. So the function runs once with tensors without data, and its launches are recorded as a plan instead of
being made. For similar tensors, the plan then only puts pointers into lists of arguments, and allocates all scratch
memory at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchops._core.triton.launch import Launch, is_watched, noting, stream_of

__all__ = ["Found", "Plan", "Plans", "UnplannableError"]

_UNIT = 512  # bytes: the alignment of the CUDA caching allocator


class UnplannableError(Exception):
    """There is no plan for such tensors, for example because an operator reads or writes values."""


class _OnlyShapes(TorchDispatchMode):
    """Allows only operators that make views or empty tensors, which need not run again when the launches are
    repeated."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("empty", "empty_strided", "new_empty", "empty_like"):
            return func(*args, **(kwargs or {}))
        if func.is_view:
            made = func(*args, **(kwargs or {}))
            # An operator declared as a view may return a copy, such as reshape().
            views = made if isinstance(made, (list, tuple)) else (made,)
            if all(t.untyped_storage()._cdata == args[0].untyped_storage()._cdata for t in views):
                return made
        raise UnplannableError(str(func))


class _Step(NamedTuple):
    """A launch. The arguments in `pointers`, (index, tensor, bytes from its start, dtype), are filled in later."""

    launch: Launch
    grid: tuple[int, int, int]
    arguments: list[Any]
    pointers: list[tuple[int, int, int, torch.dtype]]


class Plan:
    """What `make` launches for tensors like these. The empty tensors of `make` become scratch memory, where tensors
    that don't exist at the same time may share a place."""

    def __init__(self, make: Callable[..., None], tensors: Sequence[Tensor | None], device: torch.device) -> None:
        self.device = device
        standing = [
            t if t is None else torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in tensors
        ]
        calls: list[Any] = []
        noting.calls, noting.device = calls, device
        try:
            with _OnlyShapes():
                make(*standing)
        finally:
            noting.calls = noting.device = None
        numbers = {t.untyped_storage()._cdata: i for i, t in enumerate(standing) if t is not None}
        offsets, self._nbytes = _offsets(calls, numbers)
        self._steps = []
        for launch, grid, args in calls:
            arguments, pointers = list(args), []
            for i, t in enumerate(args):
                if isinstance(t, Tensor):
                    arguments[i] = None
                    storage, at = t.untyped_storage()._cdata, int(t.storage_offset()) * t.element_size()
                    number = numbers.get(storage, len(tensors))
                    pointers.append((i, number, at + offsets.get(storage, 0), t.dtype))
            self._steps.append(_Step(launch, grid, arguments, pointers))
        # The compilation of each step, once all steps have run.
        self._compiled: list[tuple[Any, ...]] | None = None

    def run(self, tensors: Sequence[Tensor | None], pointers: list[int]) -> None:
        """Launches on the current stream of the device, which must be the current one. `pointers` are those of the
        tensors, 0 for None."""
        scratch = torch.empty(self._nbytes, dtype=torch.uint8, device=self.device)
        if self._compiled is None or is_watched():
            made = [step.launch(step.grid, *_arguments(step, [*tensors, scratch])) for step in self._steps]
            if all(made):
                self._compiled = [
                    (run, *step.grid, function, metadata, [*step.arguments, *step.launch.constants],
                     [pointer[:3] for pointer in step.pointers])
                    for step, (run, function, metadata) in zip(self._steps, made, strict=True)
                ]  # fmt: skip
            return
        places, stream = [*pointers, scratch.data_ptr()], stream_of(self.device)
        for run, x, y, z, function, metadata, template, unknown in self._compiled:
            arguments = template.copy()
            for i, number, offset in unknown:
                arguments[i] = places[number] + offset
            run(x, y, z, stream, function, metadata, None, None, None, *arguments)


def _arguments(step: _Step, tensors: Sequence[Tensor | None]) -> list[Any]:
    """The arguments, with one-element tensors for the pointers, since kernels only see where a tensor starts."""
    arguments = step.arguments.copy()
    for i, number, offset, dtype in step.pointers:
        t = tensors[number]
        assert t is not None
        at = t.storage_offset() * t.element_size() + offset
        storage, size = t.untyped_storage(), dtype.itemsize
        arguments[i] = torch.empty(0, dtype=dtype, device=t.device).set_(storage, at // size, (1,), (1,))
    return arguments


def _offsets(calls: list[Any], given: dict[int, int]) -> tuple[dict[int, int], int]:
    """Places all storages that are not given in a single one: their offsets, and its size in bytes. Larger storages
    come first, each at the lowest offset that is free while it is in use."""
    nbytes: dict[int, int] = {}
    used: dict[int, tuple[int, int]] = {}
    for step, (*_, args) in enumerate(calls):
        for storage in (t.untyped_storage() for t in args if isinstance(t, Tensor)):
            name = storage._cdata
            if name not in given:
                nbytes[name] = -(-storage.nbytes() // _UNIT) * _UNIT
                used[name] = used.get(name, (step, step))[0], step
    offsets: dict[int, int] = {}
    for name in sorted(nbytes, key=lambda each: -nbytes[each]):
        first, last = used[name]
        beside = [other for other in offsets if used[other][0] <= last and first <= used[other][1]]
        offset = 0
        for other in sorted(beside, key=offsets.__getitem__):
            if offset + nbytes[name] <= offsets[other]:
                break
            offset = max(offset, offsets[other] + nbytes[other])
        offsets[name] = offset
    return offsets, max((offsets[name] + nbytes[name] for name in offsets), default=0)


class Found(NamedTuple):
    """What is known about a call: its key, the pointers of its tensors, and its plan (None: not made yet, False:
    impossible)."""

    key: Any
    pointers: list[int]
    plan: Plan | bool | None


class Plans:
    """Plans by key: shapes, strides, dtypes, the device, and the alignment of pointers."""

    def __init__(self, most: int = 512) -> None:
        self._most, self._kept, self._lock = most, dict[Any, Plan | bool](), threading.Lock()

    def find(self, how: Any, tensors: Sequence[Tensor | None]) -> Found:
        key, pointers = [how], []
        for t in tensors:
            if t is None:
                pointers.append(0)
                key.append(None)
                continue
            if not t.is_cuda or t.is_nested or t.layout is not torch.strided:
                return Found(None, [], None)
            pointer = t.data_ptr()
            pointers.append(pointer)
            key += t.shape, t.stride(), t.dtype, t.device, pointer % 16
        made = tuple(key)
        return Found(made, pointers, self._kept.get(made))

    def add(
        self, found: Found, make: Callable[..., None], tensors: Sequence[Tensor | None], device: torch.device
    ) -> Plan | bool:
        """The plan of what `make` launches for these tensors, the first of which were looked up; False if it does more
        than launch kernels."""
        if found.key is None:
            return False
        plan: Plan | bool
        try:
            plan = Plan(make, tensors, device)
        except UnplannableError:
            plan = False
        with self._lock:
            if len(self._kept) >= self._most:
                self._kept.clear()
            self._kept[found.key] = plan
        return plan

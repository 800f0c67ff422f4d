"""Plans: the launches of many Triton kernels, and the operators that may replace some, recorded once for tensors of
given shapes.

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

from torchops._core.triton.launch import Call, is_watched, noting, stream_of

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


class _Place(NamedTuple):
    """Of a tensor among those of a run: the number of the one that has its memory, and where it is in there."""

    number: int
    offset: int
    """In bytes."""
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    def of(self, tensors: Sequence[Tensor | None], *, whole: bool) -> Tensor:
        """With a shape of one element, unless `whole`, since kernels only see where a tensor starts."""
        t = tensors[self.number]
        assert t is not None
        at = (t.storage_offset() * t.element_size() + self.offset) // self.dtype.itemsize
        shape, stride = (self.shape, self.stride) if whole else ((1,), (1,))
        return torch.empty(0, dtype=self.dtype, device=t.device).set_(t.untyped_storage(), at, shape, stride)


class _Arguments:
    """Arguments whose tensors are filled in when they are known."""

    def __init__(self, args: Sequence[Any], place: Callable[[Tensor], _Place]) -> None:
        self.places = [(i, place(t)) for i, t in enumerate(args) if isinstance(t, Tensor)]
        self.template = [None if isinstance(t, Tensor) else t for t in args]

    def of(self, tensors: Sequence[Tensor | None], *, whole: bool) -> list[Any]:
        made = self.template.copy()
        for i, place in self.places:
            made[i] = place.of(tensors, whole=whole)
        return made


class _Step:
    """A launch, or an operator that computes the same."""

    def __init__(self, call: Call, place: Callable[[Tensor], _Place]) -> None:
        self._launch, self._grid, self._operator = call.launch, call.grid, call.operator
        self._args, self._operands = _Arguments(call.args, place), _Arguments(call.operands, place)

    def first(self, tensors: Sequence[Tensor | None]) -> tuple[Any, ...] | None:
        """Runs it. What each later run needs: `()` for the operator, or else what `Launch` compiled. None if it has to
        run like this again."""
        if self.is_computed(tensors):
            return ()
        compiled = self.launch(tensors)
        if compiled is None:
            return None
        run, function, metadata = compiled
        template = [*self._args.template, *self._launch.constants]
        pointers = [(i, place.number, place.offset) for i, place in self._args.places]
        return run, *self._grid, function, metadata, template, pointers

    def is_computed(self, tensors: Sequence[Tensor | None]) -> bool:
        """Whether the operator has computed it."""
        return self._operator is not None and self._operator(*self._operands.of(tensors, whole=True))

    def launch(self, tensors: Sequence[Tensor | None]) -> Any:
        return self._launch(self._grid, *self._args.of(tensors, whole=False))


class Plan:
    """What `make` launches for tensors like these. The empty tensors of `make` become scratch memory, where tensors
    that don't exist at the same time may share a place."""

    def __init__(self, make: Callable[..., None], tensors: Sequence[Tensor | None], device: torch.device) -> None:
        self.device = device
        standing = [
            t if t is None else torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in tensors
        ]
        calls: list[Call] = []
        noting.calls, noting.device = calls, device
        try:
            with _OnlyShapes():
                make(*standing)
        finally:
            noting.calls = noting.device = None
        numbers = {t.untyped_storage()._cdata: i for i, t in enumerate(standing) if t is not None}
        offsets, self._nbytes = _offsets(calls, numbers)

        def place(t: Tensor) -> _Place:
            storage, at = t.untyped_storage()._cdata, int(t.storage_offset()) * t.element_size()
            number = numbers.get(storage, len(tensors))
            return _Place(number, at + offsets.get(storage, 0), t.dtype, t.shape, t.stride())

        self._steps = [_Step(call, place) for call in calls]
        # What `_Step.first` returned, once all steps have run.
        self._compiled: list[tuple[Any, ...]] | None = None

    def run(self, tensors: Sequence[Tensor | None], pointers: list[int]) -> None:
        """Launches on the current stream of the device, which must be the current one. `pointers` are those of the
        tensors, 0 for None."""
        scratch = torch.empty(self._nbytes, dtype=torch.uint8, device=self.device)
        given = [*tensors, scratch]
        if self._compiled is None or is_watched():
            compiled = [step.first(given) for step in self._steps]
            known = [each for each in compiled if each is not None]
            if len(known) == len(compiled):
                self._compiled = known
            return
        places, stream = [*pointers, scratch.data_ptr()], stream_of(self.device)
        for step, compiled_step in zip(self._steps, self._compiled, strict=True):
            if not compiled_step:
                # Its kernel may be refused at any time, by a driver without memory for example.
                if not step.is_computed(given):
                    step.launch(given)
                continue
            run, x, y, z, function, metadata, template, unknown = compiled_step
            arguments = template.copy()
            for i, number, offset in unknown:
                arguments[i] = places[number] + offset
            run(x, y, z, stream, function, metadata, None, None, None, *arguments)


def _offsets(calls: list[Call], given: dict[int, int]) -> tuple[dict[int, int], int]:
    """Places all storages that are not given in a single one: their offsets, and its size in bytes. Larger storages
    come first, each at the lowest offset that is free while it is in use."""
    nbytes: dict[int, int] = {}
    used: dict[int, tuple[int, int]] = {}
    for step, call in enumerate(calls):
        tensors = (t for t in (*call.args, *call.operands) if isinstance(t, Tensor))
        for storage in (t.untyped_storage() for t in tensors):
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

"""What a function computes from tensors that stay the same in all its calls, computed in one call and given in later
ones.

One call is recorded by operator. If all tensors that an operator reads stay, its results do. Later calls run the same
operators in the same order, so each is known by its number. Of the results that stay, only those are kept that an
operator reads whose own results change. In place of the others, later calls get tensors without memory, on the device
"meta", so what reads one unseen raises.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

# Their results depend on no value, and are there to be written to.
_FRESH = ("empty", "zeros", "ones", "full", "rand")

_modes = threading.local()


def keeps() -> bool:
    """Whether this thread is in a call of which what depends on constants alone is computed once."""
    return bool(getattr(_modes, "entered", 0))


class _Mode(TorchDispatchMode):
    """Below autograd, which is off: it compares devices, also those of tensors without memory."""

    def __init__(self) -> None:
        super().__init__()
        self._below = ExitStack()

    def __enter__(self) -> Any:
        self._below.enter_context(torch._C._AutoDispatchBelowAutograd())
        _modes.entered = getattr(_modes, "entered", 0) + 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _modes.entered -= 1
        self._below.close()


class _Place(NamedTuple):
    """Where a tensor that stays comes from: the result of a step, or given, with a step of -1."""

    of: Any  # a weak reference, since another tensor may get the same address
    step: int
    output: int


@dataclass
class _Step:
    """A call of an operator, and its results if they stay."""

    operator: Any
    results: list[Any] | None = None
    spec: Any = None
    kept: dict[int, Tensor] = field(default_factory=dict)


class Constants(_Mode):
    """Records the call within it of a function that gets the tensors `given`, which stay."""

    def __init__(self, given: Iterable[Tensor]) -> None:
        super().__init__()
        self.steps: list[_Step] = []
        self._given = list(given)
        self._places = {id(t): _Place(weakref.ref(t), -1, 0) for t in self._given}
        self._overwritten = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        places = [self._place(t) for t in tensors]
        self._overwritten |= any(self._place(t) is not None for t in _written(func, args, kwargs))
        result = func(*args, **kwargs)
        step = _Step(func)
        self.steps.append(step)
        if not places or None in places or _is_fresh(func) or func._schema.is_mutable:
            for t, place in zip(tensors, places, strict=True):
                self._keep(t, place)
            return result
        leaves, step.spec = pytree.tree_flatten(result)
        step.results = [self._result(leaf, i) for i, leaf in enumerate(leaves)]
        return result

    def _result(self, leaf: Any, output: int) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if (place := self._place(leaf)) is not None:  # an operator may return what it gets
            return place
        self._places[id(leaf)] = _Place(weakref.ref(leaf), len(self.steps) - 1, output)
        with torch.inference_mode(leaf.is_inference()):
            return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")

    def _place(self, t: Tensor) -> _Place | None:
        place = self._places.get(id(t))
        return place if place is not None and place.of() is t else None

    def _keep(self, t: Tensor, place: _Place | None) -> None:
        if place is not None and place.step >= 0:
            self.steps[place.step].kept[place.output] = t

    def finish(self, result: Any) -> int | None:
        """After the call, which gave `result`: the bytes that are kept besides those of the given tensors, or None if
        later calls cannot be within :class:`Known`, or would gain nothing."""
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._keep(leaf, self._place(leaf))
        given = {t.untyped_storage().data_ptr() for t in self._given}
        self._given, self._places = [], {}
        kept = [t.untyped_storage() for step in self.steps for t in step.kept.values()]
        if self._overwritten or not kept:
            return None
        return sum({s.data_ptr(): s.nbytes() for s in kept if s.data_ptr() not in given}.values())


class Known(_Mode):
    """A later call of the function whose :class:`Constants` these `steps` are.

    Raises:
        RuntimeError: it runs other operators than that.
    """

    def __init__(self, steps: list[_Step]) -> None:
        super().__init__()
        self._steps, self._next = steps, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        step = self._steps[self._next] if self._next < len(self._steps) else None
        self._next += 1
        if step is None or step.operator is not func:
            raise RuntimeError(f"it runs {func} where another call did not")
        if step.results is None:
            return func(*args, **(kwargs or {}))
        return pytree.tree_unflatten([self._value(step, i) for i in range(len(step.results))], step.spec)

    def _value(self, step: _Step, output: int) -> Any:
        assert step.results is not None
        result = step.kept.get(output, step.results[output])
        if isinstance(result, Tensor):
            return _renewed(result)
        if not isinstance(result, _Place):
            return result
        return result.of() if result.step < 0 else self._value(self._steps[result.step], result.output)


def _renewed(t: Tensor) -> Tensor:
    """A new object with the same memory. PyTorch marks the results of operators, such as those that are views, when
    they are returned, and cannot do so twice."""
    marks = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    with torch.inference_mode(t.is_inference()), torch.no_grad(), torch._C._ExcludeDispatchKeyGuard(marks):
        return t.detach()


def _is_fresh(func: Any) -> bool:
    name = func._schema.name.partition("::")[2]
    return name.removeprefix("new_").startswith(_FRESH)


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that a call overwrites."""
    if not func._schema.is_mutable:
        return []
    names = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    given = {**dict(zip((a.name for a in func._schema.arguments), args, strict=False)), **kwargs}
    leaves = pytree.tree_leaves([given.get(name) for name in names])
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

"""Launches of Triton kernels with less host time than ``kernel[grid](...)``.

For each launch, Triton inspects every argument, and every number of a tuple of strides, to find the matching
compilation. The properties that decide are the same in every launch, so here they are compared as a single key, and a
known compilation is launched directly. `_core/triton/plan.py` goes further, and needs no key per launch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchops._core.triton import refusal

__all__ = ["FP_FUSION", "Call", "Launch", "is_watched", "launch_unless", "noting", "stream_of"]

_MOST_KEPT = 4096  # keys; each new N adds one

FP_FUSION: dict[str, Any] = {"enable_fp_fusion": True}
"""An option of every kernel: a product and a sum are one instruction. It is Triton's default up to version 3.9, which
warns, where the option is not given, that the default will change."""


class Call(NamedTuple):
    """A launch, and the operator that may compute the same instead of it, with its arguments."""

    launch: Launch
    grid: tuple[int, int, int]
    args: tuple[Any, ...]
    operator: Callable[..., bool] | None = None
    operands: tuple[Any, ...] = ()


class _Noting(threading.local):
    calls: list[Call] | None = None
    """The launches so far, if this thread notes its launches instead of making them."""
    device: torch.device | None = None
    """The device for which it notes them."""


noting = _Noting()


class Launch:
    """A kernel with its trailing constants, called with the grid and all other arguments.

    The first call with a key goes through Triton, which compiles or finds the kernel. A failed call stores nothing; see
    `refusal.py`.
    """

    def __init__(self, kernel: Any, **options: Any) -> None:
        self._kernel, self.options = kernel, options | FP_FUSION
        self.constants = [options[name] for name in kernel.arg_names if name in options]
        # An argument is not part of the key if Triton looks only at its type, and the annotation fixes that.
        params = getattr(kernel, "params", ())  # absent from interpreted kernels
        self._keyed = [p.num for p in params if not (p.do_not_specialize and p.annotation_type) and not p.is_constexpr]
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(self, grid: tuple[int, int, int], *args: Any) -> Any:
        """Returns the compilation, (run, function, metadata); None if Triton runs the kernel in another way."""
        if noting.calls is not None:
            noting.calls.append(Call(self, grid, args))
            return None
        device = args[0].device
        key: list[Any] = [device]
        values: list[Any] = list(args)
        for i in self._keyed:
            value = args[i]
            if isinstance(value, Tensor):
                values[i] = pointer = value.data_ptr()
                key += value.dtype, pointer % 16
            else:
                key.append(value)
        made = tuple(key)
        compiled = self._compiled.get(made)
        if compiled is not None and not is_watched():
            run, function, metadata = compiled
            run(*grid, stream_of(device), function, metadata, None, None, None, *values, *self.constants)
            return compiled
        if compiled is not None:
            self._kernel[grid](*args, **self.options)
            return compiled
        compiled = refusal.compiled(lambda: self._kernel[grid](*args, **self.options))
        if not hasattr(compiled, "packed_metadata"):  # from the interpreter
            return None
        if len(self._compiled) >= _MOST_KEPT:
            self._compiled.clear()
        self._compiled[made] = known = compiled.run, compiled.function, compiled.packed_metadata
        return known


def launch_unless(
    operator: Callable[..., bool], operands: tuple[Any, ...], launch: Launch, grid: tuple[int, int, int], *args: Any
) -> None:
    """Launches, unless the operator has computed the same from its own arguments: it returns whether it has."""
    if noting.calls is not None:
        noting.calls.append(Call(launch, grid, args, operator, operands))
    elif not operator(*operands):
        launch(grid, *args)


def stream_of(device: torch.device) -> int:
    return torch._C._cuda_getCurrentRawStream(device.index)


def is_watched() -> bool:
    """Whether there are launch hooks, such as a profiler's, which only Triton itself calls."""
    runtime = _knobs().runtime
    hooks = runtime.launch_enter_hook, runtime.launch_exit_hook
    return any(hook is not None and getattr(hook, "calls", True) for hook in hooks)


@cache
def _knobs() -> Any:
    from triton import knobs

    return knobs

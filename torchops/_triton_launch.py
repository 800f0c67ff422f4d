"""Launches of kernels in Triton, which take the host less than ``kernel[grid](...)``.

At each launch Triton looks at every argument to find the compilation that fits, and at every number of a tuple of
strides. What decides is the same from launch to launch, so here it is compared as one key, and a compilation that is
known is launched directly. `_triton_plan.py` does without the keys of single launches.
"""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["Launch", "is_watched", "noting", "stream_of"]

_MOST_KEPT = 4096  # keys, of which a new N makes one


class _Noting(threading.local):
    calls: list[tuple[Launch, tuple[int, int, int], tuple[Any, ...]]] | None = None
    """Of a thread that notes its launches instead of making them: those so far."""
    device: torch.device | None = None
    """For which it does."""


noting = _Noting()


class Launch:
    """A kernel and the constants that it ends with; called with the grid and all other arguments.

    The first call with a key goes through Triton, which compiles or finds the kernel. A call that fails keeps nothing.
    """

    def __init__(self, kernel: Any, **options: Any) -> None:
        self._kernel, self.options = kernel, options
        self.constants = [options[name] for name in kernel.arg_names if name in options]
        # What Triton does not look at beyond its type, which the annotation fixes, is no part of the key.
        params = getattr(kernel, "params", ())  # interpreted kernels have none
        self._keyed = [p.num for p in params if not (p.do_not_specialize and p.annotation_type) and not p.is_constexpr]
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(self, grid: tuple[int, int, int], *args: Any) -> Any:
        """What Triton has compiled, as (run, function, metadata); None where it runs kernels otherwise."""
        if noting.calls is not None:
            noting.calls.append((self, grid, args))
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
        compiled = self._kernel[grid](*args, **self.options)
        if not hasattr(compiled, "packed_metadata"):  # of the interpreter
            return None
        if len(self._compiled) >= _MOST_KEPT:
            self._compiled.clear()
        self._compiled[made] = known = compiled.run, compiled.function, compiled.packed_metadata
        return known


def stream_of(device: torch.device) -> int:
    return torch._C._cuda_getCurrentRawStream(device.index)


def is_watched() -> bool:
    """Whether there are hooks for launches, a profiler's for example, which Triton calls itself."""
    runtime = _knobs().runtime
    hooks = runtime.launch_enter_hook, runtime.launch_exit_hook
    return any(hook is not None and getattr(hook, "calls", True) for hook in hooks)


@cache
def _knobs() -> Any:
    from triton import knobs

    return knobs

"""Launches of kernels in Triton, which take the host less than ``kernel[grid](...)``.

At each launch Triton looks at every argument to find the compilation that fits, and at every number of a tuple of
strides. What decides is the same from launch to launch, so here it is compared as one key, and a compilation that is
known is launched directly.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["Launch"]

_MOST_KEPT = 4096  # keys, of which a new N makes one


class Launch:
    """A kernel and the constants that it ends with; called with the grid and all other arguments.

    The first call with a key goes through Triton, which compiles or finds the kernel. A call that fails keeps nothing.
    """

    def __init__(self, kernel: Any, **options: Any) -> None:
        self._kernel, self.options = kernel, options
        self._constants = [options[name] for name in kernel.arg_names if name in options]
        # What Triton does not look at beyond its type, which the annotation fixes, is no part of the key.
        params = getattr(kernel, "params", ())  # interpreted kernels have none
        self._keyed = [p.num for p in params if not (p.do_not_specialize and p.annotation_type) and not p.is_constexpr]
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(self, grid: tuple[int, int, int], *args: Any) -> None:
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
        if compiled is not None and not _is_watched():
            run, function, metadata = compiled
            run(*grid, _stream(device), function, metadata, None, None, None, *values, *self._constants)
            return
        compiled = self._kernel[grid](*args, **self.options)
        if hasattr(compiled, "packed_metadata"):  # not of the interpreter
            if len(self._compiled) >= _MOST_KEPT:
                self._compiled.clear()
            self._compiled[made] = compiled.run, compiled.function, compiled.packed_metadata


def _stream(device: torch.device) -> int:
    return torch._C._cuda_getCurrentRawStream(device.index)


def _is_watched() -> bool:
    """Whether there are hooks for launches, a profiler's for example, which Triton calls itself."""
    runtime = _knobs().runtime
    hooks = runtime.launch_enter_hook, runtime.launch_exit_hook
    return any(hook is not None and getattr(hook, "calls", True) for hook in hooks)


@cache
def _knobs() -> Any:
    from triton import knobs

    return knobs

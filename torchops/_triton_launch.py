"""Launches of kernels in Triton, which take the host less than ``kernel[grid](...)``.

At each launch Triton looks at every argument to find the compilation that fits, and at every number of a tuple of
strides. What decides is the same from launch to launch, so here it is compared as one key, and a compilation that is
known is launched as Triton's compiled kernels are.
"""

from __future__ import annotations

from typing import Any

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
        keyed = [args[i] for i in self._keyed]
        key = (
            args[0].device,
            *[(a.dtype, a.data_ptr() % 16) if isinstance(a, Tensor) else a for a in keyed],
        )
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled[grid](*args, *self._constants)
            return
        compiled = self._kernel[grid](*args, **self.options)
        if hasattr(compiled, "__getitem__"):  # not of the interpreter
            if len(self._compiled) >= _MOST_KEPT:
                self._compiled.clear()
            self._compiled[key] = compiled

"""Formulas for ``torch.utils.flop_counter``, which counts the products of matrices and nothing else.

Nothing has to be called: they are registered when that module is imported, by whomever. The import itself would cost
``import torchops`` a third of a second where Triton is installed.

A formula gets the arguments of an operator with shapes in place of tensors, and returns multiplications plus additions.
Operators without one (softmax, layer_norm, sigmoid) count as nothing, as ATen's do. The gradients need none either:
their products are ATen's ``mm``, or operators that are listed here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from math import prod
from types import ModuleType
from typing import Any

import torch

__all__ = ["dense_flops", "square_matmul_flops"]

_COUNTER = "torch.utils.flop_counter"


def dense_flops(x: Sequence[int], w: Sequence[int], *args: Any, **kwargs: Any) -> int:
    """``2 * rows * in_features * out_features``.

    Example::

        >>> torchops.flops.dense_flops((10, 3), (4, 3))
        240
    """
    return 2 * prod(x) * w[0]


def square_matmul_flops(a: Sequence[int], *args: Any, **kwargs: Any) -> int:
    """``2 * rows * n * n``.

    Example::

        >>> torchops.flops.square_matmul_flops((10, 3), (3, 3))
        180
    """
    return 2 * prod(a) * a[-1]


def _register() -> None:
    from torch.utils.flop_counter import register_flop_formula

    myops = torch.ops.myops
    register_flop_formula(myops.dense)(dense_flops)
    register_flop_formula([myops.square_matmul, myops.square_matmul_])(square_matmul_flops)


class _Loader:
    """Loads a module as its own loader does, then registers the formulas."""

    def __init__(self, loader: Any, finder: _Finder):
        self.loader, self.finder = loader, finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # From here on nobody sees that another loader was there.
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        if self.finder in sys.meta_path:
            sys.meta_path.remove(self.finder)
            _register()


class _Finder:
    """Stands first on ``sys.meta_path`` until the flop counter is imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != _COUNTER:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None:
            spec.loader = _Loader(spec.loader, self)  # type: ignore[assignment]
        return spec


def install() -> None:
    """Register the formulas now if the flop counter is imported already, else as soon as it is."""
    if _COUNTER in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _Finder())

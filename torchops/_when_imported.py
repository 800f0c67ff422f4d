"""Lets torchops extend a module that is costly to import, without importing it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def when_imported(module: str, extend: Callable[[], object]) -> None:
    """Call ``extend`` once: now if ``module`` is imported already, else as soon as it is, by whomever.

    Example::

        when_imported("torch.utils.flop_counter", register)
    """
    if module in sys.modules:
        extend()
    else:
        sys.meta_path.insert(0, _Finder(module, extend))


class _Finder:
    """Stands on ``sys.meta_path`` until its module is imported. Other finders find it; only its loader is wrapped."""

    def __init__(self, module: str, extend: Callable[[], object]):
        self.module, self.extend = module, extend

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self.module:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None:
            spec.loader = _Loader(spec.loader, self)  # type: ignore[assignment]
        return spec


class _Loader:
    """Loads a module as its own loader does, then extends it."""

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
            self.finder.extend()

"""Lets torchops extend a module that is costly to import, without importing it.

PyTorch has no hook for this: a sharding rule or a FLOP formula needs the module in which it is registered. So a finder
is placed on ``sys.meta_path``. It must never cost a program the module, because ``torch.distributed.tensor`` registers
things when it is executed, and raises when it is executed again: one failure would last as long as the process, and
would take ``torch.compile`` with it. So an error of the extension is a warning. An interrupt during the extension makes
the import fail, and the next import gets the module that was executed before.
"""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def when_imported(module: str, extend: Callable[[], object]) -> None:
    """Call ``extend`` once: now if ``module`` is already imported, else as soon as anyone imports it.

    An exception in ``extend`` becomes a warning. ``KeyboardInterrupt`` and the like are raised by the import, and the
    next one calls ``extend`` again; what refuses to be registered twice stays as the interrupt left it, with a warning.
    A module has one extension: another call, as when the program reloads torchops, replaces an extension that has not
    been called yet.

    Example:

        when_imported("torch.utils.flop_counter", register)
    """
    if module in sys.modules:
        _call(module, extend)
    else:
        _finder().waiting[module] = extend


def _call(module: str, extend: Callable[[], object]) -> None:
    try:
        extend()
    except Exception as error:
        message = f"torchops could not extend {module}, which does without: {type(error).__name__}: {error}"
        try:
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        except RuntimeWarning:  # raised by a warnings filter; nothing may propagate from here
            logging.getLogger("torchops").warning(message, exc_info=error)


def _finder() -> _Finder:
    """The one finder. It goes first, because an earlier finder that serves the module would hide it from this one."""
    for finder in sys.meta_path:
        # Compared by name, because after `del sys.modules["torchops"]` and another import it comes from an earlier copy
        # of this module.
        if type(finder).__module__ == __name__ and type(finder).__name__ == _Finder.__name__:
            return finder  # type: ignore[return-value]
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    return finder


class _Finder:
    """Finds awaited modules through the other finders, and wraps their loaders until the module has been executed."""

    def __init__(self) -> None:
        self.waiting: dict[str, Callable[[], object]] = {}
        # Modules that were executed, and then dropped because their extension was interrupted.
        self.kept: dict[str, ModuleType] = {}
        self.asking = threading.local()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        # The guard is for finders that, like this one, ask all of sys.meta_path themselves.
        if name not in self.waiting or getattr(self.asking, "others", False):
            return None
        self.asking.others = True
        try:
            spec = self._ask_others(name, path, target)
        finally:
            self.asking.others = False
        # Skips old loaders without exec_module(), and packages without a file, which have no loader.
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec.loader, self)  # type: ignore[assignment]
        return spec

    def _ask_others(self, name: str, path: Any, target: Any) -> ModuleSpec | None:
        for finder in list(sys.meta_path):
            # Python also skips finders without this method.
            find_spec = getattr(finder, "find_spec", None)
            spec = find_spec(name, path, target) if find_spec is not None and finder is not self else None
            if spec is not None:
                return spec
        return None

    def executed(self, module: ModuleType) -> None:
        name = module.__name__
        try:
            extend = self.waiting.get(name)
            if extend is not None:
                _call(name, extend)
        except BaseException:
            self.kept[name] = module
            raise
        self.waiting.pop(name, None)
        if not self.waiting and self in sys.meta_path:
            sys.meta_path.remove(self)


class _Loader:
    """Executes a module with its own loader, then calls the extension. Otherwise behaves like that loader."""

    def __init__(self, loader: Any, finder: _Finder):
        self._loader, self._finder = loader, finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        kept = self._finder.kept.get(spec.name)
        return self._loader.create_module(spec) if kept is None else kept

    def exec_module(self, module: ModuleType) -> None:
        # From here on, nothing shows that another loader was there.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        if self._finder.kept.pop(module.__name__, None) is not module:
            self._loader.exec_module(module)
        self._finder.executed(module)

"""The part of :func:`torchops.replace` that handles modules of public packages."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from torch import nn

from torchops._core.report import Match
from torchops.convert.adapter import Adapter
from torchops.convert.module import Replacement
from torchops.convert.packages import adapters, unfit
from torchops.convert.registry import Declared, Turn, join, swapper
from torchops.convert.swapped import Swapped, outside
from torchops.convert.triangle import FUSED, PACKED, SEPARATE
from torchops.nn import TriangleMultiplicativeUpdate


class Search:
    """What one call of ``replace`` has found out: the results of trials, and how classes are known."""

    def __init__(self) -> None:
        self.tried: dict[Any, str | None] = {}
        self._kinds: dict[tuple[type, bool], Adapter | str | None] = {}

    def known_as(self, kind: type, layers: bool) -> Adapter | str | None:
        """The adapter of modules of a class, the reason why there is none, or None if the class is unknown."""
        if (kind, layers) not in self._kinds:
            self._kinds[kind, layers] = self._looked_up(kind, layers)
        return self._kinds[kind, layers]

    @staticmethod
    def _looked_up(kind: type, layers: bool) -> Adapter | str | None:
        found = list(adapters(layers))
        for adapter in found:
            if kind in adapter.kinds():
                return adapter
        for adapter in found:
            if issubclass(kind, adapter.kinds()):
                return f"{kind.__name__} is a subclass of one in {adapter.file}"
        return None if layers else next((reason for other, reason in unfit() if kind is other), None)


def find_replacement(module: nn.Module, search: Search, layers: bool = False) -> Replacement | str | None:
    """The replacement of `module`, the reason why there is none, or None if the module is unknown. With `layers`, looks
    for layers whose parts are replacements."""
    if isinstance(module, Replacement | TriangleMultiplicativeUpdate):
        return None
    known = search.known_as(type(module), layers)
    if isinstance(known, Adapter):
        return known.replacement(module, search.tried)
    if known is not None or layers:
        return known
    children = set(module._modules.keys())  # a list, if it is a ScriptModule
    for names in (PACKED, SEPARATE, FUSED):
        if {name for name, role in names.layers.items() if not role.endswith("?")} <= children:
            return f"{type(module).__name__} has the layers of a triangle update, but is of no known package"
    return None


@swapper(Turn.MODULES)
def replace_known_modules(model: nn.Module, declared: Declared, known: Collection[str]) -> Iterator[Match]:
    """Replaces modules of public packages: first those without known parts, then layers made of replacements."""
    search = Search()
    layers, more, told = False, True, False
    while more:
        found = {
            module: find_replacement(module, search, layers) for name, module in outside(model) if name not in known
        }
        if (own := found.get(model)) is not None and not told:
            told = True
            yield Match("", type(model).__name__, False, own if isinstance(own, str) else "it is the model itself")
        replaced = False
        gone: set[nn.Module] = set()  # inside of those that are replaced
        for name, parent in list(outside(model)):
            for key, child in () if parent in gone or isinstance(parent, Swapped) else parent._modules.items():
                new = None if child is None else found.get(child)
                if child is not None and isinstance(new, Replacement):
                    parent._modules[key] = new
                    gone.update(child.modules())
                    replaced = True
                if child is not None and new is not None:
                    reason = new if isinstance(new, str) else None
                    yield Match(join(name, key), type(child).__name__, reason is None, reason)
        # A layer may be replaced once the layers inside are.
        layers, more = True, not layers or replaced

"""The part of :func:`torchops.replace` that handles modules of public packages."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from torch import nn

from torchops._core.report import Match
from torchops.convert.module import Replacement
from torchops.convert.packages import adapters, unfit
from torchops.convert.swapped import Swapped, outside
from torchops.convert.swappers import Declared, Turn, join, swapper
from torchops.convert.triangle import FUSED, PACKED, SEPARATE
from torchops.nn import TriangleMultiplicativeUpdate


def find_replacement(module: nn.Module, tried: dict[Any, str | None], layers: bool = False) -> Replacement | str | None:
    """The replacement of `module`, the reason why there is none, or None if the module is unknown. With `layers`, looks
    for layers whose parts are replacements."""
    if isinstance(module, Replacement | TriangleMultiplicativeUpdate):
        return None
    found = list(adapters(layers))
    for adapter in found:
        if adapter.has(module):
            return adapter.replacement(module, tried)
    name = type(module).__name__
    for adapter in found:
        if adapter.derives(module):
            return f"{name} is a subclass of one in {adapter.file}"
    if layers:
        return None
    for kind, reason in unfit():
        if type(module) is kind:
            return reason
    children = set(module._modules.keys())  # a list, if it is a ScriptModule
    for names in (PACKED, SEPARATE, FUSED):
        if {name for name, role in names.layers.items() if not role.endswith("?")} <= children:
            return f"{name} has the layers of a triangle update, but is of no known package"
    return None


@swapper(Turn.MODULES)
def replace_known_modules(model: nn.Module, declared: Declared, known: Collection[str]) -> Iterator[Match]:
    """Replaces modules of public packages: first those without known parts, then layers made of replacements."""
    tried: dict[Any, str | None] = {}
    layers, more, told = False, True, False
    while more:
        found = {
            module: find_replacement(module, tried, layers) for name, module in outside(model) if name not in known
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

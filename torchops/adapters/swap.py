"""The part of :func:`torchops.nn.replace` that handles modules of public packages."""

from __future__ import annotations

from typing import Any

from torch import nn

import torchops
from torchops.adapters.module import Replacement
from torchops.adapters.triangle import FUSED, PACKED, SEPARATE
from torchops.nn.replace import Replacements, first_swapper, join


def known(module: nn.Module, tried: dict[Any, str | None], layers: bool = False) -> Replacement | str | None:
    """The replacement of `module`, the reason why there is none, or None if the module is unknown. With `layers`, looks
    for layers whose parts are replacements."""
    if isinstance(module, Replacement | torchops.nn.TriangleMultiplicativeUpdate):
        return None
    from torchops.adapters import adapters, unfit

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


@first_swapper
def replace_known_modules(model: nn.Module) -> Replacements:
    """Replaces modules of public packages: first those without known parts, then layers made of replacements."""
    tried: dict[Any, str | None] = {}
    replaced: list[str] = []
    left: dict[str, str] = {}
    layers, more = False, True
    while more:
        found = {module: known(module, tried, layers) for module in model.modules()}
        if (own := found[model]) is not None and "" not in left:
            left[""] = own if isinstance(own, str) else "it is the model itself"
        before = len(replaced)
        gone: set[nn.Module] = set()  # inside of those that are replaced
        for name, parent in list(model.named_modules()):
            for key, child in () if parent in gone else parent._modules.items():
                new = None if child is None else found.get(child)
                if child is not None and isinstance(new, Replacement):
                    parent._modules[key] = new
                    replaced.append(join(name, key))
                    left.pop(join(name, key), None)
                    gone.update(child.modules())
                elif isinstance(new, str):
                    left[join(name, key)] = new
        # A layer may be replaced once the layers inside are.
        layers, more = True, not layers or len(replaced) > before
    return Replacements(tuple(replaced), left)

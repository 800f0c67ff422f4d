"""The part of :func:`torchops.replace` that names modules whose source speaks of a gate, which it does not follow."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Collection, Iterator

from torch import nn

from torchops._core.report import Match
from torchops.convert.swapped import Swapped, outside
from torchops.convert.swappers import Declared, Turn, join, swapper

_ACTIVATIONS = {"sigmoid", "expit", "silu", "siluactivation", "swish", "glu", "swiglu"}


@swapper(Turn.SOURCES)
def find_gates_in_sources(model: nn.Module, declared: Declared, known: Collection[str]) -> Iterator[Match]:
    """Replaces nothing."""
    for name, module in outside(model):
        kind = type(module)
        if name in known or _is_of_torch(kind) or isinstance(module, Swapped) or not _owns_a_linear_layer(module):
            continue
        if any(join(name, key) in known for key in module._modules):
            continue
        parts = (type(part).__name__ for part in module.children())
        said = next((part for part in parts if part.lower() in _ACTIVATIONS), None) or _called(kind)  # type: ignore[arg-type]
        if said is not None:
            reason = f"its forward may gate by {said}, which only a compiler follows: "
            yield Match(name, kind.__name__, False, reason + 'compile it with backend="torchops", or declare its class')


def _is_of_torch(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("torch", "torchops")


def _owns_a_linear_layer(module: nn.Module) -> bool:
    """Itself, or in containers of PyTorch."""
    return any(
        isinstance(part, nn.Linear)
        or (isinstance(part, nn.Sequential | nn.ModuleList | nn.ModuleDict) and _owns_a_linear_layer(part))
        for part in module.children()
    )


@functools.cache  # to find the source of a class takes tens of milliseconds
def _called(kind: type) -> str | None:
    """The activation that a method of the class calls. `fully_shard` and parametrizations derive classes that have no
    source, but the class that they derive from has."""
    for base in kind.__mro__:
        if _is_of_torch(base) or not issubclass(base, nn.Module):
            continue
        try:
            methods = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body  # type: ignore[attr-defined]
        except (OSError, TypeError, SyntaxError):  # it has none, or it was edited since
            continue
        for method in methods:
            if isinstance(method, ast.FunctionDef) and method.name != "__init__":
                for node in ast.walk(method):
                    function = node.func if isinstance(node, ast.Call) else None
                    called = str(getattr(function, "attr", None) or getattr(function, "id", ""))
                    if called.lower().rstrip("_") in _ACTIVATIONS:
                        return called
    return None

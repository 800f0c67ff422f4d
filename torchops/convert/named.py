"""The part of :func:`torchops.replace` that tells of modules whose code names an activation of gates, without following
what they compute."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from types import CodeType

from torch import nn

from torchops._core.report import Match
from torchops.convert.registry import Declared, Turn, join, swapper
from torchops.convert.swapped import Swapped, outside

_ACTIVATIONS = {"sigmoid", "expit", "silu", "siluactivation", "swish", "glu", "swiglu"}


@swapper(Turn.NAMES)
def find_named_activations(model: nn.Module, declared: Declared, known: Collection[str]) -> Iterator[Match]:
    """Replaces nothing."""
    for name, module in outside(model):
        kind = type(module)
        if name in known or _is_of_torch(kind) or isinstance(module, Swapped) or not _owns_a_linear_layer(module):
            continue
        if any(join(name, key) in known for key in module._modules):
            continue
        parts = (type(part).__name__ for part in module.children())
        said = next((part for part in parts if part.lower() in _ACTIVATIONS), None) or _named(kind)
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


def _named(kind: type) -> str | None:
    """The activation that a method of the class names. `fully_shard` and parametrizations derive classes without such
    methods, but the class that they derive from has them."""
    for base in kind.__mro__:
        for name, method in {} if _is_of_torch(base) else vars(base).items():
            code = getattr(inspect.unwrap(method), "__code__", None) if callable(method) else None
            if code is not None and name != "__init__" and (found := _in_code(code)) is not None:
                return found
    return None


def _in_code(code: CodeType) -> str | None:
    inside = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    named = (name for name in code.co_names if name.lower().rstrip("_") in _ACTIVATIONS)
    return next(named, None) or next(filter(None, map(_in_code, inside)), None)

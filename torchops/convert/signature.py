"""The arguments that a released forward takes, and what they mean, as data.

Each release of a package may add keywords to its forwards, most of which choose between ways to compute the same. An
adapter lists the keywords that it knows. A keyword that it does not know is no reason to leave a module, as long as a
call may leave it out: calls that do are compared, and one that gives it another value runs the released forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

# Keywords that change no value: in which pieces something is computed, and by which kernels.
CHUNKS, KERNELS = "chunks", "kernels"

# What an adapter says of the keywords: by the name in the release, the name in the replacement's `compute`, `CHUNKS` or
# `KERNELS`.
Meanings = Mapping[str, str]

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NAMED = (*_POSITIONAL, inspect.Parameter.KEYWORD_ONLY)


class Signature(NamedTuple):
    """The arguments of one release's forward. All fields are plain values, so a module that has it can be pickled."""

    positional: tuple[str, ...]
    required: tuple[str, ...]
    defaults: dict[str, Any]
    meanings: dict[str, str]
    known: dict[str, Any]  # what `compute` gets where the call leaves an argument out

    def values(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | str:
        """The arguments of `compute` for a call; or why the released forward must run, an empty string if the call does
        not fit it, about which it then raises."""
        if len(args) > len(self.positional):
            return ""
        given = dict(zip(self.positional, args, strict=False))
        for name, value in kwargs.items():
            if name in given or not (name in self.defaults or name in self.required):
                return ""
            given[name] = value
        values = dict(self.known)
        for name, value in given.items():
            meaning = self.meanings.get(name)
            if meaning is None:
                if not _same(value, self.defaults[name]):
                    return f"{name} is not known to torchops, and not {self.defaults[name]!r}"
            elif meaning not in (CHUNKS, KERNELS):
                values[meaning] = value
        return "" if any(name not in given for name in self.required) else values

    def example(self) -> dict[str, Any]:
        """Keywords for a call in pieces, if it can be done in pieces."""
        return {name: 2 for name, meaning in self.meanings.items() if meaning == CHUNKS}

    def has(self, meaning: str) -> str | None:
        """The keyword of that meaning, if there is one."""
        return next((name for name, of in self.meanings.items() if of == meaning), None)


def arguments(kind: type[nn.Module]) -> list[inspect.Parameter]:
    """What its forward takes, without `self`."""
    return list(inspect.signature(kind.forward).parameters.values())[1:]


def understood(kind: type[nn.Module], meanings: Meanings) -> Signature | None:
    """The signature of its forward, or None if a call cannot be understood by these meanings: it must give an argument
    that has none, or may give any."""
    taken = arguments(kind)
    required = tuple(p.name for p in taken if p.default is p.empty)
    if any(p.kind not in _NAMED for p in taken) or not taken or not set(required) <= meanings.keys():
        return None
    defaults = {p.name: p.default for p in taken if p.default is not p.empty}
    found = {p.name: meanings[p.name] for p in taken if p.name in meanings}
    known = {found[n]: value for n, value in defaults.items() if n in found and found[n] not in (CHUNKS, KERNELS)}
    return Signature(tuple(p.name for p in taken if p.kind in _POSITIONAL), required, defaults, found, known)


def _same(value: Any, default: Any) -> bool:
    plain = isinstance(value, bool | int | float | str) and type(value) is type(default)
    return value is default or (plain and bool(value == default))

"""What :func:`torchops.nn.replace` did with a model, also by class and share of its parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

__all__ = ["Replacements", "Share"]


@dataclass(frozen=True)
class Share:
    """Modules of one class that met one fate.

    Attributes:
        kind: the name of the class before.
        fate: ``"replaced"``, ``"left"``, or ``"not known"`` if nothing in them looks replaceable.
        reason: why they were left.
        modules: how many.
        parameters: their share of the model's parameters, between 0 and 1. A parameter belongs to the innermost module
            that is more than a layer of PyTorch or one of its containers.
    """

    kind: str
    fate: Literal["replaced", "left", "not known"]
    reason: str
    modules: int
    parameters: float


@dataclass(frozen=True)
class Replacements:
    """What :func:`replace` did.

    Attributes:
        replaced: names of the layers that were replaced, in the order of ``model.named_modules()``.
        left: names of the layers that look replaceable but were left as they are, with the reason.
        shares: which part of the parameters that is, by class, the greatest share first. ``str(report)`` shows it as a
            table.
    """

    replaced: tuple[str, ...]
    left: Mapping[str, str]
    shares: Sequence[Share] = field(default=(), repr=False, compare=False)

    def __str__(self) -> str:
        width = max((len(share.kind) for share in self.shares), default=0)
        lines = [
            f"{share.parameters:6.1%}  {share.kind:{width}} {share.modules:4} x  {share.fate}"
            f"{share.reason and ': '}{share.reason}"
            for share in self.shares
        ]
        return "\n".join(lines) if lines else repr(self)


def shares(
    model: nn.Module, kinds: Mapping[str, str], replaced: Sequence[str], left: Mapping[str, str]
) -> tuple[Share, ...]:
    """The shares of a model after the replacement, whose modules had these classes by name before."""
    modules = dict(model.named_modules(remove_duplicate=False))
    done = set(replaced)
    owners: dict[tuple[str, str, str], tuple[set[int], int]] = {}
    seen: set[int] = set()
    total = sum(map(_size, model.parameters())) or 1
    for name, module in modules.items():
        own = [p for p in module._parameters.values() if p is not None and id(p) not in seen]
        if not own:
            continue
        seen.update(map(id, own))
        while name and name not in done and name not in left and _is_a_layer(modules[name]):
            name = name.rpartition(".")[0]
        fate = "replaced" if name in done else "left" if name in left else "not known"
        key = (kinds.get(name, type(modules[name]).__name__), fate, left.get(name, ""))
        members, size = owners.get(key, (set(), 0))
        owners[key] = (members | {id(modules[name])}, size + sum(map(_size, own)))
    found = [
        Share(kind, fate, reason, len(members), size / total)  # type: ignore[arg-type]
        for (kind, fate, reason), (members, size) in owners.items()
    ]
    return tuple(sorted(found, key=lambda share: -share.parameters))


def _is_a_layer(module: nn.Module) -> bool:
    """Whether it is a layer or a container of PyTorch, one of another kind without parts, or what an adapter has kept
    of one."""
    package = type(module).__module__.partition(".")[0]
    return package in ("torch", "torchops") or not any(module.children())


def _size(parameter: nn.Parameter) -> int:
    """Its elements, of which a lazy layer has none before its first call."""
    return 0 if nn.parameter.is_lazy(parameter) else parameter.numel()

"""What :func:`torchops.replace` or a compiler pass did with a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import nn

__all__ = ["Match", "Report", "Share"]


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
class Match:
    """What became of one place that looks replaceable.

    Attributes:
        name: of the module in the model; of a gate in a compiled graph, the line of your code.
        kind: the class of the module; of a gate in a compiled graph ``dense``, ``gate``, ``glu sigmoid`` or ``glu
            silu``.
        replaced: whether something of torchops took its place.
        reason: why not.
    """

    name: str
    kind: str
    replaced: bool
    reason: str | None = None

    def __str__(self) -> str:
        became = "replaced" if self.replaced else f"left, since {self.reason}"
        return f"{self.kind} {became}: {self.name}"


class Report(tuple[Match, ...]):
    """What became of each place that looks replaceable: a tuple of :class:`Match`.

    Attributes:
        shares: which part of the parameters that is, by class, the greatest share first, if a whole model was looked
            at. ``str(report)`` shows it as a table.
    """

    shares: tuple[Share, ...]

    def __new__(cls, matches: Iterable[Match] = (), shares: Iterable[Share] = ()) -> Report:
        report = super().__new__(cls, matches)
        report.shares = tuple(shares)
        return report

    @property
    def replaced(self) -> tuple[str, ...]:
        """The names of what was replaced."""
        return tuple(match.name for match in self if match.replaced)

    @property
    def left(self) -> dict[str, str]:
        """The names of what looks replaceable but was left as it is, with the reason."""
        return {match.name: match.reason or "" for match in self if not match.replaced}

    def __repr__(self) -> str:
        return f"Report(replaced={self.replaced}, left={self.left})"

    def __str__(self) -> str:
        width = max((len(share.kind) for share in self.shares), default=0)
        lines = [
            f"{share.parameters:6.1%}  {share.kind:{width}} {share.modules:4} x  {share.fate}"
            f"{share.reason and ': '}{share.reason}"
            for share in self.shares
        ]
        return "\n".join(lines or map(str, self)) or repr(self)


def shares(model: nn.Module, kinds: Mapping[str, str], matches: Iterable[Match]) -> tuple[Share, ...]:
    """The shares of a model after the replacement, whose modules had these classes by name before."""
    modules = dict(model.named_modules(remove_duplicate=False))
    done, left = {match.name for match in matches if match.replaced}, Report(matches).left
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

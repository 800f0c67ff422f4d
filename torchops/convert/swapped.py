"""What :func:`torchops.replace` puts in the place of a module that stays as it was inside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from torchops.nn.layers import does_more

__all__ = ["Swapped", "outside"]

_REGISTRIES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


class _Part(NamedTuple):
    """A part of a module, and what it was."""

    module: nn.Module
    kind: type[nn.Module]
    children: tuple[nn.Module | None, ...]
    tensors: int


class Swapped(nn.Module):
    """A module by its operators, as long as its layers are what they were.

    Its layers, parameters and buffers are those of the former module, in the same registries, so whatever is done to
    them reaches both. If one of them is no longer what it was (it has a hook, a ``forward`` of its own, a weight of a
    tensor subclass; another one is in its place), the former ``forward`` runs. Methods and attributes are those of the
    former module, too.

    Args:
        former: the module as it was.
        operators: a module with the parameters and buffers of `former`, under the same names.
    """

    def __init__(self, former: nn.Module, operators: nn.Module) -> None:
        super().__init__()
        held = vars(self)  # past nn.Module, which would register modules
        held.update({name: vars(former)[name] for name in _REGISTRIES})
        held.update(_former=former, _operators=operators)
        vars(operators).update({name: vars(former)[name] for name in ("_parameters", "_buffers")})
        held["_parts"] = [
            _Part(part, type(part), (*part._modules.values(),), _tensors(part)) for part in former.modules()
        ]
        named = [*former.named_parameters(remove_duplicate=False), *former.named_buffers(remove_duplicate=False)]
        paths = [name.rpartition(".")[::2] for name, _ in named]
        owners = [(former.get_submodule(path), operators.get_submodule(path), name) for path, name in paths]
        held["_apart"] = [(ours, theirs, name) for ours, theirs, name in owners if ours is not theirs]
        self.training = former.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Takes what the former forward takes."""
        held = self.__dict__
        return held["_operators"](*args, **kwargs) if self.is_unchanged() else held["_former"](*args, **kwargs)

    def is_unchanged(self) -> bool:
        """Whether the operators compute what the former forward would."""
        held = self.__dict__
        for module, kind, children, tensors in held["_parts"]:
            if type(module) is not kind or does_more(module, distributed=False) or _tensors(module) != tensors:
                return False
            if (*module._modules.values(),) != children:
                return False
        for ours, theirs, name in held["_apart"]:  # noqa: SIM110  (in each call of a forward, so a plain loop)
            if _tensor(ours, name) is not _tensor(theirs, name):
                return False
        return True

    def train(self, mode: bool = True) -> Swapped:
        """Also of what is not registered."""
        self.training = mode
        for module in (self.__dict__["_former"], self.__dict__["_operators"]):
            module.train(mode)
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_former" not in self.__dict__:  # not yet, in copies
                raise
            return getattr(self.__dict__["_former"], name)

    def _get_name(self) -> str:
        return f"Swapped {type(self.__dict__['_former']).__name__}"


def _tensors(module: nn.Module) -> int:
    """How many parameters and buffers it has itself. What is registered as None does not count."""
    count = 0
    for held in (module._parameters, module._buffers):
        for value in held.values():  # in each call of a forward, so a plain loop
            if value is not None:
                count += 1
    return count


def _tensor(module: nn.Module, name: str) -> Any:
    parameters = module._parameters
    return parameters[name] if name in parameters else module._buffers.get(name)


def outside(model: nn.Module, prefix: str = "", seen: set[nn.Module] | None = None) -> Iterator[tuple[str, nn.Module]]:
    """``model.named_modules()`` without what is inside of modules that were swapped, which is called as it was."""
    seen = set() if seen is None else seen
    if model in seen:
        return
    seen.add(model)
    yield prefix, model
    for name, child in model._modules.items():
        if child is not None and not isinstance(model, Swapped):
            yield from outside(child, f"{prefix}.{name}" if prefix else name, seen)

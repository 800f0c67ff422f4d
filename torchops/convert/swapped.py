"""What :func:`torchops.replace` puts in the place of a module that stays as it was inside."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from torchops.convert.values import is_same
from torchops.nn.layers import does_more

__all__ = ["Swapped", "outside"]

_REGISTRIES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


class _Part(NamedTuple):
    """A part of a module, and what it was."""

    module: nn.Module
    kind: type[nn.Module]
    children: tuple[nn.Module | None, ...]
    tensors: int
    attributes: tuple[tuple[str, Any], ...]


class Swapped(nn.Module):
    """A module by its operators, as long as its layers are what they were.

    Its layers, parameters and buffers are those of the former module, in the same registries, so whatever is done to
    them reaches both. If one of them is no longer what it was (it has a hook, a ``forward`` of its own, a weight of a
    tensor subclass; another one is in its place), or if an attribute has another value, the former ``forward`` runs. So
    it does in calls with more arguments than were compared. Methods and attributes are those of the former module, too.

    Args:
        former: the module as it was.
        operators: a module with the parameters and buffers of `former`, under the same names.
        compared: how many arguments, the first ones, the call had by which the two were compared.
    """

    def __init__(self, former: nn.Module, operators: nn.Module, compared: int) -> None:
        super().__init__()
        held = vars(self)  # past nn.Module, which would register modules
        held.update({name: vars(former)[name] for name in _REGISTRIES})
        held.update(_former=former, _operators=operators, _compared=compared)
        held["_arguments"] = [
            (p.name, p.kind, p.default) for p in inspect.signature(former.forward).parameters.values()
        ]
        vars(operators).update({name: vars(former)[name] for name in ("_parameters", "_buffers")})
        held["_parts"] = [
            _Part(part, type(part), (*part._modules.values(),), _tensors(part), _attributes(part))
            for part in former.modules()
        ]
        named = [*former.named_parameters(remove_duplicate=False), *former.named_buffers(remove_duplicate=False)]
        paths = [name.rpartition(".")[::2] for name, _ in named]
        owners = [(former.get_submodule(path), operators.get_submodule(path), name) for path, name in paths]
        held["_apart"] = [(ours, theirs, name) for ours, theirs, name in owners if ours is not theirs]
        self.training = former.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Takes what the former forward takes."""
        held = self.__dict__
        if self.is_unchanged():
            given: tuple[Any, ...] | None = args
            if kwargs or len(args) != held["_compared"]:
                given = self._as_compared(args, kwargs)
            if given is not None:
                return held["_operators"](*given)
        return held["_former"](*args, **kwargs)

    def _as_compared(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        """The arguments of this call as those of the one that was compared; None if it has more, or wrong ones."""
        given: list[Any] = []
        places = keywords = 0
        for i, (name, kind, default) in enumerate(self.__dict__["_arguments"]):
            if kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
                continue
            by_keyword = name in kwargs and kind is not inspect.Parameter.POSITIONAL_ONLY
            by_place = i < len(args) and kind is not inspect.Parameter.KEYWORD_ONLY
            places, keywords = places + by_place, keywords + by_keyword
            value = args[i] if by_place else kwargs[name] if by_keyword else default
            if (by_place and by_keyword) or value is inspect.Parameter.empty:
                return None
            if len(given) < self.__dict__["_compared"] and kind is not inspect.Parameter.KEYWORD_ONLY:
                given.append(value)
            elif value is not default:
                return None
        all_read = places == len(args) and keywords == len(kwargs)
        return tuple(given) if all_read and len(given) == self.__dict__["_compared"] else None

    def is_unchanged(self) -> bool:
        """Whether the operators compute what the former forward would."""
        held = self.__dict__
        for module, kind, children, tensors, attributes in held["_parts"]:
            values = module.__dict__
            for name, value in attributes:
                if not is_same(values.get(name, _MISSING), value):
                    return False
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

    def __setattr__(self, name: str, value: Any) -> None:
        held = self.__dict__
        registered = isinstance(value, (nn.Module, Tensor)) or any(name in held.get(r, ()) for r in _REGISTRIES)
        if registered or "_former" not in held or name in held or hasattr(Swapped, name):
            super().__setattr__(name, value)
        else:  # an attribute of the module that this one stands for
            setattr(held["_former"], name, value)

    def __delattr__(self, name: str) -> None:
        former = self.__dict__.get("_former")
        if former is not None and name in former.__dict__ and name not in self.__dict__:
            delattr(former, name)
        else:
            super().__delattr__(name)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_former" not in self.__dict__:  # not yet, in copies
                raise
            return getattr(self.__dict__["_former"], name)

    def _get_name(self) -> str:
        return f"Swapped {type(self.__dict__['_former']).__name__}"


_MISSING = object()
_OF_MODULES = {*nn.Module().__dict__}


def _attributes(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """What it holds besides what every module does."""
    return tuple((name, value) for name, value in module.__dict__.items() if name not in _OF_MODULES)


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

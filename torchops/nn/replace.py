"""Layers of torchops in the place of those of an existing model, found by the model's structure."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn

from .gates import Dense

__all__ = ["Replacements", "replace"]

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Replacements:
    """What :func:`replace` did.

    Attributes:
        replaced: names of the layers that are :class:`Dense` now, in the order of ``model.named_modules()``.
        left: names of the layers followed by a sigmoid that stay as they are, with the reason.
    """

    replaced: tuple[str, ...]
    left: Mapping[str, str]


def replace(model: nn.Module) -> Replacements:
    """Replaces each ``nn.Linear`` that is followed by an ``nn.Sigmoid`` in an ``nn.Sequential`` by a :class:`Dense`.

    The model is changed in place. A ``Dense`` takes over the parameters themselves, so optimizers go on, and all other
    state of its layer (training mode, ``requires_grad``, dtype, device, attributes). An ``nn.Identity`` takes the place
    of the sigmoid, so every name in the state dict stays and state dicts load both ways. Calling it again does nothing.

    A pair is left as it is, and reported, where its parts do more than their classes say or are seen from outside:

    - the linear layer or the sigmoid is of a subclass, parametrized or quantized;
    - either of them has a hook, a forward of its own or a compiled one. A hook would see other values: those before the
      sigmoid exist no longer. Hooks of the ``nn.Sequential`` and of everything else see the same values and are kept;
    - a parameter is a tensor subclass (DTensor, for one), sparse, or of a dtype or on a device that
      :func:`torchops.dense` does not compute in; or weight and bias differ in one of them;
    - the linear layer also stands in a place where no sigmoid follows it. A layer that is followed by a sigmoid
      wherever it stands is replaced by one ``Dense`` in all places;
    - the ``nn.Sequential`` is of a subclass with a forward or an iteration of its own.

    Only an ``nn.Sequential`` says what follows what; code that takes a layer out of it and calls it alone is not seen.
    :mod:`torchops.inductor` follows the computation itself and needs no such structure.

    Returns:
        What was replaced and what was left. ``model`` itself, where it is an ``nn.Linear``, is never replaced.

    Example::

        >>> model = nn.Sequential(nn.Linear(3, 4), nn.Sigmoid())
        >>> torchops.nn.replace(model)
        Replacements(replaced=('0',), left={})
        >>> model
        Sequential(
          (0): Dense(in_features=3, out_features=4, bias=True)
          (1): Identity()
        )
    """
    names = {parent: name for name, parent in model.named_modules()}
    pairs = [pair for parent in names if isinstance(parent, nn.Sequential) for pair in _pairs(parent)]
    follows = {(pair.parent, pair.linear_key) for pair in pairs}
    layers = {id(pair.linear) for pair in pairs}
    reasons: dict[int, str] = {}
    for pair in pairs:
        if reason := _reason_to_leave(pair):
            reasons.setdefault(id(pair.linear), reason)
    for parent, name in names.items():
        for key, child in parent._modules.items():
            if id(child) in layers and (parent, key) not in follows:
                reasons.setdefault(id(child), f"no sigmoid follows it as {_join(name, key)}")

    dense: dict[int, Dense] = {}
    replaced, left = [], {}
    for pair in pairs:
        name = _join(names[pair.parent], pair.linear_key)
        if reason := reasons.get(id(pair.linear)):
            left[name] = reason
            continue
        if id(pair.linear) not in dense:
            dense[id(pair.linear)] = _dense_like(pair.linear)
        pair.parent._modules[pair.linear_key] = dense[id(pair.linear)]
        pair.parent._modules[pair.sigmoid_key] = nn.Identity().train(pair.sigmoid.training)
        replaced.append(name)
    return Replacements(tuple(replaced), left)


class _Pair(NamedTuple):
    parent: nn.Sequential
    linear_key: str
    sigmoid_key: str

    @property
    def linear(self) -> nn.Linear:
        return self.parent._modules[self.linear_key]  # type: ignore[return-value]

    @property
    def sigmoid(self) -> nn.Sigmoid:
        return self.parent._modules[self.sigmoid_key]  # type: ignore[return-value]


def _pairs(parent: nn.Sequential) -> list[_Pair]:
    children = list(parent._modules.items())
    return [
        _Pair(parent, key, next_key)
        for (key, child), (next_key, following) in pairwise(children)
        if isinstance(child, nn.Linear) and not isinstance(child, Dense) and isinstance(following, nn.Sigmoid)
    ]


def _join(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key


def _reason_to_leave(pair: _Pair) -> str | None:
    parent, linear, sigmoid = pair.parent, pair.linear, pair.sigmoid
    own = any(getattr(type(parent), name) is not getattr(nn.Sequential, name) for name in ("forward", "__iter__"))
    if own or "forward" in vars(parent):
        return f"{type(parent).__name__} has a forward of its own"
    for module, plain in ((linear, nn.Linear), (sigmoid, nn.Sigmoid)):
        if type(module) is not plain:
            return f"{type(module).__name__} is not {plain.__name__} itself"
        if any(value for name, value in vars(module).items() if name.endswith("_hooks")):
            return f"{plain.__name__} has hooks"
        if "forward" in vars(module) or module._compiled_call_impl is not None:
            return f"{plain.__name__} has a forward of its own"
    for name, parameter in linear._parameters.items():
        if parameter is None:
            continue
        if type(parameter) is not nn.Parameter:
            return f"{name} is a {type(parameter).__name__}"
        if parameter.layout != torch.strided:
            return f"{name} is of {parameter.layout}"
        if parameter.dtype not in DTYPES:
            return f"{name} is of {parameter.dtype}"
        if not _has_kernel(parameter.device):
            return f"{name} is on {parameter.device}"
        if parameter.dtype != linear.weight.dtype or parameter.device != linear.weight.device:
            return f"{name} is of another dtype or device than weight"
    return None


def _has_kernel(device: torch.device) -> bool:
    key = torch._C._dispatch_key_for_device(device.type)
    return torch._C._dispatch_has_kernel_for_dispatch_key("myops::dense", key)


def _dense_like(linear: nn.Linear) -> Dense:
    """A layer with everything that `linear` holds; later changes to one do not reach the other's registries."""
    dense = Dense.__new__(Dense)
    dense.__dict__.update(
        {name: copy(value) if isinstance(value, dict) else value for name, value in vars(linear).items()}
    )
    return dense

"""Swaps layers of an existing model for layers of torchops.

:func:`replace` calls every *swapper* in turn: a function that finds one kind of layer, replaces it in place, and
reports what it replaced and what it left. `swapper` registers one. This file has what they share: whether a module or
its parameters do more than their classes say.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from copy import copy
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from .gates import Dense
from .replacements import Replacements, shares

__all__ = ["Replacements", "replace"]

_ALONE = threading.RLock()  # a forward that is traced may itself call `replace`


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """One thread at a time. Tracing and comparing change what the whole process sees: functions of torch, the default
    dtype, random states. Compilations of other threads wait, too, since torch.fx does not allow them during a trace;
    their lock comes first, because a compiler may call :func:`replace`."""
    dynamo = sys.modules.get("torch._dynamo.convert_frame")
    with getattr(dynamo, "compile_lock", contextlib.nullcontext()), _ALONE:
        yield


DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


_Layer = TypeVar("_Layer", bound=nn.Module)
Swapper = Callable[[nn.Module], Replacements]

_swappers: list[Swapper] = []
_last_swappers: list[Callable[[nn.Module, Collection[str]], Replacements]] = []


def first_swapper(function: Swapper) -> Swapper:
    """Registers ``function`` for :func:`replace`, before all others: it takes modules with the layers inside."""
    _swappers.insert(0, function)
    return function


def swapper(function: Swapper) -> Swapper:
    """Has `replace` call `function` after those that are known."""
    _swappers.append(function)
    return function


def last_swapper(
    function: Callable[[nn.Module, Collection[str]], Replacements],
) -> Callable[[nn.Module, Collection[str]], Replacements]:
    """Has `replace` call `function` after all others, with the names of what they replaced or left.

    This is for functions that change modules of any class, and must not touch those that others know and leave.
    """
    _last_swappers.append(function)
    return function


def replace(model: nn.Module) -> Replacements:
    """Replaces layers of ``model`` by layers of torchops that compute the same, with the same parameters.

    The model is changed in place. A new layer has the parameters themselves, so optimizers keep working, and all other
    state of the old layer (training mode, ``requires_grad``, dtype, device, attributes). Names in the state dict stay
    the same, and state dicts load both ways. Calling it again does nothing. It replaces

    - an ``nn.Linear`` followed by an ``nn.Sigmoid`` in an ``nn.Sequential``, by :class:`Dense` and an ``nn.Identity``;
    - an ``nn.Linear`` followed by ``nn.GLU()`` in an ``nn.Sequential``, by a layer that computes both and an
      ``nn.Identity``;
    - the forward of a module that gates by linear layers that it owns, as in ``up(x) * silu(gate(x))``,
      ``F.glu(packed(x))`` or ``v * sigmoid(gate(x))``. The new forward calls :func:`torchops.glu` or
      :func:`torchops.gate` with the parameters of these layers, and no longer the layers. The class becomes a subclass
      of the old one, so that attributes, other methods and hooks stay. ``torch.fx`` traces the forward once, so
      attributes that steer it keep the values that they have now. While one of these layers has a hook or a weight of
      a tensor subclass, or another layer is in its place, the old forward runs;
    - triangle multiplicative updates, triangle attention and transitions of the public packages that
      ``torchops.adapters`` knows, by modules with the same signature that call the operators; and layers made of
      them, which then add their updates in place in inference.

    It leaves a layer as it is, and reports it, if its parts do more than their classes say or are visible from outside:

    - it is of a subclass, parametrized or quantized;
    - it has a hook, an overridden or a compiled forward. A hook of a linear layer would see other values, since those
      before the sigmoid no longer exist. Hooks of the ``nn.Sequential`` and of everything else see the same values and
      are kept;
    - a parameter is a tensor subclass (such as a DTensor), is sparse, or has a dtype or device that the operator does
      not support; or the parameters differ in dtype or device;
    - the linear layer is also used where no sigmoid follows it. If a sigmoid follows it wherever it is used, one
      ``Dense`` replaces it in all places;
    - the ``nn.Sequential`` is of a subclass with its own forward or iteration;
    - a forward that gates cannot be traced (autocast inside it cannot), differs between training and evaluation,
      decides by the hash, text, type or identity of a value, overwrites tensors (``+=`` does), uses a layer with two
      names, changes attributes, draws random numbers, or computes something else than its replacement on a copy with
      random parameters;
    - a sigmoid of a linear layer is no factor of one product, or the activation of what looks like a gated linear unit
      computes neither a sigmoid nor a SiLU;
    - a module of a package is of no known class, has other layers, or computes something else. For each class and size,
      one module is compared with its replacement first, on a small problem with random parameters on the CPU.

    Other threads may call modules meanwhile, but not those of ``model``, and not if they draw random numbers, which may
    come twice, compile, or depend on the default dtype: what is compared sets these for the whole process. If several
    threads call ``replace``, one waits for the other.

    It does not see code that takes a layer out of a module and calls it alone. :mod:`torchops.inductor` follows the
    computation itself and needs no such structure.

    Returns:
        What was replaced and what was left; ``str`` of it is a table by class and share of the parameters. ``model``
        itself, whose name is empty, may get another forward, but stays the same object.

    Raises:
        TypeError: ``model`` is not an ``nn.Module``.

    Example:

        >>> model = nn.Sequential(nn.Linear(3, 4), nn.Sigmoid())
        >>> torchops.nn.replace(model)
        Replacements(replaced=('0',), left={})
        >>> model
        Sequential(
          (0): Dense(in_features=3, out_features=4, bias=True)
          (1): Identity()
        )
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"replace: expected model of type nn.Module, got {type(model).__name__}")
    with alone():
        kinds = {name: type(module).__name__ for name, module in model.named_modules(remove_duplicate=False)}
        order = {name: i for i, name in enumerate(kinds)}
        reports = [swap(model) for swap in _swappers]
        known = {name for report in reports for name in (*report.replaced, *report.left)}
        reports += [swap(model, known) for swap in _last_swappers]
    replaced = sorted((name for report in reports for name in report.replaced), key=order.__getitem__)
    left = {name: why for report in reports for name, why in report.left.items()}
    return Replacements(tuple(replaced), left, shares(model, kinds, replaced, left))


# --- what every swapper asks -----------------------------------------------------------------------------------------


def module_reason(module: nn.Module, plain: type[nn.Module]) -> str | None:
    """Why `module` may do more, or be seen from outside, than its being a `plain` says; None if it does not."""
    if type(module) is not plain:
        return f"{type(module).__name__} is not {plain.__name__} itself"
    if any(value for name, value in vars(module).items() if name.endswith("_hooks")):
        return f"{plain.__name__} has hooks"
    if "forward" in vars(module) or module._compiled_call_impl is not None:
        return f"{plain.__name__} has a forward of its own"
    return None


def parameters_reason(parameters: Mapping[str, nn.Parameter | None], like: str, operator: str) -> str | None:
    """Why `operator` cannot compute with these parameters, all like the one named `like`; None if it can."""
    first = parameters[like]
    assert first is not None
    for name, parameter in parameters.items():
        if parameter is None:
            continue
        if type(parameter) is not nn.Parameter:
            return f"{name} is a {type(parameter).__name__}"
        if parameter.layout != torch.strided:
            return f"{name} is of {parameter.layout}"
        if parameter.dtype not in DTYPES:
            return f"{name} is of {parameter.dtype}"
        if not has_kernel(operator, parameter.device):
            return f"{name} is on {parameter.device}"
        if parameter.dtype != first.dtype or parameter.device != first.device:
            return f"{name} is of another dtype or device than {like}"
    return None


def sequential_reason(parent: nn.Module) -> str | None:
    """Why the order of an nn.Sequential may not be that of its calls."""
    own = any(getattr(type(parent), name) is not getattr(nn.Sequential, name) for name in ("forward", "__iter__"))
    return f"{type(parent).__name__} has a forward of its own" if own or "forward" in vars(parent) else None


def like(layer: nn.Module, kind: type[_Layer]) -> _Layer:
    """A `kind` with everything that `layer` holds; later changes to one do not reach the other's registries."""
    made = kind.__new__(kind)
    made.__dict__.update(
        {name: copy(value) if isinstance(value, dict | list | set) else value for name, value in vars(layer).items()}
    )
    return made


_PLAIN = (bool, int, float, str, type(None))


def identity(module: nn.Module) -> tuple[Any, ...]:
    """All that can make modules of a class compute different things, and everything that a reason to leave one may be,
    but for the values of tensors. Modules of which it is the same are tried once for all.

    Objects other than plain values and containers count as the same only if they are one object, so the key holds as
    long as `module` does.
    """
    numbers: dict[int, int] = {}  # parts and tensors that stand in two places stand there in both modules

    def number(value: object) -> int:
        return numbers.setdefault(id(value), len(numbers))

    def tensor(value: Any) -> Any:
        if value is None or nn.parameter.is_lazy(value):
            return None if value is None else id(value)
        return number(value), type(value), value.shape, value.dtype, value.device, value.layout

    def attribute(value: Any) -> Any:
        if isinstance(value, _PLAIN):
            return type(value), value
        if isinstance(value, nn.Module):
            return identity(value)
        if isinstance(value, tuple) or type(value) is list:
            return type(value), tuple(map(attribute, value))
        if type(value) in (dict, OrderedDict):
            return type(value), tuple((attribute(k), attribute(v)) for k, v in value.items())
        return id(value)

    parts = []
    for name, part in module.named_modules(remove_duplicate=False):
        tensors = [(k, tensor(v)) for held in (part._parameters, part._buffers) for k, v in held.items()]
        others = [
            (k, attribute(v))
            for k, v in vars(part).items()
            if k not in ("_parameters", "_buffers", "_modules", "training")
            and not (isinstance(v, dict | set) and not v)
        ]
        children = tuple(name for name, child in part._modules.items() if child is None)
        parts.append((name, number(part), type(part), tuple(tensors), tuple(others), children))
    return tuple(parts)


def has_kernel(operator: str, device: torch.device) -> bool:
    """Whether an operator, by its name with the namespace, has a kernel for the device."""
    key = torch._C._dispatch_key_for_device(device.type)
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator, key)


def join(prefix: str, key: str) -> str:
    """The name of the child `key` of the module named `prefix`."""
    return f"{prefix}.{key}" if prefix else key


# --- a linear layer and the sigmoid that follows it ------------------------------------------------------------------


@swapper
def replace_sigmoids(model: nn.Module) -> Replacements:
    """Pairs of nn.Linear and nn.Sigmoid in an nn.Sequential, by Dense."""
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
                reasons.setdefault(id(child), f"no sigmoid follows it as {join(name, key)}")

    dense: dict[int, Dense] = {}
    replaced, left = [], {}
    for pair in pairs:
        name = join(names[pair.parent], pair.linear_key)
        if reason := reasons.get(id(pair.linear)):
            left[name] = reason
            continue
        if id(pair.linear) not in dense:
            dense[id(pair.linear)] = like(pair.linear, Dense)
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
        if isinstance(child, nn.Linear) and isinstance(following, nn.Sigmoid)
    ]


def _reason_to_leave(pair: _Pair) -> str | None:
    parent, linear, sigmoid = pair.parent, pair.linear, pair.sigmoid
    if reason := sequential_reason(parent):
        return reason
    for module, plain in ((linear, nn.Linear), (sigmoid, nn.Sigmoid)):
        if reason := module_reason(module, plain):
            return reason
    return parameters_reason(linear._parameters, "weight", "myops::dense")

"""Swaps layers of an existing model for layers of torchops.

:func:`replace` calls every *swapper* in turn: a function that finds one kind of layer, replaces it in place, and
reports what it replaced and what it left. `swapper` registers one. This file has what they share: whether a module or
its parameters do more than their classes say.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from copy import copy
from enum import IntEnum
from typing import Any, TypeVar

import torch
from torch import nn

from torchops._core.checks import DTYPES
from torchops._core.devices import has_kernel
from torchops._core.report import Match, Report, shares
from torchops.convert.values import PLAIN

__all__ = ["replace"]


# One thread at a time: comparing sets the default dtype and random states of the whole process. A module that is
# compared may itself call `replace`.
alone = threading.RLock()

_Layer = TypeVar("_Layer", bound=nn.Module)
Factory = Callable[[Any], "nn.Module | None"]
Example = Callable[[Any], tuple[Any, ...]]
Declared = Mapping[type[nn.Module], "Factory | tuple[Factory, Example]"]

# Each replaces one kind of layer. It gets the model, the classes that the user declares, and the names of what those
# before it replaced or left.
Swapper = Callable[[nn.Module, Declared, Collection[str]], Iterable[Match]]


class Turn(IntEnum):
    """In which order they are called: what takes modules with the layers inside comes first."""

    DECLARED = 0
    MODULES = 1
    PARTS = 2
    PAIRS = 3
    NAMES = 4


_swappers: dict[Turn, Swapper] = {}


def swapper(turn: Turn) -> Callable[[Swapper], Swapper]:
    """Registers a function for :func:`replace`."""

    def registered(function: Swapper) -> Swapper:
        _swappers[turn] = function
        return function

    return registered


class TakesDiffusionDtype:
    """A replacement in which :func:`replace` sets this dtype."""

    diffusion_dtype: torch.dtype | None = None


def replace(
    model: nn.Module, declared: Declared | None = None, *, diffusion_dtype: torch.dtype | None = None
) -> Report:
    """Replaces layers of ``model`` by layers of torchops that compute the same, with the same parameters.

    The model is changed in place. A new layer has the parameters themselves, so optimizers keep working, and all other
    state of the old layer (training mode, ``requires_grad``, dtype, device, attributes). Names in the state dict stay
    the same, and state dicts load both ways. Calling it again replaces nothing more, and sets ``diffusion_dtype``. It
    replaces what is declared:

    - an ``nn.Linear`` followed by an ``nn.Sigmoid`` or ``nn.GLU()`` in an ``nn.Sequential``, by one layer;
    - triangle multiplicative updates, triangle attention, transitions, layers of diffusion transformers and gated
      feed-forward layers of the public packages that ``torchops.convert`` knows, by modules with the same signature
      that call the operators; and layers made of them, which then add their updates in place in inference;
    - modules of the classes in ``declared``, by what you make of them.

    What a ``forward`` computes with linear layers, as in ``up(x) * silu(gate(x))``, it does not follow: a compiler
    does, with ``torch.compile(model, backend="torchops")`` or :mod:`torchops.inductor`. If a module owns linear layers
    and its methods name a sigmoid, SiLU or GLU, the report says so.

    It leaves a layer as it is, and reports it, if its parts do more than their classes say or are visible from outside:

    - it is of a subclass (as ``fully_shard`` makes one), parametrized or quantized;
    - it has a hook, an overridden or a compiled forward. A hook of a linear layer would see other values, since those
      before the sigmoid no longer exist. Hooks of the ``nn.Sequential`` and of everything else see the same values and
      are kept;
    - a parameter is a tensor subclass (such as a DTensor), is sparse, or has a dtype or device that the operator does
      not support; or the parameters differ in dtype or device;
    - the linear layer is also used where no activation follows it. If one follows it wherever it is used, one layer
      replaces it in all places;
    - the ``nn.Sequential`` is of a subclass with its own forward or iteration;
    - a module of a package has other layers, or computes something else. For each class and size, one module is
      compared with its replacement first, on a small problem with random parameters on the CPU. Those of ``declared``
      are compared in the same way, in training and in evaluation, in float32, bfloat16 and under autocast.

    Other threads may call modules meanwhile, but not those of ``model``, and not if they draw random numbers, which may
    come twice, compile, or depend on the default dtype: what is compared sets these for the whole process. If several
    threads call ``replace``, one waits for the other.

    It does not see code that takes a layer out of a module and calls it alone.

    Args:
        model: whose layers are replaced. ``model`` itself stays the same object.
        declared: for a class, a function that gets a module of just this class and returns what replaces it, or None to
            leave it. That has the module's parameters and buffers under the same names, and need not care what becomes
            of its layers later: while one has a hook, is replaced or parametrized, or has a weight of a tensor
            subclass, the former ``forward`` runs. Instead of the function, a pair with another one, which gets the
            module and returns the arguments that both are called with to compare them; otherwise, ``replace`` guesses
            them from the sizes of the layers.

        diffusion_dtype: in which replaced layers of diffusion transformers multiply and attend, torch.bfloat16 or
            torch.float16, whose numbers end at 65504. It overrides autocast there. Their parameters, layer norms, and
            what they add to, keep their dtype. None is as released, which is float32 in Boltz and BoltzGen. A later
            call sets it anew. Of a model without such layers, it changes nothing.

    Returns:
        What was replaced and what was left; ``str`` of it is a table by class and share of the parameters.

    Raises:
        TypeError: ``model`` is not an ``nn.Module``, or a key of ``declared`` no class of modules.
        ValueError: ``diffusion_dtype`` is another dtype.

    Example:

        >>> model = nn.Sequential(nn.Linear(3, 4), nn.Sigmoid())
        >>> torchops.replace(model)
        Report(replaced=('0',), left={})
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"replace: expected model of type nn.Module, got {type(model).__name__}")
    for kind in declared or {}:
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            raise TypeError(f"replace: expected classes of modules in declared, got {kind!r}")
    if diffusion_dtype not in (None, torch.bfloat16, torch.float16):
        raise ValueError(f"replace: expected diffusion_dtype bfloat16, float16 or None, got {diffusion_dtype}")
    with alone:
        kinds = {name: type(module).__name__ for name, module in model.named_modules(remove_duplicate=False)}
        order = {name: i for i, name in enumerate(kinds)}
        found: dict[str, Match] = {}
        for _, swap in sorted(_swappers.items()):
            for match in swap(model, declared or {}, frozenset(found)):
                found[match.name] = match
    for module in model.modules():
        if isinstance(module, TakesDiffusionDtype):
            module.diffusion_dtype = diffusion_dtype
    matches = sorted(found.values(), key=lambda match: order.get(match.name, len(order)))
    return Report(matches, shares(model, kinds, matches))


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
    for name, value in vars(layer).items():
        if type(value) in (dict, OrderedDict, list, set):
            made.__dict__[name] = value.copy()  # several times as fast as copy(), and a layer has a dozen registries
        else:
            made.__dict__[name] = copy(value) if isinstance(value, dict | list | set) else value
    return made


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
        if isinstance(value, PLAIN):
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


def join(prefix: str, key: str) -> str:
    """The name of the child `key` of the module named `prefix`."""
    return f"{prefix}.{key}" if prefix else key

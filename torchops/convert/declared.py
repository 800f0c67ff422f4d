"""The part of :func:`torchops.replace` that handles classes for which a replacement is declared: by the user, or here
for public packages (:mod:`torchops.convert.gated`).

What replaces a module is compared with it, on a copy with random parameters on the CPU: in training and in evaluation,
in float32 with gradients, in bfloat16, and under autocast.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

from torchops._core.checks import DTYPES
from torchops._core.devices import has_kernel
from torchops._core.report import Match
from torchops.convert.probe import compared, plain_float32, random_parameter
from torchops.convert.registry import (
    Declared,
    Example,
    Factory,
    Turn,
    alone,
    identity,
    join,
    module_reason,
    swapper,
)
from torchops.convert.swapped import Swapped, outside
from torchops.nn.layers import is_read


@swapper(Turn.DECLARED)
def replace_declared(model: nn.Module, declared: Declared, known: Collection[str]) -> Iterator[Match]:
    """Puts what the user declares in the place of each module of a class."""
    return swap_classes(model, declared, known)


def swap_classes(model: nn.Module, classes: Declared, known: Collection[str]) -> Iterator[Match]:
    """The same with other classes, in modules that are not `known`."""
    tried: dict[Any, int | str] = {}
    if (found := _found(type(model), classes)) is not None and "" not in known:
        yield Match("", type(model).__name__, False, found if isinstance(found, str) else "it is the model itself")
    swapped: dict[nn.Module, Swapped] = {}
    for name, parent in outside(model):  # which sees what is replaced on the way
        for key, child in () if isinstance(parent, Swapped) else list(parent._modules.items()):
            path = join(name, key)
            if child is None or path in known or (found := _found(type(child), classes)) is None:
                continue
            new = swapped.get(child) or (found if isinstance(found, str) else _swapped(child, *found, tried))
            if isinstance(new, Swapped):
                parent._modules[key] = swapped[child] = new
            if new is not None:
                reason = new if isinstance(new, str) else None
                yield Match(path, type(child).__name__, reason is None, reason)


def _found(kind: type, classes: Declared) -> tuple[Factory, Example | None] | str | None:
    """What is declared for a class, or why that is not for one that derives from such a class."""
    if (value := classes.get(kind)) is not None:
        return value if isinstance(value, tuple) else (value, None)
    base: type | None = next((base for base in kind.__mro__ if base in classes), None)
    return None if base is None else f"{kind.__name__} is not {base.__name__} itself"


def _swapped(
    module: nn.Module, factory: Factory, example: Example | None, tried: dict[Any, int | str]
) -> Swapped | str | None:
    """The module by what the factory makes of it, the reason why not, or None if the factory declines."""
    if reason := _reason(module):
        return reason
    try:
        new = factory(module)
    except Exception as error:  # as in the trial; other modules of the class may be replaced already
        return f"making what is to replace it {_raised(error)}"
    if new is None:
        return None
    if reason := _difference_of_tensors(module, new):
        return reason
    key = factory, identity(module)
    if key not in tried:
        tried[key] = _tried(module, factory, example)
    result = tried[key]
    return result if isinstance(result, str) else Swapped(module, new.train(module.training), result)


def _reason(module: nn.Module) -> str | None:
    """Why `module` is more than its forward and its tensors, or a part of it does more than its class says."""
    if (name := _overridden(type(module))) is not None:
        return f"{type(module).__name__} has a {name} of its own"
    for name, part in module.named_modules():
        if parametrize.is_parametrized(part):
            return f"{name or 'it'} is parametrized"
        if reason := module_reason(part, type(part)):
            return f"{name}: {reason}" if name else reason
        for kind, parameter in part._parameters.items():
            if nn.parameter.is_lazy(parameter):
                return f"{join(name, kind)} has no size yet"
            if not is_read(parameter, distributed=False):
                return f"{join(name, kind)} is a {type(parameter).__name__}"
            if parameter is not None and parameter.dtype not in DTYPES:
                return f"{join(name, kind)} is of {parameter.dtype}"
            if parameter is not None and not has_kernel("myops::glu", parameter.device):
                return f"{join(name, kind)} is on {parameter.device}"
    return None


# What `Swapped` takes from the former module, or does not need.
_TAKEN = {"forward", "train", "extra_repr", "__init__", "__new__", "__repr__", "__init_subclass__", "__class_getitem__"}


def _overridden(kind: type[nn.Module]) -> str | None:
    """A method that Python or nn.Module looks up in the class, where what takes the module's place does not have it."""
    for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        for name, value in vars(base).items():
            special = name.startswith("__") and name.endswith("__")
            if name not in _TAKEN and inspect.isroutine(value) and (special or hasattr(nn.Module, name)):
                return name
    return None


def _difference_of_tensors(module: nn.Module, new: Any) -> str | None:
    """Why what replaces a module does not have its parameters and buffers."""
    if not isinstance(new, nn.Module):
        return f"what is to replace it is a {type(new).__name__}"
    theirs, ours = (
        dict([*m.named_parameters(remove_duplicate=False), *m.named_buffers(remove_duplicate=False)])
        for m in (module, new)
    )
    for name in theirs.keys() | ours.keys():
        if theirs.get(name) is not ours.get(name):
            return f"what is to replace it has another {name}"
    return None


# --- the trial -------------------------------------------------------------------------------------------------------

_LEADING = ((2, 3), (2, 3, 3), (5,))  # a forward may need a particular number of dimensions
_MOST_GUESSES = 64


def _tried(module: nn.Module, factory: Factory, example: Example | None) -> int | str:
    """With how many arguments the call was that gave the same, or why it did not."""
    try:
        with alone, plain_float32():
            generator = torch.Generator("cpu").manual_seed(0)
            original = _copied(module, generator)
            args = _guessed(original, generator) if example is None else example(original)
            if args is None:
                return "no call of it could be guessed: declare (function, example) for its class"
            new: Any = factory(original)  # whose buffers are those after the calls that were tried
            return _difference(original, new, args) or len(args)
    except Exception as error:  # the code of the module or of its replacement may raise anything
        return f"computing it to compare {_raised(error)}"


def _raised(error: Exception) -> str:
    return f"raised {type(error).__name__}: {(str(error).splitlines() or [''])[0][:100]}"


def _copied(module: nn.Module, generator: torch.Generator) -> nn.Module:
    """A copy in float32 on the CPU, with random parameters that bfloat16 can hold, and the buffers."""

    def tensor(name: str, old: Tensor) -> Tensor:
        if isinstance(old, nn.Parameter) and old.is_floating_point():
            return random_parameter(name, old, generator).bfloat16().float()
        if old.is_meta:
            return torch.zeros(old.shape, dtype=torch.float32 if old.is_floating_point() else old.dtype, device="cpu")
        return old.detach().to("cpu", torch.float32 if old.is_floating_point() else None, copy=True)

    memo: dict[int, Any] = {}
    for name, old in (*module.named_parameters(), *module.named_buffers()):
        new = tensor(name, old)
        memo[id(old)] = nn.Parameter(new, new.is_floating_point()) if isinstance(old, nn.Parameter) else new
    return copy.deepcopy(module, memo)


def _guessed(module: nn.Module, generator: torch.Generator) -> tuple[Tensor, ...] | None:
    """Arguments that the forward accepts, of the sizes of its layers."""
    needed = [p for p in inspect.signature(module.forward).parameters.values() if p.default is p.empty]
    if not needed or any(p.kind not in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in needed):
        return None
    sizes: dict[int, None] = {}
    for parameter in module.parameters():
        sizes |= dict.fromkeys(reversed(parameter.shape))
    choices = itertools.islice(itertools.product(sizes, repeat=len(needed)), _MOST_GUESSES)
    for features, leading in itertools.product(choices, _LEADING):
        args = tuple(torch.randn((*leading, n), generator=generator, device="cpu").bfloat16().float() for n in features)
        try:
            with torch.no_grad():
                module(*args)
        except Exception:  # not this one
            continue
        return args
    return None


def _difference(original: nn.Module, new: nn.Module, args: tuple[Any, ...]) -> str | None:
    exact = {}
    for training in (True, False):
        original.train(training)
        new.train(training)
        for gradients in (True, False):
            theirs, ours = (_results(m, args, gradients) for m in (original, new))
            when = f"in {'training' if training else 'evaluation'}{'' if gradients else ', without gradients'}"
            if reason := _same_otherwise(theirs, ours, when):
                return reason
            if reason := compared({name: t for name, t in theirs.items() if isinstance(t, Tensor)}, ours, when):
                return reason
            exact[training] = theirs
    for training, half in itertools.product((True, False), (True, False)):
        for module in (original, new):
            module.train(training).to(torch.bfloat16 if half else torch.float32)
        inputs = pytree.tree_map(lambda a: a.bfloat16() if half and _is_float(a) else a, args)  # noqa: B023
        with torch.autocast("cpu", torch.bfloat16, enabled=not half):
            try:
                theirs = _results(original, inputs, False)
            except Exception:  # PyTorch may have no kernel for it
                continue
            ours = _results(new, inputs, False)
        when = "in bfloat16" if half else "under autocast"
        if reason := _same_otherwise(theirs, ours, when) or _rounded(theirs, ours, exact[training], when):
            return reason
    return None


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _results(module: nn.Module, args: tuple[Any, ...], gradients: bool) -> dict[str, Any]:
    """What a call returns, its gradients or what it makes of its arguments, the random number after it, and what it
    makes of the buffers, which are as before afterwards."""
    buffers = [(*name.rpartition(".")[::2], old, old.clone()) for name, old in module.named_buffers()]
    args = pytree.tree_map(lambda a: a.clone() if isinstance(a, Tensor) else a, args)
    inputs = {f"its argument {i}": a for i, a in enumerate(args) if gradients and _is_float(a)}
    for value in inputs.values():
        value.requires_grad_()
    torch.default_generator.manual_seed(0)
    with torch.set_grad_enabled(gradients):
        out = module(*args)
    leaves, tree = pytree.tree_flatten(out)
    results: dict[str, Any] = {f"result {i}" if i else "result": t for i, t in enumerate(leaves)}
    if gradients:
        sources = inputs | {name: p for name, p in module.named_parameters() if p.requires_grad}
        generator = torch.Generator("cpu").manual_seed(1)
        outs = [t for t in leaves if isinstance(t, Tensor) and t.requires_grad]
        cotangents = [torch.randn(t.shape, generator=generator, device="cpu") for t in outs]
        grads = torch.autograd.grad(outs, list(sources.values()), cotangents, materialize_grads=True)
        results |= {f"gradient of {name}": g for name, g in zip(sources, grads, strict=True)}
    else:
        results |= {f"argument {i} afterwards": a for i, a in enumerate(args) if isinstance(a, Tensor)}
    for path, name, old, before in buffers:
        held = module.get_submodule(path)._buffers
        results[f"buffer {path}.{name} afterwards" if path else f"buffer {name} afterwards"] = (
            None if (now := held[name]) is None else now.detach().clone()
        )
        held[name] = old
        with torch.no_grad():
            old.copy_(before)
    results |= {f"dtype of {name}": t.dtype for name, t in results.items() if isinstance(t, Tensor)}
    results |= {name: t.float() for name, t in results.items() if isinstance(t, Tensor) and not _is_float(t)}
    results["random number drawn next"] = torch.rand((), device="cpu")
    return results | {"structure": str(tree)}


def _same_otherwise(theirs: dict[str, Any], ours: dict[str, Any], when: str) -> str | None:
    """What differs besides values."""
    for name, value in theirs.items():
        if not isinstance(value, Tensor) and value != ours.get(name):
            return f"its {name} is {value}, and that of its replacement {ours.get(name)}, {when}"
        if isinstance(value, Tensor) and (name not in ours or ours[name].shape != value.shape):
            return f"its {name} is of shape {tuple(value.shape)} {when}"
    return None


def _rounded(theirs: dict[str, Any], ours: dict[str, Any], exact: dict[str, Any], when: str) -> str | None:
    """A difference that is more than rounding."""
    for name, value in theirs.items():
        if not isinstance(value, Tensor):
            continue
        judge = exact[name].double()
        error, most, norm = ((t - judge).norm().item() for t in (ours[name], value, 2 * judge))
        if not error <= 2 * most + 1e-2 * norm:
            return f"it computes something else: its {name} {when} differs by {error / (norm or 1):.1e} of its norm"
    return None

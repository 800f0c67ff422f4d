"""The part of :func:`torchops.nn.replace` that finds gates and GLUs, and replaces them by operators.

The forward of a module is traced by ``torch.fx``, with calls of its submodules kept as calls, once for training and
once for evaluation. If both graphs have the same gates, made of plain linear layers, the module gets a new forward in
which operators read the parameters of these layers. In an ``nn.Sequential``, one layer replaces a linear layer and a
GLU.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import operator
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from .gate_forms import Finder, Tracer, gated_linear, packed_linear
from .gates import Dense
from .replace import (
    Replacements,
    join,
    last_swapper,
    like,
    module_reason,
    parameters_reason,
    sequential_reason,
    swapper,
)

__all__ = ["PackedGLU"]


class _LeaveError(Exception):
    """Why a module with a gate is left as it is."""


class PackedGLU(nn.Linear):
    """An ``nn.Linear`` followed by ``nn.GLU()``, computed by one operator: :func:`torchops.glu`."""

    def forward(self, input: Tensor) -> Tensor:
        return packed_linear(input, self.weight, self.bias, "sigmoid", False)


# --- modules with another forward ------------------------------------------------------------------------------------


class _Imported(NamedTuple):
    """Stands for an imported module, which cannot be pickled."""

    name: str


class _Rewritten:
    """What classes with a rewritten forward add, so that they can be pickled."""

    _parts: tuple[type[nn.Module], str, dict[str, Any]]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _empty, self._parts, self.__dict__


def _empty(base: type[nn.Module], code: str, names: dict[str, Any]) -> nn.Module:
    made = _class(base, code, names)
    return made.__new__(made)


def _class(base: type[nn.Module], code: str, names: dict[str, Any]) -> type[nn.Module]:
    """A subclass of `base` with the method that `code` defines."""
    namespace = {
        name: importlib.import_module(value.name) if isinstance(value, _Imported) else value
        for name, value in names.items()
    }
    exec(compile(code, f"<torchops.nn.replace: {base.__name__}>", "exec"), namespace)
    body = {"forward": namespace["forward"], "__module__": base.__module__, "_parts": (base, code, names)}
    return type(base.__name__, (_Rewritten, base), body)


# --- one module ------------------------------------------------------------------------------------------------------


@last_swapper
def replace_forwards(model: nn.Module, known: Collection[str]) -> Replacements:
    """Rewrites the forwards of all modules that own gates, including the model's, except those that are `known`."""
    replaced, left = [], {}
    for name, module in model.named_modules():
        try:
            if name not in known and _may_have_gates(module) and _replace(module):
                replaced.append(name)
        except _LeaveError as reason:
            left[name] = str(reason)
    return Replacements(tuple(replaced), left)


def _may_have_gates(module: nn.Module) -> bool:
    kind = type(module)
    if isinstance(module, (_Rewritten, fx.GraphModule, torch.jit.ScriptModule)) or kind.forward is nn.Module.forward:
        return False
    if kind.__module__.split(".")[0] in ("torch", "torchops"):
        return False
    return any(isinstance(child, nn.Linear) for child in module.modules())


def _replace(module: nn.Module) -> bool:
    """Gives `module` a new forward; returns False if it has no gate. Raises `_LeaveError` with the reason not to."""
    try:
        finder, code, names = _rewritten(module)
    except _LeaveError:
        raise
    except Exception as error:  # a forward may do anything with a proxy instead of a tensor
        if _speaks_of_gates(module):
            raise _LeaveError(f"its forward cannot be traced: {str(error).splitlines()[0][:100]}") from error
        return False
    if not finder.count:
        return False
    if "forward" in vars(module) or module._compiled_call_impl is not None:
        raise _LeaveError(f"{type(module).__name__} has a forward of its own")
    _check_layers(module, finder)
    made = _class(type(module), code, names)
    _try(module, made)
    module.__class__ = made
    return True


def _rewritten(module: nn.Module) -> tuple[Finder, str, dict[str, Any]]:
    """The graph of its forward with operators, as code, which is the same for training and evaluation."""
    results = []
    for training in (True, False):
        traced = like(module, type(module))  # a copy, since it may store proxies from this call
        traced.training = training
        with _no_contexts():
            finder = Finder(module, Tracer().trace(traced))
        unread = [node.target for node in finder.graph.find_nodes(op="placeholder") if not node.users]
        finder.rewrite()
        if finder.count:
            _check_pure(module, finder.graph)
            if changed := _changed(module, traced):
                raise _LeaveError(f"its forward changes its attribute {changed}")
            if unread:
                raise _LeaveError(f"its graph does not read its argument {unread[0]}")
        code = finder.graph.python_code("self")
        names = {
            name: _Imported(value.__name__) if isinstance(value, ModuleType) else value
            for name, value in code.globals.items()
            if name in code.src
        }
        results.append((finder, code.src, names))
    if results[0][1] != results[1][1]:
        if max(finder.count for finder, _, _ in results):
            raise _LeaveError("its forward differs between training and evaluation")
        return results[0]
    finder = results[0][0]
    for node in finder.graph.nodes:
        if node.op == "get_attr" and str(node.target).startswith("_tensor_constant"):
            raise _LeaveError("its forward makes a tensor")
    return results[0]


def _changed(module: nn.Module, traced: nn.Module) -> str | None:
    """An attribute that the forward of `traced`, a copy of `module`, has set or added to."""
    before, after = vars(module), vars(traced)
    for name in sorted((before.keys() | after.keys()) - {"training"}):
        if name.startswith("_tensor_constant"):  # made by the tracer
            continue
        old, new = (_parts(held[name]) if name in held else () for held in (before, after))
        if len(old) != len(new) or any(a is not b for a, b in zip(old, new, strict=True)):
            return name
    return None


def _parts(value: Any) -> tuple[Any, ...]:
    if isinstance(value, dict):
        return (*value, *value.values())
    return tuple(value) if isinstance(value, list | set) else (value,)


_CONTEXTS = threading.Lock()  # otherwise a second thread could save the first one's replacements as originals


@contextmanager
def _no_contexts() -> Iterator[None]:
    """Raises if this thread enters a context that decides how operators compute, or what they keep, as a checkpoint
    does: the graph would not contain it."""
    grad_modes = (torch.no_grad, torch.enable_grad, torch.set_grad_enabled, torch.inference_mode)
    kinds = (torch.autocast, *grad_modes, torch.autograd.graph.saved_tensors_hooks)
    tracing = threading.get_ident()

    def refusing(enter: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def entered(context: Any) -> Any:
            if threading.get_ident() == tracing:
                raise RuntimeError(f"it enters {type(context).__name__}, which no graph shows")
            return enter(context)

        return entered

    with _CONTEXTS:
        methods = [(kind, kind.__enter__) for kind in kinds]
        try:
            for kind, method in methods:
                kind.__enter__ = refusing(method)  # type: ignore[method-assign]
            yield
        finally:
            for kind, method in methods:
                kind.__enter__ = method  # type: ignore[method-assign]


def _speaks_of_gates(module: nn.Module) -> bool:
    try:
        source = inspect.getsource(type(module).forward).lower()
    except (OSError, TypeError):
        return False
    return any(word in source for word in ("sigmoid", "silu", "glu"))


def _check_pure(module: nn.Module, graph: fx.Graph) -> None:
    for node in graph.nodes:
        target = node.target
        called = module.get_submodule(str(target)) if node.op == "call_module" else None
        name = target if isinstance(target, str) else getattr(target, "__name__", "")
        in_place = node.op == "call_method" and name.endswith("_") and not name.endswith("__")
        in_place |= node.op == "call_function" and (
            name == "setitem"
            or (name.endswith("_") and not name.endswith("__"))
            or (getattr(operator, name, None) is target and name in _IN_PLACE)
        )
        if in_place or "out" in node.kwargs or node.kwargs.get("inplace") or getattr(called, "inplace", False):
            raise _LeaveError("its forward overwrites tensors")


_IN_PLACE = {name for name in dir(operator) if name.startswith("i") and name[1:] in dir(operator)}


def _check_layers(module: nn.Module, finder: Finder) -> None:
    layers: dict[str, Any] = {name: module.get_submodule(name) for name in finder.layers}
    for name in (*layers, *finder.others):
        part = module.get_submodule(name)
        kind = next(k for k in (Dense, nn.Linear, nn.GLU, nn.Sigmoid, nn.SiLU, nn.Identity) if isinstance(part, k))
        if reason := module_reason(part, kind):
            raise _LeaveError(f"{name}: {reason}")
        while "." in name:
            name = name.rpartition(".")[0]
            if reason := module_reason(module.get_submodule(name), nn.Sequential):
                raise _LeaveError(f"{name}: {reason}")
    for name, layer in layers.items():
        if reason := parameters_reason(layer._parameters, "weight", "myops::glu"):
            raise _LeaveError(f"{name}: {reason}")
    if len({(layer.weight.dtype, layer.weight.device) for layer in layers.values()}) > 1:
        raise _LeaveError("its layers are of several dtypes or devices")
    for node in finder.graph.nodes:
        if node.target is gated_linear:
            w, wg = (layers[a.target.rpartition(".")[0]].weight.shape for a in node.args[1:3])
            if w != wg:
                raise _LeaveError("its layers are of several sizes")


# --- the trial -------------------------------------------------------------------------------------------------------


def _try(module: nn.Module, made: type[nn.Module]) -> None:
    """Compares both forwards on a copy with random parameters, in float32 on the CPU."""
    generator = torch.Generator("cpu").manual_seed(0)

    def random(shape: torch.Size) -> Tensor:
        values = torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)
        return values / max(1, shape[-1] if shape else 1) ** 0.5

    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        zeros = torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
        values = random(tensor.shape) if tensor.is_floating_point() else zeros
        memo[id(tensor)] = nn.Parameter(values) if isinstance(tensor, nn.Parameter) else values
    try:
        with torch.device("cpu"), torch.no_grad(), torch.autocast("cpu", enabled=False):
            trial = copy.deepcopy(module, memo).eval()
            for part in trial.modules():  # hooks must see the model's calls, not trials
                for registry in (value for key, value in vars(part).items() if key.endswith("_hooks")):
                    registry.clear()
            inputs, expected = _tried(
                trial, [[random(torch.Size((*s, n))) for n in _features(module)] for s in _LEADING]
            )
            trial.__class__ = made
            got = trial(*inputs)
    except Exception as error:
        raise _LeaveError(f"it could not be tried: {(str(error).splitlines() or [''])[0][:100]}") from error
    pairs = list(zip(_tensors(got), _tensors(expected), strict=False))
    if not pairs or len(_tensors(got)) != len(_tensors(expected)):
        raise _LeaveError("a trial gave other results")
    for a, b in pairs:
        if a.shape != b.shape or a.dtype != b.dtype or not torch.allclose(a, b, rtol=1e-4, atol=1e-4):
            raise _LeaveError("a trial gave other results")


# The sizes before the features. A forward may need a particular number of dimensions.
_LEADING = ((2, 3), (2, 3, 3), (5,))


def _tried(trial: nn.Module, choices: list[list[Tensor]]) -> tuple[list[Tensor], Any]:
    """The first of `choices` that the forward accepts, and its result."""
    for inputs in choices[:-1]:
        try:
            return inputs, trial(*inputs)
        except Exception:
            continue
    return choices[-1], trial(*choices[-1])


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _features(module: nn.Module) -> list[int]:
    """The number of features of each argument without a default, from the first layer that reads it."""
    graph = Tracer().trace(module)
    found = []
    for node in graph.find_nodes(op="placeholder"):
        if node.args:
            continue
        sizes = [_size(module.get_submodule(str(u.target))) for u in node.users if u.op == "call_module"]
        found.append(next(filter(None, sizes), 0))
    outs = [m.out_features for m in module.modules() if isinstance(m, nn.Linear)]
    return [n or outs[-1] for n in found]


def _size(module: nn.Module) -> int:
    if isinstance(module, nn.LayerNorm):
        return module.normalized_shape[-1]
    return module.in_features if isinstance(module, nn.Linear) else 0


# --- nn.Linear and nn.GLU in an nn.Sequential ------------------------------------------------------------------------


@swapper
def replace_glus(model: nn.Module) -> Replacements:
    """Replaces pairs of nn.Linear and nn.GLU() by PackedGLU."""
    names = {parent: name for name, parent in model.named_modules()}
    pairs = [
        (parent, key, next_key)
        for parent in names
        if isinstance(parent, nn.Sequential)
        for (key, child), (next_key, following) in pairwise(parent._modules.items())
        if isinstance(child, nn.Linear) and not isinstance(child, (Dense, PackedGLU)) and isinstance(following, nn.GLU)
    ]
    places = {(parent, key) for parent, key, _ in pairs}
    new: dict[int, nn.Module] = {}
    replaced, left = [], {}
    for parent, key, next_key in pairs:
        linear: Any = parent._modules[key]
        following: Any = parent._modules[next_key]
        elsewhere = [
            join(n, k) for p, n in names.items() for k, m in p._modules.items() if m is linear and (p, k) not in places
        ]
        reasons = (
            sequential_reason(parent),
            module_reason(linear, nn.Linear) if id(linear) not in new else None,
            module_reason(following, nn.GLU),
            f"the GLU is along dimension {following.dim}, not the last one" if following.dim != -1 else None,
            "its layer has an odd number of features" if linear.out_features % 2 else None,
            parameters_reason(linear._parameters, "weight", "myops::glu"),
            f"no GLU follows it as {elsewhere[0]}" if elsewhere else None,
        )
        if reason := next(filter(None, reasons), None):
            left[join(names[parent], key)] = reason
            continue
        parent._modules[key] = new.setdefault(id(linear), like(linear, PackedGLU))
        parent._modules[next_key] = nn.Identity().train(following.training)
        replaced.append(join(names[parent], key))
    return Replacements(tuple(replaced), left)

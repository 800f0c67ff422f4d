"""The part of :func:`torchops.nn.replace` that finds gates and GLUs, and replaces them by operators.

The forward of a module is traced by ``torch.fx``, with calls of its submodules kept as calls, once for training and
once for evaluation. If both graphs have the same gates, made of plain linear layers, the module gets a new forward in
which operators read the parameters of these layers. In an ``nn.Sequential``, one layer replaces a linear layer and a
GLU.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Collection, Sequence
from itertools import combinations, pairwise
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from .activations import activation_of
from .gate_forms import IN_PLACE, Finder, Part, Tracer, contents, gated_linear, packed_linear
from .gates import Dense
from .layers import LinearParameters, is_read
from .replace import (
    Replacements,
    identity,
    join,
    last_swapper,
    like,
    module_reason,
    parameters_reason,
    sequential_reason,
    swapper,
)
from .rewritten import LAYERS, Imported, Names, Rewritten, class_with_forward, former_class, guarded
from .tracing import copied, random_numbers_stay, traces

__all__ = ["PackedGLU"]

fx.wrap("packed_linear")


class _LeaveError(Exception):
    """Why a module with a gate is left as it is."""


class PackedGLU(LinearParameters):
    """An ``nn.Linear`` followed by ``nn.GLU()``, computed by one operator: :func:`torchops.glu`."""

    def forward(self, input: Tensor) -> Tensor:
        if not is_read(self.weight):
            return nn.functional.glu(nn.functional.linear(input, self.weight, self.bias))
        return packed_linear(input, self.weight, self.bias, "sigmoid", False)


# --- one module ------------------------------------------------------------------------------------------------------


@last_swapper
def replace_forwards(model: nn.Module, known: Collection[str]) -> Replacements:
    """Rewrites the forwards of all modules that own gates, including the model's, except those that are `known`."""
    replaced, left = [], {}
    outcomes: dict[tuple[Any, ...], type[nn.Module] | str | None] = {}
    for name, module in model.named_modules():
        try:
            if name in known or not _may_have_gates(module):
                continue
        except _LeaveError as reason:
            left[name] = str(reason)
            continue
        if (key := identity(module)) not in outcomes:
            with random_numbers_stay():
                outcomes[key] = _outcome(module)
        outcome = outcomes[key]
        if isinstance(outcome, str):
            left[name] = outcome
        elif outcome is not None:
            module.__class__ = outcome
            replaced.append(name)
    return Replacements(tuple(replaced), left)


def _outcome(module: nn.Module) -> type[nn.Module] | str | None:
    """The class with a new forward for a module, the reason why there is none, or None if it has no gate."""
    try:
        return _with_operators(module)
    except _LeaveError as reason:
        return str(reason)


def _may_have_gates(module: nn.Module) -> bool:
    kind = type(module)
    if isinstance(module, (Rewritten, fx.GraphModule, torch.jit.ScriptModule)) or kind.forward is nn.Module.forward:
        return False
    if not any(isinstance(child, (nn.Linear, Dense)) for child in module.modules()):
        return False
    if not _is_of_torch(kind):
        return True
    # Of another class, fully_shard and parametrizations derive one of torch.
    base = next(base for base in kind.__mro__ if not _is_of_torch(base))
    if issubclass(base, nn.Module) and _speaks_of_gates(module):
        raise _LeaveError(f"{kind.__name__} is not {base.__name__} itself")
    return False


def _is_of_torch(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("torch", "torchops")


def _with_operators(module: nn.Module) -> type[nn.Module] | None:
    """The class of `module` with a new forward; None if it has no gate. Raises `_LeaveError` with the reason not to."""
    try:
        forward = _rewritten(module)
    except _LeaveError:
        raise
    except Exception as error:  # a forward may do anything with a proxy instead of a tensor
        if _speaks_of_gates(module):
            raise _LeaveError(f"its forward cannot be traced: {_first_line(error)}") from error
        return None
    if not forward.finder.count:
        if reason := forward.finder.missed():
            raise _LeaveError(reason)
        return None
    if "forward" in vars(module) or module._compiled_call_impl is not None:
        raise _LeaveError(f"{type(module).__name__} has a forward of its own")
    _check_layers(module, forward.finder)
    optional, without = _where_none(module, forward)
    forwards = [forward, without] if without else [forward]
    names: dict[str, Any] = {}
    for each in forwards:
        for name, value in each.names.items():
            if names.setdefault(name, value) is not value and names[name] != value:
                raise _LeaveError(f"{name} is something else in its forward where an argument is None")
    names[LAYERS] = _layers(module, [each.finder for each in forwards])
    code = guarded(forward.code, type(module), forward.finder.graph, optional, without.code if without else None)
    return _tried_class(module, code, tuple(names.items()), optional)


class _Forward(NamedTuple):
    finder: Finder
    code: str
    names: dict[str, Any]  # the globals of the code


def _rewritten(module: nn.Module, absent: Collection[str] = ()) -> _Forward:
    """The graph of its forward with operators, as code, which is the same for training and evaluation; with None for
    the arguments `absent`."""
    finders, problems = [], []
    for graph, problem in traces(module, absent):
        unread = [node.target for node in graph.find_nodes(op="placeholder") if not node.users]
        finders.append(Finder(module, graph))
        finders[-1].rewrite()
        problems += [problem, _impurity(module, graph)]
        problems += [  # fx gives all arguments, none of them None
            f"its graph does not read its argument {target}, but calls with other arguments, such as None, may"
            for target in unread
        ]
    if not any(finder.count for finder in finders):
        return _Forward(finders[0], "", {})
    if problem := next(filter(None, problems), None):
        raise _LeaveError(problem)
    codes = [finder.graph.python_code("self") for finder in finders]
    if len({code.src for code in codes}) > 1:
        raise _LeaveError("its forward differs between training and evaluation, or between calls")
    names = {
        name: Imported(value.__name__) if isinstance(value, ModuleType) else value
        for name, value in codes[0].globals.items()
        if name in codes[0].src
    }
    return _Forward(finders[0], codes[0].src, names)


def _where_none(module: nn.Module, forward: _Forward) -> tuple[tuple[str, ...], _Forward | None]:
    """The arguments whose default is None, if the forward does something else where some are None, as in ``y if mask is
    None else y * mask``; and what it does where all are, if that has gates and a new forward can do it. A forward that
    only passes them on does nothing else."""
    arguments = forward.finder.graph.find_nodes(op="placeholder")
    nodes = {str(node.target): node for node in arguments if node.args == (None,)}
    if not nodes:
        return (), None

    def passes_on(absent: Collection[str], without: _Forward) -> bool:
        graph = fx.Graph()
        values: dict[Any, Any] = {nodes[name]: None for name in absent}
        (output,) = forward.finder.graph.find_nodes(op="output")
        graph.output(graph.graph_copy(forward.finder.graph, values), output.type)
        return without.code == graph.python_code("self").src

    try:
        without = _rewritten(module, tuple(nodes))
        _check_layers(module, without.finder)
    except Exception:
        return tuple(nodes), None
    some = [names for n in range(1, len(nodes)) for names in combinations(nodes, n)]
    with contextlib.suppress(Exception):
        few = len(nodes) <= _MOST_OPTIONAL
        if few and passes_on(nodes, without) and all(passes_on(names, _rewritten(module, names)) for names in some):
            return (), None
    return tuple(nodes), without if without.finder.count else None


_MOST_OPTIONAL = 3  # of which each combination is traced


def _layers(module: nn.Module, finders: Collection[Finder]) -> tuple[Part, ...]:
    """What decides which code the former forward would run: `module` itself, the parts that the new forward no longer
    calls, those that hold what it calls or reads, and containers, also empty ones, which it may go through."""
    names = {"": None}
    for finder in finders:
        called = {str(node.target) for node in finder.graph.find_nodes(op="call_module")}
        own = dict.fromkeys((*finder.layers, *finder.others))
        names |= own
        for name in (*own, *called, *(str(node.target) for node in finder.graph.find_nodes(op="get_attr"))):
            while name := name.rpartition(".")[0]:
                names[name] = None
        for name, part in module.named_modules():
            above = {name.rsplit(".", i)[0] for i in range(name.count(".") + 1)}
            if isinstance(part, _CONTAINERS) and not above & called:
                names[name] = None
    parts = {name: module.get_submodule(name) for name in names}
    return tuple(
        (tuple(filter(None, name.split("."))), former_class(type(part)), contents(part)) for name, part in parts.items()
    )


_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:100]


def _speaks_of_gates(module: nn.Module) -> bool:
    """Whether a method of it does, which its forward may call, or a part of it computes one."""
    own = (kind for kind in type(module).__mro__ if not _is_of_torch(kind) and kind is not object)
    return any(map(_mentions_gates, own)) or any(
        isinstance(part, nn.GLU) or activation_of(part) in ("sigmoid", "silu") for part in module.children()
    )


@functools.cache  # to find the source of a class takes tens of milliseconds
def _mentions_gates(kind: type) -> bool:
    with contextlib.suppress(Exception):  # no source, or one that was edited since
        return re.search("sigmoid|silu|glu(?!e)", inspect.getsource(kind).lower()) is not None
    return False


def _impurity(module: nn.Module, graph: fx.Graph) -> str | None:
    """What the forward does besides computing its result, as its graph shows it."""
    for node in graph.nodes:
        target = node.target
        if node.op == "get_attr" and str(target).startswith("_tensor_constant"):
            return "its forward makes a tensor"
        called = module.get_submodule(str(target)) if node.op == "call_module" else None
        name = target if isinstance(target, str) else getattr(target, "__name__", "")
        in_place = node.op == "call_method" and name.endswith("_") and not name.endswith("__")
        in_place |= node.op == "call_function" and (
            name == "setitem" or (name.endswith("_") and not name.endswith("__")) or target in IN_PLACE
        )
        if in_place or "out" in node.kwargs or node.kwargs.get("inplace") or getattr(called, "inplace", False):
            return "its forward overwrites tensors"
    return None


def _check_layers(module: nn.Module, finder: Finder) -> None:
    layers: dict[str, Any] = {name: module.get_submodule(name) for name in finder.layers}
    for name in (*layers, *finder.others):
        part = module.get_submodule(name)
        known = (Dense, nn.Linear, nn.GLU, nn.Sigmoid, nn.SiLU, nn.Identity)
        kind = next((k for k in known if isinstance(part, k)), type(part))
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


def _tried_class(module: nn.Module, code: str, names: Names, optional: Collection[str]) -> type[nn.Module]:
    """`class_with_forward`, after comparing both forwards on a copy with random parameters, in float32 on the CPU; also
    with the `optional` arguments."""
    base: Any = type(module)
    generator = torch.Generator("cpu").manual_seed(0)

    def random(shape: Sequence[int]) -> Tensor:
        values = torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)
        return values / max(1, shape[-1] if shape else 1) ** 0.5

    def random_like(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
        # A buffer may be a variance.
        return random(tensor.shape) if isinstance(tensor, nn.Parameter) else random(tensor.shape).abs()

    try:
        made = class_with_forward(base, code, names)
        with torch.device("cpu"), torch.no_grad(), torch.autocast("cpu", enabled=False):
            trial = copied(module, random_like).eval()
            calls = [_accepted(trial, [([random((*s, n)) for n in _features(trial)], {}) for s in _LEADING])]
            inputs, _ = calls[0]
            if len({i.shape for i in inputs}) == 1 < len(inputs):  # a forward may ask whether they are one
                calls.append((inputs[:1] * len(inputs), {}))
            if optional and inputs:
                *lead, n = inputs[0].shape
                given = [{name: random(shape) for name in optional} for shape in ((*lead, 1), (*lead, n), lead)]
                given += [{name: value > 0 for name, value in values.items()} for values in given]
                for choices in (given, [dict.fromkeys(optional, inputs[0])]):
                    with contextlib.suppress(Exception):  # none may suit
                        calls.append(_accepted(trial, [(inputs, more) for more in choices]))
            expected = [trial(*args, **more) for args, more in calls]
            trial.__class__ = made
            got = [trial(*args, **more) for args, more in calls]
    except Exception as error:
        raise _LeaveError(f"it could not be tried: {_first_line(error)}") from error
    pairs = list(zip(_tensors(got), _tensors(expected), strict=False))
    if not pairs or len(_tensors(got)) != len(_tensors(expected)):
        raise _LeaveError("a trial gave other results")
    for a, b in pairs:
        if a.shape != b.shape or a.dtype != b.dtype or not torch.allclose(a, b, rtol=1e-4, atol=1e-4):
            raise _LeaveError("a trial gave other results")
    return made


# The sizes before the features. A forward may need a particular number of dimensions.
_LEADING = ((2, 3), (2, 3, 3), (5,))


_Call = tuple[list[Tensor], dict[str, Tensor]]


def _accepted(trial: nn.Module, choices: list[_Call]) -> _Call:
    """The first of `choices` that the forward accepts."""
    for args, more in choices[:-1]:
        with contextlib.suppress(Exception):
            trial(*args, **more)
            return args, more
    args, more = choices[-1]
    trial(*args, **more)
    return args, more


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _features(module: nn.Module) -> list[int]:
    """The number of features of each argument without a default, from the first layer that reads it."""
    graph = Tracer(module).trace(module)
    found = []
    for node in graph.find_nodes(op="placeholder"):
        if node.args:
            continue
        sizes = [_size(module.get_submodule(str(u.target))) for u in node.users if u.op == "call_module"]
        found.append(next(filter(None, sizes), 0))
    outs = [m.out_features for m in module.modules() if isinstance(m, (nn.Linear, Dense))]
    return [n or outs[-1] for n in found]


def _size(module: nn.Module) -> int:
    if isinstance(module, nn.LayerNorm):
        return module.normalized_shape[-1]
    return module.in_features if isinstance(module, (nn.Linear, Dense)) else 0


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
        if isinstance(child, nn.Linear) and isinstance(following, nn.GLU)
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

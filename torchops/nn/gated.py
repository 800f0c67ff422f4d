"""The part of :func:`torchops.nn.replace` that finds gates and GLUs, and puts operators in their place.

The forward of a module is traced by ``torch.fx``, with the modules that it calls as they are, for training and for
evaluation. Where both graphs hold the same gates, made from plain linear layers, the module gets a forward in which
operators read the parameters of these layers. In an ``nn.Sequential``, a layer takes the place of linear layer and GLU.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import operator
from collections.abc import Callable
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from torchops.ops import gate, glu

from .gates import Dense
from .replace import Replacements, join, like, module_reason, parameters_reason, sequential_reason, swapper

__all__ = ["PackedGLU"]


class _LeaveError(Exception):
    """Why a module with a gate stays as it is."""


# --- what the new forwards call --------------------------------------------------------------------------------------


def gated(v: Tensor, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """``v * sigmoid(linear(x))``, also where `v` is broadcast, which no graph shows."""
    fits = v.shape[:-1] == x.shape[:-1] and v.shape[-1:] == w.shape[:1]
    if fits and not x.is_nested and (v.dtype == w.dtype or v.dtype == torch.float32):
        return gate(v, x, w, b)
    return v * torch.sigmoid(F.linear(x, w, b))


def gated_linear(
    x: Tensor, w: Tensor, wg: Tensor, b: Tensor | None, bg: Tensor | None, activation: Any
) -> Tensor:
    """``linear(x) * activation(linear(x))``."""
    if x.is_nested:
        u = F.linear(x, wg, bg)
        return F.linear(x, w, b) * (torch.sigmoid(u) if activation == "sigmoid" else F.silu(u))
    return glu(x, w, wg, b, bg, activation=activation)


def packed_linear(x: Tensor, w: Tensor, b: Tensor | None, activation: Any, gate_first: bool) -> Tensor:
    """The same, of layers that are the halves of one."""
    weights, biases = w.chunk(2), (None, None) if b is None else b.chunk(2)
    i, j = (1, 0) if gate_first else (0, 1)
    return gated_linear(x, weights[i], weights[j], biases[i], biases[j], activation)


class PackedGLU(nn.Linear):
    """An ``nn.Linear`` and the ``nn.GLU()`` behind it, computed by one operator: :func:`torchops.glu`."""

    def forward(self, input: Tensor) -> Tensor:
        return packed_linear(input, self.weight, self.bias, "sigmoid", False)


class _Imported(NamedTuple):
    """In the place of a module, which cannot be pickled."""

    name: str


class _Rewritten:
    """What classes of modules with another forward have besides: they can be pickled."""

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


# --- the forms -------------------------------------------------------------------------------------------------------

_MULTIPLICATIONS: set[Any] = {operator.mul, torch.mul, torch.multiply, "mul", "multiply"}
_SIGMOIDS: set[Any] = {torch.sigmoid, torch.special.expit, F.sigmoid, "sigmoid"}
_SILUS: set[Any] = {F.silu}
_SLICES: set[Any] = {torch.chunk, "chunk"}


class _Tracer(fx.Tracer):
    """Calls of modules stay calls, except those of nn.Sequential, whose parts are looked into."""

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return type(module) is not nn.Sequential


class _Finder:
    """The gates of one graph, which `rewrite` replaces."""

    def __init__(self, module: nn.Module, graph: fx.Graph) -> None:
        self.module = module
        self.graph = graph
        self.layers: list[str] = []  # whose parameters an operator reads
        self.others: list[str] = []  # modules that are no longer called
        self.count = 0

    def rewrite(self) -> None:
        for node in list(self.graph.nodes):
            if node.op not in ("call_function", "call_method", "call_module") or not self._replaces(node):
                continue
            self.count += 1
            self._erase(node)

    def _erase(self, node: fx.Node) -> None:
        """Erases what has no user any more, upwards from a gate: its factors, down to the layers."""
        inputs = node.all_input_nodes
        self.graph.erase_node(node)
        if self._is(node, nn.Linear):
            return
        for n in inputs:
            if not n.users and n.op != "placeholder":
                self._erase(n)

    def _replaces(self, node: fx.Node) -> bool:
        if self._is(node, nn.GLU) or (node.op == "call_function" and node.target is F.glu):
            dim = self._module(node).dim if node.op == "call_module" else _argument(node, 1, "dim", -1)
            layer = self._layer(node.args[0])
            if dim != -1 or layer is None:
                return False
            self._drop(node)
            self._emit(node, packed_linear, layer.args[0], *self._parameters(layer), "sigmoid", False)
            return True
        if node.target not in _MULTIPLICATIONS or len(node.args) != 2 or node.kwargs:
            return False
        return any(self._replaces_product(node, *pair) for pair in (node.args, node.args[::-1]))

    def _replaces_product(self, node: fx.Node, gate_side: Any, value: Any) -> bool:
        activation, u = self._activation(gate_side)
        if u is None or not isinstance(value, fx.Node):
            return False
        if (halves := self._halves(u, value)) is not None:
            layer, gate_first = halves
            self._drop(gate_side)
            self._emit(node, packed_linear, layer.args[0], *self._parameters(layer), activation, gate_first)
            return True
        layer, other = self._layer(u) or self._layer(u, gate=True), self._layer(value)
        if layer is None:
            return False
        if other is not None and other is not layer and other.args[0] is layer.args[0]:
            (w, b), (wg, bg) = self._parameters(other), self._parameters(layer)
            self._drop(gate_side)
            self._emit(node, gated_linear, layer.args[0], w, wg, b, bg, activation)
            return True
        if activation == "sigmoid":
            self._drop(gate_side)
            self._emit(node, gated, value, layer.args[0], *self._parameters(layer))
            return True
        return False

    def _emit(self, node: fx.Node, function: Callable[..., Tensor], *args: Any) -> None:
        with self.graph.inserting_before(node):
            new = self.graph.call_function(function, args)
        node.replace_all_uses_with(new)

    def _drop(self, node: fx.Node) -> None:
        if node.op == "call_module" and not self._is(node, nn.Linear):
            self.others.append(str(node.target))

    def _parameters(self, layer: fx.Node) -> tuple[fx.Node, fx.Node | None]:
        name = str(layer.target)
        self.layers.append(name)
        with self.graph.inserting_before(layer):
            w = self.graph.get_attr(f"{name}.weight")
            has_bias = self._module(layer)._parameters.get("bias") is not None
            return w, self.graph.get_attr(f"{name}.bias") if has_bias else None

    def _module(self, node: fx.Node) -> Any:
        return self.module.get_submodule(str(node.target))

    def _is(self, node: Any, kind: type[nn.Module]) -> bool:
        return isinstance(node, fx.Node) and node.op == "call_module" and isinstance(self._module(node), kind)

    def _layer(self, node: Any, gate: bool = False) -> fx.Node | None:
        """`node` as the call of a linear layer, or of a `Dense`, that nothing else reads."""
        if not self._is(node, nn.Linear) or len(node.users) != 1 or len(node.args) != 1 or node.kwargs:
            return None
        is_gate = isinstance(self._module(node), Dense)
        return node if is_gate is gate else None  # type: ignore[no-any-return]

    def _activation(self, node: Any) -> tuple[str, Any]:
        """Which activation `node` is, and of what."""
        if not isinstance(node, fx.Node) or len(node.users) != 1 or not node.args:
            return "", None
        dense = node
        while self._is(dense, nn.Identity) and len(dense.args[0].users) == 1:
            dense = dense.args[0]
        if self._layer(dense, gate=True) is not None:
            return "sigmoid", dense
        if self._is(node, nn.Sigmoid) or node.target in _SIGMOIDS:
            return "sigmoid", node.args[0]
        if self._is(node, nn.SiLU) or node.target in _SILUS:
            return "silu", node.args[0]
        return "", None

    def _halves(self, u: Any, value: Any) -> tuple[fx.Node, bool] | None:
        """The layer that both are the halves of, by ``chunk(2, dim=-1)``, and whether the gate is the first."""
        for node in (u, value):
            if not isinstance(node, fx.Node) or node.target is not operator.getitem or len(node.users) != 1:
                return None
        chunk: Any = u.args[0]
        if chunk is not value.args[0] or chunk.target not in _SLICES or len(chunk.users) != 2:
            return None
        if _argument(chunk, 1, "chunks", None) != 2 or _argument(chunk, 2, "dim", 0) != -1:
            return None
        layer = self._layer(chunk.args[0])
        if layer is None or {u.args[1], value.args[1]} != {0, 1}:
            return None
        return layer, u.args[1] == 0


def _argument(node: fx.Node, position: int, name: str, default: Any) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


# --- one module ------------------------------------------------------------------------------------------------------


@swapper
def replace_forwards(model: nn.Module) -> Replacements:
    """The forwards of all modules that own gates, that of the model among them."""
    replaced, left = [], {}
    for name, module in model.named_modules():
        try:
            if _may_have_gates(module) and _replace(module):
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
    """Gives `module` another forward; False where it has no gate. Raises `_LeaveError` with the reason not to."""
    try:
        finder, code, names = _rewritten(module)
    except _LeaveError:
        raise
    except Exception as error:  # whatever a forward does with what is no tensor
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


def _rewritten(module: nn.Module) -> tuple[_Finder, str, dict[str, Any]]:
    """The graph of its forward with operators in it, as code; the same for training and evaluation."""
    results = []
    was_training = module.training
    try:
        for training in (True, False):
            module.training = training
            finder = _Finder(module, _Tracer().trace(module))
            finder.rewrite()
            if finder.count:
                _check_pure(module, finder.graph)
            code = finder.graph.python_code("self")
            names = {
                name: _Imported(value.__name__) if isinstance(value, ModuleType) else value
                for name, value in code.globals.items()
                if name in code.src
            }
            results.append((finder, code.src, names))
    finally:
        module.training = was_training
    if results[0][1] != results[1][1]:
        if max(finder.count for finder, _, _ in results):
            raise _LeaveError("its forward differs between training and evaluation")
        return results[0]
    finder, code, names = results[0]
    for node in finder.graph.nodes:
        if node.op == "get_attr" and str(node.target).startswith("_tensor_constant"):
            raise _LeaveError("its forward makes a tensor")
    return finder, code, names


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
            name == "setitem" or (name.endswith("_") and not name.endswith("__")) or (getattr(operator, name, None) is target and name in _IN_PLACE)
        )
        if in_place or "out" in node.kwargs or node.kwargs.get("inplace") or getattr(called, "inplace", False):
            raise _LeaveError("its forward overwrites tensors")


_IN_PLACE = {name for name in dir(operator) if name.startswith("i") and name[1:] in dir(operator)}


def _check_layers(module: nn.Module, finder: _Finder) -> None:
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
    generator = torch.Generator().manual_seed(0)

    def random(shape: torch.Size) -> Tensor:
        return torch.randn(shape, generator=generator) / max(1, shape[-1] if shape else 1) ** 0.5

    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        values = random(tensor.shape) if tensor.is_floating_point() else torch.zeros(tensor.shape, dtype=tensor.dtype)
        memo[id(tensor)] = nn.Parameter(values) if isinstance(tensor, nn.Parameter) else values
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            trial = copy.deepcopy(module, memo).eval()
            for part in trial.modules():  # hooks are told of the calls of the model, not of trials
                for registry in (value for key, value in vars(part).items() if key.endswith("_hooks")):
                    registry.clear()
            inputs = [random(torch.Size((2, 3, n))) for n in _features(module)]
            expected = trial(*inputs)
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


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _features(module: nn.Module) -> list[int]:
    """How many features each argument has without a default, by the first layer that reads it."""
    graph = _Tracer().trace(module)
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
    """Pairs of nn.Linear and nn.GLU(), by PackedGLU."""
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
        elsewhere = [join(n, k) for p, n in names.items() for k, m in p._modules.items() if m is linear and (p, k) not in places]
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

"""How modules write gates and GLUs, as seen in graphs of ``torch.fx``, and the functions that replace them."""

from __future__ import annotations

import operator
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from torchops.ops import gate

from .activations import OTHER, activation_of
from .gates import Dense, is_dense
from .layers import does_more
from .replace import module_reason

__all__ = ["IN_PLACE", "Finder", "Tracer", "contents", "gated", "gated_linear", "packed_linear", "unchanged"]

# --- what the new forwards call --------------------------------------------------------------------------------------


def gated(v: Tensor, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """``v * sigmoid(linear(x))``, also if `v` is broadcast or `v` or `x` is sparse, which no graph shows."""
    strided = isinstance(v, Tensor) and v.layout is torch.strided and is_dense(x)
    if strided and v.shape[:-1] == x.shape[:-1] and v.shape[-1:] == w.shape[:1]:
        stream = v.dtype == torch.float32 and w.dtype != torch.float64
        if stream or v.dtype == _dtype_of_product(w):
            return gate(v, x, w, b)
    return v * torch.sigmoid(F.linear(x, w, b))


def _dtype_of_product(w: Tensor) -> torch.dtype:
    device = w.device.type
    is_cast = w.dtype != torch.float64 and torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if is_cast else w.dtype


def gated_linear(x: Tensor, w: Tensor, wg: Tensor, b: Tensor | None, bg: Tensor | None, activation: str) -> Tensor:
    """``linear(x) * activation(linear(x))``."""
    if not is_dense(x) or w.shape != wg.shape:
        u = F.linear(x, wg, bg)
        return F.linear(x, w, b) * (torch.sigmoid(u) if activation == "sigmoid" else F.silu(u))
    out: Tensor = torch.ops.myops.glu(x, w, wg, b, bg, activation=activation)
    return out


def packed_linear(x: Tensor, w: Tensor, b: Tensor | None, activation: str, gate_first: bool) -> Tensor:
    """The same for layers that are the halves of one layer."""
    weights = w.chunk(2)
    i, j = (1, 0) if gate_first else (0, 1)
    if b is None:
        return gated_linear(x, weights[i], weights[j], None, None, activation)
    biases = b.chunk(2)
    return gated_linear(x, weights[i], weights[j], biases[i], biases[j], activation)


Part = tuple[tuple[str, ...], type[nn.Module], int]


def contents(module: nn.Module) -> int:
    """How many parts, parameters and buffers `module` itself has. What is registered as None does not count."""
    count = 0
    for held in (module._modules, module._parameters, module._buffers):
        for value in held.values():  # in each call of a forward, so a plain loop
            if value is not None:
                count += 1
    return count


def unchanged(module: nn.Module, parts: tuple[Part, ...]) -> bool:
    """Whether these parts of `module`, by their paths, classes and contents, still do what they did.

    `module` itself, whose path is empty, may have hooks: they run around its forward.
    """
    for path, kind, size in parts:
        part: Any = module
        for name in path:
            part = part._modules.get(name)
            if part is None:
                return False
        if type(part) is not kind and getattr(type(part), "_torchops_parts", (None,))[0] is not kind:
            return False
        if contents(part) != size:
            return False
        if path and does_more(part):
            return False
    return True


_NAMES = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "and", "or", "xor")
IN_PLACE: tuple[Callable[..., Any], ...] = tuple(getattr(operator, f"i{name}") for name in _NAMES)

# --- how they are written ---------------------------------------------------------------------------------------------

_MULTIPLICATIONS: set[Any] = {operator.mul, torch.mul, torch.multiply, "mul", "multiply"}
_SIGMOIDS: set[Any] = {torch.sigmoid, torch.special.expit, F.sigmoid, "sigmoid"}
_SILUS: set[Any] = {F.silu}
_OTHERS = {"gelu", "relu", "relu6", "leaky_relu", "elu", "selu", "celu", "mish", "tanh", "softplus", "softsign"}
_OTHERS |= {"hardtanh", "hardsigmoid", "hardswish", "hardshrink", "softshrink", "tanhshrink", "logsigmoid"}
_SLICES: set[Any] = {torch.chunk, "chunk"}


class _Value(fx.Proxy):
    """What a graph does not show, it refuses, and what overwrites a tensor is recorded as that."""

    tracer: Tracer

    def __getattr__(self, name: str) -> _Attribute:
        if name in ("grad", "grad_fn", "_base"):
            self._refuse(f"asks for the {name} of a value")  # which may be None
        return _Attribute(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if not _asked_by_torch():
            self._refuse(f"overwrites the {name} of a value")
        super().__setattr__(name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        if not _asked_by_torch():
            self._refuse(f"asks for the type of {self._said}")
        return type(self)

    _said = "a value"

    def _refuse(self, does: str, error: type[Exception] = RuntimeError) -> NoReturn:
        self.tracer.refused = True
        raise error(f"it {does}, which no graph shows")


def _asked_by_torch() -> bool:
    """Whether the caller of the caller is a function of torch, or one here."""
    name: str = sys._getframe(2).f_globals.get("__name__", "")
    return name.startswith(("torch.", "torchops."))


class _Attribute(fx.proxy.Attribute, _Value):
    """Such as a shape or a dtype."""


class _Argument(_Value):
    @property
    def _said(self) -> str:  # type: ignore[override]
        return f"its argument {self.node.target}"


def _no_key(name: str, does: str) -> Callable[..., Any]:
    def refused(self: _Value, *args: Any) -> Any:
        if _asked_by_torch():
            return getattr(super(_Value, self), name)(*args)
        self._refuse(does)

    return refused


def _no_number(self: _Value) -> NoReturn:
    self._refuse("takes a value for a number", TypeError)


def _recorded(function: Callable[..., Any]) -> Callable[..., fx.Proxy]:
    return lambda self, other: self.tracer.create_proxy("call_function", function, (self, other), {})


for _name, _makes in {"hash": "a hash", **dict.fromkeys(("str", "repr", "format"), "text")}.items():
    setattr(_Value, f"__{_name}__", _no_key(f"__{_name}__", f"makes {_makes} of a value"))
for _name in ("len", "index", "int", "float", "complex", "bytes"):
    setattr(_Value, f"__{_name}__", _no_number)
for _function in IN_PLACE:  # without such a method, Python takes `x += y` for `x = x + y`
    setattr(_Value, f"__{_function.__name__}__", _recorded(_function))


class _Traces:
    """Whether the thread that asks is the one that traces."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer

    def __bool__(self) -> bool:
        return self.tracer.thread == threading.get_ident()


class Tracer(fx.Tracer):
    """Keeps calls of modules as calls, except those of a plain nn.Sequential of `module`, whose parts are traced.

    While it traces, torch.fx replaces ``nn.Module.__call__`` and ``__getattr__`` for all threads. Others than the one
    that traces get what these did before."""

    proxy_buffer_attributes = True
    thread: int | None = None  # the one that traces
    refused = False  # whether an exception was raised for something that no graph shows, which the forward may catch

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        """Arguments that `concrete_args` fixes, to None, are no longer arguments of the graph."""
        self.call, self.thread = nn.Module.__call__, threading.get_ident()
        try:
            graph = super().trace(root, concrete_args)
        finally:
            self.thread = None
        for node in graph.find_nodes(op="call_function", target=fx._symbolic_trace._assert_is_none):
            argument = node.args[0]
            graph.erase_node(node)
            graph.erase_node(argument)
        return graph

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        flag = "_is_fx_tracing_flag"  # which `trace` has just set to True, for which compiled functions raise
        if name == "root" and flag in vars(fx._symbolic_trace):  # from torch 2.14 on, each thread has its own
            setattr(fx._symbolic_trace, flag, _Traces(self))

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return super().call_module(m, forward, args, kwargs) if _Traces(self) else self.call(m, *args, **kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        return super().getattr(attr, attr_val, parameter_proxy_cache) if _Traces(self) else attr_val

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return (_Argument if node.op == "placeholder" else _Value)(node, self)

    def to_bool(self, obj: fx.Proxy) -> bool:
        self.refused = True
        return super().to_bool(obj)

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        self.refused = True
        return super().iter(obj)

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return module_reason(self.module.get_submodule(name), nn.Sequential) is not None


class Finder:
    """The gates of one graph; `rewrite` replaces them."""

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
        """Erases nodes that have no users any more, upwards from a gate: its factors, down to the layers."""
        inputs = node.all_input_nodes
        self.graph.erase_node(node)
        if self._is(node, (nn.Linear, Dense)):
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
            packed, gate_first = halves
            self._drop(gate_side)
            self._emit(node, packed_linear, packed.args[0], *self._parameters(packed), activation, gate_first)
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
            new.meta["is_wrapped"] = True  # other traces keep the call, as after torch.fx.wrap
        node.replace_all_uses_with(new)

    def _drop(self, node: fx.Node) -> None:
        if node.op == "call_module" and not self._is(node, (nn.Linear, Dense)):
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

    def _is(self, node: Any, kind: type[nn.Module] | tuple[type[nn.Module], ...]) -> bool:
        return isinstance(node, fx.Node) and node.op == "call_module" and isinstance(self._module(node), kind)

    def _layer(self, node: Any, gate: bool = False) -> fx.Node | None:
        """`node` as the call of a linear layer, or of a `Dense`, with no other user."""
        alone = self._is(node, Dense if gate else nn.Linear) and len(node.users) == len(node.args) == 1
        return node if alone and not node.kwargs else None

    def _activation(self, node: Any) -> tuple[str, Any]:
        """The activation that `node` is, and its argument."""
        if not isinstance(node, fx.Node) or len(node.users) != 1 or not node.args:
            return "", None
        dense: Any = node
        while self._is(dense, nn.Identity) and len(dense.args[0].users) == 1:
            dense = dense.args[0]
        if self._layer(dense, gate=True) is not None:
            return "sigmoid", dense
        name = self._function(node)
        return (name, node.args[0]) if name in ("sigmoid", "silu") else ("", None)

    def _function(self, node: fx.Node) -> str | None:
        """What `node` computes of each element of its argument, if it does."""
        if node.op == "call_module":
            return activation_of(self._module(node))
        if node.target in _SIGMOIDS or node.target in _SILUS:
            return "sigmoid" if node.target in _SIGMOIDS else "silu"
        return OTHER if getattr(node.target, "__name__", node.target) in _OTHERS else None

    def missed(self) -> str | None:
        """Why what looks like a gate, in a graph without any, is none."""
        for node in self.graph.nodes:
            if node.target in _MULTIPLICATIONS and len(node.args) == 2:
                for side, value in (node.args, node.args[::-1]):
                    u = side.args[0] if isinstance(side, fx.Node) and side.args else None
                    if self._of_linear(u) and self._of_linear(value) and self._function(side) == OTHER:
                        kind = type(self._module(side)) if side.op == "call_module" else side.target
                        return f"{getattr(kind, '__name__', kind)} computes neither a sigmoid nor a SiLU"
        for node in self.graph.nodes:
            of_layer = node.op.startswith("call") and node.args and self._is(node.args[0], nn.Linear)
            if of_layer and self._function(node) == "sigmoid":
                return f"the sigmoid of its {node.args[0].target} is no factor of one product"
        return None

    def _of_linear(self, node: Any) -> bool:
        """Whether `node` is the result of a linear layer, or a part of it."""
        whole: Any = node.args[0] if isinstance(node, fx.Node) and node.target is operator.getitem else None
        return self._is(whole.args[0] if whole is not None and whole.args else node, nn.Linear)

    def _halves(self, u: Any, value: Any) -> tuple[fx.Node, bool] | None:
        """The layer whose halves (by ``chunk(2, dim=-1)``) both are, and whether the gate is the first half."""
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

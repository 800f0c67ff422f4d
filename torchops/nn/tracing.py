"""Graphs of forwards by ``torch.fx``, and whether they are all that a forward does.

A trace runs the forward once, with proxies instead of tensors. Whatever Python decides, remembers or draws on the way
happens in that run and never again, so that a graph may only replace a forward that does nothing of the kind.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
import random
import sys
import threading
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from .gate_forms import Tracer
from .replace import alone
from .unseen import watched

__all__ = ["Trace", "copied", "random_numbers_stay", "traces"]


class Trace(NamedTuple):
    graph: fx.Graph
    problem: str | None  # what the forward did besides


def traces(module: nn.Module, absent: Collection[str] = ()) -> list[Trace]:
    """The graphs of the forward of `module` for training and for evaluation, with None for the arguments `absent`.

    `module` stays as it is: what runs is a copy whose parameters and buffers have no values. Raises whatever the
    forward raises, given proxies.
    """
    with torch.inference_mode(False):
        copy = copied(module, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
        found = []
        for training in (True, False):
            for part in copy.modules():
                part.training = training
            found.append(_trace(copy, Tracer(module), absent))
            for _ in range(3):
                if found[-1].problem == _DRAWS:  # or another thread does
                    found[-1] = _trace(copy, Tracer(module), absent)
    return found


_DRAWS = "its forward draws random numbers"


def _trace(copy: nn.Module, tracer: Tracer, absent: Collection[str]) -> Trace:
    before, numbers = _state(copy), _random_states()
    with watched() as ran, _no_contexts(tracer):
        graph = tracer.trace(copy, dict.fromkeys(absent) or None)
    if tracer.refused:
        raise RuntimeError("it catches an exception, and goes on in another way")
    drew = _random_states() != numbers
    after = _state(copy)
    changed = [path for path in {**before, **after} if not _same(before.get(path), after.get(path))]
    named = sorted(changed, key=lambda path: (path.endswith(" "), path))  # rather what it holds than its pickle
    if named:
        return Trace(graph, f"its forward changes its attribute {named[0].strip()}")
    return Trace(graph, _DRAWS if drew else _shared(graph, before) or ran.problem())


def _shared(graph: fx.Graph, state: Mapping[str, Any]) -> str | None:
    """A module, parameter or buffer of the graph with a second name, by which the forward may have reached it."""
    names: dict[int, list[str]] = {}
    for path, value in state.items():
        names.setdefault(id(value), []).append(path)
    for node in graph.nodes:
        name = str(node.target) if node.op in ("call_module", "get_attr") else ""
        while name:
            for other in names.get(id(state.get(name)), ()) if isinstance(state.get(name), nn.Module | Tensor) else ():
                if other != name:
                    return f"its {name} is its {other}, too, and a graph knows one name"
            name = name.rpartition(".")[0]
    return None


def copied(module: nn.Module, tensor_for: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy of `module` with other parameters and buffers, and without hooks."""
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        new = tensor_for(tensor)
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if is_parameter else new
    for part in module.modules():
        memo |= {id(value): OrderedDict() for name, value in vars(part).items() if name.endswith("_hooks")}
    return copy.deepcopy(module, memo)


# --- what changes ----------------------------------------------------------------------------------------------------

_REGISTRIES = ("_modules", "_parameters", "_buffers")  # whose names are those of attributes
_OPAQUE = (str, bytes, int, float, complex, type(None), type, FunctionType, BuiltinFunctionType, ModuleType)


def _state(module: nn.Module) -> dict[str, Any]:
    """All that `module` holds, itself or in what it holds, by its path."""
    state: dict[str, Any] = {}
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [("", module)]
    while waiting:
        path, value = waiting.pop()
        state[path] = value
        if id(value) in seen or isinstance(value, _OPAQUE):
            continue
        seen.add(id(value))
        inside: dict[Any, Any] = {}
        if isinstance(value, Tensor):
            state[f"{path} "] = value._version
        elif isinstance(value, dict):
            inside = value
        elif isinstance(value, list | tuple | set | frozenset | deque):
            inside = dict(enumerate(value))
        elif isinstance(value, functools.partial | MethodType):
            names = ("func", "args", "keywords") if isinstance(value, functools.partial) else ("__self__",)
            inside = {name: getattr(value, name) for name in names}
        else:
            kind: Any = type(value)
            slots = (name for base in kind.__mro__ for name in getattr(base, "__slots__", ()))
            inside = {name: getattr(value, name) for name in slots if hasattr(value, name)}
            inside |= getattr(value, "__dict__", {})
            for registry in _REGISTRIES if isinstance(value, nn.Module) else ():
                inside |= inside.pop(registry, {})
            if kind.__reduce__ is not object.__reduce__:
                state[f"{path} "] = _pickled(value)
        for name, part in inside.items():
            if not str(name).startswith("_tensor_constant"):  # made by the tracer
                waiting.append((f"{path}.{name}" if path else str(name), part))
    return state


def _pickled(value: Any) -> bytes | None:
    """What an object with a `__reduce__` of its own holds, as those written in C do: a generator of random numbers, or
    an iterator."""
    if isinstance(value, torch.Generator):
        return bytes(value.get_state().tolist())  # its pickle has an address, too
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python 3.12 on pickled iterators
            return pickle.dumps(value)
    except Exception:  # not everything can be pickled
        return None


def _same(before: Any, after: Any) -> bool:
    return before is after or (type(before) is type(after) in (int, bytes) and before == after)


# --- random numbers --------------------------------------------------------------------------------------------------


def _random_sources() -> Iterator[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    yield torch.get_rng_state, torch.set_rng_state
    yield random.getstate, random.setstate
    if numpy := sys.modules.get("numpy"):
        yield numpy.random.get_state, numpy.random.set_state
    if torch.cuda.is_initialized():
        yield torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all


def _random_states() -> list[str]:
    """In a form that can be compared."""
    leaves = [torch.utils._pytree.tree_leaves(get()) for get, _ in _random_sources()]
    return [repr([leaf.tolist() if hasattr(leaf, "tolist") else leaf for leaf in found]) for found in leaves]


@contextlib.contextmanager
def random_numbers_stay() -> Iterator[None]:
    """Leaves the default generators as they were."""
    states = [(put, get()) for get, put in _random_sources()]
    try:
        yield
    finally:
        for put, state in states:
            put(state)


# --- contexts --------------------------------------------------------------------------------------------------------

_GRAD_MODES = (torch.no_grad, torch.enable_grad, torch.set_grad_enabled, torch.inference_mode)
_GENERATORS = contextlib._GeneratorContextManager  # sdpa_kernel, fork_rng and others
_CONTEXTS = (torch.autocast, *_GRAD_MODES, torch.autograd.graph.saved_tensors_hooks, _GENERATORS)
_OWN_CALLERS = ("torch.fx.", "torch.overrides")  # which enter contexts to trace, and around torch functions
_QUERIES = (
    *("is_grad_enabled", "is_inference_mode_enabled", "is_autocast_enabled", "is_autocast_cpu_enabled"),
    *("get_autocast_dtype", "get_autocast_cpu_dtype", "get_autocast_gpu_dtype"),
)
# What torch asks itself in its own functions, without another result there.
_MODES = (
    *((torch.compiler, name) for name in ("is_compiling", "is_dynamo_compiling", "is_exporting")),
    *((torch.jit, name) for name in ("is_tracing", "is_scripting")),
    *((torch, name) for name in ("get_default_dtype", "are_deterministic_algorithms_enabled", "is_anomaly_enabled")),
)


@contextlib.contextmanager
def _no_contexts(tracer: Tracer) -> Iterator[None]:
    """Raises if this thread enters, or asks for, a context that decides how operators compute, or what they keep, as a
    checkpoint does, or calls a ``torch.autograd.Function``: the graph would not contain it, or not its backward."""
    tracing = threading.get_ident()

    def refusing(
        function: Callable[..., Any], does: Callable[[Any], str], own: tuple[str, ...] = _OWN_CALLERS
    ) -> Callable[..., Any]:
        @functools.wraps(function)  # TorchDynamo, in another thread, may go by the name
        def called(*args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if threading.get_ident() == tracing and not caller.startswith(own):
                tracer.refused = True
                raise RuntimeError(f"it {does(args)}, which no graph shows")
            return function(*args, **kwargs)

        return called

    def enters(args: Any) -> str:
        return f"enters {getattr(args[0], 'func', type(args[0])).__name__}"

    def calls(args: Any) -> str:
        return f"calls {args[0].__name__}, a torch.autograd.Function with a backward"

    def asks(name: str, owner: Any = torch) -> Callable[[Any], str]:
        return lambda _: f"asks {owner.__name__}.{name}"

    with alone():  # otherwise a second thread could save the first one's replacements as originals
        contexts: list[tuple[Any, str, Callable[..., Any], Any]] = [
            (torch.autocast, "__init__", torch.autocast.__init__, enters),  # which asks what is on
            *((kind, "__enter__", kind.__enter__, enters) for kind in _CONTEXTS),
            *((torch, name, getattr(torch, name), asks(name)) for name in _QUERIES),
        ]
        apply: Any = vars(torch.autograd.Function)["apply"]
        applied = refusing(apply.__func__, calls)
        patches: list[tuple[Any, str, Any, Any]] = [
            *((owner, name, function, refusing(function, does)) for owner, name, function, does in contexts),
            (torch.autograd.Function, "apply", apply, classmethod(applied)),
        ]
        # torch imports torch.onnx when it is asked for.
        for owner, name in (*_MODES, (torch.onnx, "is_in_onnx_export")):
            mode = getattr(owner, name)
            patches.append((owner, name, mode, refusing(mode, asks(name, owner), ("torch.",))))
        try:
            for owner, name, _, replacement in patches:
                setattr(owner, name, replacement)
            yield
        finally:
            for owner, name, original, _ in patches:
                setattr(owner, name, original)

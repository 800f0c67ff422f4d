"""A module whose forward is replayed as a CUDA graph: one step of a sampler, called many times with the same sizes.

Such a step launches 2,000 short kernels, and the host takes longer to launch than the GPU to run them. A graph runs the
same kernels with the same arguments. It reads the memory that was there when it was recorded, so what may not change is
checked before each replay: that the other arguments are the same objects, and that the modules and the memory of their
parameters are. Whatever does not fit runs as it is.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchops.convert.adapter import Adapter
from torchops.convert.constants import Constants, Known
from torchops.convert.module import Layers, Replacement, restored
from torchops.convert.registry import module_reason
from torchops.convert.signature import Signature
from torchops.convert.state import State, Watch
from torchops.convert.values import PLAIN, is_same

DEVICE = "cuda"

# Graphs kept for a module: a sampler may run its samples in chunks of two sizes.
KEPT = 2

# Of the available memory, for what a step need not compute again.
KEPT_SHARE = 0.25


class StepGraph(Replacement):
    """Replaces a module by itself. In inference on a GPU, the third call of the same kind becomes a CUDA graph, and the
    calls after it replay that.

    A kind is the sizes and dtypes of tensors and everything else in the arguments. Tensors that were the same object in
    the second call as in the first are read where they are, the others are copied into the memory of the graph. What is
    computed from the former and from parameters alone is computed once, before the graph: nobody may change them
    through ``.data`` while the calls go on.

    A graph goes when one of those tensors does, which is when the prediction ends, or for a newer one. It is off under
    autograd, in training, under ``torch.compile`` and in a capture of the caller, where a module inside has hooks,
    for modules that draw random numbers, with the attribute ``step_graphs = False`` of the module, and with the
    environment variable ``TORCHOPS_STEP_GRAPHS=0``.
    """

    operator = "CUDA graph"
    step_graphs = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.why_not(args, kwargs) is not None:
            return self.released(*args, **kwargs)
        graphs = _graphs(self)
        if not graphs.lock.acquire(blocking=False):  # another thread's step
            return self.released(*args, **kwargs)
        try:
            return graphs.run(self, args, kwargs)
        finally:
            graphs.lock.release()

    def released(self, *args: Any, **kwargs: Any) -> Any:
        """The released forward, of the modules that are inside now."""
        return restored(self.__dict__["_former"], self)(*args, **kwargs)

    def why_not(self, args: Any, kwargs: Any) -> str | None:
        """Why a call cannot be a graph, or None."""
        if torch.compiler.is_compiling():
            return "it is compiled"
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not tensors or any(t.device.type != DEVICE for t in tensors):
            return "not all tensors are on a GPU"
        if not all(isinstance(leaf, (Tensor, *PLAIN)) or callable(leaf) for leaf in leaves):
            return "an argument may change unnoticed"
        if not self.step_graphs or os.environ.get("TORCHOPS_STEP_GRAPHS") == "0":
            return "graphs are switched off"
        if self.training or torch.is_grad_enabled():
            return "gradients may be needed"
        if any(type(t) is not Tensor or t.layout != torch.strided for t in tensors):
            return "an argument is of a subclass of Tensor, or sparse"
        if torch._C._functorch.peek_interpreter_stack() is not None or torch._C._get_tracing_state() is not None:
            return "it is transformed or traced"
        if torch._C._len_torch_dispatch_stack() or torch.overrides._get_current_function_mode_stack():
            return "a dispatch mode or a function mode is on"
        if _capturing():
            return "it is part of another graph"
        return None


class GraphAdapter(Adapter):
    """Modules that are one step of a sampler. They stay what they are, so there is nothing to compare."""

    def __init__(self, file: str, *classes: str) -> None:
        super().__init__(file, classes, StepGraph, Layers({}), {})

    def replacement(self, module: nn.Module, tried: dict[Any, str | None]) -> Replacement | str:
        return module_reason(module, type(module)) or self.made(module)

    def made(self, module: nn.Module) -> Replacement | str:
        """What runs the step of a module, or the reason why nothing does."""
        return StepGraph(module, self.names, Signature((), (), {}, {}, {}))


class _Leaf(NamedTuple):
    """An argument that has to be the same object, with the same content, in every call."""

    of: Callable[[], Any]
    version: Any

    @classmethod
    def holding(cls, value: Any, gone: Callable[[Any], object] | None = None) -> _Leaf:
        try:
            of: Callable[[], Any] = weakref.ref(value, gone)
        except TypeError:  # a plain value
            of = _Constant(value)
        return cls(of, _version(value))

    def matches(self, value: Any) -> bool:
        held = self.of()
        if held is value:
            return self.version == _version(value)
        return is_same(value, held)


class _Constant:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self) -> Any:
        return self.value


def _version(value: Any) -> Any:
    """What changes with the content of a tensor, or with its memory."""
    if isinstance(value, functools.partial):
        return [_version(t) for t in _held(value)]
    if not isinstance(value, Tensor):
        return None
    return value.data_ptr(), None if value.is_inference() else value._version


def _held(value: Any) -> list[Tensor]:
    """The tensors in an argument."""
    leaves = pytree.tree_leaves((value.args, value.keywords)) if isinstance(value, functools.partial) else [value]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


class _Recording(NamedTuple):
    graph: torch.cuda.CUDAGraph
    constants: Any  # which the graph reads
    copied: list[tuple[int, Tensor]]  # arguments of which each call has another, and their place in the graph
    result: Any


class _Kind:
    """The calls of one kind so far."""

    def __init__(self, leaves: list[Any], settings: Any, modules: State) -> None:
        self.settings, self.modules = settings, modules
        self.recording: _Recording | None = None
        self.constants: Any = None
        self.calls = 1
        self.varying: set[int] = set()
        self.leaves: list[_Leaf | None] = [_Leaf.holding(leaf) for leaf in leaves]

    def settle(self, leaves: list[Any], varying: Iterable[int]) -> None:
        """After the second call, it is known what changes. The rest must stay until it goes, and the graph with it."""
        itself = weakref.ref(self)

        def gone(_: Any) -> None:
            if (kind := itself()) is not None:
                kind.forget()

        self.calls, self.varying = 2, set(varying)
        self.leaves = [None if i in self.varying else _Leaf.holding(leaf, gone) for i, leaf in enumerate(leaves)]

    def forget(self) -> None:
        """Give the memory of the graph back. The next call starts again."""
        self.recording, self.constants, self.calls, self.leaves = None, None, 0, []

    def changed(self, leaves: list[Any]) -> list[int]:
        return [
            i
            for i, (leaf, value) in enumerate(zip(self.leaves, leaves, strict=True))
            if leaf and not leaf.matches(value)
        ]


class _Graphs:
    """The graphs of one module."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.kinds: OrderedDict[Any, _Kind] = OrderedDict()
        self.watch: Watch | None = None
        self.refused = False

    def run(self, module: StepGraph, args: Any, kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        key = (str(spec), tuple(map(_sizes, leaves)))
        if self.watch is None:
            self.watch = Watch(module)
        settings, modules = _settings(), self.watch.now(module)
        kind = self.kinds.get(key)
        if self.refused or modules.hooks:
            return module.released(*args, **kwargs)
        if kind is None or not kind.calls or (kind.settings, kind.modules) != (settings, modules):
            return self._first(module, args, kwargs, key, _Kind(leaves, settings, modules))
        self.kinds.move_to_end(key)
        changed = kind.changed(leaves)
        if kind.calls == 1:  # those that change from call to call are known now
            if not all(isinstance(leaves[i], Tensor) for i in changed):
                return self._first(module, args, kwargs, key, _Kind(leaves, settings, modules))
            kind.settle(leaves, changed)
            return self._second(module, args, kwargs, kind)
        if changed:  # another prediction
            return self._first(module, args, kwargs, key, _Kind(leaves, settings, modules))
        if kind.recording is None:
            kind.recording = self._record(module, leaves, spec, kind)
            if kind.recording is None:
                self.refused = True
                return module.released(*args, **kwargs)
        for i, place in kind.recording.copied:
            _distinct(place).copy_(_distinct(leaves[i]))
        kind.recording.graph.replay()
        return pytree.tree_map_only(Tensor, torch.clone, kind.recording.result)

    def _first(self, module: StepGraph, args: Any, kwargs: Any, key: Any, kind: _Kind) -> Any:
        former = self.kinds.pop(key, None)
        if former is not None:
            former.forget()
        while len(self.kinds) >= KEPT:
            self.kinds.popitem(last=False)[1].forget()
        before = _drawn(), [_version(leaf) for leaf in pytree.tree_leaves((args, kwargs))]
        result = module.released(*args, **kwargs)
        if before != (_drawn(), [_version(leaf) for leaf in pytree.tree_leaves((args, kwargs))]):
            self.refused = True  # it draws random numbers, or overwrites an argument
        else:
            self.kinds[key] = kind
        return result

    def _second(self, module: StepGraph, args: Any, kwargs: Any, kind: _Kind) -> Any:
        """Finds out what does not depend on the arguments that change, and keeps it for the graph."""
        if any(each._compiled_call_impl is not None for each in module.modules()):
            return module.released(*args, **kwargs)  # what compiled code reads is not seen
        leaves = enumerate(pytree.tree_leaves((args, kwargs)))
        given = [t for i, leaf in leaves if i not in kind.varying for t in _held(leaf)]
        constants = Constants([*given, *module.parameters(), *module.buffers()])
        with _without_cache(), constants:
            result = module.released(*args, **kwargs)
        size = constants.finish(result)
        if size is not None and size <= KEPT_SHARE * _available():
            kind.constants = constants.steps
        return result

    def _record(self, module: StepGraph, leaves: list[Any], spec: Any, kind: _Kind) -> _Recording | None:
        # With their layout: what shares memory is computed once.
        copied = [(i, _distinct(leaves[i]).clone().expand(leaves[i].shape)) for i in sorted(kind.varying)]
        places = list(leaves)
        for i, place in copied:
            places[i] = place
        args, kwargs = pytree.tree_unflatten(places, spec)

        def run() -> Any:
            with Known(kind.constants) if kind.constants else contextlib.nullcontext():
                return module.released(*args, **kwargs)

        while True:
            try:
                graph, result = _capture(run)
                return _Recording(graph, kind.constants, copied, result)
            except Exception as error:
                if kind.constants:  # its operators depend on more than the arguments that change
                    kind.constants = None
                    continue
                if not isinstance(error, RuntimeError):
                    raise
                reason = str(error).partition("\n")[0]
                name = type(module.__dict__["_former"]).__name__
                warnings.warn(f"{name} runs without a CUDA graph: {reason}", stacklevel=5)
                return None


def _capture(function: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """The graph of what `function` launches, which has not run yet, and its result."""
    graph = torch.cuda.CUDAGraph()
    try:
        # Other threads may allocate meanwhile.
        with _without_cache(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            result = function()
    except Exception:
        # A capture that fails leaves the generator in it, and the next random number would raise.
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        generator.graphsafe_set_state(generator.clone_state())
        raise
    return graph, result


def _without_cache() -> torch.autocast:
    """Autocast would take weights from its cache, which goes when the caller leaves autocast."""
    return torch.autocast(
        "cuda", torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled("cuda"), cache_enabled=False
    )


def _available() -> int:
    """Bytes of GPU memory that can be allocated."""
    return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def _capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()


def _distinct(t: Tensor) -> Tensor:
    """One of the rows that share memory, along each dimension."""
    for dim, stride in enumerate(t.stride()):
        if stride == 0:
            t = t.narrow(dim, 0, min(1, t.shape[dim]))
    return t


def _sizes(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device
    return type(leaf)


def _settings() -> Any:
    """What chooses kernels besides the arguments."""
    return (
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        torch.backends.cuda.matmul.fp32_precision,
        torch.backends.cudnn.fp32_precision,
        torch.backends.cudnn.benchmark,
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_inference_mode_enabled(),
        torch.cuda.current_stream(),
    )


def _drawn() -> Any:
    """Where the GPU's random numbers stand."""
    return torch.cuda.default_generators[torch.cuda.current_device()].get_offset()


_GRAPHS: weakref.WeakKeyDictionary[nn.Module, _Graphs] = weakref.WeakKeyDictionary()
_MAKING = threading.Lock()


def _graphs(module: nn.Module) -> _Graphs:
    """Not an attribute: copies and pickles of a module have graphs of their own."""
    with _MAKING:
        graphs = _GRAPHS.get(module)
        if graphs is None:
            graphs = _GRAPHS[module] = _Graphs()
        return graphs


def recorded(module: nn.Module) -> Iterator[torch.cuda.CUDAGraph]:
    """The graphs that a module holds now."""
    for kind in _graphs(module).kinds.values():
        if kind.recording is not None:
            yield kind.recording.graph

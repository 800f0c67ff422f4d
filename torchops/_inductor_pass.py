"""The pass behind :mod:`torchops.inductor`: its pattern, its replacement, and the hooks of Inductor that run it.

Imported when the pass is switched on, since it imports Inductor.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx.experimental.symbolic_shapes import statically_known_true

try:
    from torch._inductor.custom_graph_pass import CustomInferenceAwareGraphPass
except ImportError:  # torch 2.11, whose hooks do not tell passes whether a graph is for inference

    class CustomInferenceAwareGraphPass(CustomGraphPass):  # type: ignore[no-redef]
        pass


from .nn.replace import DTYPES

log = logging.getLogger("torchops.inductor")

aten = torch.ops.aten
_dense = torch.ops.myops.dense.default


# Operators that arrange the same elements otherwise.
_RESHAPES = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    aten.alias.default,
    aten.clone.default,
}
_PERMUTATIONS = {aten.permute.default, aten.transpose.int, aten.t.default}

# Marks the nodes that the pass made, from the joint graph to the graph that is compiled.
_MARK = "torchops_dense"
COUNTER = "torchops_dense"
# What describes the values of one node and not the place that it comes from.
_OF_VALUES = ("val", "tensor_meta", "eager_input_vals", "arg_kwarg_vals", "original_aten", "unbacked_bindings")


# --- the pattern -----------------------------------------------------------------------------------------------------


def _val(node: object) -> Tensor | None:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) else None


def _is(condition: Any) -> bool:
    """Whether a condition on sizes is known to hold. It adds no guard."""
    return statically_known_true(condition)


def _contiguous(t: Tensor) -> bool:
    step: Any = 1
    for size, stride in zip(reversed(t.shape), reversed(t.stride()), strict=True):
        if not (_is(size == 1) or _is(stride == step)):
            return False
        step = step * size
    return True


def _same(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(_is(m == n) for m, n in zip(a, b, strict=True))


class _RefusalError(Exception):
    """A sigmoid of a product that stays as it is, and why."""


def _source(node: fx.Node, targets: set[Any]) -> tuple[fx.Node, list[fx.Node]]:
    """Follows operators of `targets` upwards from `node`: where they begin, and they, the uppermost first."""
    chain: list[fx.Node] = []
    while node.op == "call_function" and node.target in targets:
        chain.insert(0, node)
        node = node.args[0]  # type: ignore[assignment]
    return node, chain


def _keeps_order(node: fx.Node) -> bool:
    """Whether the elements, read row by row, come out as they went in."""
    before, after = _val(node.args[0]), _val(node)
    if node.target not in _PERMUTATIONS:
        return True
    if before is None or after is None or node.target is not aten.permute.default:
        return False
    dims: Any = node.args[1]
    moved = [d % before.dim() for d in dims if not _is(before.shape[d] == 1)]
    return moved == sorted(moved)


def _is_product(node: fx.Node) -> bool:
    return node.target in (aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default)


def _is_one(node: fx.Node, *names: str) -> bool:
    return all(node.kwargs.get(name, 1) == 1 for name in names)


class _Place:
    """The nodes of one ``sigmoid(x @ w + b)``. `found` is false where there is no product."""

    def __init__(self, sigmoid: fx.Node) -> None:
        self.sigmoid = sigmoid
        self.add: fx.Node | None = None
        self.bias: fx.Node | None = None
        self.below: list[fx.Node] = []  # between product and addition
        top, above = _source(sigmoid.args[0], _RESHAPES | _PERMUTATIONS)  # type: ignore[arg-type]
        self.product = top
        if top.target is aten.add.Tensor:
            self._take_addition(top)
        self.found = self.product.op == "call_function" and _is_product(self.product)
        if self.found:
            self._check([*self.below, *([self.add] if self.add else []), *above])

    def _take_addition(self, add: fx.Node) -> None:
        for term, other in (add.args[:2], add.args[1::-1]):
            if not isinstance(term, fx.Node):
                continue
            product, below = _source(term, _RESHAPES | _PERMUTATIONS)
            # Of two products the one that is broadcast is the bias.
            before, after = _val(term), _val(add)
            if before is None or after is None:
                continue
            if _is_product(product) and _same(before.shape, after.shape):
                self.product, self.below, self.add = product, below, add
                self.bias = other if isinstance(other, fx.Node) else None
                if self._is_bias(self.bias):
                    return

    def _is_bias(self, bias: fx.Node | None) -> bool:
        """Whether it holds one value for each column of the product."""
        b, product = _val(bias), _val(self.product)
        return (
            b is not None
            and product is not None
            and b.dim() >= 1
            and _is(b.shape[-1] == product.shape[-1])
            and all(_is(n == 1) for n in b.shape[:-1])
        )

    def _check(self, chain: list[fx.Node]) -> None:
        product, sigmoid = self.product, self.sigmoid
        *bias, x, w = product.args
        values = [_val(node) for node in (product, sigmoid, sigmoid.args[0], x, w, *chain)]
        if any(value is None for value in values):
            raise _RefusalError("another pass left a node without its shape")
        z, y, before, xv, wv = (value for value in values[:5] if value is not None)
        if any(len(node.users) != 1 for node in (product, *chain)) or self.bias in (product, *self.below):
            raise _RefusalError("the pre-activation has another user")
        if not _is_one(product, "alpha", "beta"):
            raise _RefusalError("addmm scales its terms")
        if bias:
            if self.add is not None:
                raise _RefusalError("something is added to a layer that has its bias")
            self.bias = bias[0]  # type: ignore[assignment]
        if self.add is not None:
            if not _is_one(self.add, "alpha"):
                raise _RefusalError("the bias is scaled")
            if not all(map(_keeps_order, self.below)):
                raise _RefusalError("the bias does not belong to the columns of the product")
        if (bias or self.add is not None) and not self._is_bias(self.bias):
            raise _RefusalError("what is added is not one value per output feature")
        b = _val(self.bias)
        operands = [xv, wv, y] if b is None else [xv, wv, y, b]
        if any(t.dtype != z.dtype or t.device != z.device or t.layout != torch.strided for t in operands):
            raise _RefusalError("dtypes, devices or layouts differ")
        if z.dtype not in DTYPES:
            raise _RefusalError(f"dense has no kernel for {z.dtype}")
        if z.dim() == 3 and not _is(z.shape[0] == 1) and not _is(wv.stride(0) == 0):
            raise _RefusalError("each matrix of the batch has its own weight")
        # The arrangements above the sigmoid are kept, and they must hand on what the sigmoid did.
        strides = zip(y.shape, before.stride(), y.stride(), strict=True)
        if not _contiguous(z) or not all(_is(n == 1) or _is(a == c) for n, a, c in strides):
            raise _RefusalError("the result would have other strides")
        self._check_device(z, xv)

    def _check_device(self, z: Tensor, x: Tensor) -> None:
        if z.device.type == "cpu":
            return
        if z.device.type != "cuda" or not torch._C._dispatch_has_kernel_for_dispatch_key("myops::dense", "CUDA"):
            raise _RefusalError(f"dense has no kernel for {z.device.type}")
        if torch.cuda.get_device_capability(z.device) != (9, 0):
            raise _RefusalError("the fused kernel needs compute capability 9.0")
        tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
        if z.dtype == torch.float64 or (z.dtype == torch.float32 and not tf32):
            raise _RefusalError(f"the fused kernel does not compute in {z.dtype}")
        if not all(_is(n * z.element_size() % 16 == 0) for n in (x.shape[-1], z.shape[-1])):
            raise _RefusalError("the fused kernel needs rows of a multiple of 16 bytes")

    # --- its replacement ---------------------------------------------------------------------------------------------

    def rewrite(self) -> None:
        graph, product = self.sigmoid.graph, self.product
        x, w = product.args[-2:]
        with graph.inserting_before(self.add or product):
            batch = product.meta["val"].dim() == 3
            if batch and _is(product.meta["val"].shape[0] == 1):
                # A batch of one is how einsum writes a product of matrices.
                x, w = self._emit(aten.squeeze.dim, x, 0), self._emit(aten.squeeze.dim, w, 0)
                dense = self._emit(aten.unsqueeze.default, self._emit_dense(x, w), 0)
            else:
                dense = self._emit_dense(x, self._emit(aten.select.int, w, 0, 0) if batch else w)
        # The arrangements between product, addition and sigmoid now hand on the result. They come after the bias.
        for node in reversed(self.below):
            dense.append(node)
        product.replace_all_uses_with(dense)
        dead = [self.sigmoid, *([self.add] if self.add else []), product]
        if self.add is not None:
            self.add.replace_all_uses_with(self.below[-1] if self.below else dense)
        self.sigmoid.replace_all_uses_with(self.sigmoid.args[0])  # type: ignore[arg-type]
        for node in dead:
            inputs = node.all_input_nodes
            graph.erase_node(node)
            for source in inputs:
                _erase_unused(source)

    def _emit_dense(self, x: Any, w: Any) -> fx.Node:
        """`dense` of x (..., in) and w (in, out)."""
        w = self._emit(aten.permute.default, w, [1, 0])
        value = w.meta["val"]
        if value.device.type == "cuda" and not _is(value.stride(1) == 1):
            # The fused kernel reads rows of w; a copy of the weight costs little beside a pass over the result.
            w = self._emit(aten.clone.default, w, memory_format=torch.contiguous_format)
        b: Any = self.bias
        if b is not None and b.meta["val"].dim() > 1:
            b = self._emit(aten.squeeze.dims, b, list(range(b.meta["val"].dim() - 1)))
        dense = self._emit(_dense, x, w, b)
        dense.meta[_MARK] = True
        return dense

    def _emit(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """A node in the place of the product: what is recomputed or saved there, and its source line, stay the same."""
        node = self.sigmoid.graph.call_function(target, args, kwargs)
        node.meta = {key: value for key, value in self.product.meta.items() if key not in _OF_VALUES}
        values = fx.map_arg(args, lambda n: n.meta["val"])
        with torch.no_grad():
            node.meta["val"] = target(*values, **kwargs)
        return node


def _erase_unused(node: fx.Node) -> None:
    while (
        not node.users
        and node.op == "call_function"
        and node.target in _RESHAPES | _PERMUTATIONS | {aten.expand.default}
    ):
        source: fx.Node = node.args[0]  # type: ignore[assignment]
        node.graph.erase_node(node)
        node = source


def _where(node: fx.Node) -> str:
    """The line of the user's code."""
    lines = [line.strip() for line in node.meta.get("stack_trace", "").splitlines()]
    files = [line for line in lines if line.startswith("File ")]
    return files[-1] if files else node.name


# --- the hooks -------------------------------------------------------------------------------------------------------


def _uuid() -> Any:
    # A graph with dense on CUDA must not reach a library that was built without it.
    on_cuda = torch._C._dispatch_has_kernel_for_dispatch_key("myops::dense", "CUDA")
    return get_hash_for_files((__file__,), extra=str(on_cuda))


class RewriteSigmoidLinear(CustomGraphPass):
    """For ``joint_custom_pre_pass``: rewrites every place of a graph of ATen operators."""

    def __call__(self, graph: fx.Graph) -> None:
        for sigmoid in graph.find_nodes(op="call_function", target=aten.sigmoid.default):
            try:
                place = _Place(sigmoid)
                if not place.found:
                    continue
                place.rewrite()
                log.info("rewritten to myops.dense: %s", _where(sigmoid))
            except _RefusalError as reason:
                log.info("left as it is, since %s: %s", reason, _where(sigmoid))

    def uuid(self) -> Any:
        return _uuid()


class CountMatches(CustomGraphPass):
    """For ``post_grad_custom_pre_pass``: counts what was rewritten, in the counters of ``torch._dynamo.utils``.

    Inductor stores with a compiled graph what its counters gained from there on, and adds that again when the graph
    comes from the cache. What runs on the joint graph is not part of it.
    """

    def __call__(self, graph: fx.Graph) -> None:
        # What a backward graph holds of the forward pass, it recomputes.
        if any(node.name.startswith("tangents") for node in graph.find_nodes(op="placeholder")):
            return
        for node in graph.find_nodes(op="call_function", target=_dense):
            counters["inductor"][COUNTER] += node.meta.get(_MARK, False)

    def uuid(self) -> Any:
        return _uuid()


class Chain(CustomInferenceAwareGraphPass):
    """The passes of one hook in turn: what it held before, then ours."""

    def __init__(self, former: Any, ours: CustomGraphPass) -> None:
        self.former = former
        before = former if isinstance(former, (list, tuple)) else [] if former is None else [former]
        self.passes = (*before, ours)

    def __call__(self, graph: fx.Graph, is_inference: bool = False) -> None:
        for graph_pass in self.passes:
            if isinstance(graph_pass, CustomInferenceAwareGraphPass):
                graph_pass(graph, is_inference)
            else:
                graph_pass(graph)

    def uuid(self) -> Any:
        """None, which keeps graphs out of Inductor's cache, where a pass does not say what identifies it."""
        uuids = [p.uuid() if isinstance(p, CustomGraphPass) else None for p in self.passes]
        return None if None in uuids else tuple(uuids)


HOOKS = {"joint_custom_pre_pass": RewriteSigmoidLinear, "post_grad_custom_pre_pass": CountMatches}


def chained(hook: str) -> Chain:
    """What `hook` holds when the pass is on."""
    value = getattr(config, hook)
    return value if isinstance(value, Chain) else Chain(value, HOOKS[hook]())

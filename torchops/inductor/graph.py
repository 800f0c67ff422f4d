"""Helpers for graphs of ATen operators: values, layouts, arrangements, new nodes."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

aten = torch.ops.aten
cast = torch.ops.prims.convert_element_type.default
CASTS = {cast, aten._to_copy.default}  # the latter where Inductor's decompositions don't apply

# Operators that return the same elements in another arrangement.
VIEWS = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
}
SAME = {aten.alias.default, aten.clone.default, aten.detach.default}
RESHAPES = VIEWS | SAME
PERMUTATIONS = {aten.permute.default, aten.transpose.int, aten.t.default}
PARTS = {aten.split.Tensor, aten.split_with_sizes.default, aten.slice.Tensor, operator.getitem}

# The metadata that describes the values of a node, not where it comes from.
_OF_VALUES = ("val", "tensor_meta", "eager_input_vals", "arg_kwarg_vals", "original_aten", "unbacked_bindings")


class Refusal(Exception):  # noqa: N818 (it is an answer, not an error)
    """A place that is left as it is, and why."""


def val(node: object) -> Tensor | None:
    """The fake tensor of a node, or None if another pass removed it."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) else None


def known(node: object) -> Tensor:
    """The same, for nodes that must have one to be rewritten."""
    value = val(node)
    if value is None:
        raise Refusal("another pass left a node without its shape")
    return value


def holds(condition: Any) -> bool:
    """Whether a condition on sizes is known to hold. Adds no guard."""
    return statically_known_true(condition)


def same_sizes(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(holds(m == n) for m, n in zip(a, b, strict=True))


def contiguous(t: Tensor) -> bool:
    step: Any = 1
    for size, stride in zip(reversed(t.shape), reversed(t.stride()), strict=True):
        if not (holds(size == 1) or holds(stride == step)):
            return False
        step = step * size
    return True


def is_call(node: object, targets: Iterable[Any]) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def source(node: fx.Node, targets: set[Any]) -> tuple[fx.Node, list[fx.Node]]:
    """Follows operators in `targets` upwards from `node`. Returns where they begin, and the operators, uppermost
    first."""
    chain: list[fx.Node] = []
    while is_call(node, targets):
        chain.insert(0, node)
        node = node.args[0]  # type: ignore[assignment]
    return node, chain


def is_overwritten(node: fx.Node) -> bool:
    """Whether the node is an argument of a joint graph, or a view of one, that the program overwrites.

    AOTAutograd differentiates with respect to a copy of such an argument, which Inductor does not make.
    """
    is_copied = False
    while is_call(node, {operator.getitem, aten.clone.default}) or _is_view(node):
        is_copied |= node.target is aten.clone.default
        node = node.args[0]  # type: ignore[assignment]
    if node.op != "placeholder":
        return False
    return is_copied or any(is_call(user, {aten.copy_.default}) and user.args[0] is node for user in node.users)


def _is_view(node: fx.Node) -> bool:
    """Whether the node is of any operator whose result shares the memory of its first argument."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return any(r.alias_info is not None and not r.alias_info.is_write for r in node.target._schema.returns)


def keeps_order(node: fx.Node) -> bool:
    """Whether the operator keeps the order of the elements, read row by row."""
    before, after = val(node.args[0]), val(node)
    if node.target not in PERMUTATIONS:
        return True
    if before is None or after is None or node.target is not aten.permute.default:
        return False
    dims: Any = node.args[1]
    moved = [d % before.dim() for d in dims if not holds(before.shape[d] == 1)]
    return moved == sorted(moved)


def key(node: Any) -> Hashable:
    """Equal for nodes that arrange and cast the same tensor in the same way: autograd and autocast write some of them
    twice."""
    if not isinstance(node, fx.Node):
        return repr(node)
    if is_call(node, SAME):
        return key(node.args[0])
    if node.target is aten.permute.default:
        below, dims = node.args[0], node.args[1]
        if is_call(below, SAME):
            below, _ = source(below, SAME)  # type: ignore[arg-type]
        if is_call(below, {aten.permute.default}) and [dims[d] for d in below.args[1]] == list(range(len(dims))):  # type: ignore
            return key(below.args[0])  # type: ignore[union-attr]
    if is_call(node, VIEWS | PERMUTATIONS | CASTS):
        value = val(node)
        shape = None if value is None or node.target not in VIEWS else str(tuple(value.shape))
        rest = None if shape else tuple(map(repr, (*node.args[1:], *node.kwargs.items())))
        return ("view" if shape else node.target, key(node.args[0]), shape, rest)
    return node


def where(node: fx.Node) -> str:
    """The line of the user's code. The path is relative to the working directory, or as it was imported."""
    lines = [line.strip() for line in node.meta.get("stack_trace", "").splitlines()]
    files = [line for line in lines if line.startswith('File "')]
    if not files:
        return node.name
    name, _, rest = files[-1].removeprefix('File "').partition('"')
    return f'File "{_relative(Path(name))}"{rest}'


def _relative(path: Path) -> Path:
    """The path without this machine's folders, which mean nothing where reports are read."""
    folders = sorted({Path(folder).absolute() for folder in sys.path}, key=lambda folder: -len(folder.parts))
    for folder in (Path.cwd(), *folders):
        if path.is_relative_to(folder) and folder != Path(folder.anchor):
            return path.relative_to(folder)
    return path


def emit(like: fx.Node, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
    """A new node that stands for `like`: it inherits what decides about recomputing and saving, and the source line.

    Inserted at the current insertion point of the graph.
    """
    node = like.graph.call_function(target, args, kwargs)
    node.meta = {name: value for name, value in like.meta.items() if name not in _OF_VALUES}
    values: Any
    options: Any
    values, options = (
        fx.node.map_aggregate(a, lambda n: n.meta["val"] if isinstance(n, fx.Node) else n) for a in (args, kwargs)
    )
    with torch.no_grad():
        node.meta["val"] = target(*values, **options)
    return node


def size_node(like: fx.Node, tensor: fx.Node, dim: int) -> Any:
    """A size of `tensor`, as an argument of a node."""
    size = known(tensor).shape[dim]
    return size if isinstance(size, int) else emit(like, aten.sym_size.int, tensor, dim)


def as_rows(like: fx.Node, node: fx.Node, rows: Any, columns: int) -> fx.Node:
    """`node` as a matrix of `rows` and `columns`."""
    value = known(node)
    if not contiguous(value):
        node = emit(like, aten.clone.default, node, memory_format=torch.contiguous_format)
    if value.dim() == 2 and holds(value.shape[-1] == columns):
        return node
    return emit(like, aten.view.default, node, [rows, columns])


def out_in(like: fx.Node, w: fx.Node) -> fx.Node:
    """The weight as (out, in), from the w of shape (in, out) of a product."""
    w = emit(like, aten.permute.default, w, [1, 0])
    value = known(w)
    if value.device.type == "cuda" and not holds(value.stride(1) == 1):
        # The fused kernels read rows of w. A copy of the weight is cheap beside a pass over the result.
        w = emit(like, aten.clone.default, w, memory_format=torch.contiguous_format)
    return w


def erase_unused(nodes: Iterable[fx.Node]) -> None:
    """Erases those of `nodes`, and the arrangements above them, that have no users."""
    waiting = list(nodes)
    erased: set[fx.Node] = set()
    while waiting:
        node = waiting.pop()
        if node in erased or node.users or node.op != "call_function":
            continue
        above = node.all_input_nodes
        node.graph.erase_node(node)
        erased.add(node)
        waiting += [n for n in above if is_call(n, RESHAPES | PERMUTATIONS | PARTS | {aten.expand.default})]
        waiting += [n for n in nodes if n in above]

"""Factors of a gate: results of linear layers, or some of their columns."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from torchops.inductor.expressions import (
    is_arrangement,
    is_cast,
)
from torchops.inductor.graph import (
    PARTS,
    aten,
    holds,
    is_call,
    known,
    val,
)
from torchops.inductor.linear import Linear

__all__ = ["Term", "term_of"]


@dataclass
class Term:
    """The result of a linear layer, or the columns `begin` to `end` of it."""

    node: fx.Node
    linear: Linear
    begin: int = 0
    end: int | None = None
    nodes: set[fx.Node] = field(default_factory=set)  # from the product to `node`

    def same(self, other: Term | None) -> bool:
        if other is None:
            return False
        ours, theirs = ((t.linear.product, t.linear.add, t.begin, t.end) for t in (self, other))
        return ours == theirs


def term_of(node: fx.Node) -> Term | None:
    """`node` as the result of a linear layer, whose elements are in the order of the product; None if it isn't one."""
    if is_call(node, PARTS):
        return _part_of(node)
    if is_arrangement(node):
        return None
    linear = Linear(node)
    return Term(node, linear, nodes=set(linear.nodes)) if linear.found and linear.in_order else None


def _part_of(node: fx.Node) -> Term | None:
    """A part of a linear layer: ``getitem(split(z), i)`` or ``slice(z)``, along the columns."""
    split: Any = node.args[0]
    nodes = {node}
    if node.target is operator.getitem:
        if not is_call(split, {aten.split.Tensor, aten.split_with_sizes.default}):
            return None
        whole: Any = split.args[0]
        dim = split.args[2] if len(split.args) > 2 else split.kwargs.get("dim", 0)
        nodes.add(split)
    else:
        whole, dim = split, node.args[1] if len(node.args) > 1 else 0
    base, casts = _below_casts(whole)
    linear = Linear(base)
    value, part = val(base), val(node)
    if (
        not linear.found
        or not linear.in_order
        or value is None
        or part is None
        or value.dim() < 1
        or int(dim) % value.dim() != value.dim() - 1
    ):
        return None
    # The rows that are split must be rows of the product.
    if not holds(value.shape[-1] == known(linear.product).shape[-1]) or not isinstance(value.shape[-1], int):
        return None
    width = part.shape[-1]
    if node.target is operator.getitem:
        sizes = split.args[1]
        begin = node.args[1] * sizes if isinstance(sizes, int) else sum(sizes[: node.args[1]])  # type: ignore
    else:
        begin = node.args[2] if len(node.args) > 2 else 0
        if len(node.args) > 4 and node.args[4] != 1:
            return None
    if not isinstance(begin, int) or not isinstance(width, int):
        return None
    columns = value.shape[-1]
    begin = min(max(begin + columns if begin < 0 else begin, 0), columns)
    return Term(node, linear, begin, begin + width, nodes | set(casts) | set(linear.nodes))


def _below_casts(node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    casts = []
    while isinstance(node, fx.Node) and is_cast(node):
        casts.append(node)
        node = node.args[0]  # type: ignore[assignment]
    return node, casts

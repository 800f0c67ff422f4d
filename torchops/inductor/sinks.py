"""Where the cotangents of products are read in a joint graph: by the products with the weight and with x, and by the
sum that is the gradient of a bias."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from torchops.inductor.expressions import is_arrangement
from torchops.inductor.graph import Refusal, aten, cast, emit, holds, is_call, key, known, same_sizes
from torchops.inductor.terms import Term

ELSEWHERE = "its gradient is computed in a way that is not known"
NOT_ALL = "not all of its gradients are asked for, and no measurement is about some of them"


class Sinks:
    """What reads dv, du, or both as one matrix: the products with the weight and with x, and the sum."""

    def __init__(self, tops: list[fx.Node]) -> None:
        self.tops = tops
        self.arranged: set[fx.Node] = set(tops)
        self.dx: list[fx.Node] = []
        self.dw: list[tuple[fx.Node, bool]] = []  # with whether it is (in, out)
        self.db: list[fx.Node] = []
        self.cat: list[fx.Node] = []
        self.permuted: set[fx.Node] = set()

    def collect(self, term: Term, has_halves: bool) -> None:
        waiting = list(self.tops)
        while waiting:
            node = waiting.pop()
            for user in list(node.users):
                if user in self.arranged or self._take(node, user, term, has_halves):
                    continue
                if not is_arrangement(user):
                    raise Refusal(ELSEWHERE)
                self.arranged.add(user)
                waiting.append(user)

    def _take(self, node: fx.Node, user: fx.Node, term: Term, has_halves: bool) -> bool:
        linear = term.linear
        if is_call(user, {aten.mm.default}):
            if user.args[0] is node and is_transposed(user.args[1], linear.w):
                self.dx.append(user)
            elif user.args[1] is node and is_transposed(user.args[0], linear.x):
                self.dw.append((user, True))
            else:
                return False
            return True
        if is_call(user, {aten.permute.default}) and list(user.args[1]) == [1, 0]:  # type: ignore[arg-type]
            if not all(is_call(n, {aten.mm.default}) and n.args[0] is user for n in user.users):
                return False
            if any(key(n.args[1]) != key(linear.x) for n in user.users):
                return False
            self.permuted.add(user)
            self.dw += [(n, False) for n in user.users]
            return True
        if is_call(user, {aten.sum.dim_IntList}):
            dims: Any = user.args[1]
            rank, z, total = known(node).dim(), known(linear.product), known(user)
            if sorted(d % rank for d in dims) != list(range(rank - 1)):
                return False
            if total.dtype != z.dtype or not holds(total.numel() == z.shape[-1]):
                return False
            self.db.append(user)
            return True
        if has_halves and is_call(user, {aten.cat.default}):
            self.cat.append(user)
            return True
        return False

    def check(self, has_bias: bool, partial: bool = False) -> None:
        """Checks that there is exactly one of each that there may be; at most one if some may be missing."""
        counts = [len(self.dx), len(self.dw), len(self.db)]
        if max(counts) > 1 or len(self.db) > has_bias or (not partial and counts != [1, 1, has_bias]):
            raise Refusal(NOT_ALL)

    @property
    def nodes(self) -> set[fx.Node]:
        return {*self.arranged, *self.permuted, *self.dx, *self.db, *self.cat, *(node for node, _ in self.dw)}


def is_transposed(node: Any, other: fx.Node) -> bool:
    """Whether `node` is the transpose of a matrix."""
    if is_call(node, {aten.permute.default}) and list(node.args[1]) == [1, 0] and key(node.args[0]) == key(other):
        return True
    base = key(other)
    transpose = [1, 0]
    return (
        isinstance(base, tuple)
        and base[0] is aten.permute.default
        and base[3] == (repr(transpose),)
        and base[1] == key(node)
    )


def replace_sinks(sinks: Sinks, dx: fx.Node | None, dw: fx.Node | None, db: fx.Node | None) -> None:
    """Puts the gradients where they were computed. dx may already be used elsewhere; others may not be needed."""
    if dx is not None:
        replace(sinks.dx[0], dx, list(known(dx).shape))
    for node, is_in_out in sinks.dw:
        assert dw is not None
        if is_in_out:
            with node.graph.inserting_before(node):
                dw = emit(node, aten.permute.default, dw, [1, 0])
                # The strides of the product: they are those of a gradient that is returned, and views need them.
                dw = emit(node, aten.clone.default, dw, memory_format=torch.contiguous_format)
        replace(node, dw, [])
    for node in sinks.db:
        assert db is not None
        replace(node, db, list(known(node).shape))


def replace(node: fx.Node, by: fx.Node, sizes: list[Any]) -> None:
    """Replaces `node` by the same elements, in its shape and dtype. `sizes` is its shape as arguments of a node."""
    value = known(node)
    with node.graph.inserting_before(node):
        if not same_sizes(known(by).shape, value.shape):
            by = emit(node, aten.view.default, by, sizes)
        if known(by).dtype != value.dtype:
            by = emit(node, cast, by, value.dtype)
    node.replace_all_uses_with(by)

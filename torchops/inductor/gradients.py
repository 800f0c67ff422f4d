"""Finds the gradients of a gate or a GLU in a joint graph and replaces them by the backward operator.

With the cotangent g, the gate's pre-activation u and the other factor v (or z), autograd computes

    dv = g * act(u)        du = g * v * act'(u)

and from du, and from dv of a GLU, the products and sums that are the gradients of x, weights and biases. The operator's
own backward computes them all from the arguments of the forward pass.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import fx

from torchops.inductor.expressions import (
    ACTIVATIONS,
    Evaluator,
    UnknownError,
    Values,
    formula,
    is_arrangement,
    is_pointwise,
    points,
    root,
    slope,
)
from torchops.inductor.graph import (
    PARTS,
    Refusal,
    as_rows,
    aten,
    emit,
    holds,
    is_call,
    is_overwritten,
    key,
    known,
    same_sizes,
)
from torchops.inductor.sinks import ELSEWHERE, NOT_ALL, Sinks, replace, replace_sinks
from torchops.inductor.terms import Term, term_of

_gate_backward = torch.ops.myops._gate_backward.default
_glu_backward = torch.ops.myops._glu_backward.default

_U, _V, _G = points(0), points(1), points(2)


class Pattern(Protocol):
    """A gate that was found in a graph."""

    result: fx.Node
    gate: Term | None
    value: Term | None
    v: fx.Node | None
    activation: str
    private: set[fx.Node]
    columns: Any
    sizes: Any


class Gradients:
    """Everything from the gate to its gradients, proven to compute those of the operator; refuses anything else.

    With `partial`, gradients may be missing, which the operator then leaves out.
    """

    def __init__(self, place: Pattern, partial: bool) -> None:
        self.place, self.partial = place, partial
        self.order = {node: i for i, node in enumerate(place.result.graph.nodes)}
        self.cotangent: fx.Node | None = None
        self.seen: set[fx.Node] = set()
        self._inside = self._descendants()
        assert place.gate is not None
        self._v_root = None if place.v is None else root(place.v)
        self.dv: list[fx.Node] = []
        self.du: list[fx.Node] = []
        self._search()
        self._check_biases()
        self._collect()

    @property
    def nodes(self) -> set[fx.Node]:
        return self.seen.union(*(sinks.nodes for sinks in self.sinks))

    def _descendants(self) -> set[fx.Node]:
        """Everything computed from the nodes inside the gate, but not from its result."""
        found = set(self.place.private)
        waiting = list(found)
        while waiting:
            for user in waiting.pop().users:
                if user not in found and user is not self.place.result:
                    found.add(user)
                    waiting.append(user)
        return found

    def _leaf(self, node: fx.Node) -> Values | None:
        place = self.place
        term = term_of(node)
        if term is not None and term.same(place.gate):
            return _U
        if term is not None and term.same(place.value):
            return _V
        if self._v_root is not None and (node is place.v or root(node) is self._v_root):
            return _V
        if node in self._inside:
            return None
        if self._multiplies_v(node):
            return None
        if is_arrangement(node) and root(node) is not node:
            return None
        if self.cotangent is None:
            self.cotangent = node
        if key(node) != key(self.cotangent):
            raise UnknownError(node)
        return _G

    def _multiplies_v(self, node: fx.Node) -> bool:
        """Whether the node is the product g * v, which autograd computes first."""
        if self._v_root is None or not is_call(node, {aten.mul.Tensor}) or not is_pointwise(node):
            return False
        return any(root(n) is self._v_root for n in node.all_input_nodes)

    def _search(self) -> None:
        """Follows what is computed from the nodes inside the gate until it is dv or du."""
        place = self.place
        activation = ACTIVATIONS[place.activation]
        dv = formula(lambda g, u: g * activation(u), _G, _U)
        du = formula(lambda g, v, u: g * v * slope(place.activation, u), _G, _V, _U)
        evaluate = Evaluator(self._leaf)
        waiting = [u for node in place.private for u in node.users if u not in place.private and u is not place.result]
        while waiting:
            node = min(waiting, key=self.order.__getitem__)
            waiting = [n for n in waiting if n is not node]
            if node in self.seen:
                continue
            self.seen.add(node)
            if is_call(node, PARTS) and (node.target is not operator.getitem or term_of(node) is not None):
                pass
            elif not is_arrangement(node) and not is_pointwise(node):
                raise Refusal(
                    ELSEWHERE if self.cotangent is not None else "the pre-activation or the gate has another user"
                )
            elif evaluate.is_formula(node, dv):
                self.dv.append(node)
                continue
            elif evaluate.is_formula(node, du):
                self.du.append(node)
                continue
            waiting += node.users
        if self.cotangent is None:
            raise Refusal("the pre-activation or the gate has another user")
        if not (self.dv or self.du) or not (self.partial or (self.dv and self.du)):
            raise Refusal(NOT_ALL)
        # A product of the backward pass is a gate, too: that of a cotangent, where a sigmoid is gated.
        first = min(self.order[node] for node in (*self.dv, *self.du))
        if first < self.order[place.result] or first < self.order[self.cotangent]:
            raise Refusal(ELSEWHERE)

    def _check_biases(self) -> None:
        """Autograd keeps no bias, so that a program may overwrite it before the backward pass; the operator's own reads
        it."""
        for term in (self.place.gate, self.place.value):
            if term is not None and term.linear.bias is not None and is_overwritten(term.linear.bias):
                raise Refusal("its bias is overwritten, and its gradient needs the former one")

    def _collect(self) -> None:
        place = self.place
        assert place.gate is not None
        gate = Sinks(self.du)
        halves = place.value is not None and place.gate.end is not None
        gate.collect(place.gate, halves)
        self.sinks = [gate]
        has_bias = place.gate.linear.bias is not None
        if place.value is None:
            gate.check(has_bias, self.partial)
        elif halves:
            value = Sinks(self.dv)
            value.collect(place.value, True)
            if not self.dv or not self.du:
                raise Refusal(NOT_ALL)
            cats = set(gate.cat) | set(value.cat)
            if len(cats) != 1 or any(s.dx or s.dw or s.db or len(s.cat) != 1 for s in (gate, value)):
                raise Refusal(ELSEWHERE)
            (cat,) = cats
            self._check_halves(cat, gate, value)
            packed = Sinks([cat])
            packed.collect(place.gate, False)
            packed.check(has_bias, self.partial)
            self.sinks = [packed, gate, value]
        else:
            value = Sinks(self.dv)
            value.collect(place.value, False)
            gate.check(has_bias, self.partial)
            value.check(place.value.linear.bias is not None, self.partial)
            self.sinks = [value, gate]
            if value.dx and gate.dx:
                self._joined = self._join(value.dx[0], gate.dx[0])
            elif value.dx or gate.dx:
                raise Refusal(ELSEWHERE)
        g, y = known(self.cotangent), known(place.result)
        # g may have another shape, because it is above arrangements.
        if g.dtype != y.dtype or not holds(g.numel() == y.numel()):
            raise Refusal(ELSEWHERE)
        if place.value is None and not all(same_sizes(known(node).shape, y.shape) for node in self.dv):
            raise Refusal(ELSEWHERE)

    def _check_halves(self, cat: fx.Node, gate: Sinks, value: Sinks) -> None:
        place = self.place
        assert place.gate is not None
        assert place.value is not None
        parts: Any = cat.args[0]
        dim: Any = cat.args[1] if len(cat.args) > 1 else 0
        first, second = (value, gate) if place.value.begin == 0 else (gate, value)
        if len(parts) != 2 or dim % known(cat).dim() != known(cat).dim() - 1:
            raise Refusal(ELSEWHERE)
        if parts[0] not in first.arranged or parts[1] not in second.arranged:
            raise Refusal(ELSEWHERE)

    @staticmethod
    def _join(value: fx.Node, gate: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Finds where the products that give dx are added to each other or to something else, and what remains without
        the gate's product.

        On the way there, each product is arranged and cast, which can be done with the sum instead.
        """

        def additions(node: fx.Node) -> dict[fx.Node, fx.Node]:
            found: dict[fx.Node, fx.Node] = {}
            while len(node.users) == 1:
                (user,) = node.users
                if is_call(user, {aten.add.Tensor}) and is_pointwise(user) and len(user.all_input_nodes) == 2:
                    if user.kwargs.get("alpha", 1) != 1:
                        break
                    found[user] = node
                elif not is_arrangement(user):
                    break
                node = user
            return found

        ours, theirs = additions(gate), additions(value)
        if not ours or not any(node in theirs for node in ours):
            raise Refusal(ELSEWHERE)
        node, operand = next(iter(ours.items()))
        (rest,) = (n for n in node.all_input_nodes if n is not operand)
        if known(rest).dtype != known(node).dtype:
            raise Refusal(ELSEWHERE)
        return node, rest

    # --- the replacement ---------------------------------------------------------------------------------------------

    def rewrite(self, arguments: tuple[Any, ...], rows: Any, products: Sequence[fx.Node]) -> None:
        """`arguments` are those of the operator; its backward takes them after the cotangent.

        `products` are those that training saves; otherwise the backward recomputes them.
        """
        place, tops = self.place, [*self.dv, *self.du]
        first = min(tops, key=self.order.__getitem__)
        cotangent = self.cotangent
        assert cotangent is not None

        def new(target: Callable[..., Any], *args: Any) -> fx.Node:
            return emit(first, target, *args)

        output_mask = self._output_mask(arguments[3:])
        with place.result.graph.inserting_before(first):
            g = as_rows(first, cotangent, rows, place.columns)
            if place.value is None:
                backward = new(_gate_backward, g, *arguments, output_mask, False, *products)
            else:
                backward = new(_glu_backward, g, *arguments, place.activation, output_mask, *products)
            outputs = [new(operator.getitem, backward, i) if needed else None for i, needed in enumerate(output_mask)]
        if place.value is None:
            dv, dx, dw, db = outputs
            for node in self.dv:
                assert dv is not None
                replace(node, dv, place.sizes)
            replace_sinks(self.sinks[0], dx, dw, db)
            return
        dx, dw, dwg, db, dbg = outputs
        if len(self.sinks) == 2:
            if dx is not None:
                joined, rest = self._joined
                joined.replace_all_uses_with(rest)
                self.seen.add(joined)
            replace_sinks(self.sinks[0], dx, dw, db)
            replace_sinks(self.sinks[1], None, dwg, dbg)
            return
        assert place.gate is not None
        pairs = ((dw, dwg), (db, dbg)) if place.gate.begin else ((dwg, dw), (dbg, db))
        with place.result.graph.inserting_before(first):
            both = [None if None in pair else new(aten.cat.default, list(pair)) for pair in pairs]
        replace_sinks(self.sinks[0], dx, *both)

    def _output_mask(self, biases: Sequence[Any]) -> list[bool]:
        """Which gradients the operator's backward computes, in its order."""
        sinks = self.sinks[:2] if len(self.sinks) == 2 else self.sinks[:1]
        dx, dw = any(s.dx for s in sinks), [bool(s.dw) for s in sinks]
        db = [bool(s.db) for s in sinks]
        if self.place.value is None:
            return [bool(self.dv), dx, *dw, *db]
        return [dx, *(dw * 2)[:2], *(db * 2)[:2]]

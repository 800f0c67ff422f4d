"""Finds the gradients of ``y = sigmoid(linear(x))`` in a joint graph and replaces them by those of `dense`.

With the cotangent g of y, autograd computes ``dz = g * y * (1 - y)``, and from it the products and the sum that are the
gradients of x, weight and bias.
"""

from __future__ import annotations

import operator
from typing import Any, Protocol

import torch
from torch import fx

from torchops.inductor.expressions import (
    ACTIVATIONS,
    POINTS,
    Evaluator,
    UnknownError,
    Values,
    formula,
    is_arrangement,
    points,
    root,
)
from torchops.inductor.graph import Refusal, as_rows, aten, emit, holds, is_call, known
from torchops.inductor.linear import Linear
from torchops.inductor.sinks import ELSEWHERE, Sinks, is_transposed, replace_sinks
from torchops.inductor.terms import Term

_dense_gradients = torch.ops.myops._dense_gradients.default
_Y = formula(ACTIVATIONS["sigmoid"], points(0))
_ONE: Values = (1.0,) * POINTS


class Pattern(Protocol):
    """A `dense` that was found in a graph."""

    sigmoid: fx.Node
    linear: Linear


class DenseGradients:
    """The nodes from the result of `dense` to its gradients, proven to compute these; refuses anything else."""

    def __init__(self, dense: Pattern) -> None:
        self.dense = dense
        self.inner: set[fx.Node] = set()  # computed only from the result, on the way to dz
        self._evaluate = Evaluator(self._leaf)
        linear = dense.linear
        found = [
            node
            for node in dense.sigmoid.graph.find_nodes(op="call_function", target=aten.mm.default)
            if is_transposed(node.args[1], linear.w) and self._takes(node.args[0])
        ]
        if len(found) != 1 or linear.batched or not all(isinstance(n, int) for n in linear.features()):
            raise Refusal(ELSEWHERE)
        top: Any = found[0].args[0]
        above = [top]
        while is_arrangement(top):
            top = top.args[0]
            above.append(top)
        self.top = top
        _, rest = self._factors(top)
        assert rest is not None
        self.cotangent = root(rest)
        self.sinks = Sinks([top])
        self.sinks.collect(Term(dense.sigmoid, linear), False)
        self.sinks.check(linear.bias is not None)
        g, y = known(self.cotangent), known(dense.sigmoid)
        if g.dtype != y.dtype or not holds(g.numel() == y.numel()):
            raise Refusal(ELSEWHERE)

    @property
    def nodes(self) -> set[fx.Node]:
        return self.inner | self.sinks.nodes

    def _leaf(self, node: fx.Node) -> Values | None:
        if node is self.dense.sigmoid:
            return _Y
        self.inner.add(node)
        return None

    def _takes(self, node: Any) -> bool:
        """Whether the node is dz."""
        inner, self.inner = self.inner, set()
        values, rest = self._factors(node)
        expected = formula(lambda y: y * (1 - y), _Y)
        if rest is not None and all(abs(a - b) < 1e-9 for a, b in zip(values, expected, strict=True)):
            return True
        self.inner = inner
        return False

    def _factors(self, node: Any) -> tuple[Values, fx.Node | None]:
        """Splits a product into what is computed only from the result, and the one other factor."""
        while is_arrangement(node) and node is not self.dense.sigmoid:
            self.inner.add(node)
            node = node.args[0]
        before = set(self.inner)
        try:
            return self._evaluate(node), None
        except UnknownError:
            self.inner = before
        if is_call(node, {aten.mul.Tensor}) and all(isinstance(n, fx.Node) for n in node.args):
            (a, rest_a), (b, rest_b) = map(self._factors, node.args)
            if rest_a is None or rest_b is None:
                self.inner.add(node)
                return formula(operator.mul, a, b), rest_a if rest_b is None else rest_b
        if is_call(node, {aten.sigmoid_backward.default}):
            g, rest = self._factors(node.args[0])
            y, of_others = self._factors(node.args[1])
            if rest is not None and of_others is None:
                self.inner.add(node)
                return formula(lambda g, y: g * y * (1 - y), g, y), rest
        self.inner = before
        return _ONE, node

    def rewrite(self, y: fx.Node, x: fx.Node, w: fx.Node, rows: Any) -> None:
        """Rewrites with y of shape (rows, out), x (rows, in) and w (out, in)."""
        first, has_bias = self.top, self.dense.linear.bias is not None
        with first.graph.inserting_before(first):
            g = as_rows(first, self.cotangent, rows, known(y).shape[-1])
            backward = emit(first, _dense_gradients, g, y, x, w, [True, True, has_bias])
            dx, dw, db = (emit(first, operator.getitem, backward, i) for i in range(3))
        replace_sinks(self.sinks, dx, dw, db)

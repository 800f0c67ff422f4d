"""Tests whether an expression of a graph is a given formula, by evaluating both at random points.

What autograd and Inductor's decompositions make of a sigmoid, SiLU or GLU and of its gradient differs between dtypes
and versions of PyTorch: in the order of factors, in casts, in what is computed twice. An expression that consists of
the operators below and agrees with a formula at `POINTS` random points is that formula, up to rounding.
"""

from __future__ import annotations

import functools
import math
import operator
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from torchops.inductor.graph import CASTS, RESHAPES, aten, is_call, keeps_order, same_sizes, val

POINTS = 32

# Plain numbers, which no mode of PyTorch that is on during compilation can affect.
Values = tuple[float, ...]


def _sigmoid(u: float) -> float:
    return 1 / (1 + math.exp(-u))


def _silu(u: float) -> float:
    return u * _sigmoid(u)


_POINTWISE: dict[Any, Callable[..., float]] = {
    aten.mul.Tensor: operator.mul,
    aten.add.Tensor: lambda a, b, alpha=1: a + alpha * b,
    aten.sub.Tensor: lambda a, b, alpha=1: a - alpha * b,
    aten.div.Tensor: operator.truediv,
    aten.mul.Scalar: operator.mul,
    aten.add.Scalar: lambda a, b, alpha=1: a + alpha * b,
    aten.sub.Scalar: lambda a, b, alpha=1: a - alpha * b,
    aten.div.Scalar: operator.truediv,
    aten.rsub.Scalar: lambda a, b, alpha=1: b - alpha * a,
    aten.neg.default: operator.neg,
    aten.exp.default: math.exp,
    aten.reciprocal.default: lambda a: 1 / a,
    aten.sigmoid.default: _sigmoid,
    aten.silu.default: _silu,
    aten.sigmoid_backward.default: lambda g, y: g * y * (1 - y),
    aten.silu_backward.default: lambda g, u: g * slope("silu", u),
}

ACTIVATIONS: dict[str, Callable[[float], float]] = {"sigmoid": _sigmoid, "silu": _silu}


def slope(activation: str, u: float) -> float:
    """The derivative of the activation."""
    s = _sigmoid(u)
    return s * (1 - s) if activation == "sigmoid" else s * (1 + u * (1 - s))


def formula(function: Callable[..., float], *values: Values) -> Values:
    """The values of a function, point by point."""
    return tuple(map(function, *values))


def is_cast(node: fx.Node) -> bool:
    """Whether the node casts between a 16-bit dtype and float32, which changes the precision of what lies in
    between."""
    if not is_call(node, CASTS) or set(node.kwargs) - {"dtype", "device", "layout"}:
        return False
    before, after = val(node.args[0]), val(node)
    if before is None or after is None or (before.device, before.layout) != (after.device, after.layout):
        return False
    floats = (torch.float16, torch.bfloat16, torch.float32)
    return before.dtype in floats and after.dtype in floats and {before.dtype, after.dtype} != set(floats[:2])


def narrows(node: fx.Node) -> bool:
    before, after = val(node.args[0]), val(node)
    return before is not None and after is not None and before.dtype.itemsize > after.dtype.itemsize


def is_arrangement(node: object) -> bool:
    """Whether the node only changes the shape or the dtype, and keeps the elements and their order."""
    return isinstance(node, fx.Node) and ((is_call(node, RESHAPES) and keeps_order(node)) or is_cast(node))


def root(node: Any) -> fx.Node:
    """The node above the arrangements of `node`. Casts to fewer bits don't count as arrangements here."""
    while is_arrangement(node) and not (is_cast(node) and narrows(node)):
        node = node.args[0]
    return node


def is_pointwise(node: fx.Node) -> bool:
    """Whether the node is one of the operators above, without broadcasting."""
    value = val(node)
    if value is None or not is_call(node, _POINTWISE) or set(node.kwargs) - {"alpha"}:
        return False
    if any(not isinstance(argument, (fx.Node, int, float)) for argument in node.args):
        return False
    operands = [val(n) for n in node.all_input_nodes]
    return all(t is not None and same_sizes(t.shape, value.shape) for t in operands)


# The expressions we look for are far smaller; residual streams are not.
_MOST_DEPTH = 40


class UnknownError(Exception):
    """A node that is neither a leaf nor one of the operators above."""


class Evaluator:
    """Evaluates nodes at random points. `leaf` is asked first for each node: it returns its values, or None to go on
    upwards."""

    def __init__(self, leaf: Callable[[fx.Node], Values | None]) -> None:
        self._leaf = leaf
        self._values: dict[fx.Node, Values] = {}
        self._depth = 0

    def __call__(self, node: fx.Node) -> Values:
        """Raises `UnknownError`."""
        if node in self._values:
            return self._values[node]
        if self._depth == _MOST_DEPTH:
            raise UnknownError(node)
        self._depth += 1
        try:
            self._values[node] = self._evaluate(node)
        finally:
            self._depth -= 1
        return self._values[node]

    def _evaluate(self, node: fx.Node) -> Values:
        values = self._leaf(node)
        if values is not None:
            return values
        if is_arrangement(node):
            return self(node.args[0])  # type: ignore[arg-type]
        if not is_pointwise(node):
            raise UnknownError(node)
        function: Callable[..., float] = functools.partial(_POINTWISE[node.target], **node.kwargs)
        try:
            return formula(function, *map(self._argument, node.args))
        except ArithmeticError as error:
            raise UnknownError(node) from error

    def _argument(self, argument: Any) -> Values:
        return self(argument) if isinstance(argument, fx.Node) else (float(argument),) * POINTS

    def is_formula(self, node: fx.Node, expected: Values) -> bool:
        try:
            values = self(node)
        except UnknownError:
            return False
        return all(math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12) for a, b in zip(values, expected, strict=True))


def points(index: int) -> Values:
    """The values of the leaf number `index`: the same in every process, and not near zero."""
    generator = random.Random(index)
    return tuple(generator.choice((-1, 1)) * generator.uniform(0.25, 2.25) for _ in range(POINTS))

"""All measured operators, by name."""

from __future__ import annotations

from . import dense, gate, glu, layer_norm, sigmoid, softmax, square_matmul, transition
from .case import Operator

OPERATORS: dict[str, Operator] = {
    operator.name: operator
    for module in (dense, gate, glu, sigmoid, softmax, layer_norm, square_matmul, transition)
    for operator in module.OPERATORS
}

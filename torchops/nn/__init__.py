"""Modules over the operators of torchops, and :func:`replace`, which puts them into existing models."""

from torchops.nn import gated as _gated  # noqa: F401  (replace() knows it once it is imported)
from torchops.nn.gates import GLU, Dense, Gate
from torchops.nn.pair import Transition, TriangleMultiplicativeUpdate
from torchops.nn.pair_layer import PairLayer
from torchops.nn.replace import Replacements, replace
from torchops.nn.triangle_attention import TriangleAttention

__all__ = [
    "GLU",
    "Dense",
    "Gate",
    "PairLayer",
    "Replacements",
    "Transition",
    "TriangleAttention",
    "TriangleMultiplicativeUpdate",
    "replace",
]

"""Modules over the operators of torchops. :func:`torchops.replace` puts them into existing models.

There are no modules for operators that overwrite a tensor, such as a ``Softmax_``. Whether you may overwrite a tensor
depends on where you use it, not on where you create a layer: a residual connection, a hook or a caller may still need
it. Call ``torchops.softmax_(x)`` in the ``forward`` that made ``x``. :class:`Transition`, :class:`TriangleAttention`,
:class:`TriangleMultiplicativeUpdate` and :class:`PairLayer` overwrite their input if you call ``layer(x,
inplace=True)``.
"""

from torchops.nn.attention_pair_bias import AttentionPairBias
from torchops.nn.gates import GLU, Dense, Gate
from torchops.nn.pair import Transition, TriangleMultiplicativeUpdate
from torchops.nn.pair_layer import PairLayer
from torchops.nn.triangle_attention import TriangleAttention

__all__ = [
    "GLU",
    "AttentionPairBias",
    "Dense",
    "Gate",
    "PairLayer",
    "Transition",
    "TriangleAttention",
    "TriangleMultiplicativeUpdate",
]

"""Modules over the operators of torchops, and :func:`replace`, which puts them into existing models.

Operators that overwrite a tensor have no modules of their own, such as a ``Softmax_``: whether a tensor may be
overwritten is known where it is used, and not where a layer is made. A residual connection, a hook or a caller may
still need it. Call ``torchops.softmax_(x)`` in the ``forward`` that made ``x``. :class:`Transition` and
:class:`TriangleMultiplicativeUpdate` overwrite their input where the call says so, ``layer(x, inplace=True)``.
"""

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

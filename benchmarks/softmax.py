"""softmax and softmax_ over the last dimension."""

from __future__ import annotations

from .rows import random_matrix, row_operators

OPERATORS = row_operators("softmax", random_matrix)

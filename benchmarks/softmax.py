"""softmax and softmax_ over the last dimension."""

from __future__ import annotations

from functools import partial

import torch

from .rows import preallocated, random_matrix, row_operators

OPERATORS = row_operators("softmax", random_matrix, into=preallocated(partial(torch.softmax, dim=-1)))

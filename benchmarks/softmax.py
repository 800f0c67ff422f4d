"""softmax and softmax_ over the last dimension."""

from __future__ import annotations

from functools import partial

import torch

from .rows import random_matrix, row_operators

OPERATORS = row_operators("softmax", random_matrix, out=partial(torch.softmax, dim=-1))

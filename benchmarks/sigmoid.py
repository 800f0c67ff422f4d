"""sigmoid and sigmoid_, over tensors of growing size."""

from __future__ import annotations

import torch

from .case import Case
from .rows import preallocated, random_matrix, row_operators


def _cases(op: str, device_type: str) -> list[Case]:
    if device_type == "cpu":
        return [Case(op, (rows, 4096), sweep="rows") for rows in (64, 1024, 16384)]
    out_of_place = not op.endswith("_")
    growing = [
        Case(op, (rows, 4096), torch.bfloat16, sweep="rows", compiled=out_of_place)
        for rows in (64, 256, 1024, 4096, 16384)
    ]
    bound = {"copy": 0.96}
    large = [(65536, torch.bfloat16), (32768, torch.float32)]
    return growing + [
        # In place, compiled at one size, so that compiled stands beside compiled.
        Case(op, (rows, 4096), dtype, targets=bound, sweep="rows", compiled=out_of_place or rows == 65536)
        for rows, dtype in large
    ]


OPERATORS = row_operators("sigmoid", random_matrix, _cases, into=preallocated(torch.sigmoid))

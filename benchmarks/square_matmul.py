"""square_matmul and square_matmul_; shapes are (rows, n)."""

from __future__ import annotations

import torch
from torch import Tensor

from .case import FORWARD, OVERHEAD, Call, Case, Cost, Operator, Shape, Task
from .rows import preallocated

# Up to this size, b is orthogonal. For larger ones, where that takes seconds to compute, it keeps the length of a row
# on average.
LARGEST_ORTHOGONAL = 2048
# The least speed relative to the product into a second buffer, by n.
TARGETS = {
    (1048576, 128): 0.95,
    (1048576, 192): 0.95,
    (1048576, 256): 0.95,
    (262144, 512): 0.88,
    (131072, 1024): 0.88,
    (65536, 2048): 0.95,
    (16384, 4096): 0.95,
    (32768, 8192): 0.95,
    (8192, 16384): 0.95,
}


def orthogonal(b: Tensor) -> Tensor:
    """An orthogonal matrix in place of a random one, where that takes no seconds. What is multiplied by it again and
    again, in place, neither grows nor vanishes; infinities and zeros would take other times."""
    return torch.linalg.qr(b).Q.contiguous() if len(b) <= LARGEST_ORTHOGONAL else b


def _make(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    n = shape[-1]
    b = orthogonal(torch.randn(n, n, device=device) / n**0.5)
    return torch.randn(shape, device=device, dtype=dtype), b.to(dtype)


def _cost(shape: Shape, task: Task) -> Cost:
    rows, n = shape
    forward = Cost(2 * rows * n + n * n, 2 * rows * n * n)
    if task in (FORWARD, OVERHEAD):
        return forward
    return Cost(forward.elements + 3 * rows * n + 2 * n * n, 3 * forward.flops)


def _case(shape: Shape, ratio: float) -> Case:
    targets = {"out-of-place": ratio, "eager": 1.0}
    return Case("square_matmul_", shape, torch.bfloat16, targets=targets, sweep="n")


def _cases(device_type: str) -> list[Case]:
    op = "square_matmul_"
    if device_type == "cuda":
        return [
            *(_case(shape, ratio) for shape, ratio in TARGETS.items()),
            Case(op, (16, 64), torch.bfloat16, OVERHEAD),
        ]
    shapes = [(524288, 64), (65536, 256), (8192, 1024)]
    return [
        *(Case(op, shape, targets={"eager": 1.0}, sweep="n") for shape in shapes),
        Case(op, (65536, 256), torch.bfloat16, targets={"eager": 1.0}),
    ]


def _functional_cases(device_type: str) -> list[Case]:
    shape, dtype = ((65536, 2048), torch.bfloat16) if device_type == "cuda" else ((8192, 256), torch.float32)
    return [Case("square_matmul", shape, dtype, targets={"eager": 0.95})]


def _memory(device_type: str) -> list[Case]:
    if device_type == "cuda":
        shapes = [(1048576, 128), (262144, 512), (65536, 2048), (32768, 8192)]
        return [Case("square_matmul_", shape, torch.bfloat16, most_bytes=2**20) for shape in shapes]
    return [Case("square_matmul_", shape) for shape in [(524288, 64), (65536, 256), (8192, 1024)]]


def _out_of_place(a: Tensor, b: Tensor) -> Call:
    return torch.matmul


OPERATORS = (
    Operator(
        "square_matmul",
        ("rows", "n"),
        _make,
        _cost,
        _functional_cases,
        (5, 7),
        references={"preallocated": preallocated(torch.mm)},
    ),
    Operator(
        "square_matmul_",
        ("rows", "n"),
        _make,
        _cost,
        _cases,
        (5, 7),
        references={"out-of-place": _out_of_place, "preallocated": preallocated(torch.mm)},
        memory=_memory,
    ),
)

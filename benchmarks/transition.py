"""transition, without biases as AlphaFold 3 and Boltz have it, and in place; shapes are (rows, c, hidden)."""

from __future__ import annotations

import torch
from torch import Tensor

from .case import BACKWARD, FORWARD, OVERHEAD, OVERHEAD_GRAD, Case, Cost, Operator, Shape, Task


def _make(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    rows, c, hidden = shape
    x = torch.randn(rows, c, device=device, dtype=dtype)
    weight, bias = 1 + torch.rand(c, device=device, dtype=dtype), torch.randn(c, device=device, dtype=dtype)
    gate, up = (torch.randn(hidden, c, device=device, dtype=dtype) / c**0.5 for _ in range(2))
    down = torch.randn(c, hidden, device=device, dtype=dtype) / hidden**0.5
    return x, weight, bias, gate, up, down


def _cost(shape: Shape, task: Task) -> Cost:
    rows, c, hidden = shape
    x, weights, flops = rows * c, 3 * c * hidden + 2 * c, 6 * rows * c * hidden
    if task in (FORWARD, OVERHEAD):
        return Cost(2 * x + weights, flops)
    # Backward reads x, its cotangent and the weights, and writes the gradients of x and of the weights. Contenders may
    # recompute the hidden features or read them.
    return Cost(5 * x + 3 * weights, 3 * flops)


def _cases_of(op: str, device_type: str) -> list[Case]:
    in_place = op.endswith("_")
    if device_type == "cuda":
        half = torch.bfloat16
        sizes = [(n * n, 128, 512) for n in (384, 768, 1024)]
        forward = [Case(op, shape, half, targets={"eager": 1.0, "compile": 1.0}) for shape in sizes]
        overhead = Case(op, (16, 64, 256), half, OVERHEAD, {"eager": 1.0})
        if in_place:
            return [*forward, overhead]
        backward = [Case(op, shape, half, BACKWARD, targets={"eager": 1.0}) for shape in sizes]
        return [*forward, *backward, overhead, Case(op, (16, 64, 256), half, OVERHEAD_GRAD)]
    shape = (16384, 128, 512)
    forward = [Case(op, shape, dtype, targets={"eager": 1.0}) for dtype in (torch.float32, torch.bfloat16)]
    overhead = Case(op, (1, 1, 1), task=OVERHEAD, targets={"eager": 1.0})
    return [*forward, overhead] if in_place else [*forward, Case(op, shape, task=BACKWARD), overhead]


OPERATORS = tuple(
    Operator(
        name,
        ("rows", "c", "hidden"),
        _make,
        _cost,
        lambda device, name=name: _cases_of(name, device),  # type: ignore[misc]
        (5, 7, 3),
    )
    for name in ("transition", "transition_")
)

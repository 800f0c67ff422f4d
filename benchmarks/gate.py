"""gate and gate_; shapes are (rows, in, out)."""

from __future__ import annotations

import torch
from torch import Tensor

from .case import BACKWARD, FORWARD, OVERHEAD, OVERHEAD_GRAD, Call, Case, Cost, Operator, Shape, Task


def _make(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    rows, n_in, n_out = shape
    v = torch.randn(rows, n_out, device=device, dtype=dtype)
    x = torch.randn(rows, n_in, device=device, dtype=dtype)
    w = torch.randn(n_out, n_in, device=device, dtype=dtype) / n_in**0.5
    return v, x, w, torch.randn(n_out, device=device, dtype=dtype)


OPEN = 40


def _make_open(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    # v is overwritten again and again, and must not decay into denormal numbers: these gates are open.
    v, x, w, b = _make(shape, dtype, device)
    return v, x, w, b + OPEN


def _checked(args: list[Tensor]) -> list[Tensor]:
    # Behind an open gate, any product would pass for the right one.
    return [*args[:3], args[3] - OPEN]


def _cost(shape: Shape, task: Task) -> Cost:
    rows, n_in, n_out = shape
    v, x, w = rows * n_out, rows * n_in, n_in * n_out
    forward = Cost(2 * v + x + w + n_out, 2 * rows * n_in * n_out)
    if task in (FORWARD, OVERHEAD):
        return forward
    # Backward reads g, v, x and w, and writes dv, dx, dw and db. Contenders may recompute the gate or read it; only the
    # two products that are always needed count.
    return Cost(forward.elements + 3 * v + 2 * x + 2 * w + n_out, 3 * forward.flops)


def _preallocated(v: Tensor, x: Tensor, w: Tensor, b: Tensor) -> Call:
    out = torch.empty_like(v)
    return lambda v, x, w, b: torch.mul(torch.addmm(b, x, w.T, out=out).sigmoid_(), v, out=out)


def _preallocated_gate(v: Tensor, x: Tensor, w: Tensor, b: Tensor) -> Call:
    gate = torch.empty_like(v)
    return lambda v, x, w, b: v.mul_(torch.addmm(b, x, w.T, out=gate).sigmoid_())


def _forward(op: str, device_type: str) -> list[Case]:
    if device_type == "cuda":
        half = torch.bfloat16
        return [
            *(Case(op, (rows, 128, 128), half, targets={"eager": 1.0, "compile": 1.0}) for rows in (1048576, 262144)),
            *(Case(op, (262144, n, n), half, targets={"eager": 1.0}) for n in (64, 256)),
            Case(op, (16, 64, 64), half, OVERHEAD, {"eager": 1.0}),
        ]
    return [
        *(Case(op, (65536, 128, 128), dtype, targets={"eager": 1 / 0.8}) for dtype in (torch.float32, torch.bfloat16)),
        Case(op, (1, 1, 1), task=OVERHEAD, targets={"eager": 1.0}),
    ]


def _cases(device_type: str) -> list[Case]:
    if device_type == "cuda":
        half = torch.bfloat16
        training = [Case("gate", (1048576, 128, 128), half, BACKWARD, {"eager": 1.0})]
        return [*_forward("gate", device_type), *training, Case("gate", (16, 64, 64), half, OVERHEAD_GRAD)]
    dtypes = (torch.float32, torch.bfloat16)
    training = [Case("gate", (65536, 128, 128), dtype, BACKWARD, {"eager": 1.0}) for dtype in dtypes]
    return [*_forward("gate", device_type), *training]


# No training: the gradient of PyTorch's own mul_ would need the old v, which has been overwritten.
def _in_place_cases(device_type: str) -> list[Case]:
    return _forward("gate_", device_type)


def _memory(device_type: str) -> list[Case]:
    shape = (1048576, 128, 128)
    if device_type == "cuda":
        return [Case("gate_", shape, torch.bfloat16, most_bytes=2**25)]
    return [Case("gate_", shape)]


OPERATORS = (
    Operator(
        "gate",
        ("rows", "in", "out"),
        _make,
        _cost,
        _cases,
        (5, 7, 3),
        references={"preallocated": _preallocated},
        inputs=2,
    ),
    Operator(
        "gate_",
        ("rows", "in", "out"),
        _make_open,
        _cost,
        _in_place_cases,
        (5, 7, 3),
        references={"preallocated": _preallocated_gate},
        checked=_checked,
        inputs=2,
        memory=_memory,
    ),
)

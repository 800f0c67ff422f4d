"""glu with its two activations; shapes are (rows, in, out)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from .case import BACKWARD, FORWARD, OVERHEAD, OVERHEAD_GRAD, Call, Case, Cost, Operator, Shape, Task
from .rows import Packed


def _make(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    rows, n_in, n_out = shape
    x = torch.randn(rows, n_in, device=device, dtype=dtype)
    w, wg = (torch.randn(n_out, n_in, device=device, dtype=dtype) / n_in**0.5 for _ in range(2))
    b, bg = (torch.randn(n_out, device=device, dtype=dtype) for _ in range(2))
    return x, w, wg, b, bg


def _cost(shape: Shape, task: Task) -> Cost:
    rows, n_in, n_out = shape
    x, w, y = rows * n_in, 2 * n_in * n_out, rows * n_out
    forward = Cost(x + w + 2 * n_out + y, 2 * rows * w)
    if task in (FORWARD, OVERHEAD):
        return forward
    # Backward reads g, x, w and wg, and writes dx and the gradients of the weights. Contenders may recompute the
    # factors or read them; only the products that are always needed count.
    return Cost(forward.elements + y + 2 * x + 2 * w + 2 * n_out, 3 * forward.flops)


def _activation(op: str) -> Callable[[Tensor], Tensor]:
    return torch.sigmoid_ if op == "glu" else partial(F.silu, inplace=True)


def _preallocated(op: str, x: Tensor, w: Tensor, *others: Tensor) -> Call:
    value, gate = (torch.empty(x.shape[0], w.shape[0], device=x.device, dtype=x.dtype) for _ in range(2))
    activation = _activation(op)

    def call(x: Tensor, w: Tensor, wg: Tensor, b: Tensor, bg: Tensor) -> Tensor:
        torch.addmm(b, x, w.T, out=value)
        return torch.mul(value, activation(torch.addmm(bg, x, wg.T, out=gate)), out=value)

    return call


def _packed(op: str, *args: Tensor) -> Call:
    """The whole operator with both weights in one, as a model that was written for it would keep them."""
    packed = Packed()

    def call(x: Tensor, w: Tensor, wg: Tensor, b: Tensor, bg: Tensor) -> Tensor:
        both = F.linear(x, packed(w, wg), packed(b, bg))
        if op == "glu":
            return F.glu(both)  # the first half times the sigmoid of the second
        value, gate = both.chunk(2, -1)
        return value * F.silu(gate)

    return call


def _packed_product(*args: Tensor) -> Call:
    """One product with the packed weight, without bias and activation."""
    packed = Packed()
    return lambda x, w, wg, *biases: F.linear(x, packed(w, wg))


def _cases_of(op: str, device_type: str) -> list[Case]:
    if device_type == "cuda":
        half = torch.bfloat16
        targets = {"eager": 1.0, "compile": 1.0}
        forward = [(1048576, 128, 128), (262144, 128, 128), (65536, 128, 128), (1048576, 64, 64), (1048576, 256, 256)]
        if op == "swiglu":
            forward = [(8192, 4096, 11008), (4096, 1024, 4096)]
        return [
            *(Case(op, shape, half, targets=targets) for shape in forward),
            *(Case(op, shape, half, BACKWARD, targets={"eager": 1.0}) for shape in forward[:1]),
            Case(op, (16, 64, 64), half, OVERHEAD, {"eager": 1.0}),
            Case(op, (16, 64, 64), half, OVERHEAD_GRAD),
        ]
    shape = (65536, 128, 128)
    return [
        *(Case(op, shape, dtype, targets={"eager": 1 / 0.8}) for dtype in (torch.float32, torch.bfloat16)),
        *(Case(op, shape, dtype, BACKWARD, {"eager": 1.0}) for dtype in (torch.float32, torch.bfloat16)),
        Case(op, (1, 1, 1), task=OVERHEAD, targets={"eager": 1.0}),
    ]


OPERATORS = tuple(
    Operator(
        name,
        ("rows", "in", "out"),
        _make,
        _cost,
        lambda device, name=name: _cases_of(name, device),  # type: ignore[misc]
        (5, 7, 3),
        references={
            "preallocated": partial(_preallocated, name),
            "packed": partial(_packed, name),
            "packed product": _packed_product,
        },
        bounds=("packed product",),
    )
    for name in ("glu", "swiglu")
)

"""transition, without biases as AlphaFold 3 and Boltz have it, and in place; shapes are (rows, c, hidden)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .case import BACKWARD, FORWARD, OVERHEAD, OVERHEAD_GRAD, Call, Case, Cost, Operator, Shape, Task
from .rows import Packed


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


def _preallocated(*args: Tensor) -> Call:
    x, _, _, gate_weight, _, _ = args
    hidden, up = (torch.empty(x.shape[0], gate_weight.shape[0], device=x.device, dtype=x.dtype) for _ in range(2))
    out = torch.empty_like(x)

    def call(x: Tensor, weight: Tensor, bias: Tensor, gate_w: Tensor, up_w: Tensor, down_w: Tensor) -> Tensor:
        # Layer norm has no `out=` that writes there: see eager_in_place.py.
        z = F.layer_norm(x, weight.shape, weight, bias)
        F.silu(torch.mm(z, gate_w.T, out=hidden), inplace=True)
        return torch.mm(hidden.mul_(torch.mm(z, up_w.T, out=up)), down_w.T, out=out)

    return call


def _packed_hidden() -> Call:
    packed = Packed()

    def hidden(x: Tensor, weight: Tensor, bias: Tensor, gate_w: Tensor, up_w: Tensor) -> Tensor:
        z = F.layer_norm(x, weight.shape, weight, bias)
        gate, up = F.linear(z, packed(gate_w, up_w)).chunk(2, -1)
        return F.silu(gate) * up

    return hidden


def _packed(*args: Tensor) -> Call:
    """The whole operator with the weights of gate and value in one."""
    hidden = _packed_hidden()
    return lambda x, *others: F.linear(hidden(x, *others[:-1]), others[-1])


def _packed_in_place(*args: Tensor) -> Call:
    hidden = _packed_hidden()
    return lambda x, *others: x.addmm_(hidden(x, *others[:-1]), others[-1].T)


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
        references=references,
    )
    for name, references in (
        ("transition", {"preallocated": _preallocated, "packed": _packed}),
        ("add_transition_", {"packed": _packed_in_place}),
    )
)

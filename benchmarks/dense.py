"""dense against `torch.sigmoid(linear(x, w, b))`; triples are (rows, in, out)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

import torchops

from .contenders import compiled, dtype_name
from .harness import OURS, Case, Workload, rotate

EAGER = "sigmoid(linear)"
EAGER_IN_PLACE = "linear.sigmoid_"
LINEAR = "linear alone"
FROZEN = "torch.compile max-autotune, frozen weights"

Shape = tuple[int, int, int]


def _eager(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.sigmoid(linear(x, w, b))


def _eager_in_place(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return linear(x, w, b).sigmoid_()


def _make(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    rows, n_in, n_out = shape
    x = torch.randn(rows, n_in, dtype=dtype, device=device)
    w = torch.randn(n_out, n_in, dtype=dtype, device=device) / n_in**0.5
    return x, w, torch.randn(n_out, dtype=dtype, device=device)


def _frozen(w: Tensor, b: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Inductor's best case: weights it may fold into the code, so that they can be packed ahead of time."""
    layer = nn.Linear(w.shape[1], w.shape[0], device=w.device, dtype=w.dtype)
    layer.weight.data, layer.bias.data = w, b
    model = torch.compile(
        nn.Sequential(layer, nn.Sigmoid()).eval(),
        dynamic=False,
        fullgraph=True,
        options={"max_autotune": True, "freezing": True},
    )
    return lambda x, _w, _b: model(x)


def _forward(shape: Shape, dtype: torch.dtype, device: torch.device) -> Workload:
    _, w, b = _make(shape, dtype, device)
    contenders: dict[str, Callable[..., object]] = {
        OURS: torchops.dense,
        EAGER: _eager,
        EAGER_IN_PLACE: _eager_in_place,
        LINEAR: linear,
        **compiled(_eager),
        FROZEN: _frozen(w, b),
    }
    # The weights of a layer stay where they are from call to call; only its input is new.
    return Workload(contenders, rotate(lambda: (_make(shape, dtype, device)[0], w, b)))


def _backward(formula: Callable[..., Tensor]) -> Callable[..., object]:
    def forward_backward(x: Tensor, w: Tensor, b: Tensor, grad: Tensor) -> object:
        return torch.autograd.grad(formula(x, w, b), (x, w, b), grad)

    return forward_backward


def _forward_backward(shape: Shape, device: torch.device) -> Workload:
    x, w, b = (tensor.requires_grad_() for tensor in _make(shape, torch.float32, device))
    grad = torch.randn(shape[0], shape[2], device=device)
    formulas: dict[str, Callable[..., Tensor]] = {OURS: torchops.dense, EAGER: _eager, **compiled(_eager)}
    contenders = {name: _backward(formula) for name, formula in formulas.items()}
    return Workload(contenders, [(x, w, b, grad)], context=nullcontext)


def _overhead(
    requires_grad: bool, context: Callable[[], AbstractContextManager[object]], device: torch.device
) -> Workload:
    inputs = _make((1, 1, 1), torch.float32, device)
    for tensor in inputs:
        tensor.requires_grad_(requires_grad)
    contenders: Mapping[str, Callable[..., object]] = {
        OURS: torchops.dense,
        "torch.ops.myops.dense": torch.ops.myops.dense,
        EAGER: _eager,
        **compiled(_eager),
    }
    return Workload(contenders, [inputs], context)


def cases() -> list[Case]:
    """Forward, forward and backward, and the overhead of a call."""
    forward = [
        ((4096, 64, 4096), torch.float32, 1.4),
        ((2048, 512, 2048), torch.float32, 1.0),
        ((128, 256, 256), torch.float32, 1.0),
        ((1024, 1024, 1024), torch.bfloat16, 1.0),
    ]
    overhead = [
        ("grad mode, nothing needs grad", False, nullcontext),
        ("no_grad", False, torch.no_grad),
        ("all need grad", True, nullcontext),
    ]
    return [
        *(
            Case(f"forward {shape} {dtype_name(dtype)}", partial(_forward, shape, dtype), {EAGER: target})
            for shape, dtype, target in forward
        ),
        Case("forward and backward (64, 64, 64) float32", partial(_forward_backward, (64, 64, 64)), {EAGER: 1.0}),
        *(
            Case(f"overhead (1, 1, 1) float32, {name}", partial(_overhead, requires_grad, context), {EAGER: 1.0})
            for name, requires_grad, context in overhead
        ),
    ]

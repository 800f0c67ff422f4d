"""dense, and a multi-layer perceptron of dense layers; shapes are (rows, in, out)."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import linear

from .case import BACKWARD, FORWARD, OVERHEAD, OVERHEAD_GRAD, STEP, Call, Case, Cost, Operator, Shape, Task

LAYERS = (256, 64, 16, 10)


def _make(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    rows, n_in, n_out = shape
    x = torch.randn(rows, n_in, device=device, dtype=dtype)
    w = torch.randn(n_out, n_in, device=device, dtype=dtype) / n_in**0.5
    return x, w, torch.randn(n_out, device=device, dtype=dtype)


def _cost(shape: Shape, task: Task) -> Cost:
    rows, n_in, n_out = shape
    x, w, y = rows * n_in, n_in * n_out, rows * n_out
    forward = Cost(x + w + n_out + y, 2 * rows * n_in * n_out)
    if task in (FORWARD, OVERHEAD):
        return forward
    # Backward reads g, y, x and w, writes dx, dw and db, and has two products of the size of the forward one.
    return Cost(forward.elements + 2 * y + 2 * x + 2 * w + n_out, 3 * forward.flops)


def _linear(x: Tensor, w: Tensor, b: Tensor) -> Call:
    return linear


def _preallocated(x: Tensor, w: Tensor, b: Tensor) -> Call:
    out = torch.empty(x.shape[0], w.shape[0], device=x.device, dtype=x.dtype)
    return lambda x, w, b: torch.addmm(b, x, w.T, out=out).sigmoid_()


def _products(*args: Tensor) -> Call:
    """The three products of forward and backward, and nothing else."""

    def call(x: Tensor, w: Tensor, b: Tensor, cotangent: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return x @ w.T, cotangent @ w, cotangent.T @ x

    return call


def _target(shape: Shape, eager: float) -> Case:
    """Targets besides eager: never slower than compiled code, nearly as fast as the product and the bias alone."""
    targets = {"eager": eager, "compile": 1.0, "compile-max": 1.0, "linear": 1 / 1.05}
    sweep = "rows" if shape[1:] == (128, 128) else ""
    return Case("dense", shape, torch.bfloat16, targets=targets, sweep=sweep, autotuned=True)


TARGETS = {
    (1048576, 128, 128): 1.95,
    (262144, 128, 128): 2.1,
    (1048576, 128, 512): 2.2,
    (65536, 256, 1024): 1.85,
    (65536, 512, 512): 1.7,
    (32768, 64, 1024): 2.3,
    (16384, 1024, 4096): 1.45,
    (4096, 4096, 4096): 1.05,
    (8192, 8192, 8192): 1.0,
    (256, 4096, 4096): 1.0,
    (4096, 1024, 1024): 1.25,
}
# Sizes that don't suit any kernel, and few rows: as fast as eager.
OTHERS = (
    (100003, 384, 264),
    (20000, 100, 100),
    (1, 4096, 4096),
    (16, 4096, 4096),
    (64, 4096, 4096),
    (512, 4096, 4096),
    (128, 1024, 1024),
    (1024, 1024, 4096),
    (2048, 2048, 2048),
    (1024, 256, 256),
    (128, 128, 128),
)
TRAINING = {(1048576, 128, 128): 1.4, (65536, 512, 512): 1.4, (65536, 256, 1024): 1.4, (4096, 4096, 4096): 1.0}


def _cuda_cases() -> list[Case]:
    half = torch.bfloat16
    sweep = [Case("dense", (rows, 128, 128), half, sweep="rows") for rows in (1024, 4096, 16384, 65536)]
    others = [Case("dense", shape, half, targets={"eager": 1.0}, compiled=shape in OTHERS[:3]) for shape in OTHERS]
    dtypes = [
        Case("dense", shape, dtype, targets={"eager": 1.0}, compiled=False, tf32=tf32)
        for dtype, tf32 in ((torch.float16, False), (torch.float32, True), (torch.float32, False))
        for shape in ((262144, 128, 128), (65536, 512, 512), (16384, 1024, 4096))
    ]
    training = [Case("dense", shape, half, BACKWARD, {"eager": ratio}) for shape, ratio in TRAINING.items()]
    return [
        *(_target(shape, eager) for shape, eager in TARGETS.items()),
        *others,
        *training,
        *sweep,
        *dtypes,
        Case("dense", (16, 64, 64), half, OVERHEAD, {"eager": 1.0}),
        Case("dense", (16, 64, 64), half, OVERHEAD_GRAD),
    ]


def _cpu_cases() -> list[Case]:
    forward = [
        ((4096, 64, 4096), torch.float32, 1.4),
        ((2048, 512, 2048), torch.float32, 1.0),
        ((128, 256, 256), torch.float32, 1.0),
        ((1024, 1024, 1024), torch.bfloat16, 1.0),
    ]
    return [
        *(Case("dense", shape, dtype, targets={"eager": eager}, autotuned=True) for shape, dtype, eager in forward),
        *(Case("dense", (rows, 64, 1024), sweep="rows") for rows in (64, 512, 4096, 32768)),
        Case("dense", (64, 64, 64), task=BACKWARD, targets={"eager": 1.0}),
        Case("dense", (4096, 64, 4096), task=BACKWARD),
        Case("dense", (1, 1, 1), task=OVERHEAD, targets={"eager": 1.0}),
        Case("dense", (1, 1, 1), task=OVERHEAD_GRAD, targets={"eager": 1.0}),
    ]


def _cases(device_type: str) -> list[Case]:
    return _cuda_cases() if device_type == "cuda" else _cpu_cases()


# --- the perceptron: a shape is (batch,) ---


def _make_mlp(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    parameters: list[Tensor] = []
    for n_in, n_out in pairwise(LAYERS):
        parameters += _make((1, n_in, n_out), dtype, device)[1:]
    return torch.randn(shape[0], LAYERS[0], device=device, dtype=dtype), *parameters


def _mlp_cost(shape: Shape, task: Task) -> Cost:
    """Nothing between the layers needs to reach memory: only data and parameters are read, and gradients written."""
    parameters = sum(n_in * n_out + n_out for n_in, n_out in pairwise(LAYERS))
    flops = sum(_cost((shape[0], n_in, n_out), task).flops for n_in, n_out in pairwise(LAYERS))
    return Cost(shape[0] * LAYERS[0] + 2 * parameters, flops)


def _mlp_cases(device_type: str) -> list[Case]:
    return [Case("mlp", (batch,), task=STEP, sweep="batch") for batch in (100, 3000, 100_000)]


OPERATORS = (
    Operator(
        "dense",
        ("rows", "in", "out"),
        _make,
        _cost,
        _cases,
        (5, 7, 3),
        references={"preallocated": _preallocated, "linear": _linear},
        training_references={"products": _products},
        bounds=("linear", "products"),
    ),
    Operator("mlp", ("batch",), _make_mlp, _mlp_cost, _mlp_cases, (3,)),
)

# Kernels have no types, and their constants are in capitals, as is usual in Triton.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803
"""Mode `triton`: sigmoid over blocks of elements, layer norm with one program per row; backward is that of mode `py`.

A row that fits into the registers of a program is read once. A longer one is read three times, since the variance is
the mean of the squared distances from the mean: sums of squares would cancel where the mean is large.

`TRITON_INTERPRET=1` in the environment runs the kernels on CPU tensors, slowly, for learning and for tests.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchops._core.triton.launch import FP_FUSION

from . import py_in_place, py_rows
from .triton_softmax import PART, WHOLE_ROW, launch

ELEMENTS = 4096  # of a program of the sigmoid


@triton.jit
def _sigmoid_kernel(y_ptr, x_ptr, elements, ACC: tl.constexpr, BLOCK: tl.constexpr):
    # 64 bits, since the last element may be beyond 2**31.
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < elements).to(ACC)
    tl.store(y_ptr + i, (1.0 / (1.0 + tl.exp(-x))).to(y_ptr.dtype.element_ty), mask=i < elements)


@triton.jit
def _layer_norm_kernel(y_ptr, x_ptr, w_ptr, b_ptr, columns, EPS: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * columns
    column = tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(x_ptr + row + column, mask=inside, other=0.0).to(ACC)
    n = x - tl.sum(x, 0) / columns
    variance = tl.sum(tl.where(inside, n * n, 0.0), 0) / columns
    w = tl.load(w_ptr + column, mask=inside, other=0.0).to(ACC)
    b = tl.load(b_ptr + column, mask=inside, other=0.0).to(ACC)
    y = n / tl.sqrt(variance + EPS) * w + b
    tl.store(y_ptr + row + column, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _long_layer_norm_kernel(
    y_ptr, x_ptr, w_ptr, b_ptr, columns, EPS: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * columns
    total = tl.zeros((BLOCK,), ACC)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + row + column, mask=column < columns, other=0.0).to(ACC)
    mean = tl.sum(total, 0) / columns
    squares = tl.zeros((BLOCK,), ACC)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        n = tl.load(x_ptr + row + column, mask=column < columns, other=0.0).to(ACC) - mean
        squares += tl.where(column < columns, n * n, 0.0)
    deviation = tl.sqrt(tl.sum(squares, 0) / columns + EPS)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        n = (tl.load(x_ptr + row + column, mask=inside).to(ACC) - mean) / deviation
        y = n * tl.load(w_ptr + column, mask=inside).to(ACC) + tl.load(b_ptr + column, mask=inside).to(ACC)
        tl.store(y_ptr + row + column, y.to(y_ptr.dtype.element_ty), mask=inside)


def _sigmoid_into(y: Tensor, x: Tensor) -> Tensor:
    programs = triton.cdiv(x.numel(), ELEMENTS)
    accumulator = tl.float64 if x.dtype == torch.float64 else tl.float32
    _sigmoid_kernel[(programs,)](y, x, x.numel(), ACC=accumulator, BLOCK=ELEMENTS, num_warps=8, **FP_FUSION)
    return y


def _layer_norm_into(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    whole = x.shape[-1] <= WHOLE_ROW
    kernel, longest = (_layer_norm_kernel, WHOLE_ROW) if whole else (_long_layer_norm_kernel, PART)
    launch(kernel, longest, y, x, weight, bias, EPS=py_rows.EPS)
    return y


class SigmoidFunction(py_rows.SigmoidFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = _sigmoid_into(torch.empty_like(x), x)
        ctx.save_for_backward(y)
        return y


class SigmoidInPlace(py_in_place.SigmoidInPlace):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        _sigmoid_into(x, x)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x


class LayerNormFunction(py_rows.LayerNormFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _layer_norm_into(torch.empty_like(x), x, weight, bias)


class LayerNormInPlace(torch.autograd.Function):
    """Backward would need the old x; without one here, autograd reports that."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return _layer_norm_into(x, x, weight.contiguous(), bias.contiguous())


def sigmoid(x: Tensor) -> Tensor:
    return SigmoidFunction.apply(x.contiguous())


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return LayerNormFunction.apply(x.contiguous(), weight.contiguous(), bias.contiguous())


# What is overwritten is contiguous in every case.
FUNCTIONS = {
    "sigmoid": sigmoid,
    "sigmoid_": SigmoidInPlace.apply,
    "layer_norm": layer_norm,
    "layer_norm_": LayerNormInPlace.apply,
}

# Kernels have no types, and their constants are in capitals, as is usual in Triton.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803
"""Mode `triton`: softmax over rows, with one program per row.

A row that fits into the registers of a program is read once and written once, which is the minimum. A longer one is
read twice: the first time for its maximum and its sum, which are updated as parts of the row come in ("Online
normalizer calculation for softmax", Milakov and Gimelshein, 2018).

`TRITON_INTERPRET=1` in the environment runs the kernels on CPU tensors, slowly, for learning and for tests.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchops._core.triton.launch import FP_FUSION

WHOLE_ROW = 32768
PART = 8192


@triton.jit
def _softmax_kernel(y_ptr, x_ptr, columns, ACC: tl.constexpr, BLOCK: tl.constexpr):
    # 64 bits, since a row may start beyond 2**31 elements.
    row = tl.program_id(0).to(tl.int64) * columns
    column = tl.arange(0, BLOCK)
    inside = column < columns
    # BLOCK is a power of two. Elements outside the row must not count, and exp(-inf) is 0.
    x = tl.load(x_ptr + row + column, mask=inside, other=-float("inf")).to(ACC)
    e = tl.exp(x - tl.max(x, 0))
    tl.store(y_ptr + row + column, (e / tl.sum(e, 0)).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _long_softmax_kernel(y_ptr, x_ptr, columns, ACC: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * columns
    # Each lane keeps the maximum of what it has seen, and the sum of exp(x - maximum).
    largest = tl.full((BLOCK,), -float("inf"), ACC)
    total = tl.zeros((BLOCK,), ACC)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row + column, mask=column < columns, other=-float("inf")).to(ACC)
        # There are more columns than BLOCK, so the first part fills every lane and no lane subtracts infinities.
        new = tl.maximum(largest, x)
        total = total * tl.exp(largest - new) + tl.exp(x - new)
        largest = new
    top = tl.max(largest, 0)
    norm = tl.sum(total * tl.exp(largest - top), 0)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row + column, mask=column < columns).to(ACC)
        tl.store(y_ptr + row + column, (tl.exp(x - top) / norm).to(y_ptr.dtype.element_ty), mask=column < columns)


@triton.jit
def _backward_kernel(dx_ptr, g_ptr, y_ptr, columns, ACC: tl.constexpr, BLOCK: tl.constexpr):
    """dx = y * (g - sum(g * y)). If one part holds the row, the second read comes from the cache."""
    row = tl.program_id(0).to(tl.int64) * columns
    products = tl.zeros((BLOCK,), ACC)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        g = tl.load(g_ptr + row + column, mask=column < columns, other=0.0).to(ACC)
        y = tl.load(y_ptr + row + column, mask=column < columns, other=0.0).to(ACC)
        products += g * y
    total = tl.sum(products, 0)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        g = tl.load(g_ptr + row + column, mask=column < columns).to(ACC)
        y = tl.load(y_ptr + row + column, mask=column < columns).to(ACC)
        tl.store(dx_ptr + row + column, (y * (g - total)).to(dx_ptr.dtype.element_ty), mask=column < columns)


def launch(kernel: Any, longest: int, out: Tensor, *inputs: Tensor, **constants: Any) -> None:
    """One program per row, which takes at most `longest` elements at a time."""
    columns = out.shape[-1]
    block = min(longest, triton.next_power_of_2(columns))
    warps = 4 if block <= 2048 else 8 if block <= 8192 else 16
    accumulator = tl.float64 if out.dtype == torch.float64 else tl.float32
    constants |= {"ACC": accumulator, "BLOCK": block, "num_warps": warps, **FP_FUSION}
    kernel[(out.numel() // columns,)](out, *inputs, columns, **constants)


def _softmax_into(out: Tensor, x: Tensor) -> Tensor:
    if x.shape[-1] <= WHOLE_ROW:
        launch(_softmax_kernel, WHOLE_ROW, out, x)
    else:
        launch(_long_softmax_kernel, PART, out, x)
    return out


class SoftmaxFunction(torch.autograd.Function):
    """Softmax over the last dimension of a contiguous tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = _softmax_into(torch.empty_like(x), x)
        ctx.save_for_backward(y)
        return y

    # Autograd cannot see into a kernel, so there is no second derivative; without this it would be zero.
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Any) -> Tensor:
        (y,) = ctx.saved_tensors
        dx = torch.empty_like(y)
        launch(_backward_kernel, PART, dx, cotangents[0].contiguous(), y)
        return dx


class SoftmaxInPlace(SoftmaxFunction):
    """The inherited gradient only needs the result. A part of a long row is read again just before it is written."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        _softmax_into(x, x)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x


def softmax(x: Tensor) -> Tensor:
    return SoftmaxFunction.apply(x.contiguous())


# What is overwritten is contiguous in every case.
FUNCTIONS = {"softmax": softmax, "softmax_": SoftmaxInPlace.apply}

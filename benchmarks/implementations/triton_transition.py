# Kernels have no types, and their constants are in capitals, as is usual in Triton.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803
"""Mode `triton`: the transition in one kernel, in which the hidden features never go to memory.

    z = layer_norm(x)        h = silu(z @ gate.T) * (z @ up.T)        y = h @ down.T, plus x if it overwrites x

A program holds z of some rows, and the sums of their y. As flash attention walks along the keys, it walks along the
hidden features: it computes a chunk of h, multiplies it with its part of `down`, adds that to the sums, and forgets it.
So x is read and y is written once, as long as z and the sums of whole rows fit into shared memory and registers. Wider
rows take three kernels: layer norm, the gated linear unit of `triton_gates.py` and a product.

Backward of `transition` saves only the arguments. It computes the formula of mode `eager` again, with its hidden
features in memory, and has autograd differentiate that. So it isn't faster than eager mode.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import eager, triton_gates
from .py_rows import EPS
from .triton_rows import _layer_norm_into
from .triton_square_matmul import _constants, product_into

# Features of x in one kernel, by the bytes of an element.
WHOLE_ROWS = {2: 128, 4: 64, 8: 32}
# That for 16 bits is the best of twelve on an H100, with 128 features and 512 hidden ones. All blocks of rows read all
# weights from the L2 cache.
TILES = {
    2: {"BLOCK_M": 64, "CHUNK": 64, "num_warps": 4, "num_stages": 2},
    4: {"BLOCK_M": 32, "CHUNK": 16, "num_warps": 4, "num_stages": 1},
    8: {"BLOCK_M": 16, "CHUNK": 16, "num_warps": 4, "num_stages": 1},
}


@triton.jit
def _transition_kernel(
    y_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    gate_ptr,
    up_ptr,
    down_ptr,
    rows,
    c,
    hidden,
    ADD: tl.constexpr,
    EPS: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    # 64 bits, since the last element may be beyond 2**31.
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    i = tl.arange(0, WIDTH)
    here = row[:, None] * c + i[None, :]
    inside = (row < rows)[:, None] & (i < c)[None, :]
    x = tl.load(x_ptr + here, mask=inside, other=0.0).to(ACC)
    n = x - (tl.sum(x, 1) / c)[:, None]
    variance = tl.sum(tl.where((i < c)[None, :], n * n, 0.0), 1) / c
    weight = tl.load(weight_ptr + i, mask=i < c, other=0.0).to(ACC)
    bias = tl.load(bias_ptr + i, mask=i < c, other=0.0).to(ACC)
    # Past the last column, weight and bias are 0, and so is z.
    z = n / tl.sqrt(variance + EPS)[:, None] * weight[None, :] + bias[None, :]
    z = z.to(x_ptr.dtype.element_ty)

    sums = tl.zeros((BLOCK_M, WIDTH), ACC)
    for start in range(0, hidden, CHUNK):
        j = start + tl.arange(0, CHUNK)
        # gate and up are stored as (hidden, c), down as (c, hidden); swapped axes give tiles of their transposes.
        in_chunk = i[:, None] + j[None, :] * c
        inside_chunk = (i < c)[:, None] & (j < hidden)[None, :]
        gate = tl.load(gate_ptr + in_chunk, mask=inside_chunk, other=0.0)
        up = tl.load(up_ptr + in_chunk, mask=inside_chunk, other=0.0)
        u = tl.dot(z, gate, input_precision=PRECISION, out_dtype=ACC)
        v = tl.dot(z, up, input_precision=PRECISION, out_dtype=ACC)
        h = (u / (1.0 + tl.exp(-u)) * v).to(x_ptr.dtype.element_ty)
        in_down = j[:, None] + i[None, :] * hidden
        down = tl.load(down_ptr + in_down, mask=(j < hidden)[:, None] & (i < c)[None, :], other=0.0)
        sums = tl.dot(h, down, sums, input_precision=PRECISION, out_dtype=ACC)

    if ADD:
        # From the L2 cache: in registers until here, x would take the place of others.
        sums += tl.load(x_ptr + here, mask=inside, other=0.0).to(ACC)
    tl.store(y_ptr + here, sums.to(y_ptr.dtype.element_ty), mask=inside)


def _transition(x: Tensor, *parameters: Tensor, add: bool) -> Tensor:
    """The transition of contiguous x; over x, and added to it, if `add`."""
    weight, bias, gate, up, down = (parameter.contiguous() for parameter in parameters)
    (rows, c), hidden = x.shape, gate.shape[0]
    y = x if add else torch.empty_like(x)
    if c <= WHOLE_ROWS[x.dtype.itemsize]:
        tile = TILES[x.dtype.itemsize]
        constants = {"ADD": add, "EPS": EPS, "WIDTH": max(16, triton.next_power_of_2(c)), **_constants(x.dtype)}
        arguments = (y, x, weight, bias, gate, up, down, rows, c, hidden)
        _transition_kernel[(triton.cdiv(rows, tile["BLOCK_M"]),)](*arguments, **constants, **tile)
        return y
    z = _layer_norm_into(torch.empty_like(x), x, weight, bias)
    zeros = x.new_zeros(hidden)
    h = triton_gates._launch(up, z, gate, zeros, zeros, two=True, silu=True)
    product_into(z, h, down.T)
    return x.add_(z) if add else z


class TransitionFunction(torch.autograd.Function):
    """See above. Autograd cannot see into the kernel, so there is no second derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(x, *parameters)
        return _transition(x.contiguous(), *parameters, add=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Any) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            args = [t.detach().requires_grad_() for t in ctx.saved_tensors]
            return torch.autograd.grad(eager.transition(*args), args, cotangents)


class TransitionInPlace(torch.autograd.Function):
    """`x + transition(x)` over x. Backward would need the old x; without one here, autograd reports that."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return _transition(x, *parameters, add=True)


# What is overwritten is contiguous in every case.
FUNCTIONS = {"transition": TransitionFunction.apply, "add_transition_": TransitionInPlace.apply}

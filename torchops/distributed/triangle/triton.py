# Kernels have no types, and their constants are in capitals, as is usual in Triton.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803
"""A rank's rows of the triangle update on a GPU, in 16 bits: what `distributed/triangle/rows.py` does in several
operators, in three passes over memory.

1. ``_ins`` computes the rank's rows of a and b from x, channels first; b in blocks of channels that are sent without a
   copy;
2. one batched product per block gives o, while the next block arrives; or, incoming, a part of all of o, which travels
   while the next block is multiplied;
3. ``_outs`` reads o and x, and writes the update, or adds it to x.

Rows of a, b and o end at a multiple of 16 elements, so that the products read whole vectors for any N. Beyond N, a and
b are 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchops._core.devices import on
from torchops._core.triton.launch import FP_FUSION

__all__ = ["Exchange", "fits", "transposed", "update"]

_PADDING = 16

_jit = triton.jit(do_not_specialize=["own", "n"])  # one compilation for all N


@triton.jit
def _vector(pointer, SIZE: tl.constexpr, PRESENT: tl.constexpr, default: tl.constexpr):
    if PRESENT:
        return tl.load(pointer + tl.arange(0, SIZE)).to(tl.float32)
    return tl.full((SIZE,), default, tl.float32)


@triton.jit
def _matrix(pointer, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    return tl.load(pointer + tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :])


@triton.jit
def _sigmoid(x):
    return 1 / (1 + tl.exp2(x * -1.4426950408889634))


@triton.jit
def _normalised(values, weight, bias, eps, SIZE: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Normalised rows, in float32."""
    distances = values - (tl.sum(values, 1) / SIZE)[:, None]
    # Never infinite: with an eps of 0, positions beyond N would be NaN, and so would products with them.
    factor = 1 / tl.sqrt(tl.maximum(tl.sum(distances * distances, 1) / SIZE + eps, 1e-30))
    z = distances * factor[:, None]
    return z * _vector(weight, SIZE, HAS_WEIGHT, 1.0)[None, :] + _vector(bias, SIZE, HAS_BIAS, 0.0)[None, :]


@triton.jit
def _z(
    x, at, inside, weight, bias, eps, dtype: tl.constexpr,
    C: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """z of the positions whose features start at x + at, and the values of x."""
    values = tl.load(x + at[:, None] + tl.arange(0, C)[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
    return _normalised(values, weight, bias, eps, C, HAS_WEIGHT, HAS_BIAS).to(dtype), values


@triton.jit
def _gated(
    zt, factor, p, p_bias, g, g_bias,
    C: tl.constexpr, D: tl.constexpr, HAS_P_BIAS: tl.constexpr, HAS_G_BIAS: tl.constexpr,
):  # fmt: skip
    """The gated projection of zt (C, positions), as (D, positions)."""
    value = tl.dot(_matrix(p, D, C), zt) + _vector(p_bias, D, HAS_P_BIAS, 0.0)[:, None]
    gate = tl.dot(_matrix(g, D, C), zt) + _vector(g_bias, D, HAS_G_BIAS, 0.0)[:, None]
    return value * _sigmoid(gate) * factor[None, :]


@_jit
def _ins(
    x, norm, norm_bias, p_a, p_a_bias, g_a, g_a_bias, p_b, p_b_bias, g_b, g_b_bias, mask, a, b,
    x_strides, mask_strides, b_strides, own, n, width, scale, eps,
    C: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, HAS_NORM: tl.constexpr, HAS_NORM_BIAS: tl.constexpr,
    HAS_P_BIAS: tl.constexpr, HAS_G_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes a[batch, d, i, k] and b[group, i, batch, channel, k] from positions (batch, i, k)."""
    batch, i = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    at = batch * x_strides[0] + i * x_strides[1] + k * x_strides[2]
    dtype = a.dtype.element_ty
    z, _ = _z(x, at, k < n, norm, norm_bias, eps, dtype, C, HAS_NORM, HAS_NORM_BIAS)
    zt = tl.trans(z)
    factor = (k < n).to(tl.float32)
    if HAS_MASK:
        at_mask = mask + batch * mask_strides[0] + i * mask_strides[1] + k * mask_strides[2]
        factor = tl.load(at_mask, mask=k < n, other=0.0).to(tl.float32)
    d = tl.arange(0, D).to(tl.int64)
    there = (k < width)[None, :]
    made = _gated(zt, factor * scale, p_a, p_a_bias, g_a, g_a_bias, C, D, HAS_P_BIAS, HAS_G_BIAS)
    rows = a + ((batch * D + d) * own + i) * width
    tl.store(rows[:, None] + k[None, :], made.to(dtype), mask=there)
    made = _gated(zt, factor, p_b, p_b_bias, g_b, g_b_bias, C, D, HAS_P_BIAS, HAS_G_BIAS)
    rows = b + (d // GROUP) * b_strides[0] + i * b_strides[1] + batch * b_strides[2] + (d % GROUP) * width
    tl.store(rows[:, None] + k[None, :], made.to(dtype), mask=there)


@_jit
def _outs(
    o, x, norm, norm_bias, norm_out, norm_out_bias, p_out, p_out_bias, g_out, g_out_bias, target,
    x_strides, target_strides, own, n, width, eps, eps_out,
    C: tl.constexpr, D: tl.constexpr, HAS_NORM: tl.constexpr, HAS_NORM_BIAS: tl.constexpr,
    HAS_NORM_OUT: tl.constexpr, HAS_NORM_OUT_BIAS: tl.constexpr, HAS_P_BIAS: tl.constexpr, HAS_G_BIAS: tl.constexpr,
    ADD_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """target (+)= (norm_out(o) @ p_out.T + p_out_bias) * sigmoid(z @ g_out.T + g_out_bias), for positions (batch, i, j)
    of o[batch, d, i, j]."""
    batch, i = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    inside, d = j < n, tl.arange(0, D).to(tl.int64)
    dtype = o.dtype.element_ty
    of_channels = o + ((batch * D + d) * own + i) * width
    channels = tl.load(of_channels[:, None] + j[None, :], mask=inside[None, :], other=0.0)
    normed = _normalised(
        tl.trans(channels).to(tl.float32), norm_out, norm_out_bias, eps_out, D, HAS_NORM_OUT, HAS_NORM_OUT_BIAS
    )
    y = tl.dot(normed.to(dtype), tl.trans(_matrix(p_out, C, D))) + _vector(p_out_bias, C, HAS_P_BIAS, 0.0)[None, :]
    at = batch * x_strides[0] + i * x_strides[1] + j * x_strides[2]
    z, values = _z(x, at, inside, norm, norm_bias, eps, dtype, C, HAS_NORM, HAS_NORM_BIAS)
    y *= _sigmoid(tl.dot(z, tl.trans(_matrix(g_out, C, C))) + _vector(g_out_bias, C, HAS_G_BIAS, 0.0)[None, :])
    if ADD_RESIDUAL:
        y += values
    to = target + batch * target_strides[0] + i * target_strides[1] + j * target_strides[2]
    tl.store(to[:, None] + tl.arange(0, C)[None, :], y.to(target.dtype.element_ty), mask=inside[:, None])


@_jit
def _transpose(source, target, own, n, BLOCK: tl.constexpr):
    """Copies source[batch, own, n] to target[batch, n, own]."""
    batch, across = tl.program_id(1).to(tl.int64) * own * n, tl.cdiv(n, BLOCK)
    i = (tl.program_id(0) // across).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    j = (tl.program_id(0) % across).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(
        source + batch + i[:, None] * n + j[None, :], mask=(i < own)[:, None] & (j < n)[None, :], other=0.0
    )
    tl.store(
        target + batch + j[:, None] * own + i[None, :], tl.trans(values), mask=(j < n)[:, None] & (i < own)[None, :]
    )


Exchange = Callable[[Tensor], Callable[[], Tensor]]
"""Starts to gather (rows, batch, channels, k) from all ranks or, incoming, to add it up to this rank's rows of the sum,
and returns a function that waits for the result."""


def transposed(t: Tensor) -> Tensor:
    """(batch, rows, columns) with the last two dimensions swapped, as a copy. PyTorch's own reads or writes single
    elements."""
    batch, rows, columns = t.shape
    made = t.new_empty((batch, columns, rows))
    if t.numel():
        with on(t.device):
            _transpose[(triton.cdiv(rows, 64) * triton.cdiv(columns, 64), batch)](
                t, made, rows, columns, BLOCK=64, **FP_FUSION
            )
    return made


def fits(w: Any) -> bool:
    """Whether the kernels support these sizes, for which they hold a row of features and the weights, and the dtype,
    which all weights share."""
    c, d = w.p_out.shape
    return w.p_out.element_size() == 2 and all(16 <= size <= 128 and size & (size - 1) == 0 for size in (c, d))


def update(
    x: Tensor, mask: Tensor | None, w: Any, n: int, outgoing: bool, scale: float, eps: float, groups: int,
    exchange: Exchange, target: Tensor, add_residual: bool,
) -> Tensor:  # fmt: skip
    """Writes the update of x, (batch, rows, N, c) with contiguous features, to `target`; with `add_residual`, x plus
    the update. Returns o, (batch, d, rows, N)."""
    (batch, own, _, c), d, width = x.shape, w.p_out.shape[1], -(-n // _PADDING) * _PADDING
    group = d // groups
    w = w._replace(**{name: t.contiguous() for name, t in w._asdict().items() if t is not None})
    has: Any = {"C": c, "D": d, "HAS_NORM": w.norm_in is not None, "HAS_NORM_BIAS": w.norm_in_bias is not None}
    blocks = FP_FUSION | {"BLOCK": 64, "num_warps": 8, "maxnreg": 128}  # two programs per multiprocessor
    grid = triton.cdiv(width, 64), own, batch
    a = w.p_out.new_empty((batch, d, own, width))
    b = w.p_out.new_empty((groups, own, batch, group, width))
    if a.numel():
        _ins[grid](
            x, w.norm_in, w.norm_in_bias, w.p_a, w.p_a_bias, w.g_a, w.g_a_bias, w.p_b, w.p_b_bias, w.g_b, w.g_b_bias,
            None if mask is None else mask.view(torch.uint8) if mask.dtype == torch.bool else mask, a, b,
            x.stride()[:3], (0, 0, 0) if mask is None else mask.stride(), b.stride()[:3], own, n, width, scale, eps,
            **has, GROUP=group, HAS_P_BIAS=w.p_a_bias is not None, HAS_G_BIAS=w.g_a_bias is not None,
            HAS_MASK=mask is not None, **blocks,
        )  # fmt: skip
    o = torch.empty_like(a)

    def sent(g: int) -> Callable[[], Tensor]:
        """b of all ranks; incoming, o."""
        if outgoing:
            return exchange(b[g])
        part = b.new_empty(n, *b.shape[2:])
        for each in range(batch):
            of_a = a[each, g * group : (g + 1) * group, :, :n]
            torch.bmm(of_a.mT, b[g, :, each].transpose(0, 1), out=part[:, each].transpose(0, 1))
        return exchange(part)

    coming = sent(0)
    for g in range(groups):
        arrives, channels = coming, slice(g * group, (g + 1) * group)
        if g + 1 < groups:  # one group ahead; more would take more memory
            coming = sent(g + 1)
        arrived = arrives()  # (rows, batch, group, width)
        for each in range(batch):
            if outgoing:
                torch.bmm(a[each, channels], arrived[:, each].permute(1, 2, 0), out=o[each, channels, :, :n])
            else:
                o[each, channels] = arrived[:, each].transpose(0, 1)
    if o.numel():
        _outs[grid](
            o, x, w.norm_in, w.norm_in_bias, w.norm_out, w.norm_out_bias, w.p_out, w.p_out_bias, w.g_out, w.g_out_bias,
            target, x.stride()[:3], target.stride()[:3], own, n, width, eps, eps * scale**2, **has,
            HAS_NORM_OUT=w.norm_out is not None, HAS_NORM_OUT_BIAS=w.norm_out_bias is not None,
            HAS_P_BIAS=w.p_out_bias is not None, HAS_G_BIAS=w.g_out_bias is not None,
            ADD_RESIDUAL=add_residual, **blocks,
        )  # fmt: skip
    return o[..., :n]

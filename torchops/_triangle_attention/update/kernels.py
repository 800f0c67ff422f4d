# Kernels have no types, and their constants are in capitals, as is usual in Triton.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# Code that a constant leaves out needs an `if` of its own, or it would be compiled.
# ruff: noqa: N803
"""Triton kernels of the triangle attention update for up to 128 features in 16 bits. Whatever reads z recomputes it
from x, so z is only written if it is kept, and each pass over memory does as much as it can.

Tensors are (batch, outer, inner, features), with a stride for each of the first three in units of `UNIT` elements, so
that the compiler knows that rows are aligned. Features are contiguous. A program loops over every so many blocks of
positions of one batch element, with (outer, inner) as one index, and loads the weights once for all of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torchops._triangle_attention.attention.kernels import LOG2E

__all__ = ["UNIT", "bias", "end", "project"]

UNIT = 8
_UNIT = tl.constexpr(UNIT)

_PLACES = tuple(
    f"{tensor}_{number}"
    for tensor in ("x", "made", "z", "o", "target", "grad", "d", "packed", "a", "b", "dz", "dx", "dbias", "k", "v")
    for number in ("at", "batch", "outer", "inner")
)
# One compilation for all N. Numbers are not specialised, so a launch doesn't look at them.
_jit = triton.jit(
    do_not_specialize=[
        *(*_PLACES, "batch", "inner", "count", "width", "share", "step", "scale", "eps"),
        *("chunks", "out_chunks", "programs"),
    ]
)


@triton.jit
def _places(t, at, batch, outer, inner, INNER, COUNT, BLOCK: tl.constexpr):
    """The offsets of the positions of block t. Those beyond the last position get its offset."""
    p = tl.minimum(t * BLOCK + tl.arange(0, BLOCK), COUNT - 1)
    i = p // INNER
    start = at * _UNIT + tl.program_id(1).to(tl.int64) * (batch * _UNIT)
    return start + i.to(tl.int64) * (outer * _UNIT) + (p - i * INNER).to(tl.int64) * (inner * _UNIT)


@triton.jit
def _inside(t, count, SIZE: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr):
    inside = (t * BLOCK + tl.arange(0, BLOCK) < count)[:, None]
    if PADDED != SIZE:
        inside = inside & (tl.arange(0, PADDED) < SIZE)[None, :]
    return inside


@triton.jit
def _load(pointer, places, t, count, SIZE: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr):
    at = pointer + (places[:, None] + tl.arange(0, PADDED)[None, :])
    return tl.load(at, mask=_inside(t, count, SIZE, PADDED, BLOCK), other=0.0)


@triton.jit
def _store(pointer, places, t, count, values, SIZE: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr):
    at = pointer + (places[:, None] + tl.arange(0, PADDED)[None, :])
    tl.store(at, values.to(pointer.dtype.element_ty), mask=_inside(t, count, SIZE, PADDED, BLOCK))


@triton.jit
def _vector(pointer, SIZE: tl.constexpr, PADDED: tl.constexpr):
    d = tl.arange(0, PADDED)
    return tl.load(pointer + d, mask=d < SIZE, other=0.0).to(tl.float32)


@triton.jit
def _matrix(pointer, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PADDED_R: tl.constexpr, PADDED_C: tl.constexpr):
    r, d = tl.arange(0, PADDED_R), tl.arange(0, PADDED_C)
    at = pointer + (r[:, None] * COLUMNS + d[None, :])
    return tl.load(at, mask=(r < ROWS)[:, None] & (d < COLUMNS)[None, :], other=0.0)


@triton.jit
def _normalised(values, eps, C: tl.constexpr, PADDED: tl.constexpr):
    """Normalised rows in float32, zero beyond C; and the factor."""
    mean = tl.sum(values, 1) / C
    distances = values - mean[:, None]
    if PADDED != C:
        distances = tl.where((tl.arange(0, PADDED) < C)[None, :], distances, 0.0)
    # From the distances, not from the squares of the values, so that no digits cancel.
    # Never infinite: with an eps of 0, rows beyond the last would be NaN, and so would sums with them.
    factor = 1 / tl.sqrt(tl.maximum(tl.sum(distances * distances, 1) / C + eps, 1e-30))
    return distances * factor[:, None], factor


@triton.jit
def _z(
    values, norm_weight, norm_bias, eps,
    C: tl.constexpr, PADDED: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """z of rows of x, in float32."""
    z, _ = _normalised(values.to(tl.float32), eps, C, PADDED)
    if HAS_WEIGHT:
        z = z * _vector(norm_weight, C, PADDED)[None, :]
    if HAS_BIAS:
        z = z + _vector(norm_bias, C, PADDED)[None, :]
    return z


@_jit
def bias(
    x, norm_weight, norm_bias, to_heads, made,
    x_at: tl.int64, x_batch: tl.int64, x_outer: tl.int64, x_inner: tl.int64,
    made_outer: tl.int32, inner: tl.int32, count: tl.int32, eps: tl.float32,
    HEADS: tl.constexpr, PADDED_H: tl.constexpr,
    C: tl.constexpr, PADDED_C: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """made = z @ to_heads.T in units of log2, (batch, heads, outer, inner), in rows of `made_outer`, with -inf beyond
    `inner`. `count` is the number of positions in `made`."""
    p, h = tl.arange(0, BLOCK), tl.arange(0, PADDED_H)
    heads = tl.trans(_matrix(to_heads, HEADS, C, PADDED_H, PADDED_C))
    head = count.to(tl.int64)
    made += tl.program_id(1) * HEADS * head
    start = x_at * _UNIT + tl.program_id(1).to(tl.int64) * (x_batch * _UNIT)
    for t in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        at = t * BLOCK + p
        j, k = at // made_outer, at % made_outer
        last = (count // made_outer) - 1
        places = start + tl.minimum(j, last).to(tl.int64) * (x_outer * _UNIT)
        places += tl.minimum(k, inner - 1).to(tl.int64) * (x_inner * _UNIT)
        values = _load(x, places, t, count, C, PADDED_C, BLOCK)
        rows = _z(values, norm_weight, norm_bias, eps, C, PADDED_C, HAS_WEIGHT, HAS_BIAS).to(made.dtype.element_ty)
        s = tl.where((k < inner)[None, :], tl.trans(tl.dot(rows, heads)) * LOG2E, float("-inf"))
        there = (h < HEADS)[:, None] & (at < count)[None, :]
        tl.store(made + (h.to(tl.int64)[:, None] * head + at[None, :]), s.to(made.dtype.element_ty), mask=there)


@_jit
def project(
    x, norm_weight, norm_bias, to_q, to_k, to_v, made, z,
    x_at: tl.int64, x_batch: tl.int64, x_outer: tl.int64, x_inner: tl.int64,
    made_at: tl.int64, made_batch: tl.int64, made_outer: tl.int64, made_inner: tl.int64,
    z_batch: tl.int64, z_outer: tl.int64, z_inner: tl.int64,
    k_at: tl.int64, v_at: tl.int64, inner: tl.int32, count: tl.int32, scale: tl.float32, eps: tl.float32,
    C: tl.constexpr, PADDED_C: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr, KEEPS_Z: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """q = z @ to_q.T, times the scale and in units of log2, like the bias; k and v, `k_at` and `v_at` units
    behind q; and z if it is kept."""
    w0 = tl.trans(_matrix(to_q, WIDTH, C, PADDED_WIDTH, PADDED_C))
    w1 = tl.trans(_matrix(to_k, WIDTH, C, PADDED_WIDTH, PADDED_C))
    w2 = tl.trans(_matrix(to_v, WIDTH, C, PADDED_WIDTH, PADDED_C))
    for t in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        places = _places(t, x_at, x_batch, x_outer, x_inner, inner, count, BLOCK)
        values = _load(x, places, t, count, C, PADDED_C, BLOCK)
        rows = _z(values, norm_weight, norm_bias, eps, C, PADDED_C, HAS_WEIGHT, HAS_BIAS).to(made.dtype.element_ty)
        if KEEPS_Z:
            places = _places(t, 0, z_batch, z_outer, z_inner, inner, count, BLOCK)
            _store(z, places, t, count, rows, C, PADDED_C, BLOCK)
        places = _places(t, made_at, made_batch, made_outer, made_inner, inner, count, BLOCK)
        _store(made, places, t, count, tl.dot(rows, w0) * (scale * LOG2E), WIDTH, PADDED_WIDTH, BLOCK)
        _store(made + k_at * _UNIT, places, t, count, tl.dot(rows, w1), WIDTH, PADDED_WIDTH, BLOCK)
        _store(made + v_at * _UNIT, places, t, count, tl.dot(rows, w2), WIDTH, PADDED_WIDTH, BLOCK)


@_jit
def end(
    o, x, norm_weight, norm_bias, gate, gate_bias, out, out_bias, target,
    o_at: tl.int64, o_batch: tl.int64, o_outer: tl.int64, o_inner: tl.int64,
    x_at: tl.int64, x_batch: tl.int64, x_outer: tl.int64, x_inner: tl.int64,
    target_at: tl.int64, target_batch: tl.int64, target_outer: tl.int64, target_inner: tl.int64,
    inner: tl.int32, count: tl.int32, eps: tl.float32,
    C: tl.constexpr, PADDED_C: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr, HAS_GATE_BIAS: tl.constexpr, HAS_OUT_BIAS: tl.constexpr,
    ADD_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """target = (o * sigmoid(z @ gate.T + gate_bias)) @ out.T + out_bias, plus x if ADD_RESIDUAL. `target` may be x."""
    to_gate = tl.trans(_matrix(gate, WIDTH, C, PADDED_WIDTH, PADDED_C))
    to_out = tl.trans(_matrix(out, C, WIDTH, PADDED_C, PADDED_WIDTH))
    for t in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        places = _places(t, x_at, x_batch, x_outer, x_inner, inner, count, BLOCK)
        values = _load(x, places, t, count, C, PADDED_C, BLOCK)
        rows = _z(values, norm_weight, norm_bias, eps, C, PADDED_C, HAS_WEIGHT, HAS_BIAS).to(o.dtype.element_ty)
        s = tl.dot(rows, to_gate)
        if HAS_GATE_BIAS:
            s = s + _vector(gate_bias, WIDTH, PADDED_WIDTH)[None, :]
        places = _places(t, o_at, o_batch, o_outer, o_inner, inner, count, BLOCK)
        o_rows = _load(o, places, t, count, WIDTH, PADDED_WIDTH, BLOCK)
        gated = (o_rows.to(tl.float32) / (1 + tl.exp2(s * -LOG2E))).to(o_rows.dtype)
        y = tl.dot(gated, to_out)
        if HAS_OUT_BIAS:
            y = y + _vector(out_bias, C, PADDED_C)[None, :]
        if ADD_RESIDUAL:
            y = y + values.to(tl.float32)
        places = _places(t, target_at, target_batch, target_outer, target_inner, inner, count, BLOCK)
        _store(target, places, t, count, y, C, PADDED_C, BLOCK)

# Kernels have no types, and their constants are in capitals, as is usual in Triton.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# Code that a constant leaves out needs an `if` of its own, or it would be compiled.
# ruff: noqa: N803, SIM102
"""Triton kernels of the gradients of the triangle attention update; `kernels.py` says how."""

from __future__ import annotations

import triton
import triton.language as tl

from torchops._triangle_attention.attention.kernels import LOG2E
from torchops._triangle_attention.attention.kernels_backward import prepare_heads, prepare_padding
from torchops._triangle_attention.update.kernels import (
    _UNIT,
    _jit,
    _load,
    _matrix,
    _normalised,
    _places,
    _store,
    _vector,
    _z,
)

__all__ = ["finish", "gate_gradient", "norm_gradient", "products", "to_z"]


@_jit
def gate_gradient(
    grad, o, x, norm_weight, norm_bias, gate, gate_bias, out, d, d_gate, of_out, columns, lse, log_sums, delta,
    grad_at: tl.int64, grad_batch: tl.int64, grad_outer: tl.int64, grad_inner: tl.int64,
    o_at: tl.int64, o_batch: tl.int64, o_outer: tl.int64, o_inner: tl.int64,
    x_at: tl.int64, x_batch: tl.int64, x_outer: tl.int64, x_inner: tl.int64,
    d_batch: tl.int64, d_outer: tl.int64, d_inner: tl.int64,
    packed_batch: tl.int64, packed_outer: tl.int64, packed_inner: tl.int64,
    inner: tl.int32, count: tl.int32, width: tl.int32, eps: tl.float32,
    ENDING: tl.constexpr, HEADS: tl.constexpr, ACCUMULATE: tl.constexpr, STAGES: tl.constexpr,
    C: tl.constexpr, PADDED_C: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr, HAS_GATE_BIAS: tl.constexpr, HAS_OUT_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """From grad: d, the gradient of o; d_gate, that of the gate before its sigmoid, with the strides of `packed`; and
    from d, o and lse the numbers of `prepare`. Also the sums over the positions of each program, added to the previous
    values if ACCUMULATE: of grad.T @ (o * gate), (batch, program, C, WIDTH), the gradient of `out`, and with
    HAS_OUT_BIAS of grad, `columns`."""
    many, n = (inner, count // inner) if ENDING else (count // inner, inner)
    prepare_padding(log_sums, delta, many * HEADS, n, width)
    to_gate = tl.trans(_matrix(gate, WIDTH, C, PADDED_WIDTH, PADDED_C))
    from_out = _matrix(out, C, WIDTH, PADDED_C, PADDED_WIDTH)
    r, e = tl.arange(0, PADDED_C), tl.arange(0, PADDED_WIDTH)
    program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    out_at = of_out + program * (C * WIDTH) + (r[:, None] * WIDTH + e[None, :])
    there = (r < C)[:, None] & (e < WIDTH)[None, :]
    columns += program * C + r
    sums, of_columns = tl.zeros((PADDED_C, PADDED_WIDTH), tl.float32), tl.zeros((PADDED_C,), tl.float32)
    if ACCUMULATE:
        sums += tl.load(out_at, mask=there, other=0.0)
        if HAS_OUT_BIAS:
            of_columns += tl.load(columns, mask=r < C, other=0.0)
    for t in tl.range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0), num_stages=STAGES):
        places = _places(t, x_at, x_batch, x_outer, x_inner, inner, count, BLOCK)
        values = _load(x, places, t, count, C, PADDED_C, BLOCK)
        rows = _z(values, norm_weight, norm_bias, eps, C, PADDED_C, HAS_WEIGHT, HAS_BIAS).to(o.dtype.element_ty)
        s = tl.dot(rows, to_gate)
        if HAS_GATE_BIAS:
            s = s + _vector(gate_bias, WIDTH, PADDED_WIDTH)[None, :]
        sigmoid = 1 / (1 + tl.exp2(s * -LOG2E))
        places = _places(t, grad_at, grad_batch, grad_outer, grad_inner, inner, count, BLOCK)
        g = _load(grad, places, t, count, C, PADDED_C, BLOCK)
        d_rows = tl.dot(g.to(o.dtype.element_ty), from_out) * sigmoid
        places = _places(t, 0, d_batch, d_outer, d_inner, inner, count, BLOCK)
        _store(d, places, t, count, d_rows, WIDTH, PADDED_WIDTH, BLOCK)
        places = _places(t, o_at, o_batch, o_outer, o_inner, inner, count, BLOCK)
        o_rows = _load(o, places, t, count, WIDTH, PADDED_WIDTH, BLOCK).to(tl.float32)
        of_o = d_rows.to(d.dtype.element_ty).to(tl.float32) * o_rows
        p = t * BLOCK + tl.arange(0, BLOCK)
        i, j = (p % inner, p // inner) if ENDING else (p // inner, p % inner)
        prepare_heads(
            of_o, i, j, p < count, lse, log_sums, delta, many, n, width, HEADS, WIDTH // HEADS, PADDED_WIDTH, BLOCK
        )
        gated_rows = o_rows * sigmoid
        places = _places(t, 0, packed_batch, packed_outer, packed_inner, inner, count, BLOCK)
        _store(d_gate, places, t, count, d_rows * (o_rows - gated_rows), WIDTH, PADDED_WIDTH, BLOCK)
        if HAS_OUT_BIAS:
            of_columns += tl.sum(g.to(tl.float32), 0)
        sums = tl.dot(tl.trans(g).to(o.dtype.element_ty), gated_rows.to(o.dtype.element_ty), sums)
    tl.store(out_at, sums, mask=there)
    if HAS_OUT_BIAS:
        tl.store(columns, of_columns, mask=r < C)


@_jit
def products(
    a, b, made, columns,
    a_at: tl.int64, a_batch: tl.int64, a_outer: tl.int64, a_inner: tl.int64,
    b_batch: tl.int64, b_outer: tl.int64, b_inner: tl.int64,
    step: tl.int64, batch: tl.int32, inner: tl.int32, count: tl.int32, share: tl.int32,
    A: tl.constexpr, PADDED_A: tl.constexpr, B: tl.constexpr, PADDED_B: tl.constexpr, ACCUMULATE: tl.constexpr,
    SUMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """made[chunk, m] (+)= a[m].T @ b in float32, over `share` blocks of positions; a[m] are `step` units apart. With
    SUMS, columns[chunk, m] (+)= the sum of a[m].

    The grid is (m, 1, chunks).
    """
    m, chunk = tl.program_id(0), tl.program_id(2)
    r, d = tl.arange(0, PADDED_A), tl.arange(0, PADDED_B)
    at = made + (chunk * tl.num_programs(0) + m).to(tl.int64) * (A * B) + (r[:, None] * B + d[None, :])
    inside = (r < A)[:, None] & (d < B)[None, :]
    sums = tl.zeros((PADDED_A, PADDED_B), tl.float32)
    of_columns = tl.zeros((PADDED_A,), tl.float32)
    columns += (chunk * tl.num_programs(0) + m) * A + r
    if ACCUMULATE:
        sums += tl.load(at, mask=inside, other=0.0)
        if SUMS:
            of_columns += tl.load(columns, mask=r < A, other=0.0)
    a += m * (step * _UNIT)
    for each in range(batch):
        for t in range(chunk * share, tl.minimum((chunk + 1) * share, tl.cdiv(count, BLOCK))):
            places = _places(t, a_at + each * a_batch, 0, a_outer, a_inner, inner, count, BLOCK)
            a_rows = _load(a, places, t, count, A, PADDED_A, BLOCK)
            places = _places(t, each * b_batch, 0, b_outer, b_inner, inner, count, BLOCK)
            b_rows = _load(b, places, t, count, B, PADDED_B, BLOCK)
            sums = tl.dot(tl.trans(a_rows).to(b_rows.dtype), b_rows, sums)
            if SUMS:
                of_columns += tl.sum(a_rows.to(tl.float32), 0)
    tl.store(at, sums, mask=inside)
    if SUMS:
        tl.store(columns, of_columns, mask=r < A)


@_jit
def to_z(
    d, to_q, to_k, to_v, to_gate, dz,
    d_batch: tl.int64, d_outer: tl.int64, d_inner: tl.int64,
    dz_at: tl.int64, dz_batch: tl.int64, dz_outer: tl.int64, dz_inner: tl.int64,
    step: tl.int64, inner: tl.int32, count: tl.int32,
    C: tl.constexpr, PADDED_C: tl.constexpr, WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dz = the sum over m = 0 to 3 of d[m] @ (to_q, to_k, to_v, to_gate)[m]; d[m] are `step` units apart."""
    t = tl.program_id(0)
    places = _places(t, 0, d_batch, d_outer, d_inner, inner, count, BLOCK)
    sums = tl.zeros((BLOCK, PADDED_C), tl.float32)
    for m in range(4):
        weights = tl.where(m == 0, to_q, tl.where(m == 1, to_k, tl.where(m == 2, to_v, to_gate)))
        rows = _load(d, places, t, count, WIDTH, PADDED_WIDTH, BLOCK)
        sums = tl.dot(rows, _matrix(weights, WIDTH, C, PADDED_WIDTH, PADDED_C), sums)
        d += step * _UNIT
    places = _places(t, dz_at, dz_batch, dz_outer, dz_inner, inner, count, BLOCK)
    _store(dz, places, t, count, sums, C, PADDED_C, BLOCK)


@_jit
def norm_gradient(
    dz, dbias, x, norm_weight, norm_bias, to_heads, grad, dx, sums,
    x_at: tl.int64, x_batch: tl.int64, x_outer: tl.int64, x_inner: tl.int64,
    dz_at: tl.int64, dz_batch: tl.int64, dz_outer: tl.int64, dz_inner: tl.int64,
    grad_at: tl.int64, grad_batch: tl.int64, grad_outer: tl.int64, grad_inner: tl.int64,
    dx_at: tl.int64, dx_batch: tl.int64, dx_outer: tl.int64, dx_inner: tl.int64,
    dbias_outer: tl.int32, dbias_inner: tl.int32, inner: tl.int32, count: tl.int32, eps: tl.float32,
    HEADS: tl.constexpr, PADDED_H: tl.constexpr,
    C: tl.constexpr, PADDED_C: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    ADD_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx, including the part of dz that comes through the bias, whose gradient is (batch, heads, positions), plus grad
    if ADD_RESIDUAL. Also the sums over the positions of each program, (batch, program, 2 + HEADS, C): gradients of the
    norm's weight, its bias, and `to_heads`.

    Rows of dz may share memory with the same rows of dx, because a row of dx is computed only after all of that row of
    dz has been read.
    """
    r, d, h = tl.arange(0, BLOCK), tl.arange(0, PADDED_C), tl.arange(0, PADDED_H)
    in_c = d < C
    weight = tl.full((PADDED_C,), 1.0, tl.float32)
    if HAS_WEIGHT:
        weight = _vector(norm_weight, C, PADDED_C)
    # Summed separately for each position of a block during the loop; sums over positions would wait for all warps.
    of_weight, of_bias = tl.zeros((BLOCK, PADDED_C), tl.float32), tl.zeros((BLOCK, PADDED_C), tl.float32)
    of_heads = tl.zeros((PADDED_H, PADDED_C), tl.float32)
    dbias += tl.program_id(1).to(tl.int64) * HEADS * count
    for t in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        places = _places(t, x_at, x_batch, x_outer, x_inner, inner, count, BLOCK)
        values = _load(x, places, t, count, C, PADDED_C, BLOCK).to(tl.float32)
        places = _places(t, dz_at, dz_batch, dz_outer, dz_inner, inner, count, BLOCK)
        g = _load(dz, places, t, count, C, PADDED_C, BLOCK).to(tl.float32)
        if ADD_RESIDUAL:
            places = _places(t, grad_at, grad_batch, grad_outer, grad_inner, inner, count, BLOCK)
            residual = _load(grad, places, t, count, C, PADDED_C, BLOCK)
        unit, factor = _normalised(values, eps, C, PADDED_C)
        p = tl.minimum(t * BLOCK + r, count - 1)
        at = dbias + ((p // inner) * dbias_outer + (p % inner) * dbias_inner).to(tl.int64)
        there = t * BLOCK + r < count
        for head in tl.static_range(HEADS):
            by_bias = tl.load(at + head * count.to(tl.int64), mask=there, other=0.0)
            by_bias = by_bias.to(to_heads.dtype.element_ty).to(tl.float32)
            g += by_bias[:, None] * _vector(to_heads + head * C, C, PADDED_C)[None, :]
        z = unit * weight[None, :]
        if HAS_BIAS:
            z += _vector(norm_bias, C, PADDED_C)[None, :]
        every = (h[:, None] < HEADS) & there[None, :]
        every = tl.load(at[None, :] + h.to(tl.int64)[:, None] * count, mask=every, other=0.0)
        of_heads = tl.dot(every.to(to_heads.dtype.element_ty), z.to(to_heads.dtype.element_ty), of_heads)
        of_weight += g * unit
        of_bias += g
        g = g * weight[None, :]
        g = g - (tl.sum(g, 1) / C)[:, None] - unit * (tl.sum(g * unit, 1) / C)[:, None]
        g = g * factor[:, None]
        if ADD_RESIDUAL:
            g += residual.to(tl.float32)
        places = _places(t, dx_at, dx_batch, dx_outer, dx_inner, inner, count, BLOCK)
        _store(dx, places, t, count, g, C, PADDED_C, BLOCK)
    row = sums + (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * ((2 + HEADS) * C)
    tl.store(row + d, tl.sum(of_weight, 0), mask=in_c)
    tl.store(row + C + d, tl.sum(of_bias, 0), mask=in_c)
    tl.store(row + ((2 + h)[:, None] * C + d[None, :]), of_heads, mask=(h < HEADS)[:, None] & in_c[None, :])


@triton.jit
def _sum_rows(source, rows, stride, target, first, count, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """target[first + i] = the sum over rows of source[row * stride + first + i], for one block."""
    r, at = tl.arange(0, ROWS), first + tl.arange(0, BLOCK)
    there = at < count
    sums = tl.zeros((BLOCK,), tl.float32)
    for row in range(0, rows, ROWS):
        places = source + ((row + r)[:, None].to(tl.int64) * stride + at[None, :])
        sums += tl.sum(tl.load(places, mask=(row + r < rows)[:, None] & there[None, :], other=0.0), 0)
    tl.store(target + at, sums.to(target.dtype.element_ty), mask=there)


@_jit
def finish(
    of_inputs, of_out, of_norm, columns_of_inputs, columns_of_out,
    q, k, v, gate, out, norm_weight, norm_bias, to_heads, gate_bias, out_bias,
    chunks: tl.int32, out_chunks: tl.int32, programs: tl.int32,
    C: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_GATE_BIAS: tl.constexpr, HAS_OUT_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradients of the parameters, from the sums of `products` and `norm_gradient`.

    The grid has four programs for each of `HEADS + 4` vectors of at most BLOCK numbers, which are sums of many rows,
    and one for each BLOCK of five matrices.
    """
    t = tl.program_id(0)
    if t < 4 * (HEADS + 4):
        vector, first, stride = t // 4, t % 4 * (BLOCK // 4), (2 + HEADS) * C
        if vector < HEADS:
            _sum_rows(of_norm + (2 + vector) * C, programs, stride, to_heads + vector * C, first, C, 256, BLOCK // 4)
        if HAS_WEIGHT:
            if vector == HEADS:
                _sum_rows(of_norm, programs, stride, norm_weight, first, C, 256, BLOCK // 4)
        if HAS_BIAS:
            if vector == HEADS + 1:
                _sum_rows(of_norm + C, programs, stride, norm_bias, first, C, 256, BLOCK // 4)
        if HAS_GATE_BIAS:
            if vector == HEADS + 2:
                _sum_rows(columns_of_inputs + 3 * WIDTH, chunks, 4 * WIDTH, gate_bias, first, WIDTH, 64, BLOCK // 4)
        if HAS_OUT_BIAS:
            if vector == HEADS + 3:
                _sum_rows(columns_of_out, out_chunks, C, out_bias, first, C, 256, BLOCK // 4)
    else:
        t -= 4 * (HEADS + 4)
        blocks = tl.cdiv(WIDTH * C, BLOCK)
        m, first = t // blocks, t % blocks * BLOCK
        if m == 4:
            _sum_rows(of_out, out_chunks, WIDTH * C, out, first, WIDTH * C, 64, BLOCK)
        else:
            target = tl.where(m == 0, q, tl.where(m == 1, k, tl.where(m == 2, v, gate)))
            _sum_rows(of_inputs + m * (WIDTH * C), chunks, 4 * WIDTH * C, target, first, WIDTH * C, 32, BLOCK)

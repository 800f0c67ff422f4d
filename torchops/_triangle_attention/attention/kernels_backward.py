# Kernels have no types, and their constants are in capitals, as is usual in Triton.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803
"""Triton kernels of the gradients of triangle attention; `kernels.py` says how."""

from __future__ import annotations

import triton
import triton.language as tl

from torchops._triangle_attention.attention.kernels import (
    LOG2E,
    _jit,
    _load,
    _pair,
    _probabilities,
    _program_coords,
    _row,
    _store,
)

__all__ = [
    *("backward_bias", "backward_kv", "backward_q", "prepare", "prepare_heads", "prepare_padding", "sum_parts"),
    "transpose",
]


@_jit
def prepare(
    grad, out, lse, log_sums, delta, grad_strides, out_strides,
    rows: tl.int32, queries: tl.int32, heads: tl.int32, q_width,
    D: tl.constexpr, PADDED_D: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """For each query and head, the logarithm to base 2 of its sum (inf beyond the last query), and the sum over keys of
    p * dp, which equals the sum over features of grad * out (0 beyond the last query). Both in rows of `q_width`
    numbers."""
    b, i, h, first = _program_coords(heads, BLOCK_J)
    j, left = tl.arange(0, BLOCK_J), (queries - first).to(tl.int32)
    g = _load(_row(grad, grad_strides, b, i, h, first), grad_strides[3], left, D, PADDED_D, BLOCK_J)
    o = _load(_row(out, out_strides, b, i, h, first), out_strides[3], left, D, PADDED_D, BLOCK_J)
    row = (b * rows + i) * heads + h
    lse_j = tl.load(lse + row * queries + first + j, mask=j < left, other=float("inf"))
    tl.store(log_sums + row * q_width + first + j, lse_j * LOG2E)
    tl.store(delta + row * q_width + first + j, tl.sum(g.to(tl.float32) * o.to(tl.float32), 1))


@triton.jit
def prepare_heads(
    products, i, j, there, lse, log_sums, delta, rows, n, width,
    HEADS: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Like `prepare`, for BLOCK edges (i, j), given grad * out of all heads. The grid is (blocks, batch, 1)."""
    first = tl.program_id(1).to(tl.int64) * rows
    if D & (D - 1) == 0:
        h = tl.arange(0, PADDED // D)
        sums = tl.sum(tl.reshape(products, (BLOCK, PADDED // D, D)), 2)
        _store_lse_delta(sums, first + i, j, h, there, lse, log_sums, delta, n, width, HEADS)
    else:
        head_of = tl.arange(0, PADDED) // D
        for head in tl.static_range(HEADS):
            sums = tl.sum(tl.where((head_of == head)[None, :], products, 0.0), 1)[:, None]
            _store_lse_delta(sums, first + i, j, head + tl.arange(0, 1), there, lse, log_sums, delta, n, width, HEADS)


@triton.jit
def _store_lse_delta(sums, row, j, h, there, lse, log_sums, delta, n, width, HEADS: tl.constexpr):
    rows = row[:, None] * HEADS + h[None, :]
    inside = there[:, None] & (h < HEADS)[None, :]
    lse_j = tl.load(lse + (rows * n + j[:, None]), mask=inside, other=0.0)
    tl.store(log_sums + (rows * width + j[:, None]), lse_j * LOG2E, mask=inside)
    tl.store(delta + (rows * width + j[:, None]), sums, mask=inside)


@triton.jit
def prepare_padding(log_sums, delta, rows, n, width):
    """Fills what `prepare` has beyond n, with the same grid. `rows` counts those of all heads."""
    first, j = tl.program_id(1).to(tl.int64) * rows, n + tl.arange(0, 128)  # _PADDING, more than the padding can be
    if n < width:
        for row in range(tl.program_id(0), rows, tl.num_programs(0)):
            at = (first + row) * width + j
            tl.store(log_sums + at, float("inf"), mask=j < width)
            tl.store(delta + at, 0.0, mask=j < width)


@_jit
def backward_q(
    grad, q, k, v, bias, mask_bias, lse_delta, dq,
    grad_strides, q_strides, k_strides, v_strides, bias_strides, dq_strides,
    rows: tl.int32, queries: tl.int32, keys: tl.int32, heads: tl.int32, scale, q_width, width, gap: tl.int64,
    D: tl.constexpr, PADDED_D: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    SCALED: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dq = scale * ds k, with ds = p * (grad v^T - delta)."""
    b, i, h, first = _program_coords(heads, BLOCK_J)
    j, kk = tl.arange(0, BLOCK_J), tl.arange(0, BLOCK_K)
    left = (queries - first).to(tl.int32)
    q_tile = _load(_row(q, q_strides, b, i, h, first), q_strides[3], left, D, PADDED_D, BLOCK_J)
    g_tile = _load(_row(grad, grad_strides, b, i, h, first), grad_strides[3], left, D, PADDED_D, BLOCK_J)
    first_number = ((b * rows + i) * heads + h) * q_width + first
    log_sums_j, delta_j = _pair(lse_delta + first_number, gap, BLOCK_J, STAGES)
    k_rows, v_rows = _row(k, k_strides, b, i, h, 0), _row(v, v_strides, b, i, h, 0)
    bias_rows = bias + b * bias_strides[0] + h * bias_strides[1] + first * bias_strides[2]
    bias_at = tl.minimum(j, left - 1)[:, None] * bias_strides[2] + kk[None, :]
    mask_bias_row = mask_bias + (b * rows + i) * width

    sums = tl.zeros((BLOCK_J, PADDED_D), tl.float32)
    for start in tl.range(0, keys, BLOCK_K, num_stages=STAGES):
        k_tile = _load(k_rows, k_strides[3], keys - start, D, PADDED_D, BLOCK_K)
        mask_bias_k = None
        if MASKED:
            mask_bias_k, _ = _pair(mask_bias_row, 0, BLOCK_K, STAGES)
            mask_bias_row += BLOCK_K
        bias_tile = tl.load(bias_rows + bias_at)
        p = _probabilities(q_tile, k_tile, bias_tile, mask_bias_k, log_sums_j[:, None], scale, SCALED, PRECISION)
        v_tile = _load(v_rows, v_strides[3], keys - start, D, PADDED_D, BLOCK_K)
        dp = tl.dot(g_tile, tl.trans(v_tile), input_precision=PRECISION)
        ds = p * (dp - delta_j[:, None])
        sums = tl.dot(ds.to(k_tile.dtype), k_tile, sums, input_precision=PRECISION)
        k_rows += BLOCK_K * k_strides[3]
        v_rows += BLOCK_K * v_strides[3]
        bias_rows += BLOCK_K

    _store(_row(dq, dq_strides, b, i, h, first), dq_strides[3], left, sums * scale, D, PADDED_D, BLOCK_J)


@_jit
def backward_kv(
    grad, q, k, v, bias, mask_bias, lse_delta, dk, dv,
    grad_strides, q_strides, k_strides, v_strides, bias_strides, dk_strides, dv_strides,
    rows: tl.int32, queries: tl.int32, keys: tl.int32, heads: tl.int32, scale, q_width, width, gap: tl.int64,
    D: tl.constexpr, PADDED_D: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    WANT_K: tl.constexpr, WANT_V: tl.constexpr,
    SCALED: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dk = scale * ds^T q, dv = p^T grad. Tiles are transposed, so that p and ds are left factors as they are. So is
    the bias, (batch, h, k, j), of which a thread then reads two numbers at once."""
    b, i, h, first = _program_coords(heads, BLOCK_K)
    j, kk = tl.arange(0, BLOCK_J), tl.arange(0, BLOCK_K)
    left = (keys - first).to(tl.int32)
    k_tile = _load(_row(k, k_strides, b, i, h, first), k_strides[3], left, D, PADDED_D, BLOCK_K)
    v_tile = _load(_row(v, v_strides, b, i, h, first), v_strides[3], left, D, PADDED_D, BLOCK_K)
    q_rows, g_rows = _row(q, q_strides, b, i, h, 0), _row(grad, grad_strides, b, i, h, 0)
    bias_rows = bias + b * bias_strides[0] + h * bias_strides[1] + first * bias_strides[2]
    bias_at = tl.minimum(kk, left - 1)[:, None] * bias_strides[2] + j[None, :]
    first_number = ((b * rows + i) * heads + h) * q_width

    k_sums = tl.zeros((BLOCK_K, PADDED_D), tl.float32)
    v_sums = tl.zeros((BLOCK_K, PADDED_D), tl.float32)
    for start in tl.range(0, queries, BLOCK_J, num_stages=STAGES):
        q_tile = _load(q_rows, q_strides[3], queries - start, D, PADDED_D, BLOCK_J)
        g_tile = _load(g_rows, grad_strides[3], queries - start, D, PADDED_D, BLOCK_J)
        log_sums_j, delta_j = _pair(lse_delta + first_number, gap, BLOCK_J, STAGES)
        bias_tile = tl.load(bias_rows + bias_at)
        p = _probabilities(k_tile, q_tile, bias_tile, None, log_sums_j[None, :], scale, SCALED, PRECISION)
        if WANT_V:
            v_sums = tl.dot(p.to(g_tile.dtype), g_tile, v_sums, input_precision=PRECISION)
        if WANT_K:
            dp = tl.dot(v_tile, tl.trans(g_tile), input_precision=PRECISION)
            ds = p * (dp - delta_j[None, :])
            k_sums = tl.dot(ds.to(q_tile.dtype), q_tile, k_sums, input_precision=PRECISION)
        q_rows += BLOCK_J * q_strides[3]
        g_rows += BLOCK_J * grad_strides[3]
        bias_rows += BLOCK_J
        first_number += BLOCK_J

    if MASKED:
        # A masked key doesn't contribute to the sums of others, so its own sums may hold anything up to here.
        kept = (tl.load(mask_bias + (b * rows + i) * width + first + kk) == 0)[:, None]
        k_sums, v_sums = tl.where(kept, k_sums, 0.0), tl.where(kept, v_sums, 0.0)
    if WANT_K:
        k_sums = k_sums / LOG2E if SCALED else k_sums * scale
        _store(_row(dk, dk_strides, b, i, h, first), dk_strides[3], left, k_sums, D, PADDED_D, BLOCK_K)
    if WANT_V:
        _store(_row(dv, dv_strides, b, i, h, first), dv_strides[3], left, v_sums, D, PADDED_D, BLOCK_K)


@_jit
def backward_bias(
    grad, q, k, v, bias, mask_bias, lse_delta, dbias,
    grad_strides, q_strides, k_strides, v_strides, bias_strides,
    rows: tl.int32, queries: tl.int32, keys: tl.int32, heads: tl.int32, scale, q_width, width, share: tl.int32,
    gap: tl.int64,
    D: tl.constexpr, PADDED_D: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr, ACCUMULATE: tl.constexpr,
    SCALED: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The sum of ds over `share` rows i, written to dbias (parts, batch, heads, queries, keys) or added to it.

    The grid is (tiles, parts, batch * heads).
    """
    part, bh = tl.program_id(1), tl.program_id(2)
    blocks_k = tl.cdiv(keys, BLOCK_K)
    b, h = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)
    first_j = (tl.program_id(0) // blocks_k).to(tl.int64) * BLOCK_J
    first_k = (tl.program_id(0) % blocks_k).to(tl.int64) * BLOCK_K
    j, kk = tl.arange(0, BLOCK_J), tl.arange(0, BLOCK_K)
    left_j, left_k = (queries - first_j).to(tl.int32), (keys - first_k).to(tl.int32)

    bias_rows = bias + b * bias_strides[0] + h * bias_strides[1] + first_j * bias_strides[2] + first_k
    bias_tile = tl.load(bias_rows + (tl.minimum(j, left_j - 1)[:, None] * bias_strides[2] + kk[None, :]))
    bias_tile = bias_tile.to(tl.float32)
    i = part.to(tl.int64) * share
    q_rows, g_rows = _row(q, q_strides, b, i, h, first_j), _row(grad, grad_strides, b, i, h, first_j)
    k_rows, v_rows = _row(k, k_strides, b, i, h, first_k), _row(v, v_strides, b, i, h, first_k)
    mask_bias_row = mask_bias + (b * rows + i) * width + first_k
    first_number = ((b * rows + i) * heads + h) * q_width + first_j

    # Without STAGES, only the operands of products are loaded ahead, so these are loaded here, one iteration early.
    next_log_sums, next_delta = _pair(lse_delta + first_number, gap, BLOCK_J, STAGES)
    sums = tl.zeros((BLOCK_J, BLOCK_K), tl.float32)
    count = tl.minimum(share, rows - part * share)
    for step in tl.range(0, count, num_stages=STAGES):
        q_tile = _load(q_rows, q_strides[3], left_j, D, PADDED_D, BLOCK_J)
        k_tile = _load(k_rows, k_strides[3], left_k, D, PADDED_D, BLOCK_K)
        if STAGES is None:
            log_sums_j, delta_j = next_log_sums, next_delta
            if step + 1 < count:
                first_number += heads * q_width
            next_log_sums, next_delta = _pair(lse_delta + first_number, gap, BLOCK_J, STAGES)
        else:
            log_sums_j, delta_j = _pair(lse_delta + first_number, gap, BLOCK_J, STAGES)
            first_number += heads * q_width
        mask_bias_k = None
        if MASKED:
            mask_bias_k, _ = _pair(mask_bias_row, 0, BLOCK_K, STAGES)
            mask_bias_row += width
        p = _probabilities(q_tile, k_tile, bias_tile, mask_bias_k, log_sums_j[:, None], scale, SCALED, PRECISION)
        g_tile = _load(g_rows, grad_strides[3], left_j, D, PADDED_D, BLOCK_J)
        v_tile = _load(v_rows, v_strides[3], left_k, D, PADDED_D, BLOCK_K)
        dp = tl.dot(g_tile, tl.trans(v_tile), input_precision=PRECISION)
        sums += p * (dp - delta_j[:, None])
        q_rows += q_strides[1]
        g_rows += grad_strides[1]
        k_rows += k_strides[1]
        v_rows += v_strides[1]

    batch_heads = tl.num_programs(2).to(tl.int64)
    at = ((part * batch_heads + bh) * queries + first_j) * keys + first_k
    there = (j < left_j)[:, None] & (kk < left_k)[None, :]
    at = dbias + at + (j[:, None] * keys + kk[None, :])
    if ACCUMULATE:
        sums += tl.load(at, mask=there, other=0.0)
    tl.store(at, sums.to(dbias.dtype.element_ty), mask=there)


@_jit
def transpose(
    bias, transposed, bias_strides, transposed_strides, queries: tl.int32, keys: tl.int32, heads: tl.int32,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """transposed[k, j] = bias[j, k], with -inf for j beyond the last query.

    The grid is (blocks of j, blocks of k, batch * heads).
    """
    b, h = (tl.program_id(2) // heads).to(tl.int64), (tl.program_id(2) % heads).to(tl.int64)
    first_j, first_k = tl.program_id(0).to(tl.int64) * BLOCK, tl.program_id(1).to(tl.int64) * BLOCK
    r = tl.arange(0, BLOCK)
    j, k = tl.minimum(first_j + r, queries - 1), tl.minimum(first_k + r, keys - 1)
    rows = bias + b * bias_strides[0] + h * bias_strides[1]
    tile = tl.trans(tl.load(rows + (j[:, None] * bias_strides[2] + k[None, :])))
    tile = tl.where((first_j + r < queries)[None, :], tile, float("-inf"))
    rows = transposed + b * transposed_strides[0] + h * transposed_strides[1]
    at = (first_k + r)[:, None] * transposed_strides[2] + (first_j + r)[None, :]
    tl.store(rows + at, tile.to(transposed.dtype.element_ty), mask=(first_k + r < keys)[:, None])


@triton.jit(do_not_specialize=["parts"])
def sum_parts(dbias, parts: tl.int32, size, BLOCK: tl.constexpr):
    """Overwrites the first part with the sum of all `parts`. The grid is (blocks, 1, 1)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < size
    sums = tl.load(dbias + at, mask=there, other=0.0)
    distance = tl.cast(size, tl.int64)  # a size of 1 is a constant, which has no .to()
    for part in range(1, parts):
        sums += tl.load(dbias + part * distance + at, mask=there, other=0.0)
    tl.store(dbias + at, sums, mask=there)

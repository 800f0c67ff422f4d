# Kernels have no types, and their constants are in capitals, as is usual in Triton.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803
"""Triton kernels of triangle attention, compiled once for all numbers of queries and keys.

The scores ``s[i, h, j, k] = scale * q[i, h, j] . k[i, h, k] + bias[h, j, k]`` never leave the registers. A program
holds a tile of them, for one head and one row i (for the gradient of the bias: one row i after another), and computes
the exponentials in float32, as powers of 2. The backward pass recomputes the tiles from the logarithms of the sums that
the forward pass saved. It does so three times, because the sums over k (dq), over j (dk and dv) and over i (the bias)
need different loops. Each sum has a fixed order, which depends on the shapes and the GPU. There are no atomics, so the
gradients are bitwise the same in every run.

STAGES: how many iterations ahead loops load all operands. None for float32 tiles, where only the operands of products
are loaded ahead. Strides are tuples (batch, i, h, j), those of the bias (batch, h, j). Offsets within a tile fit 32
bits; those of its first element may not. Rows that are padded have `width` numbers, of a number for each key, or
`q_width`, for each query.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["LOG2E", "add_of_mask", "forward"]

_jit = triton.jit(do_not_specialize=["rows", "queries", "keys", "heads", "share", "gap"])  # one for all sizes
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _row_mask(left, D: tl.constexpr, PADDED_D: tl.constexpr, BLOCK: tl.constexpr):
    r, d = tl.arange(0, BLOCK), tl.arange(0, PADDED_D)
    there = (r < left)[:, None]
    if PADDED_D != D:
        there = there & (d < D)[None, :]
    return there


@triton.jit
def _load(rows, stride, left, D: tl.constexpr, PADDED_D: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK rows of D numbers. Only the first `left` rows exist; the rest, and the padding of D, are zeros."""
    r, d = tl.arange(0, BLOCK), tl.arange(0, PADDED_D)
    at = rows + (r[:, None] * stride + d[None, :])
    return tl.load(at, mask=_row_mask(left, D, PADDED_D, BLOCK), other=0.0)


@triton.jit
def _store(rows, stride, left, values, D: tl.constexpr, PADDED_D: tl.constexpr, BLOCK: tl.constexpr):
    r, d = tl.arange(0, BLOCK), tl.arange(0, PADDED_D)
    at = rows + (r[:, None] * stride + d[None, :])
    tl.store(at, values.to(rows.dtype.element_ty), mask=_row_mask(left, D, PADDED_D, BLOCK))


@triton.jit
def _row(pointer, strides, b, i, h, j):
    return pointer + b * strides[0] + i * strides[1] + h * strides[2] + j * strides[3]


@triton.jit
def _program_coords(heads, BLOCK: tl.constexpr):
    """Batch, row and head of a program in the grid (blocks, rows, batch * heads), and the start of its block."""
    bh = tl.program_id(2)
    i = tl.program_id(1).to(tl.int64)
    return (bh // heads).to(tl.int64), i, (bh % heads).to(tl.int64), tl.program_id(0).to(tl.int64) * BLOCK


@triton.jit
def _pair(pointer, gap, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """BLOCK numbers from `pointer` on, and as many at `pointer + gap`. With STAGES, a single load of as many numbers as
    4 warps have threads: with fewer, every thread that needs a number would load it itself, again and again."""
    if STAGES is None:
        r = tl.arange(0, BLOCK)
        return tl.load(pointer + r), tl.load(pointer + gap + r)
    r = tl.arange(0, 2 * BLOCK)
    both = tl.load(pointer + (r % BLOCK + (r // BLOCK) * gap))
    return tl.split(tl.trans(tl.reshape(both, (2, BLOCK))))


@triton.jit
def _scores(left, right, bias, mask_bias, scale, SCALED: tl.constexpr, PRECISION: tl.constexpr):
    """scale * left right^T + bias, plus what is added to columns, or None. SCALED: a factor already has the scale, and
    both it and the bias are in units of log2, so the product accumulates onto the rest: one instruction less per
    score."""
    s = bias.to(tl.float32)
    if not SCALED:
        s = tl.dot(left, tl.trans(right), input_precision=PRECISION) * scale + s
    if mask_bias is not None:
        s += mask_bias[None, :]
    if SCALED:
        s = tl.dot(left, tl.trans(right), s, input_precision=PRECISION)
    return s


@triton.jit
def _probabilities(left, right, bias, mask_bias, log_sums, scale, SCALED: tl.constexpr, PRECISION: tl.constexpr):
    """The probabilities of these scores. `log_sums`, to base 2, are those of rows or of columns, with two
    dimensions."""
    if SCALED:
        return tl.exp2(_scores(left, right, bias.to(tl.float32) - log_sums, mask_bias, scale, True, PRECISION))
    return tl.exp2(_scores(left, right, bias, mask_bias, scale, False, PRECISION) * LOG2E - log_sums)


@_jit
def add_of_mask(mask, mask_bias, mask_strides, rows: tl.int32, keys: tl.int32, width, BLOCK: tl.constexpr):
    """What a mask with strides (batch, i, k) adds to the scores of each row: -inf at masked keys, unless all keys are
    masked. The result is float32 in rows of `width`, so that the forward pass and dq can load it ahead like the other
    operands: asynchronous copies take at least 4 bytes, and single bytes would stall the loop."""
    i, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row = mask + b * mask_strides[0] + i * mask_strides[1]
    kk = tl.arange(0, BLOCK)
    kept = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, keys, BLOCK):
        at = (start + kk).to(tl.int64) * mask_strides[2]
        kept |= (tl.load(row + at, mask=kk < keys - start, other=0) != 0).to(tl.int32)
    none = tl.max(kept, 0) == 0
    for start in range(0, width, BLOCK):
        at = (start + kk).to(tl.int64) * mask_strides[2]
        values = tl.where(none | (tl.load(row + at, mask=kk < keys - start, other=0) != 0), 0.0, float("-inf"))
        tl.store(mask_bias + (b * rows + i) * width + start + kk, values, mask=kk < width - start)


@_jit
def forward(
    q, k, v, bias, mask_bias, out, lse,
    q_strides, k_strides, v_strides, bias_strides, out_strides,
    rows: tl.int32, queries: tl.int32, keys: tl.int32, heads: tl.int32, scale, width,
    D: tl.constexpr, PADDED_D: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    SCALED: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    b, i, h, first = _program_coords(heads, BLOCK_J)
    j, kk = tl.arange(0, BLOCK_J), tl.arange(0, BLOCK_K)
    left = (queries - first).to(tl.int32)
    q_tile = _load(_row(q, q_strides, b, i, h, first), q_strides[3], left, D, PADDED_D, BLOCK_J)
    k_rows, v_rows = _row(k, k_strides, b, i, h, 0), _row(v, v_strides, b, i, h, 0)
    bias_rows = bias + b * bias_strides[0] + h * bias_strides[1] + first * bias_strides[2]
    bias_at = tl.minimum(j, left - 1)[:, None] * bias_strides[2] + kk[None, :]
    mask_bias_row = mask_bias + (b * rows + i) * width

    unit = 1.0 if SCALED else LOG2E
    # The largest score so far, in units of log2. It stays finite even if all of a block of keys is masked.
    top = tl.full((BLOCK_J,), -1e30, tl.float32)
    total = tl.zeros((BLOCK_J,), tl.float32)
    sums = tl.zeros((BLOCK_J, PADDED_D), tl.float32)
    for start in tl.range(0, keys, BLOCK_K, num_stages=STAGES):
        k_tile = _load(k_rows, k_strides[3], keys - start, D, PADDED_D, BLOCK_K)
        mask_bias_k = None
        if MASKED:
            mask_bias_k, _ = _pair(mask_bias_row, 0, BLOCK_K, STAGES)
            mask_bias_row += BLOCK_K
        s = _scores(q_tile, k_tile, tl.load(bias_rows + bias_at), mask_bias_k, scale, SCALED, PRECISION)
        new_top = tl.maximum(top, tl.max(s, 1) * unit)
        p = tl.exp2(s * unit - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(p, 1)
        v_tile = _load(v_rows, v_strides[3], keys - start, D, PADDED_D, BLOCK_K)
        sums = tl.dot(p.to(v_tile.dtype), v_tile, sums * shrink[:, None], input_precision=PRECISION)
        top = new_top
        k_rows += BLOCK_K * k_strides[3]
        v_rows += BLOCK_K * v_strides[3]
        bias_rows += BLOCK_K

    out_rows = _row(out, out_strides, b, i, h, first)
    _store(out_rows, out_strides[3], left, sums / total[:, None], D, PADDED_D, BLOCK_J)
    lse_row = lse + ((b * rows + i) * heads + h) * queries + first
    tl.store(lse_row + j, (top + tl.log2(total)) / LOG2E, mask=j < left)

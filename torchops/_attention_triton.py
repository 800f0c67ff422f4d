# Kernels have no types, and their constants are in capitals as everywhere in Triton.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803
"""Triangle attention on a GPU: kernels in Triton, compiled once for all N.

The scores ``s[i, h, j, k] = scale * q[i, h, j] . k[i, h, k] + bias[h, j, k]`` never leave the registers. A program
holds a tile of them, of one head and one row i (for the gradient of the bias: of one row i after the other), and takes
the exponentials in float32, as powers of 2. The backward pass computes the tiles again, with the logarithms of the sums
that the forward pass has kept: three times, because the sums over k (dq), over j (dk and dv) and over i (the bias) want
different loops. Each of them has a fixed order, which depends on shapes and the GPU: there are no atomics, and
gradients have the same bits in every run.

The bias is read in the layout ``(h, j, k)``, in aligned rows that end at a multiple of `_PADDING`, with -inf beyond N:
so loads are as wide for odd N as for even ones, and there is no tail of keys to mask. Any other bias is copied, which
takes 1 / d of the bytes of q. At N = 768 on an H100 the copy of a bias with heads last did not show in the time of the
forward pass (1461 us, and 1463 without it; bfloat16, 4 heads of 32).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchops._triton_launch import Launch, noting

__all__ = [
    *("MAX_HEAD_DIM", "added_by", "attend", "attend_backward", "backward", "forward", "new_dbias", "of_keys"),
    *("on", "padded_bias", "padded_width", "processors", "sum_of_dbias"),
]

MAX_HEAD_DIM = 128

_PADDING = 128  # every BLOCK_K divides it
_PARTIAL_BYTES = 48 << 20  # what parts of the gradient of the bias may take

_jit = triton.jit(do_not_specialize=["rows", "n", "heads", "share"])  # one compilation for all N
LOG2E = tl.constexpr(1.4426950408889634)


# --- kernels ---------------------------------------------------------------------------------------------------------
#
# Strides are tuples (batch, i, h, j), those of the bias (batch, h, j). Offsets within a tile fit 32 bits, those of its
# first element may not.


@triton.jit
def _there(left, D: tl.constexpr, PADDED_D: tl.constexpr, BLOCK: tl.constexpr):
    r, d = tl.arange(0, BLOCK), tl.arange(0, PADDED_D)
    there = (r < left)[:, None]
    if PADDED_D != D:
        there = there & (d < D)[None, :]
    return there


@triton.jit
def _load(rows, stride, left, D: tl.constexpr, PADDED_D: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK rows of D numbers, of which the first `left` are there, and zeros beyond."""
    r, d = tl.arange(0, BLOCK), tl.arange(0, PADDED_D)
    at = rows + (r[:, None] * stride + d[None, :])
    return tl.load(at, mask=_there(left, D, PADDED_D, BLOCK), other=0.0)


@triton.jit
def _store(rows, stride, left, values, D: tl.constexpr, PADDED_D: tl.constexpr, BLOCK: tl.constexpr):
    r, d = tl.arange(0, BLOCK), tl.arange(0, PADDED_D)
    at = rows + (r[:, None] * stride + d[None, :])
    tl.store(at, values.to(rows.dtype.element_ty), mask=_there(left, D, PADDED_D, BLOCK))


@triton.jit
def _row(pointer, strides, b, i, h, j):
    return pointer + b * strides[0] + i * strides[1] + h * strides[2] + j * strides[3]


@triton.jit
def _where(heads, BLOCK: tl.constexpr):
    """Batch, row and head of a program of the grid (blocks, rows, batch * heads), and where its block starts."""
    bh = tl.program_id(2)
    i = tl.program_id(1).to(tl.int64)
    return (bh // heads).to(tl.int64), i, (bh % heads).to(tl.int64), tl.program_id(0).to(tl.int64) * BLOCK


@_jit
def _add_of_mask(mask, added, mask_strides, rows: tl.int32, n: tl.int32, width, BLOCK: tl.constexpr):
    """What a mask, of strides (batch, i, k), adds to the scores of each row: -inf at keys that are not kept, unless
    none is. In float32 and rows of `width`, so that the forward pass and dq read it ahead, as they do the other
    operands: that takes 4 bytes at once, and bytes would be waited for."""
    i, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row = mask + b * mask_strides[0] + i * mask_strides[1]
    kk = tl.arange(0, BLOCK)
    kept = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, n, BLOCK):
        at = (start + kk).to(tl.int64) * mask_strides[2]
        kept |= (tl.load(row + at, mask=kk < n - start, other=0) != 0).to(tl.int32)
    none = tl.max(kept, 0) == 0
    for start in range(0, width, BLOCK):
        at = (start + kk).to(tl.int64) * mask_strides[2]
        values = tl.where(none | (tl.load(row + at, mask=kk < n - start, other=0) != 0), 0.0, float("-inf"))
        tl.store(added + (b * rows + i) * width + start + kk, values, mask=kk < width - start)


@_jit
def _forward(
    q, k, v, bias, added, out, lse,
    q_strides, k_strides, v_strides, bias_strides, out_strides,
    rows: tl.int32, n: tl.int32, heads: tl.int32, scale, width,
    D: tl.constexpr, PADDED_D: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_J: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    b, i, h, first = _where(heads, BLOCK_J)
    j, kk = tl.arange(0, BLOCK_J), tl.arange(0, BLOCK_K)
    left = (n - first).to(tl.int32)
    q_tile = _load(_row(q, q_strides, b, i, h, first), q_strides[3], left, D, PADDED_D, BLOCK_J)
    k_rows, v_rows = _row(k, k_strides, b, i, h, 0), _row(v, v_strides, b, i, h, 0)
    bias_rows = bias + b * bias_strides[0] + h * bias_strides[1] + first * bias_strides[2]
    bias_at = tl.minimum(j, left - 1)[:, None] * bias_strides[2] + kk[None, :]
    added_row = added + (b * rows + i) * width

    # The greatest score so far in units of log2, finite also where all of a block of keys is masked.
    top = tl.full((BLOCK_J,), -1e30, tl.float32)
    total = tl.zeros((BLOCK_J,), tl.float32)
    sums = tl.zeros((BLOCK_J, PADDED_D), tl.float32)
    for start in range(0, n, BLOCK_K):
        k_tile = _load(k_rows, k_strides[3], n - start, D, PADDED_D, BLOCK_K)
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        s = s * scale + tl.load(bias_rows + bias_at).to(tl.float32)
        if MASKED:
            s += tl.load(added_row + kk)[None, :]
            added_row += BLOCK_K
        new_top = tl.maximum(top, tl.max(s, 1) * LOG2E)
        p = tl.exp2(s * LOG2E - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(p, 1)
        v_tile = _load(v_rows, v_strides[3], n - start, D, PADDED_D, BLOCK_K)
        sums = tl.dot(p.to(v_tile.dtype), v_tile, sums * shrink[:, None], input_precision=PRECISION)
        top = new_top
        k_rows += BLOCK_K * k_strides[3]
        v_rows += BLOCK_K * v_strides[3]
        bias_rows += BLOCK_K

    out_rows = _row(out, out_strides, b, i, h, first)
    _store(out_rows, out_strides[3], left, sums / total[:, None], D, PADDED_D, BLOCK_J)
    lse_row = lse + ((b * rows + i) * heads + h) * n + first
    tl.store(lse_row + j, (top + tl.log2(total)) / LOG2E, mask=j < left)


@_jit
def _prepare(
    grad, out, lse, log_sums, delta, grad_strides, out_strides,
    rows: tl.int32, n: tl.int32, heads: tl.int32, width,
    D: tl.constexpr, PADDED_D: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """For each edge and head the logarithm to base 2 of its sum, inf beyond n, and the sum over keys of p * dp, which
    is that over features of grad * out, 0 beyond n; both in rows of `width` numbers."""
    b, i, h, first = _where(heads, BLOCK_J)
    j, left = tl.arange(0, BLOCK_J), (n - first).to(tl.int32)
    g = _load(_row(grad, grad_strides, b, i, h, first), grad_strides[3], left, D, PADDED_D, BLOCK_J)
    o = _load(_row(out, out_strides, b, i, h, first), out_strides[3], left, D, PADDED_D, BLOCK_J)
    row = (b * rows + i) * heads + h
    lse_j = tl.load(lse + row * n + first + j, mask=j < left, other=float("inf"))
    tl.store(log_sums + row * width + first + j, lse_j * LOG2E)
    tl.store(delta + row * width + first + j, tl.sum(g.to(tl.float32) * o.to(tl.float32), 1))


@_jit
def _backward_q(
    grad, q, k, v, bias, added, log_sums, delta, dq,
    grad_strides, q_strides, k_strides, v_strides, bias_strides, dq_strides,
    rows: tl.int32, n: tl.int32, heads: tl.int32, scale, width,
    D: tl.constexpr, PADDED_D: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_J: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """dq = scale * ds k, with ds = p * (grad v^T - delta)."""
    b, i, h, first = _where(heads, BLOCK_J)
    j, kk = tl.arange(0, BLOCK_J), tl.arange(0, BLOCK_K)
    left = (n - first).to(tl.int32)
    q_tile = _load(_row(q, q_strides, b, i, h, first), q_strides[3], left, D, PADDED_D, BLOCK_J)
    g_tile = _load(_row(grad, grad_strides, b, i, h, first), grad_strides[3], left, D, PADDED_D, BLOCK_J)
    numbers = ((b * rows + i) * heads + h) * width + first
    log_sums_j, delta_j = tl.load(log_sums + numbers + j), tl.load(delta + numbers + j)
    k_rows, v_rows = _row(k, k_strides, b, i, h, 0), _row(v, v_strides, b, i, h, 0)
    bias_rows = bias + b * bias_strides[0] + h * bias_strides[1] + first * bias_strides[2]
    bias_at = tl.minimum(j, left - 1)[:, None] * bias_strides[2] + kk[None, :]
    added_row = added + (b * rows + i) * width

    sums = tl.zeros((BLOCK_J, PADDED_D), tl.float32)
    for start in range(0, n, BLOCK_K):
        k_tile = _load(k_rows, k_strides[3], n - start, D, PADDED_D, BLOCK_K)
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        s = s * scale + tl.load(bias_rows + bias_at).to(tl.float32)
        if MASKED:
            s += tl.load(added_row + kk)[None, :]
            added_row += BLOCK_K
        p = tl.exp2(s * LOG2E - log_sums_j[:, None])
        v_tile = _load(v_rows, v_strides[3], n - start, D, PADDED_D, BLOCK_K)
        dp = tl.dot(g_tile, tl.trans(v_tile), input_precision=PRECISION)
        ds = p * (dp - delta_j[:, None])
        sums = tl.dot(ds.to(k_tile.dtype), k_tile, sums, input_precision=PRECISION)
        k_rows += BLOCK_K * k_strides[3]
        v_rows += BLOCK_K * v_strides[3]
        bias_rows += BLOCK_K

    _store(_row(dq, dq_strides, b, i, h, first), dq_strides[3], left, sums * scale, D, PADDED_D, BLOCK_J)


@_jit
def _backward_kv(
    grad, q, k, v, bias, added, log_sums, delta, dk, dv,
    grad_strides, q_strides, k_strides, v_strides, bias_strides, dk_strides, dv_strides,
    rows: tl.int32, n: tl.int32, heads: tl.int32, scale, width,
    D: tl.constexpr, PADDED_D: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    WANT_K: tl.constexpr, WANT_V: tl.constexpr,
    BLOCK_J: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """dk = scale * ds^T q, dv = p^T grad; tiles are transposed, so that p and ds are left factors as they stand. So is
    the bias, (batch, h, k, j): a thread reads two of its numbers at once."""
    b, i, h, first = _where(heads, BLOCK_K)
    j, kk = tl.arange(0, BLOCK_J), tl.arange(0, BLOCK_K)
    left = (n - first).to(tl.int32)
    k_tile = _load(_row(k, k_strides, b, i, h, first), k_strides[3], left, D, PADDED_D, BLOCK_K)
    v_tile = _load(_row(v, v_strides, b, i, h, first), v_strides[3], left, D, PADDED_D, BLOCK_K)
    q_rows, g_rows = _row(q, q_strides, b, i, h, 0), _row(grad, grad_strides, b, i, h, 0)
    bias_rows = bias + b * bias_strides[0] + h * bias_strides[1] + first * bias_strides[2]
    bias_at = tl.minimum(kk, left - 1)[:, None] * bias_strides[2] + j[None, :]
    numbers = ((b * rows + i) * heads + h) * width
    if MASKED:
        added_k = tl.load(added + (b * rows + i) * width + first + kk)

    k_sums = tl.zeros((BLOCK_K, PADDED_D), tl.float32)
    v_sums = tl.zeros((BLOCK_K, PADDED_D), tl.float32)
    for start in range(0, n, BLOCK_J):
        q_tile = _load(q_rows, q_strides[3], n - start, D, PADDED_D, BLOCK_J)
        g_tile = _load(g_rows, grad_strides[3], n - start, D, PADDED_D, BLOCK_J)
        log_sums_j = tl.load(log_sums + numbers + j)
        s = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
        s = s * scale + tl.load(bias_rows + bias_at).to(tl.float32)
        if MASKED:
            s += added_k[:, None]
        p = tl.exp2(s * LOG2E - log_sums_j[None, :])
        if WANT_V:
            v_sums = tl.dot(p.to(g_tile.dtype), g_tile, v_sums, input_precision=PRECISION)
        if WANT_K:
            delta_j = tl.load(delta + numbers + j)
            dp = tl.dot(v_tile, tl.trans(g_tile), input_precision=PRECISION)
            ds = p * (dp - delta_j[None, :])
            k_sums = tl.dot(ds.to(q_tile.dtype), q_tile, k_sums, input_precision=PRECISION)
        q_rows += BLOCK_J * q_strides[3]
        g_rows += BLOCK_J * grad_strides[3]
        bias_rows += BLOCK_J
        numbers += BLOCK_J

    if WANT_K:
        _store(_row(dk, dk_strides, b, i, h, first), dk_strides[3], left, k_sums * scale, D, PADDED_D, BLOCK_K)
    if WANT_V:
        _store(_row(dv, dv_strides, b, i, h, first), dv_strides[3], left, v_sums, D, PADDED_D, BLOCK_K)


@_jit
def _backward_bias(
    grad, q, k, v, bias, added, log_sums, delta, dbias,
    grad_strides, q_strides, k_strides, v_strides, bias_strides,
    rows: tl.int32, n: tl.int32, heads: tl.int32, scale, width, share: tl.int32,
    D: tl.constexpr, PADDED_D: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr, ADDS: tl.constexpr,
    BLOCK_J: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The sum of ds over `share` rows i, in dbias (parts, batch, heads, n, n), or added to what is there.

    The grid is (tiles, parts, batch * heads).
    """
    part, bh = tl.program_id(1), tl.program_id(2)
    blocks_k = tl.cdiv(n, BLOCK_K)
    b, h = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)
    first_j = (tl.program_id(0) // blocks_k).to(tl.int64) * BLOCK_J
    first_k = (tl.program_id(0) % blocks_k).to(tl.int64) * BLOCK_K
    j, kk = tl.arange(0, BLOCK_J), tl.arange(0, BLOCK_K)
    left_j, left_k = (n - first_j).to(tl.int32), (n - first_k).to(tl.int32)

    bias_rows = bias + b * bias_strides[0] + h * bias_strides[1] + first_j * bias_strides[2] + first_k
    bias_tile = tl.load(bias_rows + (tl.minimum(j, left_j - 1)[:, None] * bias_strides[2] + kk[None, :]))
    bias_tile = bias_tile.to(tl.float32)
    i = part.to(tl.int64) * share
    q_rows, g_rows = _row(q, q_strides, b, i, h, first_j), _row(grad, grad_strides, b, i, h, first_j)
    k_rows, v_rows = _row(k, k_strides, b, i, h, first_k), _row(v, v_strides, b, i, h, first_k)
    added_row = added + (b * rows + i) * width + first_k
    numbers = ((b * rows + i) * heads + h) * width + first_j

    sums = tl.zeros((BLOCK_J, BLOCK_K), tl.float32)
    for _ in range(0, tl.minimum(share, rows - part * share)):
        q_tile = _load(q_rows, q_strides[3], left_j, D, PADDED_D, BLOCK_J)
        k_tile = _load(k_rows, k_strides[3], left_k, D, PADDED_D, BLOCK_K)
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * scale + bias_tile
        if MASKED:
            s += tl.load(added_row + kk)[None, :]
            added_row += width
        log_sums_j, delta_j = tl.load(log_sums + numbers + j), tl.load(delta + numbers + j)
        p = tl.exp2(s * LOG2E - log_sums_j[:, None])
        g_tile = _load(g_rows, grad_strides[3], left_j, D, PADDED_D, BLOCK_J)
        v_tile = _load(v_rows, v_strides[3], left_k, D, PADDED_D, BLOCK_K)
        dp = tl.dot(g_tile, tl.trans(v_tile), input_precision=PRECISION)
        sums += p * (dp - delta_j[:, None])
        q_rows += q_strides[1]
        g_rows += grad_strides[1]
        k_rows += k_strides[1]
        v_rows += v_strides[1]
        numbers += heads * width

    batch_heads = tl.num_programs(2).to(tl.int64)
    at = ((part * batch_heads + bh) * n + first_j) * n + first_k
    there = (j < left_j)[:, None] & (kk < left_k)[None, :]
    at = dbias + at + (j[:, None] * n + kk[None, :])
    if ADDS:
        sums += tl.load(at, mask=there, other=0.0)
    tl.store(at, sums.to(dbias.dtype.element_ty), mask=there)


@_jit
def _transpose(
    bias, made, bias_strides, made_strides, n: tl.int32, heads: tl.int32, BLOCK: tl.constexpr
):  # fmt: skip
    """made[k, j] = bias[j, k], and -inf for j beyond n. The grid is (blocks of j, blocks of k, batch * heads)."""
    b, h = (tl.program_id(2) // heads).to(tl.int64), (tl.program_id(2) % heads).to(tl.int64)
    first_j, first_k = tl.program_id(0).to(tl.int64) * BLOCK, tl.program_id(1).to(tl.int64) * BLOCK
    r = tl.arange(0, BLOCK)
    j, k = tl.minimum(first_j + r, n - 1), tl.minimum(first_k + r, n - 1)
    rows = bias + b * bias_strides[0] + h * bias_strides[1]
    tile = tl.trans(tl.load(rows + (j[:, None] * bias_strides[2] + k[None, :])))
    tile = tl.where((first_j + r < n)[None, :], tile, float("-inf"))
    rows = made + b * made_strides[0] + h * made_strides[1]
    at = (first_k + r)[:, None] * made_strides[2] + (first_j + r)[None, :]
    tl.store(rows + at, tile.to(made.dtype.element_ty), mask=(first_k + r < n)[:, None])


@triton.jit(do_not_specialize=["parts"])
def _sum_parts(dbias, parts: tl.int32, size, BLOCK: tl.constexpr):
    """The sum of `parts` in the place of the first; the grid is (blocks, 1, 1)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < size
    sums = tl.load(dbias + at, mask=there, other=0.0)
    for part in range(1, parts):
        sums += tl.load(dbias + part * size.to(tl.int64) + at, mask=there, other=0.0)
    tl.store(dbias + at, sums, mask=there)


# --- launches --------------------------------------------------------------------------------------------------------


class _Launch(NamedTuple):
    """Tile of queries by keys, and how Triton compiles its loop."""

    block_j: int
    block_k: int
    warps: int
    stages: int
    registers: int | None = None
    """Of a thread, at most: with fewer, a processor holds more programs."""

    def arguments(self) -> dict[str, int]:
        made = {
            "BLOCK_J": self.block_j,
            "BLOCK_K": self.block_k,
            "num_warps": self.warps,
            "num_stages": self.stages,
            "enable_fp_fusion": True,  # by default from some versions on, it is not
        }
        return made if self.registers is None else made | {"maxnreg": self.registers}


# By kernel, and the padded head dimension up to which a row counts. Those of 32 are the best of sweeps on an H100 (4
# heads, N = 768, bfloat16): 1211 us forward, 1268 and 1465 for q and bias, with 142 of _prepare in both; and, in the 2
# panels of the update's gradient, 1649 for kv, or 1740 with the 154 registers that it takes where none are said: then a
# processor holds 3 programs, not 4. Others were not swept.
_LAUNCHES = {
    "forward": {32: _Launch(64, 64, 4, 3), 64: _Launch(64, 64, 4, 2), 128: _Launch(128, 64, 8, 2)},
    "q": {32: _Launch(64, 64, 4, 3), 64: _Launch(64, 64, 4, 2), 128: _Launch(64, 64, 4, 2)},
    "kv": {32: _Launch(64, 64, 4, 3, 128), 64: _Launch(64, 64, 4, 2), 128: _Launch(64, 64, 8, 2)},
    "bias": {32: _Launch(64, 32, 4, 3), 64: _Launch(64, 64, 4, 2), 128: _Launch(64, 64, 8, 2)},
}


@cache
def _launch(kernel: str, d: int, dtype: torch.dtype) -> _Launch:
    if dtype == torch.float32:  # tiles of twice the bytes, and tf32 takes more registers
        return _Launch(32, 32, 4, 2)
    return next(launch for up_to, launch in _LAUNCHES[kernel].items() if _padded(d) <= up_to)


_KERNELS = {"forward": _forward, "q": _backward_q, "kv": _backward_kv, "bias": _backward_bias}


@cache
def _launcher(kernel: str, d: int, dtype: torch.dtype, masked: bool, tf32: bool, **constants: bool) -> Launch:
    """A kernel with its constants, which don't depend on N."""
    precision = "tf32" if tf32 or dtype != torch.float32 else "tf32x3"  # three products have the accuracy of float32
    options = {"D": d, "PADDED_D": _padded(d), "MASKED": masked, "PRECISION": precision}
    return Launch(_KERNELS[kernel], **options, **constants, **_launch(kernel, d, dtype).arguments())


@cache
def _prepare_launcher(d: int) -> Launch:
    return Launch(_prepare, D=d, PADDED_D=_padded(d), BLOCK_J=64)


_mask_launcher = Launch(_add_of_mask, BLOCK=512)
_transpose_launcher = Launch(_transpose, BLOCK=64)
_parts_launcher = Launch(_sum_parts, BLOCK=1024)


def _padded(d: int) -> int:
    return max(16, 1 << (d - 1).bit_length())


def _blocks(n: int, size: int) -> int:
    return -(-n // size)


def _readable(t: Tensor) -> Tensor:
    """Rows of the features must be contiguous. All other strides are read as they are."""
    return t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


def _laid_out_like(made: Tensor | None, t: Tensor) -> Tensor | None:
    """`made` for ``_readable(t)``, in the strides that ``torch.empty_like(t)`` has, as the fake kernels promise."""
    return made if made is None or _readable(t) is t else torch.empty_like(t).copy_(made)


def padded_bias(bias: Tensor) -> Tensor:
    """The bias as (batch, heads, n, n), in rows that end at a multiple of `_PADDING`, which hold -inf beyond n."""
    bias = bias.squeeze(1)
    n = bias.shape[-1]
    aligned = bias.stride(-1) == 1 and all(s % 16 == 0 for s in bias.stride()[:-1]) and bias.data_ptr() % 16 == 0
    if n % _PADDING == 0 and aligned:
        return bias
    padded = bias.new_empty(*bias.shape[:-1], padded_width(n))
    padded[..., n:].fill_(float("-inf"))
    padded[..., :n].copy_(bias)
    return padded


def of_keys(bias: Tensor) -> Tensor:
    """Of a bias as `padded_bias` makes it, (batch, heads, k, j) in rows like its own."""
    n = bias.shape[-2]
    batch, heads, _, width = *bias.shape[:3], padded_width(n)
    made = bias.new_empty((batch, heads, n, width))
    grid = width // 64, _blocks(n, 64), batch * heads
    _transpose_launcher(grid, bias, made, bias.stride()[:3], made.stride()[:3], n, heads)
    return made


def padded_width(n: int) -> int:
    return _blocks(n, _PADDING) * _PADDING


def _strides(t: Tensor) -> tuple[int, ...]:
    return t.stride()[:4]


def added_by(mask: Tensor, width: int) -> Tensor:
    """What a mask, (batch, rows, n) and of any dtype, adds to scores, (batch, rows, width) in float32."""
    batch, rows, n = mask.shape
    added = mask.new_empty((batch, rows, width), dtype=torch.float32)
    mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    _mask_launcher((rows, batch, 1), mask, added, mask.stride(), rows, n, width)
    return added


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Launches go to the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """The result, of strides like q's, and the logarithms of sums, (batch, rows, heads, n)."""
    batch, rows, heads, n, _ = q.shape
    given_q = q
    q, k, v = _readable(q), _readable(k), _readable(v)
    out = torch.empty_like(q)
    lse = q.new_empty((batch, rows, heads, n), dtype=torch.float32)
    bias = padded_bias(bias)
    with on(q.device):
        attend(q, k, v, bias, _added(mask, bias), scale, out, lse)
    return cast(Tensor, _laid_out_like(out, given_q)), lse


def attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, added: Tensor | None, scale: float, out: Tensor, lse: Tensor
) -> None:
    """The forward pass with everything prepared: a bias as `padded_bias` makes it, a mask as `added_by` does, features
    that are contiguous, and the device of the tensors the current one."""
    batch, rows, heads, n, d = q.shape
    launch = _launcher("forward", d, q.dtype, added is not None, torch.backends.cuda.matmul.allow_tf32)
    launch(
        (_blocks(n, launch.options["BLOCK_J"]), rows, batch * heads),
        q, k, v, bias, lse if added is None else added, out, lse,
        _strides(q), _strides(k), _strides(v), bias.stride()[:3], _strides(out),
        rows, n, heads, scale, bias.shape[-1],
    )  # fmt: skip


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    wanted: tuple[bool, bool, bool, bool],
) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v and bias that are wanted; the first three of strides like theirs."""
    given = q, k, v
    grad, q, k, v, out = map(_readable, (grad, q, k, v, out))
    padded = padded_bias(bias)
    # Like what is read: gradients are written in rows, too.
    dq, dk, dv = (torch.empty_like(t) if want else None for t, want in zip((q, k, v), wanted[:3], strict=True))
    with on(q.device):
        dbias = new_dbias(grad, padded) if wanted[3] else None
        attend_backward(grad, q, k, v, padded, _added(mask, padded), out, lse, scale, (dq, dk, dv), dbias)
        # Not a part of a larger one.
        made = None if dbias is None else sum_of_dbias(dbias).to(bias.dtype, copy=len(dbias) > 1).unsqueeze(1)
    dq, dk, dv = map(_laid_out_like, (dq, dk, dv), given)
    return dq, dk, dv, made


def _added(mask: Tensor | None, bias: Tensor) -> Tensor | None:
    return None if mask is None else added_by(mask[:, :, 0, 0], bias.shape[-1])


def attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    added: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    into: tuple[Tensor | None, Tensor | None, Tensor | None],
    dbias: Tensor | None,
    adds: bool = False,
    bias_of_keys: Tensor | None = None,
    numbers: Tensor | None = None,
) -> None:
    """The backward pass with everything prepared, as for `attend`: gradients of q, k and v go to `into`, where there is
    a tensor; that of the bias to `dbias`, as `new_dbias` makes it, or is added to it. `bias_of_keys` is
    ``of_keys(bias)``; `numbers`, of two rows in float32, may be lost.

    The last kernel makes the gradients of k and v, each tile from its own part of these: they may take their place.
    """
    batch, rows, heads, n, d = q.shape
    width = bias.shape[-1]
    if numbers is None:
        numbers = q.new_empty((2, batch * rows * heads * width), dtype=torch.float32)
    log_sums, delta = numbers.unbind()
    strides = *map(_strides, (grad, q, k, v)), bias.stride()[:3]
    sizes = rows, n, heads, scale, width
    how = d, q.dtype, added is not None, torch.backends.cuda.matmul.allow_tf32
    inputs = grad, q, k, v, bias, lse if added is None else added, log_sums, delta
    prepare = _prepare_launcher(d)
    prepare(
        (width // prepare.options["BLOCK_J"], rows, batch * heads),
        grad, out, lse, log_sums, delta, strides[0], _strides(out), rows, n, heads, width,
    )  # fmt: skip
    if dbias is not None:
        grid = _tiles(_launch("bias", d, q.dtype), n), len(dbias), batch * heads
        _launcher("bias", *how, ADDS=adds)(grid, *inputs, dbias, *strides, *sizes, _blocks(rows, len(dbias)))
    dq, dk, dv = into
    if dq is not None:
        launch = _launcher("q", *how)
        launch(
            (_blocks(n, launch.options["BLOCK_J"]), rows, batch * heads), *inputs, dq, *strides, _strides(dq), *sizes
        )
    if dk is not None or dv is not None:
        launch = _launcher("kv", *how, WANT_K=dk is not None, WANT_V=dv is not None)
        either = k if dk is None else dk, v if dv is None else dv
        bias_of_keys = of_keys(bias) if bias_of_keys is None else bias_of_keys
        launch(
            (_blocks(n, launch.options["BLOCK_K"]), rows, batch * heads),
            grad, q, k, v, bias_of_keys, *inputs[5:], *either, *strides[:4], bias_of_keys.stride()[:3],
            *map(_strides, either), *sizes,
        )  # fmt: skip


def new_dbias(q: Tensor, bias: Tensor, wide: bool = False) -> Tensor:
    """For the gradient of a bias as `padded_bias` makes it: sums over shares of the rows of q, or of a tensor like it,
    (parts, batch, heads, n, n), so that programs are many for the processors. Float32 where there are several, or
    something is to be added."""
    batch, rows, heads, n, d = q.shape
    programs, nbytes = _tiles(_launch("bias", d, q.dtype), n) * batch * heads, 4 * batch * heads * n * n
    parts = max(1, min(_blocks(16 * processors(q.device), programs), _PARTIAL_BYTES // nbytes, rows))
    parts = _blocks(rows, _blocks(rows, parts))
    return q.new_empty((parts, batch, heads, n, n), dtype=torch.float32 if wide or parts > 1 else bias.dtype)


def sum_of_dbias(dbias: Tensor) -> Tensor:
    """(batch, heads, n, n), in the memory of the first part."""
    if len(dbias) > 1:
        size = dbias[0].numel()
        _parts_launcher((_blocks(size, 1024), 1, 1), dbias, len(dbias), size)
    return dbias[0]


def _tiles(launch: _Launch, n: int) -> int:
    return _blocks(n, launch.block_j) * _blocks(n, launch.block_k)


def processors(device: torch.device) -> int:
    """Of a device; of that for which launches are noted, where there is no device."""
    return _processors(noting.device if device.type == "meta" and noting.device else device)


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4

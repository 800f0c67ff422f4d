# Kernels have no types, and their constants are in capitals as everywhere in Triton.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803
"""The steps of `_attention_update_panels.py` on a GPU, where a step of several operators would pass memory several
times: the layer norm of a part of x, of any strides and also from float32 to 16 bits; the bias, from x to the layout
(h, j, k); and the end, which gates the attention's result, multiplies, and adds to x, all in one pass.

One compilation serves all N.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchops import _attention_triton as attention
from torchops import _attention_update_panels as panels
from torchops._attention_update_panels import Weights

__all__ = ["add", "attend", "attend_backward", "norm", "prepared_mask", "triangle_bias"]

_MAX_NORM = 4096  # features of which a program holds a row
_MAX_PRODUCT = 128  # features of which it holds both weights of the end

_jit = triton.jit(do_not_specialize=["inner"])  # one compilation for all N


# --- kernels ---------------------------------------------------------------------------------------------------------
#
# Positions are (batch, outer, inner), tensors have a stride for each of these, and features are contiguous. The grid is
# (outer, blocks of inner, batch). Offsets within a block may not fit 32 bits, because inner positions may be rows.


@triton.jit
def _first(pointer, strides, BLOCK: tl.constexpr):
    b, i, j = tl.program_id(2).to(tl.int64), tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64) * BLOCK
    return pointer + b * strides[0] + i * strides[1] + j * strides[2]


@triton.jit
def _tile(first, strides, BLOCK: tl.constexpr, PADDED: tl.constexpr):
    r, d = tl.arange(0, BLOCK).to(tl.int64), tl.arange(0, PADDED)
    return first + (r[:, None] * strides[2] + d[None, :])


@triton.jit
def _inside(left, SIZE: tl.constexpr, BLOCK: tl.constexpr, PADDED: tl.constexpr):
    inside = (tl.arange(0, BLOCK) < left)[:, None]
    if PADDED != SIZE:
        inside = inside & (tl.arange(0, PADDED) < SIZE)[None, :]
    return inside


@triton.jit
def _vector(pointer, default, SIZE: tl.constexpr, PADDED: tl.constexpr):
    d = tl.arange(0, PADDED)
    return tl.load(pointer + d, mask=d < SIZE, other=default).to(tl.float32)


@triton.jit
def _normalised(
    x, weight, bias, strides, left, eps,
    C: tl.constexpr, PADDED: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """z of a block, in float32; what lies beyond C is 0."""
    inside = _inside(left, C, BLOCK, PADDED)
    at = _tile(_first(x, strides, BLOCK), strides, BLOCK, PADDED)
    values = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(values, 1) / C
    distances = values - mean[:, None]
    if PADDED != C:
        distances = tl.where((tl.arange(0, PADDED) < C)[None, :], distances, 0.0)
    # Not of the squares: no digits cancel.
    variance = tl.sum(distances * distances, 1) / C
    z = distances * (1 / tl.sqrt(variance + eps))[:, None]
    if HAS_WEIGHT:
        z = z * _vector(weight, 0.0, C, PADDED)[None, :]
    if HAS_BIAS:
        z = z + _vector(bias, 0.0, C, PADDED)[None, :]
    return z


@_jit
def _norm(
    x, weight, bias, z, x_strides, z_strides, inner, eps,
    C: tl.constexpr, PADDED: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    left = inner - tl.program_id(1) * BLOCK
    values = _normalised(x, weight, bias, x_strides, left, eps, C, PADDED, HAS_WEIGHT, HAS_BIAS, BLOCK)
    at = _tile(_first(z, z_strides, BLOCK), z_strides, BLOCK, PADDED)
    tl.store(at, values.to(z.dtype.element_ty), mask=_inside(left, C, BLOCK, PADDED))


@_jit
def _bias(
    x, weight, bias, to_heads, made, x_strides, made_strides, head_stride, inner, eps,
    HEADS: tl.constexpr,
    C: tl.constexpr, PADDED: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """made[h, j, k] = sum over features of z[j, k] * to_heads[h]; positions are (j, k)."""
    left = inner - tl.program_id(1) * BLOCK
    z = _normalised(x, weight, bias, x_strides, left, eps, C, PADDED, HAS_WEIGHT, HAS_BIAS, BLOCK)
    z = z.to(made.dtype.element_ty).to(tl.float32)  # as the products of q, k and v read it
    r = tl.arange(0, BLOCK)
    at = _first(made, made_strides, BLOCK) + r * made_strides[2]
    for h in tl.static_range(HEADS):
        values = tl.sum(z * _vector(to_heads + h * C, 0.0, C, PADDED)[None, :], 1)
        tl.store(at + h * head_stride, values.to(made.dtype.element_ty), mask=r < left)


@triton.jit
def _matrix(pointer, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PADDED_R: tl.constexpr, PADDED_C: tl.constexpr):
    """A weight, transposed."""
    r, d = tl.arange(0, PADDED_R), tl.arange(0, PADDED_C)
    inside = (r < ROWS)[:, None] & (d < COLUMNS)[None, :]
    return tl.trans(tl.load(pointer + (r[:, None] * COLUMNS + d[None, :]), mask=inside, other=0.0))


@_jit
def _end(
    o, z, gate, gate_bias, out, out_bias, target, o_strides, z_strides, target_strides, inner,
    C: tl.constexpr, PADDED_C: tl.constexpr, WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr,
    HAS_GATE_BIAS: tl.constexpr, HAS_OUT_BIAS: tl.constexpr, ADDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """target (+)= (o * sigmoid(z @ gate.T + gate_bias)) @ out.T + out_bias."""
    left = inner - tl.program_id(1) * BLOCK
    inside = _inside(left, C, BLOCK, PADDED_C)
    z_tile = tl.load(_tile(_first(z, z_strides, BLOCK), z_strides, BLOCK, PADDED_C), mask=inside, other=0.0)
    s = tl.dot(z_tile, _matrix(gate, WIDTH, C, PADDED_WIDTH, PADDED_C))
    if HAS_GATE_BIAS:
        s = s + _vector(gate_bias, 0.0, WIDTH, PADDED_WIDTH)[None, :]
    o_tile = tl.load(
        _tile(_first(o, o_strides, BLOCK), o_strides, BLOCK, PADDED_WIDTH),
        mask=_inside(left, WIDTH, BLOCK, PADDED_WIDTH), other=0.0,
    )  # fmt: skip
    gated = (o_tile.to(tl.float32) / (1 + tl.exp2(s * -1.4426950408889634))).to(o_tile.dtype)
    y = tl.dot(gated, _matrix(out, C, WIDTH, PADDED_C, PADDED_WIDTH))
    if HAS_OUT_BIAS:
        y = y + _vector(out_bias, 0.0, C, PADDED_C)[None, :]
    at = _tile(_first(target, target_strides, BLOCK), target_strides, BLOCK, PADDED_C)
    if ADDS:
        y = y + tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, y.to(target.dtype.element_ty), mask=inside)


# --- launches --------------------------------------------------------------------------------------------------------

_Shape = tuple[int, int, int]


def _positions(*tensors: Tensor) -> tuple[_Shape, list[_Shape]]:
    """Sizes (batch, outer, inner) of tensors (batch, N, N, features), and the strides of each; what can be is inner."""
    batch, outer, inner = tensors[0].shape[:3]
    strides: list[Any] = [t.stride()[:3] for t in tensors]
    if all(s[1] == inner * s[2] for s in strides):
        outer, inner, strides = 1, outer * inner, [(s[0], 0, s[2]) for s in strides]
    return (batch, outer, inner), strides


def _padded(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())


# The blocks and warps below are the best of a sweep on an H100, of a pair tensor of N = 1024, c = 128 and bfloat16: 219
# us for the norm, 164 for the bias and 504 for the end.


@cache
def _norm_options(c: int, has_weight: bool, has_bias: bool) -> dict[str, Any]:
    padded = _padded(c)
    return {
        "C": c,
        "PADDED": padded,
        "HAS_WEIGHT": has_weight,
        "HAS_BIAS": has_bias,
        "BLOCK": max(1, 8192 // padded),
        "num_warps": 4,
    }


def _grid(shape: _Shape, block: int) -> tuple[int, int, int]:
    batch, outer, inner = shape
    return outer, -(-inner // block), batch


def norm(x: Tensor, w: Weights) -> Tensor:
    c = x.shape[-1]
    if c > _MAX_NORM:
        return panels.norm(x, w)
    z = torch.empty(x.shape, dtype=w.q.dtype, device=x.device)
    shape, strides = _positions(x, z)
    weight, bias = w.norm_weight, w.norm_bias
    options = _norm_options(c, weight is not None, bias is not None)
    _norm[_grid(shape, options["BLOCK"])](x, weight, bias, z, *strides, shape[2], w.eps, **options)
    return z


def triangle_bias(x: Tensor, w: Weights, ending: bool) -> Tensor:
    """In rows that end at a multiple of the kernels' blocks, as these read it."""
    c = x.shape[-1]
    if c > _MAX_NORM:
        return attention.padded_bias(panels.triangle_bias(x, w, ending))
    batch, n = x.shape[:2]
    made = w.q.new_empty((batch, w.heads, n, attention.padded_width(n)))
    if made.shape[-1] > n:
        made[..., n:].fill_(float("-inf"))
    x_strides, made_strides = x.stride()[:3], made.stride()
    if ending:
        x_strides = x_strides[0], x_strides[2], x_strides[1]
    options = _norm_options(c, w.norm_weight is not None, w.norm_bias is not None)
    _bias[_grid((batch, n, n), options["BLOCK"])](
        x, w.norm_weight, w.norm_bias, w.bias_weight, made, x_strides, (made_strides[0], made_strides[2], 1),
        made_strides[1], n, w.eps, HEADS=w.heads, **options,
    )  # fmt: skip
    return made


def prepared_mask(mask: Tensor, bias: Tensor) -> Tensor:
    return attention.added_by(mask[:, :, None, None], bias.shape[-1])


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None,
    scale: float,
    out: Tensor | None = None,
    logsumexp: Tensor | None = None,
) -> Tensor:
    if out is None:
        out = torch.empty_like(q)
    if logsumexp is None:
        logsumexp = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    attention.attend(q, k, v, bias, mask, scale, out, logsumexp)
    return out


def attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    scale: float,
    wanted: tuple[bool, bool, bool, bool],
    into: tuple[Tensor, Tensor, Tensor],
) -> Tensor | None:
    dq, dk, dv = (t if want else None for t, want in zip(into, wanted[:3], strict=True))
    return attention.attend_backward(grad, q, k, v, bias, mask, out, logsumexp, scale, (dq, dk, dv), wanted[3])


@cache
def _end_options(c: int, width: int, has_gate_bias: bool, has_out_bias: bool, adds: bool) -> dict[str, Any]:
    return {
        "C": c,
        "PADDED_C": _padded(c),
        "WIDTH": width,
        "PADDED_WIDTH": _padded(width),
        "HAS_GATE_BIAS": has_gate_bias,
        "HAS_OUT_BIAS": has_out_bias,
        "ADDS": adds,
        "BLOCK": 64,
        "num_warps": 8,
        "num_stages": 1,
    }


def add(target: Tensor, o: Tensor, z: Tensor, w: Weights, adds: bool) -> None:
    c, width = z.shape[-1], o.shape[-1]
    if w.gate is None or o.element_size() > 2 or max(c, width) > _MAX_PRODUCT:
        panels.add(target, o, z, w, adds)
        return
    shape, strides = _positions(o, z, target)
    options = _end_options(c, width, w.gate_bias is not None, w.out_bias is not None, adds)
    _end[_grid(shape, options["BLOCK"])](
        o, z, w.gate, w.gate_bias, w.out, w.out_bias, target, *strides, shape[2], **options
    )

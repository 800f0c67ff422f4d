# Kernels have no types, and their constants are in capitals, as is usual in Triton.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803
"""GPU versions of the steps of `aten.py` that take several operators, and so several passes over
memory: the layer norm of a part of x, with any strides and also from float32 to 16 bits; and the bias, from x to the
layout (h, j, k). For few features, `triton_fused.py` fuses more.

One compilation serves all N.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchops._core.triton.launch import Launch
from torchops._triangle_attention.attention import triton as attention
from torchops._triangle_attention.attention.arguments import Inputs as AttentionInputs
from torchops._triangle_attention.attention.arguments import Saved
from torchops._triangle_attention.update import aten, panels
from torchops._triangle_attention.update.arguments import Weights
from torchops._triangle_attention.update.kernels import _vector, _z

__all__ = ["add", "attend", "attend_backward", "norm", "prepared_mask", "triangle_bias", "whole_bias"]

_MAX_NORM = 4096  # the longest row that a program holds, in features

_jit = triton.jit(do_not_specialize=["inner"])  # one compilation for all N


# --- kernels ---------------------------------------------------------------------------------------------------------
#
# Positions are (batch, outer, inner), and tensors have a stride for each of these. Features are contiguous. The grid is
# (blocks of inner, outer, batch), since only the first of its sizes may exceed 65535, and inner may be N * N. Offsets
# within a block may not fit 32 bits, because inner positions may be rows.


@triton.jit
def _first(pointer, strides, BLOCK: tl.constexpr):
    b, i, j = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64) * BLOCK
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
def _normalised(
    x, weight, bias, strides, left, eps,
    C: tl.constexpr, PADDED: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """z of a block in float32, zero beyond C."""
    at = _tile(_first(x, strides, BLOCK), strides, BLOCK, PADDED)
    values = tl.load(at, mask=_inside(left, C, BLOCK, PADDED), other=0.0)
    return _z(values, weight, bias, eps, C, PADDED, HAS_WEIGHT, HAS_BIAS)


@_jit
def _norm(
    x, weight, bias, z, x_strides, z_strides, inner: tl.int32, eps,
    C: tl.constexpr, PADDED: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    left = inner - tl.program_id(0) * BLOCK
    values = _normalised(x, weight, bias, x_strides, left, eps, C, PADDED, HAS_WEIGHT, HAS_BIAS, BLOCK)
    at = _tile(_first(z, z_strides, BLOCK), z_strides, BLOCK, PADDED)
    tl.store(at, values.to(z.dtype.element_ty), mask=_inside(left, C, BLOCK, PADDED))


@_jit
def _bias(
    x, weight, bias, to_heads, made, x_strides, made_strides, head_stride, inner: tl.int32, width, eps,
    HEADS: tl.constexpr,
    C: tl.constexpr, PADDED: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """made[h, j, k] = sum over features of z[j, k] * to_heads[h], with -inf for k up to width. Positions are (j, k)."""
    left = inner - tl.program_id(0) * BLOCK
    z = _normalised(x, weight, bias, x_strides, left, eps, C, PADDED, HAS_WEIGHT, HAS_BIAS, BLOCK)
    z = z.to(made.dtype.element_ty).to(tl.float32)  # rounded as for the products that give q, k and v
    r = tl.arange(0, BLOCK)
    at = _first(made, made_strides, BLOCK) + r * made_strides[2]
    for h in tl.static_range(HEADS):
        values = tl.sum(z * _vector(to_heads + h * C, C, PADDED)[None, :], 1)
        values = tl.where(r < left, values, float("-inf"))
        tl.store(at + h * head_stride, values.to(made.dtype.element_ty), mask=r < left + width - inner)


# --- launches --------------------------------------------------------------------------------------------------------

_Shape = tuple[int, int, int]


def _positions(*tensors: Tensor) -> tuple[_Shape, list[_Shape]]:
    """Sizes (batch, outer, inner) of tensors (batch, N, N, features), and the strides of each. Merges what it can into
    inner."""
    batch, outer, inner = tensors[0].shape[:3]
    strides: list[Any] = [t.stride()[:3] for t in tensors]
    if all(s[1] == inner * s[2] for s in strides):
        outer, inner, strides = 1, outer * inner, [(s[0], 0, s[2]) for s in strides]
    return (batch, outer, inner), strides


# Blocks and warps are the best of a sweep on an H100, with a pair tensor of N = 1024, c = 128 and bfloat16: 219 us for
# the norm, 164 for the bias.


@cache
def _launcher(kernel: Any, c: int, has_weight: bool, has_bias: bool, **constants: int) -> Launch:
    padded = attention.padded(c)
    constants |= {"C": c, "PADDED": padded, "HAS_WEIGHT": has_weight, "HAS_BIAS": has_bias}
    return Launch(kernel, **constants, BLOCK=max(1, 8192 // padded), num_warps=4)


def _grid(shape: _Shape, launch: Launch) -> tuple[int, int, int]:
    batch, outer, inner = shape
    return -(-inner // launch.options["BLOCK"]), outer, batch


def norm(x: Tensor, w: Weights) -> Tensor:
    c = x.shape[-1]
    if c > _MAX_NORM:
        return aten.norm(x, w)
    z = torch.empty(x.shape, dtype=w.q.dtype, device=x.device)
    shape, strides = _positions(x, z)
    launch = _launcher(_norm, c, w.norm_weight is not None, w.norm_bias is not None)
    launch(_grid(shape, launch), x, w.norm_weight, w.norm_bias, z, *strides, shape[2], w.eps)
    return z


def triangle_bias(x: Tensor, w: Weights, ending: bool) -> Tensor:
    """The bias in rows that end at a multiple of the kernels' blocks, as these expect."""
    c = x.shape[-1]
    if c > _MAX_NORM:
        return whole_bias(aten.triangle_bias(x, w, ending))
    batch, (own, n) = len(x), panels.rows_and_keys(x, ending)
    width = attention.padded_width(n)
    made = w.q.new_empty((batch, w.heads, own, width))
    x_strides, made_strides = x.stride()[:3], made.stride()
    if ending:
        x_strides = x_strides[0], x_strides[2], x_strides[1]
    launch = _launcher(_bias, c, w.norm_weight is not None, w.norm_bias is not None, HEADS=w.heads)
    launch(
        _grid((batch, own, width), launch), x, w.norm_weight, w.norm_bias, w.bias_weight, made,
        x_strides, (made_strides[0], made_strides[2], 1), made_strides[1], n, width, w.eps,
    )  # fmt: skip
    return made


def whole_bias(bias: Tensor) -> Tensor:
    return attention.padded_bias(bias.unsqueeze(1))


def prepared_mask(mask: Tensor, bias: Tensor) -> Tensor:
    return attention.mask_bias_of(mask, bias.shape[-1])


def attend(a: AttentionInputs, saved: Saved | None) -> Tensor:
    if saved is None:
        q = a.q
        saved = Saved(torch.empty_like(q), torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device))
    attention.attend(attention.Prepared(*a), saved)
    return saved.out


def attend_backward(
    grad: Tensor, a: AttentionInputs, saved: Saved, output_mask: Sequence[bool], into: tuple[Tensor, Tensor, Tensor]
) -> Tensor | None:
    dq, dk, dv = (t if want else None for t, want in zip(into, output_mask[:3], strict=True))
    dbias = attention.new_dbias(a.q, a.k.shape[3], a.bias) if output_mask[3] else None
    attention.attend_backward(grad, attention.Prepared(*a), saved, (dq, dk, dv), dbias)
    return None if dbias is None else attention.sum_of_dbias(dbias)


add = aten.add

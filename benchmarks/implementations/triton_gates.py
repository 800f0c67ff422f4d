# Kernels have no types, and their constants are in capitals, as is usual in Triton.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803
"""Mode `triton`: the forward of a gate, and of a gated linear unit, in one kernel each; backward is that of mode `py`.

As in `triton_dense.py`, a program holds the sums of its tile in registers until they are complete. For a gated linear
unit it holds two, which share the tiles of x: a gate costs no memory traffic, and x is read once for both products.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import py_gates
from .triton_dense import BAND, _tile


@triton.jit
def _gated_kernel(
    y_ptr,
    v_ptr,  # the gated tensor, or the weight of the value
    x_ptr,
    w_ptr,
    vb_ptr,
    b_ptr,
    rows,
    n_out,
    n_in,
    TWO: tl.constexpr,  # two products: also that of the value
    SILU: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
):
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(n_out, BLOCK_N)
    tile = tl.program_id(0)
    band = tile // (BAND * tiles_n)
    band_height = min(tiles_m - band * BAND, BAND)
    tile_m = band * BAND + (tile % (BAND * tiles_n)) % band_height
    tile_n = (tile % (BAND * tiles_n)) // band_height

    m = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    of_x = m[:, None] * n_in + k[None, :]
    of_w = n[None, :] * n_in + k[:, None]
    of_y = m[:, None] * n_out + n[None, :]
    inside_y = (m < rows)[:, None] & (n < n_out)[None, :]

    gates = tl.zeros((BLOCK_M, BLOCK_N), ACC)
    values = tl.zeros((BLOCK_M, BLOCK_N), ACC)
    for start in range(0, n_in, BLOCK_K):
        inside = k < n_in - start
        inside_w = (n < n_out)[None, :] & inside[:, None]
        x = tl.load(x_ptr + of_x + start, mask=(m < rows)[:, None] & inside[None, :], other=0.0)
        w = tl.load(w_ptr + of_w + start, mask=inside_w, other=0.0)
        gates = tl.dot(x, w, gates, input_precision=PRECISION, out_dtype=ACC)
        if TWO:
            w = tl.load(v_ptr + of_w + start, mask=inside_w, other=0.0)
            values = tl.dot(x, w, values, input_precision=PRECISION, out_dtype=ACC)

    u = gates + tl.load(b_ptr + n, mask=n < n_out, other=0.0).to(ACC)[None, :]
    gate = 1.0 / (1.0 + tl.exp(-u))
    if SILU:
        gate = u * gate
    if TWO:
        values += tl.load(vb_ptr + n, mask=n < n_out, other=0.0).to(ACC)[None, :]
    else:
        values = tl.load(v_ptr + of_y, mask=inside_y, other=0.0).to(ACC)
    tl.store(y_ptr + of_y, (values * gate).to(y_ptr.dtype.element_ty), mask=inside_y)


def _launch(
    v: Tensor, x: Tensor, w: Tensor, vb: Tensor, b: Tensor, two: bool, silu: bool, y: Tensor | None = None
) -> Tensor:
    (rows, n_in), n_out = x.shape, w.shape[0]
    v, x, w = v.contiguous(), x.contiguous(), w.contiguous()
    y = torch.empty(rows, n_out, dtype=x.dtype, device=x.device) if y is None else y
    tile = _tile(rows, n_out, x.dtype)
    programs = triton.cdiv(rows, tile["BLOCK_M"]) * triton.cdiv(n_out, tile["BLOCK_N"])
    _gated_kernel[(programs,)](
        y,
        v,
        x,
        w,
        vb,
        b,
        rows,
        n_out,
        n_in,
        TWO=two,
        SILU=silu,
        ACC=tl.float64 if x.dtype == torch.float64 else tl.float32,
        PRECISION="ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32",
        BAND=BAND,
        **tile,
    )
    return y


class GateFunction(py_gates.GateFunction):
    @staticmethod
    def forward(ctx: Any, v: Tensor, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(v, x, w, b)
        return _launch(v, x, w, b, b, two=False, silu=False)


class GateInPlace(torch.autograd.Function):
    """The gate over v, of which a program reads its tile before it writes it.

    Backward would need the old v; without one here, autograd reports that.
    """

    @staticmethod
    def forward(ctx: Any, v: Tensor, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        ctx.mark_dirty(v)
        return _launch(v, x, w, b, b, two=False, silu=False, y=v)


class GluFunction(py_gates.GluFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, wg: Tensor, b: Tensor, bg: Tensor, silu: bool) -> Tensor:
        ctx.save_for_backward(x, w, wg, b, bg)
        ctx.silu = silu
        return _launch(w, x, wg, b, bg, two=True, silu=silu)


def glu(x: Tensor, w: Tensor, wg: Tensor, b: Tensor, bg: Tensor) -> Tensor:
    return GluFunction.apply(x, w, wg, b, bg, False)


def swiglu(x: Tensor, w: Tensor, wg: Tensor, b: Tensor, bg: Tensor) -> Tensor:
    return GluFunction.apply(x, w, wg, b, bg, True)


# What is overwritten is contiguous in every case.
FUNCTIONS = {"gate": GateFunction.apply, "gate_": GateInPlace.apply, "glu": glu, "swiglu": swiglu}

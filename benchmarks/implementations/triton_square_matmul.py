# Kernels have no types, and their constants are in capitals, as is usual in Triton.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803
"""Mode `triton`: the square product, also over its left factor; backward is that of mode `py`.

`square_matmul` is a product in tiles, as in `triton_dense.py`. Nothing but the product takes time here, so the tile is
measured (`triton.autotune`), once for each shape. It reads with pointers. TMA and specialised warps could be faster on
a Hopper GPU, and longer.

`square_matmul_` must not overwrite what another program still reads. A row of the result needs that row of a, and all
of b. So while b fits into shared memory, a program takes whole rows, and no second buffer is needed:

    for its blocks of rows:    a[rows] = a[rows] @ b

It reads b once, and the next block while it multiplies this one. Otherwise, the product goes panel by panel into a
second buffer of the size of a panel, and from there over a. If the panel fits into the L2 cache, only the result of
the copy goes to memory.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchops._core.triton.launch import FP_FUSION

from . import py_in_place, py_rows
from .triton_dense import BAND, _tile

# Features up to which a program takes whole rows, and the rows in a block, by the bytes of an element.
WHOLE_ROWS = {2: 256, 4: 64, 8: 32}
BLOCK = {2: 64, 4: 32, 8: 16}
PROGRAMS_PER_PROCESSOR = 2
# Of a panel: many tiles for all processors, and few launches.
PANEL_ROWS = py_in_place.PANEL_ROWS
PANEL_ELEMENTS = 2**24


@triton.jit
def _product_kernel(
    y_ptr,
    a_ptr,
    b_ptr,
    rows,
    n,
    k,
    stride_k,
    stride_n,
    EVEN: tl.constexpr,  # blocks divide k and n
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
):
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(n, BLOCK_N)
    tile = tl.program_id(0)
    # The bands of triton_dense.py.
    tile_m, tile_n = tl.swizzle2d(tile // tiles_n, tile % tiles_n, tiles_m, tiles_n, BAND)
    # 64 bits, since the last element may be beyond 2**31.
    row = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    i = tl.arange(0, BLOCK_K)
    # What is below the last row is read as the last row, which needs no mask, and not written.
    a_tile = a_ptr + tl.minimum(row, rows - 1)[:, None] * k + i[None, :]
    b_tile = b_ptr + i[:, None] * stride_k + column[None, :] * stride_n

    sums = tl.zeros((BLOCK_M, BLOCK_N), ACC)
    for start in range(0, k, BLOCK_K):
        if EVEN:
            a, b = tl.load(a_tile), tl.load(b_tile)
        else:
            inside = i < k - start
            a = tl.load(a_tile, mask=inside[None, :], other=0.0)
            b = tl.load(b_tile, mask=inside[:, None] & (column < n)[None, :], other=0.0)
        sums = tl.dot(a, b, sums, input_precision=PRECISION, out_dtype=ACC)
        a_tile += BLOCK_K
        b_tile += BLOCK_K * stride_k

    inside_y = (row < rows)[:, None] & (column < n)[None, :]
    tl.store(y_ptr + row[:, None] * n + column[None, :], sums.to(y_ptr.dtype.element_ty), mask=inside_y)


def _config(block_m: int, block_n: int, warps: int, stages: int) -> Any:
    return triton.Config({"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": 64}, num_warps=warps, num_stages=stages)


_TUNED = [
    _config(128, 256, 8, 3),
    _config(128, 256, 8, 4),
    _config(256, 128, 8, 3),
    _config(256, 128, 8, 4),
    _config(128, 128, 4, 4),
    _config(128, 128, 8, 4),
    _config(64, 128, 4, 4),
]
_tuned_kernel = triton.autotune(configs=_TUNED, key=["rows", "n", "k"])(_product_kernel)


def _constants(dtype: torch.dtype) -> dict[str, Any]:
    precision = "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    return {"ACC": tl.float64 if dtype == torch.float64 else tl.float32, "PRECISION": precision, **FP_FUSION}


def product_into(y: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` for contiguous y and a. y must be neither a nor b, since tuning writes it again and again."""
    (rows, k), n = a.shape, b.shape[1]
    # Tiles are chosen among for tensor cores, and in the interpreter there is nothing to measure.
    tuned = a.is_cuda and a.dtype.itemsize == 2
    kernel, tile = (_tuned_kernel, {}) if tuned else (_product_kernel, _tile(rows, n, a.dtype))

    def grid(meta: dict[str, Any]) -> tuple[int]:
        return (triton.cdiv(rows, meta["BLOCK_M"]) * triton.cdiv(n, meta["BLOCK_N"]),)

    even = n % 256 == 0 and k % 64 == 0
    kernel[grid](y, a, b, rows, n, k, *b.stride(), EVEN=even, BAND=BAND, **_constants(a.dtype), **tile)
    return y


@triton.jit
def _whole_rows_kernel(
    a_ptr,
    b_ptr,
    rows,
    n,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    WIDTH: tl.constexpr,
):
    i = tl.arange(0, WIDTH)
    b = tl.load(b_ptr + i[:, None] * n + i[None, :], mask=(i < n)[:, None] & (i < n)[None, :], other=0.0)
    for block in range(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.num_programs(0)):
        row = (block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        inside = (row < rows)[:, None] & (i < n)[None, :]
        here = a_ptr + row[:, None] * n + i[None, :]
        # The product reads the rows from shared memory: all threads have read theirs before one writes.
        a = tl.load(here, mask=inside, other=0.0)
        y = tl.dot(a, b, input_precision=PRECISION, out_dtype=ACC)
        tl.store(here, y.to(a_ptr.dtype.element_ty), mask=inside)


def _whole_rows(a: Tensor, b: Tensor) -> None:
    rows, n = a.shape
    block, width = BLOCK[a.dtype.itemsize], max(16, triton.next_power_of_2(n))
    processors = torch.cuda.get_device_properties(a.device).multi_processor_count if a.is_cuda else 1
    programs = min(PROGRAMS_PER_PROCESSOR * processors, triton.cdiv(rows, block))
    # The shared memory of a processor holds two programs of up to 128 features, or one of 256.
    warps, stages = (4, 3) if width <= 128 else (8, 2)
    tile = {"BLOCK_M": block, "WIDTH": width, "num_warps": warps, "num_stages": stages}
    _whole_rows_kernel[(programs,)](a, b, rows, n, **_constants(a.dtype), **tile)


def _by_panels(a: Tensor, b: Tensor) -> None:
    n = a.shape[1]
    panels = a.split(max(PANEL_ROWS, PANEL_ELEMENTS // n))
    scratch = torch.empty_like(panels[0])
    for panel in panels:
        panel.copy_(product_into(scratch[: len(panel)], panel, b))


class SquareMatmulFunction(py_rows.SquareMatmulFunction):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        a = a.contiguous()
        return product_into(torch.empty_like(a), a, b)


class SquareMatmulInPlace(py_in_place.SquareMatmulInPlace):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        old = a.clone() if ctx.needs_input_grad[1] else None
        if a.shape[1] <= WHOLE_ROWS[a.dtype.itemsize]:
            _whole_rows(a, b.contiguous())
        else:
            _by_panels(a, b)
        ctx.mark_dirty(a)
        ctx.save_for_backward(old, b)
        return a


# What is overwritten is contiguous in every case.
FUNCTIONS = {"square_matmul": SquareMatmulFunction.apply, "square_matmul_": SquareMatmulInPlace.apply}

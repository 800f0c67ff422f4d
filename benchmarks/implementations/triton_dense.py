# Kernels have no types, and their constants are in capitals, as is usual in Triton.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803
"""Mode `triton`: a dense layer in one kernel, with bias and sigmoid in the epilogue of the matrix product.

Each program computes one tile of the output. It walks along the inner dimension, multiplies a tile of x with a tile of
w in every step, and holds the sums in registers. At the end the sums are still there, so bias and sigmoid cost no
memory traffic, whereas a second kernel would have to read the product back.

Real code would choose the tile by measuring (`triton.autotune`); here it follows from the shape, which is shorter.
`TRITON_INTERPRET=1` in the environment runs the kernel on CPU tensors, slowly, for learning and for tests.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import py_dense

# Programs that run at the same time should share tiles of x and w in the L2 cache. So the output tiles are computed in
# bands of this many rows of tiles, column by column instead of row by row.
BAND = 8


@triton.jit
def _dense_kernel(
    y_ptr,
    x_ptr,
    w_ptr,
    b_ptr,
    rows,
    n_out,
    n_in,
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

    # 64 bits, since the last element may be beyond 2**31.
    m = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_tile = x_ptr + m[:, None] * n_in + k[None, :]
    # w is stored as (out, in); reading it with swapped axes gives the tile of w.T.
    w_tile = w_ptr + n[None, :] * n_in + k[:, None]

    sums = tl.zeros((BLOCK_M, BLOCK_N), ACC)
    for start in range(0, n_in, BLOCK_K):
        inside = k < n_in - start
        x = tl.load(x_tile, mask=(m < rows)[:, None] & inside[None, :], other=0.0)
        w = tl.load(w_tile, mask=(n < n_out)[None, :] & inside[:, None], other=0.0)
        sums = tl.dot(x, w, sums, input_precision=PRECISION, out_dtype=ACC)
        x_tile += BLOCK_K
        w_tile += BLOCK_K

    z = sums + tl.load(b_ptr + n, mask=n < n_out, other=0.0).to(ACC)[None, :]
    y = 1.0 / (1.0 + tl.exp(-z))
    inside_y = (m < rows)[:, None] & (n < n_out)[None, :]
    tl.store(y_ptr + m[:, None] * n_out + n[None, :], y.to(y_ptr.dtype.element_ty), mask=inside_y)


def _tile(rows: int, n_out: int, dtype: torch.dtype) -> dict[str, int]:
    """Sizes of a tile and of the pipeline that loads it, so that both fit into shared memory."""
    largest, depth = {2: (128, 64), 4: (64, 32), 8: (32, 16)}[dtype.itemsize]
    block_m = max(16, min(largest, triton.next_power_of_2(rows)))
    block_n = max(16, min(largest, triton.next_power_of_2(n_out)))
    warps = 8 if block_m * block_n > 64 * 64 else 4
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": depth, "num_warps": warps, "num_stages": 3}


def dense_forward(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """`sigmoid(x @ w.T + b)` for contiguous x (rows, in), w (out, in), b (out,)."""
    (rows, n_in), n_out = x.shape, w.shape[0]
    y = torch.empty(rows, n_out, dtype=x.dtype, device=x.device)
    tile = _tile(rows, n_out, x.dtype)
    programs = triton.cdiv(rows, tile["BLOCK_M"]) * triton.cdiv(n_out, tile["BLOCK_N"])
    _dense_kernel[(programs,)](
        y,
        x,
        w,
        b,
        rows,
        n_out,
        n_in,
        ACC=tl.float64 if x.dtype == torch.float64 else tl.float32,
        # Like PyTorch's own products: full float32 unless the user has allowed less.
        PRECISION="ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32",
        BAND=BAND,
        **tile,
    )
    return y


class DenseFunction(py_dense.DenseFunction):
    """The kernel above, with the backward of mode `py`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        y = dense_forward(x, w, b)
        ctx.save_for_backward(x, w, y)
        return y


def dense(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return DenseFunction.apply(x.contiguous(), w.contiguous(), b.contiguous())


FUNCTIONS = {"dense": dense}

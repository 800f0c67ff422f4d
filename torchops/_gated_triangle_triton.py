# Kernels have no types, and their constants are in capitals, as is usual in Triton.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803
"""The kernels of `_gated_triangle.py`, which imports this module when needed.

The gate is as wide as o, so it is computed together with a and b, and x is read only once:

1. ``_pack_kernel`` packs the weights into one matrix, in float16;
2. ``_in_kernel`` computes, from a tile of x, a and b (channels first) and the gate (rows first), all in float16;
3. one batched product gives o;
4. ``_out_kernel`` reads o and the gate.

a is scaled by a power of 2, and eps by its square, so that o fits float16 (see ``scale_of_product()``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchops._gated_triangle import scale_of_product
from torchops._triton_launch import FP_FUSION

if TYPE_CHECKING:
    from ._gated_triangle import Weights

__all__ = ["run", "tiling"]


@triton.jit
def _pack_kernel(
    a, a_gate, b, b_gate, gate, p_out, to,
    C: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Copies C packed weights: rows of a and its gate by turns, of b and its gate, of the gate, then p_out."""
    row = tl.program_id(0)
    column = tl.arange(0, COLUMNS)
    there = column < C
    if row < 2 * D:
        at = tl.where(row % 2 == 0, a.to(tl.int64), a_gate.to(tl.int64)) + (row // 2) * C * 4
    elif row < 4 * D:
        at = tl.where(row % 2 == 0, b.to(tl.int64), b_gate.to(tl.int64)) + (row // 2 - D) * C * 4
    elif row < 5 * D:
        at = gate.to(tl.int64) + (row - 4 * D) * C * 4
    else:
        at = p_out.to(tl.int64) + (row - 5 * D) * C * 4
    values = tl.load(at.to(tl.pointer_type(tl.float32)) + column, mask=there)
    tl.store(to + row * C + column, values.to(tl.float16), mask=there)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(x * -1.4426950408889634))


@triton.jit
def _in_kernel(
    x, norm, norm_bias, mask, w, a, b, gate, positions, scale, eps,
    C: tl.constexpr, D: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, HAS_MASK: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """BLOCK positions of one batch element. w has 2 d rows for a, alternating between value and gate of a channel, the
    same for b, and d for the gate."""
    element = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * BLOCK
    place = first + tl.arange(0, BLOCK)
    there = place < positions
    column = tl.arange(0, K)
    rows = x + (element * positions + first) * C + (tl.arange(0, BLOCK) * C)[:, None] + column[None, :]

    # Up to 384 features, those of all positions fit in registers; more are read again for each use.
    values = ()
    mean = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(C // K):
        part = tl.load(rows + k * K, mask=there[:, None], other=0.0)
        mean += tl.sum(part, 1)
        if C <= 384:
            values = values + (part,)  # type: ignore[assignment]  # noqa: RUF005
    mean = mean / C
    square = tl.zeros((BLOCK,), tl.float32)  # sum of the squared differences from the mean
    for k in tl.static_range(C // K):
        part = values[k] if C <= 384 else tl.load(rows + k * K, mask=there[:, None], other=0.0)
        apart = part - mean[:, None]
        square += tl.sum(apart * apart, 1)
    rstd = tl.rsqrt(square / C + eps)

    z = ()
    for k in tl.static_range(C // K):
        part = values[k] if C <= 384 else tl.load(rows + k * K, mask=there[:, None], other=0.0)
        gamma = tl.load(norm + k * K + column)[None, :]
        beta = tl.load(norm_bias + k * K + column)[None, :]
        z = z + (((part - mean[:, None]) * rstd[:, None] * gamma + beta).to(tl.float16),)  # type: ignore[assignment]  # noqa: RUF005

    factor = there.to(tl.float32)
    if HAS_MASK:
        factor = tl.load(mask + element * positions + place, mask=there, other=0).to(tl.float32)
    if AHEAD > 0:
        # Prefetches what the next program on this multiprocessor reads, while this one multiplies.
        line = tl.arange(0, 32)
        of_next = tl.minimum(place + AHEAD * BLOCK, positions - 1).to(tl.int64) * C
        lines = x + element * positions * C + of_next[:, None] + tl.minimum(line * 32, C - 1)[None, :]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [lines.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )

    row = tl.arange(0, ROWS)
    channels = place[:, None] + tl.arange(0, ROWS // 2)[None, :] * positions.to(tl.int64) + element * D * positions
    of_gate = gate + ((element * positions + place) * D)[:, None] + row[None, :]
    for j in tl.range(4 * D // ROWS, num_stages=STAGES):
        of_tile = w + (j * ROWS + row)[None, :] * C + column[:, None]
        total = tl.zeros((BLOCK, ROWS), tl.float32)
        for k in tl.static_range(C // K):
            total = tl.dot(z[k], tl.load(of_tile + k * K), total)
        value, opened = tl.split(tl.reshape(total, (BLOCK, ROWS // 2, 2)))
        value = value * _sigmoid(opened) * factor[:, None]
        if j < 2 * D // ROWS:
            to = a + channels + j * (ROWS // 2) * positions.to(tl.int64)
            tl.store(to, (value * scale).to(tl.float16), mask=there[:, None])
        else:
            to = b + channels + (j * (ROWS // 2) - D) * positions.to(tl.int64)
            tl.store(to, value.to(tl.float16), mask=there[:, None])
    for j in tl.static_range(D // ROWS):
        of_tile = w + (4 * D + j * ROWS + row)[None, :] * C + column[:, None]
        total = tl.zeros((BLOCK, ROWS), tl.float32)
        for k in tl.static_range(C // K):
            total = tl.dot(z[k], tl.load(of_tile + k * K), total)
        tl.store(of_gate + j * ROWS, _sigmoid(total).to(tl.float16), mask=there[:, None])


@triton.jit
def _out_kernel(
    norm, norm_bias, o, gate, w, out, positions, eps,
    C: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    element = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = place < positions
    channel = tl.arange(0, D)
    of_o = o + element * D * positions + channel[None, :] * positions.to(tl.int64) + place[:, None]
    values = tl.load(of_o, mask=there[:, None], other=0.0).to(tl.float32)
    of_gate = gate + ((element * positions + place) * D)[:, None] + channel[None, :]
    opened = tl.load(of_gate, mask=there[:, None], other=0.0)
    apart = values - (tl.sum(values, 1) / D)[:, None]
    rstd = tl.rsqrt(tl.sum(apart * apart, 1) / D + eps)
    gamma, beta = tl.load(norm + channel)[None, :], tl.load(norm_bias + channel)[None, :]
    gated = ((apart * rstd[:, None] * gamma + beta) * opened.to(tl.float32)).to(tl.float16)
    column = tl.arange(0, COLUMNS)
    to = out + ((element * positions + place) * C)[:, None] + column[None, :]
    for j in tl.range(C // COLUMNS, num_stages=1):
        of_tile = tl.load(w + (j * COLUMNS + column)[None, :] * D + channel[:, None])
        tl.store(to + j * COLUMNS, tl.dot(gated, of_tile), mask=there[:, None])


# --- launches --------------------------------------------------------------------------------------------------------


class Tiling(NamedTuple):
    """For a program of the first kernel: features at a time, positions, warps, rows per tile of weights, tiles in
    flight, and how many programs ahead x is fetched into the cache. For the second kernel: positions.
    """

    k: int
    block: int
    warps: int
    rows: int
    stages: int
    ahead: int
    out_block: int


def tiling(c: int) -> Tiling:
    """Measured on an H100 at N = 768, for c = 128 and 384. Programs of 64 positions share a multiprocessor; one of 128
    occupies it alone, and reads the weights half as often."""
    if c <= 128:
        return Tiling(c, 64, 4, 64, 3, 0, 64)
    return Tiling(128, 128, 8, 64, 4, 66, 64) if c <= 384 else Tiling(128, 64, 8, 128, 1, 0, 64)


class _Launch:
    """kernel[grid](*arguments, *constants), on tensors the first time.

    Triton inspects all arguments in every launch, which took the host of an H100 some 30 us for the kernel that packs
    weights. Later launches reuse the compiled kernel and skip that, and then tensors may be addresses.
    """

    def __init__(self, kernel: Any, grid: tuple[int, int], *constants: int, warps: int = 4) -> None:
        self.kernel, self.grid, self.constants, self.warps = kernel, (*grid, 1), constants, warps
        self.runner: Any = None

    def __call__(self, stream: int, *arguments: Any) -> None:
        if self.runner is not None:
            self.runner(*arguments, *self.constants, stream=stream)
            return
        compiled = self.kernel[self.grid](*arguments, *self.constants, num_warps=self.warps, **FP_FUSION)
        if compiled is not None:  # the interpreter returns None
            self.runner = compiled[self.grid]


def _launches(shape: Sequence[int], d: int, has_mask: bool, tiling: Tiling) -> tuple[_Launch, _Launch, _Launch]:
    batch, n, _, c = shape
    t, positions = tiling, n * n
    constants = (c, d, t.k, t.block, int(has_mask), t.rows, t.stages, t.ahead)
    return (
        _Launch(_pack_kernel, (6 * d, 1), c, d, triton.next_power_of_2(c)),
        _Launch(_in_kernel, (triton.cdiv(positions, t.block), batch), *constants, warps=t.warps),
        _Launch(_out_kernel, (triton.cdiv(positions, t.out_block), batch), c, d, t.out_block, min(c, 128)),
    )


_known: dict[tuple[Any, ...], tuple[_Launch, _Launch, _Launch]] = {}


def run(x: Tensor, mask: Tensor | None, weights: Weights, eps: float, tiling: Tiling) -> Tensor:
    """The update of x (batch, N, N, c) in float32, for a size that `tiling` supports, N > 1."""
    batch, n, _, c = x.shape
    d, positions = weights.a.shape[0], n * n
    x, eps = x.contiguous(), float(eps)
    factors = x if mask is None else mask.contiguous()
    # Everything that the kernels are compiled for. All other tensors come from the allocator.
    key = (x.shape, d, x.device.index, None if mask is None else mask.dtype, tiling)
    aligned = all(t.data_ptr() % 16 == 0 for t in (x, factors, *weights))
    launches = _known.get(key) if aligned else None
    pack, step_in, step_out = launches or _launches(x.shape, d, mask is not None, tiling)
    with torch.cuda.device_of(x):
        stream = triton.runtime.driver.active.get_current_stream(x.device.index) if x.is_cuda else 0
        # One allocation for the weights of both kernels, a, b and the gate. Whatever the host can postpone comes later,
        # because the first kernels wait for nothing but the host.
        channels = batch * d * positions
        begins = (0, 5 * d * c, 6 * d * c, 6 * d * c + channels, 6 * d * c + 2 * channels)
        memory = x.new_empty(begins[-1] + channels, dtype=torch.float16)
        first = memory.data_ptr()
        known = step_out.runner is not None
        w_in, w_out, a, b, gate = [first + 2 * i for i in begins] if known else [memory[i:] for i in begins]
        pack(stream, *weights[2:7], weights.p_out, w_in)
        scale = scale_of_product(n, torch.float16)
        step_in(stream, x, weights.norm, weights.norm_bias, factors, w_in, a, b, gate, positions, scale, eps)
        shape, strides = (batch * d, n, n), (positions, n, 1)
        of_b = memory.as_strided(shape, (positions, 1, n), begins[3])
        # Autocast would choose the dtype of a result that is not given.
        o, out = memory.new_empty(shape), torch.empty_like(x)
        torch.bmm(memory.as_strided(shape, strides, begins[2]), of_b, out=o)
        of_norm = (positions, eps * scale * scale)
        step_out(stream, weights.norm_out, weights.norm_out_bias, o, gate, w_out, out, *of_norm)
    if aligned:
        _known[key] = (pack, step_in, step_out)
    return out

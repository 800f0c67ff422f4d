# Kernels have no types, and their constants are in capitals, as is usual in Triton.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803
"""The kernels of `gated_triangle.py`, which imports this module when needed.

The gate is as wide as o, so it is computed together with a and b, and x is read only once:

1. ``_pack_kernel`` packs the weights into one matrix, in float16;
2. ``_in_kernel`` computes, from a tile of x, a and b (channels first) and the gate (rows first), all in float16;
3. one batched product gives o;
4. ``_out_kernel`` reads o and the gate.

a is scaled by a power of 2, and eps by its square, so that o fits float16 (see ``scale_of_product()``).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchops._core.triton.launch import FP_FUSION, is_watched, stream_of
from torchops.distributed.triangle.rows import scale_of_product

from .gated_triangle import fits

if TYPE_CHECKING:
    from .gated_triangle import Weights

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
def _sigmoid(x, APPROXIMATE: tl.constexpr):
    """By an approximate instruction, with errors up to 3e-4; or more exactly, by a division, which takes far longer."""
    if APPROXIMATE:
        tanh = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [x * 0.5], dtype=tl.float32, is_pure=True, pack=1
        )
        return tanh * 0.5 + 0.5
    return 1.0 / (1.0 + tl.exp2(x * -1.4426950408889634))


@triton.jit
def _in_kernel(
    x, norm, norm_bias, mask, w, a, b, gate, positions, scale, eps,
    C: tl.constexpr, D: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, HAS_MASK: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr, APPROXIMATE: tl.constexpr,
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
        value = value * _sigmoid(opened, APPROXIMATE) * factor[:, None]
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
        tl.store(of_gate + j * ROWS, _sigmoid(total, APPROXIMATE).to(tl.float16), mask=there[:, None])


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
    """Measured on an H100, for c = 128 at N = 256, 512 and 1024, for c = 384 at N = 256 and 768. Of the tilings
    that are within 2% of the best at each, the one with the fewest stages."""
    if c <= 128:
        return Tiling(c, 64, 4, 64, 2, 0, 64)
    return Tiling(128, 64, 4, 64, 2, 66, 64) if c <= 384 else Tiling(128, 64, 8, 128, 1, 0, 64)


class _Launch:
    """kernel[grid](*arguments, *constants), on tensors the first time.

    Triton inspects all arguments in every launch, which took the host of an H100 some 30 us for the kernel that packs
    weights. Later launches go to the compiled kernel, and take addresses: for a tensor, it would ask the driver.
    """

    def __init__(self, kernel: Any, grid: tuple[int, int], *constants: int, warps: int = 4) -> None:
        self.kernel, self.grid, self.constants, self.warps = kernel, (*grid, 1), constants, warps
        self.compiled: Any = None  # and stays None in the interpreter
        self.launch: Any = None
        self.between: tuple[Any, ...] = ()

    def __call__(self, stream: int, watched: bool, *arguments: Any) -> None:
        if self.compiled is None:
            compiled = self.kernel[self.grid](*arguments, *self.constants, num_warps=self.warps, **FP_FUSION)
            if compiled is not None:
                self.launch, self.between = _launcher(compiled)
                self.compiled = compiled
        elif watched:
            self.compiled[self.grid](*arguments, *self.constants, stream=stream)
        else:
            self.launch(*self.grid, stream, *self.between, *arguments, *self.constants)


def _launcher(compiled: Any) -> tuple[Any, tuple[Any, ...]]:
    """What launches a compiled kernel without hooks, and its arguments between the stream and those of the kernel."""
    run, function, rest = compiled.run, compiled.function, (compiled.packed_metadata, None, None, None)
    # In version 3.6, that of torch 2.11, `run` only allocates scratch memory, and then calls a function in C.
    needs_scratch = getattr(run, "global_scratch_size", 1) or getattr(run, "profile_scratch_size", 1)
    if triton.__version__.startswith("3.6.") and not needs_scratch:
        return run.launch, (function, run.launch_cooperative_grid, run.launch_pdl, None, None, *rest)
    return run, (function, *rest)


def _is_watched() -> bool:
    """As in `_core/triton/launch.py`, with less to look up where Triton's own chains of hooks are empty."""
    runtime = triton.knobs.runtime
    try:
        return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)
    except AttributeError:
        return is_watched()


class _Plan:
    """What is the same for all tensors of given shapes and dtypes: the launches, and what lies where in the memory."""

    def __init__(self, shape: Sequence[int], d: int, has_mask: bool, on_gpu: bool, tiles: Tiling) -> None:
        batch, n, _, c = shape
        t, positions, channels = tiles, n * n, batch * d
        constants = (c, d, t.k, t.block, int(has_mask), t.rows, t.stages, t.ahead, int(on_gpu))
        out_constants = (c, d, t.out_block, min(c, 128))
        self.pack = _Launch(_pack_kernel, (6 * d, 1), c, d, triton.next_power_of_2(c))
        self.step_in = _Launch(_in_kernel, (triton.cdiv(positions, t.block), batch), *constants, warps=t.warps)
        self.step_out = _Launch(_out_kernel, (triton.cdiv(positions, t.out_block), batch), *out_constants)
        self.positions, self.scale = positions, scale_of_product(n, torch.float16)
        # One allocation for the weights of both kernels, a, b and the gate.
        weights, size = 6 * d * c, channels * positions
        self.begins = (0, 5 * d * c, weights, weights + size, weights + 2 * size)
        self.size = weights + 3 * size
        # Views of a and b: shape, strides, begin.
        self.a, self.b = [((channels, n, n), (positions, n, 1), begin) for begin in (weights, weights + size)]

    def run(self, x: Tensor, tensors: Sequence[Tensor], addresses: Sequence[int], eps: float) -> Tensor:
        """On the current device. The tensors, and their addresses, are those of x, the mask and the weights."""
        # The first two kernels wait for nothing but the host, so all that it can postpone comes after them.
        stream, watched = (stream_of(x.device) if x.is_cuda else 0), _is_watched()
        memory = x.new_empty(self.size, dtype=torch.float16)
        known = self.step_out.compiled is not None
        given: Sequence[Any] = addresses if known else tensors
        at_x, factors, norm, norm_bias, a, a_gate, b, b_gate, gate, norm_out, norm_out_bias, p_out = given
        first, positions, scale = memory.data_ptr(), self.positions, self.scale
        w_in, w_out, to_a, to_b, to_gate = [first + 2 * i if known else memory[i:] for i in self.begins]
        self.pack(stream, watched, a, a_gate, b, b_gate, gate, p_out, w_in)
        to = (to_a, to_b, to_gate)
        self.step_in(stream, watched, at_x, norm, norm_bias, factors, w_in, *to, positions, scale, eps)
        matrices = [memory.as_strided(*view) for view in (self.a, self.b)]
        with torch._C._DisableAutocast():
            o = torch.ops.myops.square_matmul.default(*matrices, transpose_b=True)
        out = torch.empty_like(x)
        at_o, at_out = (o.data_ptr(), out.data_ptr()) if known else (o, out)
        last = (positions, eps * scale * scale)
        self.step_out(stream, watched, norm_out, norm_out_bias, at_o, to_gate, w_out, at_out, *last)
        return out


_MOST_PLANS = 4096  # each new N adds one
_plans: dict[tuple[Any, ...], _Plan] = {}


def run(x: Tensor, mask: Tensor | None, weights: Weights, eps: float, tiles: Tiling | None = None) -> Tensor | None:
    """The update, or None if the kernels do not support the arguments."""
    # The key, and what all weights have in common, is all that `fits()` looks at, and all that kernels are compiled
    # for if what they read begins at multiples of 16 bytes. What they write comes from the allocator.
    device, float32 = x.device, torch.float32
    for w in weights:
        if w.dtype is not float32 or w.device != device or not w.is_contiguous():
            return None
    of_mask = None if mask is None else (mask.shape, mask.dtype, mask.device)
    key = (x.shape, x.dtype, device, of_mask, tiles, *[w.shape for w in weights])
    known = _plans.get(key)
    if known is None and not fits(x, weights, mask):
        return None
    x = x.contiguous()
    tensors = (x, x if mask is None else mask.contiguous(), *weights)
    addresses = [t.data_ptr() for t in tensors]
    aligned = functools.reduce(operator.or_, addresses) % 16 == 0
    plan = known if aligned else None
    if plan is None:
        plan = _Plan(x.shape, len(weights.norm_out), mask is not None, x.is_cuda, tiles or tiling(x.shape[-1]))
    if not x.is_cuda or device.index == torch.cuda.current_device():  # not CUDA: in Triton's interpreter
        out = plan.run(x, tensors, addresses, float(eps))
    else:
        with torch.cuda.device(device):
            out = plan.run(x, tensors, addresses, float(eps))
    if aligned and known is None:
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        _plans[key] = plan
    return out

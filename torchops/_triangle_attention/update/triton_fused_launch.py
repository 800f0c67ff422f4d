"""Launches of the kernels of `kernels.py` and `kernels_backward.py`: tiles, and places of panels in memory."""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from torchops._core.triton.launch import Launch
from torchops._triangle_attention.attention import triton as attention
from torchops._triangle_attention.update import kernels, kernels_backward, panels
from torchops._triangle_attention.update.arguments import Weights

__all__ = [
    *("Places", "aligned", "budget", "kernel_for", "kernel_of", "launch_project", "part_of"),
    *("scratch_for", "triangle_bias"),
]


def budget(x: Tensor, itemsize: int, training: bool, low_memory: bool = False) -> int:
    """Bytes per panel. Every launch has a tail in which multiprocessors wait: on an H100, the kernels of a forward and
    a backward pass at N = 768 take 8.9 ms with 4 panels of gradients, and 9.6 with 12. Gradients of 128 features and 4
    heads take one panel up to N = 400, where the host limits the time, and two beyond."""
    pair = math.prod(x.shape[1:]) * itemsize
    if low_memory:
        return max(pair // 2, 48 << 20)
    return (
        max(pair * 18 // 5, 288 << 20) if training and x.device.type != "cpu" else panels.budget(x, itemsize, training)
    )


def aligned(t: Tensor) -> bool:
    return t.stride(-1) == 1 and all(stride % kernels.UNIT == 0 for stride in t.stride()[:-1])


class _Tile(NamedTuple):
    """Positions per block, how Triton compiles the loop, and the programs per multiprocessor, which loop over blocks; 0
    for one program per block."""

    block: int
    warps: int
    stages: int
    programs: int


# The best of sweeps on an H100, with N = 768, c = 128, 4 heads of 32 and bfloat16. In a profile of a forward and a
# backward pass, these took, in this order, 605, 157, 257, 521, 299, 230 and 275 us. The fourth also computes the
# numbers that the attention's gradients read, and the gradient of `out`.
_TILES = {
    "project": _Tile(64, 8, 1, 2),
    "bias": _Tile(64, 4, 1, 4),
    "end": _Tile(32, 4, 1, 3),
    "gate_gradient": _Tile(32, 8, 3, 1),
    "to_z": _Tile(64, 4, 2, 0),
    "norm_gradient": _Tile(16, 4, 1, 6),
    "products": _Tile(64, 8, 4, 0),
    "finish": _Tile(128, 4, 1, 0),  # BLOCK must hold a row of features
}


class _Kernel:
    """A kernel with its constants, and its grid for a number of positions."""

    def __init__(self, name: str, **constants: int) -> None:
        tile = _TILES[name]
        self.block, self._programs = tile.block, tile.programs
        kernel = getattr(kernels if hasattr(kernels, name) else kernels_backward, name)
        constants |= {"STAGES": tile.stages}
        taken = {key: value for key, value in constants.items() if key in kernel.arg_names}
        how = {"num_warps": tile.warps, "num_stages": tile.stages}
        self.launch = Launch(kernel, **taken, BLOCK=tile.block, **how)

    def blocks(self, count: int, device: torch.device) -> int:
        return min(self.blocks_of(count), self.programs(device)) if self._programs else self.blocks_of(count)

    def blocks_of(self, count: int) -> int:
        return -(-count // self.block)

    def programs(self, device: torch.device) -> int:
        """How many programs run at the same time."""
        return self._programs * attention.processors(device)


@cache
def kernel_of(name: str, c: int, width: int, **constants: int) -> _Kernel:
    return _Kernel(
        name, C=c, PADDED_C=attention.padded(c), WIDTH=width, PADDED_WIDTH=attention.padded(width), **constants
    )


def kernel_for(w: Weights, name: str, **constants: int) -> _Kernel:
    """The kernel `name` for these weights."""
    return kernel_of(
        name, w.q.shape[1], w.q.shape[0], HAS_WEIGHT=w.norm_weight is not None, HAS_BIAS=w.norm_bias is not None,
        HAS_GATE_BIAS=w.gate_bias is not None, HAS_OUT_BIAS=w.out_bias is not None, **constants,
    )  # fmt: skip


class Places:
    """How the kernels find the positions (batch, outer, inner) of a tensor (batch, N, N, ...)."""

    def __init__(self, t: Tensor) -> None:
        batch, outer, inner = t.stride()[:3]
        self.strides = batch // kernels.UNIT, outer // kernels.UNIT, inner // kernels.UNIT

    def at(self, b: slice, rows: slice, ending: bool) -> tuple[int, int, int, int]:
        """The start and the strides of a panel."""
        batch, outer, inner = self.strides
        return b.start * batch + rows.start * (inner if ending else outer), batch, outer, inner


def scratch_for(b: slice, rows: slice, n: int, features: int, ending: bool, like: Tensor) -> Tensor:
    """Scratch for a panel, in the memory order of x."""
    size = rows.stop - rows.start
    return like.new_empty((b.stop - b.start, *((n, size) if ending else (size, n)), features))


def part_of(scratch: Tensor, rows: slice, ending: bool) -> Tensor:
    """The part that a panel uses of scratch for the largest panel."""
    return scratch[:, :, : rows.stop - rows.start] if ending else scratch[:, : rows.stop - rows.start]


def triangle_bias(x: Tensor, b: slice, w: Weights, ending: bool) -> Tensor:
    """Like `_attention_update_triton.triangle_bias`, times LOG2E."""
    n = x.shape[1]
    width = attention.padded_width(n)
    made = w.q.new_empty((b.stop - b.start, w.heads, n, width))
    kernel = kernel_for(w, "bias", HEADS=w.heads, PADDED_H=attention.padded(w.heads))
    at, batch, outer, inner = Places(x).at(b, slice(0, n), False)
    if ending:
        outer, inner = inner, outer
    kernel.launch(
        (kernel.blocks(n * width, x.device), len(made), 1),
        x, w.norm_weight, w.norm_bias, w.bias_weight, made, at, batch, outer, inner, width, n, n * width, w.eps,
    )  # fmt: skip
    return made


def launch_project(
    kernel: _Kernel, x: Tensor, x_at: tuple[int, ...], w: Weights, made: Tensor, k_at: int, z: Tensor | None
) -> None:
    batch, outer, inner = made.shape[:3]
    z_strides = (0, 0, 0) if z is None else Places(z).strides
    kernel.launch(
        (kernel.blocks(outer * inner, x.device), batch, 1),
        x, w.norm_weight, w.norm_bias, w.q, w.k, w.v, made, z, *x_at, 0, *Places(made).strides, *z_strides,
        k_at // kernels.UNIT, (k_at + w.q.shape[0]) // kernels.UNIT, inner, outer * inner, w.scale, w.eps,
    )  # fmt: skip

"""The triangle attention update in panels of rows, or of columns for the ending node.

A panel has as many of them as keep its z, q, k, v and attention result within a budget, so none of these ever exists
for all pairs. All tensors stay in the memory order of ``x``: for the ending node, the attention gets transposed views,
and only the bias is really transposed, which is ``heads / c`` of a pair tensor.

The steps of a panel are functions of a module: ATen operators in `aten.py`, kernels in `triton_steps.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from torchops._triangle_attention.attention.arguments import Inputs as Attention
from torchops._triangle_attention.attention.arguments import Saved
from torchops._triangle_attention.update.arguments import Inputs, Kept, Weights

__all__ = [
    *("CPU_BYTES", "Steps", "batches", "budget", "forward", "heads", "panels", "rows_and_keys", "slab"),
]


class Steps(Protocol):
    """What a panel goes through."""

    def norm(self, x: Tensor, w: Weights) -> Tensor:
        """z, contiguous and of the weights' dtype."""

    def triangle_bias(self, x: Tensor, w: Weights, ending: bool) -> Tensor:
        """``(batch, heads, j, k)``. A part of x gives part of the rows j."""

    def whole_bias(self, bias: Tensor) -> Tensor:
        """Prepares a bias ``(batch, heads, j, k)`` for `attend`."""

    def prepared_mask(self, mask: Tensor, bias: Tensor) -> Tensor:
        """Prepares a mask ``(batch, i, k)`` of any dtype for `attend`. The result can be sliced by rows."""

    def attend(self, a: Attention, saved: Saved | None) -> Tensor:
        """The result of the attention, written to `saved` if given. The bias and the mask are prepared."""

    def add(self, target: Tensor, x: Tensor | None, o: Tensor, z: Tensor, w: Weights) -> None:
        """Writes the product of the gated ``o`` with ``w.out``, plus ``x``, to ``target``, which may be ``x``. May
        overwrite ``o``."""

    def attend_backward(
        self,
        grad: Tensor,
        a: Attention,
        saved: Saved,
        output_mask: Sequence[bool],
        into: tuple[Tensor, Tensor, Tensor],
    ) -> Tensor | None:
        """Writes the requested gradients of q, k and v to `into`, and returns that of the bias."""


# On the CPU, what stays in the cache. On a GPU, inference may use the memory of one pair tensor, including the bias and
# the sums, or 128 MiB if pair tensors are small: few panels then, because each one costs host time.
CPU_BYTES = 8 << 20
_CUDA_BYTES = 112 << 20
_CUDA_TRAINING_BYTES = 256 << 20


def budget(x: Tensor, itemsize: int, training: bool) -> int:
    if x.device.type == "cpu":
        return CPU_BYTES
    pair = math.prod(x.shape[1:]) * itemsize
    return max(2 * pair, _CUDA_TRAINING_BYTES) if training else max(pair * 7 // 8, _CUDA_BYTES)


def panels(batch: int, n: int, row_bytes: int, budget: int) -> Iterator[tuple[slice, slice]]:
    """Slices of the batch and of rows: several batch elements with all their rows, or some rows of a single one."""
    if not n:
        return
    whole = budget // max(1, row_bytes * n)
    if whole:
        for b in range(0, batch, whole):
            yield slice(b, min(b + whole, batch)), slice(0, n)
        return
    count = -(-n // max(1, budget // max(1, row_bytes)))
    size = -(-n // count)  # of similar sizes, so that the last one is not small
    for b in range(batch):
        for first in range(0, n, size):
            yield slice(b, b + 1), slice(first, min(first + size, n))


def slab(t: Tensor, b: slice, rows: slice, ending: bool) -> Tensor:
    """The panel's part of a tensor (batch, N, N, ...) in memory order."""
    return t[b, :, rows] if ending else t[b, rows]


def rows_and_keys(x: Tensor, ending: bool) -> tuple[int, int]:
    """The number of rows i, and of edges in each."""
    outer, inner = x.shape[1:3]
    return (inner, outer) if ending else (outer, inner)


def heads(t: Tensor, heads: int, ending: bool) -> Tensor:
    """(batch, N, N, heads * d) in memory order, viewed as the attention takes it: (batch, i, heads, j, d)."""
    t = t.unflatten(-1, (heads, t.shape[-1] // heads))
    return t.permute(0, 2, 3, 1, 4) if ending else t.permute(0, 1, 3, 2, 4)


def forward(inputs: Inputs, target: Tensor, kept: Kept | None, steps: Steps, whole_bias: Tensor | None = None) -> None:
    """Writes the update of x to `target`, or x plus the update, and then `target` may be x.

    If `whole_bias` is given, it is the bias of all rows, as `steps.whole_bias` returns it, while x, `target` and `kept`
    have only some of the rows i; for the ending node, some of the columns.
    """
    x, mask, w, ending, add_residual = inputs
    batch, *_, c = x.shape
    own, n = rows_and_keys(x, ending)
    width, itemsize = w.q.shape[0], w.q.element_size()
    row_bytes = n * ((c + 4 * width) * itemsize + 4 * w.heads)
    for b, part_of_b in batches(panels(batch, own, row_bytes, budget(x, itemsize, False))):
        bias = steps.triangle_bias(x[b], w, ending) if whole_bias is None else whole_bias[b]
        prepared = None if mask is None else steps.prepared_mask(mask[b], bias)
        for rows in part_of_b:
            x_rows = slab(x, b, rows, ending)
            z = steps.norm(x_rows, w)
            qkv = F.linear(z, w.packed).split(width, -1)
            q, k, v = (heads(t, w.heads, ending) for t in qkv)
            row_mask = None if prepared is None else prepared[:, rows]
            if kept is None:
                o = steps.attend(Attention(q, k, v, bias, row_mask, w.scale), None)
                o = (o.permute(0, 3, 1, 2, 4) if ending else o.transpose(-3, -2)).flatten(-2)
            else:
                o = slab(kept.product, b, rows, ending)
                saved = Saved(heads(o, w.heads, ending), kept.logsumexp[b, rows])
                steps.attend(Attention(q, k, v, bias, row_mask, w.scale), saved)
            del qkv, q, k, v
            steps.add(slab(target, b, rows, ending), x_rows if add_residual else None, o, z, w)
            del o, z


def batches(each: Iterator[tuple[slice, slice]]) -> Iterator[tuple[slice, list[slice]]]:
    """Groups panels of the same part of the batch."""
    current: tuple[slice, list[slice]] | None = None
    for b, rows in each:
        if current is not None and current[0] == b:
            current[1].append(rows)
            continue
        if current is not None:
            yield current
        current = b, [rows]
    if current is not None:
        yield current

"""The triangle attention update in panels, with the kernels of `kernels.py`.

In inference, the only tensor per panel besides x holds q, k and v, and the result of the attention overwrites q.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchops._triangle_attention.attention import triton as attention
from torchops._triangle_attention.attention.arguments import Saved
from torchops._triangle_attention.update import kernels, panels, panels_backward, triton_fused_backward
from torchops._triangle_attention.update import triton_steps as steps
from torchops._triangle_attention.update.arguments import TENSORS, Inputs, Kept
from torchops._triangle_attention.update.triton_fused_launch import (
    Places,
    aligned,
    budget,
    kernel_for,
    launch_project,
    part_of,
    scratch_for,
    triangle_bias,
)

__all__ = ["backward", "backward_into", "forward", "why_not"]

_MOST = 128  # features of x, and of all heads: programs hold the weights
_SHARED_MEMORY = 160 << 10  # bytes that a program needs at most, with 128 features

backward_into = triton_fused_backward.backward_into


def why_not(inputs: Inputs) -> str | None:
    """Why the kernels, which read any strides that keep rows of x aligned, cannot compute this, or None if they can."""
    x, w = inputs.x, inputs.w
    c, width, unit = x.shape[-1], w.q.shape[0], kernels.UNIT
    if w.q.element_size() != 2:
        return "expected parameters of 16 bits"
    if w.gate is None:
        return "expected a gate"
    if max(c, width) > _MOST or c % unit or width % unit:
        return f"expected features, and heads * d, of at most {_MOST}, multiples of {unit}, got {c} and {width}"
    if not aligned(x):
        return f"expected x with strides that are multiples of {unit}, got {x.stride()}"
    if math.prod(x.shape[1:3]) >= 1 << 31:
        return f"expected fewer than {1 << 31} pairs"
    if attention.shared_memory(x.device) < _SHARED_MEMORY:
        return f"expected {_SHARED_MEMORY} bytes of shared memory"
    return None


def forward(inputs: Inputs, target: Tensor, kept: Kept | None, low_memory: bool = True) -> None:
    """Without `low_memory`, panels are larger, because the gradients will use as much memory anyway: at N = 768 and c =
    128, one panel instead of four."""
    x, mask, w, ending, add_residual = inputs
    batch, n = x.shape[:2]
    width, heads = w.q.shape[0], w.heads
    row_bytes = n * (3 * width * w.q.element_size() + 4 * heads)
    x_places, target_places = Places(x), Places(target)
    project, end = kernel_for(w, "project", KEEPS_Z=False), kernel_for(w, "end", ADD_RESIDUAL=add_residual)
    for b, part in panels.batches(panels.panels(batch, n, row_bytes, budget(x, w.q.element_size(), not low_memory))):
        size = b.stop - b.start
        bias = triangle_bias(x, b, w, ending)
        mask_bias = None if mask is None else steps.prepared_mask(mask[b], bias)
        scratch = scratch_for(b, part[0], n, 3 * width, ending, w.q)
        shape = size, part[0].stop - part[0].start, heads, n
        lse = None if kept else scratch.new_empty(shape, dtype=torch.float32)
        for rows in part:
            qkv = part_of(scratch, rows, ending)
            launch_project(project, x, x_places.at(b, rows, ending), w, qkv, width, None)
            q, k, v = (panels.heads(t, heads, ending) for t in qkv.split(width, -1))
            of_rows = None if mask_bias is None else mask_bias[:, rows]
            if kept is None:
                assert lse is not None
                saved = Saved(q, lse[:, : rows.stop - rows.start])
                o, o_at = qkv, (0, *Places(qkv).strides)
            else:
                o, o_at = kept.product, Places(kept.product).at(b, rows, ending)
                saved = Saved(panels.heads(panels.slab(o, b, rows, ending), heads, ending), kept.logsumexp[b, rows])
            attention.attend(attention.Prepared(q, k, v, bias, of_rows, w.scale, scaled=True), saved)
            count = n * (rows.stop - rows.start)
            end.launch(
                (end.blocks(count, x.device), size, 1),
                o, x, w.norm_weight, w.norm_bias, w.gate, w.gate_bias, w.out, w.out_bias, target,
                *o_at, *x_places.at(b, rows, ending), *target_places.at(b, rows, ending), qkv.shape[2], count, w.eps,
            )  # fmt: skip


def backward(
    grad: Tensor, inputs: Inputs, kept: Kept, output_mask: dict[str, bool], low_memory: bool = False
) -> dict[str, Tensor]:
    """The kernels compute all gradients together; the steps do, if only some are requested."""
    given = {"x": inputs.x} | {name: t for name in TENSORS if (t := getattr(inputs.w, name)) is not None}
    if not all(output_mask[name] for name in given):
        return panels_backward.backward(grad, inputs, kept, output_mask, steps)
    made = {name: torch.empty(t.shape, dtype=t.dtype, device=t.device) for name, t in given.items()}
    backward_into(made, grad if aligned(grad) else grad.contiguous(), inputs, kept, low_memory)
    return made

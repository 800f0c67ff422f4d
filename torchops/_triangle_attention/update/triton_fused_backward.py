"""Gradients of the triangle attention update in panels, with the kernels of `kernels.py`.

A panel has `d` (the gradient of the attention's result), z, and one tensor for q, dq, k, v and the gradient of the
gate. dk and dv overwrite k and v. So the last four parts are the factors from which dz and the gradients of four
weights are computed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchops._triangle_attention.attention import triton as attention
from torchops._triangle_attention.attention.arguments import Saved
from torchops._triangle_attention.update import kernels, panels
from torchops._triangle_attention.update import triton_steps as steps
from torchops._triangle_attention.update.arguments import Inputs, Kept, Weights
from torchops._triangle_attention.update.triton_fused_launch import (
    Places,
    budget,
    kernel_for,
    kernel_of,
    launch_project,
    part_of,
    scratch_for,
    triangle_bias,
)

__all__ = ["backward_into"]

_CHUNKS = 33  # partial sums of each weight gradient
_FINISHED = "q", "k", "v", "gate", "out", "norm_weight", "norm_bias", "bias_weight", "gate_bias", "out_bias"


class _Products:
    """Sums over panels of a[m].T @ b, (chunks, m, rows, columns) in float32, and of a[m] if requested."""

    def __init__(self, many: int, a: int, b: int, of_columns: bool, like: Tensor) -> None:
        self.sums = like.new_empty((_CHUNKS, many, a, b), dtype=torch.float32)
        self.columns = like.new_empty((_CHUNKS, many, a), dtype=torch.float32) if of_columns else None
        sizes = {"A": a, "PADDED_A": attention.padded(a), "B": b, "PADDED_B": attention.padded(b), "SUMS": of_columns}
        self.kernels = [kernel_of("products", 0, 0, **sizes, ACCUMULATE=accumulate) for accumulate in (False, True)]
        self.filled = False

    def add(self, a: Tensor, a_at: tuple[int, ...], step: int, b: Tensor) -> None:
        many = self.sums.shape[1]
        batch, outer, inner = b.shape[:3]
        kernel = self.kernels[self.filled]
        count = outer * inner
        share = -(-count // (kernel.block * _CHUNKS))
        kernel.launch(
            (many, 1, _CHUNKS), a, b, self.sums, self.sums if self.columns is None else self.columns, *a_at,
            *Places(b).strides, step // kernels.UNIT, batch, inner, count, share,
        )  # fmt: skip
        self.filled = True


class _GateGradients:
    """The kernels of the gate's gradient, and their sums over panels: of grad.T @ (o * gate), (programs, c, width) in
    float32, and of grad if requested."""

    def __init__(self, w: Weights, ending: bool) -> None:
        self.kernels = [
            kernel_for(w, "gate_gradient", ENDING=ending, HEADS=w.heads, ACCUMULATE=accumulate)
            for accumulate in (False, True)
        ]
        self.sums: Tensor | None = None
        self.columns: Tensor | None = None

    def launch(self, size: int, count: int, w: Weights, before: tuple[Any, ...], behind: tuple[Any, ...]) -> None:
        """Launches for `count` positions of each of `size` batch elements. The sums go between the arguments `before`
        and `behind`."""
        kernel, (width, c) = self.kernels[self.sums is not None], w.q.shape
        if self.sums is None:
            each = min(kernel.blocks_of(count), max(1, kernel.programs(w.q.device) // size))
            self.sums = w.q.new_empty((size * each, c, width), dtype=torch.float32)
            if w.out_bias is not None:
                self.columns = w.q.new_empty((size * each, c), dtype=torch.float32)
        # The first panel is the largest, so no other needs more programs than there are sums.
        each = min(kernel.blocks_of(count), len(self.sums) // size)
        columns = self.sums if self.columns is None else self.columns
        kernel.launch((each, size, 1), *before, self.sums, columns, *behind)


def backward_into(made: dict[str, Tensor], grad: Tensor, inputs: Inputs, kept: Kept, low_memory: bool) -> None:
    """Writes the gradients of x and of all parameters that are not None to `made`. `grad` is aligned. Only launches
    kernels, so that it can be planned."""
    x, mask, w, ending, add_residual = inputs
    o, logsumexp = kept
    batch, n, _, c = x.shape
    width, heads, dtype = w.q.shape[0], w.heads, w.q.dtype
    assert w.gate is not None
    dx = made["x"].view(x.shape)
    dz = dx if dx.dtype == dtype else dx.view(dtype)[..., :c]  # in the same rows, half as wide
    x_places, o_places, grad_places, dz_places = map(Places, (x, o, grad, dz))
    gate = _GateGradients(w, ending)
    project, to_z = kernel_for(w, "project", KEEPS_Z=True), kernel_for(w, "to_z")
    norm = kernel_for(w, "norm_gradient", HEADS=heads, PADDED_H=attention.padded(heads), ADD_RESIDUAL=add_residual)
    of_inputs = _Products(4, width, c, w.gate_bias is not None, w.q)
    of_norm = w.q.new_empty((batch, norm.blocks(n * n, x.device), 2 + heads, c), dtype=torch.float32)
    row_bytes = n * ((c + 6 * width) * w.q.element_size() + 8 * heads)
    for b, part in panels.batches(panels.panels(batch, n, row_bytes, budget(x, w.q.element_size(), True, low_memory))):
        size = b.stop - b.start
        bias = triangle_bias(x, b, w, ending)
        mask_bias = None if mask is None else steps.prepared_mask(mask[b], bias)
        scratch, z_scratch, d_scratch = (
            scratch_for(b, part[0], n, features, ending, w.q) for features in (5 * width, c, width)
        )
        lse_delta = w.q.new_empty(
            (2, size * (part[0].stop - part[0].start) * heads * bias.shape[-1]), dtype=torch.float32
        )
        bias_of_keys, dbias, has_dbias = attention.of_keys(bias, n), None, False
        for rows in part:
            places, z, d = (part_of(t, rows, ending) for t in (scratch, z_scratch, d_scratch))
            strides, inner, count = Places(places).strides, places.shape[2], n * (rows.stop - rows.start)
            x_at, lse = x_places.at(b, rows, ending), logsumexp[b, rows]
            gate.launch(
                size, count, w,
                (grad, o, x, w.norm_weight, w.norm_bias, w.gate, w.gate_bias, w.out, d, places[..., 4 * width :]),
                (
                    lse, *lse_delta, *grad_places.at(b, rows, ending), *o_places.at(b, rows, ending), *x_at,
                    *Places(d).strides, *strides, inner, count, bias.shape[-1], w.eps,
                ),
            )  # fmt: skip
            launch_project(project, x, x_at, w, places, 2 * width, z)
            q, dq, k, v, _ = (panels.heads(t, heads, ending) for t in places.split(width, -1))
            if dbias is None:
                dbias = attention.new_dbias(q, n, bias, wide=True)
            of_rows = None if mask_bias is None else mask_bias[:, rows]
            attention.attend_backward(
                panels.heads(d, heads, ending), attention.Prepared(q, k, v, bias, of_rows, w.scale, scaled=True),
                Saved(panels.heads(panels.slab(o, b, rows, ending), heads, ending), lse), (dq, k, v),
                dbias, has_dbias, bias_of_keys, lse_delta,
            )  # fmt: skip
            has_dbias = True
            d_inputs = places[..., width:]
            of_inputs.add(d_inputs, (0, *strides), width, z)
            to_z.launch(
                (to_z.blocks(count, x.device), size, 1),
                d_inputs, w.q, w.k, w.v, w.gate, dz, *strides, *dz_places.at(b, rows, ending), width // kernels.UNIT,
                inner, count,
            )  # fmt: skip
        assert dbias is not None
        norm.launch(
            (of_norm.shape[1], size, 1),
            dz, attention.sum_of_dbias(dbias), x, w.norm_weight, w.norm_bias, w.bias_weight, grad, dx, of_norm[b],
            *(number for t in (x, dz, grad, dx) for number in Places(t).at(b, slice(0, n), False)),
            *((1, n) if ending else (n, 1)), n, n * n, w.eps,
        )  # fmt: skip
    assert gate.sums is not None
    finish = kernel_for(w, "finish", HEADS=heads)
    finish.launch(
        (4 * (heads + 4) + 5 * -(-width * c // finish.block), 1, 1),
        of_inputs.sums, gate.sums, of_norm, of_inputs.columns, gate.columns,
        *(made.get(name) for name in _FINISHED), _CHUNKS, len(gate.sums), batch * of_norm.shape[1],
    )  # fmt: skip

"""Gradients of the update by triangle attention in panels, by the kernels of `_attention_update_kernels.py`.

A panel has `d`, the gradient of the attention's result, z, and one tensor with places for q, dq, k, v and the gradient
of the gate: the product of gate and result lies in that of q until q is made, and dk and dv take the places of k and v.
So the last four places are what dz is a product of, and the gradients of four weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchops import _attention_triton as attention
from torchops import _attention_update_kernels as kernels
from torchops import _attention_update_panels as panels
from torchops import _attention_update_triton as steps
from torchops._attention_update_fused import (
    Places,
    aligned,
    budget,
    kernel_for,
    kernel_of,
    launch_project,
    padded,
    part_of,
    scratch_for,
    triangle_bias,
)
from torchops._attention_update_panels import Weights

__all__ = ["backward"]

_CHUNKS = 33  # in which the gradients of weights are summed


class _Products:
    """Sums over panels of a[m].T @ b, (chunks, m, rows, columns) in float32."""

    def __init__(self, many: int, a: int, b: int, chunks: int, like: Tensor) -> None:
        self.sums = like.new_empty((chunks, many, a, b), dtype=torch.float32)
        sizes = {"A": a, "PADDED_A": padded(a), "B": b, "PADDED_B": padded(b)}
        self.kernels = [kernel_of("products", 0, 0, **sizes, ADDS=adds) for adds in (False, True)]
        self.filled = False

    def add(self, a: Tensor, a_at: tuple[int, ...], step: int, b: Tensor) -> None:
        chunks, many = self.sums.shape[:2]
        batch, outer, inner = b.shape[:3]
        kernel = self.kernels[self.filled]
        count = outer * inner
        share = -(-count // (kernel.block * chunks))
        kernel.launch(
            (many, 1, chunks), a, b, self.sums, *a_at, *Places(b).strides, step // kernels.UNIT, batch, inner, count,
            share,
        )  # fmt: skip
        self.filled = True


def backward(
    grad: Tensor,
    x: Tensor,
    mask: Tensor | None,
    w: Weights,
    ending: bool,
    o: Tensor,
    logsumexp: Tensor,
    wanted: dict[str, bool],
    sparing: bool = False,
) -> dict[str, Tensor]:
    """As :func:`_attention_update_panels.backward`, where all gradients are wanted, or all but those of parameters
    that are None."""
    if not aligned(grad):
        grad = grad.contiguous()
    batch, n, _, c = x.shape
    width, heads, dtype = w.q.shape[0], w.heads, w.q.dtype
    assert w.gate is not None
    packed = torch.cat((w.q, w.k, w.v, w.gate))
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dz = dx if dx.dtype == dtype else dx.view(dtype)[..., :c]  # in the same rows, of which it takes half
    x_places, o_places, grad_places, dz_places = map(Places, (x, o, grad, dz))
    gate, project, to_z = kernel_for(w, "gate_gradient"), kernel_for(w, "project", KEEPS_Z=True), kernel_for(w, "to_z")
    of_inputs, of_out = _Products(4, width, c, _CHUNKS, w.q), _Products(1, c, width, 4 * _CHUNKS, w.q)
    of_gate_bias: list[Tensor] = []
    of_norm: list[Tensor] = []
    row_bytes = n * ((c + 6 * width) * w.q.element_size() + 8 * heads)
    for b, part in panels.batches(panels.panels(batch, n, row_bytes, budget(x, w.q.element_size(), True, sparing))):
        size = b.stop - b.start
        bias = triangle_bias(x, b, w, ending)
        added = None if mask is None else steps.prepared_mask(mask[b], bias)
        scratch, z_scratch, d_scratch = (
            scratch_for(b, part[0], n, features, ending, w.q) for features in (5 * width, c, width)
        )
        bias_of_keys, dbias, adds = attention.of_keys(bias), None, False
        for rows in part:
            places, z, d = (part_of(t, rows, ending) for t in (scratch, z_scratch, d_scratch))
            strides, inner, count = Places(places).strides, places.shape[2], n * (rows.stop - rows.start)
            x_at = x_places.at(b, rows, ending)
            gate.launch(
                (gate.blocks(count, x.device), size, 1),
                grad, o, x, w.norm_weight, w.norm_bias, w.gate, w.gate_bias, w.out, d, places, places[..., 4 * width :],
                *grad_places.at(b, rows, ending), *o_places.at(b, rows, ending), *x_at, *Places(d).strides, *strides,
                inner, count, w.eps,
            )  # fmt: skip
            if wanted["gate_bias"]:
                of_gate_bias.append(places[..., 4 * width :].sum((0, 1, 2), dtype=torch.float32))
            of_out.add(grad, grad_places.at(b, rows, ending), 0, places)
            launch_project(project, x, x_at, w, places, 2 * width, z)
            q, dq, k, v, _ = (panels.heads(t, heads, ending) for t in places.split(width, -1))
            if dbias is None:
                dbias = attention.new_dbias(q, bias, wide=True)
            attention.attend_backward(
                panels.heads(d, heads, ending), q, k, v, bias, None if added is None else added[:, rows],
                panels.heads(panels.slab(o, b, rows, ending), heads, ending), logsumexp[b, rows], w.scale, (dq, k, v),
                dbias, adds, bias_of_keys,
            )  # fmt: skip
            adds = True
            d_inputs = places[..., width:]
            of_inputs.add(d_inputs, (0, *strides), width, z)
            to_z.launch(
                (to_z.blocks(count, x.device), size, 1),
                d_inputs, packed, dz, *strides, *dz_places.at(b, rows, ending), width // kernels.UNIT, inner, count,
            )  # fmt: skip
        del scratch, z_scratch, d_scratch
        assert dbias is not None
        of_norm.append(_through_norm(attention.sum_of_dbias(dbias), x, w, b, ending, dz, dx))
    inputs, sums = of_inputs.sums.sum(0), sum(of_norm)
    assert isinstance(sums, Tensor)
    made = dict(zip(("q", "k", "v", "gate"), inputs, strict=True)) | {"out": of_out.sums.sum(0)[0]}
    made |= {"norm_weight": sums[0], "norm_bias": sums[1], "bias_weight": sums[2:]}
    if wanted["gate_bias"]:
        made["gate_bias"] = torch.stack(of_gate_bias).sum(0)
    if wanted["out_bias"]:
        made["out_bias"] = grad.sum((0, 1, 2), dtype=torch.float32)
    rounded = {name: t.new_empty(t.shape, dtype=dtype) for name, t in made.items() if wanted[name]}
    torch._foreach_copy_(list(rounded.values()), [made[name] for name in rounded])  # one launch
    return rounded | {"x": dx}


def _through_norm(dbias: Tensor, x: Tensor, w: Weights, b: slice, ending: bool, dz: Tensor, dx: Tensor) -> Tensor:
    """Makes dx of dz and the gradient of the bias, and the gradients of what the norm and the bias have."""
    n, c = x.shape[-2:]
    count = n * n
    kernel = kernel_for(w, "norm_gradient", HEADS=w.heads, PADDED_H=padded(w.heads))
    programs = kernel.blocks(count, x.device)
    sums = dbias.new_empty((b.stop - b.start, programs, 2 + w.heads, c), dtype=torch.float32)
    places = [number for t in (x, dz, dx) for number in Places(t).at(b, slice(0, n), False)]
    kernel.launch(
        (programs, b.stop - b.start, 1),
        dz, dbias, x, w.norm_weight, w.norm_bias, w.bias_weight, dx, sums,
        *places, *((1, n) if ending else (n, 1)), n, count, w.eps,
    )  # fmt: skip
    return sums.sum((0, 1))

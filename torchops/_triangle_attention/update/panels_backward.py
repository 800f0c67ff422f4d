"""Gradients of the triangle attention update in panels."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchops._triangle_attention.attention.arguments import Inputs as Attention
from torchops._triangle_attention.attention.arguments import Saved, accumulator
from torchops._triangle_attention.update.arguments import TENSORS, Inputs, Kept, Weights, norm_parameters
from torchops._triangle_attention.update.panels import Steps, batches, budget, heads, panels, rows_and_keys, slab

__all__ = ["GRADIENTS", "Shared", "backward"]

GRADIENTS = ("x", *TENSORS)


class Shared(NamedTuple):
    """What the gradient of some of the rows needs from the ranks that have the others."""

    bias: Callable[[], Tensor]
    """Returns the bias of all rows, as `steps.whole_bias` does."""
    summed: Callable[[Tensor], Tensor]
    """From this rank's gradient of the bias, (batch, heads, N, N), to the sum over all ranks, for j in this rank's
    rows."""


class _Sums(dict[str, Tensor]):
    """Gradients of parameters, summed over panels; in at least float32 if there are several."""

    def add(self, name: str, part: Tensor) -> None:
        self[name] = part if name not in self else self[name].to(accumulator(part.dtype)) + part


def backward(
    grad: Tensor,
    inputs: Inputs,
    kept: Kept,
    output_mask: dict[str, bool],
    steps: Steps,
    shared: Shared | None = None,
) -> dict[str, Tensor]:
    """The requested gradients of x (contiguous; plus `grad` with `add_residual`) and of the parameters, by the names in
    `GRADIENTS`.

    Two passes over x. Panels of the attention give everything but the gradient through the bias, which is a sum over
    all rows; they leave a part of dz. Then rows of x get the rest of dz and go through the layer norm. With `shared`, x
    and all tensors with its rows have only some of them, as in `forward`, and the sums are over these rows.
    """
    x, mask, w, ending, add_residual = inputs
    o, logsumexp = kept
    sums = _Sums()
    to_z = any(output_mask[name] for name in GRADIENTS[:3])
    to_bias = to_z or output_mask["bias_weight"]
    to_q, to_k, to_v = (to_z or output_mask[name] for name in "qkv")
    to_o = to_bias or to_q or to_k or to_v
    reads_z = to_o or (w.gate is not None and any(output_mask[name] for name in ("gate", "gate_bias", "out")))
    batch, *_, c = x.shape
    own, n = rows_and_keys(x, ending)
    width, dtype = w.q.shape[0], w.q.dtype
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if output_mask["x"] else None
    dz = torch.empty(x.shape, dtype=dtype, device=x.device) if to_z and (dx is None or dx.dtype != dtype) else dx
    row_bytes = n * ((4 * c + 8 * width) * w.q.element_size() + 8 * w.heads)
    wide = accumulator(dtype)
    residual = grad if add_residual else None
    whole_bias = None if shared is None or not to_o else shared.bias()
    dbias_here = None if shared is None or not to_bias else x.new_zeros((batch, w.heads, n, n), dtype=wide)
    for b, part_of_b in batches(panels(batch, own, row_bytes, budget(x, w.q.element_size(), True))):
        bias: Tensor | None = None
        if to_o:
            bias = steps.triangle_bias(x[b], w, ending) if whole_bias is None else whole_bias[b]
        dbias: Tensor | None = None
        prepared = None if mask is None or bias is None else steps.prepared_mask(mask[b], bias)
        for rows in part_of_b:
            z = steps.norm(slab(x, b, rows, ending), w) if reads_z else None
            o_rows = slab(o, b, rows, ending)
            g = slab(grad, b, rows, ending).to(dtype).reshape(-1, c)
            do, dz_rows = _through_gate(sums, g, o_rows, z, w, output_mask, to_o, to_z)
            del g
            if do is None or z is None:
                continue
            z = z.reshape(-1, c)
            qkv = F.linear(z, w.packed).view(*o_rows.shape[:-1], -1)
            d_packed = torch.empty_like(qkv)
            q, k, v, dq, dk, dv = (
                heads(t, w.heads, ending) for t in (*qkv.split(width, -1), *d_packed.split(width, -1))
            )
            assert bias is not None
            row_mask = None if prepared is None else prepared[:, rows]
            part = steps.attend_backward(
                heads(do, w.heads, ending), Attention(q, k, v, bias, row_mask, w.scale),
                Saved(heads(o_rows, w.heads, ending), logsumexp[b, rows]), (to_q, to_k, to_v, to_bias), (dq, dk, dv),
            )  # fmt: skip
            del do, qkv, q, k, v, dq, dk, dv
            if part is not None:
                dbias = part if dbias is None else dbias.to(wide).add_(part)
            d_rows = d_packed.view(-1, 3 * width)
            _weights_of_products(sums, d_rows, z, w, output_mask)
            del z
            if dz is not None:
                made = d_rows @ w.packed if dz_rows is None else dz_rows.view(-1, c).addmm_(d_rows, w.packed)
                place = slab(dz, b, rows, ending)
                place.copy_(made.view(place.shape))
        if dbias is None:
            continue
        if dbias_here is not None:
            dbias_here[b] = dbias
            continue
        dz_b, dx_b, residual_b = (t if t is None else t[b] for t in (dz, dx, residual))
        _through_norm(sums, dbias.to(dtype), x[b], dz_b, dx_b, residual_b, w, ending, output_mask)
    if shared is not None and dbias_here is not None:
        _through_norm(sums, shared.summed(dbias_here).to(dtype), x, dz, dx, residual, w, ending, output_mask)
    made_sums = {name: t.to(getattr(w, name).dtype) for name, t in sums.items()}
    return made_sums if dx is None else made_sums | {"x": dx}


def _through_gate(
    sums: _Sums,
    g: Tensor,
    o: Tensor,
    z: Tensor | None,
    w: Weights,
    output_mask: dict[str, bool],
    to_o: bool,
    to_z: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """The gradient of o, if requested, and the gradient of z through the gate."""
    if output_mask["out"]:
        gated = o if w.gate is None or z is None else torch.ops.myops.gate(o, z, w.gate, w.gate_bias)
        sums.add("out", g.T @ gated.reshape(len(g), -1))
        del gated
    if output_mask["out_bias"]:
        sums.add("out_bias", g.sum(0))
    if not (to_o or output_mask["gate"] or output_mask["gate_bias"]):
        return None, None
    do = (g @ w.out).view(o.shape)
    if w.gate is None:
        return do, None
    gate_mask = [to_o, to_z, output_mask["gate"], output_mask["gate_bias"]]
    do, dz, d_gate, d_gate_bias = torch.ops.myops._gate_backward(do, o, z, w.gate, w.gate_bias, gate_mask)
    if output_mask["gate"]:
        sums.add("gate", d_gate)
    if output_mask["gate_bias"]:
        sums.add("gate_bias", d_gate_bias)
    return do if to_o else None, dz if to_z else None


def _weights_of_products(sums: _Sums, d_rows: Tensor, z: Tensor, w: Weights, output_mask: dict[str, bool]) -> None:
    width = w.q.shape[0]
    if all(output_mask[name] for name in "qkv"):
        # Copies: what an operator returns shares no memory.
        parts: tuple[Tensor | None, ...] = tuple(part.clone() for part in (d_rows.T @ z).split(width))
    else:
        parts = tuple(
            d.T @ z if output_mask[name] else None for name, d in zip("qkv", d_rows.split(width, -1), strict=True)
        )
    for name, part in zip("qkv", parts, strict=True):
        if part is not None:
            sums.add(name, part)


def _through_norm(
    sums: _Sums,
    dbias: Tensor,
    x: Tensor,
    dz: Tensor | None,
    dx: Tensor | None,
    residual: Tensor | None,
    w: Weights,
    ending: bool,
    output_mask: dict[str, bool],
) -> None:
    """Adds the part of dz that comes through the bias, then computes the gradients of the layer norm; dx plus
    `residual`."""
    batch, outer, inner, c = x.shape
    weight, bias = norm_parameters(x, w.norm_weight, w.norm_bias)
    row_bytes = inner * c * (3 * x.element_size() + 2 * w.q.element_size())
    for b, rows in panels(batch, outer, row_bytes, budget(x, w.q.element_size(), True)):
        z, mean, rstd = torch.ops.myops._layer_norm(x[b, rows], (c,), weight, bias, w.eps)
        # (heads, positions in the order of x)
        d = (dbias[b, :, :, rows].permute(1, 0, 3, 2) if ending else dbias[b, :, rows].transpose(0, 1)).flatten(1)
        if output_mask["bias_weight"]:
            sums.add("bias_weight", d @ z.view(-1, c).to(d.dtype))
        del z
        if dz is None:
            continue
        d_rows = torch.addmm(dz[b, rows].reshape(-1, c), d.T, w.bias_weight).view(dz[b, rows].shape).to(x.dtype)
        norm_mask = [dx is not None, output_mask["norm_weight"], output_mask["norm_bias"]]
        made, d_weight, d_bias = torch.ops.myops._layer_norm_backward(
            d_rows, x[b, rows], (c,), mean, rstd, weight, norm_mask
        )
        if dx is not None:
            dx[b, rows] = made if residual is None else made.add_(residual[b, rows])
        if output_mask["norm_weight"]:
            sums.add("norm_weight", d_weight)
        if output_mask["norm_bias"]:
            sums.add("norm_bias", d_bias)

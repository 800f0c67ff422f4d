"""The triangle attention update in panels of rows, or of columns for the ending node.

A panel has as many of them as keep its z, q, k, v and attention result within a budget, so none of these ever exists
for all pairs. All tensors stay in the memory order of ``x``: for the ending node, the attention gets transposed views,
and only the bias is really transposed, which is ``heads / c`` of a pair tensor.

The steps of a panel are functions of a module: ATen operators here, kernels in `triton_steps.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cached_property
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchops._triangle_attention.attention import aten as _attention_panels
from torchops._triangle_attention.update.arguments import TENSORS, AttentionWeights, norm_parameters

__all__ = [
    *("Shared", "Weights", "add", "attend", "attend_backward", "backward", "batches", "forward", "heads", "norm"),
    *("panels", "prepared_mask", "rows_and_keys", "slab", "triangle_bias", "whole_bias"),
]


class Weights(AttentionWeights):
    """The weights, on x's device, and what is computed from them once per call."""

    @cached_property
    def packed(self) -> Tensor:
        return torch.cat((self.q, self.k, self.v))

    @property
    def scale(self) -> float:
        return float(max(self.q.shape[0] // self.heads, 1)) ** -0.5


# --- steps, in operators ---------------------------------------------------------------------------------------------


def norm(x: Tensor, w: Weights) -> Tensor:
    """z, contiguous and of the weights' dtype."""
    parameters = norm_parameters(x, w.norm_weight, w.norm_bias)
    return torch.ops.myops.layer_norm(x, x.shape[-1:], *parameters, w.eps).to(w.q.dtype)


def triangle_bias(x: Tensor, w: Weights, ending: bool) -> Tensor:
    """``(batch, heads, j, k)``. A part of x gives part of the rows j."""
    batch, outer, inner, c = x.shape
    bias = w.q.new_empty((batch, w.heads, *((inner, outer) if ending else (outer, inner))))
    for b, rows in panels(batch, outer, inner * c * (x.element_size() + bias.element_size()), _CPU_BYTES):
        made = F.linear(norm(x[b, rows], w), w.bias_weight)
        if ending:
            bias[b, :, :, rows] = made.permute(0, 3, 2, 1)
        else:
            bias[b, :, rows] = made.permute(0, 3, 1, 2)
    return bias


def whole_bias(bias: Tensor) -> Tensor:
    """Prepares a bias ``(batch, heads, j, k)`` for `attend`."""
    return bias.contiguous()


def prepared_mask(mask: Tensor, bias: Tensor) -> Tensor:
    """Prepares a mask ``(batch, i, k)`` of any dtype for `attend`. The result can be sliced by rows."""
    return (mask if mask.dtype == torch.bool else mask != 0)[:, :, None, None]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None,
    scale: float,
    out: Tensor | None = None,
    logsumexp: Tensor | None = None,
) -> Tensor:
    """The result of the attention, written to `out` if given."""
    made, numbers = _attention_panels.forward(q, k, v, bias.unsqueeze(1), mask, scale)
    if logsumexp is not None:
        logsumexp.copy_(numbers)
    return made if out is None else out.copy_(made)


def add(target: Tensor, x: Tensor | None, o: Tensor, z: Tensor, w: Weights) -> None:
    """Writes the product of the gated ``o`` with ``w.out``, plus ``x``, to ``target``, which may be ``x``. May
    overwrite ``o``."""
    if w.gate is not None:
        o = torch.ops.myops.gate(o, z, w.gate, w.gate_bias)
    update = F.linear(o, w.out, w.out_bias)
    target.copy_(update) if x is None else torch.add(x, update, out=target)


def attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    scale: float,
    wanted: tuple[bool, bool, bool, bool],
    into: tuple[Tensor, Tensor, Tensor],
) -> Tensor | None:
    """Writes the requested gradients of q, k and v to `into`, and returns that of the bias."""
    arguments = grad, q, k, v, bias.unsqueeze(1), mask, out, logsumexp, scale, wanted
    *of_qkv, of_bias = _attention_panels.backward(*arguments)
    for target, made in zip(into, of_qkv, strict=True):
        if made is not None:
            target.copy_(made)
    return None if of_bias is None else of_bias.squeeze(1)


# --- panels ----------------------------------------------------------------------------------------------------------

# On the CPU, what stays in the cache. On a GPU, inference may use the memory of one pair tensor, including the bias and
# the sums, or 128 MiB if pair tensors are small: few panels then, because each one costs host time.
_CPU_BYTES = 8 << 20
_CUDA_BYTES = 112 << 20
_CUDA_TRAINING_BYTES = 256 << 20


def _budget(x: Tensor, itemsize: int, training: bool) -> int:
    if x.device.type == "cpu":
        return _CPU_BYTES
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


def forward(
    x: Tensor,
    mask: Tensor | None,
    w: Weights,
    ending: bool,
    target: Tensor,
    adds: bool,
    kept: tuple[Tensor, Tensor] | None,
    steps: ModuleType | Any,
    whole_bias: Tensor | None = None,
) -> None:
    """Writes the update of x, (batch, N, N, c), to `target`; with `adds`, x plus the update, and then `target` may be
    x. Writes to `kept` the result of the attention before its gate, (batch, N, N, heads * d), and the logarithms of the
    sums, (batch, i, heads, j).

    The mask is (batch, i, k), in the order of the attention. If `whole_bias` is given, it is the bias of all rows, as
    `steps.whole_bias` returns it, while x, `target` and `kept` have only some of the rows i; for the ending node, some
    of the columns.
    """
    batch, *_, c = x.shape
    own, n = rows_and_keys(x, ending)
    width, itemsize = w.q.shape[0], w.q.element_size()
    row_bytes = n * ((c + 4 * width) * itemsize + 4 * w.heads)
    for b, part_of_b in batches(panels(batch, own, row_bytes, _budget(x, itemsize, False))):
        bias = steps.triangle_bias(x[b], w, ending) if whole_bias is None else whole_bias[b]
        prepared = None if mask is None else steps.prepared_mask(mask[b], bias)
        for rows in part_of_b:
            x_rows = slab(x, b, rows, ending)
            z = steps.norm(x_rows, w)
            qkv = F.linear(z, w.packed).split(width, -1)
            q, k, v = (heads(t, w.heads, ending) for t in qkv)
            row_mask = None if prepared is None else prepared[:, rows]
            if kept is None:
                o = steps.attend(q, k, v, bias, row_mask, w.scale)
                o = (o.permute(0, 3, 1, 2, 4) if ending else o.transpose(-3, -2)).flatten(-2)
            else:
                o = slab(kept[0], b, rows, ending)
                steps.attend(q, k, v, bias, row_mask, w.scale, heads(o, w.heads, ending), kept[1][b, rows])
            del qkv, q, k, v
            steps.add(slab(target, b, rows, ending), x_rows if adds else None, o, z, w)
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


# --- gradients -------------------------------------------------------------------------------------------------------

WANTED = ("x", *TENSORS)


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
        self[name] = part if name not in self else self[name].to(_attention_panels.accumulator(part.dtype)) + part


def backward(
    grad: Tensor,
    x: Tensor,
    mask: Tensor | None,
    w: Weights,
    ending: bool,
    o: Tensor,
    logsumexp: Tensor,
    wanted: dict[str, bool],
    adds: bool,
    steps: ModuleType | Any,
    shared: Shared | None = None,
) -> dict[str, Tensor]:
    """The requested gradients of x (contiguous; plus `grad` with `adds`) and of the parameters, by the names in
    `WANTED`.

    Two passes over x. Panels of the attention give everything but the gradient through the bias, which is a sum over
    all rows; they leave a part of dz. Then rows of x get the rest of dz and go through the layer norm. With `shared`, x
    and all tensors with its rows have only some of them, as in `forward`, and the sums are over these rows.
    """
    sums = _Sums()
    to_z = any(wanted[name] for name in WANTED[:3])
    to_bias = to_z or wanted["bias_weight"]
    to_q, to_k, to_v = (to_z or wanted[name] for name in "qkv")
    to_o = to_bias or to_q or to_k or to_v
    reads_z = to_o or (w.gate is not None and any(wanted[name] for name in ("gate", "gate_bias", "out")))
    batch, *_, c = x.shape
    own, n = rows_and_keys(x, ending)
    width, dtype = w.q.shape[0], w.q.dtype
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if wanted["x"] else None
    dz = torch.empty(x.shape, dtype=dtype, device=x.device) if to_z and (dx is None or dx.dtype != dtype) else dx
    row_bytes = n * ((4 * c + 8 * width) * w.q.element_size() + 8 * w.heads)
    wide = _attention_panels.accumulator(dtype)
    residual = grad if adds else None
    whole_bias = None if shared is None or not to_o else shared.bias()
    dbias_here = None if shared is None or not to_bias else x.new_zeros((batch, w.heads, n, n), dtype=wide)
    for b, part_of_b in batches(panels(batch, own, row_bytes, _budget(x, w.q.element_size(), True))):
        bias: Tensor | None = None
        if to_o:
            bias = steps.triangle_bias(x[b], w, ending) if whole_bias is None else whole_bias[b]
        dbias: Tensor | None = None
        prepared = None if mask is None or bias is None else steps.prepared_mask(mask[b], bias)
        for rows in part_of_b:
            z = steps.norm(slab(x, b, rows, ending), w) if reads_z else None
            o_rows = slab(o, b, rows, ending)
            g = slab(grad, b, rows, ending).to(dtype).reshape(-1, c)
            do, dz_rows = _through_gate(sums, g, o_rows, z, w, wanted, to_o, to_z)
            del g
            if do is None or z is None:
                continue
            z = z.reshape(-1, c)
            qkv = F.linear(z, w.packed).view(*o_rows.shape[:-1], -1)
            d_packed = torch.empty_like(qkv)
            q, k, v, dq, dk, dv = (
                heads(t, w.heads, ending) for t in (*qkv.split(width, -1), *d_packed.split(width, -1))
            )
            part = steps.attend_backward(
                heads(do, w.heads, ending), q, k, v, bias, None if prepared is None else prepared[:, rows],
                heads(o_rows, w.heads, ending), logsumexp[b, rows], w.scale, (to_q, to_k, to_v, to_bias), (dq, dk, dv),
            )  # fmt: skip
            del do, qkv, q, k, v, dq, dk, dv
            if part is not None:
                dbias = part if dbias is None else dbias.to(wide).add_(part)
            d_rows = d_packed.view(-1, 3 * width)
            _weights_of_products(sums, d_rows, z, w, wanted)
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
        _through_norm(sums, dbias.to(dtype), x[b], dz_b, dx_b, residual_b, w, ending, wanted)
    if shared is not None and dbias_here is not None:
        _through_norm(sums, shared.summed(dbias_here).to(dtype), x, dz, dx, residual, w, ending, wanted)
    made_sums = {name: t.to(getattr(w, name).dtype) for name, t in sums.items()}
    return made_sums if dx is None else made_sums | {"x": dx}


def _through_gate(
    sums: _Sums,
    g: Tensor,
    o: Tensor,
    z: Tensor | None,
    w: Weights,
    wanted: dict[str, bool],
    to_o: bool,
    to_z: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """The gradient of o, if requested, and the gradient of z through the gate."""
    if wanted["out"]:
        gated = o if w.gate is None or z is None else torch.ops.myops.gate(o, z, w.gate, w.gate_bias)
        sums.add("out", g.T @ gated.reshape(len(g), -1))
        del gated
    if wanted["out_bias"]:
        sums.add("out_bias", g.sum(0))
    if not (to_o or wanted["gate"] or wanted["gate_bias"]):
        return None, None
    do = (g @ w.out).view(o.shape)
    if w.gate is None:
        return do, None
    asked = [to_o, to_z, wanted["gate"], wanted["gate_bias"]]
    do, dz, d_gate, d_gate_bias = torch.ops.myops._gate_backward(do, o, z, w.gate, w.gate_bias, asked)
    if wanted["gate"]:
        sums.add("gate", d_gate)
    if wanted["gate_bias"]:
        sums.add("gate_bias", d_gate_bias)
    return do if to_o else None, dz if to_z else None


def _weights_of_products(sums: _Sums, d_rows: Tensor, z: Tensor, w: Weights, wanted: dict[str, bool]) -> None:
    width = w.q.shape[0]
    if all(wanted[name] for name in "qkv"):
        parts = (d_rows.T @ z).split(width)
    else:
        parts = tuple(d.T @ z if wanted[name] else None for name, d in zip("qkv", d_rows.split(width, -1), strict=True))
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
    wanted: dict[str, bool],
) -> None:
    """Adds the part of dz that comes through the bias, then computes the gradients of the layer norm; dx plus
    `residual`."""
    batch, outer, inner, c = x.shape
    weight, bias = norm_parameters(x, w.norm_weight, w.norm_bias)
    row_bytes = inner * c * (3 * x.element_size() + 2 * w.q.element_size())
    for b, rows in panels(batch, outer, row_bytes, _budget(x, w.q.element_size(), True)):
        z, mean, rstd = torch.ops.myops._layer_norm(x[b, rows], (c,), weight, bias, w.eps)
        # (heads, positions in the order of x)
        d = (dbias[b, :, :, rows].permute(1, 0, 3, 2) if ending else dbias[b, :, rows].transpose(0, 1)).flatten(1)
        if wanted["bias_weight"]:
            sums.add("bias_weight", d @ z.view(-1, c).to(d.dtype))
        del z
        if dz is None:
            continue
        d_rows = torch.addmm(dz[b, rows].reshape(-1, c), d.T, w.bias_weight).view(dz[b, rows].shape).to(x.dtype)
        asked = [dx is not None, wanted["norm_weight"], wanted["norm_bias"]]
        made, d_weight, d_bias = torch.ops.myops._layer_norm_backward(
            d_rows, x[b, rows], (c,), mean, rstd, weight, asked
        )
        if dx is not None:
            dx[b, rows] = made if residual is None else made.add_(residual[b, rows])
        if wanted["norm_weight"]:
            sums.add("norm_weight", d_weight)
        if wanted["norm_bias"]:
            sums.add("norm_bias", d_bias)

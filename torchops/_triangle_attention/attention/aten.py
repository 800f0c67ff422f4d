"""Triangle attention in ATen operators, panel by panel of rows: the fallback where we have no kernel.

The scores of all rows are R * Q * K numbers per head. A panel has as many rows as keep the scores, or the bias plus
the mask, within `_PANEL_BYTES`, but at least one. Sums over rows add the panels in order.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from torchops._triangle_attention.attention.arguments import Inputs, OutputMask, Saved, accumulator

__all__ = ["backward", "features_adjacent", "forward", "why_not", "written_out", "written_out_gradients"]

_PANEL_BYTES = 8 << 20

_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def why_not(inputs: Inputs) -> str | None:
    return None


def _kept(mask: Tensor | None) -> Tensor | None:
    """The keys kept for each row, ``(batch, R, K)``. If the mask keeps none, all are kept."""
    if mask is None:
        return None
    mask = mask[:, :, 0, 0]
    return mask | ~mask.any(-1, keepdim=True)


def forward(inputs: Inputs) -> Saved:
    q, k, v, bias, mask, scale = inputs
    keep = _kept(mask)
    batch, count, heads, queries, d = q.shape
    dtype = accumulator(q.dtype)
    out, lse = torch.empty_like(q), q.new_empty(inputs.sizes, dtype=dtype)
    whole = q.device.type == "cpu" and keep is None  # the bias is read without a copy
    row_bytes = heads * queries * (d * q.element_size() if whole else k.shape[3] * dtype.itemsize)
    for b, rows in _panels(batch, count, row_bytes):
        kept = None if keep is None else keep[b, rows]
        panel = q[b, rows], k[b, rows], v[b, rows]
        if q.device.type == "cpu":
            added = bias[b] if kept is None else bias[b].masked_fill(~kept[:, None, None], float("-inf"))
            panel_out, panel_lse = _on_cpu(
                *map(_with_rows, panel),
                0.0,
                False,
                attn_mask=_with_rows(added).expand(len(panel[0]), -1, -1, -1),
                scale=scale,
            )
            # The operator computes both as (rows, Q, H) but returns views as (rows, H, Q).
            lse[b, rows] = panel_lse
            if (1, *panel_out.shape) == q.shape and panel_out.stride() == out.stride()[1:]:
                # The same memory, but no view, which autograd would not let callers overwrite.
                out.set_(panel_out.untyped_storage(), panel_out.storage_offset(), out.shape, out.stride())
            else:
                out[b, rows] = panel_out
            continue
        s = _scores(panel[0], panel[1], bias[b], kept, scale)
        torch.logsumexp(s, -1, out=lse[b, rows])
        p = s.sub_(lse[b, rows].unsqueeze(-1)).exp_()
        out[b, rows] = (p @ panel[2].to(dtype)).to(q.dtype)
    return Saved(out, lse)


def backward(grad: Tensor, inputs: Inputs, saved: Saved, output_mask: OutputMask) -> tuple[Tensor | None, ...]:
    (q, k, v, bias, mask, scale), (out, lse) = inputs, saved
    keep = _kept(mask)
    batch, count, heads, queries, _ = q.shape
    dtype = accumulator(q.dtype)
    dq, dk, dv = (torch.empty_like(t) if want else None for t, want in zip((q, k, v), output_mask[:3], strict=True))
    dbias = bias.new_zeros(bias.shape, dtype=dtype) if output_mask[3] else None
    for b, rows in _panels(batch, count, 2 * heads * queries * k.shape[3] * dtype.itemsize):
        g, q_rows, k_rows, v_rows, o = (t[b, rows].to(dtype) for t in (grad, q, k, v, out))
        p = _scores(q_rows, k_rows, bias[b], None if keep is None else keep[b, rows], scale)
        p = p.sub_(lse[b, rows].unsqueeze(-1)).exp_()
        if dv is not None:
            dv[b, rows] = (p.mT @ g).to(q.dtype)
        if dq is None and dk is None and dbias is None:
            continue
        ds = (g @ v_rows.mT).sub_((g * o).sum(-1, keepdim=True)).mul_(p)
        if dbias is not None:
            dbias[b, 0] += ds.sum(0)
        if dq is not None:
            dq[b, rows] = (ds @ k_rows).mul_(scale).to(q.dtype)
        if dk is not None:
            dk[b, rows] = (ds.mT @ q_rows).mul_(scale).to(q.dtype)
    return dq, dk, dv, None if dbias is None else dbias.to(bias.dtype)


def _panels(batch: int, count: int, row_bytes: int) -> Iterator[tuple[int, slice]]:
    size = max(1, _PANEL_BYTES // row_bytes)
    for b in range(batch):
        for first in range(0, count, size):
            yield b, slice(first, min(first + size, count))


def features_adjacent(t: Tensor) -> bool:
    """Whether features are adjacent in memory, and in ``torch.empty_like(t)``, too, where kernels write theirs. That
    has dimensions in the order of their strides, which strides of 0, or 1 in another dimension, make ambiguous."""
    if t.stride(-1) != 1:
        return False
    others = zip(t.stride()[:-1], t.shape[:-1], strict=True)
    return all(stride >= t.shape[-1] > 1 for stride, _ in others) or torch.empty_like(t, device="meta").stride(-1) == 1


def _with_rows(t: Tensor) -> Tensor:
    """Adjacent elements in rows that don't overlap: from others, ATen's kernel computes values that mean nothing."""
    apart = t.shape[-2] == 1 or t.stride(-2) == 0 or t.stride(-2) >= t.shape[-1]
    return t if apart and features_adjacent(t) else t.contiguous()


def _scores(q: Tensor, k: Tensor, bias: Tensor, keep: Tensor | None, scale: float) -> Tensor:
    """The scores of a panel, (rows, H, Q, K)."""
    dtype = accumulator(q.dtype)
    s = (q.to(dtype) @ k.to(dtype).mT).mul_(scale).add_(bias)
    return s if keep is None else s.masked_fill_(~keep[:, None, None], float("-inf"))


# --- in differentiable operators, all rows at once -------------------------------------------------------------------


def _probabilities(inputs: Inputs) -> Tensor:
    q, k, _, bias, mask, scale = inputs
    keep = _kept(mask)
    s = (q @ k.mT).to(accumulator(q.dtype)) * scale + bias
    if keep is not None:
        s = s.masked_fill(~keep[:, :, None, None], float("-inf"))
    return torch.softmax(s, -1)


def written_out(inputs: Inputs) -> Tensor:
    return _probabilities(inputs).to(inputs.q.dtype) @ inputs.v


def written_out_gradients(grad: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v, bias, _, scale = inputs
    p = _probabilities(inputs)
    dp = (grad @ v.mT).to(p.dtype)
    ds = p * (dp - (p * dp).sum(-1, keepdim=True))
    scaled = (ds * scale).to(q.dtype)
    return scaled @ k, scaled.mT @ q, p.to(q.dtype).mT @ grad, ds.sum(1, keepdim=True).to(bias.dtype)

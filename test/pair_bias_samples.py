"""Arguments for attention with pair bias, and comparisons with algorithm 24 as it is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checks import random_like
from torch import Tensor

from torchops import PairBiasWeights, attention_pair_bias
from torchops.nn import AttentionPairBias

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"))]
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}
C, HEADS, C_Z = 12, 3, 10


def reference(
    s: Tensor, z: Tensor, mask: Tensor | None, w: PairBiasWeights, keys: Tensor | None = None, *, residual: bool = False
) -> Tensor:
    """As it is written. The exponential of -1000 is 0 in float64, and a row without keys is what it is without a
    mask."""
    old, several = s, s.dim() == z.dim()
    k_in = s if keys is None else keys
    if w.normalize:
        s, k_in = (F.layer_norm(t, t.shape[-1:], w.norm_weight, w.norm_bias, w.eps) for t in (s, k_in))

    def heads(t: Tensor) -> Tensor:
        return t.unflatten(-1, (w.heads, -1)).transpose(-3, -2)

    q, k, v = heads(F.linear(s, w.q, w.q_bias)), heads(k_in @ w.k.T), heads(k_in @ w.v.T)
    if w.bias_weight is not None:
        z = F.layer_norm(z, z.shape[-1:], w.z_norm_weight, w.z_norm_bias, w.eps) @ w.bias_weight.T
    bias = z.movedim(-1, -3)
    scores = q @ k.mT * q.shape[-1] ** -0.5 + (bias.unsqueeze(-4) if several else bias)
    if mask is not None:
        mask = mask.unsqueeze(-2) if several and mask.dim() == s.dim() - 2 else mask
        scores = scores - 1000 * (mask == 0)[..., None, None, :]
    o = (torch.softmax(scores, -1) @ v).transpose(-3, -2).flatten(-2)
    update = (torch.sigmoid(s @ w.gate.T) * o) @ w.out.T
    return old + update if residual else update


def module_of(c_z: int | None = C_Z, head_dim: int = 4, initial_norm: bool = False, **how: Any) -> AttentionPairBias:
    module = AttentionPairBias(C, c_z, HEADS, head_dim, initial_norm=initial_norm, **how)
    for i, p in enumerate(module.parameters()):
        p.data.copy_(random_like(torch.empty(p.shape), i) * (0.5 if p.dim() == 1 else 2 * p.shape[-1] ** -0.5))
    return module


# Leading dimensions of the batch, samples, queries, keys.
SIZES: dict[str, tuple[tuple[int, ...], tuple[int, ...], int, int | None]] = {
    "tokens": ((), (), 7, None),
    "batch": ((2, 3), (), 5, None),
    "samples": ((2,), (4,), 7, None),
    "windows": ((2, 3), (), 4, 16),
    "samples of windows": ((3,), (2,), 32, 128),
    "fewer keys": ((), (3,), 9, 2),
}


def inputs(
    name: str, c_z: int | None = C_Z, dtype: torch.dtype = torch.float64, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """s, z, a mask of which one row is 0, and keys."""
    batch, samples, n, count = SIZES[name]
    k = n if count is None else count
    shapes = (*batch, *samples, n, C), (*batch, n, k, c_z or HEADS), (*batch, *samples, k), (*batch, *samples, k, C)
    s, z, mask, keys = (random_like(torch.empty(shape, dtype=torch.float64), i) for i, shape in enumerate(shapes))
    mask = (mask > -0.5).double()
    mask.view(-1, k)[0] = 0
    s, z, keys = (t.to(device, dtype) for t in (s, z, keys))
    return s, z, mask.to(device), None if count is None else keys


def with_gradients(
    function: Callable[..., Tensor],
    w: PairBiasWeights,
    s: Tensor,
    z: Tensor,
    mask: Tensor | None,
    keys: Tensor | None = None,
) -> dict[str, Tensor]:
    s, z, keys = (None if t is None else t.detach().requires_grad_() for t in (s, z, keys))  # type: ignore[assignment]
    leaves: list[Any] = [t.detach().requires_grad_() if isinstance(t, Tensor) else t for t in w]
    out = function(s, z, mask, PairBiasWeights(*leaves), keys)
    names = dict(zip(("s", "z", "keys", *w._fields), (s, z, keys, *leaves), strict=True))
    every = {name: t for name, t in names.items() if isinstance(t, Tensor)}
    grads = torch.autograd.grad(out, [*every.values()], random_like(out.detach().cpu(), 9).to(out))
    return {"result": out.detach(), **dict(zip(every, grads, strict=True))}


def in_float64(*values: Any) -> list[Any]:
    return [t.double() if isinstance(t, Tensor) and t.dtype != torch.bool else t for t in values]


def check(w: PairBiasWeights, *given: Any) -> None:
    got = with_gradients(attention_pair_bias, w, *given)
    exact = with_gradients(reference, PairBiasWeights(*in_float64(*w)), *in_float64(*given))
    assert got["result"].dtype == w.q.dtype
    assert got["result"].is_contiguous()
    assert got.keys() == exact.keys()
    for name, e in exact.items():
        # What this bias adds to the scores of a query is the same for all keys: its gradient is 0.
        size = exact["z_norm_weight" if name == "z_norm_bias" and "z_norm_weight" in exact else name].norm()
        assert got[name].shape == e.shape
        distance = ((got[name].double() - e).norm() / size.clamp_min(1e-2)).item()
        assert distance <= TOLERANCE[w.q.dtype], (name, distance)

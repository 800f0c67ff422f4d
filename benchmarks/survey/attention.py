"""What a survey draws of attention with a bias that rows share."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import torchops

from .sizes import Function, Limits, Sizes, size

__all__ = [
    "eager_pair_bias",
    "pair_bias",
    "pair_bias_tensors",
    "sample_sizes",
    "sample_tensors",
    "sdpa",
    "sizes",
    "tensors",
]


def sizes(random: Random, limits: Limits) -> Sizes | None:
    n, heads, d = size(random, 16, 700), random.choice([2, 4, 8]), random.choice([16, 32, 64])
    drawn = {"N": n, "heads": heads, "d": d}
    return drawn if limits.allow(4.0 * n**3 * heads * d, n * n * heads * d) else None


def tensors(s: Sizes, new: Callable[..., Tensor]) -> tuple[Tensor | None, ...]:
    n, heads = s["N"], s["heads"]
    return *(new(1, n, heads, n, s["d"]) for _ in range(3)), new(1, 1, heads, n, n)


def sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q[0], k[0], v[0], bias[0].expand(len(q[0]), -1, -1, -1))[None]


def sample_sizes(random: Random, limits: Limits) -> Sizes | None:
    samples, queries, keys = size(random, 1, 64), size(random, 16, 1500), size(random, 16, 1500)
    heads, d, c_z = random.choice([4, 8, 16]), random.choice([16, 24, 32, 48, 64]), random.choice([16, 64, 128])
    drawn = {"samples": samples, "Q": queries, "K": keys, "heads": heads, "d": d, "c_z": c_z}
    flops = 4.0 * samples * heads * d * (queries * keys + (queries + keys) * heads * d)
    return drawn if limits.allow(flops, samples * max(queries, keys) * heads * d, queries * keys * c_z) else None


def sample_tensors(s: Sizes, new: Callable[..., Tensor]) -> tuple[Tensor | None, ...]:
    q, k, v = (new(1, s["samples"], s["heads"], s[n], s["d"]) for n in "QKK")
    return q, k, v, new(1, 1, s["heads"], s["Q"], s["K"])


def pair_bias_tensors(s: Sizes, new: Callable[..., Tensor]) -> tuple[Tensor | None, ...]:
    c = s["heads"] * s["d"]
    q, k, v, gate, out = (new(c, c, scale=c**-0.5) for _ in range(5))
    of_z = new(s["c_z"]), new(s["c_z"]), new(s["heads"], s["c_z"], scale=s["c_z"] ** -0.5)
    inputs = new(s["samples"], s["Q"], c), new(s["Q"], s["K"], s["c_z"]), new(s["samples"], s["K"], c)
    return *inputs, q, new(c), k, v, gate, out, *of_z


def pair_bias(of: Sizes) -> Function:
    def ours(s: Tensor, z: Tensor, keys: Tensor, *w: Tensor) -> Tensor:
        parameters: list[Any] = [*w, None, None, of["heads"]]
        return torchops.attention_pair_bias(s, z, None, torchops.PairBiasWeights(*parameters), keys)

    return ours


def eager_pair_bias(of: Sizes) -> Function:
    def eager(s: Tensor, z: Tensor, keys: Tensor, *w: Tensor) -> Tensor:
        q_weight, q_bias, k_weight, v_weight, gate, out, norm_weight, norm_bias, bias_weight = w
        projections = F.linear(s, q_weight, q_bias), F.linear(keys, k_weight), F.linear(keys, v_weight)
        q, k, v = (t.unflatten(-1, (of["heads"], -1)).transpose(1, 2) for t in projections)
        bias = F.linear(F.layer_norm(z, z.shape[-1:], norm_weight, norm_bias), bias_weight).permute(2, 0, 1)
        o = sdpa(q[None], k[None], v[None], bias[None, None])[0].transpose(1, 2).flatten(2)
        return F.linear(torch.sigmoid(F.linear(s, gate)) * o, out)

    return eager

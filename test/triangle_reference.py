"""The triangle multiplicative update as papers write it, in PyTorch's own operators: what tests compare with.

Jumper et al. 2021, supplement, algorithms 11 and 12; Abramson et al. 2024, algorithms 12 and 13.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear
from transition_samples import layer_norm, normalized, promoted

PRODUCTS = {"outgoing": "...ikc,...jkc->...ijc", "incoming": "...kic,...kjc->...ijc"}


def written_out(
    norm: Callable[..., Tensor],
    x: Tensor,
    direction: str = "outgoing",
    *,
    mask: Tensor | None = None,
    norm_in_weight: Tensor | None = None,
    norm_in_bias: Tensor | None = None,
    p_in_weight: Tensor,
    p_in_bias: Tensor | None = None,
    g_in_weight: Tensor,
    g_in_bias: Tensor | None = None,
    norm_out_weight: Tensor | None = None,
    norm_out_bias: Tensor | None = None,
    p_out_weight: Tensor,
    p_out_bias: Tensor | None = None,
    g_out_weight: Tensor,
    g_out_bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Any floating dtype, float64 for a result to compare with. A float32 `x` with 16-bit weights is normalised in
    float32, and so is what has float32 parameters of a norm; what follows has the weights' dtype."""
    dtype = p_in_weight.dtype
    z = norm(*promoted(x, norm_in_weight, norm_in_bias), eps).to(dtype)
    ab = linear(z, p_in_weight, p_in_bias) * torch.sigmoid(linear(z, g_in_weight, g_in_bias))
    if mask is not None:
        ab = ab * mask.to(dtype).unsqueeze(-1)
    o = torch.einsum(PRODUCTS[direction], *ab.chunk(2, -1))
    out = linear(norm(*promoted(o, norm_out_weight, norm_out_bias), eps).to(dtype), p_out_weight, p_out_bias)
    return out * torch.sigmoid(linear(z, g_out_weight, g_out_bias))


triangle_multiplicative_update = functools.partial(written_out, layer_norm)
# For third derivatives, of which ATen's for a layer norm are wrong.
smooth_update = functools.partial(written_out, normalized)


def add_triangle_multiplicative_update_(x: Tensor, *args: object, **kwargs: object) -> Tensor:
    """What the form that overwrites `x` leaves in it, as a new tensor."""
    return x + triangle_multiplicative_update(x, *args, **kwargs)  # type: ignore[arg-type]


def add_smooth_update_(x: Tensor, *args: object, **kwargs: object) -> Tensor:
    return x + smooth_update(x, *args, **kwargs)  # type: ignore[arg-type]


def rows_weights(c: int, d: int, full: bool, dtype: torch.dtype) -> dict[str, Tensor]:
    """On a GPU, for the tests of sharded rows; `full`: with biases and layer norms."""

    def random(*shape: int) -> Tensor:
        return (torch.randn(shape, device="cuda") / (shape[-1] ** 0.5 if len(shape) == 2 else 3)).to(dtype)

    made = {"p_in_weight": random(2 * d, c), "g_in_weight": random(2 * d, c)}
    made |= {"p_out_weight": random(c, d), "g_out_weight": random(c, c)}
    if full:
        sizes = {"p_in_bias": 2 * d, "g_in_bias": 2 * d, "p_out_bias": c, "g_out_bias": c}
        sizes |= {"norm_in_bias": c, "norm_out_bias": d}
        made |= {name: random(size) for name, size in sizes.items()}
        made |= {"norm_in_weight": 1 + random(c), "norm_out_weight": 1 + random(d)}
    return made

"""Arguments of the triangle multiplicative update, and what its tests do with them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def parameters(
    c: int, d: int, bias: bool = True, norm: bool = True, dtype: torch.dtype = torch.float64, device: str = "cpu"
) -> dict[str, Tensor]:
    shapes = {"p_in_weight": (2 * d, c), "g_in_weight": (2 * d, c), "p_out_weight": (c, d), "g_out_weight": (c, c)}
    out = {name: torch.randn(*shape, dtype=torch.float64) / max(shape[1], 1) ** 0.5 for name, shape in shapes.items()}
    if bias:
        sizes = {"p_in_bias": 2 * d, "g_in_bias": 2 * d, "p_out_bias": c, "g_out_bias": c}
        out |= {name: torch.randn(size, dtype=torch.float64) for name, size in sizes.items()}
    if norm:
        sizes = {"norm_in": c, "norm_out": d}
        out |= {f"{name}_weight": torch.randn(size, dtype=torch.float64) + 1 for name, size in sizes.items()}
        out |= {f"{name}_bias": torch.randn(size, dtype=torch.float64) for name, size in sizes.items()}
    return {name: t.to(dtype).to(device) for name, t in out.items()}


# batch, N, c, d, biases, norms, mask
SHAPES: dict[str, tuple[tuple[int, ...], int, int, int, bool, bool, str | None]] = {
    "odd": ((), 5, 7, 5, True, True, "float"),
    "no_bias": ((2,), 9, 8, 16, False, False, None),
    "two_batch_dims": ((2, 3), 4, 6, 5, True, False, "bool"),
    "norm_alone": ((1,), 33, 16, 16, False, True, "float"),
    "panels": ((), 130, 64, 48, True, True, "float"),
    "aligned": ((2,), 64, 32, 32, True, True, None),
    "wide": ((2,), 72, 128, 64, True, True, "float"),
    "wide_odd": ((), 77, 72, 128, True, True, "bool"),
    "wide_plain": ((), 65, 128, 128, False, False, None),
    "many_features": ((2,), 40, 256, 192, True, True, "float"),
    "many_features_odd": ((), 65, 136, 264, False, True, "bool"),
    "many_channels": ((), 66, 64, 136, True, False, None),
    "no_pair": ((), 0, 4, 4, True, True, None),
    "no_batch": ((0,), 3, 4, 4, True, True, "float"),
    "one": ((), 1, 4, 4, True, True, "bool"),
}


def arguments(shape: str, dtype: torch.dtype, device: str) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(0)
    batch, n, c, d, bias, norm, mask = SHAPES[shape]
    given = parameters(c, d, bias, norm, dtype, device)
    if mask is not None:
        values = torch.rand(*batch, n, n, dtype=torch.float64)
        given["mask"] = (values > 0.3 if mask == "bool" else values.to(dtype)).to(device)
    return torch.randn(*batch, n, n, c, dtype=torch.float64).to(dtype).to(device), given


Leaves = tuple[Tensor, dict[str, Tensor]]


def to_leaves(x: Tensor, given: dict[str, Tensor], dtype: torch.dtype | None = None) -> Leaves:
    def leaf(t: Tensor) -> Tensor:
        if not t.is_floating_point():
            return t
        return t.detach().to(dtype or t.dtype, copy=True).requires_grad_()

    return leaf(x), {name: leaf(t) for name, t in given.items()}


def distance(got: Tensor, expected: Tensor) -> float:
    return ((got.double() - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def run(function: Any, x: Tensor, direction: str, given: dict[str, Tensor], cotangent: Tensor) -> dict[str, Tensor]:
    """The result and the gradients of all leaves."""
    out = function(x, direction, **given)
    leaves = {"x": x} | {name: t for name, t in given.items() if t.requires_grad}
    grads = torch.autograd.grad(out, list(leaves.values()), cotangent.to(out.dtype))
    return {"out": out.detach()} | dict(zip(leaves, grads, strict=True))


def small(dtype: torch.dtype = torch.float64, requires_grad: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(0)
    given = parameters(3, 2, dtype=dtype) | {"mask": torch.rand(2, 4, 4, dtype=torch.float64).to(dtype)}
    x = torch.randn(2, 4, 4, 3, dtype=torch.float64).to(dtype)
    for t in (x, *given.values()):
        t.requires_grad_(requires_grad)
    return x, given


def beneath(given: dict[str, Tensor]) -> list[Tensor | None]:
    """The parameters of the operator beneath, in its order."""

    def halves(name: str) -> list[Tensor | None]:
        weight, bias = given[f"{name}_weight"], given.get(f"{name}_bias")
        biases = (None, None) if bias is None else bias.chunk(2)
        return [t for pair in zip(weight.chunk(2), biases, strict=True) for t in pair]

    def layer(name: str) -> list[Tensor | None]:
        return [given.get(f"{name}_weight"), given.get(f"{name}_bias")]

    return [*layer("norm_in"), *halves("p_in"), *halves("g_in"), *layer("norm_out"), *layer("p_out"), *layer("g_out")]

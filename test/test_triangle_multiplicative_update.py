"""The triangle multiplicative update: values and gradients against float64, transforms, errors, memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from triangle_reference import triangle_multiplicative_update as reference

import torchops

OPS = torch.ops.myops
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


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
    "odd": ((), 5, 7, 3, True, True, "float"),
    "no_bias": ((2,), 9, 8, 16, False, False, None),
    "two_batch_dims": ((2, 3), 4, 6, 5, True, False, "bool"),
    "norm_alone": ((1,), 33, 16, 16, False, True, "float"),
    "panels": ((), 130, 64, 48, True, True, "float"),
    "aligned": ((2,), 64, 32, 32, True, True, None),
    "wide": ((2,), 72, 128, 64, True, True, "float"),
    "wide_odd": ((), 77, 72, 128, True, True, "bool"),
    "wide_plain": ((), 65, 128, 128, False, False, None),
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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients(shape: str, direction: str, dtype: torch.dtype, device: str) -> None:
    x, given = arguments(shape, dtype, device)
    cotangent = torch.randn_like(x)
    leaves, exact_leaves, aten_leaves = to_leaves(x, given), to_leaves(x, given, torch.float64), to_leaves(x, given)
    got = run(torchops.triangle_multiplicative_update, leaves[0], direction, leaves[1], cotangent)
    exact = run(reference, exact_leaves[0], direction, exact_leaves[1], cotangent)
    aten = run(reference, aten_leaves[0], direction, aten_leaves[1], cotangent)
    eps = torch.finfo(dtype).eps
    for name, expected in exact.items():
        assert got[name].dtype == dtype, name
        # In small tensors a rounding more or less shows; gradients add rounded terms in another order than ATen's.
        strict = name == "out" and x.shape[-2] >= 64
        allowed = (1.1 if strict else 2) * distance(aten[name], expected) + (0.25 if strict else 4) * eps
        assert distance(got[name], expected) <= max(allowed, 64 * eps if dtype == torch.float64 else 0), name
    in_place = x.clone()
    overwrite: Any = torchops.triangle_multiplicative_update_
    assert overwrite(in_place, direction, **given) is in_place
    assert distance(in_place, x.double() + exact["out"]) <= 2 * eps if x.numel() else True

"""gate and glu of eight-bit operands against float64 of the values that they stand for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_scaled import DEVICES, OUT, SCALES, SHAPES, arguments, linear, poison, value
from torch import Tensor

import torchops

ACTIVATIONS: dict[Any, Callable[[Tensor], Tensor]] = {"sigmoid": torch.sigmoid, "silu": torch.nn.functional.silu}

pytestmark = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def assert_exact(y: Tensor, reference: Tensor, *parts: Tensor, roundings: int = 1) -> None:
    """To `roundings` of the dtype; and to those of the sums in `parts`, by how much they can change a product."""
    assert y.shape == reference.shape
    assert y.is_contiguous()
    of_sums = 2**-11 if y.is_cuda else 2**-20
    scale = sum(((1 + p.abs()) for p in parts), torch.ones_like(reference))
    of_dtype = torch.finfo(y.dtype).eps / 2 * 1.1 * roundings
    excess = (y.double() - reference).abs() - of_dtype * reference.abs() - of_sums * scale**2
    assert excess.numel() == 0 or excess.max() <= torch.finfo(y.dtype).tiny


@pytest.mark.parametrize("dtype", OUT, ids=str)
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("shape", [*SHAPES, ((300,), 1040, 592)], ids=str)
def test_gate(device: str, shape: Any, scales: str, dtype: torch.dtype) -> None:
    for bias in (None, dtype, torch.float32):
        given, v = arguments(shape, device, scales, bias), value(shape, device, dtype)
        poison(v.shape, dtype, device)
        y = torchops.gate_scaled(v, *given)
        assert y.dtype == dtype
        assert_exact(y, v.double() * torch.sigmoid(linear(*given)), v.double())


@pytest.mark.parametrize("dtype", OUT, ids=str)
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [*SHAPES, ((300,), 1040, 592)], ids=str)
def test_glu(device: str, shape: Any, activation: Any, scales: str, dtype: torch.dtype) -> None:
    for bias in (None, dtype):
        x, w, scale_x, scale_w, b = arguments(shape, device, scales, bias)
        _, wg, _, scale_wg, bg = arguments(shape, device, scales, bias)
        z, t = linear(x, w, scale_x, scale_w, b), linear(x, wg, scale_x, scale_wg, bg)
        poison(z.shape, dtype, device)
        y = torchops.glu_scaled(x, w, wg, scale_x, scale_w, scale_wg, b, bg, activation=activation, out_dtype=dtype)
        assert y.dtype == dtype
        assert_exact(y, z * ACTIVATIONS[activation](t), z, t, roundings=2 if y.is_cuda else 1)


def test_without_a_fused_kernel(device: str) -> None:
    shape = ((3000,), 256, 272)
    x, w, scale_x, scale_w, b = arguments(shape, device)
    v = value(shape, device, torch.bfloat16)
    z = linear(x, w, scale_x, scale_w, b)
    with torchops.cuda.kernel_path("cublas"):
        assert_exact(torchops.gate_scaled(v, x, w, scale_x, scale_w, b), v.double() * torch.sigmoid(z), v.double())
        y = torchops.glu_scaled(x, w, w, scale_x, scale_w, scale_w, b, activation="silu")
    t = linear(x, w, scale_x, scale_w, None)
    assert_exact(y, z * torch.nn.functional.silu(t), z, t, roundings=2)


@pytest.mark.parametrize("layout", ["transposed", "expanded", "offset"])
def test_layouts_of_v(device: str, layout: str) -> None:
    given = arguments(((40,), 64, 48), device)
    v = value(((40,), 64, 48), device, torch.bfloat16)
    if layout == "transposed":
        v = v.t().contiguous().t()
    elif layout == "expanded":
        v = v[:1].expand(40, 48)
    else:
        v = torch.zeros(40 * 48 + 1, device=device, dtype=v.dtype)[1:].view(40, 48).copy_(v)
    before = v.clone()
    assert_exact(torchops.gate_scaled(v, *given), v.double() * torch.sigmoid(linear(*given)), v.double())
    assert torch.equal(v, before)

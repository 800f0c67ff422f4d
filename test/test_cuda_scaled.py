"""Eight-bit operands on CUDA: each tiling, with a bias of each type, and how many kernels a call is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_profiler import kernels
from test_scaled import CUDA, arguments, linear, poison
from test_scaled import assert_exact as assert_dense
from test_scaled_gates import assert_exact

import torchops

if not CUDA:
    pytest.skip("needs a GPU of compute capability 8.9 and a build with CUDA", allow_module_level=True)

# Of an H100: few tiles, many, and many of operands that the second-level cache does not hold.
SHAPES: list[Any] = [((70,), 272, 592), ((2100,), 272, 1296), ((1800,), 22336, 1504)]
BIASES = [None, torch.bfloat16, torch.float32]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("bias", BIASES, ids=str)
@pytest.mark.parametrize("scales", ["tensor", "rows"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values(shape: Any, scales: str, bias: torch.dtype | None) -> None:
    x, w, scale_x, scale_w, b = arguments(shape, "cuda", scales, bias)
    _, wg, _, scale_wg, bg = arguments(shape, "cuda", scales, bias)
    z, t = linear(x, w, scale_x, scale_w, b), linear(x, wg, scale_x, scale_wg, bg)
    v = torch.randn(z.shape, device="cuda").bfloat16()
    poison(z.shape, torch.bfloat16, "cuda")
    assert_dense(torchops.dense_scaled(x, w, scale_x, scale_w, b), torch.sigmoid(z), shape[1])
    poison(z.shape, torch.bfloat16, "cuda")
    assert_exact(torchops.gate_scaled(v, x, w, scale_x, scale_w, b), v.double() * torch.sigmoid(z), v.double())
    for other in [None] if bg is None else [bg, bg.float()]:
        poison(z.shape, torch.bfloat16, "cuda")
        y = torchops.glu_scaled(x, w, wg, scale_x, scale_w, scale_wg, b, other, activation="silu")
        assert_exact(y, z * F.silu(t), z, t, roundings=2)


@pytest.mark.skipif(torch.cuda.get_device_capability() != (9, 0), reason="needs a GPU of compute capability 9.0")
@pytest.mark.parametrize("bias", BIASES, ids=str)
def test_nothing_is_cast(bias: torch.dtype | None) -> None:
    x, w, scale_x, scale_w, b = arguments(((130,), 256, 272), "cuda", "rows", bias)
    v = torch.randn(130, 272, device="cuda").bfloat16()
    of_dense = kernels(lambda: torchops.dense_scaled(x, w, scale_x, scale_w, b))
    assert len(of_dense) == 1, of_dense
    of_gate = kernels(lambda: torchops.gate_scaled(v, x, w, scale_x, scale_w, b))
    assert len(of_gate) == 1, of_gate
    of_glu = kernels(lambda: torchops.glu_scaled(x, w, w, scale_x, scale_w, scale_w, b, b))
    assert len(of_glu) == 2, of_glu

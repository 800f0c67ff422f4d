"""Eight-bit operands on CUDA: each tiling, with a bias of each type, and how many kernels a call is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_db import OpCase
from test_profiler import kernels
from test_scaled import CUDA, arguments, assert_exact, glu, of_each

from torchops._core.devices import capability

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
@of_each
def test_values(op: OpCase, shape: Any, scales: str, bias: torch.dtype | None) -> None:
    given = arguments(op, "cuda", shape, scales, bias=bias)
    if op is not glu:
        return assert_exact(op, given)
    for bg in [None] if bias is None else [given["bg"], given["bg"].float()]:
        assert_exact(op, given | {"bg": bg, "activation": "silu"})


@pytest.mark.skipif(capability(0) != (9, 0), reason="needs a GPU of compute capability 9.0")
@pytest.mark.parametrize("bias", BIASES, ids=str)
@of_each
def test_nothing_is_cast(op: OpCase, bias: torch.dtype | None) -> None:
    given = arguments(op, "cuda", ((130,), 256, 272), bias=bias)
    launched = kernels(lambda: op.wrapper(**given))
    assert len(launched) == (2 if op is glu else 1), launched

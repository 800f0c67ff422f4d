"""Ways on CUDA for few rows or few features: products that are one product of stacked weights, and rows that are copied
and overwritten by cuBLAS."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from cuda_checks import assert_accurate, double, kernel_names, random
from product_samples import glu_reference

import torchops
from torchops._core import _build_info

if not torch.cuda.is_available() or not _build_info.cuda_version:
    pytest.skip("needs a GPU and a build with CUDA", allow_module_level=True)

FLOAT = torch.float32
HALVES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("activation", ["sigmoid", "silu"])
@pytest.mark.parametrize("biases", ["both", "value", "gate", "none"])
@pytest.mark.parametrize(("rows", "k", "n"), [(19, 751, 16), (2136, 899, 24), (300, 256, 1)])
def test_glu_of_few_features(rows: int, k: int, n: int, biases: str, activation: Literal["sigmoid", "silu"]) -> None:
    """As accurate as eager's one product of stacked weights; also of the halves of one weight, which need no copy."""
    x, both = random(rows, k, dtype=FLOAT), random(2 * n, k, dtype=FLOAT, scale=k**-0.5)
    b = random(n, dtype=FLOAT) if biases in ("both", "value") else None
    bg = random(n, dtype=FLOAT) if biases in ("both", "gate") else None
    w, wg = both[:n].clone(), both[n:].clone()
    exact = glu_reference(*double(x, w, wg, b, bg), activation=activation)
    stacked_bias = (
        None if b is None and bg is None else torch.cat([x.new_zeros(n) if t is None else t for t in (b, bg)])
    )
    value, gate = torch.nn.functional.linear(x, both, stacked_bias).chunk(2, dim=-1)
    eager = value * (torch.sigmoid(gate) if activation == "sigmoid" else torch.nn.functional.silu(gate))
    apart = torchops.glu(x, w, wg, b, bg, activation=activation)
    assert_accurate(apart, eager, exact)
    assert torch.equal(torchops.glu(x, both[:n], both[n:], b, bg, activation=activation), apart)


def test_glu_of_few_features_is_one_product() -> None:
    x, w, wg = (random(rows, 768, dtype=FLOAT) for rows in (500, 20, 20))
    names = kernel_names(lambda: torchops.glu(x, w, wg))
    assert sum("gemm" in name for name in names) == 1, names


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1024), (32, 1160), (256, 2048), (4, 17, 1024), (344, 864), (500, 512)])
def test_few_rows_of_a_large_square(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    n = shape[-1]
    base = random(*shape[:-1], n + 8, dtype=dtype)
    a, b = base[..., :n], random(n, n, dtype=dtype, scale=n**-0.5)
    before, expected = base.clone(), a.double() @ b.double()
    eager = a @ b
    assert torchops.square_matmul_(a, b) is a
    assert_accurate(a, eager, expected)
    assert torch.equal(base[..., n:], before[..., n:])

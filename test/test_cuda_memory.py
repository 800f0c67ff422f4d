"""What gate_ and add_transition_ allocate on CUDA without gradients: at most what docs/guarantees_memory.md says,
however large the tensor. Other operators are measured where their values are tested: test_cuda_rows.py and others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_checks import memory_of, random
from torch import Tensor

import torchops
from torchops._core import _build_info

if not torch.cuda.is_available() or not _build_info.cuda_version:
    pytest.skip("needs a GPU and a build with CUDA", allow_module_level=True)

MIB = 1 << 20
# More than four times the limit, in each dtype.
BYTES = 144 * MIB
LOW, WIDE = torch.bfloat16, torch.float32

paths = pytest.mark.parametrize("path", ["auto", "cublas"])


@paths
@pytest.mark.parametrize(
    ("of_inputs", "of_weights"),
    [(LOW, LOW), (torch.float16, torch.float16), (WIDE, WIDE), (torch.float64, torch.float64), (WIDE, LOW)],
    ids=["bfloat16", "float16", "float32", "float64", "mixed"],
)
@pytest.mark.parametrize("features", [(128, 128), (1024, 128), (64, 520), (67, 131)], ids=str)
def test_gate_(features: tuple[int, int], of_inputs: torch.dtype, of_weights: torch.dtype, path: Any) -> None:
    """Beside its arguments 32 MiB. Sizes that the kernels take and do not; inputs that are rounded for the product."""
    inner, out = features
    rows = BYTES // (out * of_inputs.itemsize)
    v, x = random(rows, out, dtype=of_inputs), random(rows, inner, dtype=of_inputs)
    w, b = random(out, inner, dtype=of_weights, scale=inner**-0.5), random(out, dtype=of_weights)
    with torchops.cuda.kernel_path(path):
        for bias in (None, b):
            assert memory_of(lambda bias=bias: torchops.gate_(v, x, w, bias)) <= 32 * MIB  # type: ignore[misc]
        if inner == out:
            assert memory_of(lambda: torchops.gate_(v, v, w, b)) <= 32 * MIB


def transition_weights(c: int, hidden: int, dtype: torch.dtype) -> dict[str, Any]:
    def weight(out: int, inner: int) -> Tensor:
        return random(out, inner, dtype=dtype, scale=inner**-0.5)

    return {
        "norm_weight": random(c, dtype=dtype),
        "norm_bias": random(c, dtype=dtype),
        "gate_weight": weight(hidden, c),
        "up_weight": weight(hidden, c),
        "down_weight": weight(c, hidden),
    }


@paths
@pytest.mark.parametrize("biases", [False, True], ids=["no_bias", "biases"])
@pytest.mark.parametrize("dtype", [LOW, torch.float16, WIDE], ids=["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("features", [(128, 512), (64, 256), (100, 200), (67, 131)], ids=str)
def test_transition_(features: tuple[int, int], dtype: torch.dtype, biases: bool, path: Any) -> None:
    """Beside its arguments 32 MiB; test_cuda_float32_stream.py has those of float32 with weights of 16 bits."""
    c, hidden = features
    weights = transition_weights(c, hidden, dtype)
    if biases:
        sizes = {"gate_bias": hidden, "up_bias": hidden, "down_bias": c}
        weights |= {name: random(size, dtype=dtype) for name, size in sizes.items()}
    x = random(BYTES // (c * dtype.itemsize), c, dtype=dtype)
    with torch.no_grad(), torchops.cuda.kernel_path(path):
        assert memory_of(lambda: torchops.add_transition_(x, **weights)) <= 32 * MIB

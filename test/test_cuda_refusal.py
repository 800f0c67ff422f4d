"""Kernels that a GPU refuses to launch: others stand in for them, with one warning. Pretended, for each family."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torchops._core.devices import capability

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

ATTENTION_UPDATE = """
import torch
import torchops

torch.manual_seed(0)
layer = torchops.nn.TriangleAttention(64, heads=2, head_dim=32, device="cuda")
for p in layer.parameters():
    torch.nn.init.normal_(p, std=p.shape[-1] ** -0.5)
x = torch.randn(40, 40, 64, device="cuda")
exact = [t.double() for t in (layer.double()(x.double()), layer(x.double(), residual=True))]
layer.bfloat16()
inputs = [x.bfloat16().requires_grad_(), x.bfloat16()]
updates = [layer(inputs[0]), layer(inputs[1], residual=True)]
updates[0].float().pow(2).sum().backward()
with torch.no_grad():
    updates.append(layer(inputs[1].clone(), inplace=True))
for got, want in zip(updates, (*exact, exact[1]), strict=True):
    assert (got.double() - want).norm() < 0.02 * want.norm(), (got, want)
assert all(t.grad.isfinite().all() for t in (inputs[0], *layer.parameters()))
"""


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "always", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        cwd=Path(__file__).parent,
    )


# Some kernels for 8.0 run on every later GPU; all of them, if it is taken for one.
@pytest.mark.parametrize(
    ("family", "taken_for"), [("sm90", "9.0"), ("sm80", "8.0"), ("triton", "9.0"), ("sm90,sm80,triton", "9.0")]
)
def test_cuda_other_kernels_are_right(family: str, taken_for: str) -> None:
    if "sm90" in family and capability(0) != (9, 0):
        pytest.skip("needs compute capability 9.0")
    done = run("-m", "torchops", "--check", TORCHOPS_PRETEND_REFUSED=family, TORCHOPS_PRETEND_CAPABILITY=taken_for)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count("Please report it") == family.count(",") + 1, done.stderr


@pytest.mark.parametrize("family", ["triton", "sm90,sm80,triton"])
def test_cuda_other_kernels_of_the_attention_update(family: str) -> None:
    done = run("-c", ATTENTION_UPDATE, TORCHOPS_PRETEND_REFUSED=family)
    assert done.returncode == 0, done.stderr
    assert "Please report it" in done.stderr

"""The update by triangle attention: how much memory it takes, and its kernels in Triton."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_memory import growth
from torch import Tensor

from torchops import _attention_panels, attention
from torchops import _attention_update_operators as operators
from torchops import _attention_update_panels as panels
from torchops.attention_update import Node
from torchops.nn import TriangleAttention

NODES: tuple[Node, Node] = ("starting", "ending")


def test_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of x, 36 MiB, q, k, v and o are four times as much: in place, the bias and panels of 8 MiB exist. The allocator
    gives back what is freed, since how much it keeps differs from run to run."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    program = """
    module = torchops.nn.TriangleAttention(64, 4, 16, "ending")

    def layer(x):
        with torch.no_grad():
            module(x, torch.ones(x.shape[:-1], dtype=torch.bool), inplace=True)

    layer(filled(64, 64, 64))
    x = filled(384, 384, 64)
    growth(lambda: layer(x))
    """
    assert growth(program) <= 28


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
@pytest.mark.parametrize(("n", "dtype"), [(768, torch.float32), (1100, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("node", NODES)
def test_memory_cuda(node: Node, n: int, dtype: torch.dtype) -> None:
    """At most a pair tensor and 64 MiB, also beside a float32 x."""
    layer = TriangleAttention(128, node=node, device="cuda", dtype=torch.bfloat16)
    x, mask = torch.randn(1, n, n, 128, device="cuda", dtype=dtype), torch.rand(1, n, n, device="cuda") > 0.1
    with torch.no_grad():
        layer(x, mask, inplace=True)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        layer(x, mask, inplace=True)
        torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= 2 * 128 * n * n + (64 << 20)


def test_kernels_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the size of a head, whatever c is."""
    seen = []

    def body(q: Tensor) -> Any:
        seen.append(q.shape[-1])
        return _attention_panels

    monkeypatch.setattr(attention, "_body", body)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    assert operators.steps_for(torch.zeros(3, 3, 128), torch.zeros(6 * 32, 128), 6) is panels
    assert seen == [32]


INTERPRETED = """
import torch
from torchops import _attention_update_panels as panels, _attention_update_triton as kernels
from torchops._attention_update_operators import _weights

torch.manual_seed(0)
panels._budget = lambda *_: 8000
c, heads, n = 24, 2, 5
shapes = (c,), (c,), (heads, c), (16, c), (16, c), (16, c), (16, c), (16,), (c, 16), (c,)
parameters = [(torch.randn(shape) / shape[-1] ** 0.5).half() for shape in shapes]
for ending, x_dtype, few in ((False, torch.float32, False), (True, torch.float16, True)):
    given = [None if few and i in (1, 7, 9) else t for i, t in enumerate(parameters)]
    w, exact_w = (_weights([t if t is None else t.to(d) for t in given], heads, 1e-5) for d in (None, torch.float64))
    x, mask = torch.randn(2, n, n, c).to(x_dtype), torch.rand(2, n, n) > 0.3
    exact, kept = torch.zeros(x.shape).double(), []
    for dtype in (torch.float16, torch.float64):
        wide = torch.promote_types(dtype, torch.float32)
        kept.append((torch.empty(2, n, n, 16, dtype=dtype), torch.empty(2, n, heads, n, dtype=wide)))
    y, new = x.clone(), torch.empty(x.shape, dtype=torch.float16)
    panels.forward(y, mask, w, ending, y, True, None, kernels)
    panels.forward(x, mask, w, ending, new, False, kept[0], kernels)
    panels.forward(x.double(), mask, exact_w, ending, exact, False, kept[1], panels)
    for got, expected in ((new, exact), (y, x + exact), *zip(*kept)):
        assert (got.double() - expected).norm() <= 5e-3 * expected.norm(), (ending, got.dtype)
    grad, wanted = torch.randn(x.shape), {name: True for name in panels.WANTED}
    for name, i in zip(panels.WANTED[1:], range(10)):
        wanted[name] = given[i] is not None
    made, expected = (
        panels.backward(grad.to(weights.q.dtype), values, mask, weights, ending, *numbers, wanted, steps)
        for values, weights, numbers, steps in ((x, w, kept[0], kernels), (x.double(), exact_w, kept[1], panels))
    )
    assert made.keys() == expected.keys()
    for name, exact in expected.items():
        assert (made[name].double() - exact).norm() <= 1e-2 * exact.norm(), (ending, name)
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_interpreted() -> None:
    """On the CPU, where Triton runs them with NumPy: their arithmetic, not how they compile."""
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
    )
    assert done.returncode == 0, done.stderr

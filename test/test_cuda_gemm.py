"""The GEMM kernels of dense and square_matmul_ on CUDA, together: graphs, and several devices."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from cuda_checks import assert_accurate, random

import torchops
from torchops._core import _build_info

if not torch.cuda.is_available() or not _build_info.cuda_version:
    pytest.skip("needs a GPU and a build with CUDA", allow_module_level=True)


def test_graph_replay() -> None:
    x, w, b = (
        random(512, 256, dtype=torch.bfloat16),
        random(128, 256, dtype=torch.bfloat16),
        random(128, dtype=torch.bfloat16),
    )
    start, m = random(4096, 1024, dtype=torch.bfloat16), random(1024, 1024, dtype=torch.bfloat16, scale=0.03)
    a = start.clone()
    torchops.dense(x, w, b)
    torchops.square_matmul_(a, m)
    expected = a.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = torchops.dense(x, w, b)
        a.copy_(start)
        torchops.square_matmul_(a, m)
    for _ in range(3):
        y.fill_(float("nan"))
        graph.replay()
    assert torch.equal(y, torchops.dense(x, w, b))
    assert torch.equal(a, expected)


CAPTURED_COLD = """
import torch, torchops
torch.manual_seed(0)
x, w, b, m = (torch.randn(s, device="cuda").bfloat16() * 0.1 for s in ((4096, 128), (128, 128), (128,), (512, 512)))
a, g = torch.randn(4096, 512, device="cuda").bfloat16(), torch.randn(4096, 128, device="cuda").bfloat16()
x.requires_grad_(), w.requires_grad_()
start, graph = a.clone(), torch.cuda.CUDAGraph()
torch.mm(m, m), x.detach() @ w.detach().T  # cuBLAS itself must not begin its life inside a capture
torch.cuda.synchronize()
with torch.cuda.graph(graph):
    y = torchops.dense(x, w, b)
    grads = torch.autograd.grad(y, (x, w), g)
    torchops.square_matmul_(a, m)
    h = torchops.glu(start, m, m)
a.copy_(start)
graph.replay()
again = torchops.dense(x, w, b)
expected = again, *torch.autograd.grad(again, (x, w), g), torchops.glu(start, m, m), torchops.square_matmul_(start, m)
pairs = zip((y, *grads, h, a), expected)
print("SAME" if all(torch.equal(one, other) for one, other in pairs) else "DIFFERENT")
"""


def test_first_call_inside_a_graph_capture() -> None:
    """Nothing has asked the device, set an attribute or allocated before: all of that has to be legal in a capture."""
    done = subprocess.run([sys.executable, "-c", CAPTURED_COLD], capture_output=True, text=True)
    assert done.stdout.strip() == "SAME", done.stdout + done.stderr


@pytest.mark.parametrize("device", range(torch.cuda.device_count()))
@pytest.mark.parametrize("rows", [1, 16, 300, 5000])
@pytest.mark.parametrize("n", [128, 192, 512])
def test_each_device(device: int, rows: int, n: int) -> None:
    """The kernels run, and count what fits at once, on the GPU of their tensors, not on the current one."""
    x, w, b = (random(*shape, dtype=torch.bfloat16).to(device) for shape in [(rows, n), (n, n), (n,)])
    w /= n**0.5
    assert torch.cuda.current_device() == 0
    pre = F.linear(x.double(), w.double(), b.double())
    assert_accurate(torchops.dense(x, w, b), torch.sigmoid(F.linear(x, w, b)), torch.sigmoid(pre))
    eager, exact = x @ w, x.double() @ w.double()
    assert_accurate(torchops.square_matmul_(x, w), eager, exact)

"""Triangle attention's kernels in Triton: interpreted, and on a GPU."""

from __future__ import annotations

import pytest
import torch
from attention_samples import CUDA, DTYPES, arguments, check, with_gradients
from triton_interpreter import interpreted, needs_triton

import torchops

INTERPRETED = """
import torch
from torchops import _attention_panels as panels, _attention_triton as kernels

torch.manual_seed(0)
for n, d, masked in ((70, 16, True), (40, 24, False)):
    q, k, v, grad = (torch.randn(1, 2, 2, n, d) for _ in range(4))
    bias = torch.randn(1, n, n, 2).movedim(-1, 1).unsqueeze(1)
    mask = None
    if masked:
        mask = torch.rand(1, 2, 1, 1, n) > 0.3
        mask[:, 1] = False
    exact = [t.double() for t in (q, k, v, bias)]
    out, lse = kernels.forward(q, k, v, bias, mask, 0.25)
    exact_out, exact_lse = panels.forward(*exact, mask, 0.25)
    got = kernels.backward(grad, q, k, v, bias, mask, out, lse, 0.25, (True,) * 4)
    expected = panels.backward(grad.double(), *exact, mask, exact_out, exact_lse, 0.25, (True,) * 4)
    for g, e in zip((out, lse, *got), (exact_out, exact_lse, *expected)):
        torch.testing.assert_close(g.double(), e, rtol=1e-4, atol=1e-5)
"""


@needs_triton
def test_kernels_interpreted() -> None:
    done = interpreted(INTERPRETED)
    assert done.returncode == 0, done.stderr


needs_cuda = pytest.mark.skipif(not CUDA, reason="no CUDA device")


@needs_cuda
@pytest.mark.parametrize("n", [64, 129, 257])
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_repeatable_cuda(dtype: torch.dtype, masked: bool, n: int) -> None:
    """Result and gradients have the same bits in every run, that of the bias too."""
    args = arguments(n, 32, heads=4, dtype=dtype, device="cuda", masked=masked, requires_grad=True)
    cotangent = torch.randn_like(args[0])
    first = with_gradients(torchops.triangle_attention, args, cotangent)
    for _ in range(3):
        again = with_gradients(torchops.triangle_attention, args, cotangent)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@needs_cuda
@pytest.mark.parametrize("n", [129, 192])
def test_many_rows_cuda(n: int) -> None:
    """All rows, so that the gradient of the bias is a sum of many, in parts."""
    check(arguments(n, 32, heads=4, dtype=torch.bfloat16, device="cuda", masked=True, requires_grad=True))


@needs_cuda
def test_memory_cuda() -> None:
    """Beside the result, copies of bias and mask; nothing as large as the scores."""
    q, k, v, bias, mask = arguments(200, 32, heads=4, dtype=torch.bfloat16, device="cuda", masked=True)
    torchops.triangle_attention(q, k, v, bias, mask)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = torchops.triangle_attention(q, k, v, bias, mask)
    assert torch.cuda.max_memory_allocated() - before <= 1.25 * out.nbytes


@needs_cuda
def test_graph_cuda() -> None:
    """Captured and replayed with other data."""
    args = arguments(129, 32, heads=4, dtype=torch.bfloat16, device="cuda", masked=True)
    torchops.triangle_attention(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = torchops.triangle_attention(*args)
    args[0].copy_(args[0].flip(1))
    graph.replay()
    assert torch.equal(out, torchops.triangle_attention(*args))

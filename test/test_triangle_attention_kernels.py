"""Triangle attention's kernels in Triton: interpreted, and on a GPU."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from attention_samples import CUDA, DTYPES, arguments, check, with_gradients
from triton_interpreter import interpreted, needs_triton

import torchops

INTERPRETED = """
import torch
from torchops._triangle_attention.attention import aten, triton
from torchops._triangle_attention.attention.arguments import inputs_of

# In torch.empty_like() of these, features are not adjacent, though they are here.
OVERLAP, ONE = (400, 200, 100, 1, 1), (24, 8, 1, 0, 1)
VIEW = (16000, 8000, 48, 96, 1)  # heads side by side, as in a product

torch.manual_seed(0)
SIZES = ((70, 70, 16, True, None), (40, 40, 24, False, None), (5, 5, 16, False, OVERLAP), (5, 5, 8, False, ONE))
for n, keys, d, masked, strides in SIZES:
    h = 1 if strides is ONE else 2
    q, grad, k, v = (torch.randn(1, 2, h, size, d) for size in (n, n, keys, keys))
    if strides:
        q, k, v = (torch.randn(17000).as_strided(t.shape, strides) for t in (q, k, v))
    bias = torch.randn(1, n, keys, h).movedim(-1, 1).unsqueeze(1)
    mask = None
    if masked:
        mask = torch.rand(1, 2, 1, 1, keys) > 0.3
        mask[:, 1] = False
    exact = [t.double() for t in (q, k, v, bias)]
    inputs, exact_inputs = inputs_of(q, k, v, bias, mask, 0.25), inputs_of(*exact, mask, 0.25)
    saved, exact_saved = triton.forward(inputs), aten.forward(exact_inputs)
    got = triton.backward(grad, inputs, saved, (True,) * 4)
    expected = aten.backward(grad.double(), exact_inputs, exact_saved, (True,) * 4)
    for g, e in zip((*saved, *got), (*exact_saved, *expected)):
        torch.testing.assert_close(g.double(), e, rtol=1e-4, atol=1e-5)
"""


def of_sizes(*sizes: str) -> str:
    before, _, after = INTERPRETED.partition("SIZES = ")
    return f"{before}SIZES = ({', '.join(sizes)},)\n" + after.partition("\n")[2]


@needs_triton
def test_kernels_interpreted() -> None:
    done = interpreted(INTERPRETED)
    assert done.returncode == 0, done.stderr


@needs_triton
@pytest.mark.parametrize("sizes", [(32, 128), (37, 150), (150, 37), (1, 70), (70, 1), (130, 129)], ids=str)
def test_rectangles_interpreted(sizes: tuple[int, int]) -> None:
    """Queries and keys of different number, with a mask (and a row without keys) and without one."""
    queries, keys = sizes
    strides = "VIEW" if max(sizes) <= 80 else None
    done = interpreted(of_sizes(*(f"({queries}, {keys}, {d}, {d == 16}, {strides})" for d in (16, 48))))
    assert done.returncode == 0, done.stderr


LITTLE_SHARED_MEMORY = """
triton._properties = lambda device: (4, 99 << 10)
programs = [triton._launcher(name, 100, torch.float32, False, False, True) for name in ("q", "kv")]
assert [launch.options["BLOCK_K"] for launch in programs] == [16, 16]
"""


@needs_triton
def test_kernels_of_little_shared_memory() -> None:
    """Gradients of large heads in float32 have smaller tiles there."""
    program = of_sizes("(40, 40, 100, True, None)")
    done = interpreted(program.replace("\ntorch.manual_seed", f"\n{LITTLE_SHARED_MEMORY}\ntorch.manual_seed"))
    assert done.returncode == 0, done.stderr


ONE_NUMBER = """
import torch
from torchops._triangle_attention.attention import triton as kernels

dbias = torch.randn(3, 1, 1, 1, 1)
expected = dbias.sum(0)
torch.testing.assert_close(kernels.sum_of_dbias(dbias), expected)
"""


@needs_triton
def test_sum_of_one_number() -> None:
    """Interpreted, and compiled for a size that Triton makes a constant, as it does any 1."""
    done = interpreted(ONE_NUMBER)
    assert done.returncode == 0, done.stderr
    program = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from torchops._triangle_attention.attention import kernels_backward as kernels

for size, constants in (("constexpr", {"size": 1}), ("i32", {})):
    types = {"dbias": "*fp32", "parts": "i32", "size": size, "BLOCK": "constexpr"}
    source = ASTSource(kernels.sum_parts, signature=types, constexprs={"BLOCK": 1024, **constants})
    assert "ttg.target" in str(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ttgir"])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


PRECISIONS = """
import torch
from torchops._triangle_attention.attention import triton as kernels
from torchops._triangle_attention.attention.arguments import inputs_of

passed, launcher = [], kernels._launcher
kernels._launcher = lambda kernel, d, dtype, masked, tf32, *small, **rest: (
    passed.append(tf32) or launcher(kernel, d, dtype, masked, tf32, *small, **rest)
)
torch.backends.cuda.matmul.fp32_precision = "tf32"
for dtype in (torch.float32, torch.float16):
    q, bias = torch.randn(1, 2, 2, 5, 16).to(dtype), torch.randn(1, 1, 2, 5, 5).to(dtype)
    inputs = inputs_of(q, q, q, bias, None, 0.25)
    kernels.backward(q, inputs, kernels.forward(inputs), (True,) * 4)
assert passed == [True] * 4 + [False] * 4, passed
"""


@needs_triton
def test_precision_set_by_the_new_interface() -> None:
    """Reading it through the old one raises."""
    done = interpreted(PRECISIONS)
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
def test_more_heads_than_a_grid_has_blocks_cuda() -> None:
    sizes: dict[str, Any] = {"heads": 40, "batch": 1700, "dtype": torch.float32, "device": "cuda"}
    check(arguments(3, 8, requires_grad=True, **sizes))
    x = torch.randn(1700, 3, 3, 16, device="cuda", dtype=torch.float64)
    layer = torchops.nn.TriangleAttention(16, 40, 8, device="cuda", dtype=torch.float64)
    expected = layer(x)
    torch.testing.assert_close(layer.float()(x.float()), expected.float(), atol=1e-3, rtol=1e-3)


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

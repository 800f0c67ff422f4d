"""The update by triangle attention: how much memory it takes, and its kernels in Triton."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from memory_growth import growth
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from triton_interpreter import interpreted, needs_triton

from torchops._core.triton.plan import Plans
from torchops._triangle_attention.attention import backends as attention
from torchops._triangle_attention.update import aten, autograd, backends, operators
from torchops._triangle_attention.update.arguments import Node
from torchops.nn import TriangleAttention

NODES: tuple[Node, Node] = ("starting", "ending")


def test_memory() -> None:
    """Of x, 36 MiB, q, k, v and o are four times as much: in place, the bias and panels of 8 MiB exist."""
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
@pytest.mark.parametrize(("n", "dtype"), [(384, torch.bfloat16), (768, torch.float32), (1100, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("node", NODES)
def test_memory_cuda(node: Node, n: int, dtype: torch.dtype) -> None:
    """At most a pair tensor, also beside a float32 x, or 128 MiB."""
    layer = TriangleAttention(128, node=node, device="cuda", dtype=torch.bfloat16)
    x, mask = torch.randn(1, n, n, 128, device="cuda", dtype=dtype), torch.rand(1, n, n, device="cuda") > 0.1
    with torch.no_grad():
        layer(x, mask, inplace=True)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        layer(x, mask, inplace=True)
        torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= max(2 * 128 * n * n, 128 << 20)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("node", NODES)
def test_panels_cuda(monkeypatch: pytest.MonkeyPatch, node: Node, dtype: torch.dtype) -> None:
    """Of several panels, gradients have the same bits in every run, and are those of one panel but for rounding."""
    torch.manual_seed(0)
    layer = TriangleAttention(64, 4, 16, node, bias=True, device="cuda", dtype=torch.bfloat16)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    x = torch.randn(2, 150, 150, 64, device="cuda", dtype=dtype, requires_grad=True)
    mask = torch.rand(2, 150, 150, device="cuda") > 0.1
    grad = torch.randn(x.shape, device="cuda", dtype=torch.bfloat16)

    def results() -> list[Tensor]:
        out = layer(x, mask)
        return [out.detach(), *torch.autograd.grad(out, [x, *layer.parameters()], grad)]

    whole = results()
    for module in ("", "_backward"):
        fused = importlib.import_module(f"torchops._triangle_attention.update.triton_fused{module}")
        monkeypatch.setattr(fused, "budget", lambda *_: 3 << 20)
    monkeypatch.setattr(operators, "plans", Plans())
    first = results()
    assert all(torch.equal(a, b) for a, b in zip(first, results(), strict=True))
    for a, b in zip(first, whole, strict=True):
        assert (a - b).float().norm() <= 1e-2 * b.float().norm()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
def test_some_gradients_cuda() -> None:
    """Where not all are wanted, those that are."""
    torch.manual_seed(0)
    layer = TriangleAttention(64, 4, 16, "ending", device="cuda", dtype=torch.bfloat16)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    x = torch.randn(1, 70, 70, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn_like(x)
    (whole, *_) = torch.autograd.grad(layer(x), [x, *layer.parameters()], grad)
    (alone,) = torch.autograd.grad(layer.requires_grad_(False)(x), [x], grad)
    assert (whole - alone).float().norm() <= 1e-2 * whole.float().norm()


@pytest.mark.parametrize("reentrant", [None, False, True], ids=str)
def test_low_memory_under_a_checkpoint(monkeypatch: pytest.MonkeyPatch, reentrant: bool | None) -> None:
    seen = []

    def backward(*args: Any) -> Any:
        seen.append(args[-2])
        return operators.update_backward(*args)

    monkeypatch.setattr(autograd, "update_backward", backward)
    layer, x = TriangleAttention(8, 2, 4), torch.randn(3, 3, 8, requires_grad=True)
    out = layer(x) if reentrant is None else checkpoint(layer, x, use_reentrant=reentrant)
    out.sum().backward()
    assert seen[0] is (reentrant is not None)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
@pytest.mark.parametrize("node", NODES)
def test_low_memory_cuda(node: Node) -> None:
    """Under a checkpoint: x and its gradient, the result of the attention, and less than a pair tensor beside."""
    n = 768
    layer = TriangleAttention(128, node=node, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(1, n, n, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    mask, grad = torch.rand(1, n, n, device="cuda") > 0.1, torch.randn_like(x)
    for _ in range(2):
        out = checkpoint(layer, x, mask, use_reentrant=False)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        torch.autograd.grad(out, [x, *layer.parameters()], grad)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
    assert peak <= 3 * x.nbytes


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
def test_layouts_cuda() -> None:
    """Of any strides, values and gradients are those of contiguous tensors, in the first call and in a later one."""
    torch.manual_seed(0)
    layer = TriangleAttention(64, 4, 16, "ending", bias=True, device="cuda", dtype=torch.bfloat16)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    x = torch.randn(2, 3, 38, 38, 64, device="cuda", dtype=torch.bfloat16)
    mask, grad = torch.rand(2, 3, 38, 38, device="cuda") > 0.1, torch.randn_like(x)

    def results(x: Tensor, mask: Tensor, grad: Tensor) -> list[Tensor]:
        x = x.detach().requires_grad_()
        out = layer(x, mask)
        return [out.detach(), *torch.autograd.grad(out, [x, *layer.parameters()], grad)]

    def strided(t: Tensor) -> Tensor:
        """The same numbers, with batch dimensions that cannot be one."""
        return t.transpose(0, 1).contiguous().transpose(0, 1)

    expected = results(x, mask, grad)
    to_q = layer.weights().q
    to_q.data = to_q.data.mT.contiguous().mT
    for _ in range(2):
        for given in ((strided(x), mask, grad), (x, strided(mask), grad), (x, mask, strided(grad)), (x, mask, grad)):
            for got, exact in zip(results(*given), expected, strict=True):
                torch.testing.assert_close(got, exact, rtol=0, atol=0)


def test_kernels_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the sizes of the attention, whatever c is."""
    seen = []

    def why_not_triton(like: Tensor, *sizes: int) -> str:
        seen.append(sizes)
        return "a reason"

    monkeypatch.setattr(attention, "why_not_triton", why_not_triton)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    steps: Any = backends.steps_for(torch.zeros(2, 5, 3, 7, 128), torch.zeros(6 * 32, 128), 6)
    assert steps is aten
    assert seen == [(10, 3, 6, 32)]


INTERPRETED = """
import torch
from torchops._triangle_attention.update import aten, panels, panels_backward, triton_fused, triton_steps
from torchops._triangle_attention.update.arguments import TENSORS, Inputs, Kept, weights_of
from torchops._triangle_attention.update.backends import InPanels

in_aten = InPanels(aten)
torch.manual_seed(0)
torch.use_deterministic_algorithms(True)  # so what is not yet written is NaN
c, heads, n, batch = 24, 2, 5, 3
# Panels of two of the batch and of one; of two rows and of one; and of one of the batch.
for backend, ending, x_dtype, few, width, budget in (
    (triton_fused, False, torch.float32, False, 16, 13000), (triton_fused, True, torch.float16, True, 24, 4000),
    (InPanels(triton_steps), True, torch.float32, True, 16, 8000),
):
    panels.budget = panels_backward.budget = lambda *_: budget
    shapes = (c,), (c,), (heads, c), *[(width, c)] * 4, (width,), (c, width), (c,)
    parameters = [(torch.randn(shape) / shape[-1] ** 0.5).half() for shape in shapes]
    given = [None if few and i in (1, 7, 9) else t for i, t in enumerate(parameters)]
    w, exact_w = (weights_of([t if t is None else t.to(d) for t in given], heads, 1e-5) for d in (None, torch.float64))
    x, mask = torch.randn(batch, n, n, c).to(x_dtype), torch.rand(batch, n, n) > 0.3
    mask = mask if few else mask.half()
    inputs, exact_inputs = Inputs(x, mask, w, ending), Inputs(x.double(), mask, exact_w, ending)
    assert triton_fused.why_not(inputs) is None
    exact, kept = torch.zeros(x.shape).double(), []
    for dtype in (torch.float16, torch.float64):
        wide = torch.promote_types(dtype, torch.float32)
        kept.append(Kept(torch.empty(batch, n, n, width, dtype=dtype), torch.empty(batch, n, heads, n, dtype=wide)))
    y, new, both = x.clone(), torch.empty(x.shape, dtype=torch.float16), torch.empty_like(x)
    backend.forward(inputs._replace(x=y, add_residual=True), y, None)
    backend.forward(inputs._replace(add_residual=True), both, None)
    assert torch.equal(both, y)
    backend.forward(inputs, new, kept[0])
    in_aten.forward(exact_inputs, exact, kept[1])
    for got, expected in ((new, exact), (y, x + exact), *zip(*kept)):
        assert (got.double() - expected).norm() <= 5e-3 * expected.norm(), (backend, ending, got.dtype)
    grad, output_mask = torch.randn(x.shape), {"x": True} | {name: t is not None for name, t in zip(TENSORS, given)}
    for add_residual in (False, True):
        made = backend.backward(grad.to(w.q.dtype), inputs._replace(add_residual=add_residual), kept[0], output_mask)
        expected = in_aten.backward(grad.double(), exact_inputs, kept[1], output_mask)
        expected["x"] += add_residual * grad
        assert made.keys() == expected.keys()
        for name, exact in expected.items():
            assert (made[name].double() - exact).norm() <= 1e-2 * exact.norm(), (backend, ending, add_residual, name)
"""


WITHOUT_EPS = """
import torch
from torchops._triangle_attention.update import triton_fused as fused
from torchops._triangle_attention.update.arguments import Inputs, Kept, weights_of
from torchops._triangle_attention.update.panels_backward import GRADIENTS

torch.manual_seed(0)
shapes = (16,), (16,), (2, 16), *[(16, 16)] * 4, (16,), (16, 16), (16,)
w = weights_of([torch.randn(shape).half() for shape in shapes], 2, 0.0)
x = torch.randn(1, 5, 5, 16).half()
target, kept = torch.empty_like(x), Kept(torch.empty(1, 5, 5, 16).half(), torch.empty(1, 5, 2, 5))
inputs = Inputs(x, None, w, False)
fused.forward(inputs, target, kept)
made = fused.backward(torch.randn_like(x), inputs, kept, {name: True for name in GRADIENTS})
assert target.isfinite().all() and all(t.isfinite().all() for t in made.values()), made
"""


@needs_triton
def test_positions_beyond_the_last_without_eps() -> None:
    """Their rows have no variance, and must not reach sums as NaN."""
    done = interpreted(WITHOUT_EPS)
    assert done.returncode == 0, done.stderr


GRIDS = """
import torch
from torchops._core.triton.launch import noting
from torchops._triangle_attention.update import triton_steps
from torchops._triangle_attention.update.arguments import Inputs, Kept, weights_of
from torchops._triangle_attention.update.backends import InPanels
from torchops._triangle_attention.update.panels_backward import GRADIENTS

steps = InPanels(triton_steps)
n, noting.calls, noting.device = 4104, [], torch.device("cpu")
for c, width, dtype in ((128, 64, torch.float32), (256, 256, torch.bfloat16), (512, 128, torch.bfloat16)):
    shapes = (c,), (c,), (4, c), *[(width, c)] * 4, (width,), (c, width), (c,)
    w = weights_of([torch.empty(shape, dtype=dtype, device="meta") for shape in shapes], 4, 1e-5)
    x = torch.empty(1, n, n, c, dtype=dtype, device="meta")
    kept = Kept(torch.empty(1, n, n, width, dtype=dtype, device="meta"), torch.empty(1, n, 4, n, device="meta"))
    for ending in (False, True):
        inputs = Inputs(x, None, w, ending)
        steps.forward(inputs, torch.empty_like(x), kept)
        steps.backward(x, inputs, kept, {name: True for name in GRADIENTS})
assert len(noting.calls) > 50
for launch, grid, _ in noting.calls:
    assert max(grid[1:]) <= 65535, (launch, grid)
"""


@needs_triton
def test_grids_of_large_pair_tensors() -> None:
    """Only the first size of a grid may exceed 65535."""
    done = interpreted(GRIDS)
    assert done.returncode == 0, done.stderr


@needs_triton
def test_kernels_interpreted() -> None:
    done = interpreted(INTERPRETED)
    assert done.returncode == 0, done.stderr

"""The triangle update that gates before its last projection: benchmarks/gated_triangle.py."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from triton_interpreter import interpreted, needs_triton

from benchmarks import gated_triangle as gated

D = 128


def arguments(n: int, c: int, batch: int, device: str, cauchy: bool = False) -> tuple[Tensor, gated.Weights]:
    """Of the distributions of the task."""
    torch.manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device)

    def inner() -> Tensor:
        return random(D, c) / math.sqrt(D)

    x = random(batch, n, n, c)
    of_x = (inner(), inner(), inner(), inner(), inner())
    weights = gated.Weights(random(c), random(c), *of_x, random(D), random(D), random(c, D) / math.sqrt(c))
    return x.cauchy_(0, 2) if cauchy else x, weights


def exact(x: Tensor, mask: Tensor | None, w: gated.Weights, eps: float = 1e-5) -> Tensor:
    """In float64, as the task has it."""
    w = gated.Weights._make(t.double() for t in w)
    z = torch.nn.functional.layer_norm(x.double(), x.shape[-1:], w.norm, w.norm_bias, eps)
    a, b = (z @ w.a.T * (z @ w.a_gate.T).sigmoid(), z @ w.b.T * (z @ w.b_gate.T).sigmoid())
    if mask is not None:
        a, b = a * mask[..., None], b * mask[..., None]
    o = torch.einsum("bikd,bjkd->bijd", a, b)
    o = torch.nn.functional.layer_norm(o, o.shape[-1:], w.norm_out, w.norm_out_bias, eps)
    return o * (z @ w.gate.T).sigmoid() @ w.p_out.T


def test_values_and_gradients_in_aten() -> None:
    x, w = arguments(5, 6, 2, "cpu")
    mask = torch.randint(0, 2, x.shape[:3])
    torch.testing.assert_close(gated.update(x, mask, w).double(), exact(x, mask, w), rtol=1e-4, atol=1e-4)
    leaf = x.requires_grad_()
    (grad,) = torch.autograd.grad(gated.update(leaf, None, w).sum(), leaf)
    (want,) = torch.autograd.grad(exact(leaf, None, w).sum(), leaf)
    torch.testing.assert_close(grad, want, rtol=1e-3, atol=1e-3)


def test_what_the_kernels_support() -> None:
    x, w = arguments(4, 64, 2, "cpu")
    mask = torch.ones(2, 4, 4)
    assert gated.fits(x, w)
    assert gated.fits(x.mT.contiguous().mT, w, mask)
    for other in (x.double(), x[:, 1:], x[0], x[:0], x[:, :1, :1], x[..., :63]):
        assert not gated.fits(other, w)
    for other in (mask[:1], mask[:, :1], mask[..., None], mask.to("meta")):
        assert not gated.fits(x, w, other)
    for name, t in w._asdict().items():
        strided = torch.empty(2 * t.numel())[::2].view(t.shape)
        for other in (t.double(), strided, t[:-1], t[None], t.to("meta")):
            assert not gated.fits(x, w._replace(**{name: other})), name


PLANS = """
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.append(str(Path.cwd().parent))
from test_gated_triangle import arguments
from benchmarks import gated_triangle as gated, gated_triangle_triton as kernels


class Kernel:
    compiled, launched = 0, []

    def __getitem__(self, grid):
        def call(*arguments, **options):
            assert all(isinstance(t, (torch.Tensor, int, float)) for t in arguments)
            assert isinstance(arguments[0], torch.Tensor)
            self.compiled += 1
            return Compiled(grid)
        return call


class Compiled:
    function, packed_metadata = 7, "metadata"

    def __init__(self, grid):
        self.grid = grid

    def run(self, x, y, z, stream, function, metadata, enter, leave, hook, *arguments):
        assert ((x, y, z), stream, function, metadata) == (self.grid, 0, 7, "metadata")
        assert enter is leave is hook is None
        Kernel.launched.append(arguments)

    def __getitem__(self, grid):
        return lambda *arguments, stream: Kernel.launched.append(("watched", stream))


kernel = Kernel()
kernels._pack_kernel = kernels._in_kernel = kernels._out_kernel = kernel


def expect(compiled, launched, *given):
    before, Kernel.launched = kernel.compiled, []
    out = kernels.run(*given, 1e-5)
    assert (kernel.compiled - before, len(Kernel.launched)) == (compiled, launched)
    return out


x, w = arguments(4, 64, 2, "cpu")
mask = torch.ones(2, 4, 4)
assert expect(3, 0, x, mask, w).shape == x.shape
others = x.mT.contiguous().mT, mask.mT.contiguous().mT, w._make(t.clone() for t in w)
for other, of_mask, weights in ((x, mask, w), others):
    out = expect(0, 3, other, of_mask, weights)
    pack, step_in, step_out = Kernel.launched
    assert pack[:6] == tuple(t.data_ptr() for t in (*weights[2:7], weights.p_out)), pack
    assert step_in[1:3] == (weights.norm.data_ptr(), weights.norm_bias.data_ptr())
    assert (step_in[0], step_in[3]) == (x.data_ptr(), mask.data_ptr()) or other is not x
    memory = pack[6]
    c, size = 64, 2 * 128 * 16
    ends = [memory + 2 * i for i in (5 * 128 * c, *[6 * 128 * c + size * i for i in range(3)])]
    assert step_in[4:10] == (memory, *ends[1:], 16, 0.5), step_in
    assert step_out[:2] == (weights.norm_out.data_ptr(), weights.norm_out_bias.data_ptr())
    assert step_out[3:7] == (ends[3], ends[0], out.data_ptr(), 16), step_out
    assert step_out[7] == 1e-5 * 0.25
# Other shapes and dtypes have launches of their own.
for given in ((x, None, w), (x, mask.bool(), w), (x[:1], mask[:1], w)):
    expect(3, 0, *given)
    expect(0, 3, *given)
# Kernels are compiled for addresses of aligned memory: others do not use those, and are not kept.
moved = torch.empty(x.numel() + 1)[1:].view(x.shape).copy_(x)
moved_norm = w._replace(norm=torch.empty(65)[1:].copy_(w.norm))
for _ in range(2):
    expect(3, 0, moved, mask, w)
    expect(3, 0, x, mask, moved_norm)
# A known plan serves nothing that does not fit.
for name, t in w._asdict().items():
    for other in (t.double(), torch.empty(2 * t.numel())[::2].view(t.shape), t[:-1], t[None], t.to("meta")):
        assert expect(0, 0, x, mask, w._replace(**{name: other})) is None, name
assert expect(0, 0, x.double(), mask, w) is None
assert expect(0, 0, x, mask[:1], w) is None
kernels.triton.knobs.runtime.launch_enter_hook = lambda metadata: None
expect(0, 3, x, mask, w)
assert Kernel.launched == [("watched", 0)] * 3
"""

INTERPRETED = """
import sys
from pathlib import Path

import torch

sys.path.append(str(Path.cwd().parent))
from test_gated_triangle import arguments, exact
from benchmarks import gated_triangle_triton as kernels

for n, c, batch, masked in ((9, 64, 2, True), (3, 512, 1, False)):
    x, w = arguments(n, c, batch, "cpu")
    mask = torch.randint(0, 2, (batch, n, n)) if masked else None
    x = x.transpose(1, 2).contiguous().transpose(1, 2)
    for _ in range(2):
        got, want = kernels.run(x, mask, w, 1e-5), exact(x, mask, w)
        assert (got - want).norm() <= 2e-3 * want.norm(), (n, c)
"""


@needs_triton
def test_a_plan_is_used_again_where_it_fits() -> None:
    done = interpreted(PLANS)
    assert done.returncode == 0, done.stderr


@needs_triton
def test_values_interpreted() -> None:
    done = interpreted(INTERPRETED)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("n", "c", "batch", "masked", "cauchy"),
    [(33, 128, 2, True, False), (64, 384, 1, True, True), (50, 768, 1, False, False), (2, 64, 1, False, False)],
)
def test_values_by_the_kernels_on_cuda(n: int, c: int, batch: int, masked: bool, cauchy: bool) -> None:
    x, w = arguments(n, c, batch, "cuda", cauchy)
    mask = torch.randint(0, 2, (batch, n, n), device="cuda") if masked else None
    assert gated.fits(x, w)
    # Twice, with the same and with other values: Triton compiles for the first, and makes only that launch.
    others = gated.Weights._make(t.clone() for t in w)
    for given, weights in ((x, w), (x, w), (x.transpose(1, 2), others)):
        got = gated.update(given, mask, weights)
        want = exact(given, mask, weights)
        assert got.dtype == torch.float32
        assert (got - want).norm() <= 2e-3 * want.norm()
        torch.testing.assert_close(got, want.float(), rtol=2e-2, atol=2e-2)
    # Neither of these may use what has been compiled.
    moved = torch.empty(x.numel() + 1, device="cuda")[1:].view(x.shape).copy_(x)
    spread = w._replace(a=torch.empty(D, 2 * c, device="cuda")[:, ::2].copy_(w.a))
    for given, weights in ((moved, w), (x, spread)):
        torch.testing.assert_close(gated.update(given, mask, weights), exact(x, mask, w).float(), rtol=2e-2, atol=2e-2)
    of_mask = torch.ones(batch, n, n, device="cuda", requires_grad=True)
    assert gated.update(x, of_mask, w).requires_grad  # by ATen
    assert gated.update(x.requires_grad_(), mask, w).requires_grad

"""The triangle update that gates before its last projection: torchops/_gated_triangle.py."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from torchops import _gated_triangle as gated

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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("n", "c", "batch", "masked", "cauchy"),
    [(33, 128, 2, True, False), (64, 384, 1, True, True), (50, 768, 1, False, False), (2, 64, 1, False, False)],
)
def test_values_by_the_kernels(n: int, c: int, batch: int, masked: bool, cauchy: bool) -> None:
    x, w = arguments(n, c, batch, "cuda", cauchy)
    mask = torch.randint(0, 2, (batch, n, n), device="cuda") if masked else None
    assert gated.fits(x, w)
    got = gated.update(x, mask, w)
    want = exact(x, mask, w)
    assert got.dtype == torch.float32
    assert (got - want).norm() <= 2e-3 * want.norm()
    torch.testing.assert_close(got, want.float(), rtol=2e-2, atol=2e-2)
    leaf = x.requires_grad_()
    assert gated.update(leaf, mask, w).requires_grad  # by ATen

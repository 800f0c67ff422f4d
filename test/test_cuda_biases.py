"""Biases that cancel or exceed the products they are added to: in 16 bits as exact as PyTorch's expressions, forward
and backward, by cuBLAS as by a kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cuda_checks import poisoned_memory
from torch import Tensor

import torchops
from torchops._core import _build_info

if not torch.cuda.is_available() or not _build_info.cuda_version:
    pytest.skip("needs a GPU and a build with CUDA", allow_module_level=True)

DEVICE = "cuda"
Operator = Callable[..., Tensor]
# Of x, two weights, two biases and v: ours, and expressions for it.
OPERATORS: dict[str, tuple[Operator, ...]] = {
    "dense": (
        lambda x, w, wg, b, bg, v: torchops.dense(x, w, b),
        lambda x, w, wg, b, bg, v: torch.sigmoid(F.linear(x, w, b)),
    ),
    "gate": (
        lambda x, w, wg, b, bg, v: torchops.gate(v, x, w, b),
        lambda x, w, wg, b, bg, v: v * torch.sigmoid(F.linear(x, w, b)),
    ),
    "gate_": (
        lambda x, w, wg, b, bg, v: torchops.gate_(v.clone(), x, w, b),
        lambda x, w, wg, b, bg, v: v * torch.sigmoid(F.linear(x, w, b)),
    ),
    "glu": (
        lambda x, w, wg, b, bg, v: torchops.glu(x, w, wg, b, bg),
        lambda x, w, wg, b, bg, v: F.linear(x, w, b) * torch.sigmoid(F.linear(x, wg, bg)),
        lambda x, w, wg, b, bg, v: F.glu(F.linear(x, torch.cat((w, wg)), torch.cat((b, bg)))),
    ),
}


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    with poisoned_memory():
        yield


def arguments(shape: tuple[int, int, int], dtype: torch.dtype, cancels: bool) -> list[Tensor]:
    rows, k, n = shape
    random = lambda *size: torch.randn(size, device=DEVICE, dtype=torch.float64)  # noqa: E731
    # Rows alike, so that one bias cancels the products of all.
    x = (random(1, k) + 0.005 * random(rows, k)).to(dtype)
    weights = [((64 if cancels else 1) * random(n, k) / k**0.5).to(dtype) for _ in range(2)]
    products = [x.double() @ w.double().t() for w in weights]
    biases = [-z.mean(0) if cancels else -4 * z.abs().amax(0) for z in products]
    return [x, *weights, *(b.to(dtype) for b in biases), random(rows, n).to(dtype)]


def relative_error(got: Tensor, exact: Tensor) -> float:
    error = (got.double() - exact).norm() / exact.norm().clamp(min=1e-30)
    return error.nan_to_num(nan=float("inf")).item()


@pytest.mark.parametrize("cancels", [True, False], ids=["cancels", "exceeds"])
@pytest.mark.parametrize("shape", [(40, 33, 35), (300, 1000, 129), (5, 64, 64), (1, 100, 8), (70, 128, 128)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("path", ["cublas", "portable", "auto"])
@pytest.mark.parametrize("name", OPERATORS)
def test_biases(name: str, path: Any, dtype: torch.dtype, shape: tuple[int, int, int], cancels: bool) -> None:
    ours, *expressions = OPERATORS[name]
    given = arguments(shape, dtype, cancels)
    cotangent = torch.randn(shape[0], shape[2], device=DEVICE, dtype=torch.float64).to(dtype)

    def of(operator: Operator, wide: bool) -> list[Tensor]:
        inputs = [(t.double() if wide else t).detach().requires_grad_() for t in given]
        with torchops.cuda.kernel_path(path):
            y = operator(*inputs)
        gradients = torch.autograd.grad(y, inputs, cotangent.double() if wide else cotangent, allow_unused=True)
        return [y.detach(), *(g for g in gradients if g is not None)]

    exact = of(expressions[0], True)
    for got, wanted, *aten in zip(of(ours, False), exact, *(of(e, False) for e in expressions), strict=True):
        error, theirs = relative_error(got, wanted), max(relative_error(t, wanted) for t in aten)
        limit = 4 * theirs + torch.finfo(dtype).eps / 4
        assert error <= limit, f"{tuple(wanted.shape)}: {error:.3g}, ATen's {theirs:.3g}"

"""Arguments for attention with a bias that rows share, and comparisons with it as papers write it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from triangle_attention_samples import attention_reference as reference

import torchops

CUDA = torch.cuda.is_available()
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not CUDA, reason="no CUDA device"))]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


Arguments = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]


def arguments(
    n: int,
    d: int = 16,
    *,
    batch: int = 1,
    rows: int | None = None,
    keys: int | None = None,
    heads: int = 2,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    masked: bool = False,
    requires_grad: bool = False,
) -> Arguments:
    generator = torch.Generator().manual_seed(n)
    rows, keys = (n if size is None else size for size in (rows, keys))

    def random(*shape: int) -> Tensor:
        made = torch.randn(shape, dtype=torch.float64, generator=generator).to(device, dtype)
        return made.requires_grad_(requires_grad)

    q, k, v = (random(batch, rows, heads, size, d) for size in (n, keys, keys))
    bias = random(batch, 1, heads, n, keys)
    if not masked:
        return q, k, v, bias, None
    mask = torch.rand(batch, rows, 1, 1, keys, generator=generator) > 0.3
    mask[:, rows // 2] = False  # a row without keys
    mask[:, -1] = False
    mask[:, -1, ..., -1] = True  # and one with one
    return q, k, v, bias, mask.to(device)


def exact(args: Arguments) -> Arguments:
    q, k, v, bias, mask = args
    q, k, v, bias = (t.detach().double().requires_grad_() for t in (q, k, v, bias))
    return q, k, v, bias, mask


def with_gradients(function: Any, args: Arguments, cotangent: Tensor, **kwargs: Any) -> list[Tensor]:
    out = function(*args, **kwargs)
    return [out.detach(), *torch.autograd.grad(out, args[:4], cotangent.to(out.dtype))]


def assert_close(got: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for name, g, e in zip(("out", "q", "k", "v", "bias"), got, expected, strict=True):
        assert g.shape == e.shape
        distance = ((g.double() - e).norm() / e.norm().clamp_min(1.0)).item()
        assert distance <= tolerance, f"{name}: {distance}"


def check(args: Arguments, **kwargs: Any) -> list[Tensor]:
    q, *_ = args
    cotangent = torch.randn(q.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(q.device)
    cotangent = cotangent.to(q.dtype)
    got = with_gradients(torchops.triangle_attention, args, cotangent, **kwargs)
    assert [g.dtype for g in got[1:]] == [t.dtype for t in args[:4]]
    assert got[0].dtype == q.dtype
    assert_close(got, with_gradients(reference, exact(args), cotangent, **kwargs), TOLERANCE[q.dtype])
    return got

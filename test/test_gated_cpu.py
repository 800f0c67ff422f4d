"""The fused pass of gates on the CPU, for each instruction set that this machine has."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from instruction_sets import errors_with
from torch import Tensor

import torchops

DTYPES = (
    *((dtype, dtype) for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16)),
    *((torch.float32, dtype) for dtype in (torch.float16, torch.bfloat16)),
)
# Tails of each length class, beside whole vectors; 1 to 64 elements are a vector and less.
SIZES = ((1, 1), (3, 5), (7, 16), (5, 37), (2, 129), (300, 65))


def glu_reference(x: Tensor, w: Tensor, wg: Tensor, activation: str) -> Tensor:
    gate = F.linear(x, wg)
    return F.linear(x, w) * (F.silu(gate) if activation == "silu" else torch.sigmoid(gate))


def gate_reference(v: Tensor, x: Tensor, w: Tensor) -> Tensor:
    return v * torch.sigmoid(F.linear(x, w))


def assert_matches(got: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    assert got.dtype.is_floating_point
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), exact, rtol=8 * eps, atol=8 * eps * max(1.0, exact.abs().max().item()))


def inputs(generator: torch.Generator, *tensors: tuple[tuple[int, ...], torch.dtype]) -> list[Tensor]:
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape, dtype in tensors]


def check_all() -> None:
    """Values and gradients, of all dtypes, with rows that have gaps and cotangents that are expanded."""
    generator = torch.Generator().manual_seed(0)
    for (v_dtype, dtype), (rows, columns), strided in itertools.product(DTYPES, SIZES, (False, True)):
        v, x, w, wg = inputs(
            generator,
            ((rows, 2 * columns if strided else columns), v_dtype),
            *(((n, 3), dtype) for n in (rows, columns, columns)),
        )
        v = v[:, ::2] if strided else v
        grad = torch.ones((), dtype=v_dtype).expand(rows, columns) if strided else v.flip(0)
        calls: list[tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[Tensor, ...]]]
        calls = [(torchops.gate, gate_reference, (v, x, w))]
        if v_dtype == dtype:
            for name in ("sigmoid", "silu"):
                calls.append(
                    (partial(torchops.glu, activation=name), partial(glu_reference, activation=name), (x, w, wg))
                )
        for ours, reference, tensors in calls:
            leaves = [t.detach().requires_grad_() for t in tensors]
            exact = [t.detach().double().requires_grad_() for t in tensors]
            y, z = ours(*leaves), reference(*exact)
            assert_matches(y, z, dtype)
            for got, want in zip(
                torch.autograd.grad(y, leaves, grad), torch.autograd.grad(z, exact, grad.double()), strict=True
            ):
                assert_matches(got, want, dtype)
        overwritten = v.clone() if not strided else torch.cat([v, v], -1)[:, :columns]
        torchops.gate_(overwritten, x, w)
        assert_matches(overwritten, gate_reference(v.double(), x.double(), w.double()), dtype)


def test_values_and_gradients() -> None:
    check_all()


@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_other_instruction_sets(capability: str) -> None:
    assert not errors_with(capability, "test_gated_cpu")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_gate_of_16_bits(dtype: torch.dtype) -> None:
    """The exponential of 16 bits is rounded as if it were exact, within a hundredth of the distance of two numbers."""
    u = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).unsqueeze(1)
    one = torch.ones(1, 1, dtype=dtype)
    exact = torch.sigmoid(u.double())
    normal = exact >= torch.finfo(dtype).smallest_normal
    for got in (
        torchops.gate(torch.ones_like(u), u, one),
        torch.ops.myops._gate_backward(torch.ones_like(u), u, u, one, None, [True, False, False, False])[0],
    ):
        torch.testing.assert_close(
            got[normal].double(), exact[normal], rtol=0.51 * torch.finfo(dtype).eps, atol=0, equal_nan=True
        )
        torch.testing.assert_close(
            got[~normal].double(), exact[~normal], rtol=0, atol=torch.finfo(dtype).tiny / 4, equal_nan=True
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_infinite_and_undefined_gates(dtype: torch.dtype) -> None:
    """As eager mode has them: the shorter exponential of 16 bits has no NaN of its own."""
    u = torch.tensor([[float("nan")], [float("inf")], [-float("inf")], [100.0], [-100.0], [0.0]], dtype=dtype)
    one = torch.ones(1, 1, dtype=dtype)
    v = torch.linspace(-2, 2, 6, dtype=dtype).reshape(6, 1)
    got, want = torchops.gate(v, u, one), gate_reference(v, u, one)
    torch.testing.assert_close(got, want, equal_nan=True)
    torch.testing.assert_close(torchops.glu(u, one, one), glu_reference(u, one, one, "sigmoid"), equal_nan=True)
    got, want = torchops.glu(u, one, one, activation="silu"), glu_reference(u, one, one, "silu")
    torch.testing.assert_close(got, want, equal_nan=True)

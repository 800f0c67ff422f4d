"""The rows of layer norm on the CPU, for each instruction set that this machine has."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from instruction_sets import errors_with
from torch import Tensor

import torchops

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
# Less than a vector, tails of each length class, more than one block of vectors.
COLUMNS = (1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 63, 65, 129, 1000, 2048, 4099)


def moments(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    var, mean = torch.var_mean(x.double(), -1, correction=0, keepdim=True)
    return mean, (var + eps).rsqrt()


def check_rows(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5) -> None:
    """layer_norm and layer_norm_ have the same bits, and those of float64 but for a few roundings."""
    columns = x.shape[-1]
    exact_mean, exact_rstd = moments(x, eps)
    exact = (x.double() - exact_mean) * exact_rstd
    if weight is not None:
        exact = exact * weight.double()
    if bias is not None:
        exact = exact + bias.double()
    y, mean, rstd = torch.ops.myops._layer_norm(x, [columns], weight, bias, eps)
    eps_of = torch.finfo(x.dtype).eps
    scale = 1.0 if weight is None else weight.double().abs().max().item()
    # The rounding of the mean is one of x, which the norm multiplies.
    accumulated = torch.finfo(mean.dtype).eps
    of_mean = accumulated * (exact_mean.abs() * exact_rstd).max().item()
    torch.testing.assert_close(
        y.double(), exact, rtol=8 * accumulated + 2 * eps_of, atol=(8 * accumulated + of_mean + eps_of) * scale
    )
    torch.testing.assert_close(
        mean.double(), exact_mean, rtol=2 * accumulated, atol=4 * accumulated * x.double().abs().max().item()
    )
    torch.testing.assert_close(rstd.double(), exact_rstd, rtol=16 * accumulated + of_mean**2, atol=0)
    overwritten = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x)
    torchops.layer_norm_(overwritten, [columns], weight, bias, eps)
    assert torch.equal(overwritten, y)


def check_all() -> None:
    generator = torch.Generator().manual_seed(0)
    for dtype, columns, layout in itertools.product(DTYPES, COLUMNS, ("rows", "gaps", "strided", "columns")):
        shape = {"rows": (5, columns), "gaps": (5, columns + 3), "strided": (5, 2 * columns), "columns": (columns, 5)}
        x = torch.randn(shape[layout], generator=generator, dtype=torch.float64).mul(3).add(1).to(dtype)
        x = {"rows": x, "gaps": x[:, :columns], "strided": x[:, ::2], "columns": x.t()}[layout]
        weight, bias = (torch.randn(columns, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
        for given in ((None, None), (weight, None), (weight, bias)):
            check_rows(x, *given)


def test_rows() -> None:
    check_all()


@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_other_instruction_sets(capability: str) -> None:
    assert not errors_with(capability, "test_layer_norm_cpu")


@pytest.mark.parametrize("mean", [1e2, 1e4])
def test_mean_far_from_zero(mean: float) -> None:
    """The variance is summed around the mean, so it does not cancel."""
    check_rows(torch.randn(3, 100_000, generator=torch.Generator().manual_seed(0)) + mean, None, None)


@pytest.mark.parametrize("place", [0, 1, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_outlier(dtype: torch.dtype, place: int) -> None:
    """One value far from the others does not take away their digits, wherever it is."""
    x = torch.full((3, 4096), 0.7, dtype=dtype)
    x[:, place] = torch.tensor([-1e3, 1e4, 3e2])
    exact = torch.nn.functional.layer_norm(x.double(), [4096])
    torch.testing.assert_close(torchops.layer_norm(x, [4096]).double(), exact, rtol=32 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_elements(dtype: torch.dtype) -> None:
    """The norm of a row of one value is 0, not its rounding errors times 1 / sqrt(eps)."""
    x = torch.tensor([0.1, -3.3, 1e4], dtype=dtype).unsqueeze(1).expand(3, 37)
    assert torch.equal(torchops.layer_norm(x, [37]), torch.zeros(3, 37, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("sign", [1, -1])
def test_variance_that_overflows(dtype: torch.dtype, sign: int) -> None:
    """The norm is 0, also if sums and differences of the values overflow."""
    x = torch.full((2, 37), 0.9 * torch.finfo(dtype).max, dtype=dtype)
    x[:, ::2] *= sign
    x[:, 0] /= 2
    assert torch.equal(torchops.layer_norm(x, [37]), torch.zeros_like(x))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_undefined_rows(dtype: torch.dtype, value: float) -> None:
    """A row with such a value is NaN, as in PyTorch, and the others are as they would be without it."""
    x = torch.randn(3, 37, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = torchops.layer_norm(x, [37])
    x[1, 20] = value
    got = torchops.layer_norm(x, [37])
    assert got[1].isnan().all()
    assert F.layer_norm(x, [37])[1].isnan().all()
    assert torch.equal(got[::2], expected[::2])

"""The triangle update in float64, where one kernel makes gates and their channels: sizes, strides, values that are not
finite, memory, and when the kernel is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cuda_checks import error, memory_of, splits_float32
from test_cuda_triangle_gradients import parameters
from test_cuda_triangle_padding import poison_all
from test_cuda_triangle_panels import assert_close, results
from test_profiler import kernels
from torch import Tensor
from triangle_reference import triangle_multiplicative_update

import torchops
from torchops._core import _build_info

if not torch.cuda.is_available() or not _build_info.cuda_version:
    pytest.skip("needs a GPU and a build with CUDA", allow_module_level=True)

update: Callable[..., Tensor] = torchops.triangle_multiplicative_update
reference: Callable[..., Tensor] = triangle_multiplicative_update
MIB = 1 << 20
PATHS: list[Any] = ["auto", "fused", "portable", "cublas"]  # the kernel on the first two
directions = pytest.mark.parametrize("direction", ["outgoing", "incoming"])


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch.cuda.empty_cache()


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.float64)


@directions
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("n", "c", "d", "batch", "masked", "biases"),
    [
        (257, 48, 48, 2, True, True),
        (255, 64, 128, 1, False, True),
        (131, 130, 70, 1, True, False),
        (67, 512, 66, 1, True, True),
        (66, 33, 30, 1, True, True),  # rows of x are not aligned
        (65, 32, 31, 1, False, True),
        (1, 8, 8, 3, True, True),
    ],
)
def test_values_and_gradients(
    n: int, c: int, d: int, batch: int, masked: bool, biases: bool, direction: str, path: Any
) -> None:
    given = parameters(c, d, biases=biases)
    if masked:
        given["mask"] = torch.rand(batch, n, n, device="cuda", dtype=torch.float64)
    x, grad = random(batch, n, n, c), random(batch, n, n, c)
    wanted = {"x"} | set(given)
    exact = results(reference, x, grad, direction, given, wanted)
    with torchops.cuda.kernel_path(path):
        poison_all(16 * x.nbytes)
        got = results(update, x, grad, direction, given, wanted)
        assert torch.equal(update(x, direction, **given), update(x, direction, **given))
    assert error(got["y"], exact["y"]) <= 1e-12
    for name, value in got.items():
        assert_close(value, exact[name], exact[name], name)


@directions
@pytest.mark.parametrize("n", [512, 600, 769])
def test_several_panels(n: int, direction: str) -> None:
    """And the bound on the memory."""
    given = {"mask": torch.rand(n, n, device="cuda", dtype=torch.float64)} | parameters(128, 128)
    x = random(n, n, 128)
    with torch.no_grad():
        exact = reference(x, direction, **given)
        torch.cuda.empty_cache()
        poison_all(4 * x.nbytes)
        assert error(update(x, direction, **given), exact) <= 1e-12
        assert memory_of(lambda: update(x, direction, **given)) <= 2.1 * x.nbytes + 64 * MIB


@directions
def test_strides(direction: str) -> None:
    """Of x, whose rows may be copied, and of the weights, which the kernel may not be able to read."""
    n, c, d = 133, 40, 36
    given = parameters(c, d)
    x = random(n, n, c)
    exact = reference(x, direction, **given)
    for gap in (0, 1, 2):  # elements between the rows

        def spread(t: Tensor, gap: int = gap) -> Tensor:
            return torch.cat([t, t[..., :gap]], -1)[..., : t.shape[-1]]

        weights = {name: spread(t) if t.dim() == 2 else torch.stack([t, t], -1)[..., 0] for name, t in given.items()}
        for of in (x, spread(x), x.transpose(0, 1).contiguous().transpose(0, 1), x.flip(1).contiguous().flip(1)):
            assert error(update(of, direction, **weights), exact) <= 1e-12


@directions
def test_not_finite(direction: str) -> None:
    """Spreads to the results that it reaches in eager mode, and to no others."""
    n, c, d = 130, 34, 32
    given = parameters(c, d)
    given["mask"] = torch.ones(n, n, device="cuda", dtype=torch.float64)
    x = random(n, n, c)
    x[3, 7, 5], x[60, 129, 0], x[129, 2, 33] = float("inf"), float("nan"), -float("inf")
    exact = reference(x, direction, **given)
    got = update(x, direction, **given)
    assert torch.equal(got.isfinite(), exact.isfinite())
    finite = exact.isfinite()
    assert 0 < int(finite.sum()) < finite.numel()
    assert error(got[finite], exact[finite]) <= 1e-12


@pytest.mark.parametrize("bias", [-800.0, -745.0, -30.0, 30.0, 800.0, float("inf"), -float("inf"), float("nan")])
def test_gates_far_from_0(bias: float) -> None:
    given = parameters(32, 32)
    given["g_in_bias"] = torch.full((64,), bias, device="cuda", dtype=torch.float64)
    x = random(70, 70, 32)
    torch.testing.assert_close(update(x, **given), reference(x, **given), rtol=1e-9, atol=1e-11, equal_nan=True)


@pytest.mark.skipif(not splits_float32(), reason="tensor cores multiply float64 slowly, or not at all")
@pytest.mark.parametrize(("c", "d", "fits"), [(128, 128, True), (66, 130, True), (33, 32, False), (32, 33, False)])
def test_products_and_channels_are_one_kernel(c: int, d: int, fits: bool) -> None:
    """Except where cuBLAS is asked for, or what every GPU can do; and for rows that are not aligned."""
    given, x = parameters(c, d), random(64, 64, c)
    for path in PATHS:
        with torchops.cuda.kernel_path(path):
            names = kernels(lambda: update(x, **given))
        taken = sum("glu_to_channels_float64" in name for name in names)
        assert taken == (2 if fits and path in ("auto", "fused") else 0)

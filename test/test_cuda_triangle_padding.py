"""The triangle update where its matrices are padded: in new memory, which is NaN here, no result hears of the padding.

Rows are rounded up to 32 bytes, and from N = 512 on they begin at multiples of 128; products come in groups of
channels, of which the last may be smaller.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
import torch
from cuda_checks import error, memory_of
from test_cuda_triangle_gradients import gradients, parameters
from torch import Tensor
from triangle_reference import triangle_multiplicative_update as reference

import torchops

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

update: Callable[..., Tensor] = torchops.triangle_multiplicative_update
update_: Callable[..., Tensor] = torchops.add_triangle_multiplicative_update_
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _free_memory() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch.cuda.empty_cache()


def poison_all(size: int) -> None:
    """Leaves NaN in all memory that the next tensors get: blocks of some MiB in all of the pool for small ones, and one
    of `size` bytes."""
    torch.cuda.empty_cache()
    small = [torch.full((MIB // 4,), float("nan"), device="cuda", dtype=torch.bfloat16) for _ in range(64)]
    large = torch.full((size // 2,), float("nan"), device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    del small, large


# With 160 channels other kernels make a, b and the update, and panels the gradients.
@pytest.mark.parametrize(
    ("n", "d"),
    [(63, 128), (64, 128), (65, 128), (127, 64), (129, 128), (193, 64), (511, 64), (513, 128), (769, 64), (520, 160)],
)
@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
@pytest.mark.parametrize("path", ["auto", "portable", "cublas"])
def test_values(n: int, d: int, direction: str, path: Literal["auto", "portable", "cublas"]) -> None:
    c = min(d, 128)
    low: Any = {name: w.to(torch.bfloat16) for name, w in parameters(c, d, biases=False).items()}
    x, grad = (torch.randn(n, n, c, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    mask = (torch.rand(n, n, device="cuda") > 0.1).to(x.dtype)
    exact: Any = {name: w.double() for name, w in low.items()}
    want = gradients(reference, x.double(), grad.double(), direction, mask.double(), exact)
    eager = gradients(reference, x, grad, direction, mask, low)
    with torch.no_grad():
        want["y"] = reference(x.double(), direction, mask=mask.double(), **exact)
        eager["y"] = reference(x, direction, mask=mask, **low)
    with torchops.cuda.kernel_path(path):
        poison_all(12 * x.nbytes * d // c)
        got = gradients(update, x, grad, direction, mask, low)
        poison_all(12 * x.nbytes * d // c)
        with torch.no_grad():
            got["y"] = update(x, direction, mask=mask, **low)
            poison_all(12 * x.nbytes * d // c)
            in_place = x.clone()
            update_(in_place, direction, mask=mask, **low)
    for name, value in got.items():
        # The norm of a few numbers' errors is left to chance: 64 of a norm's gradient were off by up to 1.32 times as
        # much as in eager mode. NaN and padding would be more.
        factor = 1.2 if value.dim() > 1 else 1.6
        assert error(value, want[name]) <= max(factor * error(eager[name], want[name]), 2**-8), name
    assert error(in_place, want["y"] + x) <= 1.2 * error(eager["y"] + x, want["y"] + x)


@pytest.mark.parametrize("n", [65, 72])
@pytest.mark.parametrize("path", ["auto", "portable"])
def test_layer_norms_without_eps(n: int, path: Literal["auto", "portable"]) -> None:
    """Padding has no variance."""
    low: Any = {name: w.to(torch.bfloat16) for name, w in parameters(128, 128).items()}
    x, grad = (torch.randn(n, n, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    exact: Any = {name: w.double() for name, w in low.items()}
    want = gradients(functools.partial(reference, eps=0.0), x.double(), grad.double(), "outgoing", None, exact)
    with torchops.cuda.kernel_path(path):
        got = gradients(functools.partial(update, eps=0.0), x, grad, "outgoing", None, low)
        with torch.no_grad():
            got["y"], want["y"] = update(x, eps=0.0, **low), reference(x.double(), eps=0.0, **exact)
    for name, value in got.items():
        assert error(value, want[name]) <= 0.03, name


@pytest.mark.parametrize(("n", "c"), [(768, 128), (769, 128), (833, 128), (1025, 128), (769, 100), (833, 124)])
@pytest.mark.parametrize("path", ["auto", "portable", "cublas"])
def test_memory(n: int, c: int, path: Literal["auto", "portable", "cublas"]) -> None:
    """Two pair tensors and a little, of which a new result is one. Rows of 100 features are not aligned for kernels."""
    low = {name: w.to(torch.bfloat16) for name, w in parameters(c, 128).items()}
    x = torch.randn(n, n, c, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad(), torchops.cuda.kernel_path(path):
        for call in (update, update_):
            assert memory_of(functools.partial(call, x, **low)) <= 2.1 * x.nbytes * 128 / c + 64 * MIB


@pytest.mark.parametrize("n", [768, 1024])
@pytest.mark.parametrize("kind", ["gaps", "expanded"])
def test_memory_of_what_the_kernels_cannot_read(n: int, kind: str) -> None:
    """Panels and a group of channels share the scratch. Rows of x are no multiples of 16 bytes apart, or all one."""
    low = {name: w.to(torch.bfloat16) for name, w in parameters(128, 128).items()}
    rows, features = (n, 132) if kind == "gaps" else (1, 128)
    x = torch.randn(rows, n, features, device="cuda", dtype=torch.bfloat16)[..., :128].expand(n, -1, -1)
    with torch.no_grad():
        assert memory_of(functools.partial(update, x, **low)) <= 2.1 * 2 * x.numel() + 64 * MIB

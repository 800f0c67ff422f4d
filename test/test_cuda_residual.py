"""The residual connection inside the updates on a GPU: values, memory, and that no kernel beside adds."""

from __future__ import annotations

import copy
import gc
import re
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from test_residual import EVERY, TOLERANCE, check, fused, layer_of, others, pair, plain, results

from torchops.cuda import kernel_path
from torchops.nn import PairLayer, pair_layer

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)


@EVERY
@pytest.mark.parametrize("path", ["auto", "portable", "cublas"])
@pytest.mark.parametrize(
    ("dtype", "of_x"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
    ],
    ids=["bfloat16", "float16", "mixed", "float32"],
)
def test_values_and_gradients_cuda(
    name: str, path: Literal["auto", "portable", "cublas"], dtype: torch.dtype, of_x: torch.dtype
) -> None:
    """Of the features that kernels are for, fewer, and more; N that is no multiple of a tile."""
    for c, n in ((128, 70), (40, 65), (192, 37)):
        layer, x = layer_of(name, c, dtype=dtype, device="cuda"), pair(n, c, of_x, "cuda")
        with kernel_path(path):
            check(name, layer, x)
            if c == 128:
                check(name, layer, x.transpose(1, 2))
                check(name, layer, x[:1].expand(x.shape))


@EVERY
def test_nearer_than_the_sum_of_rounded_ones_cuda(name: str) -> None:
    """Rounded once: no further off than x + update(x), of which the update is rounded first; and so with dx."""
    layer = layer_of(name, 128, dtype=torch.bfloat16, device="cuda")
    x = pair(150, 128, torch.bfloat16, "cuda")
    args = others(name, x)
    exact = results(plain, copy.deepcopy(layer).double(), x.double(), *args)[:2]
    for got, beside, right in zip(
        results(fused, layer, x, *args), results(plain, layer, x, *args), exact, strict=False
    ):
        assert (got.double() - right).norm() <= 1.01 * (beside.double() - right).norm()


@EVERY
def test_memory_cuda(name: str) -> None:
    """Forward and backward take no more than with the addition apart."""
    layer = layer_of(name, 128, bias=False, dtype=torch.bfloat16, device="cuda")
    x = pair(768, 128, torch.bfloat16, "cuda")[:1].contiguous().requires_grad_()
    args = others(name, x)

    def peak(function: Any) -> tuple[int, int]:
        for _ in range(2):
            gc.collect()  # or what earlier tests left could be freed in between
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            out = function(layer, x, *args)
            torch.cuda.synchronize()
            forward = torch.cuda.max_memory_allocated() - before
            gradients = torch.autograd.grad(out, [x, *layer.parameters()], torch.ones_like(out))
            torch.cuda.synchronize()
            whole = torch.cuda.max_memory_allocated() - before
            del out, gradients
        return forward, whole

    of_sum, apart = peak(fused), peak(plain)
    of_others = 2**20  # another test's leftovers may move: 64 KiB once. The pair tensor has 144 MiB.
    assert of_sum[0] <= apart[0] + of_others
    assert of_sum[1] <= apart[1] + of_others


def additions(function: Callable[[], Any]) -> int:
    """The kernels of ATen that add, by the name that they have in PyTorch: most sums of the library don't pass through
    the dispatcher, where they could be seen."""
    function()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    events = profile.key_averages()
    assert events
    return sum(event.count for event in events if re.search("CUDAFunctor(OnSelf)?_add", event.key))


def test_pair_layer_adds_in_its_kernels_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without dropout and with all gradients wanted, ten additions less: five forward, five backward."""
    layer = PairLayer(128, dropout=0.0, device="cuda", dtype=torch.bfloat16)
    x = pair(96, 128, torch.bfloat16, "cuda").requires_grad_()

    def step() -> None:
        out = layer(x)
        torch.autograd.grad(out, [x, *layer.parameters()], torch.ones_like(out))

    inside = additions(step)
    monkeypatch.setattr(pair_layer, "_added", lambda module, x, mask, kept: x + module(x, *mask))
    assert additions(step) == inside + 10


@pytest.mark.parametrize("inplace", [False, True], ids=["new", "in_place"])
def test_a_float32_stream_is_added_to_in_kernels_cuda(inplace: bool) -> None:
    """Forward, beside 16-bit weights: the update is never a tensor of its own."""
    layer, x = PairLayer(128, device="cuda", dtype=torch.bfloat16).eval(), pair(96, 128, torch.float32, "cuda")
    with torch.inference_mode():
        assert additions(lambda: x + x) == 1
        assert additions(lambda: layer(x, inplace=inplace)) == 0


@pytest.mark.parametrize("name", ["outgoing", "incoming", "transition"])
@pytest.mark.parametrize(("c", "n"), [(128, 70), (128, 64), (64, 9), (40, 65), (8, 3)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_a_float32_stream_of_any_size_cuda(name: str, c: int, n: int, dtype: torch.dtype) -> None:
    """In place, new and of strides that the kernels read or not: the sum in float32; nothing beside x is written."""
    layer, whole = layer_of(name, c, dtype=dtype, device="cuda"), pair(n + 2, c + 8, torch.float32, "cuda")
    for start in (0, 1):  # of rows that begin at a multiple of 16 bytes, or not
        around = whole.clone()
        x = around[:, 1:-1, 1:-1, start : start + c]
        args = others(name, x)
        exact = plain(copy.deepcopy(layer).double(), x.double(), *args)
        scale = (exact - x).norm()
        with torch.no_grad():
            assert ((fused(layer, x, *args) - exact).norm() <= 1.5 * TOLERANCE[dtype] * scale).item()
            assert torch.equal(around, whole)
            layer(x, *args, inplace=True)
        assert ((x - exact).norm() <= 1.5 * TOLERANCE[dtype] * scale).item()
        x.copy_(whole[:, 1:-1, 1:-1, start : start + c])
        assert torch.equal(around, whole)

"""Tensors for the tests of CUDA kernels, and how exact their results must be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from torchops._core.devices import capability


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype) * scale


def double(*tensors: Tensor | None) -> list[Any]:
    return [None if t is None else t.double() for t in tensors]


def gradients(function: Callable[..., Tensor], inputs: Sequence[Any], cotangent: Tensor) -> tuple[Tensor, ...]:
    """Those of all inputs that are tensors; the others are None."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in inputs]
    return torch.autograd.grad(function(*leaves), [t for t in leaves if t is not None], cotangent)


def poison(*shape: int, dtype: torch.dtype) -> None:
    """Leaves NaN in the memory that the next tensor of this shape gets."""
    torch.full(shape, float("nan"), device="cuda", dtype=dtype)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """New memory is filled with NaN, so an element that no kernel writes shows."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


# Of src/cuda/gemm/plan.h.
WAYS = ("kFewRows", "kResidentWeights", "kStreamedWeights", "kSplitFloat32", "kSm80", "kSm80Resident", "kSm80Float32")


@contextmanager
def only_candidate(way: str, tiling: int = 0) -> Iterator[None]:
    """This kernel computes products, or cuBLAS where it cannot, forward and in backward passes, which stay on this
    thread."""
    with torch.autograd.set_multithreading_enabled(False):
        torch.ops.myops._only_candidate(WAYS.index(way), tiling)
        try:
            yield
        finally:
            torch.ops.myops._only_candidate(-2, 0)


def memory_of(call: Callable[[], object]) -> int:
    """Bytes that a second call allocates at its peak, its result among them; the first may make what is kept."""
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def kernel_names(call: Callable[[], object]) -> list[str]:
    """The kernels, copies and fills that a second call runs; the first may make what is kept."""
    call()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    return [event.name for event in profiler.events() or [] if event.device_type == DeviceType.CUDA]


def kernels(call: Callable[[], object]) -> int:
    """How many they are."""
    return len(kernel_names(call))


def assert_same_bits(call: Callable[[], Sequence[Tensor]], times: int = 100) -> None:
    """Of all calls, beside products on another stream."""
    first = call()
    other, neighbour = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    differ = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(times):
        with torch.cuda.stream(other):
            neighbour = neighbour @ neighbour * 1e-4
        for one, again in zip(first, call(), strict=True):
            differ += (one != again).any()
    assert int(differ) == 0


def error(got: Tensor, exact: Tensor) -> float:
    return float((got - exact).norm() / exact.norm())


def splits_float32() -> bool:
    """Whether float32 products without TF32 are split products of tensor cores."""
    return capability(0) in [(8, 0), (9, 0)]


def assert_accurate(got: Tensor, eager: Tensor, exact: Tensor) -> None:
    """At most 1.1 times the error of eager, or 1.25 times where tensor cores multiply float32, since cuBLAS adds parts
    of a sum; and the last digit of a result of few elements, which tensor cores cut off."""
    splits = got.dtype == torch.float32 and splits_float32()
    most = 1.25 if splits else 1.1
    few = (1.0 if splits else 0.5) if exact.numel() < 1000 else 0.0
    assert error(got, exact) <= most * error(eager, exact) + few * torch.finfo(got.dtype).eps

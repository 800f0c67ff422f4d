"""torch.profiler shows every operator under its name, once for each call, with the shapes of its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from op_db import OpCase
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

import torchops


def events(function: Callable[[], Any], *, cuda: bool = False) -> list[FunctionEvent]:
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities, record_shapes=True) as profiler:
        function()
        if cuda:
            torch.cuda.synchronize()
    return list(profiler.events())


def kernels(function: Callable[[], Any]) -> list[str]:
    """The names of what a second call runs on the GPU."""
    function()
    return [event.name for event in events(function, cuda=True) if event.device_type == DeviceType.CUDA]


def named(name: str, recorded: list[FunctionEvent]) -> list[FunctionEvent]:
    return [event for event in recorded if event.name == name and event.device_type == DeviceType.CPU]


@pytest.mark.ops(dtypes=[torch.float32])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_name_and_shapes(case: OpCase, requires_grad: bool) -> None:
    sample = next(s for s in case.samples if s.name == "matrix")
    args, kwargs = sample(torch.float32, "cpu", requires_grad)
    (event,) = named(case.without_overload, events(lambda: case.pure(*args, **kwargs)))
    shapes = [tuple(a.shape) if isinstance(a, torch.Tensor) else () for a in args]
    recorded: list[Any] = list(event.input_shapes)
    assert [tuple(shape) for shape in recorded][: len(shapes)] == shapes


def test_in_a_table() -> None:
    layer = torchops.nn.Dense(7, 5)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        for _ in range(3):
            layer(torch.randn(6, 7)).sum().backward()
    averages = {event.key: event for event in profiler.key_averages()}
    assert averages["myops::dense"].count == 3
    assert averages["myops::_dense_backward"].count == 3
    by_shape = [e for e in profiler.key_averages(group_by_input_shape=True) if e.key == "myops::dense"]
    assert [list(e.input_shapes) for e in by_shape] == [[[6, 7], [5, 7], [5]]]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.ops(dtypes=[torch.float32])
def test_cuda_kernels_belong_to_the_operator(case: OpCase) -> None:
    sample = next(s for s in case.samples if s.name == "matrix")
    args, kwargs = sample(torch.float32, "cuda")
    case.pure(*args, **kwargs)
    recorded = events(lambda: case.pure(*args, **kwargs), cuda=True)
    (event,) = named(case.without_overload, recorded)
    assert event.device_time_total > 0

"""`python -m benchmarks stages`: the stages of the triangle update that gate, alone, on CUDA.

    layer norm and two gated linear units, channels first:   a, b = z @ p.T * sigmoid(z @ g.T),  z = norm(x)
    norm, linear layer, gate, residual:                      x + (norm(o) @ p.T) * sigmoid(z @ g.T),  o channels first

Ours are steps of one operator, and no operators by themselves: their time is that of their kernels, as the profiler
reports it of calls of the whole operator; with it all kernels of these calls are listed. What PyTorch makes of the same
formulas is timed by events, alone.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from . import machine, timing
from . import options as shared
from .case import BACKWARD, FORWARD, Task
from .gate_lines import BANDWIDTH, RATE
from .record import Record
from .tables import table
from .triangle import Arguments, Line, make, ours

CALLS = 7
GLUS, OUT = "layer norm and GLUs", "norm, linear, gate, residual"
# Our kernels by stage and task, by a part of their names. Those of backward recompute what forward didn't save.
OURS = {
    (GLUS, FORWARD): ("PairInKernel",),
    (GLUS, BACKWARD): ("PairInKernel", "Sigmoid, false"),
    (OUT, FORWARD): ("PairOutKernel",),
    (OUT, BACKWARD): ("PairOutKernel", "Sigmoid, true"),
}


def glu_stage(x: Tensor, norm_w: Tensor, norm_b: Tensor, p: Tensor, g: Tensor) -> Tensor:
    z = F.layer_norm(x, x.shape[-1:], norm_w, norm_b)
    return (F.linear(z, p) * torch.sigmoid(F.linear(z, g))).movedim(-1, 0).contiguous()


def packed_glu_stage(x: Tensor, norm_w: Tensor, norm_b: Tensor, packed: Tensor) -> Tensor:
    z = F.layer_norm(x, x.shape[-1:], norm_w, norm_b)
    return F.glu(F.linear(z, packed)).movedim(-1, 0).contiguous()


def out_stage(
    x: Tensor, o: Tensor, in_w: Tensor, in_b: Tensor, out_w: Tensor, out_b: Tensor, p: Tensor, g: Tensor
) -> Tensor:
    z = F.layer_norm(x, x.shape[-1:], in_w, in_b)
    normed = F.layer_norm(o.movedim(0, -1), o.shape[:1], out_w, out_b)
    return x + F.linear(normed, p) * torch.sigmoid(F.linear(z, g))


def kernels(call: Callable[..., object], tensors: tuple[Tensor, ...]) -> dict[str, float]:
    """Microseconds of a call by kernel, summed over its launches: medians over several calls."""
    call(*tensors)
    torch.cuda.synchronize()
    calls: list[dict[str, float]] = []
    for _ in range(CALLS):
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            call(*tensors)
            torch.cuda.synchronize()
        sums: dict[str, float] = defaultdict(float)
        for event in profiler.events():
            if event.device_type == DeviceType.CUDA:
                sums[event.name] += event.time_range.elapsed_us()
        calls.append(sums)
    names = dict.fromkeys(name for sums in calls for name in sums)
    return {name: statistics.median(sums.get(name, 0.0) for sums in calls) for name in names}


def ours_of(results: dict[str, dict[str, float]], stage: str, task: Task) -> float:
    """Microseconds of our kernels. Backward runs the forward ones once more, which doesn't count for the stage."""
    forward, *backward = OURS[stage, task]
    sums = [(f"kernels, {FORWARD}", forward), *((f"kernels, {BACKWARD}", part) for part in backward)]
    return sum(us for calls, part in sums for name, us in results[calls].items() if part in name)


def bound(n: int, c: int, stage: str, task: Task) -> float:
    """Microseconds at the rates of `gate_lines`, if forward and backward move every tensor once."""
    passes = {  # tensors of n * n * c elements, and products of as many elements over c
        (GLUS, FORWARD): [(3, 4)],
        (GLUS, BACKWARD): [(3, 4), (4, 12)],
        (OUT, FORWARD): [(3, 2)],
        (OUT, BACKWARD): [(3, 2), (5, 6)],
    }
    elements = n * n * c
    both = [
        (2 * tensors * elements / BANDWIDTH, 2 * products * elements * c / RATE)
        for tensors, products in passes[stage, task]
    ]
    return sum(map(max, both)) * 1e6


def to_markdown(document: dict[str, Any]) -> str:
    """A row for each stage and task, with the machine."""
    results, n, c = document["microseconds"], document["n"], document["features"]
    head = ["", "bound", "our kernels", "torch.compile", "torch.compile, packed", "eager"]
    rows = []
    for stage, task in OURS:
        times, packed = (results.get(f"{stage}{which}, {task}", {}) for which in ("", ", packed"))
        cells = [
            bound(n, c, stage, task),
            ours_of(results, stage, task),
            times.get("torch.compile"),
            packed.get("torch.compile"),
            times.get("eager"),
        ]
        rows.append([f"{stage}, {task}", *("" if us is None else f"{us:.0f}" for us in cells)])
    source = f"N = {n}, {c} features; {machine.where(document)}"
    return "\n".join([*table(head, rows), "", source, ""])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    shared.add(parser, "features", "json")
    parser.add_argument("--n", type=int, default=1024)


def run(options: argparse.Namespace) -> int:
    """Measures kernels of the operator, then PyTorch's ways to compute each stage."""
    device, n, c = torch.device("cuda"), options.n, options.features
    made = make(Line("stages", n, c), device)
    names, tensors = tuple(made.parameters), made.tensors()
    record = Record(options, device, n=n, features=c, microseconds={})
    results = record.document["microseconds"]

    def whole(x: Tensor, *parameters: Tensor) -> Tensor:
        return ours(Arguments(x, None, dict(zip(names, parameters, strict=True))))

    def in_place(x: Tensor, *parameters: Tensor) -> None:
        torch.ops.myops.add_triangle_multiplicative_update_(x, **dict(zip(names, parameters, strict=True)))

    with torch.no_grad():
        results["kernels, forward"] = kernels(whole, tensors)
        results["kernels, in place"] = kernels(in_place, (tensors[0].clone(), *tensors[1:]))
    trained = (*(t.detach().requires_grad_() for t in tensors), torch.randn_like(tensors[0]))
    results["kernels, forward and backward"] = kernels(timing.contender(whole, BACKWARD), trained)
    del trained
    record.save()
    for name, times in results.items():
        record.show("\n".join([name, *(f"  {us:8.1f}  {kernel[:150]}" for kernel, us in times.items())]))

    x, in_w, in_b, p_in, g_in, out_w, out_b, p_out, g_out = (made.x[0], *made.parameters.values())
    o = torch.randn(c, n, n, device=device, dtype=torch.bfloat16)
    stages: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
        GLUS: (glu_stage, (x, in_w, in_b, p_in, g_in)),
        f"{GLUS}, packed": (packed_glu_stage, (x, in_w, in_b, torch.cat([p_in, g_in]))),
        OUT: (out_stage, (x, o, in_w, in_b, out_w, out_b, p_out, g_out)),
    }
    for task in (FORWARD, BACKWARD):
        for name, (function, arguments) in stages.items():
            record.progress.case(f"{name}, {task}")
            inputs = tuple(t.detach().requires_grad_(task == BACKWARD) for t in arguments)
            if task == BACKWARD:
                with torch.no_grad():
                    inputs = (*inputs, torch.randn_like(function(*arguments)))
            ways = {"torch.compile": torch.compile(function, dynamic=False), "eager": function}
            calls = {way: timing.contender(f, task) for way, f in ways.items()}
            measured = timing.measure(calls, [inputs], task, device, timing.effort("cuda", quick=False))
            times = {way: timing_.seconds * 1e6 for way, timing_ in measured.timings.items()}
            results[f"{name}, {task}"] = times
            record.show(f"{name} {task} {times} {measured.errors}")
            record.save()
            del inputs
            torch.cuda.empty_cache()
    return 0

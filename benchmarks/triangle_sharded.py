"""A triangle update whose pair tensor is shared by several GPUs, a part of its rows each, against one GPU that has all:
`torchrun --standalone --nproc-per-node=2 -m benchmarks triangle_sharded`.

What GPUs send each other is in `torchops.distributed.triangle`. The time of a call is that of the slowest GPU, from a
barrier to its last kernel. Contenders are interleaved; each has a median over the rounds. `--device cpu` tries the
script with gloo.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import torchops.distributed  # noqa: F401 (registers its DTensor rules)

from . import options as shared
from .case import BACKWARD, FORWARD, Task
from .record import Record
from .timing import context
from .triangle import Line, make

Call = Callable[[], Any]


def calls(n: int, c: int, direction: str, task: Task, device: torch.device) -> dict[str, Call]:
    """The update on one GPU and on all of them, of the same values."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    whole, _, parameters = make(Line("sharded", n, c, dtype=dtype), device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    rows = distribute_tensor(whole, mesh, [Shard(1)])
    replicated = {name: distribute_tensor(w, mesh, [Replicate()]) for name, w in parameters.items()}

    def call(x: Tensor, weights: dict[str, Any]) -> Call:
        leaves = [x, *weights.values()]
        if task == FORWARD:
            return lambda: torch.ops.myops.triangle_multiplicative_update(x, direction, **weights)
        for leaf in leaves:
            leaf.requires_grad_()
        grad = torch.ones_like(x)

        def step() -> Any:
            y = torch.ops.myops.triangle_multiplicative_update(x, direction, **weights)
            return torch.autograd.grad(y, leaves, grad)

        return step

    return {"one": call(whole, parameters), "rows": call(rows, replicated)}


def check(ways: dict[str, Call], task: Task, dtype: torch.dtype) -> float:
    """The relative distance of both results, and of x's gradients, by norms."""
    alone, shared = (way() for way in ways.values())
    alone, shared = (alone, shared) if task == FORWARD else (alone[0], shared[0])
    shared = shared.full_tensor()
    distance = ((shared.double() - alone.double()).norm() / alone.double().norm()).item()
    if not distance < 8 * torch.finfo(dtype).eps:
        raise AssertionError(f"one and several differ by {distance}")
    return distance


def measure(ways: dict[str, Call], device: torch.device, rounds: int) -> dict[str, float]:
    """Microseconds on the slowest GPU."""
    samples: dict[str, list[float]] = {name: [] for name in ways}
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for way in ways.values():
        for _ in range(2):
            way()
    for _ in range(rounds):
        for name, way in ways.items():
            dist.barrier()
            wait()
            start = time.perf_counter()
            result = way()
            wait()
            samples[name].append(time.perf_counter() - start)
            del result
    slowest = torch.tensor(list(samples.values()), dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return dict(zip(ways, (statistics.median(times) * 1e6 for times in slowest.tolist()), strict=True))


def start(options: argparse.Namespace) -> tuple[torch.device, Record]:
    """The device of this process; the record, which that of rank 0 prints and writes."""
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    rank = dist.get_rank()
    device = torch.device(options.device, rank) if options.device == "cuda" else torch.device("cpu")
    if options.device == "cuda":
        torch.cuda.set_device(device)
    return device, Record(options, device, shown=rank == 0, processes=dist.get_world_size())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    sizes = {"device": "cuda", "sizes": [1024, 2048], "rounds": 15}
    shared.add(parser, "device", "sizes", "features", "rounds", "json", **sizes)


def run(options: argparse.Namespace) -> int:
    """Measures each N, direction and task."""
    device, record = start(options)
    for n in options.sizes:
        for direction in ("outgoing", "incoming"):
            for task in (FORWARD, BACKWARD):
                record.progress.case(f"{n} {direction} {task}")
                with context(task):
                    ways = calls(n, options.features, direction, task, device)
                    distance = check(ways, task, torch.bfloat16)
                    times = measure(ways, device, options.rounds)
                result = {"n": n, "c": options.features, "direction": direction, "task": task, "distance": distance}
                record.add("results", result | {"microseconds": times, "speedup": times["one"] / times["rows"]})
                del ways
    dist.destroy_process_group()
    return 0

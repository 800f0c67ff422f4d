"""The pair layer on several GPUs: `torchrun --standalone --nproc-per-node=2 -m benchmarks pair_layer_sharded`.

- Rows: the pair tensor's rows are sharded over the GPUs, against one GPU that has all. The time of a call is that of
  the slowest GPU, from a barrier to its last kernel. Contenders are interleaved; each has a median over the rounds.
  Memory is the most that a GPU allocates in a call, beside its part of the pair tensor, the parameters, and whatever
  else was there before.
- Data parallel: the gradients of a stack of layers under DistributedDataParallel and `fully_shard`, one of a batch on
  each GPU, against those of one GPU that has the batch.

`--device cpu` tries the script with gloo.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import torchops
import torchops.distributed  # registers its DTensor rules

from . import options as shared
from .case import BACKWARD, FORWARD, Task
from .pair_layer import parameters_
from .peak_memory import peak_of
from .triangle_sharded import Call, measure, start


def layer_of(c: int, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Any:
    heads = max(1, c // 32)
    return parameters_(torchops.nn.PairLayer(c, heads, c // heads, dropout=0), seed).to(device, dtype)


def problem(n: int, c: int, device: torch.device, dtype: torch.dtype, batch: int = 1) -> tuple[Tensor, Tensor]:
    """A pair tensor and a mask, the same on every rank."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(batch, n, n, c, device=device, dtype=dtype, generator=generator)
    return x, (torch.rand(batch, n, n, device=device, generator=generator) > 0.1).to(dtype)


# --- rows ------------------------------------------------------------------------------------------------------------


def ways(n: int, c: int, task: Task, device: torch.device, dtype: torch.dtype) -> dict[str, Call]:
    """The layer on one GPU and on all of them: in place, or forward + backward."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    x, mask = problem(n, c, device, dtype)
    one = layer_of(c, device, dtype)
    several = distribute_module(layer_of(c, device, dtype), mesh)

    def call(layer: Any, x: Any, mask: Any) -> Call:
        if task == FORWARD:
            return lambda: layer(x, mask, inplace=True)
        grad = torch.ones_like(x)
        leaves = [x.requires_grad_(), *layer.parameters()]
        return lambda: torch.autograd.grad(layer(x, mask), leaves, grad)

    # Cloned, so that they are not views of what every rank has made.
    parts = (distribute_tensor(t, mesh, [Shard(1)], src_data_rank=None).clone() for t in (x, mask))
    return {"one": call(one, x, mask), "rows": call(several, *parts)}


def distance(got: Any, exact: Tensor) -> float:
    """The relative distance, by norms."""
    got = got.full_tensor().double() if hasattr(got, "full_tensor") else got.double()
    return ((got - exact.double()).norm() / exact.double().norm()).item()


def allowed(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps * (4 if dtype.itemsize == 2 else 100)


def check(contenders: dict[str, Call], task: Task, dtype: torch.dtype) -> float:
    """The relative distance of the results, or the largest one of the gradients."""
    alone, shared = (way() for way in contenders.values())
    alone, shared = ([alone], [shared]) if task == FORWARD else (alone, shared)
    distances = [distance(b, a) for a, b in zip(alone, shared, strict=True)]
    if not max(distances) < allowed(dtype):
        raise AssertionError(f"one and several differ by {distances}")
    return max(distances)


def memory(contenders: dict[str, Call], device: torch.device) -> dict[str, float]:
    """The most MiB that any GPU allocates in a call."""
    if device.type != "cuda":
        return {}
    peaks = [peak_of(way, device, warm_up=False) / 2**20 for way in contenders.values()]
    most = torch.tensor(peaks, device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return dict(zip(contenders, most.tolist(), strict=True))


# --- data parallel ---------------------------------------------------------------------------------------------------


class Stack(nn.Module):
    def __init__(self, count: int, c: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer_of(c, device, dtype, seed) for seed in range(count))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask)
        return x


def _fully_shard(model: Any) -> Any:
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "DistributedDataParallel": DistributedDataParallel,
    "fully_shard": _fully_shard,
}


def data_parallel(n: int, c: int, device: torch.device, dtype: torch.dtype, layers: int = 4) -> dict[str, Any]:
    """For each wrapper, the distance of the parameters' gradients from those of one GPU: the worst one, and that of all
    together. For comparison, one GPU with one batch element at a time, which also adds in another order."""
    size, rank = dist.get_world_size(), dist.get_rank()
    x, mask = problem(n, c, device, dtype, batch=size)
    cotangent = torch.randn(x.shape, device=device, generator=torch.Generator(device).manual_seed(1)).to(dtype)
    one = Stack(layers, c, device, dtype)

    def gradients(model: Any, batch: slice) -> list[Any]:
        model(x[batch], mask[batch]).backward(cotangent[batch])
        return [p.grad for p in model.parameters()]

    exact = [g.double() / size for g in gradients(copy.deepcopy(one), slice(0, size))]
    parts = [gradients(copy.deepcopy(one), slice(i, i + 1)) for i in range(size)]
    in_parts = [sum(g.double() for g in of_one) / size for of_one in zip(*parts, strict=True)]
    found = {"one by one": in_parts}
    for name, wrap in WRAPPERS.items():
        made = gradients(wrap(copy.deepcopy(one)), slice(rank, rank + 1))
        found[name] = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in made]
    result: dict[str, Any] = {"n": n, "c": c, "layers": layers, "dtype": str(dtype).removeprefix("torch.")}
    for name, values in found.items():
        flat, whole = (torch.cat([g.double().flatten() for g in gs]) for gs in (values, exact))
        worst = max(distance(g, e) for g, e in zip(values, exact, strict=True))
        result[name] = {"all": distance(flat, whole), "worst": worst}
        if not result[name]["all"] < allowed(dtype):
            raise AssertionError(f"{name} and one differ by {result[name]}")
    return result


# --- command line ----------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    sizes = {"device": "cuda", "sizes": [1024, 2048], "rounds": 7}
    shared.add(parser, "device", "sizes", "features", "rounds", "json", **sizes)
    parser.add_argument("--training", type=shared.numbers, default=[768, 1024], help="N of forward + backward")
    parser.add_argument("--data-parallel", type=shared.numbers, default=[256], help="N of the stacks")


def run(options: argparse.Namespace) -> int:
    """Measures the gradients of stacks, then layers in place and in training."""
    cuda, c = options.device == "cuda", options.features
    device, record = start(options)
    dtype = torch.bfloat16 if cuda else torch.float32

    def show(section: str, result: dict[str, Any]) -> None:
        record.add(section, result, json.dumps({section: result}))

    for n in options.data_parallel:
        for kind in (torch.float32, dtype) if cuda else (torch.float64,):
            show("data parallel", data_parallel(n, c, device, kind))
    for task, ns in ((FORWARD, options.sizes), (BACKWARD, options.training)):
        for n in ns:
            with torch.set_grad_enabled(task == BACKWARD):
                contenders = ways(n, c, task, device, dtype)
                result: dict[str, Any] = {"n": n, "c": c, "task": task}
                result["distance"] = check(contenders, task, dtype)
                result["microseconds"] = measure(contenders, device, options.rounds)
                result["speedup"] = result["microseconds"]["one"] / result["microseconds"]["rows"]
                result["MiB"] = memory(contenders, device)
            show("rows", result)
            del contenders
            if cuda:
                torch.cuda.empty_cache()
    dist.destroy_process_group()
    return 0

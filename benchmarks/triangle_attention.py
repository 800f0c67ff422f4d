"""Triangle attention alone beside PyTorch's ways to compute it: `python -m benchmarks triangle_attention`.

Four heads of 32 features; q, k, v are views of one packed product as in the layer, the bias lies in rows of keys, and a
mask leaves out a tenth of the keys. Without the kernel for Hopper (`kernel_path("portable")`), Triton's run.
FlexAttention is compiled for each N. SDPA takes the bias alone: with a mask, it would need a tensor of all scores.
Times are those of `timing.measure`; first calls, by the clock, contain what they compile.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

import torchops

from . import machine, report, timing
from . import options as shared
from .case import BACKWARD, FORWARD, Task
from .record import Record
from .tables import table

HEADS, HEAD_DIM = 4, 32
OURS, PORTABLE, FLEX = "torchops", "torchops without the kernel for Hopper", "FlexAttention, compiled"
SDPA, WRITTEN = "SDPA, without the mask", "as written"
SIZES = {"cuda": (384, 385, 768, 769, 1024, 1025), "cpu": (64,)}
MOST_WRITTEN = 768  # the scores take 3.4 GiB in 16 bits there, several times over


def tensors(n: int, dtype: torch.dtype, device: torch.device, task: Task) -> tuple[Tensor, ...]:
    """q, k, v, bias, mask, and the cotangent for gradients."""
    packed = torch.randn(1, n, n, 3 * HEADS * HEAD_DIM, device=device, dtype=dtype)
    qkv = [t.unflatten(-1, (HEADS, HEAD_DIM)).transpose(-3, -2) for t in packed.chunk(3, -1)]
    bias = torch.randn(1, 1, HEADS, n, n, device=device, dtype=dtype)
    mask = (torch.rand(1, n, 1, 1, n, device=device) > 0.1) | torch.eye(n, device=device).bool()[None, :, None, None]
    if task == FORWARD:
        return *qkv, bias, mask
    return *(t.detach().requires_grad_() for t in (*qkv, bias)), mask, torch.randn_like(qkv[0])


def portable(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    with torchops.cuda.kernel_path("portable"):
        return torchops.triangle_attention(q, k, v, bias, mask)


@cache
def _flex(n: int) -> Callable[..., Tensor]:
    """Compiled with static shapes: with symbolic sizes, the kernel is several times slower."""

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
        kept = mask[0, :, 0, 0].to(bias.dtype)

        def score(value: Tensor, row: Tensor, h: Tensor, j: Tensor, key: Tensor) -> Tensor:
            return value + bias[0, 0, h, j, key] + (kept[row, key] - 1) * 1e9

        out: Any = flex_attention(q[0], k[0], v[0], score_mod=score)
        return out[None]

    return torch.compile(attend, dynamic=False)


def flex(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    return _flex(q.shape[-2])(q, k, v, bias, mask)


def sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q[0], k[0], v[0], attn_mask=bias[0])[None]


def written(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.mT * HEAD_DIM**-0.5 + bias - (~mask).to(q.dtype) * 1e9
    return torch.softmax(scores, -1) @ v


def contenders(n: int, device_type: str) -> dict[str, Callable[..., Tensor]]:
    ways: dict[str, Callable[..., Tensor]] = {OURS: torchops.triangle_attention, SDPA: sdpa}
    if device_type == "cuda":  # on the CPU, Inductor doesn't support FlexAttention with captured gradients
        ways |= {PORTABLE: portable, FLEX: flex}
    if n <= MOST_WRITTEN:
        ways[WRITTEN] = written
    return ways


def measure(n: int, task: Task, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    sets = timing.rotate(lambda: tensors(n, dtype, device, task))
    ways = {name: timing.contender(way, task) for name, way in contenders(n, device.type).items()}
    first: dict[str, float | str] = {}
    with timing.context(task):
        for name, way in ways.items():
            start = time.perf_counter()
            try:
                way(*sets[0])
            except Exception as error:
                first[name] = timing.first_line(error)
                continue
            if device.type == "cuda":
                torch.cuda.synchronize()
            first[name] = time.perf_counter() - start
    measured = timing.measure(ways, sets, task, device, timing.effort(device.type, quick=False))
    return {
        "n": n,
        "task": task,
        "dtype": str(dtype).removeprefix("torch."),
        "microseconds": {name: t.seconds * 1e6 for name, t in measured.timings.items()},
        "first call, s": first,
        "errors": measured.errors,
    }


def to_markdown(document: dict[str, Any]) -> str:
    """A row for each N and task: microseconds of a call, and the machine."""
    measured = {way for result in document["results"] for way in result["microseconds"]}
    ways = [way for way in (OURS, PORTABLE, FLEX, SDPA, WRITTEN) if way in measured]
    rows = []
    for result in document["results"]:
        times = result["microseconds"]
        cells = [report.format_seconds(times[way] / 1e6) if way in times else "" for way in ways]
        rows.append([str(result["n"]), f"{result['task']}, {result['dtype']}", *cells])
    return "\n".join([*table(["N", "call", *ways], rows), "", machine.where(document), ""])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    shared.add(parser, "device", "sizes", "json")
    parser.add_argument("--dtype", help="bfloat16 on CUDA, float32 elsewhere, if it is not given")


def run(options: argparse.Namespace) -> int:
    """Measures each N, forward and with backward."""
    device = shared.device_of(options)
    dtype = getattr(torch, options.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    torch._dynamo.config.recompile_limit = 64  # one graph per N
    sizes = options.sizes or SIZES[device.type]
    record = Record(options, device, 2 * len(sizes), heads=HEADS, head_dim=HEAD_DIM)
    for task in (FORWARD, BACKWARD):
        for n in sizes:
            record.progress.case(f"{n} {task}")
            record.add("results", measure(n, task, dtype, device))
            torch.cuda.empty_cache()
    return 0

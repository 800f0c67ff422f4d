"""Triangle attention alone beside PyTorch's ways to compute it: `python -m benchmarks.triangle_attention`.

Four heads of 32 features; q, k, v are views of one packed product as in the layer, the bias lies in rows of keys, and a
mask leaves out a tenth of the keys. FlexAttention is compiled for each N. SDPA takes the bias alone: with a mask, it
would need a tensor of all scores. Times are those of `timing.measure`; first calls, by the clock, contain what they
compile.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

import torchops

from . import machine, report, timing
from .case import BACKWARD, FORWARD, Task

HEADS, HEAD_DIM = 4, 32
OURS, FLEX, SDPA, WRITTEN = "torchops", "FlexAttention, compiled", "SDPA, without the mask", "as written"
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
        ways[FLEX] = flex
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
    ways = (OURS, FLEX, SDPA, WRITTEN)
    lines = [f"| N | call | {' | '.join(ways)} |", "|---" * (2 + len(ways)) + "|"]
    for result in document["results"]:
        times = result["microseconds"]
        cells = [report.format_seconds(times[way] / 1e6) if way in times else "" for way in ways]
        lines.append(f"| {result['n']} | {result['task']}, {result['dtype']} | {' | '.join(cells)} |")
    about = document["machine"]
    where = f"{about['machine']}, torch {about['torch']}, {machine.revisions(about)}."
    return "\n".join([*lines, "", where, ""])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sizes", type=lambda text: [int(n) for n in text.split(",")], help="N, by comma")
    parser.add_argument("--dtype", help="bfloat16 on CUDA, float32 elsewhere, if it is not given")
    parser.add_argument("--json", type=Path, help="where to write the results")
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    dtype = getattr(torch, options.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    command = machine.command("benchmarks.triangle_attention", argv)
    torch._dynamo.config.recompile_limit = 64  # one graph per N
    results: list[dict[str, Any]] = []
    for task in (FORWARD, BACKWARD):
        for n in options.sizes or SIZES[device.type]:
            results.append(measure(n, task, dtype, device))
            print(json.dumps(results[-1]), flush=True)
            if options.json:  # partial results, in case the run is stopped
                document: dict[str, Any] = {"machine": machine.describe(device), "command": command}
                document |= {"heads": HEADS, "head_dim": HEAD_DIM}
                options.json.write_text(json.dumps(document | {"results": results}, indent=1) + "\n")
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

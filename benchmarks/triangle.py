"""The triangle update of pair tensors against PyTorch's ways to write it: `python -m benchmarks.triangle`.

It has no row that depends on a row of its input alone, so it is no `Operator` of the other benchmarks. Time is that of
`timing.measure`: contenders interleaved, cold inputs. Memory is what a call allocates beside its inputs, on CUDA, in
pair tensors of N * N * max(c, d) elements.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import torchops

from . import machine, timing
from .case import BACKWARD, FORWARD, Task

NAMES = (
    *("norm_in_weight", "norm_in_bias", "p_in_weight", "g_in_weight"),
    *("norm_out_weight", "norm_out_bias", "p_out_weight", "g_out_weight"),
)


def make(n: int, c: int, d: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """x, and the parameters in the order of NAMES."""

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype, device=device) / (shape[-1] ** 0.5 if len(shape) == 2 else 1)

    x = torch.randn(1, n, n, c, dtype=dtype, device=device)
    norms = (random(c) + 1, random(c), random(d) + 1, random(d))
    return x, *norms[:2], random(2 * d, c), random(2 * d, c), *norms[2:], random(c, d), random(c, c)


def ours(x: Tensor, *parameters: Tensor) -> Tensor:
    return torch.ops.myops.triangle_multiplicative_update(x, **dict(zip(NAMES, parameters, strict=True)))


def _ab(x: Tensor, norm_w: Tensor, norm_b: Tensor, p_in: Tensor, g_in: Tensor) -> tuple[Tensor, Tensor]:
    z = F.layer_norm(x, x.shape[-1:], norm_w, norm_b)
    return z, F.linear(z, p_in) * torch.sigmoid(F.linear(z, g_in))


def _out(o: Tensor, z: Tensor, norm_w: Tensor, norm_b: Tensor, p_out: Tensor, g_out: Tensor) -> Tensor:
    return F.linear(F.layer_norm(o, o.shape[-1:], norm_w, norm_b), p_out) * torch.sigmoid(F.linear(z, g_out))


def as_written(x: Tensor, *parameters: Tensor) -> Tensor:
    """As papers have it: the product takes its channels last."""
    z, ab = _ab(x, *parameters[:4])
    return _out(torch.einsum("bikc,bjkc->bijc", *ab.chunk(2, -1)), z, *parameters[4:])


def channels_first(x: Tensor, *parameters: Tensor) -> Tensor:
    """The strongest way in PyTorch: one copy, so that the product finds matrices."""
    z, ab = _ab(x, *parameters[:4])
    a, b = ab.movedim(-1, -3).contiguous().chunk(2, -3)
    return _out((a @ b.mT).movedim(-3, -1), z, *parameters[4:])


def contenders(compiled: bool) -> dict[str, Callable[..., Any]]:
    ways: dict[str, Callable[..., Any]] = {
        "torchops": ours,
        "channels first": channels_first,
        "as written": as_written,
    }
    if compiled:
        ways["channels first, torch.compile"] = torch.compile(channels_first, dynamic=False)
    return ways


def extra_pair_tensors(call: Callable[..., Any], inputs: tuple[Tensor, ...], d: int) -> float | None:
    """The peak of a call beside what was there, its result included."""
    x = inputs[0]
    if not x.is_cuda:
        return None
    call(*inputs)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = call(*inputs)
    torch.cuda.synchronize()
    del out
    pair = x.numel() // x.shape[-1] * max(x.shape[-1], d) * x.element_size()
    return (torch.cuda.max_memory_allocated() - before) / pair


def measure(n: int, c: int, task: Task, dtype: torch.dtype, device: torch.device, compiled: bool) -> dict[str, Any]:
    ways = {name: timing.contender(way, task) for name, way in contenders(compiled).items()}

    def inputs() -> tuple[Tensor, ...]:
        tensors = make(n, c, c, dtype, device)
        if task == FORWARD:
            return tensors
        return *(t.requires_grad_() for t in tensors), torch.randn_like(tensors[0])  # the cotangent

    sets = timing.rotate(inputs)
    with timing.context(task):
        arguments = [t.detach() for t in sets[0][: 1 + len(NAMES)]]
        if n <= 256:
            exact = as_written(*(t.double() for t in arguments))
            error = ((ours(*arguments).double() - exact).norm() / exact.norm()).item()
            if not error < 8 * torch.finfo(dtype).eps:
                raise AssertionError(f"N = {n}, {dtype}: relative error {error}")
        memory = {name: extra_pair_tensors(way, sets[0], c) for name, way in ways.items()}
    measured = timing.measure(ways, sets, task, device, timing.effort(device.type, quick=False))
    return {
        "n": n,
        "c": c,
        "task": task,
        "dtype": str(dtype).removeprefix("torch."),
        "microseconds": {name: t.seconds * 1e6 for name, t in measured.timings.items()},
        "over ours": {name: t.ratio for name, t in measured.timings.items()},
        "pair tensors": memory,
        "errors": measured.errors,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sizes", type=lambda text: [int(n) for n in text.split(",")], help="N, by comma")
    parser.add_argument("--features", type=int, default=128)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32", "float64"])
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--json", type=Path, help="where to write the results")
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    cuda = device.type == "cuda"
    dtype = getattr(torch, options.dtype or ("bfloat16" if cuda else "float32"))
    results = []
    for n in options.sizes or ([256, 512, 513, 768, 769, 1024, 1025] if cuda else [128, 256]):
        for task in (FORWARD, BACKWARD):
            result = measure(n, options.features, task, dtype, device, not options.no_compile)
            results.append(result)
            times = ", ".join(f"{name} {us:.0f} us" for name, us in result["microseconds"].items())
            print(f"N = {n}, {task}: {times}", flush=True)
    if options.json:
        document = {"machine": machine.describe(device), "torchops": torchops.__version__, "results": results}
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""`python -m benchmarks.eight_bits`: `dense_scaled` beside `torch._scaled_mm`, and beside `dense` in bfloat16, on CUDA.

`_scaled_mm` takes the bias, and its result is overwritten by the sigmoid. Scales are those of a tensor, or of its rows.
Before it is timed, each way is compared with float64 of the same eight-bit numbers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import torchops

from . import machine, timing
from .case import FORWARD

SHAPES = ((8192, 8192, 8192), (16384, 4096, 4096), (4096, 4096, 4096), (512, 2048, 2048), (64, 4096, 4096))
SCALES = ("per tensor", "per row")
CHECKED_ROWS = 128
MOST_ERROR = 4e-3  # relative to the norm; half a unit in the last place of bfloat16 is 2e-3


def rounded(t: Tensor, dim: int | None) -> tuple[Tensor, Tensor]:
    """`t / scale` in float8_e4m3fn, and the scale."""
    largest = t.abs().amax(dim, keepdim=True) if dim is not None else t.abs().max().reshape(1)
    scale = largest.float() / torch.finfo(torch.float8_e4m3fn).max
    return (t / scale).to(torch.float8_e4m3fn), scale


def scaled_mm(fast: bool, x: Tensor, w: Tensor, scale_x: Tensor, scale_w: Tensor, b: Tensor) -> Tensor:
    z = torch._scaled_mm(x, w.t(), scale_x, scale_w, bias=b, out_dtype=b.dtype, use_fast_accum=fast)
    return z.sigmoid_()


WAYS: dict[str, Callable[..., Tensor]] = {
    "`dense_scaled`": torchops.dense_scaled,
    "`_scaled_mm`, then `sigmoid_`": partial(scaled_mm, False),
    "with `use_fast_accum=True`": partial(scaled_mm, True),
}
BFLOAT16 = "`dense` in bfloat16"


def relative_error(way: Callable[..., Tensor], arguments: Sequence[Tensor]) -> float:
    """||y - exact|| / ||exact|| of some rows."""
    x, w, scale_x, scale_w, b = arguments
    rows = torch.linspace(0, x.shape[0] - 1, CHECKED_ROWS, device=x.device).long()
    scale = scale_x if scale_x.numel() == 1 else scale_x[rows]
    z = (x.float()[rows].double() @ w.double().t()) * scale.double() * scale_w.double() + b.double()
    exact = torch.sigmoid(z)
    return ((way(*arguments)[rows].double() - exact).norm() / exact.norm()).item()


def measure(shape: tuple[int, int, int], device: torch.device, effort: timing.Effort) -> dict[str, Any]:
    """Microseconds and errors of all contenders, by kind of scales."""
    rows, features, out = shape
    microseconds: dict[str, dict[str, float]] = {}
    accuracy: dict[str, dict[str, float]] = {}
    problems: dict[str, str] = {}

    def plain() -> tuple[Tensor, ...]:
        x, w = torch.randn(rows, features, device=device), torch.randn(out, features, device=device) / features**0.5
        return x, w, torch.randn(out, device=device, dtype=torch.bfloat16)

    def inputs(dim: int | None) -> tuple[Tensor, ...]:
        x, w, b = plain()
        (x8, scale_x), (w8, scale_w) = rounded(x, dim), rounded(w, dim)
        return x8, w8, scale_x, scale_w if dim is None else scale_w.t().contiguous(), b, x.bfloat16(), w.bfloat16()

    for scales, dim in zip(SCALES, (None, -1), strict=True):
        sets = timing.rotate(partial(inputs, dim))
        first = sets[0][:5]
        calls: dict[str, Callable[..., Any]] = {}
        accuracy[scales] = {}
        for name, way in WAYS.items():
            try:
                error = accuracy[scales][name] = relative_error(way, first)
                if not error < MOST_ERROR:
                    raise AssertionError(f"relative error {error:.1e}")
                calls[name] = lambda *tensors, way=way: way(*tensors[:5])
            except Exception as problem:
                problems[f"{name}, {scales}"] = timing.first_line(problem)
        calls[BFLOAT16] = lambda *tensors: torchops.dense(tensors[5], tensors[6], tensors[4])
        with torch.no_grad():
            measured = timing.measure(calls, sets, FORWARD, device, effort)
        microseconds[scales] = {name: time.seconds * 1e6 for name, time in measured.timings.items()}
        problems |= {f"{name}, {scales}": problem for name, problem in measured.errors.items()}
        del sets, first
    return {"shape": shape, "microseconds": microseconds, "relative errors": accuracy, "errors": problems}


def to_markdown(document: dict[str, Any]) -> str:
    """A row for each shape, with the machine."""
    head = ["rows, in, out", *WAYS, BFLOAT16]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for result in document["results"]:
        times = [result["microseconds"][scales] for scales in SCALES]
        cells = [" / ".join(_microseconds(t[name]) if name in t else "-" for t in times) for name in WAYS]
        cells.append(_microseconds(times[0][BFLOAT16]) if BFLOAT16 in times[0] else "-")
        lines.append(f"| {', '.join(map(str, result['shape']))} | {' | '.join(cells)} |")
    about = document["machine"]
    where = f"{about['machine']}, torch {about['torch']}, {machine.revisions(about)}."
    return "\n".join([*lines, "", f"Microseconds, with scales {' / '.join(SCALES)}. {where}", ""])


def _microseconds(time: float) -> str:
    return f"{time:.{0 if time >= 100 else 1}f}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.eight_bits", description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", type=lambda text: tuple(int(n) for n in text.split(",")), action="append")
    parser.add_argument("--quick", action="store_true", help="few rounds, for a rough look")
    parser.add_argument("--json", type=Path, help="where to write the results")
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    command = machine.command("benchmarks.eight_bits", argv)
    effort = timing.effort(device.type, options.quick)
    torch.manual_seed(0)
    results: list[dict[str, Any]] = []
    for shape in options.shape or SHAPES:
        results.append(measure(shape, device, effort))
        print(json.dumps(results[-1]), flush=True)
        document = {"machine": machine.describe(device), "command": command, "results": results}
        # After each shape, so that a run that is stopped keeps its results.
        if options.json:
            options.json.write_text(json.dumps(document, indent=1) + "\n")
    print(to_markdown(document))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

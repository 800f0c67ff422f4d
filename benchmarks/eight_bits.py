"""`python -m benchmarks eight_bits`: `dense_scaled` beside `torch._scaled_mm`, and beside `dense` in bfloat16, on CUDA.

`_scaled_mm` takes the bias, and its result is overwritten by the sigmoid. Scales are those of a tensor, or of its rows.
Before it is timed, each way is compared with float64 of the same eight-bit numbers.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import torchops

from . import machine, timing
from . import options as shared
from .case import FORWARD
from .record import Record
from .tables import table

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
    rows = []
    for result in document["results"]:
        times = [result["microseconds"][scales] for scales in SCALES]
        cells = [" / ".join(_microseconds(t[name]) if name in t else "-" for t in times) for name in WAYS]
        cells.append(_microseconds(times[0][BFLOAT16]) if BFLOAT16 in times[0] else "-")
        rows.append([", ".join(map(str, result["shape"])), *cells])
    source = f"Microseconds, with scales {' / '.join(SCALES)}. {machine.where(document)}"
    return "\n".join([*table(head, rows), "", source, ""])


def _microseconds(time: float) -> str:
    return f"{time:.{0 if time >= 100 else 1}f}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    shared.add(parser, "device", "quick", "json", device="cuda")
    parser.add_argument("--shape", type=lambda text: tuple(shared.numbers(text)), action="append", help="rows,in,out")


def run(options: argparse.Namespace) -> int:
    """Measures, prints a line for each shape, and then the table."""
    device = shared.device_of(options)
    effort = timing.effort(device.type, options.quick)
    torch.manual_seed(0)
    shapes = options.shape or SHAPES
    record = Record(options, device, len(shapes))
    record.collect("results", (measure(shape, device, effort) for shape in shapes), "shapes")
    print(to_markdown(record.document))
    return 0

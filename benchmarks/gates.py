"""`python -m benchmarks gates`: gates, gated linear units and batched products in place, beside what bounds them.

`benchmarks run` compares the ways to write an operator. This goes through sizes, dtypes and gradients of a few of them:
torchops, `torch.compile` with the weights apart and packed into one, eager mode, a Triton kernel. `--path portable`
measures the kernels that GPUs of other architectures get, `--path cublas` those of dtypes that have no kernel, and
`--stream` float32 rows beside 16-bit weights.

The bound is the sum over forward and backward of max(bytes / bandwidth, operations / rate), each tensor moved once, at
the rates that a copy and the best product reach on one H100; backward makes the products of the gates again.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import torchops

from . import implementations, machine, parallel, timing
from . import options as shared
from .case import BACKWARD, FORWARD, OVERHEAD_GRAD, Shape, Task
from .gate_lines import GLUS, Line, bound, cublas_lines, lines, portable_lines, stream_lines
from .operators import OPERATORS
from .peak_memory import peak_of
from .record import Record, read
from .run import precision
from .tables import table

OURS, COMPILED, PACKED, EAGER, TRITON = "torchops", "torch.compile", "torch.compile, packed", "eager", "Triton"
PRODUCT, SECOND, LINEAR = "packed product alone", "torch.bmm, new tensor", "F.linear alone"
CAST = "torchops, x cast before"


@dataclass
class Result:
    """Medians in microseconds and extra memory in bytes at the peak, by contender. The bound is None on other GPUs."""

    line: Line
    bound: float | None
    microseconds: dict[str, float]
    over_ours: dict[str, float]
    peak_bytes: dict[str, int]
    errors: dict[str, str]


def _packed(activation: str, x: Tensor, p: Tensor, pb: Tensor) -> Tensor:
    value, gate = F.linear(x, p, pb).chunk(2, -1)
    return value * (F.silu(gate) if activation == "silu" else torch.sigmoid(gate))


def _overwritten(v: Tensor, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """gate_ on a tensor that shares the memory of a leaf but isn't one, so that gradients are measured without a
    copy."""
    return torchops.gate_(_Same.apply(v), x, w, b)


class _Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, v: Tensor) -> Tensor:
        return v.new_empty(0).set_(v.detach())  # type: ignore[call-overload]

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        return cotangents[0]


def _batched(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    batch, rows, n = shape
    b = torch.randn(batch, n, n, device=device, dtype=dtype) / n**0.5  # keeps the size of a on average
    return torch.randn(batch, rows, n, device=device, dtype=dtype), b


def inputs(line: Line, device: torch.device) -> tuple[Tensor, ...]:
    """The inputs of the operator; for a gated linear unit, then the packed parameters; for gradients, the cotangent."""
    dtype = getattr(torch, line.dtype)
    make = _batched if line.op == "square_matmul_" else OPERATORS[line.op].make
    tensors = make(line.shape, dtype, device)
    if line.op == "gate_":
        # Nearly open: each call multiplies v, and products of what would soon be zeros take less power and time.
        tensors[3].add_(8)
    if line.op in GLUS:
        _, w, wg, b, bg = tensors
        tensors = (*tensors, torch.cat([w, wg]), torch.cat([b, bg]))
    if line.stream:
        wide = [i for i, name in enumerate("x" if line.op in GLUS else "vx") if name in line.stream]
        tensors = tuple(tensor.float() if i in wide else tensor for i, tensor in enumerate(tensors))
    if line.task in (BACKWARD, OVERHEAD_GRAD):
        for tensor in tensors:
            tensor.requires_grad_()
    if line.task == BACKWARD:
        rows, _, n_out = line.shape
        of_result = torch.float32 if "v" in line.stream else dtype
        tensors = (*tensors, torch.randn(rows, n_out, device=device, dtype=of_result))
    return tensors


def _cast_first(op: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function of an x in the dtype of the weights, which follow it."""
    at = 0 if op in GLUS else 1

    def of_cast(*tensors: Tensor) -> Tensor:
        return function(*tensors[:at], tensors[at].to(tensors[at + 1].dtype), *tensors[at + 1 :])

    return of_cast


def _stream_contenders(line: Line, ours: str) -> dict[str, Callable[..., Any]]:
    op, fused = line.op, implementations.find(line.op, ours)
    formula = implementations.find("gate" if op == "gate_" else op, "eager")
    assert fused
    assert formula
    ways = {OURS: fused, EAGER: _cast_first(op, formula), CAST: _cast_first(op, fused)}
    if line.compiled:
        ways[COMPILED] = torch.compile(ways[EAGER], dynamic=False, fullgraph=True)
    return {name: _task(_on_first(way, 5 if op in GLUS else 4), line.task) for name, way in ways.items()}


def contenders(line: Line, device: torch.device) -> dict[str, Callable[..., Any]]:
    """Callables for the inputs, ours first."""
    op, ours = line.op, "cuda" if device.type == "cuda" else "cpp"
    if op == "square_matmul_":
        return {OURS: torchops.square_matmul_, SECOND: torch.bmm}
    if line.stream:
        return _stream_contenders(line, ours)
    trains = line.task in (BACKWARD, OVERHEAD_GRAD)
    # PyTorch cannot differentiate what it has overwritten, so its gate makes a new tensor in training.
    formula = "gate" if op == "gate_" and trains else op
    found: dict[str, Callable[..., Any] | None] = {
        OURS: _overwritten if op == "gate_" and trains else implementations.find(op, ours),
        EAGER: implementations.find(formula, "eager"),
    }
    if line.compiled:
        found[COMPILED] = implementations.find(formula, "compile")
    if line.task == FORWARD and not implementations.unavailable("triton", device.type) and not line.tf32:
        found[TRITON] = implementations.find(op, "triton") if line.dtype in ("bfloat16", "float16") else None
    ways = {name: _on_first(way, 3 if op == "dense" else 5 if op in GLUS else 4) for name, way in found.items() if way}
    if op in GLUS:
        x, p, pb = 0, 5, 6
        if line.compiled:
            activation = "silu" if op == "swiglu" else "sigmoid"
            packed = torch.compile(partial(_packed, activation), dynamic=False, fullgraph=True)
            ways[PACKED] = _on(packed, (x, p, pb))
        if line.task == FORWARD:
            ways[PRODUCT] = _on(F.linear, (x, p))
    if op == "dense" and line.task == FORWARD:
        ways[LINEAR] = _on_first(F.linear, 3)
    return {name: _task(way, line.task) for name, way in ways.items()}


_Way = tuple[Callable[..., Any], tuple[int, ...]]


def _on(function: Callable[..., Any], numbers: tuple[int, ...]) -> _Way:
    return function, numbers


def _on_first(function: Callable[..., Any], count: int) -> _Way:
    return function, tuple(range(count))


def _task(way: _Way, task: Task) -> Callable[..., Any]:
    function, numbers = way
    call = timing.contender(function, task)
    cotangent = (-1,) if task == BACKWARD else ()
    return lambda *tensors: call(*(tensors[i] for i in (*numbers, *cotangent)))


def prepared(
    line: Line, device: torch.device, path: str, seconds: float, without: Sequence[str] = ()
) -> Callable[[], Result]:
    """Compiles the contenders of a line, and returns a function that measures them."""
    ways = {name: way for name, way in contenders(line, device).items() if name not in without}

    def on_path() -> Any:
        return torchops.cuda.kernel_path(path) if path != "auto" else nullcontext()  # type: ignore[arg-type]

    errors = {}
    first = inputs(line, device)
    with precision(line.tf32), timing.context(line.task), on_path():
        for name, way in list(ways.items()):
            try:
                way(*first)
            except Exception as error:
                errors[name] = timing.first_line(error)
                del ways[name]

    def measure() -> Result:
        effort = replace(timing.effort(device.type, quick=False), contender_seconds=seconds)
        with precision(line.tf32), on_path():
            sets = timing.rotate(lambda: inputs(line, device))
            peaks = {}
            if device.type == "cuda" and line.task in (FORWARD, BACKWARD):
                with timing.context(line.task):
                    peaks = {name: peak_of(partial(way, *sets[0]), device) for name, way in ways.items()}
            measured = timing.measure(ways, sets, line.task, device, effort)
        times = {name: timing_.seconds * 1e6 for name, timing_ in measured.timings.items()}
        ratios = {name: timing_.ratio for name, timing_ in measured.timings.items()}
        least = bound(line) if device.type == "cuda" else None
        return Result(line, least, times, ratios, peaks, {**errors, **measured.errors})

    return measure


def to_markdown(
    document: dict[str, Any],
    contenders: Sequence[str] | None = None,
    keep: Callable[[dict[str, Any]], bool] = lambda line: True,
    full: bool = False,
) -> str:
    """A row for each line to `keep`, and the machine: microseconds, with `full` also our goals and extra MiB at the
    peak."""
    ways = contenders or document["contenders"]
    heads = ["", "bound", *(["at most"] if full else []), *ways]
    rows = []

    def rounded(value: float | None) -> str:
        return "" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"

    for result in document["results"]:
        line = result["line"]
        if not keep(line):
            continue
        sizes = ", ".join(map(str, line["shape"]))
        suffix = " (TF32)" * line["tf32"] + (f", float32 {line['stream']}" if line.get("stream") else "")
        cells = [f"`{line['op']}` ({sizes}) {line['dtype']}{suffix}, {line['task']}"]
        cells += [rounded(result["bound"]), *([rounded(line["most"])] if full else [])]
        for way in ways:
            peak = result["peak_bytes"].get(way) if full else None
            cells.append(rounded(result["microseconds"].get(way)) + (f" ({peak / 2**20:.0f})" if peak else ""))
        rows.append(cells)
    return "\n".join([*table(heads, rows), "", machine.where(document), ""])


def page(document: dict[str, Any]) -> str:
    """The Markdown page beside the JSON."""
    return (
        f"# {document['title']}\n\nMicroseconds on the device, or of the host's time per call if the task is an"
        f" overhead. In brackets are the MiB\nthat a call takes beside its inputs, results included.\n\n"
        f"{to_markdown(document, full=True)}\n"
        + "".join(f"    {command}\n" for command in document["command"].split("; "))
        + "".join(f"\n{note}\n" for note in document.get("notes", []))
    )


TITLES = {
    "auto": "Gates",
    "portable": "Gates by the kernels for every GPU from compute capability 8.0 on",
    "cublas": "Gates by cuBLAS",
}
STREAM_TITLE = "Gates of a float32 stream with 16-bit weights"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    shared.add(parser, "device", "jobs", "json")
    parser.add_argument("--path", choices=[*TITLES], default="auto", help="torchops.cuda.kernel_path")
    parser.add_argument("--stream", action="store_true", help="float32 x, or x and v, beside 16-bit weights")
    parser.add_argument("--case", nargs="+", default=[""], help="only lines whose name contains one of these")
    parser.add_argument("--without", nargs="+", default=[], help="contenders to leave out: torch.compile Triton")
    parser.add_argument("--seconds", type=float, help="to measure a contender for")
    parser.add_argument("--compile-seconds", type=float, default=600, help="what is not compiled by then is left out")
    parser.add_argument("--table", type=Path, help="print these results as Markdown, and measure nothing")


def run(options: argparse.Namespace) -> int:
    """Measures the chosen lines. The status is 1 if one is missing."""
    if options.table:
        print(page(read(options.table)), end="")
        return 0
    device = shared.device_of(options)
    lines_of_path = {"portable": portable_lines, "cublas": cublas_lines}.get(options.path, partial(lines, device.type))
    chosen = stream_lines() if options.stream else lines_of_path()
    chosen = [line for line in chosen if any(text in line.name for text in options.case)]
    seconds = options.seconds or (0.03 if device.type == "cuda" else 1.0)
    prepare = partial(prepared, device=device, path=options.path, seconds=seconds, without=options.without)
    jobs = options.jobs or parallel.jobs(device.type)
    title = STREAM_TITLE if options.stream else TITLES[options.path]
    record = Record(options, device, len(chosen), path=options.path, title=title, contenders=[], results=[])
    document = record.document
    for line, result in parallel.measured(prepare, chosen, jobs, options.compile_seconds, record.progress):
        times = ", ".join(f"{name} {us:.1f}" for name, us in result.microseconds.items())
        document["contenders"] = [*dict.fromkeys([*document["contenders"], *result.microseconds])]
        text = f"{line.name}: bound {result.bound or 0:.0f}, {times} {result.errors or ''}"
        record.add("results", asdict(result), text)
    return 0 if len(document["results"]) == len(chosen) else 1

"""Measures how far approximate PTX instructions, and sigmoids made of them, are from float64; and times the sigmoids.

    make ptx
    python examples/ptx/ptx_errors.py --json ptx.json    on a GPU of compute capability 9.0 or higher
    python examples/ptx/ptx_errors.py --table ptx.json   prints the tables of docs/ptx.md; needs no GPU

Instructions on float32 are run on all 2^32 bit patterns, those on pairs of 16-bit numbers on all 2^16. An ulp is the
distance between two neighbouring numbers of the result's format at the exact value, so that correct rounding gives 0.5.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ptx_driver import Module, available
from ptx_sigmoid import THREADS, sigmoid
from torch import Tensor

ROOT = Path(__file__).parents[2]
COMPILED, EDITED = ROOT / "build/ptx/sigmoid.ptx", Path(__file__).parent / "sigmoid_tanh.ptx"
Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Errors:
    """The largest errors over all inputs. `ulp` and `relative` are over results that are normal numbers.

    `subnormal_ulp` is over exact results below the smallest normal number; None where there are none. `special` counts
    results that should be infinite or NaN and are not, or are not and should.
    """

    ulp: float
    at: float
    relative: float
    absolute: float
    subnormal_ulp: float | None
    special: int


def ulp_of(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance of neighbouring numbers of type `dtype` at each of the float64 values `exact`."""
    info = torch.finfo(dtype)
    stored = -int(math.log2(info.eps))
    # The exponents, straight from the bits: no rounding, and no logarithm.
    exponent = (exact.view(torch.int64) >> 52) & 0x7FF
    lowest = 1023 + int(math.log2(info.smallest_normal))
    return ((exponent.clamp(min=lowest) - stored) << 52).view(torch.float64)


def patterns(dtype: torch.dtype, device: torch.device, chunk: int = 2**27) -> Iterator[Tensor]:
    """All values of a 16 or 32-bit type, NaN and infinities among them, in tensors of at most `chunk`."""
    bits = torch.int16 if dtype.itemsize == 2 else torch.int32
    first, last = torch.iinfo(bits).min, torch.iinfo(bits).max
    for start in range(first, last + 1, chunk):
        yield torch.arange(start, min(start + chunk, last + 1), device=device).to(bits).view(dtype)


def largest_errors(function: Function, exact: Function, inputs: Iterator[Tensor], dtype: torch.dtype) -> Errors:
    """The errors of `function` against `exact`, which gets the inputs in float64, for results of type `dtype`."""
    info = torch.finfo(dtype)
    ulp, at, relative, absolute, special = 0.0, math.nan, 0.0, 0.0, 0
    subnormal: float | None = None
    for x in inputs:
        want = exact(x.double())
        got = function(x).double()
        in_range = want.abs() <= info.max
        rounded = want.to(dtype).double()
        same = (got == rounded) | (got.isnan() & rounded.isnan())
        special += int((~same & ~in_range).sum()) + int((in_range & ~got.isfinite()).sum())
        error = torch.where(in_range & got.isfinite(), (got - want).abs(), 0.0)
        absolute = max(absolute, error.max().item())
        ulps = error / ulp_of(want, dtype)
        normal = want.abs() >= info.smallest_normal
        value, index = torch.where(normal, ulps, 0.0).max(0)
        if value.item() > ulp:
            ulp, at = value.item(), x[index].item()
        relative = max(relative, torch.where(normal, error / want.abs(), 0.0).max().item())
        tiny = ~normal & (want != 0)
        if tiny.any():
            subnormal = max(subnormal or 0.0, torch.where(tiny, ulps, 0.0).max().item())
    return Errors(ulp, at, relative, absolute, subnormal, special)


# A thread for every 32-bit word: a float32 in %f, or a pair of 16-bit numbers in %w.
TEMPLATE = """
.version 7.8
.target sm_90
.address_size 64
.visible .entry apply(.param .u64 x_param, .param .u64 y_param, .param .u64 n_param)
{{
  .reg .pred %past;
  .reg .b64 %x, %y, %n, %i, %t;
  .reg .b32 %block, %threads, %thread, %w;
  .reg .f32 %f, %g;
  ld.param.u64 %x, [x_param];
  ld.param.u64 %y, [y_param];
  ld.param.u64 %n, [n_param];
  cvta.to.global.u64 %x, %x;
  cvta.to.global.u64 %y, %y;
  mov.u32 %block, %ctaid.x;
  mov.u32 %threads, %ntid.x;
  mov.u32 %thread, %tid.x;
  mul.wide.u32 %i, %block, %threads;
  cvt.u64.u32 %t, %thread;
  add.s64 %i, %i, %t;
  setp.ge.s64 %past, %i, %n;
  @%past bra $DONE;
  shl.b64 %t, %i, 2;
  add.s64 %x, %x, %t;
  add.s64 %y, %y, %t;
  ld.global.nc.b32 %w, [%x];
  mov.b32 %f, %w;
  {body}
  st.global.b32 [%y], %w;
$DONE:
  ret;
}}
"""
LOG2E, ONE, MINUS_ONE = "0f3FB8AA3B", "0f3F800000", "0fBF800000"
RETURN_F = "mov.b32 %w, %f;"


@dataclass(frozen=True)
class Instruction:
    """PTX that turns %f (float32) or %w (a pair) into %w, what it computes, and the types of input and result."""

    name: str
    body: str
    exact: Function
    formula: str
    dtype: torch.dtype = torch.float32
    result: torch.dtype = torch.float32

    @property
    def ptx(self) -> str:
        return TEMPLATE.format(body=self.body)

    def __call__(self, module: Module, x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        words = x.numel() * x.element_size() // 4
        module.launch("apply", -(-words // THREADS), THREADS, [x, y, words])
        # A conversion to 16 bits leaves the same number in both halves of the word.
        return y.view(self.result)[::2] if self.result != self.dtype else y


def _line(x: Tensor) -> Tensor:
    return x * torch.tensor(math.log2(math.e), dtype=torch.float32).double().item() - 1


WARM_UP = 3
F16, BF16 = torch.float16, torch.bfloat16
INSTRUCTIONS = (
    Instruction("ex2.approx.f32", f"ex2.approx.f32 %f, %f; {RETURN_F}", torch.exp2, "2^x"),
    Instruction("ex2.approx.ftz.f32", f"ex2.approx.ftz.f32 %f, %f; {RETURN_F}", torch.exp2, "2^x"),
    Instruction("rcp.approx.f32", f"rcp.approx.f32 %f, %f; {RETURN_F}", torch.reciprocal, "1/x"),
    Instruction("rcp.approx.ftz.f32", f"rcp.approx.ftz.f32 %f, %f; {RETURN_F}", torch.reciprocal, "1/x"),
    Instruction("tanh.approx.f32", f"tanh.approx.f32 %f, %f; {RETURN_F}", torch.tanh, "tanh x"),
    Instruction("fma.rn.f32", f"fma.rn.f32 %f, %f, {LOG2E}, {MINUS_ONE}; {RETURN_F}", _line, "x·log2(e) - 1"),
    Instruction(
        "mul.rn.f32, add.rn.f32",
        f"mul.rn.f32 %f, %f, {LOG2E}; add.rn.f32 %f, %f, {MINUS_ONE}; {RETURN_F}",
        _line,
        "x·log2(e) - 1",
    ),
    Instruction("cvt.rn.bf16x2.f32", "cvt.rn.bf16x2.f32 %w, %f, %f;", torch.clone, "x", result=BF16),
    Instruction("cvt.rn.f16x2.f32", "cvt.rn.f16x2.f32 %w, %f, %f;", torch.clone, "x", result=F16),
    Instruction("ex2.approx.ftz.bf16x2", "ex2.approx.ftz.bf16x2 %w, %w;", torch.exp2, "2^x", BF16, BF16),
    Instruction("ex2.approx.f16x2", "ex2.approx.f16x2 %w, %w;", torch.exp2, "2^x", F16, F16),
    Instruction("tanh.approx.bf16x2", "tanh.approx.bf16x2 %w, %w;", torch.tanh, "tanh x", BF16, BF16),
    Instruction("tanh.approx.f16x2", "tanh.approx.f16x2 %w, %w;", torch.tanh, "tanh x", F16, F16),
)
EX2_RCP = Instruction(
    "ex2.approx, rcp.approx",
    "mul.rn.f32 %f, %f, 0fBFB8AA3B; ex2.approx.f32 %f, %f; "
    f"add.rn.f32 %f, %f, {ONE}; rcp.approx.f32 %f, %f; {RETURN_F}",
    torch.sigmoid,
    "sigmoid x",
)


def _sigmoids() -> dict[str, tuple[torch.dtype, Function]]:
    compiled, edited, short = (Module(image) for image in (COMPILED.read_bytes(), EDITED.read_bytes(), EX2_RCP.ptx))
    return {
        "float32: sigmoid.cu": (torch.float32, lambda x: sigmoid(compiled, x)),
        "float32: ex2.approx, rcp.approx": (torch.float32, lambda x: EX2_RCP(short, x)),
        "float32: sigmoid_tanh.ptx": (torch.float32, lambda x: sigmoid(edited, x)),
        "float32: torch.sigmoid": (torch.float32, torch.sigmoid),
        "bfloat16: sigmoid.cu": (BF16, lambda x: sigmoid(compiled, x)),
        "bfloat16: sigmoid_tanh.ptx": (BF16, lambda x: sigmoid(edited, x)),
        "bfloat16: torch.sigmoid": (BF16, torch.sigmoid),
    }


def _scalar(module: Module, x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    module.launch("sigmoid_bf16_scalar", -(-x.numel() // THREADS), THREADS, [x, y, x.numel()])
    return y


def _times(calls: dict[str, tuple[torch.dtype, Function]], rounds: int = 20) -> list[dict[str, Any]]:
    """Median time of each call on 512 MiB, interleaved on rotated inputs, and the bandwidth of a read and a write."""
    inputs = {
        d: [torch.randn(2**29 // d.itemsize, device="cuda").to(d) for _ in range(2)] for d in (torch.float32, BF16)
    }
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for done in range(WARM_UP + rounds):
        events = {}
        # Keeps the device busy until the round is queued, so that no launch is waited for between two events.
        torch.cuda._sleep(2_000_000)
        for name, (dtype, call) in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call(inputs[dtype][done % 2])
            end.record()
            events[name] = start, end
        torch.cuda.synchronize()
        if done >= WARM_UP:
            for name, (start, end) in events.items():
                samples[name].append(start.elapsed_time(end) / 1e3)
    medians = {name: statistics.median(values) for name, values in samples.items()}
    return [{"name": name, "seconds": s, "bytes_per_second": 2 * 2**29 / s} for name, s in medians.items()]


def measure() -> dict[str, Any]:
    """Runs everything on the current device; returns what is written as JSON."""
    device = torch.device("cuda")
    instructions = []
    for it in INSTRUCTIONS:
        function = partial(it, Module(it.ptx))
        found = largest_errors(function, it.exact, patterns(it.dtype, device), it.result)
        instructions.append({"name": it.name, "formula": it.formula, "inputs": _type(it.dtype), **asdict(found)})
        print(instructions[-1], flush=True)
    calls = _sigmoids()
    sigmoids = []
    for name, (dtype, call) in calls.items():
        found = largest_errors(call, torch.sigmoid, patterns(dtype, device), dtype)
        sigmoids.append({"name": name, **asdict(found)})
        print(sigmoids[-1], flush=True)
    compiled = Module(COMPILED.read_bytes())
    calls["bfloat16: sigmoid.cu, one element per thread"] = (BF16, lambda x: _scalar(compiled, x))
    calls["copy"] = (torch.float32, torch.clone)
    # Printing tables needs no torchops.
    sys.path.append(str(ROOT))
    from benchmarks import machine

    return {
        **machine.describe(device),
        "command": "make ptx && python examples/ptx/ptx_errors.py --json ptx.json",
        "instructions": instructions,
        "sigmoids": sigmoids,
        "times": _times(calls),
    }


def _type(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _number(value: float | None) -> str:
    if value is None:
        return "none"
    return f"{value:.3g}" if value == 0 or 0.01 <= value < 1e4 else f"{value:.1e}"


def table(document: dict[str, Any]) -> str:
    """The tables of docs/ptx.md."""
    from benchmarks import tables

    errors = ["largest error, ulp", "at x", "relative"]

    def of(row: dict[str, Any], *names: str) -> list[str]:
        return [_number(row["ulp"]), f"{row['at']:.6g}", *(_number(row[name]) for name in names)]

    lines = [
        *tables.table(
            ["instruction", "inputs: all", "exact value", *errors, "subnormal results, ulp"],
            [
                [f"`{row['name']}`", row["inputs"], row["formula"], *of(row, "relative", "subnormal_ulp")]
                for row in document["instructions"]
            ],
        ),
        "",
        *tables.table(
            ["sigmoid", *errors, "absolute", "subnormal results, ulp"],
            [[row["name"], *of(row, "relative", "absolute", "subnormal_ulp")] for row in document["sigmoids"]],
        ),
        "",
        *tables.table(
            ["512 MiB to 512 MiB", "time", "bandwidth"],
            [
                [row["name"], f"{row['seconds'] * 1e6:.0f} µs", f"{row['bytes_per_second'] / 1e12:.2f} TB/s"]
                for row in document["times"]
            ],
        ),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Measures or prints; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--json", type=Path, help="measure, and write the results to this file")
    what.add_argument("--table", type=Path, help="print the tables for results in this file")
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.table.read_text())), end="")
        return 0
    if not available() or torch.cuda.get_device_capability() < (9, 0):
        print("a CUDA device of compute capability 9.0 and the package cuda-bindings are needed", file=sys.stderr)
        return 2
    if not COMPILED.exists():
        print(f"{COMPILED} is missing: run `make ptx`", file=sys.stderr)
        return 2
    document = measure()
    from benchmarks import record

    record.write(options.json, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The triangle update of pair tensors against PyTorch's ways to write it: `python -m benchmarks triangle`.

It has no row that depends on a row of its input alone, so it is no `Operator` of the other benchmarks. Time is that of
`timing.measure`: contenders interleaved, cold inputs. Memory is counted in pair tensors of N * N * max(c, d) elements.
`--sections` measures some of it, and leaves the rest of the file that `--json` names as it was.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import torchops

from . import machine, peak_memory, timing
from . import options as shared
from .case import BACKWARD, FORWARD, Task
from .record import Record, read

NORMS = ("norm_in", "norm_out")
LAYERS = ("p_in", "g_in", "p_out", "g_out")
# What a copy and the best product reach on an H100, in bytes and operations per second.
COPY, PRODUCT = 2.98e12, 800e12


class Line(NamedTuple):
    """A measured call. Contenders that compile for seconds take part only if named."""

    section: str
    n: int
    c: int = 128
    task: Task = FORWARD
    dtype: torch.dtype = torch.bfloat16
    batch: int = 1
    biases: bool = False
    masked: bool = False
    stream: bool = False  # float32 x beside 16-bit weights
    tf32: bool = False
    path: Literal["auto", "portable", "cublas"] = "auto"
    against: tuple[str, ...] = ()


COMPILED = "channels first, torch.compile"
COMPILED_AS_WRITTEN = "as written, torch.compile"


def lines(section: str) -> Iterator[Line]:
    sizes = (256, 512, 768, 1024)
    if section == "forward":
        for n in sizes:
            yield Line(section, n, against=(COMPILED, *((COMPILED_AS_WRITTEN,) if n in (512, 1024) else ())))
            yield Line(section, n + 1)
    elif section == "backward":
        for n in sizes:
            yield Line(section, n, task=BACKWARD, against=(COMPILED,))
        yield Line(section, 1025, task=BACKWARD)
    elif section == "options":
        for n in (512, 1024):
            yield Line(section, n, batch=2)
            yield Line(section, n, biases=True)
            yield Line(section, n, masked=True)
            yield Line(section, n, stream=True)
    elif section == "features":
        for c, n in itertools.product((64, 256, 384), (512, 1024)):
            yield Line(section, n, c)
    elif section == "dtypes":
        for dtype, tf32 in ((torch.float32, False), (torch.float32, True), (torch.float64, False)):
            for task in (FORWARD, BACKWARD):
                yield Line(section, 512, task=task, dtype=dtype, tf32=tf32, against=(COMPILED,))
    elif section == "generic":
        for n, task in itertools.product((512, 1024), (FORWARD, BACKWARD)):
            yield Line(section, n, task=task, path="portable", against=(COMPILED,))
            yield Line(section, n, task=task, path="cublas")
    elif section == "cpu":
        for n, task, dtype in itertools.product((128, 256), (FORWARD, BACKWARD), (torch.float32, torch.bfloat16)):
            yield Line(section, n, task=task, dtype=dtype, against=(COMPILED,))


VIEW = "view, forward and backward"
ON_CUDA = ("forward", "backward", "options", "features", "memory", "host")
OTHER_PATHS = ("generic", "dtypes")  # on CUDA, with results of their own
ON_CPU = ("cpu",)
SECTIONS = (*ON_CUDA, *OTHER_PATHS, *ON_CPU)


# --- contenders ------------------------------------------------------------------------------------------------------


class Arguments(NamedTuple):
    """x; the mask or None; weights and any biases by name."""

    x: Tensor
    mask: Tensor | None
    parameters: dict[str, Tensor]

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.x, *([] if self.mask is None else [self.mask]), *self.parameters.values())


def make(line: Line, device: torch.device, d: int | None = None) -> Arguments:
    n, c, d = line.n, line.c, d or line.c

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=line.dtype, device=device) / (shape[-1] ** 0.5 if len(shape) == 2 else 1)

    parameters = {
        **{"norm_in_weight": random(c) + 1, "norm_in_bias": random(c)},
        **{"p_in_weight": random(2 * d, c), "g_in_weight": random(2 * d, c)},
        **{"norm_out_weight": random(d) + 1, "norm_out_bias": random(d)},
        **{"p_out_weight": random(c, d), "g_out_weight": random(c, c)},
    }
    if line.biases:
        parameters |= {f"{name}_bias": random(parameters[f"{name}_weight"].shape[0]) for name in LAYERS}
    x = torch.randn(line.batch, n, n, c, dtype=torch.float32 if line.stream else line.dtype, device=device)
    mask = (torch.rand(line.batch, n, n, device=device) > 0.1).to(line.dtype) if line.masked else None
    return Arguments(x, mask, parameters)


Way = Callable[[Arguments], Tensor]


def ours(arguments: Arguments) -> Tensor:
    x, mask, parameters = arguments
    return torch.ops.myops.triangle_multiplicative_update(x, mask=mask, **parameters)


def _ab(arguments: Arguments) -> tuple[Tensor, Tensor]:
    x, mask, w = arguments
    z = F.layer_norm(x, x.shape[-1:], w["norm_in_weight"].to(x.dtype), w["norm_in_bias"].to(x.dtype))
    z = z.to(w["p_in_weight"].dtype)
    ab = F.linear(z, w["p_in_weight"], w.get("p_in_bias"))
    ab = ab * torch.sigmoid(F.linear(z, w["g_in_weight"], w.get("g_in_bias")))
    return z, ab if mask is None else ab * mask.unsqueeze(-1)


def _out(o: Tensor, z: Tensor, w: dict[str, Tensor]) -> Tensor:
    o = F.layer_norm(o, o.shape[-1:], w["norm_out_weight"], w["norm_out_bias"])
    gate = torch.sigmoid(F.linear(z, w["g_out_weight"], w.get("g_out_bias")))
    return F.linear(o, w["p_out_weight"], w.get("p_out_bias")) * gate


def as_written(arguments: Arguments) -> Tensor:
    """As papers write it, with channels last in the product."""
    z, ab = _ab(arguments)
    return _out(torch.einsum("bikc,bjkc->bijc", *ab.chunk(2, -1)), z, arguments.parameters)


def channels_first(arguments: Arguments) -> Tensor:
    """The fastest way in PyTorch: one copy, so that the product works on matrices."""
    z, ab = _ab(arguments)
    a, b = ab.movedim(-1, -3).contiguous().chunk(2, -3)
    return _out((a @ b.mT).movedim(-3, -1), z, arguments.parameters)


@functools.cache
def compiled(name: str) -> Way:
    return torch.compile({COMPILED: channels_first, COMPILED_AS_WRITTEN: as_written}[name], dynamic=False)


def contenders(line: Line, with_compiled: bool) -> dict[str, Way]:
    ways: dict[str, Way] = {"torchops": ours, "channels first": channels_first, "as written": as_written}
    if with_compiled:
        ways |= {name: compiled(name) for name in line.against}
    return ways


def bound(line: Line) -> float | None:
    """Seconds: for each stage that cannot be merged with the next one, the larger of the time of a copy of its bytes
    and that of its operations. docs/triangle_update_stages.md has the passes of each. None if other units decide."""
    if line.dtype not in (torch.bfloat16, torch.float16):
        return None
    pair = line.n * line.n * line.c * line.dtype.itemsize * line.batch
    product = max(3 * pair / COPY, 2 * line.n**3 * line.c * line.batch / PRODUCT)
    rows = line.n * line.n * line.batch
    x = 2 * pair if line.stream else pair
    seconds = max((x + 2 * pair) / COPY, 8 * rows * line.c**2 / PRODUCT) + product
    seconds += max((x + 2 * pair) / COPY, 4 * rows * line.c**2 / PRODUCT)
    if line.task == BACKWARD:
        seconds += 13 * pair / COPY + 2 * product
    return seconds


# --- what is measured ------------------------------------------------------------------------------------------------


@contextmanager
def precision(line: Line) -> Iterator[None]:
    """Sets the precision of products, and which kernels run."""
    former = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = line.tf32
    path: AbstractContextManager[Any] = nullcontext() if line.path == "auto" else torchops.cuda.kernel_path(line.path)
    try:
        with path:
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = former


def relative_errors(line: Line, arguments: Arguments) -> dict[str, float]:
    """Relative errors against float64, by norms: ours and eager's."""
    x, mask, parameters = arguments
    weights = {name: w.double() for name, w in parameters.items()}
    exact = as_written(Arguments(x.double(), None if mask is None else mask.double(), weights))
    errors = {}
    for name, way in (("torchops", ours), ("as written", as_written)):
        errors[name] = ((way(arguments).double() - exact).norm() / exact.norm()).item()
    if not errors["torchops"] < 8 * torch.finfo(line.dtype).eps and not line.tf32:
        raise AssertionError(f"{line}: relative error {errors['torchops']}")
    return errors


def time_line(line: Line, device: torch.device, with_compiled: bool) -> dict[str, Any]:
    known: dict[int, Arguments] = {}

    def inputs() -> tuple[Tensor, ...]:
        arguments = make(line, device)
        tensors = arguments.tensors()
        if line.task == BACKWARD:
            for t in (arguments.x, *arguments.parameters.values()):
                t.requires_grad_()
            tensors = (*tensors, torch.randn_like(arguments.x).to(line.dtype))
        known[id(tensors[0])] = arguments
        return tensors

    def of_tensors(way: Way) -> Callable[..., Tensor]:
        return lambda x, *_: way(known[id(x)])

    ways = {name: timing.contender(of_tensors(way), line.task) for name, way in contenders(line, with_compiled).items()}
    sets = timing.rotate(inputs)
    with precision(line):
        result: dict[str, Any] = {}
        if line.n <= 256:
            with torch.no_grad():
                result["relative errors"] = relative_errors(line, known[id(sets[0][0])])
        with timing.context(line.task):
            pairs = {name: extra_pair_tensors(way, sets[0], line) for name, way in ways.items()}
        measured = timing.measure(ways, sets, line.task, device, timing.effort(device.type, quick=False))
    least = bound(line) if device.type == "cuda" else None
    return (
        line._asdict()
        | {"dtype": str(line.dtype).removeprefix("torch."), "against": None}
        | {
            "bound": least and least * 1e6,
            "microseconds": {name: t.seconds * 1e6 for name, t in measured.timings.items()},
            "over ours": {name: t.ratio for name, t in measured.timings.items()},
            "pair tensors": pairs,
            "errors": measured.errors,
        }
        | result
    )


def pair_bytes(line: Line, d: int) -> int:
    return line.batch * line.n * line.n * max(line.c, d) * line.dtype.itemsize


def extra_pair_tensors(call: Callable[..., Any], inputs: tuple[Tensor, ...], line: Line) -> float | None:
    """The peak of a call in pair tensors, its result included."""
    if not peak_memory.supported(inputs[0].device):
        return None
    try:
        return peak_memory.peak_of(lambda: call(*inputs), inputs[0].device) / pair_bytes(line, line.c)
    except Exception:  # the timing reports it
        return None


def memory_lines(n: int, device: torch.device) -> list[dict[str, Any]]:
    """Memory in pair tensors, for both forms: forward without grad, what is saved for backward, and the peak of
    backward without the update and x's gradient."""
    line = Line("memory", n)
    results = []
    for in_place in (False, True):
        arguments = make(line, device)
        x, _, parameters = arguments
        pair = pair_bytes(line, line.c)

        def forward(x: Tensor, parameters: dict[str, Tensor] = parameters, in_place: bool = in_place) -> Tensor:
            if in_place:
                torch.ops.myops.add_triangle_multiplicative_update_(x, **parameters)
                return x
            return ours(Arguments(x, None, parameters))

        with torch.no_grad():
            without_grad = peak_memory.peak_of(functools.partial(forward, x), device) / pair
        leaves = [x.requires_grad_(), *(w.requires_grad_() for w in parameters.values())]
        for _ in range(2):  # the first call allocates what is kept
            given = x + 0 if in_place else x
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            y = forward(given)
            made = 0 if in_place else y.nbytes
            kept = torch.cuda.memory_allocated() - before - made
            grad = torch.randn_like(y)
            most = peak_memory.Peak(device)
            gradients = torch.autograd.grad(y, leaves, grad)
            torch.cuda.synchronize()
            peak = most.total() - before - made - grad.nbytes - gradients[0].nbytes
            del y, given, gradients, grad
        results.append(
            {"section": "memory", "n": n, "in place": in_place, "forward": without_grad}
            | {"kept for backward": kept / pair, "peak of backward": peak / pair}
        )
    return results


def host_time(device: torch.device, n: int = 32, calls: int = 300, rounds: int = 5) -> list[dict[str, Any]]:
    """Microseconds of host time per call, without waiting for the device: the median over rounds of the mean over the
    calls of a round. A view, which launches nothing, shows what the autograd engine takes of a backward pass: it hands
    it to another thread."""
    arguments = make(Line("host", n), device)
    leaves = [t.detach().clone().requires_grad_() for t in arguments.tensors()]
    with_grad = Arguments(leaves[0], None, dict(zip(arguments.parameters, leaves[1:], strict=True)))
    grad = torch.randn_like(arguments.x)

    def forward() -> None:
        with torch.no_grad():
            ours(arguments)

    def step() -> None:
        torch.autograd.grad(ours(with_grad), leaves, grad)

    def view() -> None:
        torch.autograd.grad(leaves[0].view_as(leaves[0]), leaves[0], grad)

    results = []
    for task, call in ((FORWARD, forward), (BACKWARD, step), (VIEW, view)):
        for _ in range(20):
            call()
        means = []
        for _ in range(rounds):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            means.append((time.perf_counter() - start) / calls * 1e6)
        results.append({"section": "host", "n": n, "task": task, "microseconds": statistics.median(means)})
    return results


def measure(section: str, device: torch.device, sizes: Sequence[int] | None, with_compiled: bool) -> Iterator[Any]:
    if section == "memory":
        for n in sizes or (768, 1024):
            yield from memory_lines(n, device)
    elif section == "host":
        yield from host_time(device)
    else:
        for line in lines(section):
            if sizes is None or line.n in sizes:
                yield time_line(line, device, with_compiled)


def summary(result: dict[str, Any]) -> str:
    shown = {key: value for key, value in result.items() if value not in (None, False, {}) and key != "over ours"}
    return json.dumps(shown, default=str)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    shared.add(parser, "device", "sizes", "json")
    parser.add_argument("--sections", type=shared.names(SECTIONS), help=f"by comma, of {', '.join(SECTIONS)}")
    parser.add_argument("--no-compile", action="store_true")


def run(options: argparse.Namespace) -> int:
    """Measures section by section. Each has the command of its own run."""
    device = shared.device_of(options)
    sections = options.sections or (ON_CUDA if device.type == "cuda" else ON_CPU)
    torch._dynamo.config.recompile_limit = 64  # one graph per line
    record = Record(options, device, commands={}, results=[])
    command = record.document.pop("command")
    if options.json and options.json.exists():
        former = read(options.json)
        if machine.described(former) == machine.described(record.document):
            of_others = {name: of for name, of in former.get("commands", {}).items() if name not in sections}
            record.document["commands"] = of_others
            record.document["results"] = [r for r in former["results"] if r.get("section") not in sections]
    for section in sections:
        start = time.perf_counter()
        record.document["commands"][section] = command
        record.collect("results", measure(section, device, options.sizes, not options.no_compile), section, summary)
        record.show(f"{section}: {time.perf_counter() - start:.1f} s")
    return 0

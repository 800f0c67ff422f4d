"""Time and peak memory of the models in this folder: eager, torch.compile, torch.compile with torchops.inductor, and
torch.compile with the backend "torchops", which generates no code.

    python examples/models/measure.py

It compares the outputs and gradients of all four, and then times them on the same model and input, interleaved. It
writes `models.json` and `models.md` into `benchmarks/results/<machine>/`. With `--quick`, and on a machine without a
GPU, it runs smaller sizes and only prints the results. On a GPU, calls are queued one behind the other. All models are
compiled at the same time there, each in its own process, and measured one after the other.

    python examples/models/measure.py --table models.json

prints the measurements of a file as Markdown.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
from conditioned_transition import ConditionedTransition
from gated_attention import GatedAttention
from glu_stack import GLUStack
from torch import Tensor, nn
from triangle_update import TriangleBlock

import torchops

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))

from benchmarks import machine, peak_memory, record, tables  # noqa: E402

EAGER, COMPILED, OURS = "eager", "torch.compile", "torch.compile + torchops.inductor"
BACKEND = 'torch.compile(backend="torchops")'
FORWARD, TRAINING = "forward", "forward and backward"
COMMAND = "python examples/models/measure.py"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
# Of the norm of eager mode's values. Each contender rounds other intermediates to bfloat16.
MOST_DEVIATION = 0.05


@dataclass(frozen=True)
class Case:
    name: str
    make: type[nn.Module]
    arguments: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]


@dataclass
class Result:
    """Of one call: median and quartiles of its time, and the most memory that it takes on top of its inputs.

    `matches` counts the gates that the contender has an operator of torchops for, `left` says why not for the others,
    and `deviation` is how far output and gradients of the inputs are from those of eager mode.
    """

    case: str
    shapes: tuple[tuple[int, ...], ...]
    what: str
    contender: str
    seconds: float
    low: float
    high: float
    peak_bytes: int
    matches: int
    left: tuple[str, ...]
    deviation: float


def cases(quick: bool, device: torch.device) -> list[Case]:
    if quick:
        return [
            Case("triangle update", TriangleBlock, (32, 32), ((1, 32, 32, 32),)),
            Case("gated attention", GatedAttention, (64, 4), ((2, 128, 64),)),
            Case("GLU stack", GLUStack, (32,), ((4096, 32),)),
            Case("conditioned transition", ConditionedTransition, (32, 32), ((4096, 32), (4096, 32))),
        ]
    if device.type == "cpu":
        return [
            Case("triangle update", TriangleBlock, (64, 64), ((1, 64, 64, 64),)),
            Case("gated attention", GatedAttention, (128, 4), ((16, 256, 128),)),
            Case("GLU stack", GLUStack, (128,), ((8192, 128),)),
            Case("conditioned transition", ConditionedTransition, (128, 128), ((8192, 128), (8192, 128))),
        ]
    return [
        Case("triangle update", TriangleBlock, (), ((1, 768, 768, 128),)),
        Case("gated attention", GatedAttention, (), ((4096, 256, 128),)),
        Case("GLU stack", GLUStack, (), ((262144, 256),)),
        Case("conditioned transition", ConditionedTransition, (), ((1048576, 128), (1048576, 128))),
    ]


class Contenders:
    """The four ways to run one model, which have compiled, and agree."""

    def __init__(self, case: Case, what: str, device: torch.device, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        torch.compiler.reset()
        self.case, self.what, self.device = case, what, device
        self.model = case.make(*case.arguments).to(device, dtype)
        training = what == TRAINING
        self.inputs = [torch.randn(s, device=device, dtype=dtype, requires_grad=training) for s in case.shapes]
        self.contenders: dict[str, Callable[..., Tensor]] = {
            EAGER: self.model,
            COMPILED: torch.compile(self.model, fullgraph=True, dynamic=False),
            OURS: torch.compile(self.model, fullgraph=True, dynamic=False, options=torchops.inductor.options()),
            BACKEND: torch.compile(self.model, fullgraph=True, dynamic=False, backend="torchops"),
        }
        self.matches = dict.fromkeys(self.contenders, 0)
        self.left: dict[str, tuple[str, ...]] = dict.fromkeys(self.contenders, ())
        self.deviations: dict[str, float] = {}
        self.cotangent = torch.randn(case.shapes[0], device=device, dtype=dtype)
        expected: list[Tensor] = []
        for name, contender in self.contenders.items():
            before, places = torchops.inductor.matches(), len(torchops.inductor.report())
            got = [self.call(contender).detach(), *(x.grad for x in self.inputs if x.grad is not None)]
            expected = expected or got
            self.matches[name] = torchops.inductor.matches() - before
            self.left[name] = tuple(str(place) for place in torchops.inductor.report()[places:] if not place.replaced)
            self.deviations[name] = max(_deviation(a, b) for a, b in zip(got, expected, strict=True))
            self.forget()
        assert self.matches[EAGER] == self.matches[COMPILED] == 0, self.matches
        assert max(self.deviations.values()) < MOST_DEVIATION, self.deviations

    def call(self, contender: Callable[..., Tensor]) -> Tensor:
        if self.what == FORWARD:
            with torch.no_grad():
                return contender(*self.inputs)
        out = contender(*self.inputs)
        out.backward(self.cotangent)
        return out

    def _peak(self, contender: Callable[..., Tensor]) -> int:
        """The peak of a GPU's memory above the level before the call."""

        def call() -> None:
            self.call(contender)
            self.forget()

        return peak_memory.peak_of(call, self.device) if self.device.type == "cuda" else 0

    def forget(self) -> None:
        for x in self.inputs:
            x.grad = None
        self.model.zero_grad(set_to_none=True)

    def measure(self, rounds: int) -> list[Result]:
        """Times them, interleaved."""
        peaks = {name: self._peak(contender) for name, contender in self.contenders.items()}
        timed: dict[str, list[Callable[[], float]]] = {name: [] for name in self.contenders}
        for done in range(rounds + 2):
            # In another order each time: what runs after eager mode finds less of its data in the caches.
            for name, contender in random.sample(list(self.contenders.items()), len(self.contenders)):
                elapsed = _timed(lambda contender=contender: self.call(contender), self.device)  # type: ignore[misc]
                self.forget()
                if done >= 2:
                    timed[name].append(elapsed)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = {name: [elapsed() for elapsed in calls] for name, calls in timed.items()}
        results = []
        for name in self.contenders:
            low, median, high = statistics.quantiles(seconds[name], n=4)
            figures = (median, low, high, peaks[name], self.matches[name], self.left[name], self.deviations[name])
            results.append(Result(self.case.name, self.case.shapes, self.what, name, *figures))
        return results


def _work(connection: Connection, case: Case, what: str, device: torch.device, dtype: str, rounds: int) -> None:
    """A process: says when it has compiled, and measures when it is told to."""
    torch._inductor.config.compile_threads = 1  # of as many processes as there are models
    try:
        contenders = Contenders(case, what, device, DTYPES[dtype])
        if device.type == "cuda":
            torch.cuda.empty_cache()
        connection.send(None)
        connection.recv()
        connection.send(contenders.measure(rounds))
    except Exception as error:
        connection.send(f"{case.name}, {what}: {type(error).__name__}: {error}")
        raise


def measured(work: list[tuple[Case, str]], device: torch.device, dtype: str, rounds: int) -> Any:
    """Yields the results of each piece of work. On a GPU all of them compile at once."""
    spawn = multiprocessing.get_context("spawn")
    batches = [work] if device.type == "cuda" else [[piece] for piece in work]
    for batch in batches:
        workers = []
        for case, what in batch:
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=_work, args=(theirs, case, what, device, dtype, rounds), daemon=True)
            process.start()
            workers.append((process, ours))
        failures = [failure for _, connection in workers if (failure := connection.recv())]
        if failures:
            raise RuntimeError("; ".join(failures))
        for process, connection in workers:
            connection.send(None)
            results = connection.recv()
            process.join()
            if isinstance(results, str):
                raise RuntimeError(results)
            yield results


def _deviation(got: Tensor, expected: Tensor) -> float:
    return ((got - expected).float().norm() / expected.float().norm()).item()


def _timed(call: Callable[[], object], device: torch.device) -> Callable[[], float]:
    """Calls, and returns a function that gives the seconds. On a GPU these are known once it has finished, and calls
    are queued one behind the other, as in a loop over batches: after a pause, the first kernel would wait for the host.
    """
    if device.type == "cpu":
        start = time.perf_counter()
        call()
        seconds = time.perf_counter() - start
        return lambda: seconds
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    call()
    last.record()
    return lambda: first.elapsed_time(last) / 1e3


def to_markdown(document: dict[str, Any]) -> str:
    results = [Result(**result) for result in document["results"]]
    lines = [
        f"{document['machine']}, torch {document['torch']}, {machine.revisions(document)}.",
        f"Command: `{document['command']}`. {document['dtype']}; median time of {document['rounds']} calls,",
        "interleaved and queued one behind the other, and the most memory that a call takes on top of its parameters",
        "and input. In brackets is how many gates the pass has rewritten.",
        "",
    ]
    rows = []
    for start in range(0, len(results), 4):
        row = results[start : start + 4]
        cells = [f"{r.seconds * 1e3:.2f} ms" + f", {r.peak_bytes / 2**20:.0f} MiB" * (r.peak_bytes > 0) for r in row]
        cells[2] += f" ({row[2].matches} of {row[2].matches + len(row[2].left)})"
        shape = " x ".join(map(str, row[0].shapes[0]))
        rows.append([f"{row[0].case}, {shape}", row[0].what, *cells])
    head = ["model, input", "call", *(r.contender for r in results[:4])]
    return "\n".join([*lines, *tables.table(head, rows), ""])


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures the models of this folder.")
    parser.add_argument("--rounds", type=int, default=20, help="timed calls of each contender")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--case", default="", help="only models whose name contains this")
    parser.add_argument("--quick", action="store_true", help="small sizes, printed only")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results", help="folder for the results")
    parser.add_argument("--table", type=Path, help="print this models.json as Markdown, and measure nothing")
    options = parser.parse_args()
    if options.table is not None:
        print(to_markdown(json.loads(options.table.read_text())), end="")
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    printed_only = options.quick or device.type == "cpu"
    description = machine.describe(device)
    results: list[Result] = []
    chosen = [c for c in cases(options.quick, device) if options.case in c.name]
    work = [(case, what) for case in chosen for what in (FORWARD, TRAINING)]
    for new in measured(work, device, options.dtype, options.rounds):
        results += new
        document = {
            **description,
            "command": COMMAND,
            "dtype": options.dtype,
            "rounds": options.rounds,
            "results": [*map(asdict, results)],
        }
        markdown = to_markdown(document)
        print(markdown.splitlines()[-1], flush=True)
        for result in new:
            for place in result.left:
                print(f"  {result.contender}: {place}", flush=True)
        if printed_only:
            continue
        # After each case: a run that is stopped leaves what it has measured.
        folder = options.output / machine.slug(description)
        record.write(folder / "models.json", document)
        (folder / "models.md").write_text("# Existing models, with and without torchops\n\n" + markdown)


if __name__ == "__main__":
    main()

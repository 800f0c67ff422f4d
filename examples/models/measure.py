"""Time and peak memory of the models in this folder: eager, torch.compile, and torch.compile with torchops.inductor.

    python examples/models/measure.py

All three run the same model on the same input in turns, once their outputs and gradients have been compared. Writes
`models.json` and `models.md` into `benchmarks/results/<machine>/`. With `--quick`, and on a machine without a GPU,
smaller sizes are run, and nothing but printed.

    python examples/models/measure.py --table models.json

prints the measurements of a file as Markdown.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from gated_attention import GatedAttention
from gated_graph_network import GatedGraph
from torch import Tensor, nn
from triangle_update import TriangleBlock

import torchops

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))

from benchmarks import machine  # noqa: E402

EAGER, COMPILED, OURS = "eager", "torch.compile", "torch.compile + torchops.inductor"
FORWARD, TRAINING = "forward", "forward and backward"
COMMAND = "python examples/models/measure.py"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
# Of the norm of eager mode's values. Each contender rounds other intermediates to bfloat16.
MOST_DEVIATION = 0.05


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[], nn.Module]
    gates: int
    shape: tuple[int, ...]


@dataclass
class Result:
    """Of one call: median and quartiles of its time, and the most memory that it takes beside its inputs.

    `deviation` is how far output and gradient of the input are from those of eager mode.
    """

    case: str
    shape: tuple[int, ...]
    what: str
    contender: str
    seconds: float
    low: float
    high: float
    peak_bytes: int
    matches: int
    deviation: float


def cases(quick: bool, device: torch.device) -> list[Case]:
    if quick:
        return [
            Case("triangle update", lambda: TriangleBlock(32, 32), TriangleBlock.GATES, (1, 32, 32, 32)),
            Case("gated attention", lambda: GatedAttention(64, 4), GatedAttention.GATES, (2, 128, 64)),
            Case("gated graph network", lambda: GatedGraph(32), GatedGraph.GATES, (4096, 32)),
        ]
    if device.type == "cpu":
        return [
            Case("triangle update", lambda: TriangleBlock(64, 64), TriangleBlock.GATES, (1, 64, 64, 64)),
            Case("gated attention", lambda: GatedAttention(256, 8), GatedAttention.GATES, (2, 256, 256)),
            Case("gated graph network", lambda: GatedGraph(64), GatedGraph.GATES, (16384, 64)),
        ]
    return [
        Case("triangle update", TriangleBlock, TriangleBlock.GATES, (1, 1024, 1024, 128)),
        Case("gated attention", GatedAttention, GatedAttention.GATES, (8, 4096, 1024)),
        Case("gated graph network", GatedGraph, GatedGraph.GATES, (1048576, 128)),
    ]


def measure(case: Case, what: str, device: torch.device, dtype: torch.dtype, rounds: int) -> list[Result]:
    """Times the three in turns, after each has compiled and warmed up."""
    torch.manual_seed(0)
    torch.compiler.reset()
    model = case.make().to(device, dtype)
    x = torch.randn(case.shape, device=device, dtype=dtype, requires_grad=what == TRAINING)
    cotangent = torch.randn_like(x)
    contenders: dict[str, Callable[[Tensor], Tensor]] = {
        EAGER: model,
        COMPILED: torch.compile(model, fullgraph=True, dynamic=False),
        OURS: torch.compile(model, fullgraph=True, dynamic=False, options=torchops.inductor.options()),
    }

    def call(contender: Callable[[Tensor], Tensor]) -> Tensor:
        if what == FORWARD:
            with torch.no_grad():
                return contender(x)
        out = contender(x)
        out.backward(cotangent)
        return out

    def forget() -> None:
        x.grad = None
        model.zero_grad(set_to_none=True)

    matches, deviations, peaks = {}, {}, {}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    expected: list[Tensor] = []
    for name, contender in contenders.items():
        before = torchops.inductor.matches()
        got = [call(contender).detach(), *([] if x.grad is None else [x.grad])]
        expected = expected or got
        matches[name] = torchops.inductor.matches() - before
        deviations[name] = max(_deviation(a, b) for a, b in zip(got, expected, strict=True))
        forget()
    assert matches == {EAGER: 0, COMPILED: 0, OURS: case.gates}, matches
    assert max(deviations.values()) < MOST_DEVIATION, deviations
    del got, expected
    for done in range(rounds + 2):
        # In another order each time: what runs after eager mode finds less of its data in the caches.
        for name, contender in random.sample(list(contenders.items()), len(contenders)):
            elapsed, peak = _timed(lambda contender=contender: call(contender), device)  # type: ignore[misc]
            forget()
            peaks[name] = peak
            if done >= 2:
                seconds[name].append(elapsed)
    results = []
    for name in contenders:
        low, median, high = statistics.quantiles(seconds[name], n=4)
        figures = (median, low, high, peaks[name], matches[name], deviations[name])
        results.append(Result(case.name, case.shape, what, name, *figures))
    return results


def _deviation(got: Tensor, expected: Tensor) -> float:
    return ((got - expected).float().norm() / expected.float().norm()).item()


def _timed(call: Callable[[], object], device: torch.device) -> tuple[float, int]:
    """Seconds, and on a GPU the peak of memory above the level before the call."""
    if device.type == "cpu":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start, 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    out = call()
    last.record()
    torch.cuda.synchronize()
    del out
    return first.elapsed_time(last) / 1e3, torch.cuda.max_memory_allocated() - before


def to_markdown(document: dict[str, Any]) -> str:
    results = [Result(**result) for result in document["results"]]
    about = "; ".join(
        document[name] if name == "machine" else f"{name} {document[name]}"
        for name in ("machine", "torch", "torchops", "revision of src")
    )
    lines = [
        f"{about}. Command: `{document['command']}`. {document['dtype']}; median time of {document['rounds']}",
        "calls, interleaved, and the most memory that a call takes beside parameters and input.",
        "",
        f"| model, input | gates | call | {EAGER} | {COMPILED} | {OURS} |",
        "|---" * 6 + "|",
    ]
    for start in range(0, len(results), 3):
        row = results[start : start + 3]
        cells = [f"{r.seconds * 1e3:.2f} ms" + f", {r.peak_bytes / 2**20:.0f} MiB" * (r.peak_bytes > 0) for r in row]
        shape = " x ".join(map(str, row[0].shape))
        lines.append(f"| {row[0].case}, {shape} | {row[2].matches} | {row[0].what} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures the models of this folder.")
    parser.add_argument("--rounds", type=int, default=20, help="timed calls of each contender")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
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
    for case in cases(options.quick, device):
        for what in (FORWARD, TRAINING):
            results += measure(case, what, device, DTYPES[options.dtype], options.rounds)
            document = {
                **description,
                "command": COMMAND,
                "dtype": options.dtype,
                "rounds": options.rounds,
                "results": [*map(asdict, results)],
            }
            markdown = to_markdown(document)
            print(markdown.splitlines()[-1], flush=True)
            if printed_only:
                continue
            # After each case: a run that is stopped leaves what it has measured.
            folder = options.output / machine.slug(description)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "models.json").write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
            (folder / "models.md").write_text("# Existing models, with and without torchops.inductor\n\n" + markdown)


if __name__ == "__main__":
    main()

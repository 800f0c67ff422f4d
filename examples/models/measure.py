"""Time and peak memory of the models in this folder: eager, torch.compile, and torch.compile with torchops.inductor.

    python examples/models/measure.py

All three run the same bfloat16 model on the same input in turns. Writes `models.json` and `models.md` into
`benchmarks/results/<machine>/`; on a machine without a GPU small sizes are run, and nothing but printed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

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


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[], nn.Module]
    gates: int
    shape: tuple[int, ...]


@dataclass
class Result:
    """Of one call: median and quartiles of its time, and the most memory that it takes beside its inputs."""

    case: str
    shape: tuple[int, ...]
    what: str
    contender: str
    seconds: float
    low: float
    high: float
    peak_bytes: int
    matches: int


def cases(device: torch.device) -> list[Case]:
    if device.type == "cpu":
        return [
            Case("triangle update", lambda: TriangleBlock(32, 32), TriangleBlock.GATES, (1, 32, 32, 32)),
            Case("gated attention", lambda: GatedAttention(64, 4), GatedAttention.GATES, (2, 128, 64)),
            Case("gated graph network", lambda: GatedGraph(32), GatedGraph.GATES, (4096, 32)),
        ]
    return [
        Case("triangle update", TriangleBlock, TriangleBlock.GATES, (1, 1024, 1024, 128)),
        Case("gated attention", GatedAttention, GatedAttention.GATES, (8, 4096, 1024)),
        Case("gated graph network", GatedGraph, GatedGraph.GATES, (1048576, 128)),
        Case("triangle update", TriangleBlock, TriangleBlock.GATES, (1, 512, 512, 128)),
    ]


def measure(case: Case, what: str, device: torch.device, rounds: int) -> list[Result]:
    """Times the three in turns, after each has compiled and warmed up."""
    torch.manual_seed(0)
    torch.compiler.reset()
    model = case.make().to(device, torch.bfloat16)
    x = torch.randn(case.shape, device=device, dtype=torch.bfloat16, requires_grad=what == TRAINING)
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

    matches, seconds, peaks, outputs = {}, {name: [] for name in contenders}, {}, {}  # type: ignore[var-annotated]
    for name, contender in contenders.items():
        before = torchops.inductor.matches()
        outputs[name] = call(contender).detach()
        matches[name] = torchops.inductor.matches() - before
        forget()
    assert matches == {EAGER: 0, COMPILED: 0, OURS: case.gates}, matches
    scale = outputs[EAGER].float().norm()
    for name, out in outputs.items():
        assert (out.float() - outputs[EAGER].float()).norm() < 0.02 * scale, name
    outputs.clear()
    for done in range(rounds + 2):
        for name, contender in contenders.items():
            elapsed, peak = _timed(lambda contender=contender: call(contender), device)  # type: ignore[misc]
            forget()
            peaks[name] = peak
            if done >= 2:
                seconds[name].append(elapsed)
    results = []
    for name in contenders:
        low, median, high = statistics.quantiles(seconds[name], n=4)
        results.append(Result(case.name, case.shape, what, name, median, low, high, peaks[name], matches[name]))
    return results


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


def to_markdown(description: dict[str, str], results: list[Result], rounds: int) -> str:
    facts = "; ".join(value if name == "machine" else f"{name} {value}" for name, value in description.items())
    lines = [
        "# Existing models, with and without torchops.inductor",
        "",
        f"{facts}. Command: `{COMMAND}`.",
        "",
        f"bfloat16. Median time of {rounds} calls, the contenders in turns, and the most memory that a call takes",
        "beside parameters and input. `gates` is how many places the pass rewrote.",
        "",
        f"| model, input | gates | call | {EAGER} | {COMPILED} | {OURS} |",
        "|---" * 6 + "|",
    ]
    for start in range(0, len(results), 3):
        row = results[start : start + 3]
        cells = [f"{result.seconds * 1e3:.2f} ms, {result.peak_bytes / 2**20:.0f} MiB" for result in row]
        first = row[0]
        lines.append(f"| {first.case} {first.shape} | {row[2].matches} | {first.what} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures the models of this folder.")
    parser.add_argument("--rounds", type=int, default=20, help="timed calls of each contender")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results", help="folder for the results")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    description = machine.describe(device)
    results: list[Result] = []
    for case in cases(device):
        for what in (FORWARD, TRAINING):
            results += measure(case, what, device, options.rounds)
            markdown = to_markdown(description, results, options.rounds)
            print(markdown.splitlines()[-1], flush=True)
            if device.type == "cpu":
                continue
            # After each case: a run that is stopped leaves what it has measured.
            folder = options.output / machine.slug(description)
            folder.mkdir(parents=True, exist_ok=True)
            document = {**description, "command": COMMAND, "rounds": options.rounds, "results": [*map(asdict, results)]}
            (folder / "models.json").write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
            (folder / "models.md").write_text(markdown)


if __name__ == "__main__":
    main()

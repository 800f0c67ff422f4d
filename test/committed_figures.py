"""Figures of the committed results in benchmarks/results, as prose quotes them (test_figures.py)."""

from __future__ import annotations

import json
import math
import statistics
from functools import cache
from pathlib import Path
from typing import Any

from allreduce_bench import model as cost_model

import benchmarks.case
from benchmarks import power, render, stages
from benchmarks.gate_lines import UNALIGNED_SIZES
from benchmarks.render import EPYC, H100, RESULTS

ROOT = Path(__file__).resolve().parents[1]


@cache
def document(machine: str, file: str) -> Any:
    return json.loads((RESULTS / machine / f"{file}.json").read_text())


def case(machine: str, op: str, name: str, regime: str = "") -> dict[str, Any]:
    """The times in seconds and the ratios of one case of `python -m benchmarks run`, by contender."""
    (result,) = (r for r in render.reports(machine, regime)[op].results if r.case.name == name)
    return {"ours": result.timings[result.first], **result.timings}


def times(scale: float, op: str, name: str, *ways: str) -> list[float]:
    found = case(H100, op, name)
    return [found[way].seconds * scale for way in ways]


def ratios(machine: str, op: str, task: str, way: str) -> list[float]:
    results = (r for r in render.reports(machine)[op].results if r.case.task == task)
    return [r.timings[way].ratio for r in results if way in r.timings]


def inference_by_compile() -> list[float]:
    """The time of torch.compile over ours: sigmoid, and layer_norm of up to 16384 columns."""
    results = (r for op in ("sigmoid", "layer_norm") for r in render.reports(H100)[op].results)
    forward = (r for r in results if r.case.task == FORWARD)
    return [r.timings["compile"].ratio for r in forward if r.case.shape[-1] <= 16384]


def gates(file: str, op: str, shape: list[int], task: str, dtype: str = "bfloat16") -> dict[str, Any]:
    found = (r for r in document(H100, file)["results"] if r["line"]["op"] == op and r["line"]["shape"] == shape)
    (result,) = (r for r in found if (r["line"]["task"], r["line"]["dtype"]) == (task, dtype))
    return {**result["microseconds"], "MiB": {way: size / 2**20 for way, size in result["peak_bytes"].items()}}


def triangle(*ways: str, what: str = "microseconds") -> list[float]:
    found = (r for r in document(H100, "triangle")["results"] if r["section"] == "forward")
    (result,) = (r for r in found if (r["n"], r["task"]) == (1024, FORWARD))
    return [result[what][way] / (1e3 if what == "microseconds" else 1) for way in ways]


def triangle_on_a_cpu(way: str, n: int | None = None, what: str = "microseconds") -> list[float]:
    """The least and the greatest time, or memory, of another way over ours."""
    found = [r[what] for r in document(EPYC, "triangle")["results"] if n in (None, r["n"])]
    over = [values[way] / values["torchops"] for values in found]
    return [min(over), max(over)]


def wide_triangle(dtype: str, task: str) -> float:
    """By how many percent more time it takes than torch.compile, without TF32."""
    found = (r for r in document(H100, "triangle-paths")["results"] if r["section"] == "dtypes" and not r["tf32"])
    (time,) = (r["microseconds"] for r in found if (r["dtype"], r["task"]) == (dtype, task))
    return (time["torchops"] / time["channels first, torch.compile"] - 1) * 100


def stage(kernel: str) -> float:
    found = document(H100, "stages")["microseconds"]["kernels, forward"]
    return sum(time for name, time in found.items() if kernel in name) / 1e3


def stage_bound() -> float:
    """Milliseconds of the first stage, and of the last, at the rates of the table."""
    first, last = (stages.bound(1024, 128, of, benchmarks.case.FORWARD) / 1e3 for of in (stages.GLUS, stages.OUT))
    assert first == last
    return first


def power_of_products() -> list[float]:
    """Microseconds and megahertz of the triangle update's products, of zeros with TFLOP/s, and of the whole update."""
    results = document(H100, "power")["results"]
    random, zeros, update = (
        [results[work][what] for what in ("microseconds", "megahertz")]
        for work in ("its products", "its products, of zeros", "triangle update")
    )
    return [*random, *zeros, 2 * power.C * power.N**3 / zeros[0] / 1e6, update[0] / 1e3, update[1]]


def released(task: str, scale: float, what: str, n: int = 768, precision: str = "bf16-mixed") -> list[float]:
    found = document(H100, "boltz")["results"]
    (result,) = (r for r in found if (r["n"], r["task"], r["precision"]) == (n, task, precision))
    return [result[when][what] / scale for when in ("before", "after")]


def slowdown(before: float, after: float) -> list[float]:
    """In percent."""
    return [(after / before - 1) * 100]


def model(name: str, task: str, way: str, what: str = "seconds") -> float:
    (result,) = (
        r for r in document(H100, "models")["results"] if (r["case"], r["what"], r["contender"]) == (name, task, way)
    )
    return float(result[what])


def gain(name: str, task: str, what: str = "seconds") -> float:
    """Of the pass, compared with the compiled model without it."""
    return model(name, task, "torch.compile", what) / model(name, task, "torch.compile + torchops.inductor", what)


def sharded(direction: str, task: str) -> list[float]:
    found = document(H100, "triangle_sharded")["results"]
    (result,) = (r for r in found if (r["n"], r["direction"], r["task"]) == (2048, direction, task))
    rows, one = (result["microseconds"][way] / 1e3 for way in ("rows", "one"))
    return [rows, one, one / rows]


def with_memory(n: int, task: str) -> list[float]:
    found = document("nvidia-h200", "pair_layer_sharded")["rows"]
    result = next(r for r in found if (r["n"], r["task"]) == (n, task))
    return [x for way in ("rows", "one") for x in (result["microseconds"][way] / 1e3, result["MiB"][way] / 1024)]


def scaled_errors() -> list[float]:
    (result,) = (r for r in document(H100, "eight_bits")["results"] if r["shape"] == [8192, 8192, 8192])
    return list(result["relative errors"]["per tensor"].values())


def scaled() -> list[float]:
    """By how many percent less time `dense_scaled` takes than `_scaled_mm` and `sigmoid_`, in all cases."""
    times = [t for r in document(H100, "eight_bits")["results"] for t in r["microseconds"].values()]
    less = [(1 - t["`dense_scaled`"] / t["`_scaled_mm`, then `sigmoid_`"]) * 100 for t in times]
    return [min(less), max(less)]


def fast_accumulation() -> list[float]:
    """By how many percent less time `use_fast_accum=True` takes with scales per row, in the two largest cases."""
    times = [r["microseconds"]["per row"] for r in document(H100, "eight_bits")["results"][:2]]
    less = [(1 - t["with `use_fast_accum=True`"] / t["`dense_scaled`"]) * 100 for t in times]
    return [min(less), max(less)]


def bandwidth_of_ring(way: str, machine: str = "nvidia-h200") -> float:
    """As a share of the library's, of the largest message."""
    seconds = document(machine, "allreduce")["rows"][-1]["seconds"]
    return float(seconds["library"] / seconds[way])


def distance_of_model() -> float:
    """By how many percent the formula differs from the ring at most, on the CPU."""
    found = document(EPYC, "allreduce")
    predict = cost_model(found)
    return max(abs(predict(row["bytes"]) / row["seconds"]["ring"] - 1) for row in found["rows"]) * 100


def data_parallel() -> list[float]:
    single, half = document("nvidia-h200", "pair_layer_sharded")["data parallel"]
    return [single["fully_shard"]["all"] * 1e7, half["fully_shard"]["all"] * 1e3, half["one by one"]["all"] * 1e3]


FORWARD, BACKWARD = "forward", "forward and backward"
GATE, DEEP = [1048576, 128, 128], [8192, 4096, 11008]
PACKED = "torch.compile, packed"
ROWS = "forward and backward (65536, 4096) bfloat16"


def of_deep_swiglu() -> list[float]:
    """In training: how many times faster than torch.compile, and the memory of both and of eager mode."""
    found = gates("gates", "swiglu", DEEP, BACKWARD)
    memory = (found["MiB"][way] for way in ("torchops", "torch.compile", "eager"))
    return [found["torch.compile"] / found["torchops"], *memory]


def times_and_memory(op: str, task: str) -> list[float]:
    """Of 1048576 rows of 128 features: milliseconds and MiB of ours, of torch.compile and of eager mode."""
    found = gates("gates", op, GATE, task)
    return [x for way in ("torchops", "torch.compile", "eager") for x in (found[way] / 1e3, found["MiB"][way])]


def portable() -> list[float]:
    fused, path = (gates(file, "gate", GATE, FORWARD) for file in ("gates", "gates-portable"))
    training = gates("gates-portable", "gate", GATE, BACKWARD)
    forward = [path["torchops"], fused["torchops"], path["torch.compile"]]
    return [*forward, training["torchops"], training["torch.compile"]]


def by_cublas(op: str, task: str, against: str = "torch.compile") -> list[float]:
    """The least and the greatest speed of bfloat16 by cuBLAS, in terms of another way's."""
    found = (r for r in document(H100, "gates-by-cublas")["results"] if r["line"]["op"] == op)
    times = [r["microseconds"] for r in found if r["line"]["task"] == task and r["line"]["compiled"]]
    ratios_ = [t[against] / t["torchops"] for t in times]
    return [min(ratios_), max(ratios_)]


def by_cublas_in_both(op: str, against: str) -> list[float]:
    return [*by_cublas(op, FORWARD, against), *by_cublas(op, BACKWARD, against)]


def odd_rows() -> list[float]:
    """How many times faster gates of unaligned rows are than eager mode: least and most, and in training."""
    speeds: list[float] = []
    for task in (FORWARD, BACKWARD):
        found = [gates("gates", op, list(size), task) for op in ("gate", "glu") for size in UNALIGNED_SIZES]
        ratios_ = [t["eager"] / t["torchops"] for t in found]
        speeds += [min(ratios_), max(ratios_)]
    return speeds


def streams(task: str, what: str = "microseconds") -> list[tuple[dict[str, Any], float]]:
    """The lines of float32 rows beside 16-bit weights, and how many times as much torch.compile takes of each."""
    found = (r for r in document(H100, "gates-stream")["results"] if r["line"]["compiled"])
    taken = ((r["line"], r[what]) for r in found if r["line"]["task"] == task)
    return [(line, by["torch.compile"] / by["torchops"]) for line, by in taken]


def forward_of_streams() -> list[float]:
    speeds = [ratio for _, ratio in streams(FORWARD)]
    return [min(speeds), max(speeds)]


def _in_one_pass(line: dict[str, Any]) -> bool:
    return line["shape"][1] <= 128 and "v" not in line["stream"]


def training_of_streams() -> dict[str, list[float]]:
    """Least and greatest speed where one pass makes all gradients; of glu of more features; of other gates; and least
    and most memory in percent that these save with more than 64 features."""
    speeds = streams(BACKWARD)
    one_pass = [ratio for line, ratio in speeds if _in_one_pass(line)]
    glu = [ratio for line, ratio in speeds if not _in_one_pass(line) and line["op"] == "glu"]
    gate = [ratio for line, ratio in speeds if not _in_one_pass(line) and line["op"] == "gate"]
    other = [(line, ratio) for line, ratio in streams(BACKWARD, "peak_bytes") if line["op"] == "gate"]
    less = [(1 - 1 / ratio) * 100 for line, ratio in other if not _in_one_pass(line) and line["shape"][1] > 64]
    others = [min(gate), max(gate), min(less), max(less)]
    return {"one pass": [min(one_pass), max(one_pass)], "glu": glu, "gate": others}


def between_runs() -> float:
    """By how many percent times of a call differ at most between `benchmarks run` and `benchmarks gates`."""
    same = {"torchops": "ours", "eager": "eager", "torch.compile": "compile", "Triton": "triton"}
    most = 0.0
    for result in document(H100, "gates")["results"]:
        line, shape = result["line"], tuple(result["line"]["shape"])
        if line["op"] not in render.reports(H100) or line["task"] not in (FORWARD, BACKWARD):
            continue
        name = f"{line['task']} {shape} {line['dtype']}"
        if any(r.case.name == name for r in render.reports(H100)[line["op"]].results):
            other = case(H100, line["op"], name)
            for way, theirs in same.items():
                if way in result["microseconds"] and theirs in other:
                    ratio = result["microseconds"][way] / (other[theirs].seconds * 1e6)
                    most = max(most, ratio - 1, 1 / ratio - 1)
    return most * 100


def copied_per_second() -> float:
    """Bytes that an H100 reads and writes in a second of copying."""
    (copy,) = (each for each in document(H100, "ptx")["times"] if each["name"] == "copy")
    return float(copy["bytes_per_second"])


def first_message() -> list[float]:
    """Microseconds of the ring for the smallest message on two GPUs, and how many times the library's these are."""
    row = document("nvidia-h200", "allreduce")["rows"][0]
    return [row["seconds"]["ring"] * 1e6, row["seconds"]["ring"] / row["seconds"]["library"]]


def on_a_cpu_of_eager(rows: int, features: int, task: str = BACKWARD) -> list[float]:
    """The speed of gate and glu in terms of eager mode's, in float32, then in bfloat16."""
    lines = [r for r in document(EPYC, "gates")["results"] if r["line"]["shape"] == [rows, features, features]]
    found = {(r["line"]["dtype"], r["line"]["op"]): r["microseconds"] for r in lines if r["line"]["task"] == task}
    order = [(dtype, op) for dtype in ("float32", "bfloat16") for op in ("gate", "glu")]
    return [found[key]["eager"] / found[key]["torchops"] for key in order]


def exact(op: str, task: str, against: str = "torch.compile") -> float:
    """How many times faster float32 is without TF32."""
    found = gates("gates", op, [262144, 128, 128], task, "float32")
    return found[against] / found["torchops"]


def portable_gains() -> list[float]:
    """How many times faster than torch.compile, packed or not, kernels for other GPUs are: least and most."""
    times = [r["microseconds"] for r in document(H100, "gates-portable")["results"] if r["line"]["compiled"]]
    gains = [min(t["torch.compile"], t.get(PACKED, math.inf)) / t["torchops"] for t in times]
    return [min(gains), max(gains)]


def portable_dense() -> list[float]:
    """The least and the greatest speed of bfloat16 dense by the kernels for other GPUs, in terms of F.linear alone."""
    found = (r for r in document(H100, "gates-portable")["results"] if r["line"]["op"] == "dense")
    times = [r["microseconds"] for r in found if r["line"]["dtype"] == "bfloat16"]
    ratios = [t["F.linear alone"] / t["torchops"] for t in times]
    return [min(ratios), max(ratios)]


def longest() -> float:
    """By how many percent more time any call of the table takes at most than with torch.compile, packed or not."""
    times = [r["microseconds"] for r in document(H100, "gates")["results"] if r["line"]["compiled"]]
    found = [time["torchops"] / time[way] for time in times for way in ("torch.compile", PACKED) if way in time]
    return math.ceil((max(found) - 1) * 100)


def swiglu() -> list[float]:
    """Milliseconds and MiB of ours, and of torch.compile."""
    found = gates("gates", "swiglu", DEEP, BACKWARD)
    return [figure for way in ("torchops", "torch.compile") for figure in (found[way] / 1e3, found["MiB"][way])]


def without(op: str, name: str, regime: str = "") -> float:
    """By how many percent less time the linear layer alone takes."""
    return (1 - case(H100, op, name, regime)["linear"].ratio) * 100


def longest_without_sigmoid() -> float:
    """How many times faster the linear layer alone is at most, of cold results with millions of elements."""
    found = (r for r in render.reports(H100)["dense"].results if r.case.task == FORWARD and "linear" in r.timings)
    large = [r.timings["linear"].ratio for r in found if r.cold and r.case.shape[0] * r.case.shape[2] >= 2**20]
    return 1 / min(large)


def hot() -> list[float]:
    """In percent, for 4096 and 8192 rows and features: how much longer dense takes on a hot chip, and how much less
    time the linear layer alone takes there and in queued calls."""
    names = [f"forward ({n}, {n}, {n}) bfloat16" for n in (4096, 8192)]
    seconds = [[case(H100, "dense", name, regime)["ours"].seconds for regime in ("", "hot")] for name in names]
    alone = [without("dense", name, regime) for regime in ("hot", "") for name in names]
    return [(after / before - 1) * 100 for before, after in seconds] + alone


def on_a_cpu() -> list[float]:
    """Of eager mode: by how many percent dense gains in the median, and the least and the greatest times of others."""
    gated = [r for op in ("gate", "glu") for r in ratios(EPYC, op, FORWARD, "eager")]
    norms = [
        r.timings["eager"].ratio
        for r in render.reports(EPYC)["layer_norm_"].results
        if r.case.task == FORWARD and r.cold
    ]
    median = statistics.median(ratios(EPYC, "dense", FORWARD, "eager"))
    return [(median - 1) * 100, min(gated), max(gated), min(norms), max(norms)]


def predictions(file: str, compiled: str | None = None) -> list[float]:
    """Seconds of whole predictions of Boltz-2 on an H200: released, compiled if there is a file of it, and replaced."""

    def median(name: str, variant: str) -> float:
        path = ROOT / "benchmarks" / "results" / "nvidia-h200" / f"whole-boltz-{name}.json"
        return statistics.median(json.loads(path.read_text())["variants"][variant]["seconds"])

    between = [] if compiled is None else [median(compiled, "compiled")]
    return [median(file, "released"), *between, median(file, "replaced")]

"""What results say about where, from what and how they were measured."""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
from pathlib import Path

import allreduce_bench
import pytest
import torch

from benchmarks import compare, dense, ladder, machine, render, report, run, timing, triangle
from benchmarks.__main__ import main
from benchmarks.case import FORWARD, OVERHEAD, Case, Cost
from benchmarks.report import Report, Result
from benchmarks.timing import Timing

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs the history of the sources")
def test_revisions_of_both_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BENCH_REVISION", raising=False)
    found = machine.describe(CPU)
    for folder in ("src", "torchops"):
        log = ["git", "log", "-1", "--format=%h", "--", folder]
        last = subprocess.run(log, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
        assert found[f"revision of {folder}"].removesuffix(" with changes") == last


def test_revision_of_a_copy_without_history(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_REVISION", "abc")
    assert machine.revisions(machine.describe(CPU)) == "revision abc of `src`, abc of `torchops`"
    monkeypatch.setenv("BENCH_REVISION", "abc,def")
    assert machine.revisions(machine.describe(CPU)) == "revision abc of `src`, def of `torchops`"
    assert machine.revisions({"revision of src": "abc"}) == "revision abc of `src`"


def test_versions_of_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "PEERS", {"quack": "torch", "liger": "no such package"})
    found = machine.describe(CPU)
    assert found["quack"] == torch.__version__
    assert "liger" not in found


def test_summary_has_one_convention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faster, slower, as fast within the noise, or not measured: always of torchops."""
    cases = {2.0: (1, 2, 3), 0.5: (4, 2, 3), 1.009: (5, 2, 3)}
    results = [
        Result(
            Case("dense", shape),
            Cost(1, 1),
            0.0,
            {"cpp": Timing(1e-6, 1e-6, 1e-6, 1.0), "eager": Timing(ratio * 1e-6, ratio * 1e-6, ratio * 1e-6, ratio)},
        )
        for ratio, shape in cases.items()
    ]
    about = {"machine": "M", "torch": "2", "revision of src": "abc"}
    monkeypatch.setattr(render, "reports", lambda machine: {"dense": Report("dense", about, "", {}, results)})
    rows = render.summary("M", [("dense", result.case.name) for result in results]).splitlines()[2:5]
    assert [row.split(" | ")[2:] for row in rows] == [
        ["2.00 × faster", "not measured |"],
        ["2.00 × slower", "not measured |"],
        ["as fast", "not measured |"],
    ]


def test_command_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["--sizes", "1,2", "--json", "r.json", "--output=there", "--case", "a b"]
    assert machine.command("benchmarks", ["gates", *given]) == "python -m benchmarks gates --sizes 1,2 --case 'a b'"
    monkeypatch.setattr(sys, "argv", ["climb.py", "--quick", "--output", "there"])
    assert machine.command("examples/ladder/climb.py") == "python examples/ladder/climb.py --quick"
    torchrun = "torchrun --standalone --nproc-per-node 2 -m benchmarks triangle_sharded"
    assert machine.command("benchmarks", ["triangle_sharded"], 2) == torchrun


def test_rows_tell_warm_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a part of the cases is warm, they have a row of their own."""
    timings = {"cpp": Timing(1e-6, 1e-6, 1e-6, 1.0), "eager": Timing(5e-7, 5e-7, 5e-7, 0.5)}
    cases = [Case("dense", (1, 2, 3)), Case("dense", (2**20, 128, 128)), Case("dense", (1, 1, 1), task=OVERHEAD)]
    results = [Result(case, Cost(1, 1), 0.0, timings) for case in cases]
    about = {"machine": "M", "torch": "2", "revision of src": "abc"}
    monkeypatch.setattr(render, "reports", lambda machine: {"dense": Report("dense", about, "", {}, results)})
    rows = render.ratios("M").splitlines()[2:5]
    assert [row.split(" | ")[0] for row in rows] == [
        "| `dense`, forward, warm",
        "| `dense`, forward",
        "| `dense`, overhead",
    ]
    assert "| `dense` forward (1, 2, 3) float32, warm | eager 0.50 |" in render.behind("M")
    assert "M, torch 2, revision abc of `src`." in render.ratios("M")


def test_tables_with_revisions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of PTX, of the ladder and of all-reduces: in results that have them."""
    about = {"machine": "M", "torch": "2", "revision of src": "abc", "revision of torchops": "def"}
    document = json.loads((render.RESULTS / render.H100 / "ptx.json").read_text())
    document = {name: value for name, value in document.items() if not name.startswith("revision of ")}
    monkeypatch.setattr(render, "read", lambda machine, name: document)
    assert "revision" not in render.ptx("M", 2)
    document |= about
    assert render.ptx("M", 2).endswith("\n\nM, torch 2, revision abc of `src`, def of `torchops`.\n")
    ladder_of = json.loads((render.RESULTS / render.H100 / "ladder.json").read_text())
    ladder_of["ladder"] |= about
    ladder_of["cases"][0]["method"] = "graph replay"
    where = "M, torch 2, revision abc of `src`, def of `torchops`: bfloat16"
    assert where in ladder.table(ladder_of)
    assert "Timed by replaying a CUDA graph between events, on cold inputs." in ladder.table(ladder_of)
    seconds = dict.fromkeys(allreduce_bench.CALLS, 1e-3)
    rows = [{"bytes": size, "seconds": seconds} for size in (2**12, 2**20)]
    sums = {**about, "command": "torchrun", "processes": 2, "backend": "gloo", "rows": rows}
    assert allreduce_bench.report(sums).startswith("M, torch 2, revision abc of `src`, `torchrun`:\n")


@pytest.mark.parametrize("regime", timing.REGIMES)
def test_other_regimes(regime: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "HOT_AFTER", 0.02)
    monkeypatch.setattr(timing, "HOT_MEASURED", 0.02)
    monkeypatch.setattr(timing, "ROTATED_BYTES", 2**20)
    command = ["run", "-o", "dense", "-m", "cpp,eager", "--shape", "33,17,9", "--quick", "--device", "cpu"]
    assert main([*command, "--regime", regime, "--output", str(tmp_path)]) == 0
    (path,) = tmp_path.rglob("*.json")
    assert path.name == f"dense-{regime}.json"
    document = json.loads(path.read_text())
    assert document["regime"] == regime
    assert json.loads(json.dumps(report.to_document(report.from_document(document)))) == document
    (case,) = document["cases"]
    assert case["method"] == regime
    assert list(case["timings"]) == ["cpp", "eager", "preallocated", "linear"]
    assert all(timing_["low"] <= timing_["seconds"] <= timing_["high"] for timing_ in case["timings"].values())
    assert case["timings"]["cpp"]["ratio"] == 1.0
    page = path.with_suffix(".md").read_text()
    assert f"- {regime}: " in page
    assert ("interleaved" in page) == (regime == "single")
    assert f"| {regime}, {'cold' if regime == 'single' else 'warm'} |" in page
    assert page.startswith(f"# dense, {regime}\n")
    assert list(tmp_path.rglob("*.png")) == []
    assert main(["compare", str(path), "run", "--quick", "--against", "cpp", "--device", "cpu"]) == 0
    # Overheads are times of the host.
    assert main(["run", "-o", "dense", "--task", "overhead", "--regime", regime, "--device", "cpu"]) == 2


def _dense(regime: str, **ratios: float) -> Report:
    timings = {"cuda": Timing(1e-4, 1e-4, 1e-4, 1.0)}
    timings |= {name: Timing(ratio * 1e-4, 1e-4, 1e-4, ratio) for name, ratio in ratios.items()}
    result = Result(Case("dense", (4096, 4096, 4096), torch.bfloat16), Cost(1, 1), 0.0, timings, method=regime)
    other = Result(Case("dense", (9, 9, 9), torch.bfloat16), Cost(1, 1), 0.0, timings, method=regime)
    about = {"machine": "M", "torch": "2", "revision of src": "abc"}
    return Report("dense", about, "", {}, [result] if regime else [other, result], regime)


def test_table_of_regimes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row for each regime in which a case was measured; nothing fails where there is none."""
    found = {"": _dense("", eager=1.5, linear=1.0)}
    monkeypatch.setattr(render, "reports", lambda machine, regime="": {"dense": r} if (r := found.get(regime)) else {})
    columns = "M", "dense", "(rows, in, out)", ("eager", "linear")
    assert render.regimes(*columns).startswith("Not measured on this machine yet.")
    found |= {regime: _dense(regime, eager=0.9) for regime in timing.REGIMES}
    assert render.regimes(*columns).splitlines() == [
        "| (rows, in, out) | calls | torchops | eager | `F.linear` alone |",
        "|---|---|---|---|---|",
        "| `dense` (4096, 4096, 4096) bfloat16 | queued | 100 µs | 150 µs (1.50x) | 100 µs (1.00x) |",
        "| `dense` (4096, 4096, 4096) bfloat16 | single | 100 µs | 90.0 µs (0.90x) |  |",
        "| `dense` (4096, 4096, 4096) bfloat16 | hot, warm | 100 µs | 90.0 µs (0.90x) |  |",
        "",
        "M, torch 2, revision abc of `src`.",
    ]


def test_results_of_a_regime_are_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables of queued calls do not have them, and pictures are not drawn of them."""
    monkeypatch.setattr(render, "RESULTS", tmp_path)
    for regime in ("", *timing.REGIMES):
        report.write(tmp_path / "m", _dense(regime, eager=0.9))
    render.reports.cache_clear()
    try:
        assert [len(render.reports("m", regime)["dense"].results) for regime in ("", "single", "hot")] == [2, 1, 1]
        assert render.behind("m").count("4096, 4096, 4096") == 1
        assert "(4096, 4096, 4096) bfloat16 | single |" in render.regimes("m", "dense", "", ("eager",))
    finally:
        render.reports.cache_clear()
    queued, hot = ({"op": "dense", "regime": of, "cases": [{"name": "a", "timings": {}}]} for of in ("", "hot"))
    assert compare.rows_of([hot], [queued], ["cuda"], "") == ([], ["dense, hot a"])


def test_regimes_have_cases_of_dense() -> None:
    """Of which there are queued results, too."""
    makefile = (ROOT / "Makefile").read_text()
    shapes = re.findall(r"^DENSE_(?:SINGLE|HOT) := (.*)$", makefile, re.MULTILINE)
    assert len(shapes) == len(timing.REGIMES)
    measured = {case.shape for case in dense.OPERATORS[0].cases("cuda") if case.name.endswith(" bfloat16")}
    assert {run.parse_shape(shape) for line in shapes for shape in line.split()} < measured


def test_unchecked_results_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"dense": _dense("", eager=1.5, linear=1.0), "glu": _dense("", linear=1.0)}
    monkeypatch.setattr(render, "reports", lambda machine: found)
    assert render.unchecked("M").startswith("Results of `dense` and `glu` are older: ")
    for item in found.values():
        for result in item.results:
            result.accuracy.update(cuda=0.0, eager=0.0)
    assert render.unchecked("M") == ""


@pytest.mark.parametrize("regime", timing.REGIMES)
def test_a_contender_that_fails_in_a_regime_leaves_the_others_alone(
    regime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it did not fail in the first calls. Garbage is not collected meanwhile."""
    monkeypatch.setattr(timing, "HOT_AFTER", 0.02)
    monkeypatch.setattr(timing, "HOT_MEASURED", 0.02)
    monkeypatch.setattr(timing, "ROTATED_BYTES", 2**20)
    collecting: list[bool] = []

    def good(x: torch.Tensor) -> None:
        collecting.append(gc.isenabled())

    def bad(x: torch.Tensor) -> None:
        collecting.append(gc.isenabled())
        if not gc.isenabled():
            raise ValueError("no luck")

    ways, inputs = {"first": good, "bad": bad, "other": good}, [(torch.zeros(4),)]
    measured = timing.measure(ways, inputs, FORWARD, CPU, timing.effort("cpu", quick=True), regime=regime)
    assert measured.errors == {"bad": "ValueError: no luck"}
    assert list(measured.timings) == ["first", "other"]
    assert measured.timings["first"].ratio == 1
    assert {*collecting} == {True, False}
    assert gc.isenabled()


def test_hot_inputs_are_cold_where_no_cache_holds_them() -> None:
    """One set of inputs is called again and again; the other regimes rotate."""
    cases = [Case("dense", (rows, 128, 128)) for rows in (2**14, 2**20)]
    assert [Result(case, Cost(1, 1), 0.0, method="hot").cold for case in cases] == [False, True]
    assert [Result(case, Cost(1, 1), 0.0, method="events").cold for case in cases] == [True, True]


def test_each_section_of_the_triangle_update_has_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triangle, "measure", lambda section, *_: iter([{"section": section, "n": 5}]))
    file = tmp_path / "triangle.json"
    for sections in ("forward,host", "host", "memory"):
        assert main(["triangle", "--device", "cpu", "--sections", sections, "--json", str(file)]) == 0
    document = json.loads(file.read_text())
    start = "python -m benchmarks triangle --device cpu --sections"
    assert document["commands"] == {
        "forward": f"{start} forward,host",
        "host": f"{start} host",
        "memory": f"{start} memory",
    }
    assert [result["section"] for result in document["results"]] == ["forward", "host", "memory"]

"""What pages say of all results, of what has no results, and of commands: sentences without figures of their own."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import pytest
from committed_figures import (
    BACKWARD,
    FORWARD,
    ROOT,
    ROWS,
    case,
    document,
    gain,
    model,
    triangle_on_a_cpu,
)
from test_docs import FENCE, READ, blocks, name
from test_figures import QUOTATIONS

import torchops
from benchmarks import render
from benchmarks.render import H100

PAGES = [*READ, *(ROOT / f"{page}.md" for page in ("CHANGELOG", "SECURITY", "SUPPORT"))]
# Times, and how much more or less of anything.
MEASURED = re.compile(
    r"\d[\d.,]* (?:µs|ms)\b|\d[\d.]*% (?:less|more|longer|slower|faster)|\d[\d.]* of the time"
    r"|\d[\d.]* × (?:faster|slower|the speed)"
)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_measured_figures_are_compared_with_results(page: Path) -> None:
    """A time in a sentence is in a quotation, or generated with its table."""
    text = " ".join(render.BLOCK.sub("", FENCE.sub("", page.read_text())).split())
    for quoted_in, sentence, figures in QUOTATIONS:
        if quoted_in == name(page):
            text = text.replace(sentence.format(*figures()), "")
    assert MEASURED.findall(text) == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_can_be_typed(page: Path) -> None:
    """As they stand: a shell takes `<` for a file to read."""
    lines = [line for _, code in blocks(page, "bash") for line in code.splitlines()]
    assert [line for line in lines if re.search(r"<[a-z ]+>", line)] == []


def test_readme_begins_with_what_sets_everything_up() -> None:
    _, first = next(blocks(ROOT / "README.md", "bash"))
    assert [line.partition("#")[0].split() for line in first.splitlines()] == [["make", "demo"], ["make", "test"]]


def test_scratch_of_gates() -> None:
    """docs/gates.md says: in inference, at most 64 MiB beside the result."""
    sizes = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
    checked = 0
    for file in ("gates", "gates-by-cublas", "gates-portable", "gates-stream"):
        for result in document(H100, file)["results"]:
            line = result["line"]
            if line["task"] == FORWARD and line["op"] in ("dense", "gate", "gate_", "glu", "swiglu"):
                rows, _, n_out = line["shape"]
                of_result = 4 if "v" in line.get("stream", "") else sizes[line["dtype"]]
                made = 0 if line["op"].endswith("_") else rows * n_out * of_result
                assert result["peak_bytes"]["torchops"] - made <= 64 * 2**20
                checked += 1
    assert checked > 50


def test_nearest() -> None:
    """The tables of the H100 say: that is quack in forward and backward of softmax and layer_norm."""
    for op in ("softmax", "layer_norm"):
        found = case(H100, op, ROWS)
        others = {way: timing.seconds for way, timing in found.items() if way not in ("ours", "cuda", "compile-ours")}
        assert min(others, key=others.__getitem__) == "quack"


def test_keywords_of_the_triangle_update() -> None:
    """Those that docs/triangle_update.md lists for who comes from cuEquivariance are all that there are."""
    page = (ROOT / "docs" / "triangle_update.md").read_text()
    section = page.partition("## From cuEquivariance")[2].partition("\n## ")[0]
    cells = (cell.partition(", of ")[0] for cell in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE))
    listed = [keyword for cell in cells for keyword in re.findall(r"`(\w+)`", cell)]
    keywords = inspect.signature(torchops.triangle_multiplicative_update).parameters
    assert sorted(listed) == sorted(keyword for keyword, of in keywords.items() if of.kind != of.VAR_KEYWORD)


def test_table_of_the_pass() -> None:
    """What docs/compiler.md says of table.json."""
    rows = json.loads((ROOT / "torchops" / "inductor" / "table.json").read_text())["rows"]
    assert all(row["compiled"] > 1.05 * row["ours"] and row["least_rows"] >= 4096 for row in rows)
    assert {(row["device"], row["capability"]) for row in rows} == {("cuda", "9.0")}
    most = [row for row in rows if (row["least_rows"], row["most_rows"]) == (65536, 1048576)]
    assert len(most) > len(rows) / 2
    for dtype, more in (("float16", set()), ("bfloat16", {(128, 512), (384, 384)})):
        sizes = {(row["n_in"], row["n_out"]) for row in rows if row["dtype"] == dtype}
        assert sizes >= {(64, 64), (128, 128), (256, 256), (128, 256)} | more


def test_single_calls() -> None:
    """What the tables of the H100 say of all cases that were measured as single calls."""
    single = {r.case.name: r.timings for r in render.reports(H100, "single")["dense"].results}
    assert all(times["linear"].ratio > 1 for times in single.values())
    assert all(times["compile"].ratio == max(t.ratio for t in times.values()) for times in single.values())
    queued = {name: case(H100, "dense", name)["ours"].seconds for name in single}
    slow = [name for name, times in single.items() if next(iter(times.values())).seconds > queued[name] * 1.01]
    assert len(slow) == len(single) - 1
    assert "forward (8192, 8192, 8192) bfloat16" not in slow


def test_models() -> None:
    """What docs/compiler.md says of all models."""
    names = {result["case"] for result in document(H100, "models")["results"]}
    assert len(names) == 4
    assert all(gain(name, task) > 1 for name in names for task in (FORWARD, BACKWARD))
    for what in ("seconds", "peak_bytes"):
        assert all(
            model(name, FORWARD, "eager + torchops.replace", what) < model(name, FORWARD, "eager", what)
            for name in names
        )


def test_sharded_small() -> None:
    """docs/sharded_pairs.md says that for N = 1024, two GPUs are not faster."""
    found = [r for r in document(H100, "triangle_sharded")["results"] if r["n"] == 1024]
    assert len(found) == 4
    assert all(r["microseconds"]["rows"] >= r["microseconds"]["one"] for r in found)


def test_memory_of_the_triangle_elsewhere() -> None:
    """docs/triangle_update.md says: less than half of torch.compile's, and at most two thirds with gradients."""
    for result in document(H100, "triangle-paths")["results"]:
        memory = result["pair tensors"]
        compiled = memory.get("channels first, torch.compile")  # none where it failed
        if compiled is not None:
            assert memory["torchops"] < (1 / 2 if result["task"] == FORWARD else 2 / 3) * compiled


def test_triangle_on_a_cpu() -> None:
    """For N = 256, the tables of the CPU say that torch.compile takes more than twice the memory."""
    least, _ = triangle_on_a_cpu("channels first, torch.compile", 256, "pair tensors")
    assert least > 2

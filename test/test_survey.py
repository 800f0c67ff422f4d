"""`python -m benchmarks survey`: what is drawn, that contenders compute the same, and what is written."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from random import Random

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import plots, survey, timing
from benchmarks.case import BACKWARD, FORWARD
from benchmarks.survey import report
from benchmarks.survey.draws import SURVEYED, Draw, draw
from benchmarks.survey.sizes import Limits, size

SMALL = Limits(1 << 14, 2e6)
CPU = torch.device("cpu")


def drawn(name: str, task: str, number: int = 0) -> Draw:
    """A draw that takes no time."""
    op, random = SURVEYED[name], Random(number)
    while (sizes := op.sizes(random, SMALL)) is None:
        pass
    return Draw(op, task, number, sizes, torch.float64)  # type: ignore[arg-type]


CALLS = [(op.name, task) for op in SURVEYED.values() for task in op.tasks]


@pytest.mark.parametrize(("name", "task"), CALLS)
def test_contenders_compute_the_same(name: str, task: str) -> None:
    """Results, and every gradient."""
    of = drawn(name, task)
    assert of.ways().keys() >= {"torchops"}
    assert len(of.ways()) > 1
    args = of.tensors(CPU)
    results = {}
    for contender, way in of.ways().items():
        copies = [t.detach().clone().requires_grad_(t.requires_grad) for t in args]
        results[contender] = timing.contender(way, of.task)(*copies)
    for contender, result in results.items():
        torch.testing.assert_close(result, results["torchops"], msg=partial("{}: {}".format, contender))


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_a_draw_can_be_drawn_again(device_type: str) -> None:
    """It depends on the seed, the operator and its number alone."""
    every = [next(d for d in survey.draws(5, [], device_type) if d.number == n) for n in range(2)]
    for of in every:
        again = draw(of.op, of.task, 5, of.number, device_type)
        assert (again.sizes, again.dtype) == (of.sizes, of.dtype)
    op = SURVEYED["dense"]
    assert len({str(draw(op, FORWARD, seed, n, device_type).sizes) for seed in (1, 2) for n in range(4)}) == 8


def test_sizes_are_of_all_kinds() -> None:
    """Within their limits; a third multiples of 64, a quarter more of 8, and some odd ones in each decade."""
    random = Random(0)
    sizes = [size(random, 8, 8192) for _ in range(4000)]
    assert min(sizes) >= 8
    assert max(sizes) <= 8192
    assert 0.25 < sum(s % 64 == 0 for s in sizes) / 4000 < 0.4
    assert 0.5 < sum(s % 8 == 0 for s in sizes) / 4000 < 0.7
    for low in (8, 80, 800):
        assert any(low <= s < 10 * low and s % 2 for s in sizes)


def outcome(times: float, number: int = 0, **changes: object) -> survey.Outcome:
    sizes = {"rows": 3, "bias": True}
    seconds = {"torchops": times * 1e-3, "eager": 1e-3}
    made = survey.Outcome(f"dense, {FORWARD}", number, sizes, "float32", seconds, survey.ratio_of(seconds))
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_ratios() -> None:
    """Of ours to the best other way; what differs by less than a microsecond is equal."""
    assert survey.ratio_of({"torchops": 3e-4, "eager": 2e-4, "in place": 1e-4}) == pytest.approx(3)
    assert survey.ratio_of({"torchops": 1.9e-6, "eager": 1e-6}) == 1
    assert report.takes_more({"torchops": report.FREE_BYTES + 2, "eager": 1, "other": 7})
    assert not report.takes_more({"torchops": report.FREE_BYTES + 1, "eager": 1})


def test_table() -> None:
    """Counts what is above the limits, means, the worst draws, and what failed."""
    outcomes = [outcome(0.5), outcome(1.3, 1), outcome(1.0, 2, peak_bytes={"torchops": 1 << 30, "eager": 0})]
    failed = outcome(1.0, 3, ratio=0.0, errors={"eager": "no memory"})
    text = report.to_markdown(survey.document([*outcomes, failed], 1, CPU, "the command"))
    (row,) = [line for line in text.splitlines() if line.startswith("| dense")]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1:7] == ["3", "1 (33.3%)", "1 (33.3%)", f"{(0.5 * 1.3) ** (1 / 3):.2f}", "", "1"]
    assert "rows 3" in cells[7]
    assert "draw 1" in cells[7]
    assert "no memory" in text
    assert "`the command`" in text


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Writes its results, and a draw that they name is measured again."""
    name = f"sigmoid_, {FORWARD}"
    options = ["survey", "--device", "cpu", "--seed", "3", "-o", name]
    assert command.main([*options, "--most", "2", "--output", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "survey.json").read_text())
    assert [found["name"] for found in written["draws"]] == [name] * 2
    assert (tmp_path / "survey.md").read_text().strip() in capsys.readouterr().out
    assert (tmp_path / "survey.png").exists() == (not plots.missing())
    assert command.main([*options, "--draw", name, "1"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["sizes"] == written["draws"][1]["sizes"]
    with pytest.raises(SystemExit):
        command.main(["survey", "-o", "denser"])
    assert "dense, forward" in capsys.readouterr().err


def test_training_is_part_of_it() -> None:
    """What overwrites its argument has no gradients."""
    assert {op.name for op in SURVEYED.values() if BACKWARD not in op.tasks} == {
        "square_matmul_",
        "softmax_",
        "sigmoid_",
    }


def test_nothing_measured(tmp_path: Path) -> None:
    """There is a table, and no picture."""
    written = survey.document([], 1, CPU, "the command")
    assert "the command" in report.to_markdown(written)
    assert report.draw(written, tmp_path / "survey.png").startswith("no picture")


def test_failures(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """One that fails does not end the survey, nor does a second measurement without ours."""
    calls = []

    def seconds_of(of: Draw, device: torch.device) -> tuple[dict[str, float], dict[str, str]]:
        calls.append(of.number)
        if of.number == 0:
            raise RuntimeError("no such kernel")
        return ({"torchops": 2.0, "eager": 1.0}, {}) if len(calls) == 2 else ({"eager": 1.0}, {"torchops": "memory"})

    monkeypatch.setattr(survey, "seconds_of", seconds_of)
    options = ["survey", "--device", "cpu", "-o", f"sigmoid_, {FORWARD}", "--most", "2", "--output", str(tmp_path)]
    assert command.main(options) == 1
    draws = json.loads((tmp_path / "survey.json").read_text())["draws"]
    assert [found["ratio"] for found in draws] == [0.0, 2.0]
    assert "no such kernel" in capsys.readouterr().out

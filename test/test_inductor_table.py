"""torchops.inductor: the table decides what is rewritten, the report says why, and measurements make its rows."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_inductor import DENSE, GATE, GLU, Backend, check, everywhere, t
from test_inductor_gates import FORMS, arguments

import torchops
from torchops.inductor import table
from torchops.inductor.passes import REPORT

sys.path.append(str(Path(__file__).parents[1]))

from benchmarks import inductor

__all__ = ["everywhere"]  # a fixture

ROW = table.Row("glu silu", "cuda", "9.0", "float64", 8, 6, False, False, 6, 9, 1.0, 2.0, "a test")


@pytest.fixture
def _on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "runs_on", lambda device: ("cuda", "9.0"))


@pytest.mark.usefixtures("_on_hopper")
@pytest.mark.parametrize(
    ("row", "train", "count"),
    [
        (ROW, False, 1),
        (ROW, True, 0),
        (replace(ROW, training=True), True, 1),
        (replace(ROW, fused=True), False, 0),
        (replace(ROW, operator="glu sigmoid"), False, 0),
        (replace(ROW, dtype="bfloat16"), False, 0),
        (replace(ROW, capability="8.0"), False, 0),
        (replace(ROW, n_in=16), False, 0),
        (replace(ROW, most_rows=7), False, 0),
        (replace(ROW, least_rows=8), False, 1),
    ],
)
def test_the_table_decides(monkeypatch: pytest.MonkeyPatch, row: table.Row, train: bool, count: int) -> None:
    """Rows of a GPU, looked up as if this were one: a place is rewritten where one covers it, and only there."""
    monkeypatch.setattr(table, "TABLE", table.Table((row,)))
    REPORT.clear()
    (form,) = (form for form in FORMS if form.name == "silu")
    assert check(form.function, arguments(form), train).count(GLU) == count
    (place,) = torchops.inductor.report()
    assert place.replaced == bool(count)
    assert place.kind == "glu silu"
    assert 'test_inductor_gates.py", line ' in place.name
    assert str(Path(__file__).parent) not in place.name
    if not count:
        assert place.reason is not None
        assert "glu silu, cuda 9.0, float64, 8 to 6 features, 8 rows, " in place.reason
        assert ("6 to 7 rows only" in place.reason) == (row.most_rows == 7)


@pytest.mark.usefixtures("_on_hopper")
def test_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A result that Inductor's next kernel would compute itself is another use than one that is written anyway."""
    (form,) = (form for form in FORMS if form.name == "silu")
    for fused in (False, True):
        monkeypatch.setattr(table, "TABLE", table.Table((replace(ROW, fused=fused),)))
        for use, written in ((lambda y: y @ y.mT, True), (lambda y: y.sin(), False), (lambda y: (y.sin(), y), False)):
            backend = check(lambda *a, use=use: use(form.function(*a)), arguments(form), False)
            assert backend.count(GLU) == (written is not fused)


@pytest.mark.usefixtures("_on_hopper")
def test_unknown_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph for any number of rows is rewritten where the bounds of that number lie in the range."""
    (form,) = (form for form in FORMS if form.name == "silu")
    monkeypatch.setattr(table, "TABLE", table.Table((replace(ROW, least_rows=6, most_rows=100),)))
    for bounds, count in (({}, 0), ({"min": 3, "max": 50}, 1), ({"min": 3, "max": 60}, 0)):
        torch._dynamo.reset()
        tensors = [t(2, 4, 8), *arguments(form)[1:]]
        torch._dynamo.mark_dynamic(tensors[0], 1, **bounds)
        backend = Backend()
        torch.compile(form.function, backend=backend, fullgraph=True)(*tensors)
        assert backend.count(GLU) == count


def test_kernel_path() -> None:
    with torchops.cuda.kernel_path("cublas"):
        assert check(FORMS[0].function, arguments(FORMS[0]), False).count(GATE) == 0
    assert check(FORMS[0].function, arguments(FORMS[0]), False).count(GATE) == 1


def test_committed_table(tmp_path: Any) -> None:
    """What is committed can be read, is written again as it is, and has no row for what does not win by 5%."""
    rows = table.read()
    table.write(rows, tmp_path / "table.json")
    assert (tmp_path / "table.json").read_text() == table.PATH.read_text()
    for row in rows.rows:
        assert row.compiled > 1.05 * row.ours, row
        assert 0 < row.least_rows <= row.most_rows, row
        assert row.operator in ("dense", "gate", "glu sigmoid", "glu silu"), row


def test_rows_of_measurements() -> None:
    """Neighbouring numbers of rows at which the operator wins by 5% are a row; what wins by less, or loses, is none."""
    times = {256: (1.0, 1.2), 512: (1.0, 1.04), 1024: (1.0, 2.0), 2048: (2.0, 4.0), 4096: (4.0, 3.0)}
    results = [
        inductor.Result(inductor.Case("gate", "bfloat16", (64, 128), rows, True, False), *pair, True)
        for rows, pair in reversed(times.items())
    ]
    rows = inductor._rows(results, torch.device("cpu"), "a test")
    assert [(row.least_rows, row.most_rows, row.ours, row.compiled) for row in rows] == [
        (256, 256, 1.0, 1.2),
        (1024, 2048, 2.0, 4.0),
    ]
    assert {(row.device, row.operator, row.n_in, row.n_out, row.training) for row in rows} == {
        ("cpu", "gate", 64, 128, True)
    }
    assert inductor._rows([replace(result, rewritten=False) for result in results], torch.device("cpu"), "") == []


def test_cpu_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the committed table: nothing of the CPU was measured to win by 5% on every run."""
    monkeypatch.setattr(table, "TABLE", table.read())
    REPORT.clear()
    for form in (FORMS[0], FORMS[-3]):
        backend = check(form.function, arguments(form, torch.float32), True, atol=1e-5, rtol=1e-5)
        assert backend.count(GATE) == backend.count(GLU) == backend.count(DENSE) == 0
    assert all("no measurement says that it would be faster" in str(place.reason) for place in REPORT)
    assert len(REPORT) == 2

"""The suite itself: a test that passes without an executed assertion fails, also while snapshots are accepted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

CASES = """
import pytest
import torch
from checks import assert_all_close


def test_returns_early():
    if torch.zeros(1).item() == 0:
        return
    assert True


def test_loops_over_nothing():
    for value in ():
        assert value


def test_compares_no_tensors():
    assert_all_close([], [])


def test_asserts():
    assert torch.zeros(1).item() == 0


def test_asserts_in_a_helper():
    assert_all_close([torch.zeros(1)], [torch.zeros(1)])


def test_raises():
    with pytest.raises(ValueError):
        int("x")


def test_skips():
    pytest.skip("with a reason")
"""


SNAPSHOT = '''
import expecttest


class TestSnapshot(expecttest.TestCase):
    def test_value(self):
        self.assertExpectedInline("new", """old""")

    def test_nothing(self):
        pass
'''


def run(tmp_path: Path, **environment: str) -> str:
    (tmp_path / "conftest.py").write_text((ROOT / "test/conftest.py").read_text())
    options = ["-c", str(ROOT / "pyproject.toml"), f"--rootdir={tmp_path}", "-o", f"pythonpath={ROOT / 'test'}"]
    command = [sys.executable, "-m", "pytest", *options, "-p", "no:cacheprovider", str(tmp_path)]
    inherited = {name: value for name, value in os.environ.items() if name != "EXPECTTEST_ACCEPT"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=inherited | environment)
    return done.stdout


@pytest.mark.parametrize("environment", [{}, {"EXPECTTEST_ACCEPT": "1"}], ids=["compared", "accepted"])
def test_no_test_passes_without_an_assertion(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "test_cases.py").write_text(CASES)
    out = run(tmp_path, **environment)
    failed = {line.split("::")[1].split(" ")[0] for line in out.splitlines() if line.startswith("FAILED")}
    assert failed == {"test_returns_early", "test_loops_over_nothing", "test_compares_no_tensors"}, out
    assert "3 failed, 3 passed, 1 skipped" in out
    assert "don't generate this case, or skip it with the reason" in out


def test_a_snapshot_is_an_assertion_also_where_it_is_accepted(tmp_path: Path) -> None:
    """And it is written anew where it stands, though its call is counted on the way."""
    pytest.importorskip("expecttest", reason="expecttest is not installed")
    path = tmp_path / "test_snapshot.py"
    path.write_text(SNAPSHOT)
    assert "2 failed" in run(tmp_path)
    assert path.read_text() == SNAPSHOT
    out = run(tmp_path, EXPECTTEST_ACCEPT="1")
    assert "1 failed, 1 passed" in out, out
    assert path.read_text() == SNAPSHOT.replace("old", "new")
    assert "1 failed, 1 passed" in run(tmp_path)

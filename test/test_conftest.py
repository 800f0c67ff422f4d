"""The suite itself: a test that passes without an executed assertion fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


def test_no_test_passes_without_an_assertion(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((ROOT / "test/conftest.py").read_text())
    (tmp_path / "test_cases.py").write_text(CASES)
    options = ["-c", str(ROOT / "pyproject.toml"), f"--rootdir={tmp_path}", "-o", f"pythonpath={ROOT / 'test'}"]
    command = [sys.executable, "-m", "pytest", *options, "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    failed = {line.split("::")[1].split(" ")[0] for line in done.stdout.splitlines() if line.startswith("FAILED")}
    assert failed == {"test_returns_early", "test_loops_over_nothing", "test_compares_no_tensors"}, done.stdout
    assert "3 failed, 3 passed, 1 skipped" in done.stdout
    assert "don't generate this case, or skip it with the reason" in done.stdout

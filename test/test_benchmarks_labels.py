"""What results say about where, from what and how they were measured."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import machine

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
    assert machine.revisions({"revision of src": "abc"}) == "revision abc of `src`"


def test_versions_of_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "PEERS", {"quack": "torch", "liger": "no such package"})
    found = machine.describe(CPU)
    assert found["quack"] == torch.__version__
    assert "liger" not in found


def test_command_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["--sizes", "1,2", "--json", "r.json", "--output=there", "--case", "a b"]
    assert machine.command("benchmarks.gates", given) == "python -m benchmarks.gates --sizes 1,2 --case 'a b'"
    monkeypatch.setattr(sys, "argv", ["climb.py", "--quick", "--output", "there"])
    assert machine.command("examples/ladder/climb.py") == "python examples/ladder/climb.py --quick"
    torchrun = "torchrun --standalone --nproc-per-node 2 -m benchmarks.triangle_sharded"
    assert machine.command("benchmarks.triangle_sharded", [], 2) == torchrun

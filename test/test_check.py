"""`python -m torchops --check`: what is right, wrong and raised is told apart, on each device."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import torchops
from torchops.ops import check

DEVICES = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]


def test_every_operator_is_right_on_every_device() -> None:
    results = check.check()
    assert not [result for result in results if not result.ok]
    functions = {name for name, value in vars(torchops.ops).items() if inspect.isfunction(value)}
    parts_are_checked = {"attention_pair_bias", "triangle_attention_update", "gate_scaled", "glu_scaled"}
    assert {result.name for result in results} == functions - parts_are_checked
    assert {result.device for result in results} == set(DEVICES)
    assert check.report(results).endswith(f"\n{len(results)} of {len(results)} right")


@pytest.mark.parametrize(
    ("function", "end"),
    [
        (lambda x: torch.sigmoid(x) * 1.05, "WRONG"),
        (lambda x: torch.sigmoid(x.detach()) + x - x.detach(), "WRONG"),  # its gradient
        (lambda x: torch.sigmoid(x) * float("nan"), "WRONG"),
        (lambda x: x.view(7), "RuntimeError: shape '[7]' is invalid for input of size 65536"),
    ],
    ids=["value", "gradient", "nan", "raises"],
)
def test_what_is_not_right_is_found(
    function: Callable[[Tensor], Tensor], end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = check._Case(function, torch.sigmoid, ((512, 128),))
    monkeypatch.setattr(check, "_cases", lambda: iter([case]))
    results = check.check()
    bad = [result for result in results if not result.ok]
    assert len(bad) == 3 * len(DEVICES)
    lines = check.report(results).splitlines()
    assert sum(line.endswith(end) for line in lines) == len(bad)
    assert lines[-1] == f"{len(results) - len(bad)} of {len(results)} right"


@pytest.mark.parametrize("broken", [False, True], ids=["right", "broken"])
def test_the_command(broken: bool) -> None:
    """It exits with 1 if something is wrong."""
    spoil = "check.softmax = lambda x: x\n" if broken else ""
    program = (
        f"import runpy, sys, torch\nfrom torchops.ops import check\n{spoil}"
        "sys.argv = ['torchops', '--check']\nrunpy.run_module('torchops', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == broken, done.stderr
    assert ("WRONG" in done.stdout) == broken
    assert "right" in done.stdout.splitlines()[-1]

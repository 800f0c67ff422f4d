"""Programs of several in-place operators, compiled: every read gets the value that it gets in eager mode.

Inductor reorders and drops what it takes for redundant. `compiled_programs.py` has the programs.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from checks import assert_all_close, random_like
from compiled_programs import PROGRAMS, Operators, Program, random_program
from torch import Tensor
from torch.utils import _pytree as pytree

STATIC, DYNAMIC = [(2, 5, 4)], [(2, 3, 4), (2, 5, 4), (3, 5, 6)]
CHANCES = int(os.environ.get("TORCHOPS_COMPILED_PROGRAMS", "24"))


def ran(function: Any, operators: Operators, inputs: list[Tensor]) -> list[Tensor]:
    """What the program returns and leaves in its inputs."""
    inputs = [x.clone() for x in inputs]
    returned = function(operators, *inputs)
    return [t for t in pytree.tree_leaves((returned, inputs)) if isinstance(t, Tensor)]


def check(
    program: Program, inputs: int, dynamic: bool, operators: Operators, grad_mode: Any, device: str = "cpu", **how: Any
) -> None:
    """Compares two calls for each shape: the second one may replay a CUDA graph."""
    torch.compiler.reset()
    compiled = torch.compile(program, fullgraph=True, dynamic=dynamic, **how)
    for shape in DYNAMIC if dynamic else STATIC:
        for _ in range(1 if device == "cpu" else 3):
            given = [random_like(torch.empty(shape), i).to(device) for i in range(inputs)]
            with grad_mode():
                assert_all_close(ran(compiled, operators, given), ran(program, operators, given), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_by_hand(program: Program, dynamic: bool) -> None:
    check(program, PROGRAMS[program], dynamic, Operators(), torch.no_grad)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("seed", range(CHANCES))
def test_by_chance(seed: int, dynamic: bool) -> None:
    check(random_program(seed), 2, dynamic, Operators(), torch.inference_mode if seed % 3 == 0 else torch.no_grad)

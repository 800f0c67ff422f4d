"""Programs of several in-place operators, compiled: every read gets the value that it gets in eager mode.

Inductor reorders and drops what it takes for redundant. `compiled_programs.py` has the programs.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import assert_all_close, random_like
from compiled_programs import PROGRAMS, Operators, Program, random_program
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import torchops

STATIC, DYNAMIC = [(2, 5, 4)], [(2, 3, 4), (2, 5, 4), (3, 5, 6)]
CHANCES = int(os.environ.get("TORCHOPS_COMPILED_PROGRAMS", "12"))


def ran(function: Any, operators: Operators, inputs: list[Tensor]) -> list[Tensor]:
    """What the program returns and leaves in its inputs, and what becomes of that when the inputs are overwritten.

    Not so where ATen's operators are wrong, too: a clone of an input of which a part was overwritten (torch 2.13).
    """
    inputs = [x.clone() for x in inputs]
    returned = function(operators, *inputs)
    tensors = [t for t in pytree.tree_leaves((returned, inputs)) if isinstance(t, Tensor)]
    before = [t.clone() for t in tensors]
    if function.__name__ == "one_row":
        return before
    for x in inputs:
        x.fill_(7)
    return [*before, *tensors]


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


def returned_clone(o: Operators, x: Tensor) -> Tensor:
    o.sigmoid_(x)
    return x.clone()


def returned_value(o: Operators, x: Tensor) -> Tensor:
    y = torchops.softmax(x)
    x.copy_(y)
    return y


def returned_view_of_a_clone(o: Operators, x: Tensor) -> Tensor:
    o.layer_norm_(x)
    o.softmax_(x)
    return x.clone().view(-1)[1:]


@pytest.mark.parametrize("program", [returned_clone, returned_value, returned_view_of_a_clone])
def test_what_is_returned_is_not_the_memory_of_an_input(program: Program) -> None:
    check(program, 1, False, Operators(), torch.no_grad)


class Everything(nn.Module):
    """All programs by hand, each on inputs of its own."""

    def forward(self, inputs: list[list[Tensor]]) -> list[Any]:
        return [program(Operators(), *own) for program, own in zip(PROGRAMS, inputs, strict=True)]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_ahead_of_time(dynamic: bool, tmp_path: Path) -> None:
    """AOTInductor, from a program that torch.export has recorded."""

    def inputs(rows: int) -> list[list[Tensor]]:
        return [
            [random_like(torch.empty(2, rows, 4), 7 * i + j) for j in range(count)]
            for i, count in enumerate(PROGRAMS.values())
        ]

    rows = torch.export.Dim("rows", min=4) if dynamic else None
    shapes = ([[{1: rows} for _ in own] for own in inputs(5)],)
    program = torch.export.export(Everything(), (inputs(5),), dynamic_shapes=shapes if dynamic else None)
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "programs.pt2"))
    loaded = torch._inductor.aoti_load_package(path)
    for n in (5, 6) if dynamic else (5,):
        got, expected = inputs(n), inputs(n)
        outputs, reference = loaded(got), Everything()(expected)
        pairs = (pytree.tree_leaves(each) for each in ((outputs, got), (reference, expected)))
        assert_all_close(*([t for t in each if isinstance(t, Tensor)] for each in pairs), atol=1e-5, rtol=1e-5)


def test_pair_layers_in_place() -> None:
    """Three layers that overwrite an input of the graph, whose states are kept."""
    torch.manual_seed(0)
    layers = [torchops.nn.PairLayer(8, 2, 4).eval() for _ in range(3)]
    for layer in layers:
        for parameter in layer.parameters():
            nn.init.normal_(parameter, std=0.3)

    def states(z: Tensor) -> list[Tensor]:
        kept = []
        for layer in layers:
            layer(z, inplace=True)
            kept.append(z.clone())
        return kept

    z = torch.randn(1, 5, 5, 8)
    with torch.no_grad():
        eager, compiled = z.clone(), z.clone()
        expected = states(eager)
        assert_all_close([*torch.compile(states)(compiled), compiled], [*expected, eager], atol=1e-4, rtol=1e-4)


def test_gradient_of_a_weight_that_meets_an_old_value() -> None:
    """The weight is trained, and what it is multiplied by is overwritten afterwards."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        torchops.sigmoid_(x)
        product = (x.clone() * w).sum()
        torchops.sigmoid_(x)
        return product

    gradients: list[Tensor] = []
    for f in (function, torch.compile(function)):
        x, w = torch.zeros(2), torch.ones(2, requires_grad=True)
        gradients += torch.autograd.grad(f(x, w), w)
    assert_all_close([gradients[1]], [gradients[0]])
    assert gradients[0].tolist() == [0.5, 0.5]

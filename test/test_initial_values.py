"""Initial values of every module: where a model is built on the meta device, by `reset_parameters` of each module that
owns parameters, as `fully_shard` asks for, and by that of the module itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import nn

import torchops
from torchops.nn.gates import PackedGLU

MAKE: dict[str, Callable[[bool], nn.Module]] = {
    "Dense": lambda bias: torchops.nn.Dense(9, 7, bias),
    "Gate": lambda bias: torchops.nn.Gate(9, 7, bias),
    "GLU": lambda bias: torchops.nn.GLU(9, 7, bias),
    "AttentionPairBias": lambda bias: torchops.nn.AttentionPairBias(9, 5, 3, 2, initial_norm=bias),
    "Transition": lambda bias: torchops.nn.Transition(9, 7, bias=bias),
    "TriangleMultiplicativeUpdate": lambda bias: torchops.nn.TriangleMultiplicativeUpdate(9, 7, bias=bias),
    "TriangleAttention": lambda bias: torchops.nn.TriangleAttention(9, 3, 2, bias=bias),
    "PairLayer": lambda bias: torchops.nn.PairLayer(9, 3, 2, 7, bias=bias),
    "PackedGLU": lambda bias: PackedGLU(9, 14, bias),  # which `replace` makes of an nn.Linear
}


def test_all_modules_are_here() -> None:
    public = [getattr(torchops.nn, name) for name in torchops.nn.__all__]
    modules = {kind.__name__ for kind in public if inspect.isclass(kind) and issubclass(kind, nn.Module)}
    assert modules == MAKE.keys() - {"PackedGLU"}


def owners(module: nn.Module) -> list[nn.Module]:
    return [part for part in module.modules() if list(part.parameters(recurse=False))]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("of", [owners, lambda module: [module]], ids=["owners", "module"])
@pytest.mark.parametrize("name", MAKE)
def test_initial_values_come_back(name: str, of: Callable[[nn.Module], list[nn.Module]], bias: bool) -> None:
    torch.manual_seed(0)
    built = MAKE[name](bias)
    with torch.device("meta"):
        empty = MAKE[name](bias)
    assert all(parameter.is_meta for parameter in empty.parameters())
    empty.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in empty.parameters():
            parameter.fill_(torch.nan)
    torch.manual_seed(0)
    for part in of(empty):
        part.reset_parameters()  # type: ignore[operator]
    for (key, got), expected in zip(empty.named_parameters(), built.parameters(), strict=True):
        assert torch.equal(got, expected), key

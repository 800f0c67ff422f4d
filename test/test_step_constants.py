"""What a step computes from arguments that stay is computed once, and its other operators run on the same values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchops.convert.constants import Constants, Known


class Counted(TorchDispatchMode):
    """The operators that run, but for views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := func._schema.name.partition("::")[2]) != "detach":
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def layer(x: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    scores = bias.permute(1, 0).contiguous() + (1 - mask) * -1e6
    return (x + scores).softmax(-1) * 2


def recorded(function: Any, x: Tensor, *given: Tensor) -> Constants:
    constants = Constants(given)
    with torch.no_grad(), constants:
        result = function(x, *given)
    constants.size = constants.finish(result)  # type: ignore[attr-defined]
    assert torch.equal(result, function(x, *given))
    return constants


def rerun(constants: Constants, function: Any, x: Tensor, *given: Tensor) -> tuple[Tensor, list[str]]:
    counted = Counted()
    with torch.no_grad(), counted, Known(constants.steps):
        result = function(x, *given)
    return result, counted.names


def test_only_what_changes_runs_again() -> None:
    bias, mask = torch.randn(3, 4), torch.tensor([1.0, 0.0, 1.0])
    constants: Any = recorded(layer, torch.randn(4, 3), bias, mask)
    assert constants.size == 4 * 3 * 4
    for _ in range(3):
        x = torch.randn(4, 3)
        got, names = rerun(constants, layer, x, bias, mask)
        assert torch.equal(got, layer(x, bias, mask))
        assert names == ["add", "softmax", "mul"]


def test_what_is_kept_does_not_keep_the_arguments() -> None:
    """An operator that returns its argument, and a view of it, take no memory."""

    def function(x: Tensor, bias: Tensor) -> Tensor:
        return x + bias.float().contiguous()[:, :2]

    constants: Any = recorded(function, torch.randn(3, 2), torch.randn(3, 4))
    assert constants.size == 0


@pytest.mark.parametrize("how", ["argument", "computed", "view", "result"])
def test_what_is_overwritten_is_computed_each_time(how: str) -> None:
    def function(x: Tensor, bias: Tensor) -> Tensor:
        if how == "argument":
            bias.add_(0)
        elif how == "computed":
            return x + (bias * 2).add_(x)
        elif how == "view":
            new = bias * 2
            new[0].mul_(3)
            return x + new
        else:
            torch.add(bias, 1, out=(new := bias.clone()))
            return x + new
        return x + (bias * 2)

    constants: Any = recorded(function, torch.randn(3, 4), torch.randn(3, 4))
    assert constants.size is None


def test_fresh_tensors_are_never_kept() -> None:
    """They are there to be written to."""

    def function(x: Tensor, bias: Tensor) -> Tensor:
        y = torch.zeros_like(bias)
        y[0] = x[0]
        return y + bias.new_empty(3, 4).copy_(x) + bias.exp()

    bias = torch.randn(3, 4)
    constants = recorded(function, torch.randn(3, 4), bias)
    x = torch.randn(3, 4)
    got, names = rerun(constants, function, x, bias)
    assert torch.equal(got, function(x, bias))
    assert "exp" not in names


def test_decisions_by_constants_are_kept_and_others_are_seen() -> None:
    def function(x: Tensor, bias: Tensor) -> Tensor:
        y = x + bias.exp()
        if bias.sum() > 0:
            y = y * 2
        return y.relu() if x.sum() > 0 else y

    bias = torch.ones(3)
    constants = recorded(function, torch.ones(3), bias)
    got, names = rerun(constants, function, torch.ones(3), bias)
    assert torch.equal(got, function(torch.ones(3), bias))
    assert names.count("_local_scalar_dense") + names.count("item") + names.count("is_nonzero") == 1
    with pytest.raises(RuntimeError, match="where another call did not"):
        rerun(constants, lambda x, b: function(x, b) + x.cos(), torch.ones(3), bias)


def test_what_reads_a_tensor_unseen_raises() -> None:
    def function(x: Tensor, bias: Tensor) -> Tensor:
        return x + bias * 2 + torch.from_numpy(bias.exp().numpy())

    bias = torch.ones(3)
    constants = Constants([bias])
    with torch.no_grad(), constants:
        assert constants.finish(function(torch.ones(3), bias)) == bias.nbytes
    with pytest.raises((RuntimeError, TypeError)):
        rerun(constants, function, torch.ones(3), bias)


def test_several_results() -> None:
    def function(x: Tensor, bias: Tensor) -> Tensor:
        first, second = (bias * 2).chunk(2, -1)
        values, _ = bias.max(-1, keepdim=True)
        return x + first * second + values

    bias = torch.randn(3, 4)
    constants = recorded(function, torch.randn(3, 2), bias)
    x = torch.randn(3, 2)
    got, names = rerun(constants, function, x, bias)
    assert torch.equal(got, function(x, bias))
    assert names == ["add", "add"]

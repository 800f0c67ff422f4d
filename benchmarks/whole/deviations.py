"""How far a variant is from exact results.

Outputs are compared with those of the released model in float32, by norms. The sampler amplifies any rounding, so that
of its end says little. So the score model is also judged alone: with the inputs of one step of the float32 run, from
the released score model in float64.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from .frame import Subject, ran_in


class Judge:
    """Holds the exact results of a subject as released."""

    def __init__(self, subject: Subject) -> None:
        calls: list[tuple[Any, Any]] = []
        score = subject.model.get_submodule(subject.package.score)
        hook = score.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
        try:
            self._outputs = {name: value.float().cpu() for name, value in subject.run("float32").items()}
        finally:
            hook.remove()
        self._call = mapped(calls[len(calls) // 2], lambda t: t.detach().clone())
        self._steps = len(calls)
        self._score = self._exact_score(score)

    def deviations(self, subject: Subject, precision: str) -> dict[str, dict[str, float]]:
        """Of the outputs, and of the score model, in the precision that the package gives it."""
        score, mixed = subject.model.get_submodule(subject.package.score), []
        given: list[Any] = []

        def look(_: Any, args: Any, kwargs: Any) -> None:
            mixed.append(torch.is_autocast_enabled(subject.device.type))
            given[:] = args, kwargs

        hook = score.register_forward_pre_hook(look, with_kwargs=True)
        try:
            got = subject.run(precision)
        finally:
            hook.remove()
        found = {name: of(got[name].float().cpu(), exact) for name, exact in self._outputs.items()}
        args, kwargs = _laid_out(self._call, tuple(given))
        torch.manual_seed(3)
        precision = precision if precision != "bf16-mixed" or mixed[0] else "float32"
        with ran_in(precision, subject.device), torch.inference_mode():
            out = first_tensor(score(*args, **kwargs))
        found["score model, from float64"] = of(out.double().cpu(), self._score)
        return found

    def _exact_score(self, score: nn.Module) -> Tensor:
        """In float64, where the package says float32, too."""
        exact = copy.deepcopy(score).double()
        args, kwargs = mapped(self._call, lambda t: t.double() if t.is_floating_point() else t)
        torch.manual_seed(3)
        with torch.inference_mode(), _in_float64():
            return first_tensor(exact(*args, **kwargs)).cpu()


@contextmanager
def _in_float64() -> Iterator[None]:
    to = Tensor.to

    def wider(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        args, kwargs = tree_map(lambda a: torch.float64 if a is torch.float32 else a, (args, kwargs))
        return to(self, *args, **kwargs)

    with mock.patch.object(Tensor, "float", Tensor.double), mock.patch.object(Tensor, "to", wider):
        yield


def of(got: Tensor, exact: Tensor) -> dict[str, float]:
    """The norm of the difference over that of the exact result, and the greatest element of it."""
    got, exact = got.double(), exact.double()
    return {
        "norm": ((got - exact).norm() / exact.norm()).item(),
        "greatest": (got - exact).abs().max().item(),
        "of": exact.abs().max().item(),
    }


def first_tensor(value: Any) -> Tensor:
    """The first tensor of a result."""
    return next(leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def _laid_out(value: Any, like: Any) -> Any:
    """The tensors of a tree with rows that share memory where those of another do."""

    def leaf(each: Any, other: Any) -> Any:
        if not isinstance(each, Tensor) or not isinstance(other, Tensor):
            return each
        shared = each
        for dim, stride in enumerate(other.stride()):
            shared = shared.narrow(dim, 0, 1) if stride == 0 and each.shape[dim] > 1 else shared
        return shared.expand(each.shape)

    return tree_map(leaf, value, like)


def mapped(value: Any, change: Any) -> Any:
    """`change` of the tensors in a tree, and of those that a partial function holds."""

    def leaf(each: Any) -> Any:
        if isinstance(each, functools.partial):
            return functools.partial(each.func, *mapped(each.args, change), **mapped(each.keywords, change))
        return change(each) if isinstance(each, Tensor) else each

    return tree_map(leaf, value)

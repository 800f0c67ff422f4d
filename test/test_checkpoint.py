"""Activation checkpointing: gradients, and what is computed again, counted where the operators reach the dispatcher."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from checks import assert_all_close, random_like
from mutations import VARIANTS, InPlace, Reference, Variant
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import torchops

OPS = torch.ops.myops


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[func] += 1
        return func(*args, **(kwargs or {}))


def run(
    region: Callable[..., Tensor], leaves: list[Tensor], context_fn: Any = None, counted: bool = True
) -> tuple[list[Tensor], Counter[Any]]:
    """Gradients of a region between two other operations, and how often each operator ran."""
    calls = Calls()
    with calls if counted else nullcontext():
        first, *rest = leaves
        t = first * 1.5
        if context_fn is None:
            t = region(t, *rest)
        else:
            t = checkpoint(region, t, *rest, use_reentrant=False, context_fn=context_fn)
        out = (t * t).sum() + t.sin().sum()
        grads = torch.autograd.grad(out, leaves)
    return [out, *grads], calls.count


def functional(x: Tensor, w: Tensor, b: Tensor, m: Tensor) -> Tensor:
    y = torchops.dense(x, w, b)
    y = torchops.layer_norm(torchops.square_matmul(y, m), [5], b)
    return torchops.softmax(torchops.sigmoid(y) * 3)


def mutating(x: Tensor, w: Tensor, b: Tensor, m: Tensor) -> Tensor:
    y = torchops.dense(x, w, b)
    torchops.square_matmul_(y := y * 1, m)
    torchops.layer_norm_(y, [5], b)
    torchops.sigmoid_(y)
    y = y * 3
    torchops.softmax_(y)
    return y


def parameters() -> list[Tensor]:
    return [
        random_like(torch.empty(shape, dtype=torch.float64), i).requires_grad_()
        for i, shape in enumerate([(3, 5), (5, 5), (5,), (5, 5)])
    ]


SAVED = [OPS.dense.default, OPS.square_matmul.default, OPS._layer_norm.default, OPS.softmax.default]


@pytest.mark.parametrize("region", [functional, mutating])
@pytest.mark.parametrize("saved", [[], SAVED, [*SAVED, OPS.sigmoid.default]], ids=["none", "some", "all"])
@pytest.mark.parametrize("form", ["list", "policy"])
def test_selective(region: Callable[..., Tensor], saved: list[Any], form: str) -> None:
    """What is in the list runs once, what is not runs again in backward.

    While a policy watches, operators are seen as torch.compile sees them: one that overwrites its argument is its
    functional twin and a copy, so the twin is what goes into the list. The operator itself must stay out of it: where
    its argument has no gradient it is seen, and PyTorch would skip it in the second run like any that is saved.
    """

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, saved if form == "list" else policy)
    got, calls = run(region, parameters(), contexts)
    expected, _ = run(region, parameters(), counted=False)
    assert_all_close(got, expected)
    # dense saves its output, softmax and sigmoid too, so only the last of the region need not run again.
    for op in [OPS.dense.default, OPS.square_matmul.default, OPS.sigmoid.default]:
        # The gradient of square_matmul is another square_matmul.
        backward = op is OPS.square_matmul.default
        assert calls[op] == (1 if op in saved else 2) + backward, op


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
@pytest.mark.parametrize("selective", [False, True])
def test_every_in_place_operator(variant: Variant, selective: bool) -> None:
    """A region that overwrites its own intermediate, checkpointed as a whole or with the twin's result kept."""
    twin = getattr(OPS, variant.case.twin or "").default
    results = []
    for apply in (InPlace(variant), Reference(variant)):
        x = variant.input()
        rest = variant.leaves(x)

        def region(t: Tensor, *rest: Any, apply: Any = apply) -> Tensor:
            return apply.whole(t * 2, *rest) * 3

        contexts = partial(create_selective_checkpoint_contexts, [twin]) if selective else None
        in_place = isinstance(apply, InPlace)
        if in_place:
            extra: dict[str, Any] = {"context_fn": contexts} if contexts else {}
            out = checkpoint(region, x, *rest, use_reentrant=False, **extra)
        else:
            out = region(x, *rest)
        leaves = [x, *(p for p in rest if isinstance(p, Tensor))]
        results.append([out, *torch.autograd.grad(out, leaves, random_like(out))])
    assert_all_close(*results)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
@pytest.mark.parametrize("traced", ["forward", "backward"])
def test_one_pass_traced(variant: Variant, traced: str) -> None:
    """A dispatch mode in one of the two passes of a checkpoint: what either saves must mean the same."""

    def region(t: Tensor, *rest: Any) -> Tensor:
        return InPlace(variant).whole(t * 2, *rest) * 3

    x = variant.input()
    rest = variant.leaves(x)
    leaves = [x, *(p for p in rest if isinstance(p, Tensor))]
    expected = Reference(variant).whole(x * 2, *rest) * 3
    cotangent = random_like(expected)
    with Calls() if traced == "forward" else nullcontext():
        out = checkpoint(region, x, *rest, use_reentrant=False)
    with Calls() if traced == "backward" else nullcontext():
        grads = torch.autograd.grad(out, leaves, cotangent)
    assert_all_close([out, *grads], [expected, *torch.autograd.grad(expected, leaves, cotangent)])


def test_compiled_region() -> None:
    """The policy reaches the partitioner: a MUST_SAVE product is not computed twice by the compiled graphs."""
    for saved, runs in [([], 2), ([OPS.dense.default], 1)]:
        contexts = partial(create_selective_checkpoint_contexts, saved)

        def function(x: Tensor, w: Tensor, b: Tensor, m: Tensor, contexts: Any = contexts) -> Tensor:
            return checkpoint(functional, x * 1.5, w, b, m, use_reentrant=False, context_fn=contexts)

        graphs: list[torch.fx.GraphModule] = []

        def keep(graph: torch.fx.GraphModule, inputs: Any, graphs: list[Any] = graphs) -> Any:
            graphs.append(graph)
            return make_boxed_func(graph.forward)

        backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
        leaves = parameters()
        out = torch.compile(function, backend=backend, fullgraph=True)(*leaves)
        got = torch.autograd.grad(out, leaves, random_like(out))
        expected_out = functional(leaves[0] * 1.5, *leaves[1:])
        assert_all_close([out, *got], [expected_out, *torch.autograd.grad(expected_out, leaves, random_like(out))])
        nodes = [node for graph in graphs for node in graph.graph.nodes if node.target is OPS.dense.default]
        assert len(nodes) == runs
        torch._dynamo.reset()

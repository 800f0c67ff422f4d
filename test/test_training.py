"""Around autograd: activation checkpointing, hooks on saved tensors, gradient scaling of one training step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checks import assert_all_close, random_like
from mutations import VARIANTS, InPlace, Reference, Variant, backward, run
from op_db import OpCase
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import torchops

variants = pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)


def block(apply: Any, x: Tensor, *parameters: Any) -> tuple[Tensor, ...]:
    t = torch.sin(x)
    t = apply.whole(t, *parameters)
    u = apply.rows(t * 2, slice(1, 4), *parameters)
    return (u * 3,)


@variants
@pytest.mark.parametrize("reentrant", [False, True], ids=["non_reentrant", "reentrant"])
def test_checkpoint(variant: Variant, reentrant: bool) -> None:
    def wrap(function: Any) -> Any:
        return lambda *args: checkpoint(function, *args, use_reentrant=reentrant)

    got = run(block, InPlace(variant), variant, compiler=wrap)
    assert_all_close(got, run(block, Reference(variant), variant))


@variants
def test_checkpoint_compiled(variant: Variant) -> None:
    def wrap(function: Any) -> Any:
        compiled = torch.compile(
            lambda *args: checkpoint(function, *args, use_reentrant=False), backend="aot_eager", fullgraph=True
        )
        return compiled

    got = run(block, InPlace(variant), variant, compiler=wrap)
    assert_all_close(got, run(block, Reference(variant), variant))


@pytest.mark.ops(mutating=False, differentiable=True)
def test_selective_checkpoint(case: OpCase) -> None:
    """A policy sees the operators by name, and may have them saved or computed again."""
    seen = []

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        seen.append(op)
        return CheckpointPolicy.MUST_SAVE if op is case.op else CheckpointPolicy.PREFER_RECOMPUTE

    sample = next(s for s in case.samples if s.name == "matrix")
    results = []
    for function in (case.op, case.reference):
        args, kwargs = sample(torch.float64, "cpu", requires_grad=True)

        def inner(*args: Any, f: Any = function, k: Any = kwargs) -> Tensor:
            return f(*args, **k) * 2

        if function is case.op:
            out = checkpoint(
                inner, *args, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy)
            )
        else:
            out = inner(*args)
        results.append([out, *backward((out,), [a for a in args if isinstance(a, Tensor)])])
    assert_all_close(*results)


@variants
def test_saved_tensor_hooks(variant: Variant) -> None:
    """What is saved can be packed elsewhere, and nothing else is read in the backward pass."""
    packed = []

    def pack(t: Tensor) -> tuple[int, Tensor]:
        packed.append(t.detach().clone())
        return len(packed) - 1, packed[-1]

    def program(apply: Any, x: Tensor, *parameters: Any) -> tuple[Tensor, ...]:
        return (apply.whole(x * 2, *parameters),)

    expected = run(program, Reference(variant), variant)
    with saved_tensors_hooks(pack, lambda handle: handle[1]):
        got = run(program, InPlace(variant), variant)
    assert_all_close(got, expected)
    assert len(packed) > 0
    with save_on_cpu():
        assert_all_close(run(program, InPlace(variant), variant), expected)


@variants
def test_saves_no_more_than_the_gradient_needs(variant: Variant) -> None:
    """In place with frozen parameters: no tensor of the input's size but the result itself is kept."""
    saved: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    x = variant.input()
    parameters = variant.parameters(x)
    t = x * 2
    with saved_tensors_hooks(pack, lambda s: s):
        InPlace(variant).whole(t, *parameters)
    large = [s for s in saved if s.numel() == t.numel() and s.data_ptr() != t.data_ptr()]
    # layer_norm_ with a weight keeps its normalised input: the weight may hold a zero, so the output does not give it.
    # The gradient of add_transition_ reads the old value.
    assert len(large) == (1 if variant.name in ("layer_norm_affine_", "add_transition_") else 0)


def gradient(t: Tensor) -> list[Tensor]:
    assert t.grad is not None
    return [t.grad]


@variants
def test_anomaly_mode_and_hooks(variant: Variant) -> None:
    """Tensor hooks on the mutated tensor, from before and after, each see their own gradient."""
    results = []
    for apply in (InPlace(variant), Reference(variant)):
        x = variant.input()
        parameters = variant.leaves(x)
        seen: list[Tensor] = []
        with torch.autograd.detect_anomaly(check_nan=True):
            t = x * 2
            t.register_hook(seen.append)
            t = apply.whole(t, *parameters)
            t.register_hook(seen.append)
            (t * random_like(t.detach())).sum().backward()
        results.append([*sorted(seen, key=lambda g: float(g.abs().sum())), *gradient(x)])
    assert_all_close(*results)


@variants
def test_retain_grad(variant: Variant) -> None:
    """`retain_grad` before an in-place operator gives the gradient of the new value, as in ATen."""
    x = variant.input()
    t = x * 2
    t.retain_grad()
    InPlace(variant).whole(t, *variant.parameters(x))
    cotangent = random_like(t.detach())
    t.backward(cotangent)
    assert_all_close(gradient(t), [cotangent])


def test_training_step() -> None:
    """Two optimiser steps of a model that uses every operator, beside the same one composed of ATen."""

    class Model(nn.Module):
        def __init__(self, ours: bool):
            super().__init__()
            torch.manual_seed(5)
            self.ours = ours
            self.layer = nn.Linear(7, 6, dtype=torch.float64)
            self.matrix = nn.Parameter(torch.randn(6, 6, dtype=torch.float64))
            self.weight = nn.Parameter(torch.randn(6, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            if self.ours:
                t = torchops.dense(x, self.layer.weight, self.layer.bias)
                t = torchops.square_matmul_(t * 2, self.matrix)
                t = torchops.layer_norm_(t, [6], self.weight)
                t = torchops.square_matmul(t, self.matrix, transpose_b=True)
                t = torchops.sigmoid(t) + torchops.softmax(t)
                return torchops.softmax_(torchops.sigmoid_(t).clone(), 0)
            t = torch.sigmoid(self.layer(x))
            t = nn.functional.layer_norm(t * 2 @ self.matrix, [6], self.weight) @ self.matrix.T
            return torch.softmax(torch.sigmoid(torch.sigmoid(t) + torch.softmax(t, -1)), 0)

    results = []
    for ours in (True, False):
        model = Model(ours)
        optimiser = torch.optim.Adam(model.parameters(), lr=0.1)
        losses = []
        for step in range(3):
            optimiser.zero_grad()
            loss = (model(random_like(torch.empty(9, 7, dtype=torch.float64), step)) ** 2).sum()
            loss.backward()
            optimiser.step()
            losses.append(loss.detach())
        results.append([*losses, *(p.detach() for p in model.parameters())])
    assert_all_close(*results)

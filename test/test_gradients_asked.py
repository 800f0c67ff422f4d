"""No gradient is computed that nobody asked for.

Products of matrices are counted; what the other gradients are asked for, a dispatch mode sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import combinations
from typing import Any

import pytest
import torch
from checks import random_like, tensors
from op_db import OPS, OpCase
from samples import Sample
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import torchops


def subsets(positions: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All but the empty one."""
    for size in range(1, len(positions) + 1):
        yield from combinations(positions, size)


def flops(function: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        function(*args, **kwargs)
    return counter.get_total_flops()


def leaves_of(arguments: Any, required: Sequence[int]) -> list[Tensor]:
    leaves = tensors(arguments)
    for position in required:
        leaves[position].requires_grad_()
    return leaves


class Calls(TorchDispatchMode):
    """The calls of one operator below autograd: arguments and result."""

    def __init__(self, op: Any) -> None:
        super().__init__()
        self.op = op
        self.made: list[tuple[Sequence[Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is self.op:
            self.made.append((args, out))
        return out


# Operators whose gradients compute again what forward did have counts of their own, in test_flops.py.
each = pytest.mark.ops(
    differentiable=True,
    dtypes=[torch.float32],
    samples=["matrix", "matrix_tb", "no_bias", "weight_only", "bias_only"],
    where=lambda case, **_: case.recomputes == 0,
)


@each
@pytest.mark.parametrize("recorded", [False, True], ids=["eager", "recorded"])
def test_products(case: OpCase, device: str, dtype: torch.dtype, sample: Sample, recorded: bool) -> None:
    """For every set of inputs that require a gradient, and every set of those that one is asked for: one product for
    each factor among the latter."""
    plain = sample(dtype, device)
    product = flops(case.pure, *plain[0], **plain[1])
    for required in subsets(range(len(tensors(plain)))):
        for asked in subsets(required):
            arguments = sample(dtype, device)
            leaves = leaves_of(arguments, required)
            with FlopCounterMode(display=False) if recorded else nullcontext():
                out = case.pure(*arguments[0], **arguments[1])
            chosen, cotangent = [leaves[i] for i in asked], random_like(out.detach())
            counted = flops(torch.autograd.grad, out, chosen, cotangent)
            assert counted == product * sum(i < 2 for i in asked), (required, asked)


@each
def test_products_compiled(case: OpCase, device: str, dtype: torch.dtype, sample: Sample) -> None:
    """A compiled graph makes the gradients of all inputs that require one, whichever are asked for later."""
    plain = sample(dtype, device)
    product = flops(case.pure, *plain[0], **plain[1])
    for required in subsets(range(len(tensors(plain)))):
        torch._dynamo.reset()
        arguments = sample(dtype, device)
        leaves = leaves_of(arguments, required)
        compiled = torch.compile(case.pure, backend="aot_eager", fullgraph=True)
        out = compiled(*arguments[0], **arguments[1])
        chosen, cotangent = [leaves[i] for i in required], random_like(out.detach())
        counted = flops(torch.autograd.grad, out, chosen, cotangent)
        assert counted == product * sum(i < 2 for i in required), required


@pytest.mark.parametrize("compiled_autograd", [False, True], ids=["engine", "compiled_autograd"])
def test_asked_in_turns(compiled_autograd: bool) -> None:
    """One graph, asked for another gradient each time."""
    a, b = torch.randn(5, 7, requires_grad=True), torch.randn(7, 7, requires_grad=True)
    grad = random_like(a.detach())

    def gradient(leaf: Tensor) -> Tensor:
        leaf.grad = None
        torchops.square_matmul(a, b).backward(grad, inputs=[leaf])
        assert leaf.grad is not None
        return leaf.grad

    expected = [grad @ b.detach().T, a.detach().T @ grad]
    for _ in range(2):
        for leaf, value in zip((a, b), expected, strict=True):
            if compiled_autograd:
                with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
                    got = gradient(leaf)
            else:
                got = gradient(leaf)
            torch.testing.assert_close(got, value)


@pytest.mark.parametrize("layer_norm", [c.pure for c in OPS if "layer_norm" in c.name], ids=["new", "in_place"])
@pytest.mark.parametrize("affine", [(True, True), (True, False), (False, True)], ids=["both", "weight", "bias"])
def test_layer_norm_asks_for_no_more(layer_norm: Callable[..., Tensor], affine: tuple[bool, bool]) -> None:
    present = [0, *(1 + i for i in range(2) if affine[i])]
    for required in subsets(present):
        for asked in subsets(required):
            x, weight, bias = torch.randn(5, 7), torch.randn(7), torch.randn(7)
            leaves = [t.requires_grad_(i in required) for i, t in enumerate((x, weight, bias))]
            parameters = [t if given else None for t, given in zip(leaves[1:], affine, strict=True)]
            out = layer_norm(leaves[0], [7], *parameters)
            chosen = [leaves[i] for i in asked]
            with Calls(torch.ops.myops._layer_norm_backward.default) as calls:
                grads = torch.autograd.grad(out, chosen, random_like(out.detach()))
            ((args, outputs),) = calls.made
            assert list(args[6]) == [i in asked for i in range(3)], (required, asked)
            assert [t.numel() > 0 for t in outputs] == [i in asked for i in range(3)]
            assert [g.shape for g in grads] == [t.shape for t in chosen]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_bias_of_dense_needs_no_dz(compiled: bool) -> None:
    """The gradient of the bias alone is a sum, and no tensor of the output's size is written for it."""
    x, w, b = torch.randn(40, 7), torch.randn(3, 7), torch.randn(3, requires_grad=True)
    dense = torch.compile(torchops.dense, backend="aot_eager", fullgraph=True) if compiled else torchops.dense
    y = dense(x, w, b)
    grad = random_like(y.detach())
    with Calls(torch.ops.myops._dense_backward.default) as calls:
        (db,) = torch.autograd.grad(y, b, grad)
    (((*_, output_mask), outputs),) = calls.made
    assert list(output_mask) == [False, True]
    assert [tuple(t.shape) for t in outputs] == [(0,), (3,)]
    y = y.detach()
    torch.testing.assert_close(db, (grad * y * (1 - y)).sum(0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(5, 3), (0, 3), (2, 3, 0), (7,), (3, 5, 7), (70_001, 33)], ids=str)
def test_dense_backward_mask(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """The same bits with and without the other result."""
    op = torch.ops.myops._dense_backward
    y = torch.rand(shape, dtype=dtype)
    grad = random_like(y)
    dz, db = op(grad, y)
    for output_mask in ([True, False], [False, True], [False, False]):
        got = op(grad, y, output_mask)
        for wanted, one, both in zip(output_mask, got, (dz, db), strict=True):
            assert torch.equal(one, both) if wanted else one.shape == (0,)
            assert one.dtype == dtype

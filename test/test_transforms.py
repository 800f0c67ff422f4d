"""torch.func: grad, vjp, jvp, jacobians, hessian, vmap, and one inside the other, against the ATen reference.

Operators that mutate run on an intermediate of the transformed function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import assert_all_close, random_like
from op_db import OpCase
from torch import Tensor
from torch.func import functional_call, functionalize, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils._pytree import tree_leaves

import torchops
from torchops import AttentionWeights, triangle_attention_update

pytestmark = pytest.mark.ops(differentiable=True)

SIZES = {
    "dense": ((3, 5), (4, 5), (4,)),
    "gate": ((3, 4), (3, 5), (4, 5), (4,)),
    "glu": ((3, 5), (4, 5), (4, 5), (4,), (4,)),
    "sigmoid": ((3, 5),),
    "square_matmul": ((3, 5), (5, 5)),
    "softmax": ((3, 5),),
    "triangle_attention": ((1, 2, 1, 2, 3), *((1, 2, 1, 4, 3),) * 2, (1, 1, 1, 2, 4)),
    "triangle_attention_update": (
        *((2, 2, 3), (3,), (3,), (1, 3), (2, 3), (2, 3), (2, 3), (2, 3), (2,), (3, 2), (3,)),
    ),
    "layer_norm": ((3, 5), (5,), (5,)),
    "outer_product_mean": ((2, 3, 2), (2, 2, 3), (4, 6), (4,), (3, 2)),
    "transition": ((3, 5), (5,), (5,), (4, 5), (4,), (4, 5), (4,), (5, 4), (5,)),
    "triangle_multiplicative_update": (
        *((3, 3, 2), (2,), (2,), (4, 2), (4,), (4, 2), (4,)),
        *((2,), (2,), (2, 2), (2,), (2, 2), (2,)),
    ),
}


def inputs(case: OpCase) -> tuple[Tensor, ...]:
    shapes = SIZES[case.name.removeprefix("add_").rstrip("_")]
    return tuple(random_like(torch.empty(s, dtype=torch.float64), i) for i, s in enumerate(shapes))


def of_tensors(case: OpCase, reference: bool) -> Callable[..., Tensor]:
    """The operator, or its reference, as a function of tensors only; the mutated one is an intermediate."""
    op = case.smooth if reference else case.pure

    def function(*tensors: Tensor) -> Tensor:
        first, *rest = tensors
        first = first * 1.5
        if case.name == "outer_product_mean":  # divisors near 0 would leave few digits
            rest[-1] = rest[-1].square() + 1
        return case.call(op, first, *([[5]] if case.name.startswith("layer_norm") else []), *rest)

    return function


def scalar(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def loss(*tensors: Tensor) -> Tensor:
        out = function(*tensors)
        weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
        return (out * weight).sum() + (out**3).sum()

    return loss


def compare(case: OpCase, transform: Callable[[Callable[..., Tensor], tuple[Tensor, ...]], Any]) -> None:
    got, expected = (tree_leaves(transform(of_tensors(case, reference), inputs(case))) for reference in (False, True))
    assert len(expected) > 0
    assert_all_close(got, expected)


def every(tensors: tuple[Tensor, ...]) -> tuple[int, ...]:
    return tuple(range(len(tensors)))


def test_grad(case: OpCase) -> None:
    compare(case, lambda f, x: grad(scalar(f), every(x))(*x))


def test_grad_of_grad(case: OpCase) -> None:
    def transform(f: Callable[..., Tensor], x: tuple[Tensor, ...]) -> Any:
        def inner(*tensors: Tensor) -> Tensor:
            return torch.stack([(g**2).sum() for g in grad(scalar(f), every(x))(*tensors)]).sum()

        return grad(inner, every(x))(*x)

    compare(case, transform)


def test_vjp(case: OpCase) -> None:
    def transform(f: Callable[..., Tensor], x: tuple[Tensor, ...]) -> Any:
        out, pull = vjp(f, *x)[:2]
        return out, pull(random_like(out, 7)), vmap(pull)(random_like(out.expand(3, *out.shape), 8))

    compare(case, transform)


def test_jvp(case: OpCase) -> None:
    compare(case, lambda f, x: jvp(f, x, tuple(random_like(t, 20 + i) for i, t in enumerate(x))))


def test_jacrev(case: OpCase) -> None:
    compare(case, lambda f, x: jacrev(f, every(x))(*x))


def test_jacfwd(case: OpCase) -> None:
    compare(case, lambda f, x: jacfwd(f, every(x))(*x))


def test_hessian(case: OpCase) -> None:
    compare(case, lambda f, x: hessian(scalar(f), every(x))(*x))


def test_jacrev_of_jacrev(case: OpCase) -> None:
    compare(case, lambda f, x: jacrev(jacrev(scalar(f), every(x)), every(x))(*x))


@pytest.mark.parametrize("in_dims", ["first", "last", "only_first", "negative"])
def test_vmap(case: OpCase, in_dims: str) -> None:
    def transform(f: Callable[..., Tensor], x: tuple[Tensor, ...]) -> Any:
        batch = [torch.stack([t, 2 * t, t - 1]) for t in x]
        if in_dims == "first":
            return vmap(f)(*batch)
        if in_dims == "last":
            return vmap(f, in_dims=-1, out_dims=1)(*(t.movedim(0, -1) for t in batch))
        if in_dims == "negative":
            return vmap(f, in_dims=-2)(*(t.movedim(0, -2) for t in batch))
        return vmap(f, in_dims=(0, *(None for _ in x[1:])))(batch[0], *x[1:])

    compare(case, transform)


@pytest.mark.ops(where=lambda case, **_: len(inputs(case)) > 1)
def test_vmap_over_all_but_the_first(case: OpCase) -> None:
    def transform(f: Callable[..., Tensor], x: tuple[Tensor, ...]) -> Any:
        rest = [torch.stack([t, 2 * t, t - 1]) for t in x[1:]]
        return vmap(f, in_dims=(None, *(0 for _ in rest)))(x[0], *rest)

    if case.mutates is None:
        compare(case, transform)
    else:
        # One tensor cannot hold as many results as there are parameters: an error with ATen's in-place operators too.
        with pytest.raises(RuntimeError, match=r"vmap: inplace .* is not possible|match the broadcast shape"):
            transform(of_tensors(case, reference=False), inputs(case))


def test_vmap_of_vmap(case: OpCase) -> None:
    def transform(f: Callable[..., Tensor], x: tuple[Tensor, ...]) -> Any:
        batch = [torch.stack([torch.stack([t, 2 * t]), torch.stack([t - 1, -t]), torch.stack([t, t + 1])]) for t in x]
        return vmap(vmap(f), in_dims=1, out_dims=2)(*batch), vmap(vmap(f, in_dims=(0, *(None,) * len(x[1:]))))(
            batch[0], *(b[:, 0] for b in batch[1:])
        )

    compare(case, transform)


def test_vmap_of_grad(case: OpCase) -> None:
    """Gradients per sample."""

    def transform(f: Callable[..., Tensor], x: tuple[Tensor, ...]) -> Any:
        batch = torch.stack([x[0], 2 * x[0], x[0] - 1])
        return vmap(grad(scalar(f), every(x)), in_dims=(0, *(None for _ in x[1:])))(batch, *x[1:])

    compare(case, transform)


def test_grad_of_vmap(case: OpCase) -> None:
    def transform(f: Callable[..., Tensor], x: tuple[Tensor, ...]) -> Any:
        batch = torch.stack([x[0], 2 * x[0], x[0] - 1])
        mapped = vmap(f, in_dims=(0, *(None for _ in x[1:])))
        return grad(scalar(mapped), every(x))(batch, *x[1:])

    compare(case, transform)


def test_jvp_of_grad_and_grad_of_jvp(case: OpCase) -> None:
    def transform(f: Callable[..., Tensor], x: tuple[Tensor, ...]) -> Any:
        tangents = tuple(random_like(t, 20 + i) for i, t in enumerate(x))
        forward_over_reverse = jvp(grad(scalar(f), every(x)), x, tangents)
        if case.name.startswith("softmax"):
            # Reverse over forward: ATen's own softmax raises here (its forward formula overwrites what it saved).
            return forward_over_reverse
        return forward_over_reverse, grad(lambda *t: jvp(scalar(f), t, tangents)[1], every(x))(*x)

    compare(case, transform)


# In place on a tensor (3, 3, 3), or on a part of it, with other parts as arguments.
OVERLAPPING: dict[str, Callable[[Tensor], Tensor]] = {
    "square_matmul_": lambda y: torchops.square_matmul_(y[0], y[0].t()),
    "gate_": lambda y: torchops.gate_(y[0], y[0, :], y[0].t(), y[1, 0]),
    "layer_norm_": lambda y: torchops.layer_norm_(y, (3,), y[0, 0], y[0, 1]),
    "add_transition_": lambda y: torchops.add_transition_(
        y, norm_weight=y[0, 0], gate_weight=y[0], up_weight=y[1].t(), down_weight=y[2], down_bias=y[2, 1]
    ),
    "add_triangle_multiplicative_update_": lambda y: torchops.add_triangle_multiplicative_update_(
        y, p_in_weight=y[0, :2], g_in_weight=y[0, 1:], p_out_weight=y[1, :, :1], g_out_weight=y[2]
    ),
    "triangle_attention_update_": lambda y: triangle_attention_update(
        y,
        None,
        AttentionWeights(y[0, 0], None, y[0, 1:2], y[0], y[1], y[2], y[0].t(), None, y[1].t(), y[2, 2], heads=1),
        inplace=True,
    ),
}


@pytest.mark.parametrize("name", OVERLAPPING)
def test_arguments_that_overlap(name: str) -> None:
    """Wrappers of torch.func have no memory from which that could be seen."""
    x = random_like(torch.empty(3, 3, 3, dtype=torch.float64))
    loss = scalar(lambda x: OVERLAPPING[name](x * 1.5))
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf), leaf)
    batch = x.expand(2, 3, 3, 3).clone()
    of_batch = grad(lambda x: vmap(loss)(x).sum())(batch)
    assert_all_close([grad(loss)(x), vmap(grad(loss))(batch)[1], of_batch[1]], [expected] * 3)


def test_reverse_mode_outside(case: OpCase) -> None:
    """torch.func on the inside, ordinary backward on the outside."""
    results = []
    for reference in (False, True):
        leaves = [t.requires_grad_() for t in inputs(case)]
        first = grad(scalar(of_tensors(case, reference)), every(tuple(leaves)))(*leaves)
        results.append(list(torch.autograd.grad(sum((g**2).sum() for g in first), leaves)))
    assert_all_close(*results)


@pytest.mark.parametrize("mode", ["grad", "vmap", "jvp"])
def test_compiled_transform(case: OpCase, mode: str) -> None:
    """A transform inside torch.compile(fullgraph=True)."""

    def transform(f: Callable[..., Tensor], x: tuple[Tensor, ...]) -> Any:
        if mode == "grad":
            return grad(scalar(f), every(x))(*x)
        if mode == "vmap":
            return vmap(f)(*(torch.stack([t, 2 * t]) for t in x))
        return jvp(f, x, tuple(t + 1 for t in x))

    x = inputs(case)
    expected = tree_leaves(transform(of_tensors(case, reference=True), x))
    function = of_tensors(case, reference=False)
    compiled = torch.compile(lambda *t: transform(function, t), backend="aot_eager", fullgraph=True)
    assert_all_close(tree_leaves(compiled(*x)), expected)


@pytest.mark.ops(mutating=True)
def test_vmap_writes_the_outer_tensor(case: OpCase) -> None:
    """Inside vmap the batched tensor itself is overwritten, as with ATen's in-place operators."""
    x = inputs(case)
    batch = torch.stack([x[0], 2 * x[0]])
    rest = ([5], *x[1:]) if case.name.startswith("layer_norm_") else x[1:]
    expected = torch.stack([case.call(case.reference, t, *rest) for t in batch])

    def function(t: Tensor) -> Tensor:
        case.call(case.op, t, *rest)
        return t

    pointer = batch.data_ptr()
    out = vmap(function)(batch)
    assert_all_close([out, batch], [expected, expected])
    assert batch.data_ptr() == pointer


def test_functionalize(case: OpCase) -> None:
    """PyTorch's own fallback would refuse operators that overwrite an argument."""
    compare(case, lambda f, t: functionalize(f)(*t))


def test_ensemble() -> None:
    """vmap over the stacked parameters of several layers, and gradients per sample of one."""
    from torchops.nn import Dense

    layers = [Dense(5, 4, dtype=torch.float64) for _ in range(3)]
    stacked, buffers = torch.func.stack_module_state(layers)
    x = random_like(torch.empty(6, 5, dtype=torch.float64))
    base = layers[0]
    out = vmap(lambda p, b: functional_call(base, (p, b), (x,)))(stacked, buffers)
    assert_all_close(list(out), [layer(x) for layer in layers])

    parameters = {name: p.detach() for name, p in base.named_parameters()}
    per_sample = vmap(grad(lambda p, row: functional_call(base, p, (row,)).square().sum()), in_dims=(None, 0))
    got = per_sample(parameters, x)
    for index, row in enumerate(x):
        expected = torch.autograd.grad(base(row).square().sum(), list(base.parameters()))
        assert_all_close([got[name][index] for name, _ in base.named_parameters()], list(expected))

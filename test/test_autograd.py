"""Gradients in eager mode: against float64 ATen autograd, by finite differences, double backward, forward mode.

Cotangents are random and tensors are compared whole: one-hot cotangents, as slow gradcheck has, hide a kernel that
leaves most of a gradient unwritten.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import pytest
import torch
from checks import (
    assert_all_close,
    assert_as_good_as_aten,
    expanded,
    gradients,
    random_like,
    tensors,
    to_float64,
    with_tensors,
)
from op_db import OpCase
from samples import Sample
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import torchops

pytestmark = pytest.mark.ops(differentiable=True)


def perturbable(sample: Sample, **_: Any) -> bool:
    """Whether elements can be changed one by one, and tangents of the same layout written: not if it is expanded."""
    return not expanded(sample(torch.float64, "cpu"))


@pytest.mark.ops(leaves=True)
def test_gradients(case: OpCase, device: str, dtype: torch.dtype, sample: Sample) -> None:
    exact_arguments = to_float64(sample(dtype, device, requires_grad=True))
    cotangent = random_like(case.reference(*exact_arguments[0], **exact_arguments[1]).detach()).to(dtype)
    _, exact = gradients(case.reference, exact_arguments, cotangent)
    _, aten = gradients(case.reference, sample(dtype, device, requires_grad=True), cotangent)
    out, got = gradients(case.pure, sample(dtype, device, requires_grad=True), cotangent)
    assert out.requires_grad
    for number, (g, a, e) in enumerate(zip(got, aten, exact, strict=True)):
        assert_as_good_as_aten(case, g, a, e, f"gradient {number}", dtype if case.casts_weights else None)


class SharedMemory(TorchDispatchMode):
    """The operators one of whose results shares its memory with another one or with an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        storages = [[t.untyped_storage()._cdata for t in tensors(each)] for each in (results, (args, kwargs))]
        if func.namespace == "myops" and len(set(storages[0]) - set(storages[1])) < len(storages[0]):
            self.operators.append(func.name())
        return results


@pytest.mark.ops(leaves=True, large=False, dtypes=[torch.float32])
def test_results_share_no_memory(case: OpCase, device: str, dtype: torch.dtype, sample: Sample) -> None:
    """PyTorch's contract of custom operators, for those of the backward pass, too."""
    arguments = sample(dtype, device, requires_grad=True)
    cotangent = random_like(case.reference(*sample(dtype, device)[0], **sample(dtype, device)[1]))
    with SharedMemory() as mode:
        out, _ = gradients(case.pure, arguments, cotangent)
    assert mode.operators == []
    assert not out._is_view()  # or callers could not overwrite it


# All subsets of eleven would take minutes for each sample.
@pytest.mark.ops(
    leaves=True,
    large=False,
    dtypes=[torch.float64],
    where=lambda sample, **_: len(tensors(sample(torch.float64, "meta"))) <= 9,
)
def test_every_subset_of_arguments(case: OpCase, device: str, dtype: torch.dtype, sample: Sample) -> None:
    """Only what requires a gradient gets one, and the others do not change it."""
    count = len(tensors(sample(dtype, device)))
    cotangent = random_like(case.reference(*sample(dtype, device)[0], **sample(dtype, device)[1]))
    for subset in itertools.product((False, True), repeat=count):
        if not any(subset):
            continue
        results = []
        for function in (case.pure, case.reference):
            arguments = sample(dtype, device)
            for tensor, wanted in zip(tensors(arguments), subset, strict=True):
                tensor.requires_grad_(wanted)
            results.append(gradients(function, arguments, cotangent)[1])
        assert_all_close(*results)


@pytest.mark.ops(leaves=True, large=False, dtypes=[torch.float64], where=perturbable)
def test_finite_differences(case: OpCase, device: str, dtype: torch.dtype, sample: Sample) -> None:
    args, kwargs = sample(dtype, device, requires_grad=True)
    inputs, function = flattened(case, args, kwargs)
    check: dict[str, Any] = {"fast_mode": True, "check_batched_grad": True}
    # For a vector, ATen's own product fails: its batched tangent has a dimension too many.
    batched_forward = args[0].dim() != 1 or all(t.dim() != 2 for t in inputs)
    assert torch.autograd.gradcheck(
        function, inputs, check_forward_ad=True, check_batched_forward_grad=batched_forward, **check
    )
    assert torch.autograd.gradgradcheck(function, inputs, check_fwd_over_rev=True, check_rev_over_rev=True, **check)


@pytest.mark.ops(leaves=True, large=False, dtypes=[torch.float64])
def test_batched_gradients_in_another_thread(case: OpCase, device: str, dtype: torch.dtype, sample: Sample) -> None:
    """As on a GPU, whose thread for backward passes does not know the batch's level of the thread that called it."""
    args, kwargs = sample(dtype, device, requires_grad=True)
    out = case.pure(*args, **kwargs)
    leaves = [t for t in tensors((args, kwargs)) if t.requires_grad]
    cotangents = torch.stack([random_like(out.detach(), seed) for seed in (1, 2)])

    def in_thread(cotangent: Tensor) -> tuple[Tensor, ...]:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(torch.autograd.grad, out, leaves, cotangent, retain_graph=True).result()

    each = [torch.autograd.grad(out, leaves, cotangent, retain_graph=True) for cotangent in cotangents]
    batched = torch._vmap_internals._vmap(in_thread)(cotangents)
    assert_all_close(batched, [torch.stack(gradient) for gradient in zip(*each, strict=True)])


def flattened(case: OpCase, args: list[Any], kwargs: dict[str, Any]) -> tuple[tuple[Tensor, ...], Any]:
    """The tensor arguments, and the operator as a function of only them."""
    inputs = tuple(tensors((args, kwargs)))

    def function(*values: Tensor) -> Tensor:
        passed, named = with_tensors((args, kwargs), values)
        return case.pure(*passed, **named)

    return inputs, function


@pytest.mark.ops(leaves=True, large=False, dtypes=[torch.float64])
def test_double_backward(case: OpCase, device: str, dtype: torch.dtype, sample: Sample) -> None:
    """Gradients of a random function of the first gradients and the output, also with respect to the cotangent."""
    assert_all_close(*(second_order(f, sample(dtype, device, requires_grad=True)) for f in (case.pure, case.smooth)))


def second_order(function: Any, arguments: Any) -> list[Tensor]:
    out = function(*arguments[0], **arguments[1])
    cotangent = random_like(out.detach()).requires_grad_()
    leaves = tensors(arguments)
    first = torch.autograd.grad(out, leaves, cotangent, create_graph=True)
    total = sum(((g * random_like(g.detach(), 2 + i)).sum() for i, g in enumerate(first)), (out**2).sum())
    second = torch.autograd.grad(total, [*leaves, cotangent], create_graph=True, materialize_grads=True)
    total = sum(((g * random_like(g.detach(), 9 + i)).sum() for i, g in enumerate(second)), out.sum())
    third = torch.autograd.grad(total, [*leaves, cotangent], materialize_grads=True)
    return [out, *first, *second, *third]


@pytest.mark.ops(leaves=True, large=False, dtypes=[torch.float64, torch.bfloat16], where=perturbable)
@pytest.mark.parametrize("requires_grad", [False, True], ids=["no_grad", "grad"])
def test_forward_mode(case: OpCase, device: str, dtype: torch.dtype, sample: Sample, requires_grad: bool) -> None:
    """Tangents arrive whether or not anything requires a gradient."""
    args, kwargs = sample(dtype, device, requires_grad)
    directions = [random_like(t.detach(), 3 + i) for i, t in enumerate(tensors((args, kwargs)))]
    exact = push_forward(case.reference, to_float64((args, kwargs)), to_float64(directions))
    aten = push_forward(case.reference, (args, kwargs), directions)
    got = push_forward(case.pure, (args, kwargs), directions)
    for what, g, a, e in zip(("output", "tangent"), got, aten, exact, strict=True):
        assert_as_good_as_aten(case, g, a, e, what)


def push_forward(function: Any, arguments: Any, directions: list[Tensor]) -> tuple[Tensor, Tensor]:
    with forward_ad.dual_level():
        args, kwargs = with_tensors(arguments, map(forward_ad.make_dual, tensors(arguments), directions))
        out = forward_ad.unpack_dual(function(*args, **kwargs))
        assert out.tangent is not None
        return out.primal.detach(), out.tangent.detach()


# ATen's softmax, which carries the tangent, raises here: its forward formula overwrites what it saved.
@pytest.mark.ops(
    leaves=True,
    large=False,
    dtypes=[torch.float64],
    samples=["matrix", "four_dims", "strided_columns"],
    where=lambda case, **_: not case.name.startswith(("softmax", "triangle_attention")),
)
def test_reverse_over_forward(case: OpCase, device: str, dtype: torch.dtype, sample: Sample) -> None:
    results = []
    for function in (case.pure, case.smooth):
        arguments = sample(dtype, device, requires_grad=True)
        leaves = tensors(arguments)
        with forward_ad.dual_level():
            duals = (forward_ad.make_dual(t, random_like(t, 3 + i)) for i, t in enumerate(leaves))
            args, kwargs = with_tensors(arguments, duals)
            out = forward_ad.unpack_dual(function(*args, **kwargs))
            assert out.tangent is not None
            loss = (out.tangent * random_like(out.tangent.detach())).sum() + (out.primal**2).sum()
            results.append(list(torch.autograd.grad(loss, leaves, materialize_grads=True)))
    assert_all_close(*results)


@pytest.mark.parametrize("activation", ["sigmoid", "silu"])
def test_forward_over_reverse_of_glu(activation: Literal["sigmoid", "silu"]) -> None:
    """The gradient of ATen's silu has no forward-mode derivative."""
    shapes = [(3, 5), (4, 5), (3, 5)]
    x, w, direction = (random_like(torch.empty(*s, dtype=torch.float64), i) for i, s in enumerate(shapes))

    def loss(x: Tensor) -> Tensor:
        return (torchops.glu(x, w, w.sin(), activation=activation) ** 2).sum()

    expected = torch.func.jvp(torch.func.grad(loss), (x,), (direction,))[1]
    with forward_ad.dual_level():
        leaf = forward_ad.make_dual(x.requires_grad_(), direction)
        (made,) = torch.autograd.grad(loss(leaf), leaf)
        assert_all_close([forward_ad.unpack_dual(made).tangent], [expected])


@pytest.mark.ops(leaves=True, large=False, dtypes=[torch.float64], samples=["matrix"])
def test_tangent_on_one_argument(case: OpCase, device: str, dtype: torch.dtype, sample: Sample) -> None:
    for chosen in range(len(tensors(sample(dtype, device)))):
        results = []
        for function in (case.pure, case.reference):
            values: list[Tensor] = tensors(sample(dtype, device))
            with forward_ad.dual_level():
                values[chosen] = forward_ad.make_dual(values[chosen], random_like(values[chosen]))
                args, kwargs = with_tensors(sample(dtype, device), values)
                out = forward_ad.unpack_dual(function(*args, **kwargs))
                results.append([out.primal, out.tangent])
        assert_all_close(*results)


@pytest.mark.ops(leaves=True, large=False, dtypes=[torch.float64], samples=["matrix", "four_dims", "strided_columns"])
def test_strided_cotangents(case: OpCase, device: str, dtype: torch.dtype, sample: Sample) -> None:
    """Cotangents come expanded (from `sum`), transposed, with gaps, zero, or (as a scalar) negated."""
    shape = case.reference(*sample(dtype, device)[0], **sample(dtype, device)[1]).shape
    base = random_like(torch.empty(*shape[:-1], 2 * shape[-1], dtype=dtype, device=device))
    cotangents = [
        torch.ones((), dtype=dtype, device=device).expand(shape),
        base[..., ::2],
        random_like(torch.empty(shape[::-1], dtype=dtype, device=device)).permute(*reversed(range(len(shape)))),
        torch.zeros(shape, dtype=dtype, device=device),
    ]
    for cotangent in cotangents:
        before = cotangent.clone()
        results = [
            gradients(function, sample(dtype, device, requires_grad=True), cotangent)[1]
            for function in (case.pure, case.reference)
        ]
        assert_all_close(*results)
        assert torch.equal(cotangent, before)


@pytest.mark.ops(leaves=True, large=False, dtypes=[torch.float32], samples=["matrix"])
def test_graph_is_freed_and_kept(case: OpCase, device: str, dtype: torch.dtype, sample: Sample) -> None:
    arguments = sample(dtype, device, requires_grad=True)
    out = case.pure(*arguments[0], **arguments[1])
    leaves = tensors(arguments)
    first = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    second = torch.autograd.grad(out.sum(), leaves)
    assert_all_close(first, second)
    with pytest.raises(RuntimeError, match="through the graph a second time"):
        torch.autograd.grad(out.sum(), leaves)


@pytest.mark.ops(leaves=True, large=False, dtypes=[torch.float32], samples=["matrix"])
def test_inference_mode(case: OpCase, device: str, dtype: torch.dtype, sample: Sample) -> None:
    args, kwargs = sample(dtype, device, requires_grad=True)
    expected = case.reference(*args, **kwargs).detach()
    with torch.inference_mode():
        out = case.pure(*args, **kwargs)
        assert out.is_inference()
        assert not out.requires_grad
    torch.testing.assert_close(out.clone(), expected)
    with torch.no_grad():
        assert not case.pure(*args, **kwargs).requires_grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("affine", ["both", "bias"])
def test_layer_norm_adds_up_many_rows(affine: str, dtype: torch.dtype) -> None:
    """In 16 bits a sum of positive numbers stops growing after some hundred of them."""
    x, cotangent = torch.randn(70000, 16).to(dtype), torch.rand(70000, 16).to(dtype) / 4
    weight = torch.rand(16).to(dtype).requires_grad_() if affine == "both" else None
    bias = torch.rand(16).to(dtype).requires_grad_()
    leaves = [bias] if weight is None else [bias, weight]
    got = torch.autograd.grad(torchops.layer_norm(x, (16,), weight, bias), leaves, cotangent)
    exact = [torch.nn.functional.layer_norm(x.double(), (16,)) * cotangent.double(), cotangent.double()]
    for gradient, rows in zip(got, reversed(exact), strict=False):
        torch.testing.assert_close(gradient.double(), rows.sum(0), rtol=2e-2, atol=2.0)

"""torch.library.opcheck: schema, autograd registration, fake kernels, AOTAutograd with static and dynamic sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checks import random_like, tensors
from op_db import OpCase, copy_like
from samples import Sample

UTILITIES = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
# The check of the schema compares arguments by arithmetic that there is none of in eight bits. That they stay as they
# are, test_reference.py checks.
OF_EIGHT_BITS = UTILITIES[1:]


@pytest.mark.ops(large=False, dtypes=[torch.float32], leaves=True, differentiable=True)
def test_training(case: OpCase, device: str, dtype: torch.dtype, sample: Sample) -> None:
    args, kwargs = sample(dtype, device, requires_grad=True)
    if case.mutates is not None:
        args[case.mutates] = copy_like(args[case.mutates])
    torch.library.opcheck(case.op, tuple(args), kwargs, test_utils=UTILITIES)


@pytest.mark.ops(
    dtypes=[torch.float32, torch.bfloat16],
    samples=["matrix", "four_dims", "strided_columns", "zero_rows", "b_inside_a", "no_bias", "one_scale", "default"],
)
def test_inference(case: OpCase, device: str, dtype: torch.dtype, sample: Sample) -> None:
    args, kwargs = sample(dtype, device)
    eight_bits = any(t.dtype.itemsize == 1 for t in tensors((args, kwargs)))
    torch.library.opcheck(case.op, tuple(args), kwargs, test_utils=OF_EIGHT_BITS if eight_bits else UTILITIES)


@pytest.mark.ops(leaves=True, dtypes=[torch.float32], samples=["matrix", "four_dims", "two_dims"])
def test_static(case: OpCase, device: str, dtype: torch.dtype, sample: Sample) -> None:
    for requires_grad in {False, case.differentiable}:
        args, kwargs = sample(dtype, device, requires_grad)
        if case.mutates is not None:
            args[case.mutates] = copy_like(args[case.mutates])
        torch.library.opcheck(case.op, tuple(args), kwargs, test_utils=("test_aot_dispatch_static",))


@pytest.mark.ops(leaves=True, dtypes=[torch.float32], samples=["matrix"], differentiable=True)
def test_frozen_arguments(case: OpCase, device: str, dtype: torch.dtype, sample: Sample) -> None:
    """Each differentiable argument alone requires a gradient."""
    for wanted in range(len(tensors(sample(dtype, device)))):
        args, kwargs = sample(dtype, device)
        tensors((args, kwargs))[wanted].requires_grad_()
        if case.mutates is not None:
            args[case.mutates] = copy_like(args[case.mutates])
        torch.library.opcheck(case.op, tuple(args), kwargs, test_utils=UTILITIES)


def _gate_helpers() -> list[tuple[str, tuple[Any, ...]]]:
    def gate(dtype: torch.dtype, wide: torch.dtype, bias: bool, output_mask: list[bool]) -> tuple[str, tuple[Any, ...]]:
        grad, v = (random_like(torch.empty(3, 4, 6, dtype=wide), seed) for seed in (1, 2))
        x, w = random_like(torch.empty(3, 4, 5, dtype=wide), 3), random_like(torch.empty(6, 5, dtype=dtype), 4)
        return "_gate_backward", (
            grad,
            v,
            x,
            w,
            w[:, 0] if bias else None,
            output_mask,
            bias,
        )  # v is the result, or not

    def glu(dtype: torch.dtype, wide: torch.dtype, bias: bool, output_mask: list[bool]) -> tuple[str, tuple[Any, ...]]:
        grad, x = (random_like(torch.empty(4, n, dtype=d), n) for n, d in ((6, dtype), (5, wide)))
        w, wg = (random_like(torch.empty(6, 5, dtype=dtype), seed) for seed in (1, 2))
        b, bg = (w[:, 0], wg[:, 1]) if bias else (None, None)
        return "_glu_backward", (grad, x, w, wg, b, bg, "silu" if bias else "sigmoid", output_mask)

    def transition(
        dtype: torch.dtype, wide: torch.dtype, bias: bool, output_mask: list[bool]
    ) -> tuple[str, tuple[Any, ...]]:
        x, grad = (random_like(torch.empty(2, 4, 5, dtype=d), seed) for seed, d in ((1, wide), (2, dtype)))
        gate, up, down = (
            random_like(torch.empty(s, dtype=dtype), 3 + i) for i, s in enumerate([(6, 5), (6, 5), (5, 6)])
        )
        norm = (gate[0], up[1]) if bias else (None, None)
        b, bg = (up[:, 0], gate[:, 1]) if bias else (None, None)
        return "_transition_backward", (grad, x, *norm, gate, bg, up, b, down, 1e-5, output_mask, bias)

    def with_products(dtype: torch.dtype, bias: bool) -> list[tuple[str, tuple[Any, ...]]]:
        name, (grad, *arguments) = transition(dtype, full, bias, [True, bias, bias, *[True, bias] * 3])
        *parameters, eps, output_mask, _ = arguments
        up, gate = (random_like(grad.new_empty(2, 4, 6), seed) for seed in (20, 21))
        return [
            ("_transition", (*parameters, None if bias else parameters[-1][:, 0], eps, bias)),
            (name, (grad, *parameters, eps, output_mask, bias, up, gate)),
        ]

    low, full = torch.bfloat16, torch.float32
    return [
        gate(full, full, True, [True] * 4),
        gate(low, full, False, [False, True, True, False]),
        glu(full, full, True, [True] * 5),
        glu(low, full, False, [True, False, True, False, False]),
        *((name, (*args, args[0], args[0] + 1)) for name, args in [glu(full, full, True, [True] * 5)]),
        *(("_gate", gate(dtype, full, bias, [])[1][1:5]) for dtype, bias in ((full, True), (low, False))),
        *((name, (*args[:6], False, args[1])) for name, args in [gate(full, full, True, [True] * 4)]),
        *(("_glu", glu(dtype, full, bias, [])[1][1:7]) for dtype, bias in ((full, True), (low, False))),
        transition(full, full, True, [True] * 9),
        transition(low, full, False, [True, False, False, True, False, False, False, True, True]),
        *with_products(full, True),
        *with_products(low, False),
    ]


def _outer_product_helpers() -> list[tuple[str, tuple[Any, ...]]]:
    shapes = (2, 3, 4, 7), (2, 5, 3, 2), (2, 5, 4, 3), (7, 6), (2, 3, 4)
    *tensors, norm = (random_like(torch.empty(shape), seed) for seed, shape in enumerate(shapes))
    low, norm = [t.bfloat16() for t in tensors], norm.abs() + 1
    return [
        ("_outer_product_mean_backward", (*tensors, norm, [True] * 4)),
        ("_outer_product_mean_backward", (*low, norm, [False, True, False, True])),
        ("_outer_product_mean_backward", (*low, None, [True, False, True, False])),
    ]


def _helpers() -> list[tuple[str, tuple[Any, ...]]]:
    """The operators that only the library calls, and arguments for them."""
    x, grad = (random_like(torch.empty(3, 4, 5), seed) for seed in (1, 2))
    weight = random_like(torch.empty(5), 3)
    y, z, w = torch.sigmoid(x), random_like(torch.empty(3, 4, 7), 4), random_like(torch.empty(5, 7), 5)
    var, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
    return [
        ("_saved_copy", (x,)),
        ("_saved_copy", (x.mT,)),
        ("_dense_backward", (grad, y)),
        ("_dense_backward", (grad.mT, y.mT)),
        ("_dense_backward", (grad.mT, y.mT, [True, False])),
        ("_dense_backward", (grad, y, [False, True])),
        ("_dense_gradients", (grad, y, z, w, [True, True, True])),
        ("_dense_gradients", (grad[0, 0], y[0, 0], z[0, 0], w, [True, True, True])),
        ("_dense_gradients", (grad.mT.contiguous().mT, y, z[:1].expand(3, 4, 7), w, [False, True, True])),
        ("_dense_gradients", (grad, y, z, w.t().contiguous().t(), [True, False, False])),
        *_gate_helpers(),
        *_outer_product_helpers(),
        ("_dense_on_path", (z, w, None, "cublas")),
        ("_keeps_products", (z, w, True)),
        ("_linear", (z, w, None)),
        ("_linear", (z.bfloat16(), w.bfloat16(), weight.bfloat16())),
        ("_layer_norm", (x, [5], weight, weight, 1e-5)),
        ("_layer_norm", (x.bfloat16(), [4, 5], None, None, 1e-5)),
        ("_layer_norm_", (x.clone(), [5], weight, None, 1e-5)),
        ("_layer_norm_", (x.bfloat16(), [4, 5], None, None, 1e-5)),
        ("_layer_norm_backward", (grad, x, [5], mean, torch.rsqrt(var + 1e-5), weight, [True, True, True])),
        ("_layer_norm_backward", (grad, x, [5], mean, torch.rsqrt(var + 1e-5), None, [True, False, False])),
        ("_softmax_backward", (grad, y, -1)),
        ("_softmax_backward", (grad.mT, y.mT, 0)),
    ]


@pytest.mark.parametrize("number", range(len(_helpers())), ids=lambda n: _helpers()[n][0])
def test_helpers(number: int) -> None:
    name, args = _helpers()[number]
    torch.library.opcheck(getattr(torch.ops.myops, name).default, args, test_utils=UTILITIES)


def test_all_helpers_are_checked() -> None:
    names = {str(n).removeprefix("myops::") for n in torch._C._dispatch_get_all_op_names() if "myops::_" in str(n)}
    takes_no_tensor = {"_kernel_path", "_only_candidate", "_pretended_device"}
    # test_triangle_multiplicative_update.py and others; test_residual.py
    elsewhere = {name for name in names if name.startswith("_triangle_") or name == "_add_transition"}
    assert names - takes_no_tensor - elsewhere == {name for name, _ in _helpers()}

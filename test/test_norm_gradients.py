"""Gradients of operators with a layer norm, of rows whose values are equal or nearly so, where roundings are amplified
most: the bound of `norm_errors.py` holds, and does not hold for a gradient that is wrong."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from checks import tensors
from op_db import DTYPES, OPS, OpCase
from samples import Arguments, arguments
from test_properties import assert_like_aten, exact_gradients, fresh
from torch import Tensor
from torch.utils._pytree import tree_map_only

CASES = [case for case in OPS if "layer_norm" in case.name or "transition" in case.name]


def drawn(
    case: OpCase, dtype: torch.dtype, device: str, *, features: int, spread: float, affine: bool, eps: float
) -> tuple[Arguments, Tensor]:
    """257 rows of values around one, which is another for each row; and a cotangent."""
    torch.manual_seed(features)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64)

    x = 8 * normal(257, 1) + spread * normal(257, features)
    norm = [normal(features), normal(features)] if affine else [None, None]
    if case.pack is None:
        values = arguments(x, [features], *norm, eps)
    else:
        hidden = 16
        parameters = [*norm, normal(hidden, features), None, normal(hidden, features), None, normal(features, hidden)]
        values = case.pack(x, *parameters, None, eps)
    moved: Arguments = tree_map_only(Tensor, lambda t: t.to(device, dtype), values)
    return moved, normal(257, features).to(device, dtype)


def gradients(function: Callable[..., Tensor], values: Arguments, cotangent: Tensor) -> tuple[Tensor, ...]:
    leaves = [t.requires_grad_() for t in tensors(values)]
    return torch.autograd.grad(function(*values[0], **values[1]), leaves, cotangent)


@pytest.mark.parametrize("spread", [0.0, 1e-3, 1e-2, 1.0])
@pytest.mark.parametrize("features", [1, 3, 17])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("operator", CASES, ids=lambda operator: operator.name)
def test_rows_of_nearly_equal_values(operator: OpCase, dtype: torch.dtype, features: int, spread: float) -> None:
    for device, affine in itertools.product(operator.devices(), (False, True)):
        how: dict[str, Any] = {"features": features, "spread": spread, "affine": affine}
        values, cotangent = drawn(operator, dtype, device, eps=1e-5, **how)
        got = gradients(operator.pure, fresh(values), cotangent)
        aten = gradients(operator.reference, fresh(values), cotangent)
        in_float64 = partial(gradients, operator.reference, cotangent=cotangent.double())
        exact, errors = exact_gradients(operator, values, dtype, True, in_float64)
        for each in zip(got, aten, exact, errors, strict=True):
            assert_like_aten(operator, *each)
        # Of normalised rows of zeros, the other operator makes products of zeros, and its gradient is 0.
        if features > 1 and spread < 1 and (affine or not operator.pack):
            wrong, _ = drawn(operator, dtype, device, eps=2e-5, **how)
            (dx, *_), plain = gradients(operator.pure, fresh(wrong), cotangent), exact[0].to(got[0].dtype)
            with pytest.raises(AssertionError):
                assert_like_aten(operator, dx, plain, exact[0], errors[0])

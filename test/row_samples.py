"""References, samples and error inputs of softmax and layer_norm, for `op_db.py`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from samples import (
    Arguments,
    ErrorInput,
    Make,
    Sample,
    arguments,
    dtype_errors,
    every_second_column,
    match_errors,
    on_layouts,
    swapped,
    wide,
)
from torch import Tensor

# --- softmax ---------------------------------------------------------------------------------------------------------


def softmax_samples(mutates: bool) -> tuple[Sample, ...]:
    return (
        *on_layouts(mutates, lambda t, x: arguments(x)),
        *on_layouts(mutates, lambda t, x: arguments(x, dim=0), "_first_dim"),
        Sample("middle_dim", lambda t: arguments(t(3, 5, 7), 1)),
        Sample("middle_dim_permuted", lambda t: arguments(t(7, 5, 3, view=swapped), -2)),
        Sample("zero_dim", lambda t: arguments(t(), 0)),
        Sample("zero_dim_default", lambda t: arguments(t())),
        Sample("empty", lambda t: arguments(t(0))),
        Sample("zero_in", lambda t: arguments(t(5, 0))),
        Sample("zero_in_other_dim", lambda t: arguments(t(5, 0), 0)),
        Sample("extreme", lambda t: arguments(t(5, 7, scale=1e4)), large=True),
        Sample("large", lambda t: arguments(t(2053, 517, scale=3.0)), large=True),
        Sample("large_first_dim", lambda t: arguments(t(517, 1031, scale=3.0), 0), large=True),
        Sample("large_strided", lambda t: arguments(t(1031, 517, view=Tensor.t)), large=True),
        Sample("one_long_row", lambda t: arguments(t(1, 300_007)), large=True),
    )


def softmax_reference(x: Tensor, dim: int = -1) -> Tensor:
    return torch.softmax(x, dim)


def softmax_smooth(x: Tensor, dim: int = -1) -> Tensor:
    """Reverse over forward mode of ATen's softmax raises: its forward formula overwrites what it saved."""
    return x.exp() / x.exp().sum(dim, keepdim=True)


_DIM = "expected dim in {} for x of shape {}, got {}"

SOFTMAX_ERRORS = (
    ErrorInput("dim_above", lambda t: arguments(t(3, 4), 5), _DIM.format("[-2, 1]", "(3, 4)", 5), IndexError),
    ErrorInput("dim_just_above", lambda t: arguments(t(3, 4), 2), _DIM.format("[-2, 1]", "(3, 4)", 2), IndexError),
    ErrorInput("dim_below", lambda t: arguments(t(7), -2), _DIM.format("[-1, 0]", "(7,)", -2), IndexError),
    ErrorInput("dim_of_zero_dim", lambda t: arguments(t(), 1), _DIM.format("[-1, 0]", "()", 1), IndexError),
    *dtype_errors("x", lambda t, d: arguments(t(5, 7, dtype=d))),
)

# --- layer_norm ------------------------------------------------------------------------------------------------------


def layer_norm_reference(
    x: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    wide = any(t is not None and t.dtype == torch.float32 for t in (weight, bias)) and x.dtype.itemsize == 2
    if not wide or torch.is_autocast_enabled(x.device.type):
        return F.layer_norm(x, normalized_shape, weight, bias, eps)
    weight, bias = (None if t is None else t.float() for t in (weight, bias))
    return F.layer_norm(x.float(), normalized_shape, weight, bias, eps).to(x.dtype)


def layer_norm_smooth(
    x: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """ATen's third derivative is wrong (it takes the moments for constants), and its second raises without a weight."""
    dims = tuple(range(-len(normalized_shape), 0))
    var, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
    y = (x - mean) * torch.rsqrt(var + eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _with_affine(t: Make, x: Tensor) -> Arguments:
    return arguments(x, [x.shape[-1]], t(x.shape[-1]), t(x.shape[-1]))


def layer_norm_samples(mutates: bool) -> tuple[Sample, ...]:
    return (
        *on_layouts(mutates, _with_affine),
        *on_layouts(mutates, lambda t, x: arguments(x, [x.shape[-1]]), "_plain"),
        Sample("weight_only", lambda t: arguments(t(5, 7), [7], t(7))),
        Sample("bias_only", lambda t: arguments(t(5, 7), [7], None, t(7))),
        Sample("two_dims", lambda t: arguments(t(3, 4, 5), [4, 5], t(4, 5), t(4, 5))),
        Sample("two_dims_plain_permuted", lambda t: arguments(t(5, 4, 3, view=swapped), [4, 5])),
        Sample("all_dims", lambda t: arguments(t(3, 5), [3, 5], t(3, 5), t(3, 5))),
        Sample("strided_affine", lambda t: arguments(t(5, 7), [7], t(14, view=every_second_column), t(7))),
        Sample("transposed_affine", lambda t: arguments(t(3, 4, 5), [4, 5], t(5, 4, view=Tensor.t), t(4, 5))),
        Sample("expanded_affine", lambda t: arguments(t(5, 7), [7], t(1, view=lambda v: v.expand(7)), t(7))),
        Sample("eps", lambda t: arguments(t(5, 7, scale=0.01), [7], t(7), t(7), 0.5)),
        Sample("float32_affine", lambda t: arguments(t(5, 7), [7], wide(t, 7), wide(t, 7))),
        Sample("float32_weight", lambda t: arguments(t(5, 7), [7], wide(t, 7), t(7))),
        Sample("float32_bias", lambda t: arguments(t(5, 7), [7], None, wide(t, 7))),
        Sample("zero_in", lambda t: arguments(t(5, 0), [0], t(0), t(0))),
        Sample("offset", lambda t: arguments(t(5, 7, view=lambda v: v + 100.0), [7]), large=True),
        Sample("large", lambda t: arguments(t(2053, 517), [517], t(517), t(517)), large=True),
        Sample(
            "large_float32_affine", lambda t: arguments(t(2053, 520), [520], wide(t, 520), wide(t, 520)), large=True
        ),
        Sample("large_plain_strided", lambda t: arguments(t(517, 1031, view=Tensor.t), [517]), large=True),
        Sample("one_long_row", lambda t: arguments(t(1, 300_007), [300_007]), large=True),
    )


_SHAPE = "expected x of shape (..., {}) to match normalized_shape, got {}"
_AFFINE = "expected {} of shape (7,) to match normalized_shape, got {}"

LAYER_NORM_ERRORS = (
    ErrorInput("zero_dim_x", lambda t: arguments(t(), [7]), _SHAPE.format("7", "()")),
    ErrorInput(
        "no_normalized_shape",
        lambda t: arguments(t(5, 7), []),
        "expected normalized_shape of at least 1 dimension, got ()",
    ),
    ErrorInput("normalized_rank", lambda t: arguments(t(7), [5, 7]), _SHAPE.format("5, 7", "(7,)")),
    ErrorInput("inner_size", lambda t: arguments(t(5, 7), [6]), _SHAPE.format("6", "(5, 7)")),
    ErrorInput("inner_size_1", lambda t: arguments(t(5, 7), [1]), _SHAPE.format("1", "(5, 7)")),
    ErrorInput("inner_sizes", lambda t: arguments(t(2, 5, 7), [4, 7]), _SHAPE.format("4, 7", "(2, 5, 7)")),
    ErrorInput("weight_size", lambda t: arguments(t(5, 7), [7], t(6), t(7)), _AFFINE.format("weight", "(6,)")),
    ErrorInput("weight_rank", lambda t: arguments(t(5, 7), [7], t(1, 7), t(7)), _AFFINE.format("weight", "(1, 7)")),
    ErrorInput("zero_dim_weight", lambda t: arguments(t(5, 7), [7], t()), _AFFINE.format("weight", "()")),
    ErrorInput("bias_size", lambda t: arguments(t(5, 7), [7], t(7), t(6)), _AFFINE.format("bias", "(6,)")),
    ErrorInput("bias_size_1", lambda t: arguments(t(5, 7), [7], None, t(1)), _AFFINE.format("bias", "(1,)")),
    ErrorInput("bias_rank", lambda t: arguments(t(5, 7), [7], None, t(7, 1)), _AFFINE.format("bias", "(7, 1)")),
    *dtype_errors("x", lambda t, d: arguments(t(5, 7, dtype=d), [7], t(7, dtype=d), t(7, dtype=d))),
    *match_errors("weight", "x", lambda t, **other: arguments(t(5, 7), [7], t(7, **other), t(7))),
    *match_errors("bias", "x", lambda t, **other: arguments(t(5, 7), [7], None, t(7, **other))),
)

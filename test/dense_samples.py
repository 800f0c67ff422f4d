"""Reference, samples and error inputs of dense and sigmoid, for `op_db.py`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from samples import (
    ZERO_DIM,
    ErrorInput,
    Sample,
    arguments,
    dtype_errors,
    every_second_column,
    every_third_row,
    match_errors,
    on_layouts,
    swapped,
)
from torch import Tensor

# --- dense -----------------------------------------------------------------------------------------------------------


def dense_reference(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    return torch.sigmoid(F.linear(x, w, b))


DENSE_SAMPLES = (
    Sample("matrix", lambda t: arguments(t(5, 7), t(3, 7), t(3))),
    Sample("no_bias", lambda t: arguments(t(5, 7), t(3, 7))),
    Sample("vector", lambda t: arguments(t(7), t(3, 7), t(3))),
    Sample("vector_no_bias", lambda t: arguments(t(7), t(3, 7), None)),
    Sample("four_dims", lambda t: arguments(t(2, 3, 1, 7), t(5, 7), t(5))),
    Sample("one_by_one", lambda t: arguments(t(1, 1), t(1, 1), t(1))),
    Sample("transposed_x", lambda t: arguments(t(7, 5, view=Tensor.t), t(3, 7), t(3))),
    Sample("transposed_w", lambda t: arguments(t(5, 7), t(7, 3, view=Tensor.t), t(3))),
    Sample("strided", lambda t: arguments(t(5, 14, view=every_second_column), t(9, 7, view=every_third_row), t(3))),
    Sample("strided_bias", lambda t: arguments(t(5, 7), t(3, 7), t(6, view=every_second_column))),
    Sample("permuted_x", lambda t: arguments(t(7, 4, 3, view=swapped), t(5, 7), t(5))),
    Sample("expanded_x", lambda t: arguments(t(1, 7, view=lambda v: v.expand(5, 7)), t(3, 7), t(3))),
    Sample("expanded_w", lambda t: arguments(t(5, 7), t(1, 7, view=lambda v: v.expand(3, 7)), t(3))),
    Sample("expanded_bias", lambda t: arguments(t(5, 7), t(3, 7), t(1, view=lambda v: v.expand(3)))),
    Sample("zero_rows", lambda t: arguments(t(0, 7), t(3, 7), t(3))),
    Sample("zero_rows_inside", lambda t: arguments(t(2, 0, 7), t(3, 7), t(3))),
    Sample("zero_in", lambda t: arguments(t(5, 0), t(3, 0), t(3))),
    Sample("zero_in_no_bias", lambda t: arguments(t(5, 0), t(3, 0))),
    Sample("zero_in_vector", lambda t: arguments(t(0), t(3, 0), t(3))),
    Sample("zero_out", lambda t: arguments(t(5, 7), t(0, 7), t(0))),
    Sample("tall", lambda t: arguments(t(5003, 19), t(37, 19), t(37)), large=True),
    Sample("wide", lambda t: arguments(t(67, 61, scale=0.3), t(4099, 61), t(4099)), large=True),
    Sample("deep", lambda t: arguments(t(131, 1031, scale=0.1), t(257, 1031), t(257)), large=True),
)

_W = "expected w of shape (out, in) with in = {} to match x, got {}"
_BIAS = "expected b of shape (3,) to match w, got {}"

DENSE_ERRORS = (
    ErrorInput("zero_dim_x", lambda t: arguments(t(), t(3, 7), t(3)), ZERO_DIM.format("x")),
    ErrorInput("rank_w_1", lambda t: arguments(t(5, 7), t(7), t(3)), _W.format(7, "(7,)")),
    ErrorInput("rank_w_3", lambda t: arguments(t(5, 7), t(1, 3, 7), t(3)), _W.format(7, "(1, 3, 7)")),
    ErrorInput("zero_dim_w", lambda t: arguments(t(5, 7), t(), t(3)), _W.format(7, "()")),
    ErrorInput("inner_size", lambda t: arguments(t(5, 7), t(3, 6), t(3)), _W.format(7, "(3, 6)")),
    ErrorInput("w_not_transposed", lambda t: arguments(t(2, 5, 7), t(7, 3)), _W.format(7, "(7, 3)")),
    ErrorInput("inner_size_1", lambda t: arguments(t(1), t(3, 6)), _W.format(1, "(3, 6)")),
    ErrorInput("bias_size", lambda t: arguments(t(5, 7), t(3, 7), t(4)), _BIAS.format("(4,)")),
    ErrorInput("bias_size_1", lambda t: arguments(t(5, 7), t(3, 7), t(1)), _BIAS.format("(1,)")),
    ErrorInput("bias_rank", lambda t: arguments(t(5, 7), t(3, 7), t(1, 3)), _BIAS.format("(1, 3)")),
    ErrorInput("zero_dim_bias", lambda t: arguments(t(5, 7), t(3, 7), t()), _BIAS.format("()")),
    *dtype_errors("x", lambda t, d: arguments(t(5, 7, dtype=d), t(3, 7, dtype=d), t(3, dtype=d))),
    *match_errors("w", "x", lambda t, **other: arguments(t(5, 7), t(3, 7, **other), t(3))),
    *match_errors("b", "x", lambda t, **other: arguments(t(5, 7), t(3, 7), t(3, **other))),
)

# --- sigmoid ---------------------------------------------------------------------------------------------------------


def sigmoid_samples(mutates: bool) -> tuple[Sample, ...]:
    return (
        *on_layouts(mutates, lambda t, x: arguments(x)),
        Sample("zero_dim", lambda t: arguments(t())),
        Sample("empty", lambda t: arguments(t(0))),
        Sample("saturated", lambda t: arguments(t(5, 7, scale=100.0)), large=True),
        Sample("large", lambda t: arguments(t(517, 1031)), large=True),
        Sample("large_strided", lambda t: arguments(t(1031, 517, view=Tensor.t)), large=True),
    )


SIGMOID_ERRORS = dtype_errors("x", lambda t, d: arguments(t(5, 7, dtype=d)))

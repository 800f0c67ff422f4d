"""References, samples and error inputs of square_matmul, gate and glu, for `op_db.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from samples import (
    ZERO_DIM,
    Arguments,
    ErrorInput,
    Make,
    Sample,
    arguments,
    dtype_errors,
    every_second_column,
    every_third_row,
    match_errors,
    on_layouts,
    swapped,
    wide,
)
from torch import Tensor

# --- square_matmul ---------------------------------------------------------------------------------------------------


def square_matmul_reference(a: Tensor, b: Tensor, *, transpose_b: bool = False) -> Tensor:
    return a @ (b.mT if transpose_b else b)


def _overlapping(t: Make, rows: int, n: int, start: int, transpose_b: bool) -> Arguments:
    a = t(rows, n, scale=0.5)
    return arguments(a, a[start : start + n], transpose_b=transpose_b)


def _itself(t: Make, n: int, transpose_b: bool) -> Arguments:
    a = t(n, n, scale=0.5)
    return arguments(a, a, transpose_b=transpose_b)


def _batch_first(base: Tensor) -> Tensor:
    return base.permute(2, 0, 1)


def _column_blocks(base: Tensor) -> Tensor:
    """The left and the right half of the columns, as a batch."""
    return base.unflatten(-1, (2, -1)).transpose(0, 1)


def square_matmul_samples(mutates: bool, tb: bool) -> tuple[Sample, ...]:
    def pair(a: Callable[[Make], Tensor], b: Callable[[Make], Tensor]) -> Callable[[Make], Arguments]:
        return lambda t: arguments(a(t), b(t), transpose_b=tb)

    def matrix(t: Make) -> Tensor:
        return t(5, 6)

    samples = (
        *on_layouts(mutates, lambda t, a: arguments(a, t(a.shape[-1], a.shape[-1]), transpose_b=tb)),
        Sample("transposed_b", pair(matrix, lambda t: t(6, 6, view=Tensor.t))),
        Sample("expanded_b", pair(matrix, lambda t: t(1, 6, view=lambda v: v.expand(6, 6)))),
        Sample("strided_b", pair(matrix, lambda t: t(18, 6, view=every_third_row))),
        Sample("zero_in", pair(lambda t: t(5, 0), lambda t: t(0, 0))),
        Sample("batch", pair(lambda t: t(3, 4, 6), lambda t: t(3, 6, 6))),
        Sample("batch_of_two_dims", pair(lambda t: t(2, 3, 4, 5), lambda t: t(2, 3, 5, 5))),
        Sample("batch_of_one", pair(lambda t: t(1, 4, 6), lambda t: t(1, 6, 6))),
        Sample("batch_last", pair(lambda t: t(6, 4, 3, view=swapped), lambda t: t(6, 6, 3, view=_batch_first))),
        Sample("batch_in_columns", pair(lambda t: t(4, 12, view=_column_blocks), lambda t: t(2, 6, 6))),
        Sample(
            "batch_of_one_matrix", pair(lambda t: t(3, 4, 6), lambda t: t(1, 6, 6, view=lambda b: b.expand(3, 6, 6)))
        ),
        Sample("no_batch", pair(lambda t: t(0, 4, 6), lambda t: t(0, 6, 6))),
        Sample("batch_of_no_rows", pair(lambda t: t(3, 0, 6), lambda t: t(3, 6, 6))),
        Sample("batch_b_is_a", lambda t: arguments(*[t(3, 6, 6)] * 2, transpose_b=tb), leaves=False),
        Sample("many_matrices", pair(lambda t: t(517, 37, 61), lambda t: t(517, 61, 61, scale=0.3)), large=True),
        Sample("a_large_matrix", pair(lambda t: t(1, 20_011, 61), lambda t: t(1, 61, 61, scale=0.3)), large=True),
        Sample("b_inside_a", lambda t: _overlapping(t, 11, 5, 3, tb), leaves=False),
        Sample("b_is_a", lambda t: _itself(t, 7, tb), leaves=False),
        Sample("many_rows", pair(lambda t: t(40_009, 61), lambda t: t(61, 61, scale=0.3)), large=True),
        Sample("b_inside_many_rows", lambda t: _overlapping(t, 20_011, 61, 19_950, tb), leaves=False, large=True),
        Sample("wide", pair(lambda t: t(37, 1031), lambda t: t(1031, 1031, scale=0.05)), large=True),
    )
    if tb:
        return tuple(replace(s, name=s.name + "_tb") for s in samples)
    return (*samples, Sample("default", lambda t: arguments(t(5, 7), t(7, 7))))


_B = "expected b of shape ({0}, {0}) to match a, got {1}"

_BATCH = "expected b of shape (4, {0}, {0}) to match a, got {1}"

SQUARE_MATMUL_ERRORS = (
    ErrorInput("zero_dim_a", lambda t: arguments(t(), t(7, 7)), ZERO_DIM.format("a")),
    ErrorInput("zero_dim_b", lambda t: arguments(t(5, 7), t()), _B.format(7, "()")),
    ErrorInput("rank_b_1", lambda t: arguments(t(5, 7), t(7)), _B.format(7, "(7,)")),
    ErrorInput("rank_b_3", lambda t: arguments(t(5, 7), t(5, 7, 7)), _B.format(7, "(5, 7, 7)")),
    ErrorInput("batch_size", lambda t: arguments(t(4, 5, 7), t(3, 7, 7)), _BATCH.format(7, "(3, 7, 7)")),
    ErrorInput("batch_size_1", lambda t: arguments(t(4, 5, 7), t(1, 7, 7)), _BATCH.format(7, "(1, 7, 7)")),
    ErrorInput("batch_rank", lambda t: arguments(t(4, 5, 7), t(2, 4, 7, 7)), _B.format(7, "(2, 4, 7, 7)")),
    ErrorInput("batch_not_square", lambda t: arguments(t(4, 5, 7), t(4, 6, 7)), _BATCH.format(7, "(4, 6, 7)")),
    ErrorInput("batch_or_matrix", lambda t: arguments(t(4, 5, 7), t(6, 6)), _B.format(7, "(6, 6)")),
    ErrorInput("inner_size", lambda t: arguments(t(5, 7), t(6, 6)), _B.format(7, "(6, 6)")),
    ErrorInput("b_not_square", lambda t: arguments(t(5, 7), t(7, 6)), _B.format(7, "(7, 6)")),
    ErrorInput("b_not_square_tb", lambda t: arguments(t(5, 7), t(6, 7), transpose_b=True), _B.format(7, "(6, 7)")),
    ErrorInput("inner_size_1", lambda t: arguments(t(1), t(7, 7)), _B.format(1, "(7, 7)")),
    *dtype_errors("a", lambda t, d: arguments(t(5, 7, dtype=d), t(7, 7, dtype=d))),
    *match_errors("b", "a", lambda t, **other: arguments(t(5, 7), t(7, 7, **other))),
)

# --- what gate and glu share -----------------------------------------------------------------------------------------


def _linear(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    return F.linear(x.to(w.dtype), w, b)


_W = "expected w of shape (out, in) with in = {} to match x, got {}"
_WEIGHT_DTYPE = "expected w of dtype float32, float16 or bfloat16 to match x, got {}"
_WEIGHT_SIZES: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("rank_w_1", (7,)),
    ("rank_w_3", (1, 3, 7)),
    ("zero_dim_w", ()),
    ("inner_size", (3, 6)),
    ("w_not_transposed", (7, 3)),
)
_BIAS_SIZES: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("size", (4,)),
    ("size_1", (1,)),
    ("rank", (1, 3)),
    ("zero_dim", ()),
)


def _changed(build: Callable[..., Arguments], name: str, *shape: int, **kwargs: Any) -> Callable[[Make], Arguments]:
    """The arguments with one of another shape, dtype or device."""
    return lambda t: build(t, **{name: t(*shape, **kwargs)})


def _bias_errors(error: str, build: Callable[..., Arguments], name: str, weight: str) -> tuple[ErrorInput, ...]:
    text = f"expected {name} of shape (3,) to match {weight}, got "
    return tuple(
        ErrorInput(f"{error}_{size}", _changed(build, name, *shape), f"{text}{shape}") for size, shape in _BIAS_SIZES
    )


def _linear_errors(build: Callable[..., Arguments]) -> tuple[ErrorInput, ...]:
    """Of x (5, 7), w (3, 7) and b (3,); `build` gets what to change of them."""

    return (
        ErrorInput("zero_dim_x", lambda t: build(t, x=t()), ZERO_DIM.format("x")),
        *(ErrorInput(name, _changed(build, "w", *shape), _W.format(7, shape)) for name, shape in _WEIGHT_SIZES),
        *_bias_errors("bias", build, "b", "w"),
        ErrorInput("w_float64", lambda t: build(t, w=t(3, 7, dtype=torch.float64)), _WEIGHT_DTYPE.format("float64")),
        ErrorInput("w_int64", lambda t: build(t, w=t(3, 7, dtype=torch.int64)), _WEIGHT_DTYPE.format("int64")),
        ErrorInput(
            "w_wider",
            lambda t: build(t, x=t(5, 7, dtype=torch.bfloat16)),
            "expected w of dtype bfloat16 to match x, got float32",
        ),
        ErrorInput(
            "w_elsewhere",
            lambda t: build(t, w=t(3, 7, device=t.elsewhere())),
            "expected w on device {device} to match x, got {elsewhere}",
        ),
        *match_errors("b", "w", lambda t, **other: build(t, b=t(3, **other))),
    )


# --- gate ------------------------------------------------------------------------------------------------------------


def gate_reference(v: Tensor, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    return v * torch.sigmoid(_linear(x, w, b).to(v.dtype))


def _gate_of(t: Make, v: Tensor, bias: bool = True) -> Arguments:
    out = v.shape[-1]
    return arguments(v, t(*v.shape[:-1], 6), t(out, 6), *([t(out)] if bias else []))


def _gate_inside(t: Make, rows: int, start: int) -> Arguments:
    """x is another part of v's memory."""
    base = t(rows + start, 7)
    return arguments(base[:rows], base[start:], t(7, 7), t(7))


def _gate_itself(t: Make, rows: int) -> Arguments:
    v = t(rows, 7)
    return arguments(v, v, t(7, 7), t(7))


def _gate_by_its_rows(t: Make) -> Arguments:
    """w and b are parts of v."""
    v = t(20, 7)
    return arguments(v, t(20, 7), v[3:10], v[12])


def gate_samples(mutates: bool) -> tuple[Sample, ...]:
    return (
        *on_layouts(mutates, _gate_of),
        Sample("no_bias", lambda t: _gate_of(t, t(5, 3), bias=False)),
        Sample("none_bias", lambda t: arguments(t(7), t(3), t(7, 3), None)),
        Sample("transposed_x", lambda t: arguments(t(5, 3), t(7, 5, view=Tensor.t), t(3, 7), t(3))),
        Sample("permuted_x", lambda t: arguments(t(3, 4, 5), t(7, 4, 3, view=swapped), t(5, 7), t(5))),
        Sample("transposed_w", lambda t: arguments(t(5, 3), t(5, 7), t(7, 3, view=Tensor.t), t(3))),
        Sample("strided_w", lambda t: arguments(t(5, 3), t(5, 7), t(9, 7, view=every_third_row), t(3))),
        Sample("strided_bias", lambda t: arguments(t(5, 3), t(5, 7), t(3, 7), t(6, view=every_second_column))),
        Sample("expanded_x", lambda t: arguments(t(5, 3), t(1, 7, view=lambda x: x.expand(5, 7)), t(3, 7), t(3))),
        Sample("expanded_bias", lambda t: arguments(t(5, 3), t(5, 7), t(3, 7), t(1, view=lambda b: b.expand(3)))),
        Sample("zero_in", lambda t: arguments(t(5, 3), t(5, 0), t(3, 0), t(3))),
        Sample("zero_in_no_bias", lambda t: arguments(t(5, 3), t(5, 0), t(3, 0))),
        Sample("zero_out", lambda t: arguments(t(5, 0), t(5, 7), t(0, 7), t(0))),
        Sample("float32_x", lambda t: arguments(t(5, 3), wide(t, 5, 7), t(3, 7), t(3))),
        Sample("float32_v", lambda t: arguments(wide(t, 5, 3), t(5, 7), t(3, 7), t(3))),
        Sample("float32_both", lambda t: arguments(wide(t, 2, 5, 3), wide(t, 2, 5, 7), t(3, 7))),
        Sample("x_is_v", lambda t: _gate_itself(t, 5), leaves=False),
        Sample("x_overlaps_v", lambda t: _gate_inside(t, 11, 3), leaves=False),
        Sample("w_and_b_inside_v", _gate_by_its_rows, leaves=False),
        Sample("x_is_tall_v", lambda t: _gate_itself(t, 20_011), leaves=False, large=True),
        Sample("x_overlaps_tall_v", lambda t: _gate_inside(t, 20_011, 1009), leaves=False, large=True),
        Sample("tall", lambda t: arguments(t(40_009, 61), t(40_009, 19), t(61, 19), t(61)), large=True),
        Sample("tall_mixed", lambda t: arguments(wide(t, 9001, 61), wide(t, 9001, 19), t(61, 19), t(61)), large=True),
        Sample("wide", lambda t: arguments(t(67, 4099), t(67, 61, scale=0.3), t(4099, 61), t(4099)), large=True),
        Sample("deep", lambda t: arguments(t(131, 257), t(131, 1031, scale=0.1), t(257, 1031), t(257)), large=True),
    )


def _gate_arguments(t: Make, **changed: Tensor) -> Arguments:
    return arguments(*({"v": t(5, 3), "x": t(5, 7), "w": t(3, 7), "b": t(3)} | changed).values())


def _v_error(name: str, text: str, build: Callable[[Make], Arguments]) -> ErrorInput:
    return ErrorInput(f"v_{name}", build, f"expected v {text}")


_V = "of shape (5, 3) to match x and w, got {}"

GATE_ERRORS = (
    *_linear_errors(_gate_arguments),
    *dtype_errors("x", lambda t, d: arguments(t(5, 3, dtype=d), t(5, 7, dtype=d), t(3, 7, dtype=d), t(3, dtype=d))),
    _v_error("rows", _V.format("(4, 3)"), lambda t: _gate_arguments(t, v=t(4, 3))),
    _v_error("rows_1", _V.format("(1, 3)"), lambda t: _gate_arguments(t, v=t(1, 3))),
    _v_error("columns", _V.format("(5, 7)"), lambda t: _gate_arguments(t, v=t(5, 7))),
    _v_error("rank", _V.format("(1, 5, 3)"), lambda t: _gate_arguments(t, v=t(1, 5, 3))),
    _v_error("zero_dim", _V.format("()"), lambda t: _gate_arguments(t, v=t())),
    *(
        _v_error(name, f"of dtype float32 to match w, got {name}", _changed(_gate_arguments, "v", 5, 3, dtype=d))
        for name, d in (("float64", torch.float64), ("bfloat16", torch.bfloat16), ("int64", torch.int64))
    ),
    _v_error(
        "other_half",
        "of dtype bfloat16 or float32 to match w, got float16",
        lambda t: arguments(t(5, 3, dtype=torch.float16), t(5, 7), t(3, 7, dtype=torch.bfloat16)),
    ),
    _v_error(
        "elsewhere",
        "on device {device} to match w, got {elsewhere}",
        lambda t: _gate_arguments(t, v=t(5, 3, device=t.elsewhere())),
    ),
)

# --- glu -------------------------------------------------------------------------------------------------------------


def glu_reference(
    x: Tensor,
    w: Tensor,
    wg: Tensor,
    b: Tensor | None = None,
    bg: Tensor | None = None,
    *,
    activation: str = "sigmoid",
) -> Tensor:
    u = _linear(x, wg, bg)
    return _linear(x, w, b) * (F.silu(u) if activation == "silu" else torch.sigmoid(u))


def _glu_of(t: Make, x: Tensor, **kwargs: str) -> Arguments:
    return arguments(x, t(3, x.shape[-1]), t(3, x.shape[-1]), t(3), t(3), **kwargs)


def _packed(t: Make, activation: str) -> Arguments:
    """The halves of one weight and of one bias."""
    return arguments(t(5, 7), *t(6, 7).chunk(2), *t(6).chunk(2), activation=activation)


def _side_by_side(t: Make, activation: str) -> Arguments:
    """Halves of a row: the next one of each is in no half."""
    weights, biases = t(2, 14)[:1], t(2, 2)[:1]
    return arguments(t(5, 7), *weights.chunk(2, 1), *biases.squeeze(0).chunk(2), activation=activation)


def glu_samples(activation: str) -> tuple[Sample, ...]:
    kwargs = {"activation": activation}
    samples = (
        *on_layouts(False, lambda t, x: _glu_of(t, x, **kwargs)),
        Sample("no_bias", lambda t: arguments(t(5, 7), t(3, 7), t(3, 7), **kwargs)),
        Sample("value_bias", lambda t: arguments(t(5, 7), t(3, 7), t(3, 7), t(3), **kwargs)),
        Sample("gate_bias", lambda t: arguments(t(5, 7), t(3, 7), t(3, 7), None, t(3), **kwargs)),
        Sample("transposed_w", lambda t: arguments(t(5, 7), t(7, 3, view=Tensor.t), t(3, 7), t(3), t(3), **kwargs)),
        Sample("strided_wg", lambda t: arguments(t(5, 7), t(3, 7), t(9, 7, view=every_third_row), **kwargs)),
        Sample("zero_in", lambda t: arguments(t(5, 0), t(3, 0), t(3, 0), t(3), t(3), **kwargs)),
        Sample("zero_out", lambda t: arguments(t(5, 7), t(0, 7), t(0, 7), t(0), t(0), **kwargs)),
        Sample("float32_x", lambda t: arguments(wide(t, 2, 5, 7), t(3, 7), t(3, 7), t(3), t(3), **kwargs)),
        Sample("packed", lambda t: _packed(t, activation), leaves=False),
        Sample("side_by_side", lambda t: _side_by_side(t, activation), leaves=False),
        Sample("same_weight", lambda t: arguments(t(5, 7), *[t(3, 7)] * 2, **kwargs), leaves=False),
        Sample("tall", lambda t: arguments(t(40_009, 19), t(61, 19), t(61, 19), t(61), t(61), **kwargs), large=True),
        Sample("tall_mixed", lambda t: arguments(wide(t, 9001, 19), t(61, 19), t(61, 19), **kwargs), large=True),
        Sample("wide", lambda t: arguments(t(67, 61, scale=0.3), t(4099, 61), t(4099, 61), **kwargs), large=True),
        Sample("deep", lambda t: arguments(t(131, 1031, scale=0.1), t(257, 1031), t(257, 1031), **kwargs), large=True),
    )
    if activation != "sigmoid":
        return tuple(replace(s, name=f"{s.name}_{activation}") for s in samples)
    return (*samples, Sample("default", lambda t: arguments(t(5, 7), t(3, 7), t(3, 7), t(3), t(3))))


def _glu_arguments(t: Make, **changed: Tensor) -> Arguments:
    given = {"x": t(5, 7), "w": t(3, 7), "wg": t(3, 7), "b": t(3), "bg": t(3)} | changed
    return arguments(*given.values())


_WG = "expected wg of shape (3, 7) to match w, got {}"

GLU_ERRORS = (
    *_linear_errors(_glu_arguments),
    *dtype_errors("x", lambda t, d: arguments(t(5, 7, dtype=d), t(3, 7, dtype=d), t(3, 7, dtype=d))),
    ErrorInput("wg_rows", lambda t: _glu_arguments(t, wg=t(4, 7)), _WG.format("(4, 7)")),
    ErrorInput("wg_rows_1", lambda t: _glu_arguments(t, wg=t(1, 7)), _WG.format("(1, 7)")),
    ErrorInput("wg_columns", lambda t: _glu_arguments(t, wg=t(3, 6)), _WG.format("(3, 6)")),
    ErrorInput("wg_rank", lambda t: _glu_arguments(t, wg=t(7)), _WG.format("(7,)")),
    *match_errors("wg", "w", lambda t, **other: _glu_arguments(t, wg=t(3, 7, **other))),
    *_bias_errors("gate_bias", _glu_arguments, "bg", "wg"),
    *match_errors("bg", "w", lambda t, **other: _glu_arguments(t, bg=t(3, **other))),
    ErrorInput(
        "activation",
        lambda t: arguments(t(5, 7), t(3, 7), t(3, 7), activation="relu"),
        "expected activation sigmoid or silu, got relu",
        ValueError,
    ),
)

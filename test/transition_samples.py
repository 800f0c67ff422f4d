"""Reference, samples and error inputs of transition, for `op_db.py`."""

from __future__ import annotations

import functools
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
    overlap_errors,
    swapped,
    wide,
)
from torch import Tensor

TRANSITION_KEYWORDS = (
    *("norm_weight", "norm_bias", "gate_weight", "gate_bias"),
    *("up_weight", "up_bias", "down_weight", "down_bias", "eps"),
)


def transition_arguments(x: Tensor, *rest: Any) -> Arguments:
    """By name, of which the last may be left out."""
    return arguments(x, **dict(zip(TRANSITION_KEYWORDS, rest)))  # noqa: B905


def transition_reference(x: Tensor, **parameters: Any) -> Tensor:
    return _written_out(x, layer_norm, F.silu, **parameters)


def transition_smooth(x: Tensor, **parameters: Any) -> Tensor:
    """ATen's third derivative of a layer norm is wrong: it takes the moments for constants. That of silu has no forward
    mode."""
    return _written_out(x, normalized, lambda u: u * torch.sigmoid(u), **parameters)


def transition_reference_(x: Tensor, **parameters: Any) -> Tensor:
    return x + transition_reference(x, **parameters).to(x.dtype)


def transition_smooth_(x: Tensor, **parameters: Any) -> Tensor:
    return x + transition_smooth(x, **parameters).to(x.dtype)


def _written_out(
    x: Tensor,
    norm: Callable[..., Tensor],
    silu: Callable[[Tensor], Tensor],
    *,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    gate_weight: Tensor,
    gate_bias: Tensor | None = None,
    up_weight: Tensor,
    up_bias: Tensor | None = None,
    down_weight: Tensor,
    down_bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    z = norm(*promoted(x, norm_weight, norm_bias), eps).to(gate_weight.dtype)
    h = silu(F.linear(z, gate_weight, gate_bias)) * F.linear(z, up_weight, up_bias)
    return F.linear(h, down_weight, down_bias)


def promoted(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """In the widest dtype of the three."""
    given = [t for t in (weight, bias) if t is not None]
    x = x.to(functools.reduce(torch.promote_types, (t.dtype for t in given), x.dtype))
    weight, bias = (None if t is None else t.to(x.dtype) for t in (weight, bias))
    return x, weight, bias


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def normalized(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    var, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
    y = (x - mean) * torch.rsqrt(var + eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


# --- samples ---------------------------------------------------------------------------------------------------------


def _weights(t: Make, c: int, hidden: int = 6, scale: float = 0.6) -> dict[str, Tensor]:
    return {
        "gate_weight": t(hidden, c, scale=scale),
        "up_weight": t(hidden, c, scale=scale),
        "down_weight": t(c, hidden, scale=scale),
    }


def _norm(t: Make, c: int) -> dict[str, Tensor]:
    return {"norm_weight": t(c), "norm_bias": t(c)}


def _biases(t: Make, c: int, hidden: int = 6) -> dict[str, Tensor]:
    return {"gate_bias": t(hidden), "up_bias": t(hidden), "down_bias": t(c)}


def _of(t: Make, x: Tensor) -> Arguments:
    return arguments(x, **_norm(t, x.shape[-1]), **_weights(t, x.shape[-1]))


def _large(t: Make, x: Tensor, hidden: int) -> Arguments:
    c = x.shape[-1]
    return arguments(x, **_norm(t, c), **_weights(t, c, hidden, min(c, hidden) ** -0.5), **_biases(t, c, hidden))


def _float32_norm(t: Make, x: Tensor, *names: str, hidden: int = 6) -> Arguments:
    """These parameters of the norm are float32 beside weights of 16 bits."""
    args, kwargs = _large(t, x, hidden)
    return args, kwargs | {name: wide(t, x.shape[-1]) for name in names}


def _inside_x(t: Make, rows: int) -> Arguments:
    """Parameters are rows of x."""
    x = t(rows, 6, scale=0.5)
    return arguments(x, norm_weight=x[1], norm_bias=x[2], gate_weight=x[3:7], up_weight=x[-4:], down_weight=t(6, 4))


def _itself(t: Make) -> Arguments:
    x = t(6, 6, scale=0.5)
    return arguments(x, gate_weight=x, up_weight=x.t(), down_weight=x, down_bias=x[5])


def _strided(t: Make) -> Arguments:
    return arguments(
        t(5, 14, view=every_second_column),
        norm_weight=t(14, view=every_second_column),
        norm_bias=t(1, view=lambda v: v.expand(7)),
        gate_weight=t(18, 7, view=every_third_row),
        up_weight=t(7, 6, view=Tensor.t),
        up_bias=t(12, view=every_second_column),
        down_weight=t(7, 12, view=every_second_column),
    )


def transition_samples(mutates: bool) -> tuple[Sample, ...]:
    return (
        *on_layouts(mutates, _of),
        Sample("no_bias", lambda t: arguments(t(5, 7), **_weights(t, 7))),
        Sample("biases", lambda t: arguments(t(5, 7), **_norm(t, 7), **_weights(t, 7), **_biases(t, 7))),
        Sample("norm_weight", lambda t: arguments(t(5, 7), norm_weight=t(7), **_weights(t, 7), up_bias=t(6))),
        Sample("norm_bias", lambda t: arguments(t(5, 7), norm_bias=t(7), **_weights(t, 7), gate_bias=t(6))),
        Sample("eps", lambda t: arguments(t(5, 7, scale=0.1), **_weights(t, 7), down_bias=t(7), eps=0.5)),
        Sample("strided_parameters", _strided),
        Sample("permuted_x", lambda t: _of(t, t(7, 4, 3, view=swapped))),
        Sample("zero_in", lambda t: arguments(t(5, 0), **_weights(t, 0))),
        Sample("zero_hidden", lambda t: arguments(t(5, 7), **_weights(t, 7, 0), **_biases(t, 7, 0))),
        Sample("float32_x", lambda t: _of(t, wide(t, 2, 5, 7))),
        Sample("float32_norm", lambda t: _float32_norm(t, t(2, 5, 7), "norm_weight", "norm_bias")),
        Sample("float32_norm_weight", lambda t: _float32_norm(t, t(2, 5, 7), "norm_weight")),
        Sample("float32_all_but_weights", lambda t: _float32_norm(t, wide(t, 5, 7), "norm_weight", "norm_bias")),
        Sample("parameters_inside_x", lambda t: _inside_x(t, 11), leaves=False),
        Sample("x_everywhere", _itself, leaves=False),
        Sample("parameters_inside_tall_x", lambda t: _inside_x(t, 9001), leaves=False, large=True),
        Sample("tall", lambda t: _large(t, t(9001, 19), 61), large=True),
        Sample("tall_mixed", lambda t: _large(t, wide(t, 3, 1501, 24), 64), large=True),
        Sample("tall_strided", lambda t: _large(t, t(19, 2003, view=Tensor.t), 61), large=True),
        # As the kernel for compute capability 9.0 takes them.
        Sample("aligned", lambda t: _large(t, t(700, 128), 512), large=True),
        Sample(
            "aligned_float32_norm",
            lambda t: _float32_norm(t, t(700, 128), "norm_weight", "norm_bias", hidden=512),
            large=True,
        ),
        Sample("aligned_in_part", lambda t: _large(t, t(3, 331, 72), 264), large=True),
        Sample("wide", lambda t: _large(t, t(67, 61), 1031), large=True),
        Sample("deep", lambda t: _large(t, t(131, 517), 67), large=True),
    )


# --- errors ----------------------------------------------------------------------------------------------------------


def _arguments(t: Make, **changed: Any) -> Arguments:
    given = {"x": t(5, 7), **_norm(t, 7), **_weights(t, 7), **_biases(t, 7)} | changed
    return arguments(given.pop("x"), **given)


def _of_dtype(t: Make, dtype: torch.dtype) -> Arguments:
    return _arguments(
        t,
        x=t(5, 7, dtype=dtype),
        **{name: t(*shape, dtype=dtype) for name, shape, _ in _SHAPES},
        gate_weight=t(6, 7, dtype=dtype),
    )


_GATE = "expected gate_weight of shape (hidden, c) with c = 7 to match x, got {}"
# Shapes and what they follow from, of all parameters but gate_weight.
_SHAPES: tuple[tuple[str, tuple[int, ...], str], ...] = (
    ("norm_weight", (7,), "x"),
    ("norm_bias", (7,), "x"),
    ("gate_bias", (6,), "gate_weight"),
    ("up_weight", (6, 7), "gate_weight"),
    ("up_bias", (6,), "gate_weight"),
    ("down_weight", (7, 6), "gate_weight"),
    ("down_bias", (7,), "x"),
)


def _shape_errors(name: str, shape: tuple[int, ...], reason: str) -> tuple[ErrorInput, ...]:
    others: tuple[tuple[int, ...], ...] = ((5, *shape[1:]), (1, *shape[1:]), (1, *shape), ())
    if len(shape) == 2:
        others = (*others, shape[::-1])
    return tuple(
        ErrorInput(
            f"{name}_{number}",
            lambda t, other=other: _arguments(t, **{name: t(*other)}),  # type: ignore[misc]
            f"expected {name} of shape {shape} to match {reason}, got {other}",
        )
        for number, other in enumerate(others)
    )


def _parameter_errors(name: str, shape: tuple[int, ...]) -> tuple[ErrorInput, ...]:
    return match_errors(name, "gate_weight", lambda t, **other: _arguments(t, **{name: t(*shape, **other)}))


TRANSITION_ERRORS = (
    ErrorInput("zero_dim_x", lambda t: _arguments(t, x=t()), ZERO_DIM.format("x")),
    *dtype_errors("gate_weight", _of_dtype),
    *(
        ErrorInput(
            f"gate_weight_{number}",
            lambda t, shape=shape: _arguments(t, gate_weight=t(*shape)),  # type: ignore[misc]
            _GATE.format(shape),
        )
        for number, shape in enumerate(((7,), (1, 6, 7), (), (6, 5), (7, 6)))
    ),
    ErrorInput(
        "gate_weight_float64",
        lambda t: _arguments(t, gate_weight=t(6, 7, dtype=torch.float64)),
        "expected x of dtype float64 to match gate_weight, got float32",
    ),
    ErrorInput(
        "x_float64",
        lambda t: _arguments(t, x=t(5, 7, dtype=torch.float64)),
        "expected x of dtype float32 to match gate_weight, got float64",
    ),
    ErrorInput(
        "x_other_half",
        lambda t: _arguments(t, x=t(5, 7, dtype=torch.float16), gate_weight=t(6, 7, dtype=torch.bfloat16)),
        "expected x of dtype bfloat16 or float32 to match gate_weight, got float16",
    ),
    ErrorInput(
        "gate_weight_elsewhere",
        lambda t: _arguments(t, gate_weight=t(6, 7, device=t.elsewhere())),
        "expected x on device {elsewhere} to match gate_weight, got {device}",
    ),
    *(error for name, shape, reason in _SHAPES for error in _shape_errors(name, shape, reason)),
    *(error for name, shape, _ in _SHAPES for error in _parameter_errors(name, shape)),
)


def _with_weights(build: Callable[[Make], Arguments]) -> Callable[[Make], Arguments]:
    return lambda t: arguments(*build(t)[0], **_weights(t, 4))


TRANSITION_OVERLAPS = tuple(
    replace(error, build=_with_weights(error.build)) for error in overlap_errors("x", lambda t, rows: [])
)

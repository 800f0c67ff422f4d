"""References, samples and error inputs of the products of eight bits, for `op_db.py`.

The dtype of a sample is that of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from samples import (
    ZERO_DIM,
    Arguments,
    ErrorInput,
    Make,
    Sample,
    arguments,
    dtype_name,
    every_second_column,
    every_third_row,
)
from torch import Tensor

EIGHT = torch.float8_e4m3fn
RESULTS = (torch.float32, torch.float16, torch.bfloat16)
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"sigmoid": torch.sigmoid, "silu": torch.nn.functional.silu}

# --- references: in float32, or in float64 if the operands are --------------------------------------------------------


def scaled_linear(x: Tensor, w: Tensor, scale_x: Tensor, scale_w: Tensor, b: Tensor | None) -> Tensor:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    z = (x.to(wide) @ w.to(wide).mT) * scale_x * scale_w.reshape(-1)
    return z if b is None else z + b.to(wide)


def _rounded(y: Tensor, dtype: torch.dtype | None) -> Tensor:
    return y if y.dtype == torch.float64 else y.to(dtype or torch.bfloat16)


def dense_scaled_reference(
    x: Tensor,
    w: Tensor,
    scale_x: Tensor,
    scale_w: Tensor,
    b: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    return _rounded(torch.sigmoid(scaled_linear(x, w, scale_x, scale_w, b)), out_dtype)


def gate_scaled_reference(
    v: Tensor, x: Tensor, w: Tensor, scale_x: Tensor, scale_w: Tensor, b: Tensor | None = None
) -> Tensor:
    return _rounded(v * torch.sigmoid(scaled_linear(x, w, scale_x, scale_w, b)), v.dtype)


def glu_scaled_reference(
    x: Tensor,
    w: Tensor,
    wg: Tensor,
    scale_x: Tensor,
    scale_w: Tensor,
    scale_wg: Tensor,
    b: Tensor | None = None,
    bg: Tensor | None = None,
    *,
    activation: str = "sigmoid",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    gate = ACTIVATIONS[activation](scaled_linear(x, wg, scale_x, scale_wg, bg))
    return _rounded(scaled_linear(x, w, scale_x, scale_w, b) * gate, out_dtype)


# --- arguments by their names -----------------------------------------------------------------------------------------


def _eight(t: Make, *shape: int, scale: float = 20.0, **kwargs: Any) -> Tensor:
    return t(*shape, dtype=EIGHT, scale=scale, **kwargs)


def _float32(t: Make, *shape: int, **kwargs: Any) -> Tensor:
    return t(*shape, dtype=torch.float32, **kwargs)


def _given(t: Make, op: str, leading: tuple[int, ...] = (5,), inner: int = 7, out: int = 3) -> dict[str, Any]:
    """A scale for each row, and a bias in the dtype of the result."""
    rows, of_scale_w = (*leading, 1), max(inner, 1) ** -0.5 / 50
    given: dict[str, Any] = {"v": t(*leading, out)} if op == "gate" else {}
    given |= {"x": _eight(t, *leading, inner), "scale_x": _float32(t, *rows, scale=1 / 20)}
    for part in ("", "g") if op == "glu" else ("",):
        given[f"w{part}"] = _eight(t, out, inner, scale=50.0)
        given[f"scale_w{part}"] = _float32(t, 1, out, scale=of_scale_w)
        given[f"b{part}"] = t(out)
    return given if op == "gate" else given | {"out_dtype": t.dtype}


_ORDER = {
    "dense": ("x", "w", "scale_x", "scale_w", "b"),
    "gate": ("v", "x", "w", "scale_x", "scale_w", "b"),
    "glu": ("x", "w", "wg", "scale_x", "scale_w", "scale_wg", "b", "bg"),
}


def _passed(op: str, given: dict[str, Any]) -> Arguments:
    """By position, but those that are passed by name alone."""
    rest = {name: value for name, value in given.items() if name not in _ORDER[op] and value is not None}
    return arguments(*(given.get(name) for name in _ORDER[op]), **rest)


def scaled_samples(op: str) -> tuple[Sample, ...]:
    def sample(name: str, change: Callable[[Make], dict[str, Any]] = lambda t: {}, **sizes: Any) -> Sample:
        return Sample(name, lambda t: _passed(op, _given(t, op, **sizes) | change(t)))

    def one_scale(t: Make, *names: str) -> dict[str, Tensor]:
        both = {"scale_x": _float32(t, 1, scale=1 / 20), "scale_w": _float32(t, scale=1 / 50)}
        return {name: both[name] for name in names}

    optional = ["b", "bg"] if op == "glu" else ["b"]
    samples = [
        sample("matrix"),
        sample("vector", leading=()),
        sample("four_dims", leading=(2, 3, 1)),
        sample("one_by_one", leading=(1,), inner=1, out=1),
        sample("zero_rows", leading=(0,)),
        sample("zero_rows_inside", leading=(2, 0)),
        sample("zero_in", inner=0),
        sample("zero_out", out=0),
        sample("no_bias", lambda t: dict.fromkeys(optional)),
        sample("float32_bias", lambda t: {name: _float32(t, 3) for name in optional}),
        sample("one_scale", lambda t: one_scale(t, "scale_x", "scale_w")),
        sample("one_scale_x", lambda t: one_scale(t, "scale_x")),
        sample("one_scale_w", lambda t: one_scale(t, "scale_w")),
        sample("transposed_x", lambda t: {"x": _eight(t, 7, 5, view=Tensor.t)}),
        sample("transposed_w", lambda t: {"w": _eight(t, 7, 3, view=Tensor.t)}),
        sample("strided_columns", lambda t: {"x": _eight(t, 5, 14, view=every_second_column)}),
        sample("strided_rows", lambda t: {"w": _eight(t, 9, 7, view=every_third_row)}),
        sample("offset", lambda t: {"x": _eight(t, 36, view=lambda v: v[1:].view(5, 7))}),
        sample("expanded_x", lambda t: {"x": _eight(t, 1, 7, view=lambda v: v.expand(5, 7))}),
        sample("strided_scale_x", lambda t: {"scale_x": _float32(t, 5, 2, view=lambda v: v[:, 1:])}),
        sample("strided_scale_w", lambda t: {"scale_w": _float32(t, 1, 6, view=every_second_column)}),
        sample("expanded_scale_x", lambda t: {"scale_x": _float32(t, 1, 1, view=lambda v: v.expand(5, 1))}),
        sample("strided_bias", lambda t: {"b": t(6, view=every_second_column)}),
    ]
    if op == "gate":
        samples += [
            sample("transposed_v", lambda t: {"v": t(3, 5, view=Tensor.t)}),
            sample("expanded_v", lambda t: {"v": t(1, 3, view=lambda v: v.expand(5, 3))}),
            sample("offset_v", lambda t: {"v": t(16, view=lambda v: v[1:].view(5, 3))}),
        ]
    else:
        default = sample("default", lambda t: {"out_dtype": None} | {name: _float32(t, 3) for name in optional})
        samples += [default]
    if op == "glu":
        samples += [sample("matrix_silu", lambda t: {"activation": "silu"})]
    return tuple(samples)


# --- errors -----------------------------------------------------------------------------------------------------------


def scaled_errors(op: str) -> tuple[ErrorInput, ...]:
    """Sizes are those of `_given`, the result has the dtype of the sample (of errors, float32)."""

    def error(
        name: str, change: Callable[[Make], dict[str, Any]], text: str, kind: type[Exception] = RuntimeError
    ) -> ErrorInput:
        return ErrorInput(name, lambda t: _passed(op, _given(t, op) | change(t)), text, kind)

    def dtypes(name: str, wanted: str, dtypes: tuple[torch.dtype, ...], *shape: int) -> list[ErrorInput]:
        return [
            error(
                f"{name}_{dtype_name(d)}",
                lambda t, d=d: {name: t(*shape, dtype=d)},  # type: ignore[misc]
                f"expected {name} of dtype {wanted}, got {dtype_name(d)}",
            )
            for d in dtypes
        ]

    def elsewhere(name: str, match: str, make: Callable[..., Tensor]) -> ErrorInput:
        return error(
            f"{name}_elsewhere",
            lambda t: {name: make(t, device=t.elsewhere())},
            f"expected {name} on device {{device}} to match {match}, got {{elsewhere}}",
        )

    half, full, double = torch.float16, torch.float32, torch.float64
    of_w = "expected w of shape (out, in) with in = 7 to match x, got"
    of_scale_x = "expected scale_x of one element or of shape (5, 1) to match x, got"
    errors = [
        *dtypes("x", "float8_e4m3fn", (full, torch.float8_e5m2), 5, 7),
        error("zero_dim_x", lambda t: {"x": _eight(t)}, ZERO_DIM.format("x")),
        *dtypes("w", "float8_e4m3fn", (torch.bfloat16,), 3, 7),
        error("w_not_transposed", lambda t: {"w": _eight(t, 7, 3)}, f"{of_w} (7, 3)"),
        error("rank_w", lambda t: {"w": _eight(t, 7)}, f"{of_w} (7,)"),
        elsewhere("w", "x", lambda t, **on: _eight(t, 3, 7, **on)),
        *dtypes("scale_x", "float32", (torch.bfloat16,), 5, 1),
        error("scale_x_rank", lambda t: {"scale_x": _float32(t, 5)}, f"{of_scale_x} (5,)"),
        error("scale_x_rows", lambda t: {"scale_x": _float32(t, 6, 1)}, f"{of_scale_x} (6, 1)"),
        elsewhere("scale_x", "x", lambda t, **on: _float32(t, 1, **on)),
        *dtypes("scale_w", "float32", (double,)),
        error(
            "scale_w_transposed",
            lambda t: {"scale_w": _float32(t, 3, 1)},
            "expected scale_w of one element or of shape (1, 3) to match w, got (3, 1)",
        ),
        elsewhere("scale_w", "w", lambda t, **on: _float32(t, 1, **on)),
        *dtypes("b", "float32 to match the result", (half,), 3),
        error("bias_size", lambda t: {"b": t(7)}, "expected b of shape (3,) to match w, got (7,)"),
        elsewhere("b", "x", lambda t, **on: t(3, **on)),
    ]
    if op == "gate":
        return (
            *errors,
            *dtypes("v", "bfloat16, float16 or float32", (EIGHT, double), 5, 3),
            error("v_size", lambda t: {"v": t(5, 7)}, "expected v of shape (5, 3) to match x and w, got (5, 7)"),
            elsewhere("v", "x", lambda t, **on: t(5, 3, **on)),
            error(
                "bias_of_another_v",
                lambda t: {"v": t(5, 3, dtype=half), "b": t(3, dtype=torch.bfloat16)},
                "expected b of dtype float16 or float32 to match the result, got bfloat16",
            ),
        )
    results = "expected out_dtype bfloat16, float16 or float32, got"
    errors += [
        error("out_float64", lambda t: {"out_dtype": double}, f"{results} float64"),
        error("out_int8", lambda t: {"out_dtype": torch.int8}, f"{results} int8"),
        error(
            "bias_of_the_default",
            lambda t: {"b": t(3, dtype=half), "out_dtype": None},
            "expected b of dtype bfloat16 or float32 to match the result, got float16",
        ),
    ]
    if op == "dense":
        return tuple(errors)
    return (
        *errors,
        *dtypes("wg", "float8_e4m3fn", (full,), 3, 7),
        error("wg_size", lambda t: {"wg": _eight(t, 7, 7)}, "expected wg of shape (3, 7) to match w, got (7, 7)"),
        error(
            "scale_wg_transposed",
            lambda t: {"scale_wg": _float32(t, 3, 1)},
            "expected scale_wg of one element or of shape (1, 3) to match wg, got (3, 1)",
        ),
        error("bg_size", lambda t: {"bg": t(7)}, "expected bg of shape (3,) to match wg, got (7,)"),
        error(
            "activation", lambda t: {"activation": "tanh"}, "expected activation sigmoid or silu, got tanh", ValueError
        ),
    )

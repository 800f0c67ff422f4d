"""References, samples and error inputs of the triangle multiplicative update, for `op_db.py`."""

from __future__ import annotations

from typing import Any

from samples import (
    Arguments,
    ErrorInput,
    Make,
    Sample,
    arguments,
    dtype_errors,
    every_second_column,
    match_errors,
    swapped,
    wide,
)
from torch import Tensor

# --- samples ---------------------------------------------------------------------------------------------------------


def _shapes(c: int, d: int) -> dict[str, tuple[int, ...]]:
    return {
        "norm_in_weight": (c,),
        "norm_in_bias": (c,),
        "p_in_weight": (2 * d, c),
        "p_in_bias": (2 * d,),
        "g_in_weight": (2 * d, c),
        "g_in_bias": (2 * d,),
        "norm_out_weight": (d,),
        "norm_out_bias": (d,),
        "p_out_weight": (c, d),
        "p_out_bias": (c,),
        "g_out_weight": (c, c),
        "g_out_bias": (c,),
    }


_ALL = tuple(_shapes(0, 0))


def triangle_arguments(x: Tensor, *parameters: Tensor) -> Arguments:
    """Of all parameters but the mask, in the order of the schema."""
    return arguments(x, **dict(zip(_ALL, parameters, strict=True)))


_WEIGHTS = ("p_in_weight", "g_in_weight", "p_out_weight", "g_out_weight")
_NORMS = tuple(name for name in _ALL if name.startswith("norm"))


def _of(
    t: Make, x: Tensor, direction: str = "outgoing", d: int = 3, names: tuple[str, ...] = _ALL, **changed: Any
) -> Arguments:
    """`names` are the parameters that are given."""
    shapes = _shapes(x.shape[-1], d)
    given = {name: t(*shapes[name], scale=0.6) for name in names if name not in changed}
    return arguments(x, direction, **given | changed)


def _inner(base: Tensor) -> Tensor:
    return base[:, 1:-1, 1:-1]


def _wide_norm(t: Make, c: int, d: int = 3) -> dict[str, Any]:
    return {name: wide(t, *_shapes(c, d)[name]) for name in _NORMS}


def _inside_x(t: Make) -> Arguments:
    """Parameters are pairs of x."""
    x = t(5, 5, 4, scale=0.5)
    weights = dict(zip(_WEIGHTS, (x[0, :4], x[1, :4], x[2, :4, :2], x[3, :4]), strict=True))
    return arguments(x, "outgoing", mask=x[..., 0], norm_in_weight=x[4, 4], **weights)


def triangle_samples(mutates: bool) -> tuple[Sample, ...]:
    expanded = [Sample("expanded", lambda t: _of(t, t(1, 3, 1, 4, view=lambda v: v.expand(2, 3, 3, 4))))]
    return (
        Sample("matrix", lambda t: _of(t, t(3, 3, 4))),
        Sample("plain", lambda t: _of(t, t(3, 3, 4), "incoming", names=_WEIGHTS)),
        Sample("four_dims", lambda t: _of(t, t(2, 3, 3, 4), "incoming", mask=t(2, 3, 3))),
        Sample("five_dims", lambda t: _of(t, t(1, 2, 3, 3, 5), names=(*_WEIGHTS, "p_in_bias", "g_out_bias"))),
        Sample("bool_mask", lambda t: _of(t, t(2, 3, 3, 4), mask=t(2, 3, 3) > -0.5)),
        Sample("eps", lambda t: _of(t, t(3, 3, 4, scale=0.1), names=(*_WEIGHTS, *_NORMS), eps=0.5)),
        Sample("float32_x", lambda t: _of(t, wide(t, 3, 3, 4))),
        Sample("float32_norm", lambda t: _of(t, t(3, 3, 4), "incoming", **_wide_norm(t, 4))),
        Sample("float32_all_but_weights", lambda t: _of(t, wide(t, 3, 3, 4), **_wide_norm(t, 4))),
        Sample("transposed", lambda t: _of(t, t(3, 3, 4, view=lambda v: v.transpose(0, 1)))),
        Sample("permuted", lambda t: _of(t, t(4, 3, 3, view=swapped), "incoming")),
        Sample("strided_columns", lambda t: _of(t, t(3, 3, 8, view=every_second_column))),
        Sample("inner_block", lambda t: _of(t, t(2, 5, 5, 4, view=_inner), mask=t(2, 5, 5, view=_inner) > -1)),
        Sample(
            "strided_parameters",
            lambda t: _of(
                t,
                t(3, 3, 4),
                p_in_weight=t(4, 6, view=Tensor.t),
                g_in_bias=t(12, view=every_second_column),
                p_out_weight=t(4, 6, view=every_second_column),
                norm_in_bias=t(1, view=lambda v: v.expand(4)),
            ),
        ),
        Sample("one_pair", lambda t: _of(t, t(1, 1, 4))),
        Sample("zero_batch", lambda t: _of(t, t(0, 3, 3, 4), mask=t(0, 3, 3))),
        Sample("zero_rows", lambda t: _of(t, t(2, 0, 0, 4), "incoming")),
        Sample("parameters_inside_x", _inside_x, leaves=False),
        # Several panels of rows, on the CPU and on a GPU.
        Sample("panels", lambda t: _large(t, 130, 64, 48), large=True),
        Sample("aligned", lambda t: _large(t, 64, 32, 32, "incoming"), large=True),
        *([] if mutates else expanded),
    )


def _large(t: Make, n: int, c: int, d: int, direction: str = "outgoing") -> Arguments:
    scale = c**-0.5
    weights: dict[str, Any] = {name: t(*_shapes(c, d)[name], scale=scale) for name in _WEIGHTS}
    return _of(t, t(n, n, c), direction, d, mask=t(n, n) > -1, **weights)


# --- errors ----------------------------------------------------------------------------------------------------------


def _changed(t: Make, x: Tensor | None = None, **changed: Any) -> Arguments:
    return _of(t, t(2, 4, 4, 3) if x is None else x, d=2, **{"mask": t(2, 4, 4)} | changed)


def _refused(name: str, shape: tuple[int, ...], text: str) -> ErrorInput:
    """Something of another shape than the others have."""
    label = f"{name}_{'x'.join(map(str, shape))}"
    got = f"{shape} for c = 3" if name == "p_in_weight" else f"{shape}"
    return ErrorInput(label, lambda t: _changed(t, **{name: t(*shape)}), f"expected {name} {text}, got {got}")


def _of_dtype(t: Make, dtype: Any) -> Arguments:
    return _changed(t, **{name: t(*shape, dtype=dtype) for name, shape in _shapes(3, 2).items() if name in _WEIGHTS})


_PACKED = "of shape (2d, c)"
_BOTH = "x and p_in_weight"
_OF: tuple[tuple[str, str], ...] = (
    *((name, "x") for name in ("norm_in_weight", "norm_in_bias")),
    *((name, "p_in_weight") for name in ("p_in_bias", "g_in_weight", "g_in_bias")),
    *((name, _BOTH) for name in _ALL[6:]),
)


def _other(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-1], shape[-1] + 1)


def _matching(name: str, of: str) -> ErrorInput:
    shape = _shapes(3, 2)[name]
    return _refused(name, _other(shape), f"of shape {shape} to match {of}")


TRIANGLE_ERRORS = (
    *(
        ErrorInput(
            f"x_{len(shape)}_dims",
            lambda t, s=shape: _changed(t, t(*s)),  # type: ignore[misc]
            f"expected x of shape (..., N, N, c), got {shape}",
        )
        for shape in ((4, 3), (4, 5, 3))
    ),
    *(_refused("mask", shape, "of shape (2, 4, 4) to match x") for shape in ((4, 4), (2, 4, 4, 1))),
    *(_refused("p_in_weight", shape, f"{_PACKED} to match x") for shape in ((3, 3), (4, 4), (4,))),
    _refused("p_in_weight", (0, 3), f"{_PACKED} with d > 0"),
    *(_matching(name, of) for name, of in _OF),
    *dtype_errors("p_in_weight", _of_dtype),
    *(
        error
        for name in ("g_in_weight", "p_in_bias", "p_out_weight")
        for error in match_errors(
            name,
            "p_in_weight",
            lambda t, name=name, **other: _changed(t, **{name: t(*_shapes(3, 2)[name], **other)}),
        )
    ),
    ErrorInput(
        "mask_int64",
        lambda t: _changed(t, mask=t(2, 4, 4).long()),
        "expected mask of dtype bool or a floating-point dtype, got int64",
    ),
    ErrorInput(
        "x_float64",
        lambda t: _changed(t, t(2, 4, 4, 3).double()),
        "expected x of dtype float32 to match p_in_weight, got float64",
    ),
    ErrorInput(
        "direction",
        lambda t: _of(t, t(2, 4, 4, 3), "both"),
        "expected direction outgoing or incoming, got both",
        error=ValueError,
    ),
)

TRIANGLE_OVERLAPS = tuple(
    ErrorInput(
        f"overlap_{name}",
        lambda t, x=x: _of(t, x(t), names=_WEIGHTS),  # type: ignore[misc]
        f"expected x without internal overlap, got shape (4, 4, 3) with strides {strides}: more than one element of "
        "the written-to tensor refers to a single memory location. Please clone() the tensor before performing the "
        "operation.",
    )
    for name, strides, x in (
        ("expanded", (0, 3, 1), lambda t: t(1, 4, 3, view=lambda v: v.expand(4, 4, 3))),
        ("as_strided", (3, 3, 1), lambda t: t(30, view=lambda v: v.as_strided((4, 4, 3), (3, 3, 1)))),
    )
)

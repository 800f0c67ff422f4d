"""Reference, samples and error inputs of outer_product_mean, for `op_db.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
    swapped,
    wide,
)
from torch import Tensor


def outer_product_mean_reference(
    a: Tensor, b: Tensor, weight: Tensor, bias: Tensor | None = None, norm: Tensor | None = None
) -> Tensor:
    outer = torch.einsum("...sic,...sjd->...ijcd", a, b).flatten(-2)
    if norm is not None:
        outer = (outer / norm.unsqueeze(-1)).to(outer.dtype)
    return F.linear(outer, weight, bias)


def _at_least_1(base: Tensor) -> Tensor:
    return base.abs() + 1


def _of(t: Make, *sizes: int, batch: tuple[int, ...] = (), bias: bool = True, norm: bool = True) -> Arguments:
    """Of S, N, M, C, D and O."""
    s, n, m, c, d, out = sizes
    tensors = [t(*batch, s, n, c), t(*batch, s, m, d), t(out, c * d, scale=max(s * c * d, 1) ** -0.5)]
    given = {"bias": t(out)} if bias else {}
    return arguments(*tensors, **given, **({"norm": t(*batch, n, m, view=_at_least_1)} if norm else {}))


def _changed(t: Make, **changed: Tensor) -> Arguments:
    """Of S = 4, N = 5, M = 6, C = 2, D = 3 and O = 7, with other tensors among them."""
    given = {"a": t(4, 5, 2), "b": t(4, 6, 3), "weight": t(7, 6), "bias": t(7), "norm": t(5, 6, view=_at_least_1)}
    return arguments(*(given | changed).values())


def _parts(t: Make) -> Arguments:
    """Halves of one projection, and parts of it as weight and bias."""
    ab = t(4, 6, 6)
    return arguments(*ab.chunk(2, -1), ab[0].reshape(4, 9), ab[1, :4, 0])


def _expanded(base: Tensor) -> Tensor:
    return base.expand(4, *base.shape[1:])


def _swap_first(base: Tensor) -> Tensor:
    return base.transpose(0, 1)


def _inner(base: Tensor) -> Tensor:
    return base[..., 4:-2]


def _seven(base: Tensor) -> Tensor:
    return base.expand(7)


def _batch(base: Tensor) -> Tensor:
    """(C, S, batch, N) as (batch, S, N, C), without the last channel."""
    return base.permute(2, 1, 3, 0)[..., :2]


OUTER_PRODUCT_SAMPLES = (
    Sample("matrix", _changed),
    Sample("no_bias", lambda t: _of(t, 4, 5, 6, 2, 3, 7, bias=False, norm=False)),
    Sample("no_norm", lambda t: _of(t, 4, 5, 6, 2, 3, 7, norm=False)),
    Sample("norm_alone", lambda t: _of(t, 4, 5, 6, 2, 3, 7, bias=False)),
    Sample("float32_norm", lambda t: _changed(t, norm=wide(t, 5, 6).abs().add(1).detach()), leaves=False),
    Sample("four_dims", lambda t: _of(t, 3, 4, 5, 3, 2, 5, batch=(2,))),
    Sample("five_dims", lambda t: _of(t, 3, 4, 3, 3, 5, 2, batch=(2, 3), norm=False)),
    Sample("one_pair", lambda t: _of(t, 1, 1, 1, 1, 1, 1)),
    Sample("one_sequence", lambda t: _of(t, 1, 3, 5, 3, 3, 3)),
    Sample("permuted", lambda t: _changed(t, a=t(2, 5, 4, view=swapped), b=t(3, 6, 4, view=swapped))),
    Sample("positions_first", lambda t: _changed(t, a=t(5, 4, 2, view=_swap_first), b=t(6, 4, 3, view=_swap_first))),
    Sample("strided", lambda t: _changed(t, a=t(4, 5, 4, view=every_second_column), b=t(4, 6, 9, view=_inner))),
    Sample("expanded", lambda t: _changed(t, a=t(1, 5, 2, view=_expanded), b=t(1, 6, 3, view=_expanded))),
    Sample("transposed_weight", lambda t: _changed(t, weight=t(6, 7, view=Tensor.t), bias=t(1, view=_seven))),
    Sample("strided_weight", lambda t: _changed(t, weight=t(7, 12, view=every_second_column))),
    Sample("transposed_norm", lambda t: _changed(t, norm=t(6, 5, view=lambda n: _at_least_1(n).t()))),
    Sample("strided_batch", lambda t: arguments(t(3, 4, 2, 5, view=_batch), t(3, 4, 2, 6, view=_batch), t(4, 4))),
    Sample("zero_sequences", lambda t: _of(t, 0, 5, 6, 2, 3, 7)),
    Sample("zero_rows", lambda t: _of(t, 4, 0, 6, 2, 3, 7)),
    Sample("zero_columns", lambda t: _of(t, 4, 5, 0, 2, 3, 7)),
    Sample("zero_batch", lambda t: _of(t, 4, 5, 6, 2, 3, 7, batch=(0,))),
    Sample("zero_in", lambda t: _of(t, 4, 5, 6, 0, 3, 7)),
    Sample("zero_in_no_bias", lambda t: _of(t, 4, 5, 6, 2, 0, 7, bias=False)),
    Sample("zero_out", lambda t: _of(t, 4, 5, 6, 2, 3, 0)),
    Sample("parts_of_one", _parts, leaves=False),
    Sample("itself", lambda t: arguments(*[t(4, 3, 3)] * 2, t(5, 9)), leaves=False),
    Sample("blocks", lambda t: _of(t, 37, 101, 67, 19, 17, 23), large=True),
    Sample("a_row_a_block", lambda t: _of(t, 5, 7, 1031, 33, 31, 3, batch=(2,), bias=False), large=True),
    Sample("many_sequences", lambda t: _of(t, 1031, 19, 37, 9, 7, 61, norm=False), large=True),
)


def _wrong(name: str, what: str, text: str, build: Callable[[Make], Tensor]) -> ErrorInput:
    return ErrorInput(f"{name}_{what}", lambda t: _changed(t, **{name: build(t)}), f"expected {name} {text}")


def _other(name: str, *shape: int) -> Callable[..., Arguments]:
    def build(t: Make, **other: Any) -> Arguments:
        return _changed(t, **{name: t(*shape, **other)})

    return build


_A = "of shape (*batch, S, N, C), got {}"
_B = "of shape (4, {}, {}) to match a, got {}"
_WEIGHT = "of shape (out, C * D) with C * D = 6 to match a and b, got {}"
_BIAS = "of shape (7,) to match weight, got {}"
_NORM = "of shape (5, 6) to match a and b, got {}"

OUTER_PRODUCT_ERRORS = (
    _wrong("a", "rank", _A.format("(5, 2)"), lambda t: t(5, 2)),
    _wrong("a", "zero_dim", _A.format("()"), lambda t: t()),
    _wrong("b", "rank", "with 3 dimensions to match a, got (1, 4, 6, 3)", lambda t: t(1, 4, 6, 3)),
    _wrong("b", "zero_dim", "with 3 dimensions to match a, got ()", lambda t: t()),
    _wrong("b", "sequences", _B.format(6, 3, "(5, 6, 3)"), lambda t: t(5, 6, 3)),
    _wrong("b", "sequences_1", _B.format(6, 3, "(1, 6, 3)"), lambda t: t(1, 6, 3)),
    _wrong("weight", "rank", _WEIGHT.format("(7, 2, 3)"), lambda t: t(7, 2, 3)),
    _wrong("weight", "vector", _WEIGHT.format("(6,)"), lambda t: t(6)),
    _wrong("weight", "features", _WEIGHT.format("(7, 5)"), lambda t: t(7, 5)),
    _wrong("weight", "transposed", _WEIGHT.format("(6, 7)"), lambda t: t(6, 7)),
    _wrong("bias", "size", _BIAS.format("(6,)"), lambda t: t(6)),
    _wrong("bias", "size_1", _BIAS.format("(1,)"), lambda t: t(1)),
    _wrong("bias", "rank", _BIAS.format("(1, 7)"), lambda t: t(1, 7)),
    _wrong("norm", "transposed", _NORM.format("(6, 5)"), lambda t: t(6, 5)),
    _wrong("norm", "size_1", _NORM.format("(5, 1)"), lambda t: t(5, 1)),
    _wrong("norm", "rank", _NORM.format("(5, 6, 1)"), lambda t: t(5, 6, 1)),
    ErrorInput(
        "batch",
        lambda t: arguments(t(2, 4, 5, 2), t(3, 4, 6, 3), t(7, 6)),
        "expected b of shape (2, 4, 6, 3) to match a, got (3, 4, 6, 3)",
    ),
    *dtype_errors("a", lambda t, d: arguments(t(4, 5, 2, dtype=d), t(4, 6, 3, dtype=d), t(7, 6, dtype=d))),
    *match_errors("b", "a", _other("b", 4, 6, 3)),
    *match_errors("weight", "a", _other("weight", 7, 6)),
    *match_errors("bias", "a", _other("bias", 7)),
    *match_errors("norm", "a", _other("norm", 5, 6)),
)

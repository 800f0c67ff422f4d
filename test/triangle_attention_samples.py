"""References, samples and error inputs of triangle attention and of the update by it, for `op_db.py`."""

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
from transition_samples import layer_norm, normalized, promoted

from torchops import AttentionWeights, triangle_attention_update

# --- triangle attention ----------------------------------------------------------------------------------------------


def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """As papers write it, all scores at once. The exponential of -1000 is 0 in float64, and the number is small enough
    that a row without keys has the result which it has without a mask."""
    s = q @ k.mT * (max(q.shape[-1], 1) ** -0.5 if scale is None else scale) + bias
    if mask is not None:
        s = s - (~mask) * 1e3
    return torch.softmax(s, -1).to(v.dtype) @ v


def _attention(t: Make, *sizes: int, keys: int | None = None, **kwargs: Any) -> Arguments:
    """Of tensors for batch, rows, heads, queries (and as many keys, unless given) and d."""
    batch, rows, heads, queries, d = sizes
    keys = queries if keys is None else keys
    of_keys = batch, rows, heads, keys, d
    return arguments(t(*sizes), t(*of_keys), t(*of_keys), t(batch, 1, heads, queries, keys), **kwargs)


ATTENTION_SAMPLES = (
    Sample("matrix", lambda t: _attention(t, 1, 3, 2, 3, 4)),
    Sample("four_dims", lambda t: _attention(t, 2, 3, 3, 5, 5, scale=0.7)),
    Sample("masked", lambda t: _attention(t, 1, 2, 2, 4, 3, mask=t(1, 2, 1, 1, 4) > -0.5)),
    Sample("float32_bias", lambda t: arguments(*(t(1, 2, 1, 4, 3) for _ in "qkv"), wide(t, 1, 1, 1, 4, 4))),
    Sample("more_keys", lambda t: _attention(t, 2, 2, 2, 3, 3, keys=5, mask=t(2, 2, 1, 1, 5) > -0.5)),
    Sample("fewer_keys", lambda t: _attention(t, 1, 3, 2, 4, 3, keys=1)),
    Sample("zero_batch", lambda t: _attention(t, 0, 4, 2, 4, 8)),
    Sample("zero_rows", lambda t: _attention(t, 1, 0, 2, 4, 8)),
    Sample("zero_heads", lambda t: _attention(t, 1, 4, 0, 4, 8)),
    Sample("zero_rows_and_n", lambda t: _attention(t, 1, 0, 2, 0, 8)),
    Sample("zero_queries", lambda t: _attention(t, 1, 3, 2, 0, 4, keys=5)),
    Sample("zero_keys", lambda t: _attention(t, 1, 3, 2, 4, 4, keys=0, mask=t(1, 3, 1, 1, 0) > 0)),
    Sample("zero_in", lambda t: _attention(t, 1, 4, 2, 4, 0)),
)


def _wrong(name: str, what: str, build: Callable[[Make], Tensor], text: str) -> ErrorInput:
    def given(t: Make) -> Arguments:
        args, _ = _attention(t, *_SIZES)
        return arguments(**dict(zip(("q", "k", "v", "bias"), args, strict=True)) | {name: build(t)})

    return ErrorInput(f"{name}_{what}", given, f"expected {name} {text}")


_SIZES = (1, 4, 2, 4, 8)
_LIKE_Q = "of shape (1, 4, 2, {}, 8) to match q, got {}"

_BIAS = "of shape (1, 1, 2, 4, 4) to match q and k"

ATTENTION_ERRORS = (
    _wrong("q", "rank", lambda t: t(4, 2, 4, 8), "of shape (batch, R, H, Q, d), got (4, 2, 4, 8)"),
    _wrong("k", "rank", lambda t: t(4, 2, 4, 8), _LIKE_Q.format("K", "(4, 2, 4, 8)")),
    _wrong("k", "rows", lambda t: t(1, 3, 2, 4, 8), _LIKE_Q.format(4, "(1, 3, 2, 4, 8)")),
    _wrong("k", "features", lambda t: t(1, 4, 2, 5, 7), _LIKE_Q.format(5, "(1, 4, 2, 5, 7)")),
    _wrong("v", "size", lambda t: t(1, 4, 2, 5, 8), "of shape (1, 4, 2, 4, 8) to match k, got (1, 4, 2, 5, 8)"),
    _wrong("bias", "rank", lambda t: t(1, 2, 4, 4), f"{_BIAS}, got (1, 2, 4, 4)"),
    _wrong("bias", "rows", lambda t: t(1, 4, 2, 4, 4), f"{_BIAS}, got (1, 4, 2, 4, 4)"),
    _wrong("bias", "keys", lambda t: t(1, 1, 2, 4, 5), f"{_BIAS}, got (1, 1, 2, 4, 5)"),
    _wrong("mask", "rank", lambda t: t(1, 4, 4) > 0, "of shape (1, 4, 1, 1, 4) to match q and k, got (1, 4, 4)"),
    _wrong("mask", "float32", lambda t: t(1, 4, 1, 1, 4), "of dtype bool, got float32"),
    *dtype_errors("q", lambda t, d: arguments(t(*_SIZES, dtype=d), *_attention(t, *_SIZES)[0][1:])),
    *match_errors(
        "v", "q", lambda t, **other: arguments(t(*_SIZES), t(*_SIZES), t(*_SIZES, **other), t(1, 1, 2, 4, 4))
    ),
    *match_errors("bias", "q", lambda t, **other: arguments(*(t(*_SIZES),) * 3, t(1, 1, 2, 4, 4, **other))),
)

# --- the update ------------------------------------------------------------------------------------------------------
#
# Its operators are private, and take the parameters in a list.

NAMES = AttentionWeights._fields[:10]


def update_arguments(x: Tensor, *parameters: Tensor | None) -> Arguments:
    """Of all parameters in the order of AttentionWeights."""
    bias_weight = parameters[2]
    assert bias_weight is not None
    return arguments(x, None, list(parameters), len(bias_weight), 1e-5, False)


def update(x: Tensor, mask: Tensor | None, parameters: list[Any], heads: int, eps: float, ending: bool) -> Tensor:
    node: Any = "ending" if ending else "starting"
    return triangle_attention_update(x, mask, AttentionWeights._make([*parameters, heads, eps]), node)


def update_(x: Tensor, mask: Tensor | None, parameters: list[Any], heads: int, eps: float, ending: bool) -> Tensor:
    node: Any = "ending" if ending else "starting"
    return triangle_attention_update(x, mask, AttentionWeights._make([*parameters, heads, eps]), node, inplace=True)


def _written_out(
    norm: Callable[..., Tensor],
    x: Tensor,
    mask: Tensor | None,
    parameters: list[Any],
    heads: int,
    eps: float,
    ending: bool,
) -> Tensor:
    norm_weight, norm_bias, bias_weight, q, k, v, gate, gate_bias, out, out_bias = parameters
    if ending:
        x, mask = x.transpose(-2, -3), None if mask is None else mask.mT
    z = norm(*promoted(x, norm_weight, norm_bias), eps).to(q.dtype)
    q, k, v = (F.linear(z, t).unflatten(-1, (heads, len(t) // heads)).transpose(-3, -2) for t in (q, k, v))
    bias = F.linear(z, bias_weight).movedim(-1, -3).unsqueeze(-4)
    o = attention_reference(q, k, v, bias, None if mask is None else (mask != 0)[..., None, None, :])
    o = o.transpose(-3, -2).flatten(-2)
    if gate is not None:
        o = o * torch.sigmoid(F.linear(z, gate, gate_bias))
    made = F.linear(o, out, out_bias)
    return made.transpose(-2, -3) if ending else made


def update_reference(x: Tensor, *rest: Any) -> Tensor:
    return _written_out(layer_norm, x, *rest)


def update_smooth(x: Tensor, *rest: Any) -> Tensor:
    """ATen's third derivative of a layer norm is wrong."""
    return _written_out(normalized, x, *rest)


def update_reference_(x: Tensor, *rest: Any) -> Tensor:
    return x + update_reference(x, *rest).to(x.dtype)


def update_smooth_(x: Tensor, *rest: Any) -> Tensor:
    return x + update_smooth(x, *rest).to(x.dtype)


def _parameters(t: Make, c: int = 4, heads: int = 2, d: int = 3) -> dict[str, Tensor]:
    width = heads * d
    shapes: dict[str, tuple[int, ...]] = {"norm_weight": (c,), "norm_bias": (c,), "bias_weight": (heads, c)}
    shapes |= dict.fromkeys(("q", "k", "v", "gate"), (width, c))
    shapes |= {"gate_bias": (width,), "out": (c, width), "out_bias": (c,)}
    return {name: t(*shapes[name], scale=0.5) for name in NAMES}


def _update(
    t: Make, x: Tensor, mask: Tensor | None = None, *, heads: int = 2, ending: bool = False, **changed: Any
) -> Arguments:
    parameters = _parameters(t, x.shape[-1], heads) | changed
    return arguments(x, mask, [parameters[name] for name in NAMES], heads, 1e-5, ending)


def _only_x(mask: Tensor) -> Tensor:
    """A mask of numbers, which has no gradient."""
    return mask.detach().abs().round()


_PLAIN: Any = dict.fromkeys(("norm_weight", "norm_bias", "gate", "gate_bias", "out_bias"))


def _inner(base: Tensor) -> Tensor:
    return base[:, 1:-1, 1:-1]


def _apart(t: Make) -> Arguments:
    """Batches that cannot be one dimension."""
    x, mask = (t(2, 3, 2, 2, *c, view=lambda v: v.transpose(0, 1)) for c in ((4,), ()))
    return _update(t, x, mask > -1, ending=True)


def update_samples(mutates: bool) -> tuple[Sample, ...]:
    expanded = [Sample("expanded", lambda t: _update(t, t(1, 3, 1, 4, view=lambda v: v.expand(2, 3, 3, 4))))]
    return (
        Sample("matrix", lambda t: _update(t, t(3, 3, 4))),
        Sample("plain", lambda t: _update(t, t(3, 3, 4), ending=True, **_PLAIN)),
        Sample("four_dims", lambda t: _update(t, t(2, 3, 3, 4), ending=True, norm_bias=None, gate_bias=None)),
        Sample("five_dims", lambda t: _update(t, t(1, 2, 3, 3, 5), heads=3, norm_weight=None, out_bias=None)),
        Sample("masked", lambda t: _update(t, t(2, 3, 3, 4), t(2, 3, 3) > -0.5, ending=True)),
        # A mask of numbers would be taken for another tensor that has a gradient.
        Sample("mask_of_numbers", lambda t: _update(t, t(3, 3, 4), _only_x(t(3, 3))), leaves=False),
        Sample("float32_x", lambda t: _update(t, wide(t, 3, 3, 4))),
        Sample("float32_norm", lambda t: _update(t, wide(t, 3, 3, 4), norm_weight=wide(t, 4), norm_bias=wide(t, 4))),
        Sample("transposed", lambda t: _update(t, t(3, 3, 4, view=lambda v: v.transpose(0, 1)))),
        Sample("permuted", lambda t: _update(t, t(4, 3, 3, view=swapped), ending=True)),
        Sample("strided_columns", lambda t: _update(t, t(3, 3, 8, view=every_second_column))),
        Sample("inner_block", lambda t: _update(t, t(2, 5, 5, 4, view=_inner), t(2, 5, 5, view=_inner) > -1)),
        Sample("batches_apart", lambda t: _apart(t)),
        Sample("transposed_weights", lambda t: _update(t, t(3, 3, 4), q=t(4, 6, view=Tensor.t), out=t(6, 4).mT)),
        Sample("zero_batch", lambda t: _update(t, t(0, 3, 3, 4))),
        Sample("zero_rows", lambda t: _update(t, t(2, 0, 0, 4), ending=True)),
        *([] if mutates else expanded),
    )


def _refused(name: str, text: str, **changed: Callable[[Make], Any]) -> ErrorInput:
    """Where something other than in `matrix` is given: a parameter, x, mask, or heads."""

    def given(t: Make) -> Arguments:
        made = {name: make(t) for name, make in changed.items()}
        args, _ = _update(t, t(4, 4, 12), heads=3, **{name: t for name, t in made.items() if name in NAMES})
        x, mask, parameters, heads, *rest = args
        return arguments(made.get("x", x), made.get("mask", mask), parameters, made.get("heads", heads), *rest)

    return ErrorInput(name, given, f"expected {text}")


_DTYPES = "{} of dtype float32, float64, float16 or bfloat16, got {}"
_ELSEWHERE = "{} on device {{device}} to match x, got {{elsewhere}}"
_PAIR = "x of shape (*batch, N, N, c), got"
_OF_X = "to match x of shape (4, 4, 12), got"
_OF_Q = "q of shape (heads * d, c)"

UPDATE_ERRORS = (
    _refused("x_square", f"{_PAIR} (4, 3, 12)", x=lambda t: t(4, 3, 12)),
    _refused("x_dims", f"{_PAIR} (5, 12)", x=lambda t: t(5, 12)),
    _refused("x_float64", "x of dtype float32 to match q, got float64", x=lambda t: t(4, 4, 12, dtype=torch.float64)),
    _refused("c", "norm_weight of shape (11,) to match x of shape (4, 4, 11), got (12,)", x=lambda t: t(4, 4, 11)),
    _refused("mask", f"mask of shape (4, 4) {_OF_X} (1, 4, 4)", mask=lambda t: t(1, 4, 4) > 0),
    _refused(
        "mask_int32",
        "mask of dtype bool or floating-point, got int32",
        mask=lambda t: t(4, 4, dtype=torch.int32),
    ),
    _refused("heads", f"{_OF_Q} with heads = 2, got (9, 12)", heads=lambda t: 2),
    _refused("no_heads", "heads of at least 1, got 0", heads=lambda t: 0),
    _refused("q", f"{_OF_Q}, got ()", q=lambda t: t()),
    _refused("v", f"v of shape (9, 12) {_OF_X} (8, 12)", v=lambda t: t(8, 12)),
    _refused("out", f"out of shape (12, 9) {_OF_X} (9, 12)", out=lambda t: t(9, 12)),
    _refused("no_v", "a tensor v, got None", v=lambda t: None),
    _refused("gate_bias", "gate_bias None without gate, got a tensor", gate=lambda t: None),
    _refused(
        "no_features",
        "heads of at least one feature, got q of shape (0, 12)",
        **{name: lambda t: t(0, 12) for name in ("q", "k", "v", "gate")},
        gate_bias=lambda t: t(0),
        out=lambda t: t(12, 0),
    ),
    _refused("q_int64", _DTYPES.format("q", "int64"), q=lambda t: t(9, 12, dtype=torch.int64)),
    *(
        _refused(
            f"gate_{name}",
            f"gate of dtype float32 to match q, got {name}",
            gate=lambda t, name=name: t(9, 12, dtype=getattr(torch, name)),  # type: ignore[misc]
        )
        for name in ("float64", "bfloat16", "int64")
    ),
    _refused("k_elsewhere", _ELSEWHERE.format("k"), k=lambda t: t(9, 12, device=t.elsewhere())),
    _refused("mask_elsewhere", _ELSEWHERE.format("mask"), mask=lambda t: t(4, 4, device=t.elsewhere()) > 0),
)

UPDATE_OVERLAPS = tuple(
    _refused(f"overlap_{name}", f"x without elements in one place, got strides {strides} of (4, 4, 12)", x=x)
    for name, strides, x in (
        ("expanded", (0, 12, 1), lambda t: t(1, 4, 12, view=lambda v: v.expand(4, 4, 12))),
        ("as_strided", (12, 12, 1), lambda t: t(200, view=lambda v: v.as_strided((4, 4, 12), (12, 12, 1)))),
    )
)

"""Rules for ``DTensor`` of elementwise operators, softmax, layer norm and products; imported by
:mod:`torchops.distributed`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Shard

from torchops.distributed._dtensor import (
    REPLICATE,
    Way,
    check_stays,
    if_given,
    local,
    register_rule,
    register_ways,
    sharded,
    where_wanted,
    wrap,
)

# --- elementwise -----------------------------------------------------------------------------------------------------


def _elementwise(x: Any) -> list[Any]:
    return [REPLICATE, *sharded(x, range(x.ndim))]


def _sigmoid(x: Any) -> list[Way]:
    return [([p], [p]) for p in _elementwise(x)]


def _sigmoid_(x: Any) -> list[Way]:
    check_stays("sigmoid_", "x", x, _elementwise(x), "")
    return [([], [p]) for p in _elementwise(x)]


def _saved_copy(x: Any) -> list[Way]:
    return [([p], [p]) for p in dict.fromkeys([REPLICATE, *x.placements])]


# --- softmax ---------------------------------------------------------------------------------------------------------


def _beside(x: Any, dim: int) -> list[Any]:
    return [REPLICATE, *sharded(x, (d for d in range(x.ndim) if d != dim % x.ndim))]


def _softmax(x: Any, dim: int = -1) -> list[Way]:
    return [([p], [p, None]) for p in _beside(x, dim)]


def _softmax_(x: Any, dim: int = -1) -> list[Way]:
    check_stays("softmax_", "x", x, _beside(x, dim), f" along dimensions other than dim = {dim}")
    return [([], [p, None]) for p in _beside(x, dim)]


def _softmax_backward(grad: Any, y: Any, dim: int) -> list[Way]:
    return [([p], [p, p, None]) for p in _beside(y, dim)]


# --- layer_norm ------------------------------------------------------------------------------------------------------


def _leading(x: Any, normalized_shape: Sequence[int]) -> list[Any]:
    return [REPLICATE, *sharded(x, range(x.ndim - len(normalized_shape)))]


def _check_layer_norm_stays(op: str, x: Any, shape: Sequence[int]) -> None:
    check_stays(op, "x", x, _leading(x, shape), f" along dimensions before the last {len(shape)}")


def _layer_norm(x: Any, shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 0.0) -> list[Way]:
    return [([p], [p, None, if_given(weight), if_given(bias), None]) for p in _leading(x, shape)]


def _layer_norm_(x: Any, shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 0.0) -> list[Way]:
    _check_layer_norm_stays("layer_norm_", x, shape)
    return [([], arguments) for _, arguments in _layer_norm(x, shape, weight, bias)]


def _layer_norm_moments(x: Any, shape: Sequence[int], weight: Any, bias: Any, eps: float) -> list[Way]:
    return [([p, p, p], arguments) for [p], arguments in _layer_norm(x, shape, weight, bias)]


def _layer_norm_backward(
    grad: Any, x: Any, shape: Sequence[int], mean: Any, rstd: Any, weight: Any, output_mask: Sequence[bool]
) -> list[Way]:
    ways = []
    for p in _leading(x, shape):
        # The gradients of weight and bias are sums over rows, so ranks with some of the rows hold a part of the sum.
        affine = REPLICATE if p == REPLICATE else Partial()
        ways.append((where_wanted(output_mask, [p, affine, affine]), [p, p, None, p, p, if_given(weight), None]))
    return ways


def _layer_norm_moments_(_cls: type, op: Any, _types: Any, args: Sequence[Any], _kwargs: Any) -> tuple[Any, Any]:
    # DTensor takes it that an operator named like this returns its argument or nothing.
    x, shape, weight, bias, eps = args
    _check_layer_norm_stays("_layer_norm_", x, shape)
    affine = (t if t is None else local(t, [REPLICATE] * len(x.placements)) for t in (weight, bias))
    mean, rstd = op(local(x, x.placements), shape, *affine, eps)
    sizes = (*x.shape[: x.ndim - len(shape)], *[1] * len(shape))
    return wrap(mean, x, x.placements, sizes), wrap(rstd, x, x.placements, sizes)


# --- products --------------------------------------------------------------------------------------------------------


def _dense(x: Any, w: Any, b: Any = None) -> list[Way]:
    rows = [REPLICATE, *sharded(x, range(x.ndim - 1))]
    columns = ([Shard(x.ndim - 1)], [REPLICATE, Shard(0), if_given(b, Shard(0))])
    return [*(([p], [p, REPLICATE, if_given(b)]) for p in rows), columns]


def _dense_on_path(x: Any, w: Any, b: Any, path: str) -> list[Way]:
    return [(outputs, [*arguments, None]) for outputs, arguments in _dense(x, w, b)]


def _dense_backward(grad: Any, y: Any, output_mask: Sequence[bool] = (True, True)) -> list[Way]:
    last = Shard(y.ndim - 1)
    ways = [(REPLICATE, REPLICATE), *((p, Partial()) for p in sharded(y, range(y.ndim - 1))), (last, Shard(0))]
    return [(where_wanted(output_mask, out), [out[0], out[0], None]) for out in ways]


def _dense_gradients(grad: Any, y: Any, x: Any, w: Any, output_mask: Sequence[bool]) -> list[Way]:
    last, part = Shard(y.ndim - 1), Partial()
    rows = [([p, part, part], [p, p, p, REPLICATE]) for p in sharded(y, range(y.ndim - 1))]
    columns_out = ([part, Shard(0), Shard(0)], [last, last, REPLICATE, Shard(0)])
    columns_in = ([last, Shard(1), REPLICATE], [REPLICATE, REPLICATE, last, Shard(1)])
    replicated = ([REPLICATE] * 3, [REPLICATE] * 4)
    return [(where_wanted(output_mask, out), [*on, None]) for out, on in (replicated, *rows, columns_out, columns_in)]


def _gate(v: Any, x: Any, w: Any, b: Any = None) -> list[Way]:
    rows = [REPLICATE, *sharded(v, range(v.ndim - 1))]
    last = Shard(v.ndim - 1)
    columns = ([last], [last, REPLICATE, Shard(0), if_given(b, Shard(0))])
    return [*(([p], [p, p, REPLICATE, if_given(b)]) for p in rows), columns]


def _gate_(v: Any, x: Any, w: Any, b: Any = None) -> list[Way]:
    check_stays("gate_", "v", v, _elementwise(v), "")
    return [([], arguments) for _, arguments in _gate(v, x, w, b)]


def _gate_with_product(v: Any, x: Any, w: Any, b: Any) -> list[Way]:
    return [([p, p], arguments) for [p], arguments in _gate(v, x, w, b)]


def _gate_backward(
    grad: Any, v: Any, x: Any, w: Any, b: Any, output_mask: Sequence[bool], v_is_y: bool = False, z: Any = None
) -> list[Way]:
    ways = []
    for [p], arguments in _gate(v, x, w, b):
        columns = p == Shard(v.ndim - 1)
        # A sum over rows, or for dx over columns, is partial where these are sharded.
        dx = Partial() if columns else p
        dw = Shard(0) if columns else REPLICATE if p == REPLICATE else Partial()
        ways.append((where_wanted(output_mask, [p, dx, dw, dw]), [p, *arguments, None, None, if_given(z, p)]))
    return ways


def _glu(x: Any, w: Any, wg: Any, b: Any = None, bg: Any = None, activation: str = "sigmoid") -> list[Way]:
    rows = [REPLICATE, *sharded(x, range(x.ndim - 1))]
    rest = [REPLICATE, REPLICATE, if_given(b), if_given(bg)]
    whole = Shard(0)
    columns = ([Shard(x.ndim - 1)], [REPLICATE, whole, whole, if_given(b, whole), if_given(bg, whole)])
    return [*(([p], [p, *rest]) for p in rows), columns]


def _glu_with_products(x: Any, w: Any, wg: Any, b: Any, bg: Any, activation: str) -> list[Way]:
    return [([p, p, p], arguments) for [p], arguments in _glu(x, w, wg, b, bg)]


def _glu_backward(
    grad: Any,
    x: Any,
    w: Any,
    wg: Any,
    b: Any,
    bg: Any,
    activation: str,
    output_mask: Sequence[bool],
    z: Any = None,
    u: Any = None,
) -> list[Way]:
    ways = []
    for [p], arguments in _glu(x, w, wg, b, bg):
        columns = arguments[1] == Shard(0)
        dx = Partial() if columns else p
        dw = Shard(0) if columns else REPLICATE if p == REPLICATE else Partial()
        products = [if_given(z, p), if_given(u, p)]
        ways.append((where_wanted(output_mask, [dx, dw, dw, dw, dw]), [p, *arguments, None, None, *products]))
    return ways


def _outer_product_places(a: Any) -> list[tuple[Any, ...]]:
    """Of a, b, weight, norm and the result: cut along a batch dimension, the rows, the columns, the features out, or
    the sequences, of which each rank then has a part of the sum."""
    batch = a.ndim - 3
    cut = [Shard(batch + i) for i in range(3)]
    return [
        (REPLICATE, REPLICATE, REPLICATE, REPLICATE, REPLICATE),
        *((p, p, REPLICATE, p, p) for p in sharded(a, range(batch))),
        (cut[1], REPLICATE, REPLICATE, cut[0], cut[0]),
        (REPLICATE, cut[1], REPLICATE, cut[1], cut[1]),
        (REPLICATE, REPLICATE, Shard(0), REPLICATE, cut[2]),
        (cut[0], cut[0], REPLICATE, REPLICATE, Partial()),
    ]


def _outer_product_mean(a: Any, b: Any, weight: Any, bias: Any = None, norm: Any = None) -> list[Way]:
    return [
        ([out], [of_a, of_b, of_weight, if_given(bias, of_weight), if_given(norm, of_norm)])
        for of_a, of_b, of_weight, of_norm, out in _outer_product_places(a)
        if bias is None or not out.is_partial()
    ]


def _outer_product_mean_backward(
    grad: Any, a: Any, b: Any, weight: Any, norm: Any, output_mask: Sequence[bool]
) -> list[Way]:
    ways = []
    for places in _outer_product_places(a):
        *arguments, out = places
        # The gradient of what every rank has whole is a sum of the ranks' parts, unless all have the same.
        parts = any(p != REPLICATE for p in places)
        gradients = [Partial() if parts and p == REPLICATE else p for p in arguments]
        of_a, of_b, of_weight, of_norm = arguments
        given = [REPLICATE if out.is_partial() else out, of_a, of_b, of_weight, if_given(norm, of_norm), None]
        ways.append((where_wanted(output_mask, gradients), given))
    return ways


def _linear_in(a: Any) -> list[Any]:
    # A product with parts of a sum gives the parts of a sum.
    return [REPLICATE, *sharded(a, range(a.ndim - 1)), Partial()]


def _square_matmul(a: Any, b: Any, transpose_b: bool = False) -> list[Way]:
    # A batch of matrices is cut together with the rows that they multiply.
    batch = range(b.ndim - 2)
    return [([p], [p, p if getattr(p, "dim", None) in batch else REPLICATE]) for p in _linear_in(a)]


def _square_matmul_(a: Any, b: Any, transpose_b: bool = False) -> list[Way]:
    check_stays("square_matmul_", "a", a, _linear_in(a), " along dimensions before the last")
    return [([], arguments) for _, arguments in _square_matmul(a, b)]


def _product(x: Any, w: Any, contracted: int) -> Any:
    """The sum over the last dimension of ``x`` and dimension ``contracted`` of ``w``, each rank with its own part of
    either, and partial where that dimension is sharded. Moves less than gathering ``w``, if it moves anything.
    """
    last = x.ndim - 1
    places: list[tuple[Any, Any, Any]] = []
    for p, q in zip(x.placements, w.placements, strict=True):
        if (q == Shard(contracted) and p in (REPLICATE, Shard(last))) or (q == REPLICATE and p == Shard(last)):
            places.append((Shard(last), Shard(contracted), Partial()))
        elif p == Partial() or getattr(p, "dim", last) != last:
            places.append((p, REPLICATE, p))
        elif q == Shard(1 - contracted):
            places.append((REPLICATE, q, Shard(last)))
        else:
            places.append((REPLICATE, REPLICATE, REPLICATE))
    x_placements, w_placements, out_placements = zip(*places, strict=True)
    w_local = local(w, w_placements)
    out = torch.matmul(local(x, x_placements), w_local if contracted == 0 else w_local.t())
    return wrap(out, x, out_placements, (*x.shape[:-1], w.shape[1 - contracted]))


def _pairs(x: Any, w: Any, b: Any = None) -> list[tuple[Any, Any]]:
    """The placements of ``x`` and ``w`` along each dimension of the mesh. None where DTensor will refuse the arguments:
    plain tensors among them, or another mesh."""
    others = [w] if b is None else [w, b]
    if not all(isinstance(t, DTensor) and t.device_mesh == getattr(x, "device_mesh", None) for t in others):
        return []
    return list(zip(x.placements, w.placements, strict=True))


def _dense_row_parallel(_cls: type, op: Any, _types: Any, args: Sequence[Any], _kwargs: Any) -> Any:
    # With a sharded contraction each rank holds a part of the sum that the sigmoid is taken of, so the parts are
    # added up between the two. Every other call goes to the rules above.
    x, w, b = (*args, None)[:3]
    last = Shard(x.ndim - 1)
    if not any(p in (REPLICATE, last) and q == Shard(1) for p, q in _pairs(x, w, b)):
        return NotImplemented
    z = _product(x, w, contracted=1)
    z = z.redistribute(placements=[REPLICATE if p.is_partial() else p for p in z.placements])
    y = z.to_local()  # shares memory with z
    if b is not None:
        y.add_(local(b, [Shard(0) if p == last else REPLICATE for p in z.placements]))
    y.sigmoid_()
    return z


def _square_matmul_sharded_b(_cls: type, op: Any, _types: Any, args: Sequence[Any], kwargs: Any) -> Any:
    # A part of b is no square matrix, so the operator itself cannot take it.
    a, b = args
    last = Shard(a.ndim - 1)
    if b.ndim > 2 or not any(p == last or (p == REPLICATE and q != REPLICATE) for p, q in _pairs(a, b)):
        return NotImplemented
    return _product(a, b, contracted=1 if kwargs.get("transpose_b", False) else 0)


# --- registration ----------------------------------------------------------------------------------------------------

_of_tensors: dict[str, Callable[..., list[Way]]] = {
    "dense": _dense,
    "_dense_on_path": _dense_on_path,
    "gate": _gate,
    "_gate": _gate_with_product,
    "gate_": _gate_,
    "glu": _glu,
    "_glu": _glu_with_products,
    "_linear": _dense,
    "outer_product_mean": _outer_product_mean,
    "_saved_copy": _saved_copy,
    "sigmoid": _sigmoid,
    "sigmoid_": _sigmoid_,
    "softmax": _softmax,
    "softmax_": _softmax_,
    "_softmax_backward": _softmax_backward,
    "square_matmul": _square_matmul,
    "square_matmul_": _square_matmul_,
}
for _name, _ways in _of_tensors.items():
    register_ways(_name, _ways)

# These depend on a list too, at this position.
_of_lists: dict[str, tuple[Callable[..., list[Way]], int]] = {
    "_dense_backward": (_dense_backward, 2),
    "_dense_gradients": (_dense_gradients, 4),
    "_gate_backward": (_gate_backward, 5),
    "_glu_backward": (_glu_backward, 6),
    "_outer_product_mean_backward": (_outer_product_mean_backward, 5),
    "layer_norm": (_layer_norm, 1),
    "layer_norm_": (_layer_norm_, 1),
    "_layer_norm": (_layer_norm_moments, 1),
    "_layer_norm_backward": (_layer_norm_backward, 2),
}
for _name, (_ways, _position) in _of_lists.items():
    register_ways(_name, _ways, _position)

for _name, _rule in {
    "dense": _dense_row_parallel,
    "_dense_on_path": _dense_row_parallel,
    "_layer_norm_": _layer_norm_moments_,
    "square_matmul": _square_matmul_sharded_b,
}.items():
    register_rule(_name, _rule)

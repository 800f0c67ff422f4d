"""Formulas for ``torch.utils.flop_counter``, which counts only products of matrices.

You don't have to call anything: the formulas are registered when anything imports that module. ``import torchops``
doesn't import it, since that would take a third of a second where Triton is installed.

A formula gets the arguments of an operator that it names, with shapes instead of tensors, and returns multiplications
plus additions. Operators without a formula (softmax, layer_norm, sigmoid) count as nothing, as ATen's do. The gradients
are ATen's ``mm`` or operators that are listed here. Those of gate, glu, transition, the outer product mean and the
triangle update compute products of the forward pass again, which counts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from math import prod
from typing import Any

import torch

__all__ = [
    "dense_flops",
    "dense_gradients_flops",
    "gate_flops",
    "glu_flops",
    "outer_product_mean_flops",
    "square_matmul_flops",
    "transition_flops",
    "triangle_attention_flops",
    "triangle_multiplicative_update_flops",
]


def dense_flops(x: Sequence[int], w: Sequence[int], *args: Any, **kwargs: Any) -> int:
    """``2 * rows * in_features * out_features``.

    Example:

        >>> torchops.flops.dense_flops((10, 3), (4, 3))
        240
    """
    return 2 * prod(x) * w[0]


def dense_gradients_flops(
    grad: Sequence[int],
    y: Sequence[int],
    x: Sequence[int],
    w: Sequence[int],
    output_mask: Sequence[bool],
    **kwargs: Any,
) -> int:
    """``2 * rows * in_features * out_features`` for each of dx and dw that ``output_mask`` asks for.

    Example:

        >>> torchops.flops.dense_gradients_flops((10, 4), (10, 4), (10, 3), (4, 3), [True, True, False])
        480
    """
    return sum(output_mask[:2]) * dense_flops(x, w)


def gate_flops(v: Sequence[int], x: Sequence[int], w: Sequence[int], *args: Any, **kwargs: Any) -> int:
    """``2 * rows * in_features * out_features``.

    Example:

        >>> torchops.flops.gate_flops((10, 4), (10, 3), (4, 3))
        240
    """
    return 2 * prod(x) * w[0]


def gate_backward_flops(
    x: Sequence[int], w: Sequence[int], output_mask: Sequence[bool], z: Sequence[int] | None = None
) -> int:
    """A product for the gate, unless it is given, and one for each of the gradients of ``x`` and ``w`` that the mask
    asks for."""
    return ((z is None) + output_mask[1] + output_mask[2]) * dense_flops(x, w)


def glu_flops(x: Sequence[int], w: Sequence[int], *args: Any, **kwargs: Any) -> int:
    """``4 * rows * in_features * out_features``.

    Example:

        >>> torchops.flops.glu_flops((10, 3), (4, 3), (4, 3))
        480
    """
    return 4 * prod(x) * w[0]


def glu_backward_flops(
    x: Sequence[int], w: Sequence[int], output_mask: Sequence[bool], z: Sequence[int] | None = None
) -> int:
    """The products for the two factors, unless they are given, two for the gradient of ``x`` and one for that of each
    weight; but not the product that only a gradient reads which the mask does not ask for."""
    dx, dw, dwg, _, dbg = output_mask
    value = dx or dwg or dbg  # the gradient of the gate reads the value
    again = 1 + value if z is None else 0
    return (again + 2 * dx + dw + dwg) * dense_flops(x, w)


def square_matmul_flops(a: Sequence[int], *args: Any, **kwargs: Any) -> int:
    """``2 * rows * n * n``.

    Example:

        >>> torchops.flops.square_matmul_flops((10, 3), (3, 3))
        180
    """
    return 2 * prod(a) * a[-1]


def transition_flops(x: Sequence[int], *args: Any, gate_weight: Sequence[int], **kwargs: Any) -> int:
    """``6 * rows * c * hidden``.

    Example:

        >>> torchops.flops.transition_flops((10, 3), gate_weight=(4, 3))
        720
    """
    return 6 * prod(x) * gate_weight[0]


def transition_backward_flops(
    x: Sequence[int], gate_weight: Sequence[int], output_mask: Sequence[bool], up: Sequence[int] | None = None
) -> int:
    """The products of gate and up again, unless they are given, one back through down, two back to ``x``, and one for
    each gradient of a weight; but none that only a gradient reads which ``output_mask`` does not ask for."""
    to_z = any(output_mask[:3])
    to_gate, to_up = to_z or any(output_mask[3:5]), to_z or any(output_mask[5:7])
    again = 0 if up else (to_gate or to_up or output_mask[7]) + (to_gate or output_mask[7])
    products = again + (to_gate or to_up) + 2 * to_z + sum(output_mask[3:8:2])
    return products * dense_flops(x, gate_weight)


def outer_product_mean_flops(
    a: Sequence[int], b: Sequence[int], weight: Sequence[int], *args: Any, **kwargs: Any
) -> int:
    """``2 * batch * N * M * C * D * (S + O)``.

    Example:

        >>> torchops.flops.outer_product_mean_flops((4, 5, 2), (4, 6, 3), (7, 6))
        3960
    """
    return _outer_product_flops(a, b, weight, 1, 1)


def _outer_product_flops(a: Sequence[int], b: Sequence[int], weight: Sequence[int], sums: int, layers: int) -> int:
    """`sums` over the sequences and `layers` of the weight, for each of the outer products."""
    *batch, s, n, _ = a
    return 2 * prod(batch) * n * b[-2] * weight[1] * (s * sums + weight[0] * layers)


def outer_product_mean_backward_flops(
    a: Sequence[int], b: Sequence[int], weight: Sequence[int], output_mask: Sequence[bool]
) -> int:
    """The outer products again if the gradient of ``weight`` or ``norm`` reads them, one product back through the
    weight, and one for each of ``a``, ``b`` and ``weight``; but none that only a gradient reads which ``output_mask``
    does not ask for."""
    da, db, dweight, dnorm = output_mask
    return _outer_product_flops(a, b, weight, (dweight or dnorm) + da + db, (da or db or dnorm) + dweight)


def triangle_multiplicative_update_flops(
    x: Sequence[int], *args: Any, p_in_weight: Sequence[int], **kwargs: Any
) -> int:
    """For each of the pairs: ``4 * d`` products of ``c`` features on the way in, ``d`` of ``N`` in the middle, and
    ``c`` of ``d`` and of ``c`` on the way out.

    Example:

        >>> torchops.flops.triangle_multiplicative_update_flops((5, 5, 3), p_in_weight=(4, 3))
        2450
    """
    (n, c), d = x[-2:], p_in_weight[0] // 2
    return 2 * prod(x[:-1]) * (4 * d * c + n * d + c * d + c * c)


def triangle_update_flops(x: Sequence[int], parameters: Sequence[Any]) -> int:
    """The same for the operator beneath, whose weights of a and b may be packed or apart."""
    d, _ = _channels(parameters)
    return triangle_multiplicative_update_flops(x, p_in_weight=(2 * d,))


def _channels(parameters: Sequence[Any]) -> tuple[int, bool]:
    """d, and whether the weights of a and b are packed."""
    packed = parameters[4] is None
    return parameters[2][0] // (2 if packed else 1), packed


def triangle_backward_flops(x: Sequence[int], parameters: Sequence[Any], output_mask: Sequence[bool]) -> int:
    """The projections of the forward pass again, on the way in twice, once for the products and once for their own
    gradients; two products of matrices; and one product for each gradient of a weight and each step back to ``x`` that
    ``output_mask`` asks for."""
    (n, c), (d, packed) = x[-2:], _channels(parameters)
    to_z = output_mask[0] or any(output_mask[2:4])
    to_inputs = to_z or output_mask[1] or any(output_mask[4:12])
    back_to_o = to_inputs or any(output_mask[12:14])
    out = c * d * (1 + back_to_o + output_mask[14]) + c * c * (1 + to_z + output_mask[16])
    of_weights = sum(output_mask[4:12:2]) * (2 if packed else 1)
    into = c * d * (8 + 4 * to_z + of_weights) + 2 * n * d if to_inputs else 0
    return 2 * prod(x[:-1]) * (out + into)


def triangle_attention_flops(q: Sequence[int], k: Sequence[int], *args: Any, **kwargs: Any) -> int:
    """Two products, ``4 * batch * rows * heads * Q * K * d``.

    Example::

        >>> torchops.flops.triangle_attention_flops((1, 5, 2, 5, 16), (1, 5, 2, 7, 16))
        22400
    """
    return 4 * prod(q) * k[-2]


def triangle_attention_backward_flops(q: Sequence[int], k: Sequence[int], output_mask: Sequence[bool]) -> int:
    """The product for the scores again, one for their gradient, unless ``v`` alone has one, and one for each of ``q``,
    ``k`` and ``v`` that ``output_mask`` asks for. The kernels for CUDA compute the first two once for each of ``q``,
    ``k`` with ``v`` and the bias, which is not counted."""
    dq, dk, dv, dbias = output_mask
    scores = any(output_mask) + (dq or dk or dbias)
    return (scores + dq + dk + dv) * 2 * prod(q) * k[-2]


def attention_update_flops(x: Sequence[int], parameters: Sequence[Any], heads: int) -> int:
    """For each of the pairs: ``c`` features to ``heads * d`` for q, k, v and the gate, to ``heads`` for the bias, and
    back; and the products of :func:`triangle_attention_flops`."""
    n, c = x[-2:]
    width, gated = parameters[3][0], parameters[6] is not None
    return 2 * prod(x[:-1]) * (c * (width * (4 + gated) + heads) + 2 * n * width)


def attention_update_backward_flops(
    x: Sequence[int], parameters: Sequence[Any], heads: int, output_mask: Sequence[bool]
) -> int:
    """The projections of the forward pass again; what :func:`triangle_attention_backward_flops` counts; and one product
    for each gradient of a weight and each step back to the layer norm. But none that only a gradient reads which
    ``output_mask`` does not ask for."""
    n, c = x[-2:]
    width, gated = parameters[3][0], parameters[6] is not None
    given = [want and t is not None for want, t in zip(output_mask, (x, *parameters), strict=True)]
    to_z, (of_bias, *of_qkv), of_gate, of_gate_bias, of_out = any(given[:3]), given[3:7], *given[7:10]
    to_bias, qkv = to_z or of_bias, [to_z or want for want in of_qkv]
    to_o = to_bias or any(qkv)
    projections = 2 * of_out if gated else of_out
    if to_o or of_gate or of_gate_bias:
        projections += 1 + gated * (1 + to_z + of_gate)
    of_heads = attention = 0
    if to_o:
        projections += 3 + sum(of_qkv) + 3 * to_z
        attention = 1 + (qkv[0] or qkv[1] or to_bias) + sum(qkv)
        of_heads = 1 + of_bias + to_z
    return 2 * prod(x[:-1]) * (c * (projections * width + of_heads * heads) + attention * n * width)


_OPERATORS: dict[Callable[..., int], list[str]] = {
    dense_flops: ["dense", "_dense_on_path", "_linear"],
    dense_gradients_flops: ["_dense_gradients"],
    gate_flops: ["gate", "gate_", "_gate"],
    gate_backward_flops: ["_gate_backward"],
    glu_flops: ["glu", "_glu"],
    glu_backward_flops: ["_glu_backward"],
    square_matmul_flops: ["square_matmul", "square_matmul_"],
    outer_product_mean_flops: ["outer_product_mean"],
    outer_product_mean_backward_flops: ["_outer_product_mean_backward"],
    transition_flops: ["transition", "add_transition_", "_add_transition", "_transition"],
    transition_backward_flops: ["_transition_backward"],
    triangle_multiplicative_update_flops: ["triangle_multiplicative_update", "add_triangle_multiplicative_update_"],
    triangle_update_flops: ["_triangle_multiplicative_update", "_triangle_multiplicative_update_"],
    triangle_backward_flops: ["_triangle_multiplicative_update_backward"],
    triangle_attention_flops: ["triangle_attention", "_triangle_attention"],
    triangle_attention_backward_flops: ["_triangle_attention_backward"],
    attention_update_flops: [f"_triangle_attention_update{suffix}" for suffix in ("", "_", "_kept")],
    attention_update_backward_flops: ["_triangle_attention_update_backward"],
}


def _by_name(formula: Callable[..., int], operator: Any) -> Callable[..., int]:
    """The formula of those arguments of the operator that it names. All overloads begin with the same ones."""
    names = [argument.name for argument in operator.default._schema.arguments]
    read = inspect.signature(formula).parameters

    @wraps(formula)
    def flops(*args: Any, **kwargs: Any) -> int:
        given = dict(zip(names, args, strict=False)) | kwargs
        return formula(**{name: given[name] for name in read if name in given})

    return flops


def register() -> None:
    """Import the counter and give it the formulas."""
    from torch.utils.flop_counter import register_flop_formula

    for formula, operators in _OPERATORS.items():
        for operator in (getattr(torch.ops.myops, name) for name in operators):
            register_flop_formula(operator)(_by_name(formula, operator))

"""The operators of torchops in ONNX: :func:`export`, and the :func:`translation_table` that it passes to the exporter.

The file contains only standard ONNX operators, for any runtime: none of torchops, and none that overwrites its input,
since ONNX has no such operators. Exporting needs ``pip install onnx onnxscript``; importing this module does not.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

__all__ = ["export", "translation_table"]

_FLOAT, _FLOAT16, _BOOL, _DOUBLE = 1, 10, 9, 11  # of onnx.TensorProto


def export(
    model: nn.Module | ExportedProgram,
    args: tuple[Any, ...] = (),
    f: str | os.PathLike[str] | None = None,
    *,
    custom_translation_table: dict[Any, Callable[..., Any]] | None = None,
    **options: Any,
) -> torch.onnx.ONNXProgram:
    """Exports a model that calls operators of torchops, with ``torch.onnx.export(..., dynamo=True)``.

    An operator that overwrites a tensor becomes one that makes a new tensor. Everything after it reads the new tensor,
    through all views. As with PyTorch's own in-place operators, what a model writes into its arguments does not reach
    the caller of the ONNX model, and a buffer starts from its exported value in every run.

    Args:
        model: a module, or a program from :func:`torch.export.export`.
        args: example arguments of a module.
        f: file to write, or ``None``.
        custom_translation_table: translations of further operators; they override :func:`translation_table`.
        options: anything else that :func:`torch.onnx.export` takes, such as ``dynamic_shapes`` and ``opset_version``.

    Raises:
        ImportError: onnx or onnxscript is not installed.

    Example:

        >>> layer = torchops.nn.Dense(3, 4).eval()
        >>> shapes = ({0: "rows"},)
        >>> program = torchops.onnx.export(layer, (torch.zeros(2, 3),), dynamic_shapes=shapes, verbose=False)
        >>> print(*(node.op_type for node in program.model_proto.graph.node))
        MatMul Add Sigmoid
    """
    table = {**translation_table(), **(custom_translation_table or {})}
    program = torch.onnx.export(model, args, f, dynamo=True, custom_translation_table=table, **options)
    assert program is not None  # it is for the exporter that dynamo=False selects
    return program


def translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Returns the translations for ``torch.onnx.export(..., custom_translation_table=...)``.

    Use it where other code calls the exporter. Operators that overwrite are not in it: the exporter sees a new value
    for each of them.

    Raises:
        ImportError: onnxscript is not installed.

    Example:

        >>> args, table = (torch.zeros(2, 3),), torchops.onnx.translation_table()
        >>> layer = torchops.nn.Dense(3, 4).eval()
        >>> program = torch.onnx.export(layer, args, dynamo=True, custom_translation_table=table, verbose=False)
    """
    from onnxscript import opset18

    # For any opset from 18: the exporter sets the version that it is asked for, and these operators kept their form.
    op: Any = opset18

    def _linear(x: Any, w: Any, b: Any = None) -> Any:
        x = x if x.dtype == w.dtype else op.CastLike(x, w)
        product = op.MatMul(x, op.Transpose(w, perm=[1, 0]))
        return product if b is None else op.Add(product, b)

    def dense(x: Any, w: Any, b: Any = None) -> Any:
        return op.Sigmoid(_linear(x, w, b))

    def gate(v: Any, x: Any, w: Any, b: Any = None) -> Any:
        z = _linear(x, w, b)
        return op.Mul(v, op.Sigmoid(z if v.dtype == w.dtype else op.CastLike(z, v)))

    def glu(x: Any, w: Any, wg: Any, b: Any = None, bg: Any = None, activation: str = "sigmoid") -> Any:
        u = _linear(x, wg, bg)
        gate = op.Sigmoid(u)
        return op.Mul(_linear(x, w, b), op.Mul(u, gate) if activation == "silu" else gate)

    def sigmoid(x: Any) -> Any:
        return op.Sigmoid(x)

    def square_matmul(a: Any, b: Any, transpose_b: bool = False) -> Any:
        *batch, rows, columns = range(len(b.shape))
        return op.MatMul(a, op.Transpose(b, perm=[*batch, columns, rows]) if transpose_b else b)

    def softmax(x: Any, dim: int = -1) -> Any:
        if len(x.shape) > 0:
            return op.Softmax(x, axis=dim)
        axis = op.Constant(value_ints=[0])  # ONNX has no axis 0 of a tensor without dimensions, PyTorch has
        return op.Squeeze(op.Softmax(op.Unsqueeze(x, axis), axis=0), axis)

    def layer_norm(
        x: Any, normalized_shape: Sequence[Any], weight: Any = None, bias: Any = None, eps: float = 1e-5
    ) -> Any:
        dims = len(normalized_shape)
        if weight is None:  # required by ONNX
            weight = op.Expand(op.CastLike(op.Constant(value_float=1.0), x), op.Shape(x, start=-dims))
        y, *_moments = op.LayerNormalization(x, weight, bias, axis=-dims, epsilon=eps)
        return y

    def normalized(x: Any, weight: Any, bias: Any, eps: float, like: Any) -> Any:
        norms = [t for t in (weight, bias) if t is not None]
        x = op.Cast(x, to=_FLOAT) if any(t.dtype == _FLOAT for t in norms) and x.dtype != _FLOAT else x
        weight, bias = (t if t is None or t.dtype == x.dtype else op.CastLike(t, x) for t in (weight, bias))
        z = layer_norm(x, like.shape[1:], weight, bias, eps)
        return z if x.dtype == like.dtype else op.CastLike(z, like)

    def transition(
        x: Any,
        *,
        norm_weight: Any = None,
        norm_bias: Any = None,
        gate_weight: Any,
        gate_bias: Any = None,
        up_weight: Any,
        up_bias: Any = None,
        down_weight: Any,
        down_bias: Any = None,
        eps: float = 1e-5,
    ) -> Any:
        z = normalized(x, norm_weight, norm_bias, eps, gate_weight)
        return _linear(glu(z, up_weight, gate_weight, up_bias, gate_bias, "silu"), down_weight, down_bias)

    def _add_transition(x: Any, **parameters: Any) -> Any:
        return added(x, transition(x, **parameters), True)

    def added(x: Any, update: Any, add_residual: bool) -> Any:
        return op.Add(x, op.CastLike(update, x)) if add_residual else update

    def triangle_multiplicative_update(
        x: Any,
        direction: str = "outgoing",
        *,
        mask: Any = None,
        norm_in_weight: Any = None,
        norm_in_bias: Any = None,
        p_in_weight: Any,
        p_in_bias: Any = None,
        g_in_weight: Any,
        g_in_bias: Any = None,
        norm_out_weight: Any = None,
        norm_out_bias: Any = None,
        p_out_weight: Any,
        p_out_bias: Any = None,
        g_out_weight: Any,
        g_out_bias: Any = None,
        eps: float = 1e-5,
    ) -> Any:
        ins = p_in_weight, p_in_bias, None, None, g_in_weight, g_in_bias, None, None
        outs = norm_out_weight, norm_out_bias, p_out_weight, p_out_bias, g_out_weight, g_out_bias
        parameters = norm_in_weight, norm_in_bias, *ins, *outs
        return _triangle_multiplicative_update(x, mask, parameters, direction == "outgoing", eps)[0]

    def _triangle_multiplicative_update(
        x: Any,
        mask: Any,
        parameters: Sequence[Any],
        outgoing: bool,
        eps: float,
        keep_product: bool = False,
        add_residual: bool = False,
    ) -> Any:
        norm_in_weight, norm_in_bias, pa, pa_b, pb, pb_b, ga, ga_b, gb, gb_b = parameters[:10]
        norm_out_weight, norm_out_bias, p_out, p_out_bias, g_out, g_out_bias = parameters[10:]
        *batch, first, second, c = range(len(x.shape))
        z = normalized(x, norm_in_weight, norm_in_bias, eps, pa)

        def factor(p: Any, p_bias: Any, g: Any, g_bias: Any) -> Any:
            made = glu(z, p, g, p_bias, g_bias)
            return made if mask is None else op.Mul(made, op.Unsqueeze(op.CastLike(mask, made), last))

        last = op.Constant(value_ints=[-1])
        a = factor(pa, pa_b, ga, ga_b)
        a, b = op.Split(a, axis=-1, num_outputs=2) if pb is None else (a, factor(pb, pb_b, gb, gb_b))
        if p_out.dtype == _FLOAT16:  # in which the product may overflow
            a, b = op.Cast(a, to=_FLOAT), op.Cast(b, to=_FLOAT)
        kept, summed = (first, second) if outgoing else (second, first)
        o = op.MatMul(op.Transpose(a, perm=[*batch, c, kept, summed]), op.Transpose(b, perm=[*batch, c, summed, kept]))
        o = op.Transpose(o, perm=[*batch, second, c, first])
        o = normalized(o, norm_out_weight, norm_out_bias, eps, p_out)
        update = gate(_linear(o, p_out, p_out_bias), z, g_out, g_out_bias)
        return added(x, update, add_residual), op.Constant(value_floats=[])  # o is kept for gradients alone

    def outer_product_mean(a: Any, b: Any, weight: Any, bias: Any = None, norm: Any = None) -> Any:
        if a.dtype not in (_FLOAT, _DOUBLE):  # runtimes have no Einsum of them, and sums in float16 may overflow
            a, b = op.Cast(a, to=_FLOAT), op.Cast(b, to=_FLOAT)
        outer = op.Einsum(a, b, equation="...sic,...sjd->...ijcd")
        joined = op.Concat(op.Shape(outer, start=0, end=-2), op.Constant(value_ints=[weight.shape[1]]), axis=0)
        outer = op.Reshape(outer, joined, allowzero=1)
        if norm is not None:
            outer = op.Div(outer, op.Unsqueeze(op.CastLike(norm, outer), op.Constant(value_ints=[-1])))
        return _linear(outer, weight, bias)

    def triangle_attention(q: Any, k: Any, v: Any, bias: Any, mask: Any = None, scale: float | None = None) -> Any:
        return attention(q, k, v, bias, mask, max(q.shape[-1], 1) ** -0.5 if scale is None else scale, len(q.shape))

    def attention(q: Any, k: Any, v: Any, bias: Any, mask: Any, scale: float, rank: int) -> Any:
        s = op.MatMul(q, op.Transpose(k, perm=[*range(rank - 2), rank - 1, rank - 2]))
        if s.dtype != bias.dtype:
            s = op.CastLike(s, bias)
        s = op.Add(op.Mul(s, op.CastLike(op.Constant(value_float=scale), s)), bias)
        if mask is not None:  # a row of which no key is kept has all of them
            number = op.CastLike(mask, s)
            none = op.Not(op.CastLike(op.ReduceMax(number, op.Constant(value_ints=[-1])), mask))
            s = op.Where(op.Or(mask, none), s, op.CastLike(op.Constant(value_float=float("-inf")), s))
        p = op.Softmax(s, axis=-1)
        return op.MatMul(p if q.dtype == bias.dtype else op.CastLike(p, q), v)

    def _triangle_attention_update(
        x: Any, mask: Any, parameters: Sequence[Any], heads: int, eps: float, ending: bool, add_residual: bool = False
    ) -> Any:
        norm_weight, norm_bias, bias_weight, *qkv, to_gate, gate_bias, out, out_bias = parameters
        rank, features = len(x.shape), out.shape[1]
        *batch, first, second, c = range(rank)

        def by_rows(t: Any, *more: int) -> Any:
            return op.Transpose(t, perm=[*batch, second, first, *more]) if ending else t

        def of_heads(w: Any) -> Any:
            each = op.Constant(value_ints=[0] * (rank - 1) + [heads, features // heads])  # 0: as it is
            return op.Transpose(op.Reshape(_linear(z, w, None), each), perm=[*batch, first, c, second, rank])

        z = by_rows(normalized(x, norm_weight, norm_bias, eps, bias_weight), c)
        bias = op.Transpose(_linear(z, bias_weight, None), perm=[*batch, c, first, second])
        bias = op.Unsqueeze(bias, op.Constant(value_ints=[first]))
        if mask is not None:
            mask = op.Cast(op.Unsqueeze(by_rows(mask), op.Constant(value_ints=[-3, -2])), to=_BOOL)
        q, k, v = map(of_heads, qkv)
        o = attention(q, k, v, bias, mask, max(features // heads, 1) ** -0.5, rank + 1)
        joined = op.Constant(value_ints=[0] * (rank - 1) + [features])
        o = op.Reshape(op.Transpose(o, perm=[*batch, first, c, second, rank]), joined)
        if to_gate is not None:
            o = gate(o, z, to_gate, gate_bias)
        return added(x, by_rows(_linear(o, out, out_bias), c), add_residual)

    translations = (
        *(_linear, dense, gate, glu, sigmoid, square_matmul, softmax, layer_norm, transition, _add_transition),
        *(outer_product_mean, triangle_multiplicative_update, _triangle_multiplicative_update),
        *(triangle_attention, _triangle_attention_update),
    )
    return {getattr(torch.ops.myops, translation.__name__).default: translation for translation in translations}

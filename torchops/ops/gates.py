"""Sigmoids of products, and what they multiply; of eight-bit operands, too. See :mod:`torchops.ops`."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from torchops._core.errors import with_type_errors

__all__ = ["dense", "dense_scaled", "gate", "gate_", "gate_scaled", "glu", "glu_scaled", "sigmoid", "sigmoid_"]

# Not the overloads `.default`: calls of these can be compiled by torch.jit.script.
_dense = torch.ops.myops.dense
_gate = torch.ops.myops.gate
_gate_ = torch.ops.myops.gate_
_glu = torch.ops.myops.glu
_sigmoid = torch.ops.myops.sigmoid
_sigmoid_ = torch.ops.myops.sigmoid_
_dense_scaled = torch.ops.myops.dense.scaled
_gate_scaled = torch.ops.myops.gate.scaled
_glu_scaled = torch.ops.myops.glu.scaled


@with_type_errors
def dense(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """A fully connected *sigmoid* layer: ``sigmoid(x @ w.T + b)``.

    Args:
        x: input of shape ``(..., in_features)``.
        w: weight of shape ``(out_features, in_features)``.
        b: bias of shape ``(out_features,)``, or ``None``.

    Dtypes: float32, float64, float16 or bfloat16, one for all arguments.

    Memory: the result, and no second tensor of its size, since the pre-activation is never stored. Backward reads
    ``x``, ``w`` and the result. It allocates one tensor of the result's size, unless one kernel computes all gradients
    in one pass.

    Returns:
        A new contiguous tensor of shape ``(..., out_features)``.

    Raises:
        RuntimeError: the shapes do not match, or ``x`` is 0-dimensional; dtypes or devices differ; or the dtype is not
            supported.

    Example:

        >>> torchops.dense(torch.zeros(2, 3), torch.ones(4, 3))
        tensor([[0.5000, 0.5000, 0.5000, 0.5000],
                [0.5000, 0.5000, 0.5000, 0.5000]])
    """
    return _dense(x, w, b)


@with_type_errors
def gate(v: Tensor, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """Gates ``v``: ``v * sigmoid(x @ w.T + b)``, without storing the gate.

    Args:
        v: the value to gate, of shape ``(..., out_features)``.
        x: input of the gate, of shape ``(..., in_features)``, with the leading sizes of ``v``.
        w: weight of shape ``(out_features, in_features)``.
        b: bias of shape ``(out_features,)``, or ``None``.

    Dtypes: float32, float64, float16 or bfloat16, one for all arguments. If ``w`` and ``b`` are float16 or bfloat16,
    ``v`` and ``x`` may each be float32. Such an ``x`` is rounded to their dtype as it is read, without a copy of its
    size; in backward on CUDA, up to 64 MiB of it may be copied at a time.

    Memory: the result, and at most scratch for a few rows at a time; backward on CUDA may copy 16-bit rows that are no
    multiple of 16 bytes. Backward reads ``x`` and ``w``, and ``v`` if the gate is trained, and computes the gate
    again. Where that is slow, such as with many features in, training keeps ``x @ w.T + b``, a tensor of the result's
    size: see `Where results of matmuls are kept` in ``docs/gate_training.md``.

    Returns:
        A new contiguous tensor of the shape and dtype of ``v``.

    Raises:
        RuntimeError: the shapes do not match, or ``v`` or ``x`` is 0-dimensional; devices differ; or the dtypes are not
            supported together.

    Example:

        >>> torchops.gate(torch.tensor([[2.0, 4.0]]), torch.zeros(1, 3), torch.ones(2, 3))
        tensor([[1., 2.]])
    """
    return _gate(v, x, w, b)


@with_type_errors
def gate_(v: Tensor, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """Overwrites ``v`` with ``gate(v, x, w, b)`` and returns it, without a second buffer of its size.

    Shapes and dtypes are those of :func:`gate`. ``x``, ``w`` and ``b`` may overlap ``v``. They are then copied first,
    unless ``x`` is ``v``.

    Memory: scratch of at most 4 MiB per thread on the CPU, or one row per thread if rows are longer, and of 32 MiB on a
    GPU. Training keeps no copy of ``v``: the gradients of ``x``, ``w`` and ``b`` read the result, as that of
    ``torch.sigmoid_`` does. So eager mode raises in backward if ``v`` has been overwritten again in between. Of a
    float16 ``v`` a copy is kept if ``x``, ``w`` or ``b`` requires a gradient, since small results are 0 there.

    Raises:
        RuntimeError: as :func:`gate`; ``v`` has several elements in one place, as after ``expand``; or ``v`` is a leaf
            that requires grad.

    Example:

        >>> v = torch.tensor([[2.0, 4.0]])
        >>> torchops.gate_(v, torch.zeros(1, 3), torch.ones(2, 3)) is v
        True
    """
    _gate_(v, x, w, b)
    return v


@with_type_errors
def glu(
    x: Tensor,
    w: Tensor,
    wg: Tensor,
    b: Tensor | None = None,
    bg: Tensor | None = None,
    *,
    activation: Literal["sigmoid", "silu"] = "sigmoid",
) -> Tensor:
    """``(x @ w.T + b) * activation(x @ wg.T + bg)``: a gated linear unit.

    ``F.glu(F.linear(x, p))`` with a packed weight ``p`` is ``glu(x, *p.chunk(2))``; the halves are not copied.

    Args:
        x: input of shape ``(..., in_features)``.
        w, wg: weights of the value and of the gate, both of shape ``(out_features, in_features)``.
        b, bg: biases of shape ``(out_features,)``, or ``None``.
        activation: ``"sigmoid"``, or ``"silu"`` as in SwiGLU.

    Dtypes: float32, float64, float16 or bfloat16, one for all arguments. If the weights are float16 or bfloat16, ``x``
    may be float32. It is rounded to their dtype as it is read, without a copy of its size; in backward on CUDA, up to
    64 MiB of it may be copied at a time.

    Memory: the result, and at most scratch for a few rows at a time; backward on CUDA may copy 16-bit rows that are no
    multiple of 16 bytes. Backward reads ``x`` and the weights, and computes both factors again. Where that is slow,
    such as with many features in, training keeps ``x @ w.T + b`` and ``x @ wg.T + bg``, two tensors of the result's
    size: see `Where results of matmuls are kept` in ``docs/gate_training.md``.

    Returns:
        A new contiguous tensor of shape ``(..., out_features)`` and of the dtype of the weights.

    Raises:
        RuntimeError: the shapes do not match, or ``x`` is 0-dimensional; devices differ; the dtypes are not supported
            together.
        ValueError: there is no such activation.

    Example:

        >>> torchops.glu(torch.ones(1, 3), torch.ones(2, 3), torch.zeros(2, 3))
        tensor([[1.5000, 1.5000]])
    """
    return _glu(x, w, wg, b, bg, activation=activation)


@with_type_errors
def sigmoid(x: Tensor) -> Tensor:
    """Returns ``1 / (1 + exp(-x))`` of every element, as a new contiguous tensor of the shape of ``x``.

    Dtypes: float32, float64, float16 or bfloat16.

    Memory: the result, which backward reads.

    Raises:
        RuntimeError: the dtype is not supported.

    Example:

        >>> torchops.sigmoid(torch.zeros(2))
        tensor([0.5000, 0.5000])
    """
    return _sigmoid(x)


@with_type_errors
def sigmoid_(x: Tensor) -> Tensor:
    """Overwrites ``x``, of any shape, with ``sigmoid(x)`` and returns it.

    Dtypes: float32, float64, float16 or bfloat16.

    Memory: no second tensor. Training needs none either, since backward reads the result.

    Raises:
        RuntimeError: the dtype is not supported; ``x`` has several elements in one place, as after ``expand``; or ``x``
            is a leaf that requires grad.

    Example:

        >>> x = torch.zeros(2)
        >>> torchops.sigmoid_(x) is x
        True
    """
    _sigmoid_(x)
    return x


@with_type_errors
def dense_scaled(
    x: Tensor,
    w: Tensor,
    scale_x: Tensor,
    scale_w: Tensor,
    b: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """:func:`dense` of eight-bit operands: ``sigmoid((x @ w.T) * scale_x * scale_w + b)``.

    This is ``torch._scaled_mm(x, w.t(), scale_x, scale_w)`` followed by a sigmoid. It takes the same scales: what you
    divided ``x`` and ``w`` by before you rounded them to float8. Unlike in ``torch._scaled_mm``,

    - ``x`` may have any number of leading dimensions;
    - one scale may be for a whole tensor and the other for each row;
    - the features need not be multiples of 16.

    The operator is ``torch.ops.myops.dense.scaled``, an overload of ``dense``. It has its own function, because its
    results have another dtype and no gradients.

    Args:
        x: input of shape ``(..., in_features)``.
        w: weight of shape ``(out_features, in_features)``.
        scale_x: one element, for all of ``x``; or shape ``(..., 1)``, one for each of its rows, like
            ``x.abs().amax(-1, keepdim=True)``.
        scale_w: one element, for all of ``w``; or shape ``(1, out_features)``, one for each of its rows.
        b: bias of shape ``(out_features,)``, or ``None``.
        out_dtype: bfloat16, float16 or float32. Default: bfloat16.

    Dtypes: float8_e4m3fn ``x`` and ``w``, float32 scales, ``b`` of ``out_dtype`` or float32. Sums are float32. On
    compute capability 9.0, the tensor cores add up parts of a sum with fewer bits, and the parts are added up in
    float32, as in ``_scaled_mm`` without ``use_fast_accum``.

    Gradients: none, as with ``_scaled_mm``. An argument may require grad, but backward raises.

    Memory: the result, and copies of ``x`` and ``w`` if their rows are not adjacent and aligned. If there is no fused
    kernel (GPUs of other compute capabilities than 9.0, features that are not multiples of 16, results that are not
    bfloat16), also a panel of rows of at most 32 MiB, or one row, and, for such features, a copy of ``w`` in bfloat16.
    On the CPU, also the float32 weights of a few columns, 4 MiB or 64 columns, and panels of rows.

    Returns:
        A new contiguous tensor of shape ``(..., out_features)``.

    Raises:
        RuntimeError: the shapes do not match, or ``x`` is 0-dimensional; devices differ; the dtypes are not supported;
            or the GPU has a compute capability below 8.9.

    Example:

        >>> x, w = torch.ones(2, 3).to(torch.float8_e4m3fn), torch.ones(4, 3).to(torch.float8_e4m3fn)
        >>> torchops.dense_scaled(x, w, torch.tensor([0.0]), torch.tensor([2.0]), out_dtype=torch.float32)
        tensor([[0.5000, 0.5000, 0.5000, 0.5000],
                [0.5000, 0.5000, 0.5000, 0.5000]])
    """
    return _dense_scaled(x, w, scale_x, scale_w, b, out_dtype=out_dtype)


@with_type_errors
def gate_scaled(v: Tensor, x: Tensor, w: Tensor, scale_x: Tensor, scale_w: Tensor, b: Tensor | None = None) -> Tensor:
    """:func:`gate` with eight-bit operands of the gate: ``v * sigmoid((x @ w.T) * scale_x * scale_w + b)``.

    Args:
        v: the value to gate, of shape ``(..., out_features)``: bfloat16, float16 or float32.
        x: input of the gate, of shape ``(..., in_features)``, with the leading sizes of ``v``.
        w: weight of shape ``(out_features, in_features)``.
        scale_x: one element, or ``(..., 1)``, one for each row of ``x``.
        scale_w: one element, or ``(1, out_features)``, one for each row of ``w``.
        b: bias of shape ``(out_features,)``, or ``None``: of the dtype of ``v``, or float32.

    Dtypes: as in :func:`dense_scaled`. There are no gradients either.

    Memory: as in :func:`dense_scaled`; one kernel computes a bfloat16 result. ``v`` is copied if its rows are not
    adjacent and aligned.

    Returns:
        A new contiguous tensor of the shape and dtype of ``v``.

    Raises:
        RuntimeError: as :func:`dense_scaled`, or if the shape or dtype of ``v`` does not fit.

    Example:

        >>> x, w = torch.ones(2, 3).to(torch.float8_e4m3fn), torch.ones(4, 3).to(torch.float8_e4m3fn)
        >>> torchops.gate_scaled(torch.ones(2, 4), x, w, torch.tensor([0.0]), torch.tensor([2.0]))
        tensor([[0.5000, 0.5000, 0.5000, 0.5000],
                [0.5000, 0.5000, 0.5000, 0.5000]])
    """
    return _gate_scaled(v, x, w, scale_x, scale_w, b)


@with_type_errors
def glu_scaled(
    x: Tensor,
    w: Tensor,
    wg: Tensor,
    scale_x: Tensor,
    scale_w: Tensor,
    scale_wg: Tensor,
    b: Tensor | None = None,
    bg: Tensor | None = None,
    *,
    activation: Literal["sigmoid", "silu"] = "sigmoid",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """:func:`glu` of eight-bit operands, with ``s = scale_x`` and an activation ``act``:
    ``((x @ w.T) * s * scale_w + b) * act((x @ wg.T) * s * scale_wg + bg)``.

    Args:
        x: input of shape ``(..., in_features)``.
        w: weight of the value, of shape ``(out_features, in_features)``.
        wg: weight of the gate, of the same shape.
        scale_x: one element, or ``(..., 1)``, one for each row of ``x``.
        scale_w: one element, or ``(1, out_features)``, one for each row of ``w``.
        scale_wg: the same for ``wg``.
        b: bias of the value, of shape ``(out_features,)``, or ``None``.
        bg: bias of the gate, likewise.
        activation: ``"sigmoid"`` or ``"silu"``.
        out_dtype: bfloat16, float16 or float32. Default: bfloat16.

    Dtypes: as in :func:`dense_scaled`. There are no gradients either.

    Memory: as in :func:`dense_scaled`. On a GPU, the value is computed first, rounded to ``out_dtype``, and then
    multiplied by the gate in place; with a bfloat16 ``out_dtype``, by one kernel each. There is no other tensor of its
    size.

    Returns:
        A new contiguous tensor of shape ``(..., out_features)``.

    Raises:
        RuntimeError: as :func:`dense_scaled`.
        ValueError: there is no such activation.

    Example:

        >>> x, w = torch.ones(2, 3).to(torch.float8_e4m3fn), torch.ones(4, 3).to(torch.float8_e4m3fn)
        >>> torchops.glu_scaled(x, w, w, *torch.tensor([[1.0], [2.0], [0.0]]), out_dtype=torch.float32)
        tensor([[3., 3., 3., 3.],
                [3., 3., 3., 3.]])
    """
    return _glu_scaled(x, w, wg, scale_x, scale_w, scale_wg, b, bg, activation=activation, out_dtype=out_dtype)

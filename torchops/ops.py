"""Typed functions over the operators ``torch.ops.myops.*``.

The functions call the dispatcher and nothing else, so PyTorch treats them (in compile, export, vmap, hooks, subclasses)
as it treats the operators. In-place functions return their first argument, as PyTorch's do; the operators themselves
return nothing.

All tensors of a call share one device and one dtype, except that ``gate``, ``gate_`` and ``glu`` also take float32
inputs with 16-bit weights. The dtypes float32, float64, float16 and bfloat16 are supported.

Invalid arguments raise an error that names the operator, the argument, what was expected and what was passed. It is a
``TypeError`` for an argument of a wrong type, such as a number instead of a tensor. Nothing is modified then.

The same call gives the same bits in every run, for the same shapes, strides and alignment, number of threads, device
and build. A row may have other bits in a batch of another size, where another kernel is faster.

``torch.autocast`` casts as for the PyTorch functions that these replace. ``dense`` and ``square_matmul`` run in its
lower precision; ``softmax`` and ``layer_norm`` in float32 on a GPU, and in the dtype of ``x`` on the CPU; ``sigmoid``
in the dtype of ``x``. For ``gate`` and ``glu``, autocast casts the weights, and inputs unless they are float32. An
in-place operator keeps the dtype of its first argument, and the others are cast to that; those of a float32 ``gate_``
as for ``gate``.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

__all__ = [
    "dense",
    "gate",
    "gate_",
    "glu",
    "layer_norm",
    "layer_norm_",
    "sigmoid",
    "sigmoid_",
    "softmax",
    "softmax_",
    "square_matmul",
    "square_matmul_",
]

# Not the overloads `.default`: calls of these can be compiled by torch.jit.script.
_dense = torch.ops.myops.dense
_gate = torch.ops.myops.gate
_gate_ = torch.ops.myops.gate_
_glu = torch.ops.myops.glu
_layer_norm = torch.ops.myops.layer_norm
_layer_norm_ = torch.ops.myops.layer_norm_
_sigmoid = torch.ops.myops.sigmoid
_sigmoid_ = torch.ops.myops.sigmoid_
_softmax = torch.ops.myops.softmax
_softmax_ = torch.ops.myops.softmax_
_square_matmul = torch.ops.myops.square_matmul
_square_matmul_ = torch.ops.myops.square_matmul_

_P = ParamSpec("_P")
_R = TypeVar("_R")
_MISMATCH = re.compile(
    r"myops::\w+\(\) Expected a value of type '(.*)' for argument '(.*)' but instead found type '(.*)'\."
)
_NO_TENSOR = "There were no tensor arguments to this function"  # in inference mode
_TYPES = {
    "Optional[Tensor]": "Tensor or None",
    "Optional[float]": "float or None",
    "Optional[int]": "dtype or None",  # the only optional integers are out_dtype
    "List[int]": "tuple of ints",
}


def with_type_errors(function: Callable[_P, _R], name: str | None = None) -> Callable[_P, _R]:
    """A function that raises a ``TypeError`` for an argument of a wrong type, as PyTorch's functions do; its operators
    raise a ``RuntimeError``. (TorchScript looks the names that `function` uses up where this stands.)"""

    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            # Where an operator has overloads, the text begins with another line, and the first schema is ours.
            if mismatch := _MISMATCH.search(str(error)):
                expected, argument, got = mismatch.groups()
            elif str(error).startswith(_NO_TENSOR) and inspect.isfunction(function):
                expected, argument, got = "Tensor", function.__code__.co_varnames[0], "NoneType"
            else:
                raise
            expected = _TYPES.get(expected, expected)
            if expected == "tuple of ints" and got in ("tuple", "list"):
                got += " of something else"
            raise TypeError(f"{name or function.__name__}: expected {argument} of type {expected}, got {got}") from None

    # torch.compile limits the graphs of a code object: functions that share one would share the limit.
    call.__code__ = call.__code__.replace(co_name=function.__name__)
    return functools.wraps(function)(call)


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
    size: see `The gradient computes the gate again` in ``docs/gates.md``.

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
    size: see `The gradient computes the gate again` in ``docs/gates.md``.

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
def square_matmul(a: Tensor, b: Tensor, *, transpose_b: bool = False) -> Tensor:
    """Returns ``a @ b``, or ``a @ b.T`` with ``transpose_b``, for a square matrix ``b`` or a batch of them.

    Args:
        a: matrix, or stack of matrices, of shape ``(..., n)``.
        b: matrix of shape ``(n, n)``; or ``(*batch, n, n)`` for ``a`` of shape ``(*batch, m, n)``, with exactly these
            batch sizes.
        transpose_b: multiply by the transpose of ``b``, or of each matrix in it.

    Dtypes: float32, float64, float16 or bfloat16, one for both arguments.

    Memory: the result. Backward reads ``b`` if ``a`` requires a gradient, and ``a`` if ``b`` does.

    Returns:
        A new contiguous tensor of the shape of ``a``.

    Raises:
        RuntimeError: ``b`` is not of shape ``(n, n)``, or ``a`` is 0-dimensional; dtypes or devices differ; or the
            dtype is not supported.

    Example:

        >>> torchops.square_matmul(torch.ones(1, 2), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        tensor([[4., 6.]])
    """
    return _square_matmul(a, b, transpose_b=transpose_b)


@with_type_errors
def square_matmul_(a: Tensor, b: Tensor, *, transpose_b: bool = False) -> Tensor:
    """Overwrites ``a`` with ``square_matmul(a, b)`` and returns it, without a second buffer of its size.

    Shapes and dtypes are those of :func:`square_matmul`. ``b`` may overlap ``a``; it is then copied first.

    Memory: scratch of at most 4 MiB per thread on the CPU and 32 MiB on a GPU. ``b`` is also copied if neither its rows
    nor its columns are contiguous: of a batch, one matrix at a time on the CPU, and on a GPU as many as fit 16 MiB, but
    at least one. Training copies the old ``a`` only if ``b`` requires a gradient.

    Raises:
        RuntimeError: as :func:`square_matmul`; ``a`` has several elements in one place, as after ``expand``; or ``a``
            is a leaf that requires grad.

    Example:

        >>> a = torch.ones(1, 2)
        >>> torchops.square_matmul_(a, torch.tensor([[1.0, 2.0], [3.0, 4.0]]), transpose_b=True)
        tensor([[3., 7.]])
        >>> a
        tensor([[3., 7.]])
    """
    _square_matmul_(a, b, transpose_b=transpose_b)
    return a


@with_type_errors
def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """Returns ``exp(x) / sum(exp(x))`` along ``dim``, computed after subtracting the maximum.

    The result is a new contiguous tensor of the shape of ``x``.

    Dtypes: float32, float64, float16 or bfloat16.

    Memory: the result, which backward reads.

    Raises:
        IndexError: ``dim`` is out of range.
        RuntimeError: the dtype is not supported.

    Example:

        >>> torchops.softmax(torch.zeros(1, 4))
        tensor([[0.2500, 0.2500, 0.2500, 0.2500]])
    """
    return _softmax(x, dim)


@with_type_errors
def softmax_(x: Tensor, dim: int = -1) -> Tensor:
    """Overwrites ``x``, of any shape, with ``softmax(x, dim)`` and returns it.

    Dtypes: float32, float64, float16 or bfloat16.

    Memory: scratch of at most 4 MiB per thread on the CPU and 32 MiB on a GPU. On a GPU, a longer line whose elements
    are not adjacent is copied as a whole. Training needs no more, since backward reads the result.

    Raises:
        IndexError: ``dim`` is out of range.
        RuntimeError: the dtype is not supported; ``x`` has several elements in one place, as after ``expand``; or ``x``
            is a leaf that requires grad.

    Example:

        >>> x = torch.zeros(1, 2)
        >>> torchops.softmax_(x)
        tensor([[0.5000, 0.5000]])
    """
    _softmax_(x, dim)
    return x


@with_type_errors
def layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Normalises the trailing dimensions ``normalized_shape``: ``(x - mean) / sqrt(var + eps) * weight + bias``.

    Args:
        x: input of shape ``(..., *normalized_shape)``.
        normalized_shape: the sizes of the dimensions over which mean and (biased) variance are taken.
        weight: scale of shape ``normalized_shape``, or ``None`` for 1.
        bias: shift of shape ``normalized_shape``, or ``None`` for 0.
        eps: added to the variance.

    Dtypes: float32, float64, float16 or bfloat16, one for all arguments.

    Memory: the result. Backward reads ``x`` and ``weight``, and two numbers per row.

    Returns:
        A new contiguous tensor of the shape of ``x``.

    Raises:
        RuntimeError: ``normalized_shape`` is empty, or not the trailing sizes of ``x``; ``weight`` or ``bias`` is not
            of that shape; dtypes or devices differ; or the dtype is not supported.

    Example:

        >>> torchops.layer_norm(torch.tensor([[1.0, 3.0]]), (2,), eps=0.0)
        tensor([[-1.,  1.]])
    """
    return _layer_norm(x, normalized_shape, weight, bias, eps)


@with_type_errors
def layer_norm_(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Overwrites ``x`` with ``layer_norm(x, ...)`` and returns it.

    Shapes and dtypes are those of :func:`layer_norm`. ``weight`` and ``bias`` may overlap ``x``. They are then copied
    first.

    Memory: two numbers per row, and scratch of at most 4 MiB per thread on the CPU and 32 MiB on a GPU. On a GPU, a
    longer row whose elements are not adjacent is copied as a whole. Training copies the old ``x``, except without
    ``weight`` and ``bias``, where backward reads the result as it was rounded. In 16 bits, the terms of a gradient that
    cancel then leave a rounding of the result times the incoming gradient times ``1 / sqrt(var + eps)``.

    Raises:
        RuntimeError: as :func:`layer_norm`; ``x`` has several elements in one place, as after ``expand``; or ``x`` is a
            leaf that requires grad.

    Example:

        >>> x = torch.tensor([[1.0, 3.0]])
        >>> torchops.layer_norm_(x, (2,), eps=0.0) is x
        True
    """
    _layer_norm_(x, normalized_shape, weight, bias, eps)
    return x

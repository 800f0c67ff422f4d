"""Operators of the pair layer of AlphaFold-style models: triangle updates of pair tensors ``(*batch, N, N, c)``, the
transition, and the outer product mean, which makes pairs of sequences. For dtypes, errors and autocast see
:mod:`torchops.ops`."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from torchops._core import trace
from torchops._core.errors import with_type_errors

__all__ = [
    "add_transition_",
    "add_triangle_multiplicative_update_",
    "outer_product_mean",
    "transition",
    "triangle_multiplicative_update",
]

_outer_product_mean = torch.ops.myops.outer_product_mean
_transition = torch.ops.myops.transition
_transition_ = torch.ops.myops.add_transition_
_triangle_multiplicative_update = torch.ops.myops.triangle_multiplicative_update
_triangle_multiplicative_update_ = torch.ops.myops.add_triangle_multiplicative_update_

trace.refuse(
    "triangle_multiplicative_update",
    "_triangle_multiplicative_update",
    "_triangle_multiplicative_update_",
    "_triangle_multiplicative_update_backward",
    "_triangle_rows_in",
    "_triangle_rows_in_backward",
    "_triangle_rows_out",
    "_triangle_rows_out_backward",
    "_triangle_rows_parameter_gradients",
)


@with_type_errors
def outer_product_mean(
    a: Tensor, b: Tensor, weight: Tensor, bias: Tensor | None = None, norm: Tensor | None = None
) -> Tensor:
    """The outer product mean of AlphaFold and its successors, after its layer norm and projections, as one operator
    (`Abramson et al. 2024 <https://doi.org/10.1038/s41586-024-07487-w>`_, supplement, algorithm 9; `Jumper et al. 2021
    <https://doi.org/10.1038/s41586-021-03819-2>`_, supplement, algorithm 10).

    .. code-block:: text

        outer[i, j, c * D + d] = sum over s of a[s, i, c] * b[s, j, d]
        out[i, j] = weight @ (outer[i, j] / norm[i, j]) + bias

    Args:
        a: left projection of ``S`` sequences, of shape ``(*batch, S, N, C)``, with any number of batch dimensions. To
            leave out positions of sequences, set them to 0 here and in ``b``.
        b: right projection, of shape ``(*batch, S, M, D)``.
        weight: of shape ``(O, C * D)``.
        bias: of shape ``(O,)``, or ``None``.
        norm: divisors of shape ``(*batch, N, M)``, such as the number of sequences that have both positions, at least
            1; or ``None``, for sums.

    Dtypes: float32, float64, float16 or bfloat16, one for all arguments. If that is float16 or bfloat16, ``norm`` may
    be float32. ``torch.autocast`` casts the others to its lower precision, and leaves a float32 ``norm`` as it is. In
    float16, no sum over sequences may exceed 65504.

    Packages that descend from AlphaFold 2 add the bias before they divide: pass none, and add ``bias / norm``.

    Memory: the result, and two tensors of scratch, each of at most 4 MiB on the CPU and 32 MiB on a GPU, but of at
    least one row ``i``, in which the outer products are computed. ``a``, ``b`` and ``weight`` are copied if a matmul
    cannot read them as they are; in 16 bits on a GPU, ``a`` and ``b`` are also if there are more than 128 sequences,
    but no multiple of 128. Backward reads the arguments and computes the outer products again. It has up to three such
    tensors, each of at most 128 MiB on a GPU, and in 16 bits the gradients of ``b`` and ``weight`` in float32. On the
    CPU, backward keeps the outer products of all pairs instead, if they take at most 8 MiB.

    Elements of the batch are computed one after another, so it is for large ones. Under ``torch.func``, in forward mode
    and for second derivatives, the outer products of all pairs exist.

    Returns:
        A new contiguous tensor of shape ``(*batch, N, M, O)`` and the dtype of ``a``.

    Raises:
        RuntimeError: the shapes do not match; devices differ; or dtypes are not supported together.

    Example:

        >>> a, b, weight = torch.randn(4, 5, 2), torch.randn(4, 6, 3), torch.randn(7, 6)
        >>> torchops.outer_product_mean(a, b, weight, norm=torch.full((5, 6), 4.0)).shape
        torch.Size([5, 6, 7])
    """
    return _outer_product_mean(a, b, weight, bias, norm)


@with_type_errors
def transition(
    x: Tensor,
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
    """The transition of AlphaFold 3 and its successors, a gated feed-forward layer after a layer norm, as one
    operator (`Abramson et al. 2024 <https://doi.org/10.1038/s41586-024-07487-w>`_, supplement, algorithm 11).

    .. code-block:: text

        z = layer_norm(x)
        (silu(z @ gate.T + gate_bias) * (z @ up.T + up_bias)) @ down.T + down_bias

    Args:
        x: input of shape ``(..., c)``.
        norm_weight, norm_bias: of the layer norm, of shape ``(c,)``, or ``None``.
        gate_weight, up_weight: of shape ``(hidden, c)``; their biases ``(hidden,)``, or ``None``.
        down_weight: of shape ``(c, hidden)``; its bias ``(c,)``, or ``None``.
        eps: of the layer norm.

    Dtypes: float32, float64, float16 or bfloat16, one for all parameters. If that is float16 or bfloat16, ``x``,
    ``norm_weight`` and ``norm_bias`` may each be float32. ``x`` is rounded only after the mean of each row has been
    subtracted. ``torch.autocast`` casts the other parameters, and leaves a float32 ``x`` or norm as it is.

    Memory: without gradients, the ``hidden`` features, several times as many as those of ``x``, exist for one panel
    of rows at a time. With gradients, the two products of ``hidden`` features are kept for backward where that is
    faster than to compute them again: with more than 128 features in; on CUDA also in float32 and float64, and with
    up to 128 rows; on a CPU also if each is at most 8 MiB. Sizes that a compiled or exported program leaves open
    count as large. Eager mode keeps four tensors of that size. ``torch.utils.checkpoint`` keeps none.

    Returns:
        The transition, without ``x`` added: a new contiguous tensor of the shape of ``x`` and the dtype of the
        parameters.

    Raises:
        RuntimeError: the shapes do not match, or ``x`` is 0-dimensional; devices differ; or dtypes are not supported
            together.

    Example:

        >>> x, w = torch.randn(5, 3), torch.randn(12, 3)
        >>> torchops.transition(x, gate_weight=w, up_weight=w, down_weight=torch.randn(3, 12)).shape
        torch.Size([5, 3])
    """
    return _transition(
        x,
        norm_weight=norm_weight,
        norm_bias=norm_bias,
        gate_weight=gate_weight,
        gate_bias=gate_bias,
        up_weight=up_weight,
        up_bias=up_bias,
        down_weight=down_weight,
        down_bias=down_bias,
        eps=eps,
    )


@with_type_errors
def add_transition_(
    x: Tensor,
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
    """Adds :func:`transition` to ``x``, as a model's residual connection does, and returns ``x``.

    Shapes are those of :func:`transition`. Parameters may overlap ``x``; they are then copied first. If memory runs out
    halfway, a part of ``x`` may be overwritten.

    Dtypes: as :func:`transition`; the sum has the dtype of ``x``.

    Memory: without gradients, no tensor of the size of ``x`` is allocated. Training keeps a copy of the old ``x``, and
    computes the hidden products again.

    Raises:
        RuntimeError: as :func:`transition`; ``x`` has several elements in one place, as after ``expand``; or ``x`` is a
            leaf that requires grad.

    Example:

        >>> x, w = torch.randn(5, 3), torch.randn(12, 3)
        >>> torchops.add_transition_(x, gate_weight=w, up_weight=w, down_weight=torch.randn(3, 12)) is x
        True
    """
    _transition_(
        x,
        norm_weight=norm_weight,
        norm_bias=norm_bias,
        gate_weight=gate_weight,
        gate_bias=gate_bias,
        up_weight=up_weight,
        up_bias=up_bias,
        down_weight=down_weight,
        down_bias=down_bias,
        eps=eps,
    )
    return x


@with_type_errors
def triangle_multiplicative_update(
    x: Tensor,
    direction: Literal["outgoing", "incoming"] = "outgoing",
    *,
    mask: Tensor | None = None,
    norm_in_weight: Tensor | None = None,
    norm_in_bias: Tensor | None = None,
    p_in_weight: Tensor,
    p_in_bias: Tensor | None = None,
    g_in_weight: Tensor,
    g_in_bias: Tensor | None = None,
    norm_out_weight: Tensor | None = None,
    norm_out_bias: Tensor | None = None,
    p_out_weight: Tensor,
    p_out_bias: Tensor | None = None,
    g_out_weight: Tensor,
    g_out_bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """The triangle multiplicative update of AlphaFold and its successors, as one operator (`Jumper et al. 2021
    <https://doi.org/10.1038/s41586-021-03819-2>`_, supplement, algorithms 11 and 12).

    .. code-block:: text

        z = layer_norm(x)
        a, b = ((z @ p_in.T + p_in_bias) * sigmoid(z @ g_in.T + g_in_bias) * mask).chunk(2, -1)
        o[i, j] = sum over k of a[i, k] * b[j, k]     outgoing
        o[i, j] = sum over k of a[k, i] * b[k, j]     incoming
        (layer_norm(o) @ p_out.T + p_out_bias) * sigmoid(z @ g_out.T + g_out_bias)

    Args:
        x: pair tensor of shape ``(*batch, N, N, c)``, with any number of batch dimensions.
        direction: ``"outgoing"`` or ``"incoming"``.
        mask: factors of shape ``(*batch, N, N)``, bool or floating-point, or ``None``.
        norm_in_weight, norm_in_bias: of the layer norm of ``x``, of shape ``(c,)``, or ``None``.
        p_in_weight, g_in_weight: projections and their gates, of shape ``(2 * d, c)``: the rows of ``a``, then those of
            ``b``. The biases have shape ``(2 * d,)``, or are ``None``.
        norm_out_weight, norm_out_bias: of the layer norm of ``o``, of shape ``(d,)``, or ``None``.
        p_out_weight: of shape ``(c, d)``; its bias ``(c,)``, or ``None``.
        g_out_weight: of shape ``(c, c)``; its bias ``(c,)``, or ``None``.
        eps: of both layer norms.

    Dtypes: float32, float64, float16 or bfloat16, one for all arguments but the mask. If the parameters are float16 or
    bfloat16, ``x`` and the weights and biases of the norms may each be float32. ``x`` is rounded only after the mean of
    each row has been subtracted. ``torch.autocast`` casts the mask and the other parameters, and leaves a float32 ``x``
    or norm as it is. In float16, the operator scales ``a`` by a power of two of at most ``1 / sqrt(N)``, so ``o``
    overflows only if large products of one sign add up: it cannot while ``sqrt(N) * max|a| * max|b|`` is at most 65504.

    Returns:
        The update, without ``x`` added: a new contiguous tensor of the shape of ``x`` and the dtype of the parameters.

    Memory: two tensors of the size of ``x`` (of ``o``, if ``d > c``), the result included, plus at most 64 MiB and a
    tenth of such a tensor, since rows of ``a`` and ``b`` are padded. For backward, ``o`` and the arguments are kept;
    everything else is computed again.

    Raises:
        RuntimeError: the shapes do not match; devices differ; or dtypes are not supported together.
        ValueError: there is no such direction.

    Example:

        >>> x, p, w = torch.randn(5, 5, 3), torch.randn(4, 3), torch.randn(3, 3)
        >>> out = torchops.triangle_multiplicative_update(
        ...     x, "outgoing", p_in_weight=p, g_in_weight=p, p_out_weight=torch.randn(3, 2), g_out_weight=w
        ... )
        >>> out.shape
        torch.Size([5, 5, 3])
    """
    return _triangle_multiplicative_update(
        x,
        direction,
        mask=mask,
        norm_in_weight=norm_in_weight,
        norm_in_bias=norm_in_bias,
        p_in_weight=p_in_weight,
        p_in_bias=p_in_bias,
        g_in_weight=g_in_weight,
        g_in_bias=g_in_bias,
        norm_out_weight=norm_out_weight,
        norm_out_bias=norm_out_bias,
        p_out_weight=p_out_weight,
        p_out_bias=p_out_bias,
        g_out_weight=g_out_weight,
        g_out_bias=g_out_bias,
        eps=eps,
    )


@with_type_errors
def add_triangle_multiplicative_update_(
    x: Tensor,
    direction: Literal["outgoing", "incoming"] = "outgoing",
    *,
    mask: Tensor | None = None,
    norm_in_weight: Tensor | None = None,
    norm_in_bias: Tensor | None = None,
    p_in_weight: Tensor,
    p_in_bias: Tensor | None = None,
    g_in_weight: Tensor,
    g_in_bias: Tensor | None = None,
    norm_out_weight: Tensor | None = None,
    norm_out_bias: Tensor | None = None,
    p_out_weight: Tensor,
    p_out_bias: Tensor | None = None,
    g_out_weight: Tensor,
    g_out_bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Adds :func:`triangle_multiplicative_update` to ``x``, as a model's residual connection does, and returns ``x``.

    Shapes and dtypes are those of :func:`triangle_multiplicative_update`; the sum has the dtype of ``x``. ``mask``
    and parameters may overlap ``x``; they are then copied first.

    Memory: as :func:`triangle_multiplicative_update`. Training keeps ``o`` and a copy of the old ``x``. If memory runs
    out halfway, a part of ``x`` may be overwritten.

    Raises:
        ValueError: as :func:`triangle_multiplicative_update`.
        RuntimeError: as :func:`triangle_multiplicative_update`; ``x`` has several elements in one place, as after
            ``expand``; or ``x`` is a leaf that requires grad.

    Example:

        >>> x, p, w = torch.randn(5, 5, 3), torch.randn(4, 3), torch.randn(3, 3)
        >>> torchops.add_triangle_multiplicative_update_(
        ...     x, "incoming", p_in_weight=p, g_in_weight=p, p_out_weight=torch.randn(3, 2), g_out_weight=w
        ... ) is x
        True
    """
    _triangle_multiplicative_update_(
        x,
        direction,
        mask=mask,
        norm_in_weight=norm_in_weight,
        norm_in_bias=norm_in_bias,
        p_in_weight=p_in_weight,
        p_in_bias=p_in_bias,
        g_in_weight=g_in_weight,
        g_in_bias=g_in_bias,
        norm_out_weight=norm_out_weight,
        norm_out_bias=norm_out_bias,
        p_out_weight=p_out_weight,
        p_out_bias=p_out_bias,
        g_out_weight=g_out_weight,
        g_out_bias=g_out_bias,
        eps=eps,
    )
    return x

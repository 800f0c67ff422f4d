"""Attention among the edges of triangles, as in AlphaFold-style models, and the update of a pair tensor by it. See
:mod:`torchops.ops`."""

from __future__ import annotations

import torch
from torch import SymFloat, SymInt, Tensor

from torchops._core.errors import with_type_errors
from torchops._triangle_attention.attention import operators as _operators  # noqa: F401  (registers them)
from torchops._triangle_attention.update import autograd as _autograd  # noqa: F401  (registers gradients)
from torchops._triangle_attention.update.arguments import TENSORS, AttentionWeights, Node
from torchops._triangle_attention.update.operators import update, update_

__all__ = ["AttentionWeights", "triangle_attention", "triangle_attention_update"]

_triangle_attention = torch.ops.myops.triangle_attention


@with_type_errors
def triangle_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """For each row ``i`` and head, attention of queries ``j`` to keys ``k``, with a bias that depends on ``j`` and
    ``k``, and that all rows share.

    It is the core of triangle attention, where the edges ``(i, j)`` attend to the edges ``(i, k)`` (`Jumper et al. 2021
    <https://doi.org/10.1038/s41586-021-03819-2>`_, supplement, algorithms 13 and 14), and of attention with pair bias,
    where rows are samples of one structure (`Abramson et al. 2024 <https://doi.org/10.1038/s41586-024-07487-w>`_,
    supplement, algorithm 24; see :func:`attention_pair_bias`).

    .. code-block:: text

        s[i, h, j, k] = scale * (q[i, h, j] . k[i, h, k]) + bias[h, j, k] - 1e9 * (not mask[i, k])
        result[i, h, j] = sum over k of softmax(s[i, h, j])[k] * v[i, h, k]

    The scores ``s`` never exist for all rows.

    Args:
        q: of shape ``(batch, R, H, Q, d)``. Numbers of rows, queries and keys are independent. For a pair tensor of
            ``N`` by ``N`` edges, queries and keys are ``N``, and rows too, or some of them.
        k, v: of shape ``(batch, R, H, K, d)``. They and ``q`` have one dtype, and any strides, such as those of views
            of one product.
        bias: of shape ``(batch, 1, H, Q, K)``, and the dtype of ``q``, or float32 if that has 16 bits. Layouts other
            than rows of ``k`` are copied once.
        mask: bool, of shape ``(batch, R, 1, 1, K)``, ``True`` for keys to keep; or ``None``. Other keys have no weight,
            but their ``v`` and the products of their ``k`` must be finite, since 0 times NaN is NaN. A row of which the
            mask keeps no key is computed as if all keys were kept, which is what the formula above says as long as its
            sums are exact. Without keys (``K = 0``), the result is 0.
        scale: factor of the products of ``q`` and ``k``. Default: ``d ** -0.5``.

    Dtypes: float32, float64, float16 and bfloat16. Scores and their exponentials are float32 even if ``q`` has 16 bits.
    Under ``torch.autocast``, the operator runs in the lower precision, as PyTorch's attention does.

    Returns:
        A new dense tensor of the shape and dtype of ``q``. Its dimensions have the same order in memory as those of
        ``q``, so ``result.transpose(-3, -2).flatten(-2)`` makes no copy if ``q`` is a view with heads side by side.

    Memory: the result, and a number for each query and head; on CUDA, copies of the mask (in float32) and the bias; and
    where panels run, scratch for one of them, which has at most 8 MiB unless a single row takes more. Training keeps
    the arguments, the result and the numbers. The gradient computes the scores again. Gradients from the Triton kernels
    have the same bits in every run.

    Raises:
        RuntimeError: the shapes do not match; devices differ; or dtypes are not supported together.

    Example:

        >>> q, k, v = torch.randn(1, 5, 2, 3, 16), *torch.randn(2, 1, 5, 2, 7, 16)
        >>> torchops.triangle_attention(q, k, v, bias=torch.randn(1, 1, 2, 3, 7)).shape
        torch.Size([1, 5, 2, 3, 16])
    """
    return _triangle_attention(q, k, v, bias, mask, scale)


def triangle_attention_update(
    x: Tensor,
    mask: Tensor | None,
    weights: AttentionWeights,
    node: Node = "starting",
    *,
    inplace: bool = False,
    residual: bool = False,
) -> Tensor:
    """Returns what triangle attention adds to ``x``, as a new contiguous tensor.

    With ``residual``, it returns the sum with ``x`` instead, a new tensor of the dtype of ``x``. With ``inplace``, it
    adds to ``x`` and returns ``x``.

    .. code-block:: text

        z = layer_norm(x)
        q, k, v, bias = z @ q.T, z @ k.T, z @ v.T, z @ bias_weight.T
        o = triangle_attention(q, k, v, bias, mask)        of rows; for the ending node, of columns
        (o * sigmoid(z @ gate.T + gate_bias)) @ out.T + out_bias

    Args:
        x: pair tensor of shape ``(*batch, N, N, c)``, with any number of batch dimensions.
        mask: of shape ``(*batch, N, N)``, bool or floating-point, or ``None``. A key whose mask is 0 (``False``) has no
            weight; any other number keeps it. It must not need a gradient.
        weights: the parameters.
        node: with ``"starting"``, the edges of a row attend to one another; with ``"ending"``, those of a column.
        inplace: overwrite ``x``. This is for inference; training copies ``x`` first.
        residual: add ``x``. This is for training: the last pass over the gradient of ``x`` adds that of the sum.

    Dtypes: float32, float64, float16 or bfloat16, one for all parameters. If that is float16 or bfloat16, ``x`` and the
    weight and bias of the norm may each be float32; ``torch.autocast`` leaves them so.

    Memory: without gradients, the result and, on CUDA, at most a tensor of the size of ``x`` in the dtype of the
    weights, or 128 MiB if that is more; on the CPU, 32 MiB and the bias; or one row, if rows are longer. Training keeps
    ``x`` and the result of the attention, which has ``heads * d`` features. The rest is computed again.

    Raises:
        ValueError: there is no such node.
        TypeError: an argument has a wrong type, such as a number instead of a tensor.
        RuntimeError: the shapes do not match; devices differ; dtypes are not supported together; or ``x`` is to be
            overwritten, and has several elements in one place or is a leaf that requires grad.

    Example:

        >>> weights = torchops.nn.TriangleAttention(8, heads=2, head_dim=4).weights()
        >>> torchops.triangle_attention_update(torch.randn(5, 5, 8), None, weights).shape
        torch.Size([5, 5, 8])
    """
    if node not in ("starting", "ending"):
        raise ValueError(f"triangle_attention_update: expected node starting or ending, got {node}")
    if not isinstance(x, Tensor):
        raise TypeError(f"triangle_attention_update: expected x of type Tensor, got {type(x).__name__}")
    parameters, heads, eps = list(weights[:10]), weights.heads, weights.eps
    try:
        if inplace:
            update_(x, mask, parameters, heads, eps, node == "ending")
            return x
        return update(x, mask, parameters, heads, eps, node == "ending", residual)
    except RuntimeError:
        # The dispatcher does not say which of a list is no tensor.
        for name, t in zip(("mask", *TENSORS), (mask, *parameters), strict=True):
            if t is not None and not isinstance(t, Tensor):
                got = type(t).__name__
                raise TypeError(f"triangle_attention_update: expected {name} of type Tensor, got {got}") from None
        for name, number, kinds in (("heads", heads, (int, SymInt)), ("eps", eps, (float, int, SymInt, SymFloat))):
            if not isinstance(number, kinds):
                kind, got = kinds[0].__name__, type(number).__name__
                raise TypeError(f"triangle_attention_update: expected {name} of type {kind}, got {got}") from None
        raise

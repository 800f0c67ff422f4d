"""The update of a pair tensor by triangle attention: layer norm, attention, gate and output product.

:class:`torchops.nn.TriangleAttention` and the modules for other packages call it.
"""

from __future__ import annotations

from torch import SymFloat, SymInt, Tensor

from torchops._triangle_attention.update import autograd as _attention_update_autograd  # noqa: F401  (registers gradients)
from torchops._triangle_attention.update.arguments import TENSORS, AttentionWeights, Node
from torchops._triangle_attention.update.operators import update, update_

__all__ = ["AttentionWeights", "Node", "triangle_attention_update"]


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

    Dtypes: float32, float64, float16 or bfloat16, one for all parameters. If that is float16 or bfloat16, ``x`` may be
    float32.

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
        >>> torchops.attention_update.triangle_attention_update(torch.randn(5, 5, 8), None, weights).shape
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

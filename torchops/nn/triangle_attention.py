"""AlphaFold's triangle attention as a module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchops._triangle_attention.update.arguments import Node
from torchops.nn.layers import FusedModule, Linear, normalized
from torchops.ops import AttentionWeights, triangle_attention, triangle_attention_update

__all__ = ["TriangleAttention"]


class _Heads(FusedModule):
    """The layers of the heads, in a module of their own as in Boltz. `TriangleAttention` reads them, or calls it."""

    _within = ("torchops.nn.triangle_attention.TriangleAttention", "mha")
    _without_bias = ("linear_q", "linear_k", "linear_v")

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, z: Tensor, bias: Tensor, keys: Tensor | None) -> Tensor:
        layers: Any = self._modules
        q, k, v = (layers[f"linear_{n}"](z).unflatten(-1, (self.heads, -1)).transpose(-3, -2) for n in "qkv")
        o = triangle_attention(q, k, v, bias, keys).transpose(-3, -2).flatten(-2)
        out: Tensor = layers["linear_o"](o * torch.sigmoid(layers["linear_g"](z)))
        return out


class TriangleAttention(FusedModule):
    """AlphaFold's triangle attention with its layer norm, gate and output product (`Jumper et al. 2021
    <https://doi.org/10.1038/s41586-021-03819-2>`_, supplement, algorithms 13 and 14).

    With ``z = layer_norm(x)``, the edges ``(i, j)`` of each row ``i`` attend to its edges ``(i, k)``:
    ``o`` is :func:`torchops.triangle_attention` of ``linear_q(z)``, ``linear_k(z)``, ``linear_v(z)`` and the bias
    ``linear(z)`` of ``(j, k)``. The layer returns ``linear_o(o * sigmoid(linear_g(z)))``. For the ending node, rows are
    columns. Add the result to ``x``, usually after a dropout, or pass ``residual`` or ``inplace``.

    In inference the layer works in panels of rows, so ``q``, ``k``, ``v`` and ``o`` never exist for all rows.

    Args:
        c: features of ``x``.
        heads: number of attention heads.
        head_dim: features of a head.
        node: ``"starting"`` or ``"ending"``.
        bias: learn biases of the gate and of the output product, as AlphaFold 2 does; AlphaFold 3 and Boltz have none.
        eps: of the layer norm.
        device, dtype: of the parameters.

    The state dict uses Boltz's names, so you can load Boltz's: ``layer_norm.weight``, ``layer_norm.bias``
    ``(c,)``; ``linear.weight`` ``(heads, c)``; ``mha.linear_q.weight``, ``mha.linear_k.weight``,
    ``mha.linear_v.weight``, ``mha.linear_g.weight`` ``(heads * head_dim, c)``; ``mha.linear_o.weight``
    ``(c, heads * head_dim)``; and with ``bias`` ``mha.linear_g.bias`` ``(heads * head_dim,)``, ``mha.linear_o.bias``
    ``(c,)``.

    It starts as AlphaFold does: ``linear`` normal with variance ``1 / c``; ``q``, ``k`` and ``v`` uniform as in Glorot
    and Bengio; the gate with weights of 0 and biases of 1, thus open at ``sigmoid(1)``, or at a half without biases;
    ``linear_o`` 0, so the first update is 0; the norm with weights of 1 and biases of 0.

    The layers inside are plain ``nn.LayerNorm`` and ``nn.Linear``. The operators read their parameters and do
    not call them. While one has a hook or a weight of a tensor subclass, they are called, and
    :func:`torchops.triangle_attention` and PyTorch's operators compute the rest. To put another kind of layer in their
    place raises a ``TypeError``.

    Shape:
        ``x`` of ``(*batch, N, N, c)`` and ``mask`` of ``(*batch, N, N)``, bool or floating-point, or ``None``. A key
        whose mask is 0 has no weight; any other number keeps it. A row whose mask is all 0 is computed as if it were
        all 1. The result has the shape of ``x`` and the dtype of the parameters. With 16-bit parameters, ``x`` may be
        float32.

    Memory: as :func:`torchops.triangle_attention_update`.

    Raises:
        ValueError: there is no such node.
        RuntimeError: as :func:`torchops.triangle_attention_update`, when called.

    Example:

        >>> layer = torchops.nn.TriangleAttention(8, heads=2, head_dim=4, node="ending")
        >>> layer(torch.randn(5, 5, 8), mask=torch.ones(5, 5)).shape
        torch.Size([5, 5, 8])
    """

    _without_bias = ("linear",)

    def __init__(
        self,
        c: int,
        heads: int = 4,
        head_dim: int = 32,
        node: Node = "starting",
        *,
        bias: bool = False,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if node not in ("starting", "ending"):
            raise ValueError(f"TriangleAttention: expected node starting or ending, got {node}")
        self.c, self.heads, self.head_dim, self.eps = c, heads, head_dim, eps
        self.node: Node = node
        where: Any = {"device": device, "dtype": dtype}
        self.layer_norm = nn.LayerNorm(c, eps, **where)
        self.linear = Linear(c, heads, False, "normal", **where)
        self.mha = _Heads(heads)
        for name in ("q", "k", "v"):
            self.mha.add_module(f"linear_{name}", Linear(c, heads * head_dim, False, "glorot", **where))
        self.mha.linear_o = Linear(heads * head_dim, c, bias, "final", **where)
        self.mha.linear_g = Linear(c, heads * head_dim, bias, "gating", **where)

    def weights(self) -> AttentionWeights:
        """The parameters as :func:`torchops.triangle_attention_update` takes them."""
        mha: Any = self.mha
        norm, gate, out = self.layer_norm, mha.linear_g, mha.linear_o  # a look-up in a module takes a microsecond
        return AttentionWeights(
            norm.weight,
            norm.bias,
            self.linear.weight,
            mha.linear_q.weight,
            mha.linear_k.weight,
            mha.linear_v.weight,
            gate.weight,
            gate.bias,
            out.weight,
            out.bias,
            self.heads,
            self.eps,
        )

    def forward(
        self, x: Tensor, mask: Tensor | None = None, *, inplace: bool = False, residual: bool = False
    ) -> Tensor:
        """Returns the update of ``x``.

        With ``residual``, it returns ``x + update(x)`` instead, a new tensor of the dtype of ``x``. If the fused
        kernels run, the addition takes no extra pass over memory. Nor does that of its gradients, if ``x`` has the
        dtype of the parameters.

        With ``inplace``, it returns ``x`` itself after ``x += update(x)``. The update itself is not a
        further tensor. It is meant for inference."""
        if self.calls_layers():
            return self.add_by_layers(x, mask, inplace=inplace, residual=residual)
        return triangle_attention_update(x, mask, self.weights(), self.node, inplace=inplace, residual=residual)

    def by_layers(self, x: Tensor, *mask: Tensor | None) -> Tensor:
        (of_edges,) = mask
        if self.node == "ending":
            x, of_edges = x.transpose(-3, -2), None if of_edges is None else of_edges.mT
        z = normalized(x, self.layer_norm, self.linear)[None].flatten(0, -4)  # (batch, i, j, c)
        keys = None if of_edges is None else (of_edges != 0)[None].flatten(0, -3)[:, :, None, None]
        out: Tensor = self.mha(z, self.linear(z).permute(0, 3, 1, 2).unsqueeze(1), keys).view(x.shape)
        return out.transpose(-3, -2) if self.node == "ending" else out

    def extra_repr(self) -> str:
        return f"{self.c}, heads={self.heads}, head_dim={self.head_dim}, node={self.node}, eps={self.eps}"

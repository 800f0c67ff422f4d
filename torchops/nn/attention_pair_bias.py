"""AlphaFold 3's attention with pair bias as a module."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from torchops.nn.layers import FusedModule, Linear, as_parameters, normalized
from torchops.ops.pair_bias import PairBiasWeights, attend, attention_pair_bias, check_inputs, with_rows

__all__ = ["AttentionPairBias"]


class _Bias(FusedModule):
    """The layers of the bias, in a module of their own as in Boltz. `AttentionPairBias` reads them, or calls it."""

    _within = ("torchops.nn.attention_pair_bias.AttentionPairBias", "proj_z")
    _without_bias = ("1",)

    def __init__(self, c_z: int, heads: int, eps: float, **where: Any) -> None:
        super().__init__()
        self.eps = eps
        self.add_module("0", nn.LayerNorm(c_z, eps, **where))
        self.add_module("1", Linear(c_z, heads, False, "normal", **where))

    def forward(self, z: Tensor) -> Tensor:
        norm, linear = self.children()
        bias: Tensor = linear(normalized(z, norm, linear))
        return bias


def _parameters(layer: Any) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if layer is None else (layer.weight, layer.bias)


class AttentionPairBias(FusedModule):
    """AlphaFold 3's attention of tokens or atoms with a bias from their pairs (`Abramson et al. 2024
    <https://doi.org/10.1038/s41586-024-07487-w>`_, supplement, algorithm 24).

    ``o`` is :func:`torchops.triangle_attention` of the heads of ``proj_q(s)``, ``proj_k(keys)``, ``proj_v(keys)`` and
    the bias ``proj_z(z)``, with samples as rows. The layer returns ``proj_o(o * sigmoid(proj_g(s)))``. Add the result
    to ``s``, or pass ``residual``.

    Args:
        c: features of ``s``.
        c_z: features of ``z``; or ``None`` if ``z`` is the bias itself, of ``heads`` features, for models that compute
            the biases of all their layers at once.
        heads: number of attention heads.
        head_dim: features of a head. Default: ``c // heads``.
        initial_norm: normalise ``s`` and ``keys`` first, as the trunk of AlphaFold 3 does. Its diffusion transformer
            has an adaptive norm of its own in this place.
        eps: of the layer norms.
        device, dtype: of the parameters.

    The state dict uses Boltz's names, so you can load Boltz's: ``proj_q.weight``, ``proj_k.weight``, ``proj_v.weight``,
    ``proj_g.weight`` ``(heads * head_dim, c)``; ``proj_q.bias`` ``(heads * head_dim,)``; ``proj_o.weight``
    ``(c, heads * head_dim)``; with ``c_z`` ``proj_z.0.weight``, ``proj_z.0.bias`` ``(c_z,)`` and ``proj_z.1.weight``
    ``(heads, c_z)``; and with ``initial_norm`` ``norm_s.weight``, ``norm_s.bias`` ``(c,)``.

    It starts as :class:`TriangleAttention` does: ``proj_z.1`` normal with variance ``1 / c_z``; ``proj_q``, ``proj_k``
    and ``proj_v`` uniform as in Glorot and Bengio, with biases of 0; ``proj_g`` 0, so the gate is open at a half;
    ``proj_o`` 0, so the first result is 0; norms with weights of 1 and biases of 0.

    The layers inside are plain ``nn.LayerNorm`` and ``nn.Linear``. The operators read their parameters and
    do not call them. While one has a hook or a weight of a tensor subclass, they are called, and
    :func:`torchops.triangle_attention` and PyTorch's operators compute the rest. To put another kind of layer in their
    place raises a ``TypeError``.

    Shape:
        ``s`` of ``(*batch, Q, c)``, or ``(*batch, samples, Q, c)`` with samples that share ``z``; ``z`` of
        ``(*batch, Q, K, c_z)``; ``mask`` of ``(*batch, K)`` or ``(*batch, samples, K)``, bool or floating-point, or
        ``None``; ``keys`` of the shape of ``s``, but with ``K`` in the place of ``Q``, or ``None`` for ``s`` itself. A
        key whose mask is 0 has no weight; any other number keeps it. Where no key is kept, all are. The result has the
        shape of ``s`` and the dtype of the parameters. With 16-bit parameters, ``s``, ``keys`` and ``z`` may be
        float32. Windows of atoms are a dimension of the batch.

    Memory: as :func:`torchops.attention_pair_bias`.

    Raises:
        ValueError: a size is below 1; or there is no ``head_dim``, and ``heads`` does not divide ``c``.
        RuntimeError: as :func:`torchops.attention_pair_bias`, when called.

    Example:

        >>> layer = torchops.nn.AttentionPairBias(8, 4, heads=2)
        >>> pairs, mask = torch.randn(5, 5, 4), torch.ones(5)
        >>> layer(torch.randn(3, 5, 8), pairs, mask).shape
        torch.Size([3, 5, 8])
        >>> windows = torchops.nn.AttentionPairBias(8, None, heads=2)
        >>> windows(torch.randn(6, 4, 8), torch.randn(6, 4, 16, 2), keys=torch.randn(6, 16, 8)).shape
        torch.Size([6, 4, 8])
    """

    _parts: ClassVar[dict[str, type[nn.Module]]] = {"norm_s": nn.LayerNorm, "proj_z": _Bias}
    _without_bias = ("proj_k", "proj_v", "proj_g", "proj_o")

    def __init__(
        self,
        c: int,
        c_z: int | None,
        heads: int = 16,
        head_dim: int | None = None,
        *,
        initial_norm: bool = False,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if c < 1 or (c_z is not None and c_z < 1):
            raise ValueError(f"AttentionPairBias: expected c and c_z of at least 1, got {c} and {c_z}")
        if heads < 1 or (head_dim is None and c % heads):
            raise ValueError(f"AttentionPairBias: expected heads that divide c = {c}, got {heads}")
        if head_dim is not None and head_dim < 1:
            raise ValueError(f"AttentionPairBias: expected head_dim of at least 1, got {head_dim}")
        self.c, self.c_z, self.heads, self.eps = c, c_z, heads, eps
        self.head_dim = c // heads if head_dim is None else head_dim
        width = heads * self.head_dim
        where: Any = {"device": device, "dtype": dtype}
        self.norm_s = nn.LayerNorm(c, eps, **where) if initial_norm else None
        self.proj_q = Linear(c, width, True, "glorot", **where)
        self.proj_k = Linear(c, width, False, "glorot", **where)
        self.proj_v = Linear(c, width, False, "glorot", **where)
        self.proj_g = Linear(c, width, False, "gating", **where)
        self.proj_z = None if c_z is None else _Bias(c_z, heads, eps, **where)
        self.proj_o = Linear(width, c, False, "final", **where)

    def weights(self) -> PairBiasWeights:
        """The parameters as :func:`torchops.attention_pair_bias` takes them."""
        norm, of_z = self.norm_s, self.proj_z
        z_norm, z_linear = (None, None) if of_z is None else (of_z._modules["0"], of_z._modules["1"])
        return PairBiasWeights(
            self.proj_q.weight,
            self.proj_q.bias,
            self.proj_k.weight,
            self.proj_v.weight,
            self.proj_g.weight,
            self.proj_o.weight,
            *_parameters(z_norm),
            _parameters(z_linear)[0],
            *_parameters(norm),
            heads=self.heads,
            eps=self.eps,
            normalize=norm is not None,
        )

    def forward(
        self,
        s: Tensor,
        z: Tensor,
        mask: Tensor | None = None,
        keys: Tensor | None = None,
        *,
        residual: bool = False,
    ) -> Tensor:
        """Returns the attention's result; with ``residual``, ``s`` plus that, in the dtype of ``s``."""
        if self.calls_layers():
            check_inputs(s, z, mask, keys, self.c, self.heads if self.c_z is None else self.c_z, "proj_q")
            return self.add_by_layers(s, z, mask, keys, inplace=False, residual=residual)
        return attention_pair_bias(s, z, mask, self.weights(), keys, residual=residual)

    def by_layers(self, x: Tensor, *mask: Tensor | None) -> Tensor:
        z, of_keys, keys = mask
        assert z is not None
        rows = self._normalized(with_rows(x, z))
        k_in = rows if keys is None else self._normalized(with_rows(keys, z))
        bias = as_parameters(z, self.proj_q) if self.proj_z is None else self.proj_z(z)
        o = attend(self.proj_q(rows), self.proj_k(k_in), self.proj_v(k_in), bias, of_keys, self.heads)
        out: Tensor = self.proj_o(o * torch.sigmoid(self.proj_g(rows)))
        return out.view(x.shape)

    def _normalized(self, x: Tensor) -> Tensor:
        return as_parameters(x, self.proj_q) if self.norm_s is None else normalized(x, self.norm_s, self.proj_q)

    def extra_repr(self) -> str:
        initial_norm = self.norm_s is not None
        sizes = f"{self.c}, {self.c_z}, heads={self.heads}, head_dim={self.head_dim}"
        return f"{sizes}, initial_norm={initial_norm}, eps={self.eps}"

"""The pair half of a layer of AlphaFold 3 as one module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchops.nn.pair import Transition, TriangleMultiplicativeUpdate
from torchops.nn.triangle_attention import TriangleAttention

__all__ = ["PairLayer"]


class PairLayer(nn.Module):
    """The part of a layer of AlphaFold 3 that updates the pair tensor (`Abramson et al. 2024
    <https://doi.org/10.1038/s41586-024-07487-w>`_, supplement, algorithm 17).

    .. code-block:: text

        x += dropout(tri_mul_out(x, mask))       by rows
        x += dropout(tri_mul_in(x, mask))        by rows
        x += dropout(tri_att_start(x, mask))     by rows
        x += dropout(tri_att_end(x, mask))       by columns
        x += transition_z(x)

    Args:
        c: features of ``x``.
        heads, head_dim: number of attention heads, and features of a head.
        hidden: features inside the transition. Default: ``4 * c``.
        dropout: in training, the probability that the update of a row (or column) is dropped. Each row of each batch is
            dropped as a whole, with all its columns and features, and the others are scaled by ``1 / (1 - dropout)``.
        checkpoint: in training, keep only the input of each update, and compute the update again for the gradient. This
            takes less memory and more time.
        bias: learn biases of projections, gates and output products, as AlphaFold 2 does; AlphaFold 3 and Boltz have
            none.
        eps: of all layer norms.
        device, dtype: of the parameters.

    The modules inside are :class:`TriangleMultiplicativeUpdate`, :class:`TriangleAttention` and :class:`Transition`,
    under the names of the formula. These are also the names in Boltz's ``PairformerNoSeqLayer``, so you can load its
    state dict.

    Shape:
        ``x`` of ``(*batch, N, N, c)`` and ``mask`` of ``(*batch, N, N)``, or ``None``. The mask has zeros and ones, and
        is bool or floating-point. The result has the shape and dtype of ``x``. With 16-bit parameters, ``x`` may be
        float32.

    Memory: the most that one of the updates inside takes. Training keeps what each of them keeps; with ``checkpoint``,
    only the input of each.

    Raises:
        ValueError: ``dropout`` is not at least 0 and below 1.
        RuntimeError: as the modules inside, when called.

    Example:

        >>> layer = torchops.nn.PairLayer(8, heads=2, head_dim=4)
        >>> layer(torch.randn(5, 5, 8), mask=torch.ones(5, 5)).shape
        torch.Size([5, 5, 8])
        >>> x = torch.randn(5, 5, 8)
        >>> with torch.inference_mode():
        ...     layer.eval()(x, inplace=True) is x
        True
    """

    def __init__(
        self,
        c: int,
        heads: int = 4,
        head_dim: int = 32,
        hidden: int | None = None,
        *,
        dropout: float = 0.25,
        checkpoint: bool = False,
        bias: bool = False,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not 0 <= dropout < 1:
            raise ValueError(f"PairLayer: expected dropout of at least 0 and below 1, got {dropout}")
        self.dropout, self.checkpoint = dropout, checkpoint
        how: Any = {"bias": bias, "eps": eps, "device": device, "dtype": dtype}
        self.tri_mul_out = TriangleMultiplicativeUpdate(c, direction="outgoing", **how)
        self.tri_mul_in = TriangleMultiplicativeUpdate(c, direction="incoming", **how)
        self.tri_att_start = TriangleAttention(c, heads, head_dim, "starting", **how)
        self.tri_att_end = TriangleAttention(c, heads, head_dim, "ending", **how)
        self.transition_z = Transition(c, hidden, **how)

    def reset_parameters(self) -> None:
        """Initialises all parameters as the modules inside do."""
        for module in self.children():
            module.reset_parameters()  # type: ignore[operator]

    def forward(self, x: Tensor, mask: Tensor | None = None, *, inplace: bool = False) -> Tensor:
        """Returns ``x`` after the five updates, as a new tensor.

        With ``inplace``, it overwrites ``x`` and returns it. The updates are not further tensors; their
        scratch remains. It is meant for inference. If one of the updates raises, ``x`` has those before it."""
        if x.dim() < 3:
            raise RuntimeError(f"PairLayer: expected x of shape (..., N, N, c), got {tuple(x.shape)}")
        for module, shared_along in (
            (self.tri_mul_out, "rows"),
            (self.tri_mul_in, "rows"),
            (self.tri_att_start, "rows"),
            (self.tri_att_end, "columns"),
        ):
            kept = self._kept(x, shared_along)  # type: ignore[arg-type]
            x = self._add(module, x, (mask,), kept, inplace)
        return self._add(self.transition_z, x, (), None, inplace)

    def _kept(self, x: Tensor, of: Literal["rows", "columns"]) -> Tensor | None:
        """Factors of rows, or of columns: 0 for those whose update is left out."""
        if not self.training or self.dropout == 0:
            return None
        shape = [*x.shape[:-3], x.shape[-3], 1, 1] if of == "rows" else [*x.shape[:-3], 1, x.shape[-2], 1]
        # As torch.rand, and of the kind of x: the same numbers on all ranks of a DTensor.
        kept = x.new_empty(shape, dtype=torch.float32).uniform_() >= self.dropout
        return kept.to(x.dtype) * (1 / (1 - self.dropout))

    def _add(
        self, module: nn.Module, x: Tensor, mask: tuple[Tensor | None, ...], kept: Tensor | None, inplace: bool
    ) -> Tensor:
        if inplace:
            if kept is None:
                return module(x, *mask, inplace=True)
            # Inductor can drop a plain clone of what is overwritten.
            return x.addcmul_(module(torch.ops.myops._saved_copy(x) if torch.is_grad_enabled() else x, *mask), kept)
        arguments: Any = module, x, mask, kept
        if self.checkpoint and torch.is_grad_enabled():
            # The factors of the dropout are drawn already, so that no state of a generator has to be kept.
            return checkpoint(_added, *arguments, use_reentrant=False, preserve_rng_state=False)
        return _added(*arguments)

    def extra_repr(self) -> str:
        return f"dropout={self.dropout}, checkpoint={self.checkpoint}"


def _added(module: Callable[..., Tensor], x: Tensor, mask: tuple[Tensor | None, ...], kept: Tensor | None) -> Tensor:
    return module(x, *mask, residual=True) if kept is None else torch.addcmul(x, module(x, *mask), kept)

"""Modules over the operators of torchops."""

from __future__ import annotations

from torch import Tensor, nn

from .ops import dense

__all__ = ["Dense"]


class Dense(nn.Linear):
    """A fully connected layer with a sigmoid: ``y = sigmoid(x @ weight.T + bias)``.

    It is an ``nn.Linear`` (same parameters, initialisation, state dict) followed by ``nn.Sigmoid``, computed by one
    operator: :func:`torchops.dense`.

    Args:
        in_features: size of each input row.
        out_features: size of each output row.
        bias: learn an additive bias.
        device, dtype: of the parameters.

    Shape:
        ``(..., in_features)`` to ``(..., out_features)``.

    Example::

        >>> layer = torchops.nn.Dense(3, 4)
        >>> layer(torch.zeros(2, 3)).shape
        torch.Size([2, 4])
    """

    def forward(self, input: Tensor) -> Tensor:
        return dense(input, self.weight, self.bias)

"""Gates, and layers that end in a gate."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from torchops.nn.layers import FusedModule, LinearParameters, as_parameters, is_read
from torchops.ops import dense, gate, glu

__all__ = ["GLU", "Dense", "Gate"]

torch.fx.wrap("_dense")
torch.fx.wrap("packed_glu")


def is_dense(x: Tensor) -> bool:
    """Whether the operators support the layout of `x`. ``nn.Linear`` also supports sparse and nested tensors."""
    return x.layout is torch.strided and not x.is_nested


def _dense(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    return dense(x, w, b) if is_dense(x) and is_read(w) else torch.sigmoid(nn.functional.linear(x, w, b))


def packed_glu(x: Tensor, w: Tensor, b: Tensor | None, activation: str = "sigmoid", gate_first: bool = False) -> Tensor:
    """``value * activation(gate)`` of the halves of ``linear(x, w, b)``, by halves of the weight. Those of a DTensor
    may lie elsewhere, and other subclasses may have none."""
    if not is_dense(x) or not is_read(w, distributed=False):
        first, second = nn.functional.linear(x, w, b).chunk(2, -1)
        gate, value = (first, second) if gate_first else (second, first)
        return value * (torch.sigmoid(gate) if activation == "sigmoid" else nn.functional.silu(gate))
    i, j = (1, 0) if gate_first else (0, 1)
    weights = w.chunk(2)
    if b is None:
        return torch.ops.myops.glu(x, weights[i], weights[j], activation=activation)
    biases = b.chunk(2)
    out: Tensor = torch.ops.myops.glu(x, weights[i], weights[j], biases[i], biases[j], activation=activation)
    return out


class Dense(LinearParameters):
    """A fully connected layer with a sigmoid: ``y = sigmoid(x @ weight.T + bias)``.

    It computes ``nn.Linear`` followed by ``nn.Sigmoid`` by one operator: :func:`torchops.dense`. Parameters,
    initialisation and state dict are those of ``nn.Linear``. It is no ``nn.Linear``, so what looks for these leaves it
    alone.

    Args:
        in_features: size of each input row.
        out_features: size of each output row.
        bias: learn an additive bias.
        device, dtype: of the parameters.

    Shape:
        ``(..., in_features)`` to ``(..., out_features)``. A nested tensor goes through ``linear`` and ``sigmoid``, as
        it did before :func:`torchops.replace`.

    Memory: as :func:`torchops.dense`.

    Raises:
        RuntimeError: as :func:`torchops.dense`, when called.

    Example:

        >>> layer = torchops.nn.Dense(3, 4)
        >>> layer(torch.zeros(2, 3)).shape
        torch.Size([2, 4])
    """

    def forward(self, input: Tensor) -> Tensor:
        return _dense(input, self.weight, self.bias)


class PackedGLU(LinearParameters):
    """An ``nn.Linear`` followed by ``nn.GLU()``, computed by one operator: :func:`torchops.glu`."""

    def forward(self, input: Tensor) -> Tensor:
        return packed_glu(input, self.weight, self.bias)


class Gate(LinearParameters):
    """Gates one tensor by another: ``v * sigmoid(x @ weight.T + bias)``.

    One operator computes it all: :func:`torchops.gate`. Parameters, initialisation and state dict are those of
    ``nn.Linear``. It is no ``nn.Linear``, so what looks for these leaves it alone. With 16-bit parameters, ``v`` and
    ``x`` may be float32.

    Args:
        in_features: size of each row of ``x``.
        out_features: size of each row of ``v``.
        bias: learn an additive bias.
        device, dtype: of the parameters.

    Shape:
        ``v`` of ``(..., out_features)`` and ``x`` of ``(..., in_features)`` to ``(..., out_features)``.

    Memory: as :func:`torchops.gate`.

    Raises:
        RuntimeError: as :func:`torchops.gate`, when called.

    Example:

        >>> layer = torchops.nn.Gate(3, 4)
        >>> layer(torch.ones(2, 4), torch.zeros(2, 3)).shape
        torch.Size([2, 4])
    """

    def forward(self, v: Tensor, x: Tensor) -> Tensor:
        return gate(v, x, self.weight, self.bias)


class GLU(FusedModule):
    """A gated linear unit: ``value(x) * activation(gate(x))`` with two linear layers, ``value`` and ``gate``.

    Both are ``nn.Linear`` (parameters, initialisation, names in the state dict). One operator, :func:`torchops.glu`,
    reads their parameters and does not call them. While one has a hook or a weight of a tensor subclass, they are
    called. To put another kind of layer in their place raises a ``TypeError``. With 16-bit parameters, ``x`` may be
    float32.

    Args:
        in_features: size of each input row.
        out_features: size of each output row.
        bias: learn additive biases.
        activation: ``"sigmoid"``, or ``"silu"`` as in SwiGLU.
        device, dtype: of the parameters.

    Shape:
        ``(..., in_features)`` to ``(..., out_features)``.

    Memory: as :func:`torchops.glu`.

    Raises:
        ValueError: there is no such activation.
        RuntimeError: as :func:`torchops.glu`, when called.

    Example:

        >>> layer = torchops.nn.GLU(3, 4, activation="silu")
        >>> layer(torch.zeros(2, 3)).shape
        torch.Size([2, 4])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        activation: Literal["sigmoid", "silu"] = "sigmoid",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if activation not in ("sigmoid", "silu"):
            raise ValueError(f"GLU: expected activation sigmoid or silu, got {activation}")
        self.activation = activation
        self.value = nn.Linear(in_features, out_features, bias, device, dtype)
        self.gate = nn.Linear(in_features, out_features, bias, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        value, gate = self.value, self.gate
        if self.calls_layers():
            return self.by_layers(input)
        return glu(input, value.weight, gate.weight, value.bias, gate.bias, activation=self.activation)

    def by_layers(self, x: Tensor, *mask: Tensor | None) -> Tensor:
        x, activation = as_parameters(x, self.value), nn.functional.silu if self.activation == "silu" else torch.sigmoid
        out: Tensor = self.value(x) * activation(self.gate(x))
        return out

    def extra_repr(self) -> str:
        return f"activation={self.activation}"

"""Layers of the pair representation."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchops._core.errors import with_type_errors
from torchops.nn.layers import FusedModule, Linear, normalized
from torchops.ops import (
    add_transition_,
    add_triangle_multiplicative_update_,
    transition,
    triangle_multiplicative_update,
)

__all__ = ["Transition", "TriangleMultiplicativeUpdate"]

_add_transition = with_type_errors(torch.ops.myops._add_transition, "transition")
_add_triangle_update = with_type_errors(
    torch.ops.myops._triangle_multiplicative_update, "triangle_multiplicative_update"
)


class Transition(FusedModule):
    """AlphaFold 3's transition, a gated feed-forward layer after a layer norm, computed by one operator:
    :func:`torchops.transition`.

    With ``z = norm(x)`` it returns ``fc3(silu(fc1(z)) * fc2(z))``. Add that to ``x``, or pass ``residual`` or
    ``inplace``.

    Args:
        c: features of ``x``.
        hidden: features in between. Default: ``4 * c``.
        bias: learn biases of the three products; AlphaFold 3 and Boltz have none.
        eps: of the layer norm.
        device, dtype: of the parameters.

    The state dict uses Boltz's names, so you can load Boltz's: ``norm.weight``, ``norm.bias`` ``(c,)``;
    ``fc1.weight`` (gate), ``fc2.weight`` (up) ``(hidden, c)``; ``fc3.weight`` (down) ``(c, hidden)``; and with ``bias``
    ``fc1.bias``, ``fc2.bias`` ``(hidden,)``, ``fc3.bias`` ``(c,)``.

    It starts as AlphaFold 3 does: ``fc1`` and ``fc2`` normal with variance ``1 / c``, cut off at two standard
    deviations; ``fc3`` 0, so the first transition is 0; the norm with weights of 1 and biases of 0; biases of 0.

    The layers inside are plain ``nn.LayerNorm`` and ``nn.Linear``. The operator reads their parameters and
    does not call them. While one has a hook or a weight of a tensor subclass, they are called, and PyTorch's operators
    compute the rest. To put another kind of layer in their place raises a ``TypeError``.

    Shape:
        ``x`` of ``(..., c)``. The result has the shape of ``x`` and the dtype of the parameters. With 16-bit
        parameters, ``x`` may be float32.

    Memory: as :func:`torchops.transition`.

    Raises:
        RuntimeError: as :func:`torchops.transition`, when called.

    Example:

        >>> torchops.nn.Transition(8)(torch.randn(5, 5, 8)).shape
        torch.Size([5, 5, 8])
    """

    def __init__(
        self,
        c: int,
        hidden: int | None = None,
        *,
        bias: bool = False,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.c, self.hidden, self.eps = c, 4 * c if hidden is None else hidden, eps
        where: Any = {"device": device, "dtype": dtype}
        self.norm = nn.LayerNorm(c, eps, **where)
        self.fc1 = Linear(c, self.hidden, bias, "lecun", **where)
        self.fc2 = Linear(c, self.hidden, bias, "lecun", **where)
        self.fc3 = Linear(self.hidden, c, bias, "final", **where)

    def forward(self, x: Tensor, *, inplace: bool = False, residual: bool = False) -> Tensor:
        """Returns the transition of ``x``.

        With ``residual``, it returns ``x + transition(x)`` instead, a new tensor of the dtype of ``x``. If the fused
        kernels run, the addition takes no extra pass over memory. Nor does that of its gradients, if ``x`` has the
        dtype of the parameters.

        With ``inplace``, it returns ``x`` itself after ``x += transition(x)``. That needs no tensor for the transition,
        and is meant for inference."""
        if self.calls_layers():
            return self.add_by_layers(x, inplace=inplace, residual=residual)
        functional = _add_transition if residual else transition
        operator = add_transition_ if inplace else functional
        return operator(
            x,
            norm_weight=self.norm.weight,
            norm_bias=self.norm.bias,
            gate_weight=self.fc1.weight,
            gate_bias=self.fc1.bias,
            up_weight=self.fc2.weight,
            up_bias=self.fc2.bias,
            down_weight=self.fc3.weight,
            down_bias=self.fc3.bias,
            eps=self.eps,
        )

    def by_layers(self, x: Tensor, *mask: Tensor | None) -> Tensor:
        z = normalized(x, self.norm, self.fc1)
        out: Tensor = self.fc3(F.silu(self.fc1(z)) * self.fc2(z))
        return out

    def extra_repr(self) -> str:
        return f"{self.c}, {self.hidden}, eps={self.eps}"


class TriangleMultiplicativeUpdate(FusedModule):
    """AlphaFold's triangle multiplicative update, computed by one operator:
    :func:`torchops.triangle_multiplicative_update`.

    With ``z = norm_in(x)``, ``a, b = (p_in(z) * sigmoid(g_in(z)) * mask).chunk(2, -1)`` and, for each channel,
    ``o[i, j] = sum_k a[i, k] * b[j, k]`` (outgoing) or ``sum_k a[k, i] * b[k, j]`` (incoming), it returns
    ``p_out(norm_out(o)) * sigmoid(g_out(z))``. Add that to ``x``, usually after a dropout, or pass ``residual`` or
    ``inplace``.

    Args:
        c: channels of ``x``.
        d: channels of the product. Default: ``c``.
        direction: ``"outgoing"`` or ``"incoming"`` edges.
        bias: learn biases of the projections and gates, as AlphaFold 2 does; AlphaFold 3 and Boltz have none.
        eps: of both layer norms.
        device, dtype: of the parameters.

    The state dict uses Boltz's names, so you can load Boltz's: ``norm_in.weight``, ``norm_in.bias`` ``(c,)``;
    ``p_in.weight``, ``g_in.weight`` ``(2 d, c)``, first ``a``, then ``b``; ``norm_out.weight``, ``norm_out.bias``
    ``(d,)``; ``p_out.weight`` ``(c, d)``; ``g_out.weight`` ``(c, c)``; and with ``bias`` ``p_in.bias``, ``g_in.bias``
    ``(2 d,)``, ``p_out.bias``, ``g_out.bias`` ``(c,)``.

    It starts as AlphaFold does: ``p_in`` normal with variance ``1 / c``, cut off at two standard deviations; gates with
    weights of 0 and biases of 1, thus open at ``sigmoid(1)``, or at a half without biases; ``p_out`` 0, so the first
    update is 0; norms with weights of 1 and biases of 0.

    The layers inside are plain ``nn.LayerNorm`` and ``nn.Linear``. The operator reads their parameters and
    does not call them. While one has a hook or a weight of a tensor subclass, they are called, and PyTorch's operators
    compute the rest. To put another kind of layer in their place raises a ``TypeError``.

    Shape:
        ``x`` of ``(*batch, N, N, c)`` and ``mask`` of ``(*batch, N, N)``, bool or floating-point, or ``None``. The
        result has the shape of ``x`` and the dtype of the parameters. With 16-bit parameters, ``x`` may be float32.

    Memory: as :func:`torchops.triangle_multiplicative_update`.

    Raises:
        ValueError: there is no such direction.
        RuntimeError: as :func:`torchops.triangle_multiplicative_update`, when called.

    Example:

        >>> layer = torchops.nn.TriangleMultiplicativeUpdate(8, direction="incoming")
        >>> layer(torch.randn(5, 5, 8), mask=torch.ones(5, 5)).shape
        torch.Size([5, 5, 8])
    """

    def __init__(
        self,
        c: int,
        d: int | None = None,
        direction: Literal["outgoing", "incoming"] = "outgoing",
        *,
        bias: bool = False,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if direction not in ("outgoing", "incoming"):
            raise ValueError(f"TriangleMultiplicativeUpdate: expected direction outgoing or incoming, got {direction}")
        self.c, self.d, self.direction, self.eps = c, c if d is None else d, direction, eps
        where: Any = {"device": device, "dtype": dtype}
        self.norm_in = nn.LayerNorm(c, eps, **where)
        self.p_in = Linear(c, 2 * self.d, bias, "lecun", **where)
        self.g_in = Linear(c, 2 * self.d, bias, "gating", **where)
        self.norm_out = nn.LayerNorm(self.d, eps, **where)
        self.p_out = Linear(self.d, c, bias, "final", **where)
        self.g_out = Linear(c, c, bias, "gating", **where)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, *, inplace: bool = False, residual: bool = False
    ) -> Tensor:
        """Returns the update of ``x``.

        With ``residual``, it returns ``x + update(x)`` instead, a new tensor of the dtype of ``x``. If the fused
        kernels run, the addition takes no extra pass over memory. Nor does that of its gradients, if ``x`` has the
        dtype of the parameters.

        With ``inplace``, it returns ``x`` itself after ``x += update(x)``. The update itself is not a
        further tensor; its scratch remains. It is meant for inference."""
        if self.calls_layers():
            return self.add_by_layers(x, mask, inplace=inplace, residual=residual)
        if residual and not inplace:
            outgoing = self.direction == "outgoing"
            return _add_triangle_update(x, mask, self._parameters_beneath(), outgoing, self.eps, False, True)[0]
        operator = add_triangle_multiplicative_update_ if inplace else triangle_multiplicative_update
        return operator(
            x,
            self.direction,
            mask=mask,
            norm_in_weight=self.norm_in.weight,
            norm_in_bias=self.norm_in.bias,
            p_in_weight=self.p_in.weight,
            p_in_bias=self.p_in.bias,
            g_in_weight=self.g_in.weight,
            g_in_bias=self.g_in.bias,
            norm_out_weight=self.norm_out.weight,
            norm_out_bias=self.norm_out.bias,
            p_out_weight=self.p_out.weight,
            p_out_bias=self.p_out.bias,
            g_out_weight=self.g_out.weight,
            g_out_bias=self.g_out.bias,
            eps=self.eps,
        )

    def _parameters_beneath(self) -> list[Tensor | None]:
        """In the order of the operator beneath, with packed ones in the places of ``a``."""

        def of(layer: nn.LayerNorm | nn.Linear) -> list[Tensor | None]:
            return [layer.weight, layer.bias]

        ins = [*of(self.p_in), None, None, *of(self.g_in), None, None]
        return [*of(self.norm_in), *ins, *of(self.norm_out), *of(self.p_out), *of(self.g_out)]

    def by_layers(self, x: Tensor, *mask: Tensor | None) -> Tensor:
        z = normalized(x, self.norm_in, self.p_in)
        ab = self.p_in(z) * torch.sigmoid(self.g_in(z))
        for of_edges in mask:
            ab = ab if of_edges is None else ab * of_edges.to(ab.dtype).unsqueeze(-1)
        indices = "...ikd,...jkd->...ijd" if self.direction == "outgoing" else "...kid,...kjd->...ijd"
        o = normalized(torch.einsum(indices, *ab.chunk(2, -1)), self.norm_out, self.p_out)
        out: Tensor = self.p_out(o) * torch.sigmoid(self.g_out(z))
        return out

    def extra_repr(self) -> str:
        return f"{self.c}, {self.d}, direction={self.direction}, eps={self.eps}"

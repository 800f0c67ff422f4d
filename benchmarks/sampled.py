"""Float64 updates of a pair layer at some positions, computed from the few parts of x that they depend on; so they also
work for pair tensors of which no second one fits in memory.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from torchops.nn import PairLayer

# The parts that work on columns, like their counterparts on rows.
_OF_COLUMNS = ("tri_mul_in", "tri_att_end")


class Sample:
    """The update by one part of the layer, of x (N, N, c) with mask (N, N). Create it before x is overwritten."""

    def __init__(self, layer: PairLayer, part: str, x: Tensor, mask: Tensor, i: Tensor, j: Tensor) -> None:
        self.part, self.at, self.old = part, (i, j), x[i, j].double()
        module = layer.get_submodule(part)
        self.w = {name: t.detach().double() for name, t in module.named_parameters()}
        self.eps = float(module.eps)  # type: ignore[arg-type]
        if part in _OF_COLUMNS:
            x, mask = x.transpose(0, 1), mask.T
        # For the triangle (i, j, k), the edges from i to all k and those from j to all k.
        self.rows = [] if part == "transition_z" else [x[of].double() for of in (i, j)]
        self.masks = [] if part == "transition_z" else [mask[of].double() for of in (i, j)]

    def error(self, x: Tensor) -> float:
        """The error of x after the update: the norm of the difference over the norm."""
        if self.part.startswith("tri_mul"):
            update = self._triangle_update()
        else:
            update = self._transition() if self.part == "transition_z" else self._attention()
        exact = self.old + update
        return ((x[self.at].double() - exact).norm() / exact.norm()).item()

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.w[f"{name}.weight"], self.w.get(f"{name}.bias"), self.eps)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.w[f"{name}.weight"], self.w.get(f"{name}.bias"))

    def _triangle_update(self) -> Tensor:
        def factor(which: int) -> Tensor:
            z = self._norm(self.rows[which], "norm_in")
            gated = self._linear(z, "p_in") * self._linear(z, "g_in").sigmoid()
            return gated.chunk(2, -1)[which] * self.masks[which].unsqueeze(-1)

        o = (factor(0) * factor(1)).sum(1)
        gate = self._linear(self._norm(self.old, "norm_in"), "g_out").sigmoid()
        return self._linear(self._norm(o, "norm_out"), "p_out") * gate

    def _attention(self) -> Tensor:
        # For parts on columns, (i, j) is the position i of column j.
        own = 1 if self.part in _OF_COLUMNS else 0
        here, z = self._norm(self.old, "layer_norm"), self._norm(self.rows[own], "layer_norm")
        bias = self._linear(self._norm(self.rows[1 - own], "layer_norm"), "linear")  # (positions, k, heads)
        q, k, v = (self._linear(t, f"mha.linear_{n}") for t, n in ((here.unsqueeze(1), "q"), (z, "k"), (z, "v")))
        q, k, v = (t.unflatten(-1, (bias.shape[-1], -1)) for t in (q, k, v))
        scores = (q * k).sum(-1) * q.shape[-1] ** -0.5 + bias
        scores = scores.masked_fill((self.masks[own] == 0).unsqueeze(-1), -torch.inf)
        o = (scores.softmax(1).unsqueeze(-1) * v).sum(1).flatten(1)
        return self._linear(o * self._linear(here, "mha.linear_g").sigmoid(), "mha.linear_o")

    def _transition(self) -> Tensor:
        z = self._norm(self.old, "norm")
        return self._linear(F.silu(self._linear(z, "fc1")) * self._linear(z, "fc2"), "fc3")


@torch.no_grad()
def errors(layer: PairLayer, x: Tensor, mask: Tensor, count: int = 64) -> dict[str, float]:
    """The error of x, (1, N, N, c), against float64 after each part of the layer has overwritten it, at `count`
    positions: the four corners, and random ones."""
    n = x.shape[1]
    generator = torch.Generator().manual_seed(0)
    i, j = torch.randint(n, (2, count), generator=generator)
    i[:4], j[:4] = torch.tensor([0, 0, n - 1, n - 1]), torch.tensor([0, n - 1, 0, n - 1])
    i, j = i.to(x.device), j.to(x.device)
    made = {}
    for part, module in layer.named_children():
        sample = Sample(layer, part, x[0], mask[0], i, j)
        module(x, inplace=True) if part == "transition_z" else module(x, mask, inplace=True)
        made[part] = sample.error(x[0])
    return made

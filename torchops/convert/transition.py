"""The transition of a public package, ``down(silu(gate(z)) * up(z))`` after a layer norm, and its replacement."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from torchops.convert.module import Call, Replacement, Shape, random, without_autocast
from torchops.convert.signature import Signature
from torchops.ops import add_transition_, transition

# Why the feed-forward layers of the OpenFold family stay.
HAS_RELU = "its activation is ReLU, without a gate, and torchops.transition has a gate by SiLU"


class Names(NamedTuple):
    """What a package calls the layers, and further children without parameters."""

    norm: str
    gate: str
    up: str
    down: str
    others: Mapping[str, str]

    @property
    def layers(self) -> dict[str, str]:
        return {self.norm: "norm", **dict.fromkeys(self[1:4], "linear"), **self.others}


class Transition(Replacement):
    """A transition.

    Args:
        follows: for a bfloat16 `x`, it computes in bfloat16, whatever the dtype of the parameters, with or without
            autocast.
        result: whose dtype the result has besides that of the update: of `x` in evaluation; or at least that of the
            mask, of `x` without one, and of `x` if it is computed in checkpointed chunks.
    """

    operator = "myops::transition"

    def __init__(
        self,
        of: nn.Module,
        names: Names,
        signature: Signature,
        *,
        follows: bool = False,
        result: Literal["update", "x in evaluation", "mask"] = "update",
    ) -> None:
        super().__init__(of, names, signature)
        self._eps = float(of._modules[names.norm].eps)  # type: ignore[union-attr, arg-type]
        self._follows, self._result = follows, result

    def compute(self, x: Tensor, mask: Tensor | None = None, checkpointed_chunks: int | None = None) -> Tensor:
        update = self._update(x)
        if self._result == "mask":
            # Without a mask, they multiply by ones in the dtype of x.
            dtype = torch.promote_types(update.dtype, x.dtype if mask is None else mask.dtype)
            if mask is not None:
                mask = mask.unsqueeze(-1)
                reuse = update.dtype == dtype and not update.requires_grad
                update = update.mul_(mask) if reuse else update * mask
            return update.to(dtype if checkpointed_chunks is None else x.dtype)
        return update.to(x.dtype) if self._result == "x in evaluation" and not self.training else update

    def _update(self, x: Tensor) -> Tensor:
        if not self._follows or x.dtype != torch.bfloat16:
            return self.update(x)
        with without_autocast(x.device.type):
            return self.update(x, {name: None if t is None else t.to(x.dtype) for name, t in self.weights().items()})

    def calls(self, generator: torch.Generator) -> Iterable[Call]:
        c = self.parameter(self._names.gate, "weight").shape[1]  # type: ignore[union-attr]
        x, arguments = random(generator, 2, 5, 4, c), self._signature.example()
        mask, taken = torch.rand(x.shape[:-1], generator=generator, device="cpu"), "mask" in self._signature.known
        yield Call("", (x, mask) if taken else (x,), {}, (0,))
        masks = {"mask": mask} if taken else {}
        if checkpointed := self._signature.has("checkpointed_chunks"):
            yield Call(f"mask, {checkpointed}", (x,), masks | {checkpointed: 2})
        for more in ({}, masks | arguments):
            yield Call(", ".join(f"{name}={v}" if name in arguments else name for name, v in more.items()), (x,), more)

    def weights(self) -> dict[str, Tensor | None]:
        """The parameters, by the keywords of :func:`torchops.transition`."""
        return {
            f"{keyword}_{kind}": self.parameter(layer, kind)
            for keyword, layer in zip(("norm", "gate", "up", "down"), self._names[:4], strict=True)
            for kind in ("weight", "bias")
        }

    def update(self, x: Tensor, weights: dict[str, Tensor | None] | None = None) -> Tensor:
        """The transition of ``x``, with `weights` instead of the module's own if given."""
        weights = self.weights() if weights is None else weights
        return transition(x, **weights, eps=self._eps)  # type: ignore[arg-type]

    def updated(self, x: Tensor) -> Tensor:
        """``x + update(x)``, a new tensor."""
        return torch.ops.myops._add_transition(x, **self.weights(), eps=self._eps)

    def update_(self, x: Tensor, weights: dict[str, Tensor | None] | None = None) -> Tensor:
        """``x += update(x)``; returns ``x``."""
        weights = self.weights() if weights is None else weights
        return add_transition_(x, **weights, eps=self._eps)  # type: ignore[arg-type]

    @classmethod
    def sizes(cls, names: Names, parameters: Mapping[str, nn.Parameter | None]) -> Mapping[str, Shape]:
        norm, gate, up, down, _ = names
        hidden, c = parameters[f"{gate}.weight"].shape  # type: ignore[union-attr]
        return {norm: (c,), gate: (hidden, c), up: (hidden, c), down: (c, hidden)}

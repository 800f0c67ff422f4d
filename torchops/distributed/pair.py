"""What the operators on a pair tensor share if it is a ``DTensor``: `torchops.distributed.triangle.update` and
`torchops.distributed.attention`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from torchops.distributed._dtensor import functional, local, moved, wrap

Placements = tuple[Any, ...]


def stays(x: Any, p: Any) -> bool:
    return p == Replicate() or (type(p) is Shard and p.dim <= x.ndim - 3)


class PairCall:
    """One call: each rank's part of x, ``(*batch, N, N, c)``, the mask and the parameters.

    x stays replicated, or sharded along the batch or rows. Columns are moved to rows, which sends less than gathering
    them; anything else is gathered.
    """

    def __init__(self, op: str, x: Any, mask: Any, parameters: Sequence[Any], writes: bool) -> None:
        mesh = x.device_mesh if isinstance(x, DTensor) else None
        for t in (x, mask, *parameters):
            if t is not None and not (isinstance(t, DTensor) and t.device_mesh == mesh):
                raise RuntimeError(f"{op}: expected DTensors on one mesh, got a {type(t).__name__} or another mesh")
        if writes and not all(stays(x, p) for p in x.placements):
            raise RuntimeError(
                f"{op}: expected x replicated or sharded along rows or the batch, got shape {tuple(x.shape)} with "
                f"placements {tuple(x.placements)}; redistribute() it first, or use {functional(op)}"
            )
        self.whole = x
        self.rows, self.columns = Shard(x.ndim - 3), Shard(x.ndim - 2)
        self.placements: Placements = tuple(
            p if stays(x, p) else self.rows if p == self.columns else Replicate() for p in x.placements
        )
        self.dx, self.dmask = moved(x, self.placements), moved(mask, self.placements)
        self.x, self.mask = local(self.dx, self.placements), local(self.dmask, self.placements)
        self.parameters: list[Any] = [local(p, self.nowhere) for p in parameters]

    @property
    def nowhere(self) -> list[Any]:
        return [Replicate()] * len(self.placements)

    @property
    def by_rows(self) -> bool:
        return self.rows in self.placements

    def with_rows_as(self, placement: Any) -> Placements:
        return tuple(placement if p == self.rows else p for p in self.placements)

    def wrapped(self, update: Tensor) -> Any:
        return wrap(update, self.whole, self.placements, self.whole.shape)

    def wrapped_gradients(
        self,
        gradients: Sequence[Tensor | None],
        inputs: Sequence[Any],
        places: Sequence[Any],
        output_mask: Sequence[bool],
    ) -> list[Any]:
        """`inputs` are the tensors that `gradients` belong to; `places` are the placements of the first ones, before
        the parameters. A sum over rows or the batch is partial if these are sharded."""
        sums = [Partial() if isinstance(p, Shard) else p for p in self.placements]
        places = [*places, *[sums] * (len(inputs) - len(places))]
        nothing = wrap(self.x.new_empty(0), self.whole, self.nowhere, (0,))
        return [
            wrap(g, self.whole, p, t.shape) if want and g is not None else nothing
            for g, t, p, want in zip(gradients, inputs, places, output_mask, strict=True)
        ]

"""Boltz 1 and 2: ``boltz.model.layers``.

Chunks and ``use_kernels`` choose between ways to compute the same there, and are ignored here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchops.adapters import attention, layer, transition, triangle
from torchops.adapters.module import Adapter, Call, Replacement, random
from torchops.adapters.triangle import PACKED, Direction


class BoltzTriangleUpdate(triangle.TriangleUpdate):
    """Replaces ``TriangleMultiplicationOutgoing`` and ``TriangleMultiplicationIncoming``."""

    names = PACKED

    def forward(self, x: Tensor, mask: Tensor, use_kernels: bool = False) -> Tensor:
        return self.update(x, mask)


class FirstBoltzTriangleUpdate(BoltzTriangleUpdate):
    """The same for releases without ``use_kernels``, such as 2.0.0."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return self.update(x, mask)


class BoltzTriangleAttention(attention.TriangleAttention):
    """Replaces ``TriangleAttentionStartingNode`` and ``TriangleAttentionEndingNode``, from 2.2 on."""

    def forward(
        self, x: Tensor, mask: Tensor | None = None, chunk_size: int | None = None, use_kernels: bool = False
    ) -> Tensor:
        return self.update(x, mask)


class BoltzTransition(transition.Transition):
    """Replaces ``Transition``, which sums over chunks of the hidden features if told to."""

    names = transition.Names("norm", "fc1", "fc2", "fc3", {"silu": "silu"})

    def forward(self, x: Tensor, chunk_size: int = None) -> Tensor:  # type: ignore[assignment]  # noqa: RUF013
        return self.update(x)

    def calls(self, generator: torch.Generator) -> Iterable[Call]:
        x = self.example(generator)
        yield Call("", (x,), {}, (0,))
        yield Call("chunk_size=3", (x,), {"chunk_size": 3})


class BoltzPairLayer(layer.Layer):
    """Replaces ``PairformerNoSeqLayer``, from 2.2 on."""

    parts: ClassVar[Mapping[str, type[Replacement]]] = {
        "tri_mul_out": BoltzTriangleUpdate,
        "tri_mul_in": BoltzTriangleUpdate,
        "tri_att_start": BoltzTriangleAttention,
        "tri_att_end": BoltzTriangleAttention,
        "transition_z": BoltzTransition,
    }

    def forward(
        self,
        z: Tensor,
        pair_mask: Tensor,
        chunk_size_tri_attn: int | None = None,
        use_kernels: bool = False,
        use_cuequiv_mul: bool = False,
        use_cuequiv_attn: bool = False,
    ) -> Tensor:
        return self.pair(z, pair_mask)

    def pair(self, z: Tensor, mask: Tensor) -> Tensor:
        modules: Any = [self._modules[name] for name in self.parts]
        *parts, last = modules
        # Dropout masks are float32, so their products and the sums with these are at least that. They are also drawn if
        # nothing is dropped, so that later random numbers stay the same.
        dtype = torch.promote_types(z.dtype, torch.float32)
        inplace = not (self.training or torch.is_grad_enabled())
        if not (self.training and self.dropout):
            # In place means in a copy, because the caller may read the old one.
            z = z.to(dtype, memory_format=torch.contiguous_format, copy=True) if inplace else z.to(dtype)
            for part in parts:
                torch.rand(z.shape[:2], device=z.device)
                z = layer.added(part, z, mask, inplace=inplace)
            return layer.added(last, z, inplace=inplace)
        from boltz.model.layers.dropout import get_dropout_mask

        for name, part in zip(self.parts, parts, strict=False):
            dropout = get_dropout_mask(self.dropout, z, self.training, columnwise=name == "tri_att_end")
            update = part(z, mask)
            with torch.autocast(z.device.type, enabled=False):
                z = torch.addcmul(z, dropout, update)
        return layer.added(last, z)

    def calls(self, generator: torch.Generator) -> Iterable[Call]:
        z, mask = self._pair_example(generator)
        yield Call("", (z, mask), {}, (0,))
        yield Call("", (z, mask), {})

    def _pair_example(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        n: Any = 5
        c: Any = self.token_z
        mask = (random(generator, 2, n, n) > -0.5) | torch.eye(n, device="cpu").bool()
        return random(generator, 2, n, n, c), mask.float()


class BoltzPairformerLayer(BoltzPairLayer):
    """Replaces ``PairformerLayer``. The sequence half is called as it is."""

    parts = BoltzPairLayer.parts
    others = frozenset({"pre_norm_s", "attention", "transition_s", "s_post_norm"})
    outputs = 2

    def forward(  # type: ignore[override]
        self,
        s: Tensor,
        z: Tensor,
        mask: Tensor,
        pair_mask: Tensor,
        chunk_size_tri_attn: int | None = None,
        use_kernels: bool = False,
        use_cuequiv_mul: bool = False,
        use_cuequiv_attn: bool = False,
    ) -> tuple[Tensor, Tensor]:
        z = self.pair(z, pair_mask)
        rest: Any = self._modules
        with torch.autocast("cuda", enabled=False):
            s = s.float()
            normed = rest["pre_norm_s"](s)
            s = s + rest["attention"](s=normed, z=z.float(), mask=mask.float(), k_in=normed)
            s = s + rest["transition_s"](s)
            return rest["s_post_norm"](s), z

    def calls(self, generator: torch.Generator) -> Iterable[Call]:
        z, pair_mask = self._pair_example(generator)
        features: Any = self.get_submodule("pre_norm_s").weight.shape[0]  # type: ignore[index]
        s, mask = random(generator, *z.shape[:2], features), torch.ones(z.shape[:2], device="cpu")
        mask[0, 1] = 0
        yield Call("", (s, z, mask, pair_mask), {}, (0, 1))
        yield Call("", (s, z, mask, pair_mask), {})


def _update(name: str, direction: Direction) -> Adapter:
    """An adapter for classes that have the direction only in their name."""
    replacements = (BoltzTriangleUpdate, FirstBoltzTriangleUpdate)
    return Adapter("boltz.model.layers.triangular_mult", (name,), replacements, arguments=lambda module: (direction,))


_PARTS = {"norm": "LayerNorm", "linear": "Linear", "attention": "Attention"}

MODULES = (
    _update("TriangleMultiplicationOutgoing", "outgoing"),
    _update("TriangleMultiplicationIncoming", "incoming"),
    Adapter(
        "boltz.model.layers.triangular_attention.attention",
        ("TriangleAttention", "TriangleAttentionEndingNode"),
        (BoltzTriangleAttention,),
        _PARTS,
    ),
    Adapter("boltz.model.layers.transition", ("Transition",), (BoltzTransition,)),
)
LAYERS = tuple(
    layer.LayerAdapter("boltz.model.layers.pairformer", (name,), (replacement,))
    for name, replacement in (("PairformerNoSeqLayer", BoltzPairLayer), ("PairformerLayer", BoltzPairformerLayer))
)
UNFIT: tuple[tuple[str, str, str], ...] = ()

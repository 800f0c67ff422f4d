"""Boltz 1 and 2, ``boltz.model``, as published and as boltz-community maintains it, and BoltzGen, ``boltzgen.model``.

Chunks, ``use_kernels`` and their like choose between ways to compute the same there, and are ignored here.
``use_flash_attn`` of a whole layer also leaves its sequence half in the dtype of the stream.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from torchops.convert import attention, diffusion, transition
from torchops.convert.adapter import Adapter
from torchops.convert.layer import Layer, LayerAdapter, Parts, added
from torchops.convert.module import Call, random, without_autocast
from torchops.convert.sampling import SamplerAdapter, ScoreAdapter
from torchops.convert.signature import CHUNKS, KERNELS, Signature
from torchops.convert.triangle import PACKED, Direction, TriangleUpdate

_KERNELS = dict.fromkeys(("use_kernels", "use_cuequiv_mul", "use_cuequiv_attn", "use_trifast"), KERNELS)
_UPDATE = {"x": "x", "mask": "mask", **_KERNELS}
_ATTENTION = {
    "x": "x",
    "mask": "mask",
    "chunk_size": CHUNKS,
    **_KERNELS,
    # Boltz 1 and 2.0 have the keywords of OpenFold, and boltz-community has one for PyTorch's attention.
    **dict.fromkeys(("use_memory_efficient_kernel", "use_deepspeed_evo_attention", "use_lma", "inplace_safe"), KERNELS),
    "use_flash_attn": KERNELS,
}
_TRANSITION = {"x": "x", "chunk_size": CHUNKS}
_PAIR_LAYER = {"z": "z", "pair_mask": "pair_mask", "chunk_size_tri_attn": CHUNKS, **_KERNELS, "use_flash_attn": KERNELS}
_LAYER = {"s": "s", "mask": "mask", **_PAIR_LAYER, "use_flash_attn": "flash"}

_DIFFUSION_LAYER = {name: name for name in ("a", "s", "bias", "mask", "to_keys", "multiplicity")}

_PAIR_BIAS = {name: name for name in ("s", "z", "mask", "k_in", "multiplicity")}

_PAIR_PARTS = Parts(
    {
        "tri_mul_out": TriangleUpdate,
        "tri_mul_in": TriangleUpdate,
        "tri_att_start": attention.TriangleAttention,
        "tri_att_end": attention.TriangleAttention,
        "transition_z": transition.Transition,
    }
)
_PARTS = _PAIR_PARTS._replace(others=frozenset({"pre_norm_s", "attention", "transition_s", "s_post_norm"}))
_FIRST_PARTS = _PAIR_PARTS._replace(others=frozenset({"attention", "transition_s"}))


class PairLayer(Layer):
    """Replaces ``PairformerNoSeqLayer``."""

    def __init__(self, of: nn.Module, names: Parts, signature: Signature) -> None:
        super().__init__(of, names, signature)
        self._package = type(of).__module__.partition(".")[0]

    def compute(self, z: Tensor, pair_mask: Tensor) -> Any:
        return self.pair(z, pair_mask)

    def pair(self, z: Tensor, mask: Tensor) -> Tensor:
        modules: Any = [self._modules[name] for name in self._names.replaced]
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
                z = added(part, z, mask, inplace=inplace)
            return added(last, z, inplace=inplace)
        draw = import_module(f"{self._package}.model.layers.dropout").get_dropout_mask
        for name, part in zip(self._names.replaced, parts, strict=False):
            columnwise = {"columnwise": True} if name == "tri_att_end" else {}
            dropout = draw(self.dropout, z, self.training, **columnwise)
            update = part(z, mask)
            with without_autocast(z.device.type):
                z = torch.addcmul(z, dropout, update)
        return added(last, z)

    def calls(self, generator: torch.Generator) -> Iterable[Call]:
        z, mask = self._pair_example(generator)
        yield Call("", (z, mask), {}, (0,))
        yield Call("", (z, mask), {})

    def _pair_example(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        n: Any = 5
        c: Any = self.token_z
        mask = (random(generator, 2, n, n) > -0.5) | torch.eye(n, device="cpu").bool()
        return random(generator, 2, n, n, c), mask.float()


class PairformerLayer(PairLayer):
    """Replaces ``PairformerLayer``. The sequence half is called as it is."""

    outputs = 2

    def compute(  # type: ignore[override]
        self, s: Tensor, z: Tensor, mask: Tensor, pair_mask: Tensor, flash: bool = False
    ) -> tuple[Tensor, Tensor]:
        z = self.pair(z, pair_mask)
        if flash:
            return self._sequence(s, z, mask, use_flash_attn=True), z
        # The conversions are theirs, as is that the autocast of another device goes on.
        with torch.autocast("cuda", enabled=False):
            return self._sequence(s.float(), z.float(), mask.float()), z

    def _sequence(self, s: Tensor, z: Tensor, mask: Tensor, **flash: bool) -> Tensor:
        rest: Any = self._modules
        normed = rest["pre_norm_s"](s)
        s = s + rest["attention"](s=normed, z=z, mask=mask, k_in=normed, **flash)
        s = s + rest["transition_s"](s)
        return rest["s_post_norm"](s)

    def calls(self, generator: torch.Generator) -> Iterable[Call]:
        z, pair_mask = self._pair_example(generator)
        features: Any = self.get_submodule("transition_s.norm").weight.shape[0]  # type: ignore[index]
        s, mask = random(generator, *z.shape[:2], features), torch.ones(z.shape[:2], device="cpu")
        mask[0, 1] = 0
        yield Call("", (s, z, mask, pair_mask), {}, (0, 1))
        yield Call("", (s, z, mask, pair_mask), {})
        if flash := self._signature.has("flash"):
            yield Call(f"{flash}=True", (s, z, mask, pair_mask), {flash: True})


class FirstPairformerLayer(PairformerLayer):
    """Replaces ``PairformerLayer`` of Boltz 1, whose sequence half has its norms inside."""

    def compute(  # type: ignore[override]
        self, s: Tensor, z: Tensor, mask: Tensor, pair_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        z, rest = self.pair(z, pair_mask), self._modules
        s = s + rest["attention"](s, z, mask)  # type: ignore[misc]
        return s + rest["transition_s"](s), z  # type: ignore[misc]


def _update(direction: Direction) -> Any:
    """The options for classes that have the direction only in their name."""
    return lambda module: {"direction": direction}


_ATTENTION_ROLES = {"norm": "LayerNorm", "linear": "Linear", "attention": "Attention"}
_ATTENTIONS = ("TriangleAttention", "TriangleAttentionEndingNode")


def _modules(package: str, updates: str) -> Iterable[Adapter]:
    layers = f"{package}.model.layers"
    for direction in ("outgoing", "incoming"):
        classes = (f"TriangleMultiplication{direction.title()}",)
        yield Adapter(
            f"{layers}.{updates}",
            classes,
            TriangleUpdate,
            PACKED,
            _UPDATE,
            options=_update(direction),
        )
    file = f"{layers}.triangular_attention.attention"
    yield Adapter(file, _ATTENTIONS, attention.TriangleAttention, attention.Names(), _ATTENTION, _ATTENTION_ROLES)
    names = transition.Names("norm", "fc1", "fc2", "fc3", {"silu": "silu"})
    yield Adapter(f"{layers}.transition", ("Transition",), transition.Transition, names, _TRANSITION)


def _layers(package: str) -> Iterable[Adapter]:
    file = f"{package}.model.layers.pairformer"
    yield LayerAdapter(file, ("PairformerNoSeqLayer",), PairLayer, _PAIR_PARTS, _PAIR_LAYER)
    yield LayerAdapter(file, ("PairformerLayer",), PairformerLayer, _PARTS, _LAYER)


def _diffusion(package: str, transformers: str, attentions: str) -> Iterable[Adapter]:
    file, inside = f"{package}.model.modules.{transformers}", f"{package}.model.layers.{attentions}"
    bias = f"{inside}:Rearrange"
    roles = {
        **{"norm": "LayerNorm", "linear": "Linear", "sequential": "Sequential", "bias": bias},
        **{"adaln": "AdaLN", "attention": "AttentionPairBias", "transition": "ConditionedTransitionBlock"},
        **{"swiglu": "SwiGLU", "last": "nn.Identity"},
    }
    classes = ("DiffusionTransformerLayer",)
    yield Adapter(file, classes, diffusion.DiffusionLayer, diffusion.OF_LAYER, _DIFFUSION_LAYER, roles)
    roles = {"norm": "nn.LayerNorm", "linear": "nn.Linear", "sequential": "nn.Sequential", "bias": "Rearrange"}
    classes = ("AttentionPairBias",)
    yield Adapter(inside, classes, diffusion.AttentionPairBias, diffusion.OF_ATTENTION, _PAIR_BIAS, roles)


def _sampling(file: str) -> Iterable[Adapter]:
    yield ScoreAdapter(file, "DiffusionModule")
    yield SamplerAdapter(file, "AtomDiffusion")


MODULES = (
    *_modules("boltz", "triangular_mult"),
    *_modules("boltzgen", "triangular"),
    *_diffusion("boltz", "transformersv2", "attentionv2"),
    *_diffusion("boltzgen", "transformers", "attention"),
)
LAYERS = (
    *_layers("boltz"),
    *_layers("boltzgen"),
    *_sampling("boltz.model.modules.diffusionv2"),
    *_sampling("boltzgen.model.modules.diffusion"),
    LayerAdapter("boltz.model.modules.trunk", ("PairformerLayer",), FirstPairformerLayer, _FIRST_PARTS, _LAYER),
)
UNFIT: tuple[tuple[str, str, str], ...] = ()

"""Modules of public packages that gate by linear layers and stay as they are inside: feed-forward layers of language
models in transformers, and parts of the MSA and diffusion modules of Boltz and BoltzGen."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchops._core.report import Match
from torchops.convert.declared import swap_classes
from torchops.convert.module import without_autocast
from torchops.convert.registry import Declared, Example, Factory, Turn, swapper
from torchops.nn.gates import packed_glu
from torchops.nn.layers import as_parameters
from torchops.ops import gate, glu, layer_norm, outer_product_mean


class Operators(nn.Module):
    """Has the layers, parameters and buffers of the module `of`."""

    def __init__(self, of: nn.Module) -> None:
        super().__init__()
        vars(self).update({name: vars(of)[name] for name in ("_parameters", "_buffers", "_modules")})


class FeedForward(Operators):
    """``down(silu(gate(x)) * up(x))``."""

    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        value, gated = self.up_proj, self.gate_proj
        out: Tensor = self.down_proj(glu(x, value.weight, gated.weight, value.bias, gated.bias, activation="silu"))
        return out


class PackedFeedForward(Operators):
    """The same with one layer for both, whose first half is the gate."""

    gate_up_proj: nn.Linear
    down_proj: nn.Linear

    def forward(self, hidden_states: Tensor) -> Tensor:
        both = self.gate_up_proj
        out: Tensor = self.down_proj(packed_glu(hidden_states, both.weight, both.bias, "silu", gate_first=True))
        return out


def _gated(v: Tensor, x: Tensor, layer: Any) -> Tensor:
    """``v * sigmoid(layer(x))``, in the dtype of the product if that is what autocast makes of it."""
    device, dtype = x.device.type, layer.weight.dtype
    if device != "meta" and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    if v.dtype == dtype and v.shape[:-1] == x.shape[:-1]:
        return gate(v, as_parameters(x, layer), layer.weight, layer.bias)
    return v * torch.sigmoid(layer(x))


def _norm(x: Tensor, layer: Any) -> Tensor:
    """``layer(x)``, by the operator if it is this norm."""
    if type(layer) is not nn.LayerNorm:
        out: Tensor = layer(x)
        return out
    return layer_norm(x, layer.normalized_shape, layer.weight, layer.bias, layer.eps)


class AdaptiveNorm(Operators):
    """``sigmoid(s_scale(s)) * a + s_bias(s)`` of normalised `a` and `s`."""

    a_norm: nn.LayerNorm
    s_norm: nn.LayerNorm
    s_scale: nn.Linear
    s_bias: nn.Linear

    def forward(self, a: Tensor, s: Tensor) -> Tensor:
        a, s = _norm(a, self.a_norm), _norm(s, self.s_norm)
        out: Tensor = _gated(a, s, self.s_scale) + self.s_bias(s)
        return out


class ConditionedTransition(Operators):
    """``sigmoid(output_projection(s)) * b_to_a(swish_gate(a) * a_to_b(a))`` of a normalised `a`."""

    swish_gate: nn.Sequential
    output_projection: nn.Sequential
    a_to_b: nn.Linear
    b_to_a: nn.Linear

    def __init__(self, of: nn.Module) -> None:
        super().__init__(of)
        vars(self)["_norm"] = AdaptiveNorm(of.get_submodule("adaln"))  # past nn.Module, which would register it

    def forward(self, a: Tensor, s: Tensor) -> Tensor:
        both: Any = self.swish_gate[0]
        a = self.__dict__["_norm"](a, s)
        b = packed_glu(a, both.weight, both.bias, "silu") * self.a_to_b(a)
        return _gated(self.b_to_a(b), s, self.output_projection[0])


class PairWeightedAveraging(Operators):
    """``proj_o(sigmoid(proj_g(m)) * average of proj_m(m))``, with weights from `z`.

    Where the released module takes one of `heads` heads after another to save memory, this takes as many parts of the
    sequences: what it computes of a part has the size of what is released of a head. The weights, which have no
    sequences, exist for all heads. A compiler, for which the number of sequences may be a symbol, gets no parts.
    """

    norm_m: nn.LayerNorm
    norm_z: nn.LayerNorm
    proj_m: nn.Linear
    proj_g: nn.Linear
    proj_z: nn.Linear
    proj_o: nn.Linear

    def __init__(self, of: Any) -> None:
        super().__init__(of)
        self.heads, self.inf = of.num_heads, of.inf

    def forward(self, m: Tensor, z: Tensor, mask: Tensor, chunk_heads: Any = True) -> Tensor:
        b = self.proj_z(_norm(z, self.norm_z)).permute(0, 3, 1, 2) + (1 - mask[:, None]) * -self.inf
        weights = torch.softmax(b, dim=-1)
        if not chunk_heads or self.training or torch.compiler.is_compiling():
            return self._average(m, weights)
        parts = [self._average(part, weights) for part in m.chunk(self.heads, 1)]
        return torch.cat(parts, 1)

    def _average(self, m: Tensor, weights: Tensor) -> Tensor:
        m = _norm(m, self.norm_m)
        v = self.proj_m(m).unflatten(-1, (self.heads, -1)).permute(0, 3, 1, 2, 4)
        o = torch.einsum("bhij,bhsjd->bhsid", weights, v).permute(0, 2, 3, 1, 4).flatten(-2)
        out: Tensor = self.proj_o(_gated(o, m, self.proj_g))
        return out


class OuterProductMean(Operators):
    """``proj_o`` of the outer products of ``proj_a(m)`` and ``proj_b(m)``, averaged over the sequences that have both
    positions. `chunk_size` is left out: the outer products exist for a few rows at a time."""

    norm: nn.LayerNorm
    proj_a: nn.Linear
    proj_b: nn.Linear
    proj_o: nn.Linear

    def forward(self, m: Tensor, mask: Tensor, chunk_size: int | None = None) -> Tensor:
        kept = mask.to(m)
        m = _norm(m, self.norm)
        a, b = (layer(m) * kept.unsqueeze(-1) for layer in (self.proj_a, self.proj_b))
        weight, bias, dtype = self.proj_o.weight, self.proj_o.bias, a.dtype
        with without_autocast(m.device.type):
            kept = kept.to(torch.promote_types(kept.dtype, torch.float32))  # 16 bits don't count beyond 256 or 2048
            counts = (kept.mT @ kept).clamp(min=1)
            if dtype == torch.float16:  # sums over many sequences overflow before they are divided
                wide = None if bias is None else bias.float()
                out = outer_product_mean(a.float(), b.float(), weight.float(), wide, counts).to(dtype)
        if dtype != torch.float16:
            out = outer_product_mean(a, b, weight, bias, counts)
        in_chunks = chunk_size is not None and not self.training  # then the released module adds the bias by itself
        return out.to(torch.promote_types(out.dtype, bias.dtype)) if in_chunks and bias is not None else out


def _random(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator("cpu").manual_seed(0)
    return [torch.randn(shape, generator=generator, device="cpu").bfloat16().float() for shape in shapes]


def _example_of_averaging(of: Any) -> tuple[Any, ...]:
    m, z, mask = _random((2, 3, 5, of.c_m), (2, 5, 5, of.c_z), (2, 5, 5))
    return m, z, (mask > -0.5).float(), False


def _example_of_outer_products(of: Any) -> tuple[Any, ...]:
    m, mask = _random((2, 3, 5, *of.norm.normalized_shape), (2, 3, 5))
    return m, (mask > -0.5).float(), None


def _if_silu(kind: Callable[[nn.Module], nn.Module], activation: str) -> Factory:
    def made(of: nn.Module) -> nn.Module | None:
        is_silu = type(getattr(of, activation)).__name__ in ("SiLU", "SiLUActivation")
        return kind(of) if is_silu else None

    return made


_SEPARATE, _PACKED = _if_silu(FeedForward, "act_fn"), _if_silu(PackedFeedForward, "activation_fn")
_LANGUAGE_MODELS = {
    **dict.fromkeys(("Llama", "Mistral", "Qwen2", "Qwen3", "Olmo", "Olmo2", "Granite", "Cohere"), _SEPARATE),
    **dict.fromkeys(("Phi3", "Glm"), _PACKED),
}
_BOLTZ = (
    "boltz.model.modules.transformers",  # of Boltz 1
    "boltz.model.modules.transformersv2",
    "boltzgen.model.modules.transformers",
)
_CLASSES: Mapping[tuple[str, str], Factory | tuple[Factory, Example]] = {
    **{
        (f"transformers.models.{name.lower()}.modeling_{name.lower()}", f"{name}MLP"): factory
        for name, factory in _LANGUAGE_MODELS.items()
    },
    **{(file, "AdaLN"): AdaptiveNorm for file in _BOLTZ},
    **{(file, "ConditionedTransitionBlock"): ConditionedTransition for file in _BOLTZ},
    **{
        (f"{package}.model.layers.{file}", kind.__name__): (kind, example)
        for package in ("boltz", "boltzgen")
        for file, kind, example in (
            ("pair_averaging", PairWeightedAveraging, _example_of_averaging),
            ("outer_product_mean", OuterProductMean, _example_of_outer_products),
        )
    },
}


@swapper(Turn.PARTS)
def replace_gated(model: nn.Module, declared: Declared, known: Collection[str]) -> Iterator[Match]:
    """Puts operators into these modules, if their packages are imported."""
    classes: dict[type[nn.Module], Factory | tuple[Factory, Example]] = {}
    for (file, name), value in _CLASSES.items():
        kind = vars(sys.modules[file]).get(name) if file in sys.modules else None
        if isinstance(kind, type) and kind not in declared:
            classes[kind] = value
    return swap_classes(model, classes, known)

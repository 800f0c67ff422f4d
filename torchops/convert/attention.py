"""Triangle attention of a public package, with its norm, gate and output product, and its replacement.

The packages add ``inf * (mask - 1)`` to the scores, with ``inf`` of 1e9. So only the keys with the greatest mask of a
row have any weight; `_keys` returns these. If the greatest mask of a row is not 1, as in a row without any key, adding
so large a number in float32 rounds the scores to multiples of 32 and more: the packages then weigh its keys equally,
the operator by their scores. Such rows are padding, which every layer's mask separates from all others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchops._triangle_attention.update.arguments import Node
from torchops.convert.module import Call, Replacement, Shape, random, without_autocast
from torchops.convert.signature import Signature
from torchops.ops import AttentionWeights, gate, layer_norm, triangle_attention, triangle_attention_update


class Names(NamedTuple):
    """What a package calls the layers: the norm, the layer that gives the bias, and the module that has the others."""

    norm: str = "layer_norm"
    bias: str = "linear"
    inner: str = "mha"

    @property
    def linears(self) -> dict[str, str]:
        """The layer names, by the fields of `AttentionWeights`."""
        inner = {"q": "linear_q", "k": "linear_k", "v": "linear_v", "gate": "linear_g", "out": "linear_o"}
        return {"bias_weight": self.bias} | {name: f"{self.inner}.{layer}" for name, layer in inner.items()}

    @property
    def layers(self) -> dict[str, str]:
        linears = dict.fromkeys(self.linears.values(), "linear")
        return {self.norm: "norm", self.inner: "attention", **linears, f"{self.inner}.sigmoid": "sigmoid"}


class TriangleAttention(Replacement):
    """Triangle attention."""

    operator = "myops::_triangle_attention_update"

    def __init__(self, of: nn.Module, names: Names, signature: Signature) -> None:
        super().__init__(of, names, signature)
        node: Node = "starting" if of.starting else "ending"
        inner, norm = (of._modules[name] for name in (names.inner, names.norm))
        self._attention = (node, int(inner.no_heads), float(norm.eps))  # type: ignore[union-attr, arg-type]

    def compute(self, x: Tensor, mask: Tensor | None = None, transposed: bool = False) -> Tensor:
        return self.update(x, mask, transposed)

    @property
    def node(self) -> Node:
        return self._attention[0]

    def weights(self, dtype: torch.dtype | None = None) -> AttentionWeights:
        """The weights as they are, or in another dtype."""
        tensors = {f"norm_{kind}": self.parameter(self._names.norm, kind) for kind in ("weight", "bias")}
        for name, layer in self._names.linears.items():
            tensors[name] = self.parameter(layer, "weight")
            if name in ("gate", "out"):
                tensors[f"{name}_bias"] = self.parameter(layer, "bias")
        if dtype is not None:
            tensors = {name: None if t is None else t.to(dtype) for name, t in tensors.items()}
        _, heads, eps = self._attention
        return AttentionWeights(**tensors, heads=heads, eps=eps)  # type: ignore[arg-type]

    def update(self, x: Tensor, mask: Tensor | None, of_transposed: bool = False) -> Tensor:
        """What the attention adds to ``x``. With `of_transposed`, the bias comes from edges ``(k, j)`` instead of ``(j,
        k)``. For a bfloat16 ``x``, the packages compute in bfloat16, whatever the dtype of the parameters, with or
        without autocast."""
        mask, compute = self._keys(x, mask), _with_transposed_bias if of_transposed else triangle_attention_update
        if x.dtype != torch.bfloat16:
            return compute(x, mask, self.weights(), self.node)
        with without_autocast(x.device.type):
            return compute(x, mask, self.weights(x.dtype), self.node)

    def updated(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """``x + update(x)``, a new tensor."""
        if x.dtype == torch.bfloat16:
            return x + self.update(x, mask)
        return triangle_attention_update(x, self._keys(x, mask), self.weights(), self.node, residual=True)

    def update_(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """``x += update(x)``; returns ``x``."""
        if x.dtype == torch.bfloat16:
            return x.add_(self.update(x, mask))
        return triangle_attention_update(x, self._keys(x, mask), self.weights(), self.node, inplace=True)

    def _keys(self, x: Tensor, mask: Tensor | None) -> Tensor | None:
        if mask is None:
            return None
        mask = mask.expand(x.shape[:-1]) if mask.shape != x.shape[:-1] else mask
        return mask == mask.amax(-1 if self.node == "starting" else -2, keepdim=True)

    def calls(self, generator: torch.Generator) -> Iterable[Call]:
        heads, c = self.parameter(self._names.bias, "weight").shape  # type: ignore[union-attr]
        n = next(n for n in (5, 6, 7) if n not in (c, heads))
        x, numbers = random(generator, 2, n, n, c), random(generator, 2, n, n).sigmoid()
        mask = ((numbers > 0.4) | torch.eye(n, device="cpu").bool()).float()
        yield Call("", (x, mask), {}, (0,))
        yield Call("without a mask", (x,), {}, (0,))
        yield Call("with a mask of other numbers", (x, numbers), {})
        for arguments in self._probes():
            yield Call(", ".join(f"{name}={value}" for name, value in arguments.items()), (x, mask), arguments)

    def _probes(self) -> Iterable[Mapping[str, Any]]:
        """Further arguments for comparing the original and the replacement."""
        yield self._signature.example()
        if transposed := self._signature.has("transposed"):
            yield {transposed: True}

    @classmethod
    def sizes(cls, names: Names, parameters: Mapping[str, nn.Parameter | None]) -> Mapping[str, Shape]:
        linears = names.linears
        heads = parameters[f"{linears['bias_weight']}.weight"].shape[0]  # type: ignore[union-attr]
        width, c = parameters[f"{linears['q']}.weight"].shape  # type: ignore[union-attr]
        ins = {linears[name]: (width, c) for name in ("q", "k", "v", "gate")}
        return ins | {linears["bias_weight"]: (heads, c), linears["out"]: (c, width), names.norm: (c,)}

    @classmethod
    def refuse(cls, names: Names, module: nn.Module) -> str | None:
        inner: Any = module._modules[names.inner]
        heads = module.get_submodule(names.bias).weight.shape[0]  # type: ignore[index]
        if inner.no_heads != heads or inner.no_heads * inner.c_hidden != inner.linear_q.weight.shape[0]:
            return f"{inner.no_heads} heads of {inner.c_hidden} do not fit its layers"
        if not module.inf >= 1e9:  # type: ignore[operator]
            return f"its mask adds {-module.inf} to scores, and not -1e9"  # type: ignore[operator]
        for bias in (names.linears[name] for name in ("bias_weight", "q", "k", "v")):
            if module.get_submodule(bias).bias is not None:
                return f"{bias} has a bias"
        return None


def _with_transposed_bias(x: Tensor, mask: Tensor | None, w: AttentionWeights, node: Node) -> Tensor:
    """`triangle_attention_update` with the other bias, in several operators."""
    if node == "ending":
        mask = None if mask is None else mask.mT
        return _with_transposed_bias(x.transpose(-3, -2), mask, w, "starting").transpose(-3, -2)
    z = layer_norm(x, x.shape[-1:], w.norm_weight, w.norm_bias, w.eps).flatten(0, -4)  # (batch, i, j, c)
    bias = F.linear(z, w.bias_weight).permute(0, 3, 2, 1).unsqueeze(1)
    q, k, v = (F.linear(z, t).unflatten(-1, (w.heads, -1)).transpose(-3, -2) for t in (w.q, w.k, w.v))
    keys = None if mask is None else mask.flatten(0, -3)[:, :, None, None]
    o = triangle_attention(q, k, v, bias, keys).transpose(-3, -2).flatten(-2)
    if w.gate is not None:
        o = gate(o, z, w.gate, w.gate_bias)
    return F.linear(o, w.out, w.out_bias).view(x.shape)

"""The layer of a diffusion transformer of a public package (Abramson et al. 2024, algorithms 23 to 26), and attention
with pair bias (algorithm 24), and their replacements.

They compute in the released dtypes, or in the one that :func:`replace` was given. With bias b, q and k of `heads` heads
of d features, and a mask m of 0 and 1,

    a = softmax(q @ k.T / sqrt(d) + b + (1 - m) * -inf) @ v
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchops.convert import constants
from torchops.convert.conditioning import ADAPTIVE_NORMS, GATES, Conditions, given
from torchops.convert.module import (
    Call,
    Layers,
    Parameters,
    Replacement,
    Shape,
    are_plain,
    once,
    random,
    restored,
    without_autocast,
)
from torchops.convert.registry import TakesDiffusionDtype
from torchops.convert.signature import Signature
from torchops.nn.layers import has_hooks

_OPS: Any = torch.ops.myops


def _under(prefix: str, layers: Mapping[str, str]) -> dict[str, str]:
    return {f"{prefix}.{name}": role for name, role in layers.items()}


_ATTENTION = dict.fromkeys(("proj_q", "proj_k", "proj_v", "proj_g", "proj_o"), "linear")
_NORM = {"a_norm": "norm", "s_norm": "norm", "s_scale": "linear", "s_bias": "linear"}
_GATING = {"output_projection": "sequential", "output_projection.0": "linear", "output_projection.1": "sigmoid"}
_TRANSITION = {
    **{"adaln": "adaln", **_under("adaln", _NORM), **_GATING},
    **{"swish_gate": "sequential", "swish_gate.0": "linear", "swish_gate.1": "swiglu"},
    **{"a_to_b": "linear", "b_to_a": "linear"},
}
OF_ATTENTION = Layers(
    _ATTENTION | {"proj_z": "sequential", "proj_z.0": "norm", "proj_z.1": "linear", "proj_z.2": "bias"}
)
OF_LAYER = Layers(
    {
        **{"adaln": "adaln", **_under("adaln", _NORM)},
        **{"pair_bias_attn": "attention", **_under("pair_bias_attn", _ATTENTION | {"proj_z": "bias"})},
        **{"output_projection_linear": "linear", **_GATING},
        **{"transition": "transition", **_under("transition", _TRANSITION)},
        "post_lnorm": "last",
    }
)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor,
    inf: float,
    samples: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The result, `(batch, queries, heads * d)`, in the dtype of `v`.

    Computed in `dtype`, which is float32 as released: on a GPU by the attention of triangles, whose rows are the
    samples; on the CPU by PyTorch's, which is faster there.

    Args:
        q: `(batch, queries, heads, d)`. `k` and `v`: the same with keys.
        bias: `(batch / samples, queries, keys, heads)`; each repeats for the `samples` that follow one another.
        mask: `(batch, keys)`, 1 for keys to keep.
    """
    mask, bias = once(mask).to(dtype), bias.permute(0, 3, 1, 2).to(dtype)
    inf = min(inf, torch.finfo(dtype).max / 4)  # a row without any key stays finite
    rows = len(q) // max(len(bias), 1)
    with torch.autocast("cuda", enabled=False):
        q, k, by_keys = (t.to(dtype).transpose(1, 2) for t in (q, k, v))
        if _takes_triangles(q, k, bias, mask):
            kept = None
            if rows == 1 or len(mask) == 1:
                bias = bias + (1 - mask[:, None, None]) * -inf
            else:  # adding -inf leaves the keys of the greatest mask
                kept = (mask == mask.amax(-1, keepdim=True)).unflatten(0, (-1, rows))[:, :, None, None]
            q, k, by_keys = (t.unflatten(0, (-1, rows)) for t in (q, k, by_keys))
            o = _OPS.triangle_attention(q, k, by_keys, bias.unsqueeze(1).contiguous(), kept).flatten(0, 1)
        else:
            if samples > 1 and len(bias) > 1:
                bias = bias.repeat_interleave(samples, 0)
            scores = (bias + (1 - mask[:, None, None]) * -inf).contiguous()
            o = F.scaled_dot_product_attention(q, k, by_keys, attn_mask=scores)
    return o.transpose(1, 2).to(v.dtype).flatten(2)


def _takes_triangles(q: Tensor, k: Tensor, bias: Tensor, mask: Tensor) -> bool:
    """Whether the operator computes this on a GPU. It broadcasts no batch."""
    fits = len(q) == len(k) and len(bias) > 0 and len(q) % len(bias) == 0 and len(mask) in (1, len(q))
    return q.is_cuda and len(q) > 0 and fits and are_plain(q, k, bias, mask)


class _WithAttention(Replacement):
    """A module with the layers of attention under a prefix. If a layer inside has become more than its parameters, the
    released forward runs."""

    operator = "myops::gate"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if reason := self.why_not():
            former = restored(self.__dict__["_former"], self)
            warnings.warn(f"{type(former).__name__} runs as released: {reason}", stacklevel=2)
            return former(*args, **kwargs)
        return super().forward(*args, **kwargs)

    def why_not(self) -> str | None:
        """Why a call cannot read the parameters of the layers inside, or None."""
        former: nn.Module = self.__dict__["_former"]
        todo: list[tuple[str, Any, Any]] = [("", self, former)]
        for name, module, released in todo:
            for key, child in module._modules.items():
                path, of = f"{name}{key}", released._modules.get(key)
                if not isinstance(child, Parameters) and not _is_of_class(child, of):
                    return f"{path} is a {type(child).__name__}"
                if child is not None and (has_hooks(child) or "forward" in child.__dict__):
                    return f"{path} has a hook or a forward of its own"
                if of is not None and of._modules:
                    todo.append((f"{path}.", child, of))
        return None

    def attend(
        self,
        at: str,
        s: Tensor,
        bias: Tensor,
        mask: Tensor,
        k_in: Tensor,
        heads: int,
        inf: float,
        samples: int,
    ) -> Tensor:
        if k_in is s:
            projections = self._products(s, *(f"{at}proj_{name}" for name in "qkv"))
        else:
            projections = *self._products(s, f"{at}proj_q"), *self._products(k_in, f"{at}proj_k", f"{at}proj_v")
        q, k, v = (t.unflatten(-1, (heads, t.shape[-1] // heads)) for t in projections)
        o = attention(q, k, v, bias, mask, inf, samples, self.attention_dtype)
        weight, of_gate = self.weights(at + "proj_g")
        plain = are_plain(o, s, weight, of_gate)
        gated = _OPS.gate(o, s, weight, of_gate) if plain else F.linear(s, weight, of_gate).sigmoid() * o
        return self.linear(gated, at + "proj_o")

    def _products(self, x: Tensor, *layers: str) -> Sequence[Tensor]:
        """Of linear layers, of which the first may have a bias. One of them has few tiles, so where weights are packed
        only once, they are one product."""
        weights, biases = zip(*map(self.weights, layers), strict=True)
        first, *others = biases
        packs = len(layers) > 1 and constants.keeps() and are_plain(x, *weights, first)
        if not packs or others.count(None) < len(others):
            return [self.linear(x, layer) for layer in layers]
        widths = [len(weight) for weight in weights]
        packed = None if first is None else F.pad(first, (0, sum(widths[1:])))
        products: Sequence[Tensor] = _OPS._linear(x, torch.cat(weights), packed).split(widths, -1)
        return products

    def norm(self, x: Tensor, layer: str, eps: float) -> Tensor:
        weight, bias = self.parameter(layer, "weight"), self.parameter(layer, "bias")
        norm = _OPS.layer_norm if are_plain(x, weight, bias) else F.layer_norm
        result: Tensor = norm(x, x.shape[-1:], weight, bias, eps)
        return result

    def linear(self, x: Tensor, layer: str) -> Tensor:
        weight, bias = self.weights(layer)
        x = self.cast(x)
        return _OPS._linear(x, weight, bias) if are_plain(x, weight, bias) else F.linear(x, weight, bias)

    def gate(self, x: Tensor, layer: str) -> Tensor:
        """The sigmoid of a linear layer."""
        weight, bias = self.weights(layer)
        x = self.cast(x)
        return _OPS.dense(x, weight, bias) if are_plain(x, weight, bias) else F.linear(x, weight, bias).sigmoid()

    def swiglu(self, x: Tensor, layer: str) -> Tensor:
        """Of a linear layer, the first half of the features times the SiLU of the second."""
        weight, bias = self.weights(layer)
        x = self.cast(x)
        if not are_plain(x, weight, bias):
            up, gate = F.linear(x, weight, bias).chunk(2, -1)
            return F.silu(gate) * up
        w, w_gate = weight.chunk(2)
        b, b_gate = (None, None) if bias is None else bias.chunk(2)
        return _OPS.glu(x, w, w_gate, b, b_gate, activation="silu")

    def weights(self, layer: str) -> tuple[Tensor, Tensor | None]:
        weight, bias = self.parameter(layer, "weight"), self.parameter(layer, "bias")
        assert weight is not None
        return self.cast(weight), None if bias is None else self.cast(bias)

    @property
    def attention_dtype(self) -> torch.dtype:
        return torch.float32

    def cast(self, t: Tensor) -> Tensor:
        """An operand of a product."""
        return t


def _is_of_class(child: Any, of: Any) -> bool:
    """Whether both modules are of one class. `torch.export` passes its own subclasses on."""
    return type(child) is type(of) or (torch.compiler.is_exporting() and isinstance(child, type(of)))


class AttentionPairBias(_WithAttention):
    """Replaces attention whose bias is a projection of a pair tensor."""

    def __init__(self, of: nn.Module, names: Layers, signature: Signature) -> None:
        super().__init__(of, names, signature)
        self._eps = float(of.get_submodule("proj_z.0").eps)  # type: ignore[arg-type]

    def compute(self, s: Tensor, z: Tensor, mask: Tensor, k_in: Tensor, multiplicity: int = 1) -> Tensor:
        bias = self.linear(self.norm(z, "proj_z.0", self._eps), "proj_z.1")
        heads: Any = self.num_heads
        inf: Any = self.inf
        return self.attend("", s, bias, mask, k_in, heads, inf, multiplicity)

    @classmethod
    def sizes(cls, names: Layers, parameters: Mapping[str, nn.Parameter | None]) -> Mapping[str, Shape]:
        c = _size(parameters, "proj_q.weight", 0)
        heads, c_z = (_size(parameters, "proj_z.1.weight", dim) for dim in (0, 1))
        return {**dict.fromkeys(_ATTENTION, (c, c)), "proj_z.0": (c_z,), "proj_z.1": (heads, c_z)}

    def calls(self, generator: torch.Generator) -> Iterable[Call]:
        weights: Any = self.parameter("proj_q", "weight"), self.parameter("proj_z.0", "weight")
        c, c_z = (weight.shape[0] for weight in weights)
        s, keys, mask = random(generator, 2, 5, c), random(generator, 2, 7, c), torch.ones(2, 7, device="cpu")
        mask[0, 1] = mask[1, 3:] = 0
        yield Call("", (s, random(generator, 2, 5, 7, c_z), mask, keys), {}, (0, 1, 3))
        if repeats := self._signature.has("multiplicity"):
            many = s.repeat(2, 1, 1), random(generator, 2, 5, 7, c_z), mask.repeat(2, 1), keys.repeat(2, 1, 1)
            yield Call(f"{repeats}=2", many, {repeats: 2}, (0, 1, 3))


class DiffusionLayer(_WithAttention, TakesDiffusionDtype):
    """Replaces a layer of a diffusion transformer."""

    def __init__(self, of: nn.Module, names: Layers, signature: Signature) -> None:
        super().__init__(of, names, signature)
        inside: Any = of.get_submodule("pair_bias_attn")
        self._heads, self._inf = int(inside.num_heads), float(inside.inf)
        norms = (f"{at}.{norm}" for at in ADAPTIVE_NORMS for norm in ("a_norm", "s_norm"))
        self._eps = {norm: float(of.get_submodule(norm).eps) for norm in norms}  # type: ignore[arg-type]

    def compute(
        self,
        a: Tensor,
        s: Tensor,
        bias: Tensor,
        mask: Tensor,
        to_keys: Callable[[Tensor], Tensor] | None = None,
        multiplicity: int = 1,
    ) -> Tensor:
        if self.diffusion_dtype is None:
            return self._update(a, s, bias, mask, to_keys, multiplicity)
        with without_autocast(a.device.type):  # which may have another dtype
            return self._update(a, s, bias, mask, to_keys, multiplicity).to(a.dtype)

    def _update(
        self,
        a: Tensor,
        s: Tensor,
        bias: Tensor,
        mask: Tensor,
        to_keys: Callable[[Tensor], Tensor] | None,
        multiplicity: int,
    ) -> Tensor:
        of_s = self._conditions(s, samples=len(a))
        b = self._adaptive_norm(a, "adaln", of_s.scale, of_s.shift)
        keys = b
        if to_keys is not None:
            keys, mask = self.cast(to_keys(b.to(a.dtype))), to_keys(mask.unsqueeze(-1)).squeeze(-1)
        b = self.attend("pair_bias_attn.", b, bias, mask, keys, self._heads, self._inf, multiplicity)
        a = torch.addcmul(a, of_s.gate, b)  # in the dtype of the stream, which is the wider one
        b = self._adaptive_norm(a, "transition.adaln", of_s.transition_scale, of_s.transition_shift)
        hidden = self.swiglu(b, "transition.swish_gate.0") * self.linear(b, "transition.a_to_b")
        b = self.linear(hidden, "transition.b_to_a")
        return torch.addcmul(a, of_s.transition_gate, b)

    def _adaptive_norm(self, a: Tensor, at: str, scale: Tensor, shift: Tensor) -> Tensor:
        return torch.addcmul(shift, scale, self.cast(self.norm(a, f"{at}.a_norm", self.eps(f"{at}.a_norm"))))

    @property
    def attention_dtype(self) -> torch.dtype:
        return self.diffusion_dtype or torch.float32

    def cast(self, t: Tensor) -> Tensor:
        return t if self.diffusion_dtype is None else t.to(self.diffusion_dtype)

    def eps(self, norm: str) -> float:
        return self._eps[norm]

    def _conditions(self, s: Tensor, samples: int) -> Conditions:
        if len(s) == samples:
            if (known := given(self, s)) is not None:
                return known
            s = once(s)  # in sampling, the products with it are those of one sample
        of_norms = []
        for at in ADAPTIVE_NORMS:
            normed = self.norm(s, f"{at}.s_norm", self.eps(f"{at}.s_norm"))
            of_norms.append((self.gate(normed, f"{at}.s_scale"), self.linear(normed, f"{at}.s_bias")))
        gates = [(self.gate(s, layer),) for layer in GATES]
        return Conditions(*of_norms[0], *gates[0], *of_norms[1], *gates[1])

    @classmethod
    def sizes(cls, names: Layers, parameters: Mapping[str, nn.Parameter | None]) -> Mapping[str, Shape]:
        c, c_s = (_size(parameters, "output_projection_linear.weight", dim) for dim in (0, 1))
        hidden = _size(parameters, "transition.a_to_b.weight", 0)
        norm = {"a_norm": (c,), "s_norm": (c_s,), "s_scale": (c, c_s), "s_bias": (c, c_s)}
        return {
            **{f"{at}.{name}": shape for at in ADAPTIVE_NORMS for name, shape in norm.items()},
            **{f"pair_bias_attn.{name}": (c, c) for name in _ATTENTION},
            **dict.fromkeys((*GATES, "output_projection.0"), (c, c_s)),
            "transition.swish_gate.0": (2 * hidden, c),
            "transition.a_to_b": (hidden, c),
            "transition.b_to_a": (c, hidden),
        }

    def calls(self, generator: torch.Generator) -> Iterable[Call]:
        c, c_s = self.parameter("output_projection_linear", "weight").shape  # type: ignore[union-attr]
        a, s, bias = random(generator, 2, 5, c), random(generator, 2, 5, c_s), random(generator, 2, 5, 5, self._heads)
        mask = torch.ones(2, 5, device="cpu")
        mask[0, 1] = mask[1, 3:] = 0
        keywords = {name: self._signature.has(name) for name in ("to_keys", "multiplicity")}
        yield Call("", (a, s, bias, mask), {}, (0, 1, 2))
        if to_keys := keywords["to_keys"]:
            wide = random(generator, 2, 5, 10, self._heads)
            yield Call("with keys", (a, s, wide, mask), {to_keys: _twice}, (0, 1, 2))
        if repeats := keywords["multiplicity"]:
            many = (*(t.repeat(2, 1, 1) for t in (a, s)), bias, mask.repeat(2, 1))
            yield Call(f"{repeats}=2", many, {repeats: 2}, (0, 1, 2))


def _twice(x: Tensor) -> Tensor:
    return torch.cat([x, x.flip(1)], 1)


def _size(parameters: Mapping[str, nn.Parameter | None], name: str, dim: int) -> int:
    parameter = parameters[name]
    assert parameter is not None
    return parameter.shape[dim]

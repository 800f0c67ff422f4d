"""The layer of a diffusion transformer of a public package (Abramson et al. 2024, algorithms 23 to 26), and attention
with pair bias (algorithm 24), and their replacements.

They compute in the released dtypes, with PyTorch's fused attention:
with bias b, q and k of `heads` heads of d features, and a mask m of 0 and 1,

    a = softmax(q @ k.T / sqrt(d) + b + (1 - m) * -inf) @ v
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from torchops.convert.module import Call, Parameters, Replacement, Shape, needs_grad, random, restored
from torchops.convert.signature import Signature
from torchops.nn.layers import has_hooks

_OPS: Any = torch.ops.myops
_PLAIN = (Tensor, nn.Parameter, FakeTensor)


class AttentionNames(NamedTuple):
    """What a package calls the layers of attention with pair bias."""

    q: str = "proj_q"
    k: str = "proj_k"
    v: str = "proj_v"
    gate: str = "proj_g"
    out: str = "proj_o"
    z: str = "proj_z"

    @property
    def layers(self) -> dict[str, str]:
        return {**dict.fromkeys((self.q, self.k, self.v, self.gate, self.out), "linear"), self.z: "bias"}


class ProjectedNames(AttentionNames):
    """The same where the bias is computed from a pair tensor."""

    __slots__ = ()

    @property
    def layers(self) -> dict[str, str]:
        z = {self.z: "sequential", f"{self.z}.0": "norm", f"{self.z}.1": "linear", f"{self.z}.2": "bias"}
        return {**super().layers, **z}


# PyTorch's fused kernel copies an additive mask in every call unless its rows are of a multiple of this.
_ROW = 8


def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor, inf: float, samples: int) -> Tensor:
    """The result, `(batch, queries, heads * d)`, in the dtype of `v`.

    Computed in float32, as released. The products have the digits of float32: PyTorch's fused kernel splits its factors
    whatever ``torch.backends.cuda.matmul.allow_tf32`` is.

    Args:
        q: `(batch, queries, heads, d)`. `k` and `v`: the same with keys.
        bias: `(batch / samples, queries, keys, heads)`; each repeats for the `samples` that follow one another.
        mask: `(batch, keys)`, 1 for keys to keep.
    """
    scores = bias.permute(0, 3, 1, 2).float().contiguous()
    if samples > 1 and scores.shape[0] > 1:
        scores = scores.repeat_interleave(samples, 0)
    scores = scores + (1 - once(mask)[:, None, None].float()) * -inf
    with torch.autocast("cuda", enabled=False):
        q, k, by_keys = (t.float().transpose(1, 2) for t in (q, k, v))
        if more := -k.shape[2] % _ROW:
            k, by_keys = (F.pad(t, (0, 0, 0, more)) for t in (k, by_keys))
            scores = F.pad(scores, (0, more), value=-torch.inf)
        o = F.scaled_dot_product_attention(q, k, by_keys, attn_mask=scores)
    return o.transpose(1, 2).to(v.dtype).flatten(2)


def once(x: Tensor) -> Tensor:
    """The first row of an `x` of equal rows that gets no gradient, `x` otherwise. Rows that share memory are equal,
    whatever is in them."""
    return x[:1] if x.shape[0] > 1 and x.stride(0) == 0 and not needs_grad(x) else x


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
        names: AttentionNames,
        s: Tensor,
        bias: Tensor,
        mask: Tensor,
        k_in: Tensor,
        heads: int,
        inf: float,
        samples: int,
    ) -> Tensor:
        def heads_of(x: Tensor, name: str) -> Tensor:
            y = self.linear(x, at + name)
            return y.unflatten(-1, (heads, y.shape[-1] // heads))

        q, k, v = heads_of(s, names.q), heads_of(k_in, names.k), heads_of(k_in, names.v)
        o = attention(q, k, v, bias, mask, inf, samples)
        weight, of_gate = self.weights(at + names.gate)
        plain = _are_plain(o, s, weight, of_gate)
        gated = _OPS.gate(o, s, weight, of_gate) if plain else F.linear(s, weight, of_gate).sigmoid() * o
        return self.linear(gated, at + names.out)

    def norm(self, x: Tensor, layer: str, eps: float) -> Tensor:
        weight, bias = self.parameter(layer, "weight"), self.parameter(layer, "bias")
        norm = _OPS.layer_norm if _are_plain(x, weight, bias) else F.layer_norm
        result: Tensor = norm(x, x.shape[-1:], weight, bias, eps)
        return result

    def linear(self, x: Tensor, layer: str) -> Tensor:
        weight, bias = self.weights(layer)
        return _OPS._linear(x, weight, bias) if _are_plain(x, weight, bias) else F.linear(x, weight, bias)

    def gate(self, x: Tensor, layer: str) -> Tensor:
        """The sigmoid of a linear layer."""
        weight, bias = self.weights(layer)
        return _OPS.dense(x, weight, bias) if _are_plain(x, weight, bias) else F.linear(x, weight, bias).sigmoid()

    def swiglu(self, x: Tensor, layer: str) -> Tensor:
        """Of a linear layer, the first half of the features times the SiLU of the second."""
        weight, bias = self.weights(layer)
        if not _are_plain(x, weight, bias):
            up, gate = F.linear(x, weight, bias).chunk(2, -1)
            return F.silu(gate) * up
        w, w_gate = weight.chunk(2)
        b, b_gate = (None, None) if bias is None else bias.chunk(2)
        return _OPS.glu(x, w, w_gate, b, b_gate, activation="silu")

    def weights(self, layer: str) -> tuple[Tensor, Tensor | None]:
        weight = self.parameter(layer, "weight")
        assert weight is not None
        return weight, self.parameter(layer, "bias")


def _is_of_class(child: Any, of: Any) -> bool:
    """Whether both modules are of one class. `torch.export` passes its own subclasses on."""
    return type(child) is type(of) or (torch.compiler.is_exporting() and isinstance(child, type(of)))


def _are_plain(*tensors: Tensor | None) -> bool:
    """Whether none is of a subclass that knows ATen's operators alone, such as quantized weights."""
    return all(t is None or type(t) in _PLAIN for t in tensors)


class AttentionPairBias(_WithAttention):
    """Replaces attention whose bias is a projection of a pair tensor."""

    def __init__(self, of: nn.Module, names: Any, signature: Signature) -> None:
        super().__init__(of, names, signature)
        self._names = names
        self._eps = float(of.get_submodule(f"{names.z}.0").eps)  # type: ignore[arg-type]

    def compute(self, s: Tensor, z: Tensor, mask: Tensor, k_in: Tensor, multiplicity: int = 1) -> Tensor:
        names, heads = self._names, self.num_heads
        bias = self.linear(self.norm(z, f"{names.z}.0", self._eps), f"{names.z}.1")
        inf: Any = self.inf
        count: Any = heads
        return self.attend("", names, s, bias, mask, k_in, count, inf, multiplicity)

    @classmethod
    def sizes(cls, names: Any, parameters: Mapping[str, nn.Parameter | None]) -> Mapping[str, Shape]:
        c, c_z = _size(parameters, f"{names.q}.weight", 0), _size(parameters, f"{names.z}.1.weight", 1)
        heads = _size(parameters, f"{names.z}.1.weight", 0)
        return {
            **dict.fromkeys((names.q, names.k, names.v, names.gate, names.out), (c, c)),
            f"{names.z}.0": (c_z,),
            f"{names.z}.1": (heads, c_z),
        }

    def calls(self, generator: torch.Generator) -> Iterable[Call]:
        weights: Any = self.parameter(self._names.q, "weight"), self.parameter(f"{self._names.z}.0", "weight")
        c, c_z = (weight.shape[0] for weight in weights)
        s, keys, mask = random(generator, 2, 5, c), random(generator, 2, 7, c), torch.ones(2, 7, device="cpu")
        mask[0, 1] = mask[1, 3:] = 0
        yield Call("", (s, random(generator, 2, 5, 7, c_z), mask, keys), {}, (0, 1, 3))
        if repeats := self._signature.has("multiplicity"):
            many = s.repeat(2, 1, 1), random(generator, 2, 5, 7, c_z), mask.repeat(2, 1), keys.repeat(2, 1, 1)
            yield Call(f"{repeats}=2", many, {repeats: 2}, (0, 1, 3))


class LayerNames(NamedTuple):
    """What a package calls the layers of a layer of its diffusion transformer."""

    norm: str = "adaln"
    attention: str = "pair_bias_attn"
    attention_layers: AttentionNames = AttentionNames()
    gate: str = "output_projection_linear"
    gating: str = "output_projection"
    transition: str = "transition"
    swish: str = "swish_gate"
    up: str = "a_to_b"
    down: str = "b_to_a"
    last: str = "post_lnorm"

    @property
    def layers(self) -> dict[str, str]:
        def under(prefix: str, layers: Mapping[str, str]) -> dict[str, str]:
            return {f"{prefix}.{name}": role for name, role in layers.items()}

        norm = {"a_norm": "norm", "s_norm": "norm", "s_scale": "linear", "s_bias": "linear"}
        gating = {self.gating: "sequential", f"{self.gating}.0": "linear", f"{self.gating}.1": "sigmoid"}
        swish = {self.swish: "sequential", f"{self.swish}.0": "linear", f"{self.swish}.1": "swiglu"}
        transition = {self.norm: "adaln", **under(self.norm, norm), **gating, **swish}
        transition |= {self.up: "linear", self.down: "linear"}
        return {
            **{self.norm: "adaln", **under(self.norm, norm)},
            **{self.attention: "attention", **under(self.attention, self.attention_layers.layers)},
            **{self.gate: "linear", **gating},
            **{self.transition: "transition", **under(self.transition, transition)},
            self.last: "last",
        }


class DiffusionLayer(_WithAttention):
    """Replaces a layer of a diffusion transformer."""

    _names: LayerNames

    def __init__(self, of: nn.Module, names: LayerNames, signature: Signature) -> None:
        super().__init__(of, names, signature)
        inside: Any = of.get_submodule(names.attention)
        self._heads, self._inf = int(inside.num_heads), float(inside.inf)
        norms = (
            f"{prefix}{names.norm}.{norm}" for prefix in ("", f"{names.transition}.") for norm in ("a_norm", "s_norm")
        )
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
        names, at = self._names, f"{self._names.transition}."
        if len(s) == len(a):
            s = once(s)  # in sampling, the products with it are those of one sample
        b = self._adaptive_norm(a, s, names.norm)
        keys = b
        if to_keys is not None:
            keys, mask = to_keys(b), to_keys(mask.unsqueeze(-1)).squeeze(-1)
        b = self.attend(
            f"{names.attention}.", names.attention_layers, b, bias, mask, keys, self._heads, self._inf, multiplicity
        )
        a = torch.addcmul(a, self.gate(s, names.gate), b)
        b = self._adaptive_norm(a, s, at + names.norm)
        b = self.linear(self.swiglu(b, f"{at}{names.swish}.0") * self.linear(b, at + names.up), at + names.down)
        return torch.addcmul(a, self.gate(s, f"{at}{names.gating}.0"), b)

    def _adaptive_norm(self, a: Tensor, s: Tensor, at: str) -> Tensor:
        a, s = (self.norm(x, layer, self._eps[layer]) for x, layer in ((a, f"{at}.a_norm"), (s, f"{at}.s_norm")))
        return torch.addcmul(self.linear(s, f"{at}.s_bias"), self.gate(s, f"{at}.s_scale"), a)

    @classmethod
    def sizes(cls, names: LayerNames, parameters: Mapping[str, nn.Parameter | None]) -> Mapping[str, Shape]:
        at, inner = f"{names.transition}.", names.attention_layers
        c, c_s = (_size(parameters, f"{names.gate}.weight", dim) for dim in (0, 1))
        hidden = _size(parameters, f"{at}{names.up}.weight", 0)
        norm = {"a_norm": (c,), "s_norm": (c_s,), "s_scale": (c, c_s), "s_bias": (c, c_s)}
        heads = (inner.q, inner.k, inner.v, inner.gate, inner.out)
        return {
            **{f"{prefix}{names.norm}.{name}": shape for prefix in ("", at) for name, shape in norm.items()},
            **{f"{names.attention}.{name}": (c, c) for name in heads},
            **dict.fromkeys((names.gate, f"{names.gating}.0", f"{at}{names.gating}.0"), (c, c_s)),
            f"{at}{names.swish}.0": (2 * hidden, c),
            f"{at}{names.up}": (hidden, c),
            f"{at}{names.down}": (c, hidden),
        }

    def calls(self, generator: torch.Generator) -> Iterable[Call]:
        c, c_s = self.parameter(self._names.gate, "weight").shape  # type: ignore[union-attr]
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

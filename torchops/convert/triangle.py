"""The triangle multiplicative update of a public package, and its replacement.

A package stores the six projections under names of its own, with ``a`` and ``b`` packed into one weight or separate.
The operator reads them where they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from torchops.convert.module import Call, Replacement, Shape, needs_grad, random, without_autocast
from torchops.convert.signature import Signature

Direction = Literal["outgoing", "incoming"]

# Inputs of size 1, and inputs so small that eps matters to the layer norm of the product; otherwise the norm would hide
# any factor.
SCALES = (1.0, 0.05)


class Names(NamedTuple):
    """What a package calls the layers. `ins` are those that project `z` to a, b and their gates, in this order: one
    each, or one for a and b and one for both gates."""

    norm_in: str
    ins: tuple[str, ...]
    norm_out: str
    p_out: str
    g_out: str

    @property
    def norms(self) -> tuple[str, str]:
        return (self.norm_in, self.norm_out)

    @property
    def layers(self) -> dict[str, str]:
        linears = (*self.ins, self.p_out, self.g_out)
        # OpenFold and its descendants have a module for the sigmoid.
        return dict.fromkeys(self.norms, "norm") | dict.fromkeys(linears, "linear") | {"sigmoid": "sigmoid?"}


PACKED = Names("norm_in", ("p_in", "g_in"), "norm_out", "p_out", "g_out")
SEPARATE = Names(
    "layer_norm_in", ("linear_a_p", "linear_b_p", "linear_a_g", "linear_b_g"), "layer_norm_out", "linear_z", "linear_g"
)
FUSED = SEPARATE._replace(ins=("linear_ab_p", "linear_ab_g"))


class TriangleUpdate(Replacement):
    """A triangle multiplicative update.

    Args:
        direction: of the module.
        follows: for a bfloat16 `x`, it computes in bfloat16, whatever the dtype of the parameters, with or without
            autocast.
        overwrites: an update in place without the addition overwrites `x`, rather than returning a new tensor.
    """

    operator = "myops::_triangle_multiplicative_update"

    def __init__(
        self,
        of: nn.Module,
        names: Names,
        signature: Signature,
        *,
        direction: Direction,
        follows: bool = False,
        overwrites: bool = True,
    ) -> None:
        super().__init__(of, names, signature)
        self._triangle = (direction, float(of._modules[names.norm_in].eps))  # type: ignore[union-attr, arg-type]
        self._follows, self._overwrites = follows, overwrites

    @property
    def direction(self) -> Direction:
        return self._triangle[0]

    @property
    def eps(self) -> float:
        return self._triangle[1]

    def _ins(self, kind: str) -> list[Tensor | None]:
        """For a, b, and their gates. Packed parameters are in the places of a. The operator splits them itself, so
        autocast casts each parameter once, not once per view."""
        tensors = [self.parameter(name, kind) for name in self._names.ins]
        return [tensors[0], None, tensors[1], None] if len(tensors) == 2 else tensors

    def weights(self) -> list[Tensor | None]:
        """Weight and bias, alternating, of norm_in, the projections to a, b and their gates, norm_out, p_out and g_out:
        the order of the private operator, which accepts weights of a and b packed or separate."""
        names = self._names

        def of(layer: str) -> list[Tensor | None]:
            return [self.parameter(layer, "weight"), self.parameter(layer, "bias")]

        ins = [t for pair in zip(self._ins("weight"), self._ins("bias"), strict=True) for t in pair]
        return [*of(names.norm_in), *ins, *of(names.norm_out), *of(names.p_out), *of(names.g_out)]

    def packed(self) -> dict[str, Tensor | None]:
        """The parameters by the names of :class:`torchops.nn.TriangleMultiplicativeUpdate`."""
        values: dict[str, Tensor | None] = {}
        for i, kind in enumerate(("weight", "bias")):
            norm_in, p_a, p_b, g_a, g_b, norm_out, p_out, g_out = self.weights()[i::2]
            if len(self._names.ins) == 2:
                values |= {f"p_in.{kind}": p_a, f"g_in.{kind}": g_a}
            else:
                values |= {f"p_in.{kind}": _concatenated(p_a, p_b), f"g_in.{kind}": _concatenated(g_a, g_b)}
            values |= {f"norm_in.{kind}": norm_in, f"norm_out.{kind}": norm_out}
            values |= {f"p_out.{kind}": p_out, f"g_out.{kind}": g_out}
        return values

    def update(self, x: Tensor, mask: Tensor | None, weights: list[Tensor | None] | None = None) -> Tensor:
        """The update of ``x``, with `weights` instead of the module's own if given."""
        weights = self.weights() if weights is None else weights
        outgoing = self.direction == "outgoing"
        return torch.ops.myops._triangle_multiplicative_update(x, _mask_for(x, mask), weights, outgoing, self.eps)[0]

    def updated(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """``x + update(x)``, a new tensor."""
        how = self.direction == "outgoing", self.eps, False, True
        return torch.ops.myops._triangle_multiplicative_update(x, _mask_for(x, mask), self.weights(), *how)[0]

    def update_(self, x: Tensor, mask: Tensor | None, weights: list[Tensor | None] | None = None) -> Tensor:
        """``x += update(x)``; returns ``x``."""
        mask, weights = _mask_for(x, mask), self.weights() if weights is None else weights
        if needs_grad(x, mask, *weights):
            return x.add_(self.update(x.clone(), mask, weights))  # the gradient reads the old x
        outgoing = self.direction == "outgoing"
        torch.ops.myops._triangle_multiplicative_update_(x, mask, weights, outgoing, self.eps)
        return x

    def compute(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        inplace: bool = False,
        add: bool = False,
        out_of_place: bool = False,
    ) -> Tensor:
        inplace = inplace and not out_of_place
        if not self._follows or x.dtype != torch.bfloat16:
            return self._compute(x, mask, inplace, add, self.weights())
        with without_autocast(x.device.type):
            weights = [None if t is None else t.to(x.dtype) for t in self.weights()]
            return self._compute(x, mask, inplace, add, weights)

    def _compute(
        self, x: Tensor, mask: Tensor | None, inplace: bool, add: bool, weights: list[Tensor | None]
    ) -> Tensor:
        if inplace and add:
            return self.update_(x, mask, weights)
        update = self.update(x, mask, weights)
        return x.copy_(update) if inplace and self._overwrites else update

    def _probes(self) -> Iterable[Mapping[str, Any]]:
        """Further arguments for comparing the original and the replacement: without gradients, and including what
        happens to `x`."""
        yield {}
        inplace, add = (self._signature.has(meaning) for meaning in ("inplace", "add"))
        if inplace:
            yield {inplace: True}
        if inplace and add:
            yield {inplace: True, add: True}

    def calls(self, generator: torch.Generator) -> Iterable[Call]:
        c = self.parameter(self._names.g_out, "weight").shape[0]  # type: ignore[union-attr]
        n = 5 if c != 5 else 6
        x, mask = random(generator, 2, n, n, c), random(generator, 2, n, n)
        mask[random(generator, 2, n, n) < -0.8] = 0
        for scale in SCALES:
            yield Call("", (x, mask * scale), {}, (0,))
        # A row and a column that the mask leaves empty, as in padding: there o is 0 and the update is not. Without
        # gradients, because those of the norm of 0 are so large that they would hide all others.
        padded = mask.clone()
        padded[0, 1], padded[0, :, 2] = 0, 0
        for value in (padded, *([None] if "mask" in self._signature.known else [])):
            for arguments in self._probes():
                said = [f"{name}={value}" for name, value in arguments.items()]
                yield Call(", ".join(["without a mask"] * (value is None) + said), (x, value), arguments)

    @classmethod
    def sizes(cls, names: Names, parameters: Mapping[str, nn.Parameter | None]) -> Mapping[str, Shape]:
        c, d = parameters[f"{names.p_out}.weight"].shape  # type: ignore[union-attr]
        ins = dict.fromkeys(names.ins, (4 // len(names.ins) * d, c))
        return ins | {names.p_out: (c, d), names.g_out: (c, c), names.norm_in: (c,), names.norm_out: (d,)}

    @classmethod
    def refuse(cls, names: Names, module: nn.Module) -> str | None:
        norm_in, norm_out = (module._modules[name] for name in names.norms)
        return None if norm_in.eps == norm_out.eps else "its layer norms have different eps"  # type: ignore[union-attr]


def _mask_for(x: Tensor, mask: Tensor | None) -> Tensor | None:
    """The mask in a form that the operator accepts: the packages multiply by it, so it broadcasts and may have an
    integer dtype."""
    if mask is None:
        return None
    if mask.shape != x.shape[:-1]:
        mask = mask.expand(x.shape[:-1])
    return mask if mask.is_floating_point() or mask.dtype == torch.bool else mask.to(x.dtype)


def _concatenated(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Concatenates a and b. If only one of them exists, the other counts as 0."""
    given = b if a is None else a
    return None if given is None else torch.cat([torch.zeros_like(given) if t is None else t for t in (a, b)])

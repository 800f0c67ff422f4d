"""The triangle multiplicative update of a public package, and the module that takes its place.

A package stores the six projections under names of its own, ``a`` and ``b`` packed in one weight or apart. The
replacement keeps these names and parameters; the operator reads them where they are, halves of packed ones as views.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

import torchops
from torchops.nn.replace import Replacements, join, module_reason, parameters_reason, swapper

Direction = Literal["outgoing", "incoming"]


class Names(NamedTuple):
    """What a package calls the layers. `ins` are those that project `z` to a, b and their gates, in this order: one
    each, or one for a and b and one for both gates."""

    norm_in: str
    ins: tuple[str, ...]
    norm_out: str
    p_out: str
    g_out: str

    @property
    def linears(self) -> tuple[str, ...]:
        return (*self.ins, self.p_out, self.g_out)

    @property
    def norms(self) -> tuple[str, str]:
        return (self.norm_in, self.norm_out)


PACKED = Names("norm_in", ("p_in", "g_in"), "norm_out", "p_out", "g_out")
SEPARATE = Names(
    "layer_norm_in", ("linear_a_p", "linear_b_p", "linear_a_g", "linear_b_g"), "layer_norm_out", "linear_z", "linear_g"
)
FUSED = SEPARATE._replace(ins=("linear_ab_p", "linear_ab_g"))


class Parameters(nn.Module):
    """The parameters of a layer, under their names, for the operator that reads them. It cannot be called, so nothing
    that wraps, quantizes or adapts layers takes it for one whose output is used."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        for name, parameter in layer._parameters.items():
            self.register_parameter(name, parameter)
        self.training = layer.training

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={tuple(p.shape)}" for name, p in self._parameters.items() if p is not None)


class TriangleUpdate(nn.Module):
    """A triangle multiplicative update with the parameters and plain attributes of the module `of`.

    Adapters derive from it, with the `forward` of their package.
    """

    names: ClassVar[Names]

    def __init__(self, of: nn.Module, direction: Direction) -> None:
        super().__init__()
        plain = (bool, int, float, str, type(None))
        known = vars(self)
        vars(self).update({k: v for k, v in vars(of).items() if k not in known and isinstance(v, plain)})
        self.training = of.training
        self._triangle = (direction, float(of._modules[self.names.norm_in].eps))  # type: ignore[union-attr, arg-type]
        layers = {*self.names.norms, *self.names.linears}
        for name, child in of.named_children():
            self.add_module(name, Parameters(child) if name in layers else child)

    @property
    def direction(self) -> Direction:
        return self._triangle[0]

    @property
    def eps(self) -> float:
        return self._triangle[1]

    def _get(self, layer: str, parameter: str) -> Tensor | None:
        return self._modules[layer]._parameters.get(parameter)  # type: ignore[union-attr]

    def _ins(self, parameter: str) -> list[Tensor | None]:
        """For a, b, and their gates."""
        parts = 4 // len(self.names.ins)
        tensors = (self._get(name, parameter) for name in self.names.ins)
        return [part for t in tensors for part in ((None,) * parts if t is None else t.chunk(parts))]

    def weights(self) -> list[Tensor | None]:
        """Weight and bias by turns of norm_in, the projections to a, b, and their gates, norm_out, p_out and g_out: the
        order of the operator beneath, which takes weights of a and b that lie anywhere."""
        names = self.names

        def of(layer: str) -> list[Tensor | None]:
            return [self._get(layer, "weight"), self._get(layer, "bias")]

        ins = [t for pair in zip(self._ins("weight"), self._ins("bias"), strict=True) for t in pair]
        return [*of(names.norm_in), *ins, *of(names.norm_out), *of(names.p_out), *of(names.g_out)]

    def packed(self) -> dict[str, Tensor | None]:
        """Copies of the values by the names of :class:`torchops.nn.TriangleMultiplicativeUpdate`."""
        values: dict[str, Tensor | None] = {}
        for i, kind in enumerate(("weight", "bias")):
            norm_in, p_a, p_b, g_a, g_b, norm_out, p_out, g_out = self.weights()[i::2]
            values |= {f"p_in.{kind}": _concatenated(p_a, p_b), f"g_in.{kind}": _concatenated(g_a, g_b)}
            values |= {f"norm_in.{kind}": norm_in, f"norm_out.{kind}": norm_out}
            values |= {f"p_out.{kind}": p_out, f"g_out.{kind}": g_out}
        return values

    def update(self, x: Tensor, mask: Tensor | None, weights: list[Tensor | None] | None = None) -> Tensor:
        """The update of ``x``, by other weights than those that the module has if they are given."""
        weights = self.weights() if weights is None else weights
        outgoing = self.direction == "outgoing"
        return torch.ops.myops._triangle_multiplicative_update(x, _mask_for(x, mask), weights, outgoing, self.eps)[0]

    def update_(self, x: Tensor, mask: Tensor | None, weights: list[Tensor | None] | None = None) -> Tensor:
        """``x += update(x)``; returns ``x``."""
        mask, weights = _mask_for(x, mask), self.weights() if weights is None else weights
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, mask, *weights)):
            return x.add_(self.update(x.clone(), mask, weights))  # the gradient reads the old x
        outgoing = self.direction == "outgoing"
        torch.ops.myops._triangle_multiplicative_update_(x, mask, weights, outgoing, self.eps)
        return x

    @classmethod
    def probes(cls) -> Iterable[Mapping[str, Any]]:
        """Further arguments with which the original and the replacement are compared (see `probe`): without gradients,
        and with what becomes of `x`."""
        return ({},)


def _mask_for(x: Tensor, mask: Tensor | None) -> Tensor | None:
    """The packages multiply by the mask, so it broadcasts and may be of integers."""
    if mask is None:
        return None
    if mask.shape != x.shape[:-1]:
        mask = mask.expand(x.shape[:-1])
    return mask if mask.is_floating_point() or mask.dtype == torch.bool else mask.to(x.dtype)


def _concatenated(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """A part that only one of them has is 0 for the other."""
    given = b if a is None else a
    return None if given is None else torch.cat([torch.zeros_like(given) if t is None else t for t in (a, b)])


# --- which module it is ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TriangleAdapter:
    """How the classes of one file of a package are replaced.

    Attributes:
        file: the module in which the package defines them.
        classes: their names.
        replacements: for each signature of `forward` that releases of the package have had.
        direction: of such a module.
        norm, linear: what that file calls the classes of the layers.
        refuse: anything else that forbids it, with the reason.
    """

    file: str
    classes: tuple[str, ...]
    replacements: tuple[type[TriangleUpdate], ...]
    direction: Callable[[nn.Module], Direction]
    norm: str = "nn.LayerNorm"
    linear: str = "nn.Linear"
    refuse: Callable[[nn.Module], str | None] = lambda module: None

    @property
    def names(self) -> Names:
        return self.replacements[0].names

    def has(self, module: nn.Module) -> bool:
        return any(type(module) is known for known in self._known())

    def derives(self, module: nn.Module) -> bool:
        return isinstance(module, self._known())

    def _known(self) -> tuple[type[nn.Module], ...]:
        file = sys.modules.get(self.file)
        return tuple(vars(file)[name] for name in self.classes if name in vars(file)) if file else ()

    def replacement(self, module: nn.Module) -> TriangleUpdate | str:
        """The module that takes its place, or why none does."""
        if reason := module_reason(module, type(module)) or self._structure_reason(module) or self.refuse(module):
            return reason
        forward = _arguments(type(module))
        match = next((new for new in self.replacements if _arguments(new) == forward), None)
        if match is None:
            return f"its forward takes ({', '.join(name for name, *_ in forward)}), which no known release does"
        from torchops.adapters.probe import probe

        direction = self.direction(module)
        return probe(module, lambda original: match(original, direction)) or match(module, direction)

    def _structure_reason(self, module: nn.Module) -> str | None:
        names = self.names
        try:
            norm, linear = attrgetter(self.norm, self.linear)(sys.modules[self.file])
        except AttributeError as error:
            return str(error)
        expected: dict[str, type[nn.Module]] = dict.fromkeys(names.norms, norm) | dict.fromkeys(names.linears, linear)
        # OpenFold and its descendants call one.
        optional: dict[str, type[nn.Module]] = {"sigmoid": nn.Sigmoid}
        children = {name: child for name, child in module._modules.items() if child is not None}
        if missing := expected.keys() - children.keys():
            return f"it has no {min(missing)}"
        if more := children.keys() - expected.keys() - optional.keys():
            return f"it has a layer {min(more)}"
        if own := [*module._parameters, *module._buffers]:
            return f"it has a tensor {own[0]} of its own"
        for name, child in children.items():
            if reason := module_reason(child, (expected | optional)[name]):
                return f"{name}: {reason}"
            if extra := [*child._buffers, *child._modules, *(child._parameters.keys() - {"weight", "bias"})]:
                return f"{name}: it has {extra[0]}"
        parameters = {f"{layer}.{name}": p for layer in expected for name, p in children[layer]._parameters.items()}
        for name in names.linears:
            if parameters.get(f"{name}.weight") is None:
                return f"{name} has no weight"
        if reason := parameters_reason(parameters, f"{names.p_out}.weight", "myops::_triangle_multiplicative_update"):
            return reason
        if children[names.norm_in].eps != children[names.norm_out].eps:
            return "its layer norms have different eps"
        return self._shape_reason(parameters)

    def _shape_reason(self, parameters: Mapping[str, nn.Parameter | None]) -> str | None:
        names = self.names
        c, d = parameters[f"{names.p_out}.weight"].shape  # type: ignore[union-attr]
        rows = 4 // len(names.ins) * d
        sizes = dict.fromkeys(names.ins, (rows, c)) | {names.p_out: (c, d), names.g_out: (c, c)}
        sizes |= {names.norm_in: (c, c), names.norm_out: (d, d)}
        for name, parameter in parameters.items():
            layer, _, kind = name.rpartition(".")
            size = sizes[layer] if kind == "weight" and layer not in names.norms else sizes[layer][:1]
            if parameter is not None and tuple(parameter.shape) != size:
                return f"{name} is of shape {tuple(parameter.shape)} and not {size}"
        return None


def _arguments(module: type[nn.Module]) -> list[tuple[str, Any, Any]]:
    parameters = list(inspect.signature(module.forward).parameters.values())[1:]
    return [(p.name, p.kind, p.default) for p in parameters]


def known_update(module: nn.Module) -> TriangleUpdate | str | None:
    """The module that takes the place of `module`, or why none does; None if it resembles no triangle update."""
    if isinstance(module, TriangleUpdate | torchops.nn.TriangleMultiplicativeUpdate):
        return None
    from torchops.adapters import triangle_adapters

    adapters = list(triangle_adapters())
    for adapter in adapters:
        if adapter.has(module):
            return adapter.replacement(module)
    name = type(module).__name__
    for adapter in adapters:
        if adapter.derives(module):
            return f"{name} is a subclass of one in {adapter.file}"
    for names in (PACKED, SEPARATE, FUSED):
        if {*names.norms, *names.linears} <= module._modules.keys():
            return f"{name} has the layers of a triangle update, but is of no known package"
    return None


@swapper
def replace_triangle_updates(model: nn.Module) -> Replacements:
    """Modules of public packages, by those that call the operator."""
    found: dict[nn.Module, TriangleUpdate | str | None] = {m: known_update(m) for m in model.modules()}
    replaced, left = [], {}
    if isinstance(reason := found[model], TriangleUpdate | str):
        left[""] = reason if isinstance(reason, str) else "it is the model itself"
    for parent, name in [(parent, name) for name, parent in model.named_modules()]:
        for key, child in parent._modules.items():
            new = None if child is None else found.get(child)
            if isinstance(new, TriangleUpdate):
                parent._modules[key] = new
                replaced.append(join(name, key))
            elif new is not None:
                left[join(name, key)] = new
    return Replacements(tuple(replaced), left)

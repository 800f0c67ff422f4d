"""Which class of a public package a replacement takes the place of, and whether a module is one of these."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from torch import nn

from torchops.convert.module import Replacement
from torchops.convert.probe import probe
from torchops.convert.registry import identity, module_reason, parameters_reason
from torchops.convert.signature import Meanings, arguments, understood


@dataclass(frozen=True)
class Adapter:
    """How the classes of one file of a package are replaced.

    Attributes:
        file: the module in which the package defines them.
        classes: their names.
        kind: what they compute.
        names: what the package calls their layers.
        meanings: what the arguments of their forwards mean, in all releases that are known.
        roles: what that file calls the classes of the layers. A bar separates several, and a colon follows the name of
            another file.
        options: further arguments of the replacement.
        gpu_norms: names, by file and class, of norms among the roles that have kernels for a GPU only: what is compared
            on the CPU has PyTorch's norm in their place.
    """

    file: str
    classes: tuple[str, ...]
    kind: type[Replacement]
    names: Any
    meanings: Meanings
    roles: Mapping[str, str] = field(default_factory=lambda: {"norm": "nn.LayerNorm", "linear": "nn.Linear"})
    options: Callable[[nn.Module], Mapping[str, Any]] = lambda module: {}
    gpu_norms: str = ""

    def kinds(self) -> tuple[type[nn.Module], ...]:
        """The classes, as far as their file is imported."""
        file = sys.modules.get(self.file)
        return tuple(vars(file)[name] for name in self.classes if name in vars(file)) if file else ()

    def replacement(self, module: nn.Module, tried: dict[Any, str | None]) -> Replacement | str:
        """The replacement of a module, or the reason why there is none. `tried` has the results for other modules."""
        if reason := module_reason(module, type(module)):
            return reason
        if reason := self._structure_reason(module):
            return reason
        signature = understood(type(module), self.meanings)
        if signature is None:
            taken = ", ".join(p.name for p in arguments(type(module)))
            return f"its forward takes ({taken}), which no known release does"
        if reason := self.kind.refuse(self.names, module):
            return reason
        options = self.options(module)
        make: Callable[[nn.Module], Replacement] = functools.partial(
            self.kind, names=self.names, signature=signature, **options
        )
        key = identity(module)
        if key not in tried:
            tried[key] = probe(module, make, self._imported(self.gpu_norms))
        return tried[key] or make(module)

    def _structure_reason(self, module: nn.Module) -> str | None:
        expected = {name: role.removesuffix("?") for name, role in self.names.layers.items()}
        kinds = {"sigmoid": (nn.Sigmoid,), "silu": (nn.SiLU,)}
        try:
            kinds |= {role: self._imported(self.roles[role]) for role in {*expected.values()} - kinds.keys()}
        except AttributeError as error:
            return str(error)
        there = {name: child for name, child in module.named_modules(remove_duplicate=False) if name}
        for name, role in self.names.layers.items():
            if not role.endswith("?") and name not in there:
                return f"it has no {name}"
        for name, child in there.items():
            known = kinds[expected[name]] if name in expected else (type(child),)
            if reason := module_reason(child, type(child) if type(child) in known else known[0]):
                return f"{name}: {reason}"
        if more := there.keys() - expected.keys():
            return f"it has a layer {min(more)}"
        for name, child in {"": module, **there}.items():
            leaf = name != "" and expected[name] in ("norm", "linear")
            own = [*child._buffers, *(child._parameters.keys() - ({"weight", "bias"} if leaf else set()))]
            if own:
                return f"{name}: it has {own[0]}" if name else f"it has a tensor {own[0]} of its own"
            if getattr(child, "precision", None) is not None:
                # Linear layers of several packages can be set to compute in one dtype, whatever the dtype of their
                # input.
                return f"{name} has a precision of its own"
        parameters = {
            f"{name}.{kind}": parameter
            for name, child in there.items()
            if expected[name] in ("norm", "linear")
            for kind, parameter in child._parameters.items()
        }
        return self._parameters_reason(parameters, [n for n in there if expected[n] == "linear"])

    def _imported(self, names: str) -> tuple[type[nn.Module], ...]:
        """The classes of these names, as far as their files are imported."""
        found = []
        for name in filter(None, names.split("|")):
            file, _, path = name.rpartition(":")
            if (module := sys.modules.get(file or self.file)) is not None:
                found.append(attrgetter(path)(module))
        return tuple(found)

    def _parameters_reason(self, parameters: Mapping[str, nn.Parameter | None], linears: list[str]) -> str | None:
        for name in linears:
            if parameters.get(f"{name}.weight") is None:
                return f"{name} has no weight"
        if reason := parameters_reason(parameters, f"{linears[-1]}.weight", self.kind.operator):
            return reason
        sizes = self.kind.sizes(self.names, parameters)
        for name, parameter in parameters.items():
            layer, _, kind = name.rpartition(".")
            size = sizes[layer] if kind == "weight" else sizes[layer][:1]
            if parameter is not None and tuple(parameter.shape) != size:
                return f"{name} is of shape {tuple(parameter.shape)} and not {size}"
        return None

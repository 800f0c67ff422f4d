"""What all adapters share: the module of a public package and its replacement.

A replacement has the parameters of the original, under the same names, and its plain attributes. Its operator reads the
parameters where they are. Whether a module is what its class is known for is checked in this order: its type, its
layers and nothing else on it, the sizes of its parameters, the arguments of its `forward`
(:mod:`torchops.convert.signature`), and what it computes (:mod:`torchops.convert.probe`).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from torchops.convert.registry import like
from torchops.convert.signature import Signature
from torchops.convert.values import PLAIN
from torchops.nn.layers import has_hooks

Shape = tuple[int, ...]


class Parameters(nn.Module):
    """The parameters of a layer, under their names, for the operator that reads them. It cannot be called, so tools
    that wrap, quantize or adapt layers don't mistake it for one whose output is used."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, layer: nn.Module, tied: dict[nn.Module, Parameters] | None = None) -> None:
        """`tied` are those of layers so far: a layer with two names stays one."""
        super().__init__()
        for name, parameter in layer._parameters.items():
            self.register_parameter(name, parameter)
        for name, child in layer._modules.items():
            self.add_module(name, None if child is None else Parameters.of(child, {} if tied is None else tied))
        self.training = layer.training

    @classmethod
    def of(cls, layer: nn.Module, tied: dict[nn.Module, Parameters]) -> Parameters:
        if layer not in tied:
            tied[layer] = cls(layer, tied)
        return tied[layer]

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={tuple(p.shape)}" for name, p in self._parameters.items() if p is not None)


def _added(module: nn.Module) -> str:
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    names = (getattr(hook, "__qualname__", type(hook).__name__) for hook in hooks)
    return ", ".join(names) or ("a forward" if "forward" in module.__dict__ else "a backward hook")


class Call(NamedTuple):
    """A call that compares an original with its replacement."""

    said: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    # Indices into `args`. If empty, the call is made without gradients, and changes to the arguments are compared too.
    gradients: tuple[int, ...] = ()


class Layers(NamedTuple):
    """The layers inside a module whose names are the same in all packages, and what each of them is."""

    layers: Mapping[str, str]


class Replacement(nn.Module):
    """A module with the parameters and plain attributes of the module `of`, which computes by operators what that does.

    Subclasses are kinds of modules. What differs between packages is data: the names of layers and arguments, and
    keyword arguments of `__init__`.
    """

    operator: ClassVar[str]
    outputs: ClassVar[int] = 1

    def __init__(self, of: nn.Module, names: Any, signature: Signature) -> None:
        super().__init__()
        known = vars(self)
        vars(self).update({k: v for k, v in vars(of).items() if k not in known and isinstance(v, PLAIN)})
        self.training = of.training
        self._names, self._signature = names, signature
        vars(self)["_former"] = _without_parameters(of)  # past nn.Module, which would register it
        tied: dict[nn.Module, Parameters] = {}
        for name, child in of._modules.items():
            if child is not None and name in names.layers and next(child.parameters(), None) is not None:
                child = Parameters.of(child, tied)
            self.add_module(name, child)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Takes what the released forward takes. A call that gives an unknown argument runs that one."""
        values = self._signature.values(args, kwargs)
        if isinstance(values, dict):
            return self.compute(**values)
        former = restored(self.__dict__["_former"], self)
        if values:
            warnings.warn(f"{type(former).__name__} runs as released: {values}", stacklevel=2)
        return former(*args, **kwargs)

    def compute(self, *args: Any, **values: Any) -> Any:
        """The result, of arguments by their meaning."""
        raise NotImplementedError

    def parameter(self, layer: str, name: str) -> Tensor | None:
        module: Any = self
        for part in layer.split("."):
            module = module._modules[part]
            if has_hooks(module) or "forward" in module.__dict__:
                raise RuntimeError(
                    f"{type(self).__name__}: expected {layer}, whose parameters an operator reads and which is never "
                    f"called, without hooks and a forward of its own, got {_added(module)}. Add them before "
                    "torchops.replace, which then leaves the module as it is, or to the module as a whole"
                )
        # Parametrized and flattened parameters are attributes of another kind.
        parameters = module._parameters
        value: Tensor | None = parameters[name] if name in parameters else getattr(module, name, None)
        return value

    def calls(self, generator: torch.Generator) -> Iterable[Call]:
        """The calls that compare it with the original."""
        raise NotImplementedError

    @classmethod
    def sizes(cls, names: Any, parameters: Mapping[str, nn.Parameter | None]) -> Mapping[str, Shape]:
        """The shapes that weights must have. Biases have the length of their weight."""
        raise NotImplementedError

    @classmethod
    def refuse(cls, names: Any, module: nn.Module) -> str | None:
        """Any other reason not to replace the module."""
        return None


def _without_parameters(module: nn.Module) -> nn.Module:
    """A module like it that holds no tensors: what `restored` needs besides the parameters."""
    former = like(module, type(module))
    former._parameters = dict.fromkeys(module._parameters)
    former._modules = {k: child and _without_parameters(child) for k, child in module._modules.items()}
    return former


def restored(former: nn.Module, now: nn.Module) -> nn.Module:
    """The released module, with the parameters, the children and the plain attributes that its replacement has now.
    Made for a call, so that threads share nothing."""
    module = like(former, type(former))
    if isinstance(now, Parameters):  # what a user added to it
        vars(module).update({k: v for k, v in vars(now).items() if "hook" in k or k == "forward"})
    plain = {k: v for k, v in vars(now).items() if k in vars(former) and isinstance(v, PLAIN)}
    vars(module).update(plain)
    for name in former._parameters:
        # It may be parametrized by now, or be computed by a hook before each call.
        held = module._parameters if name in now._parameters else vars(module)
        held[name] = getattr(now, name)
    for name in module._parameters.keys() - now._parameters.keys():
        del module._parameters[name]
    if isinstance(now, Parameters):  # what such a hook reads
        module._parameters.update({k: v for k, v in now._parameters.items() if k not in module._parameters})
        module._buffers.update(now._buffers)
    for name, child in former._modules.items():
        current = now._modules[name]
        module._modules[name] = restored(child, current) if isinstance(current, Parameters) and child else current
    return module


def random(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, device="cpu")


def needs_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


_PLAIN_TENSORS = (Tensor, nn.Parameter, FakeTensor)


def are_plain(*tensors: Tensor | None) -> bool:
    """Whether none is of a subclass that knows ATen's operators alone, such as quantized weights."""
    return all(t is None or type(t) in _PLAIN_TENSORS for t in tensors)


def without_autocast(device: str) -> AbstractContextManager[Any]:
    """Off on this type of device. There is none on "meta", which torch.autocast refuses."""
    return nullcontext() if device == "meta" else torch.autocast(device, enabled=False)


def once(x: Tensor) -> Tensor:
    """The first row of an `x` of equal rows that gets no gradient, `x` otherwise. Rows that share memory are equal,
    whatever is in them."""
    return x[:1] if x.shape[0] > 1 and x.stride(0) == 0 and not needs_grad(x) else x

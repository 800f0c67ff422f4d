"""Layers whose parameters an operator reads, and the modules that hold them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

__all__ = [
    "FusedModule",
    "Initial",
    "Linear",
    "LinearParameters",
    "as_parameters",
    "does_more",
    "has_hooks",
    "is_read",
    "normalized",
]


class LinearParameters(nn.Module):
    """The parameters of an ``nn.Linear``, under its names and with its initial values, of a module that computes more.

    It is no ``nn.Linear``. Tools that look for these (low-rank adapters, float8 training, quantizers) put in their
    place a layer that computes ``linear`` alone.
    """

    __constants__ = ("in_features", "out_features")
    if TYPE_CHECKING:  # TorchScript does not know types that are strings
        weight: nn.Parameter
        bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty((out_features, in_features), device=device, dtype=dtype))
        self.register_parameter(
            "bias", nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises both parameters as ``nn.Linear`` does."""
        nn.Linear.reset_parameters(self)  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        return nn.Linear.extra_repr(self)  # type: ignore[arg-type]


# --- initial values ---------------------------------------------------------------------------------------------------

Initial = Literal["lecun", "glorot", "normal", "gating", "final"]

# The standard deviation of a normal distribution of width 1 that is cut off at -2 and 2.
_TRUNCATED_STD = 0.87962566103423978


def _lecun(weight: Tensor) -> None:
    std = max(weight.shape[1], 1) ** -0.5 / _TRUNCATED_STD
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


def _normal(weight: Tensor) -> None:
    nn.init.normal_(weight, std=max(weight.shape[1], 1) ** -0.5)


_WEIGHTS: dict[Initial, Callable[[Tensor], object]] = {
    "lecun": _lecun,
    "glorot": nn.init.xavier_uniform_,
    "normal": _normal,
    "gating": nn.init.zeros_,
    "final": nn.init.zeros_,
}


class Linear(nn.Linear):
    """An ``nn.Linear`` with initial values of AlphaFold, which its own ``reset_parameters`` restores.

    ``fully_shard`` and others that build a model on the meta device call ``reset_parameters`` of each module that owns
    parameters, and of no other.

    Args:
        initial: of the weight: ``"lecun"`` is normal with variance ``1 / in_features``, cut off at two standard
            deviations; ``"normal"`` is not cut off; ``"glorot"`` is uniform as in Glorot and Bengio; ``"gating"`` and
            ``"final"`` are 0. The bias is 1 for ``"gating"``, otherwise 0.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        initial: Initial,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.initial = initial  # nn.Linear.__init__ calls reset_parameters
        super().__init__(in_features, out_features, bias, device, dtype)

    def reset_parameters(self) -> None:
        _WEIGHTS[self.initial](self.weight)
        if self.bias is not None:
            nn.init.constant_(self.bias, 1.0 if self.initial == "gating" else 0.0)


# --- modules ----------------------------------------------------------------------------------------------------------

_READ = (nn.Linear, nn.LayerNorm)
_PLAIN = tuple(kind.forward for kind in _READ)


def is_read(parameter: Tensor | None, distributed: bool = True) -> bool:
    """Whether operators read a tensor of this class: one of PyTorch itself, a DTensor if they know its rules, or what
    stands for one in a trace. Another subclass may change what ``F.linear`` computes, and know nothing else."""
    if torch.jit.is_scripting():  # type: ignore[attr-defined]
        return True
    else:
        kind = type(parameter)
        plain = kind in (nn.Parameter, Tensor, type(None)) or kind.__module__.startswith(_IN_TRACES)
        return plain or (distributed and kind.__module__.startswith("torch.distributed."))


_IN_TRACES = ("torch._subclasses.", "torch.fx.")


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of `module` runs hooks around its forward."""
    hooks = module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks
    return bool(hooks)


def does_more(layer: nn.Module, distributed: bool = True) -> bool:
    """Whether a call of `layer` does more than its class does with its parameters, as they are now. Hooks may set
    parameters (pruning, weight and spectral norm, ``fully_shard``, offloading) or change what goes in and out."""
    if has_hooks(layer) or "forward" in layer.__dict__:
        return True
    for parameter in layer._parameters.values():  # noqa: SIM110  (in each call of a forward, so a plain loop)
        if not is_read(parameter, distributed):
            return True
    return False


class FusedModule(nn.Module):
    """A module whose operator reads the parameters of its layers instead of calling them.

    If a layer :func:`does_more`, `forward` calls the layers: it asks :meth:`calls_layers`. What is put in the place of
    a layer must compute the same. A wrapper that only shows the layer's parameters, as adapters of low rank do, would
    be left out silently.

    Raises:
        TypeError: a layer is replaced by one that isn't a plain ``nn.Linear`` or ``nn.LayerNorm``.
    """

    _within: ClassVar[tuple[str, ...]] = ()  # the module that the user knows, and the path from it to this one
    _parts: ClassVar[dict[str, type[nn.Module]]] = {}  # modules whose parameters it reads, and that may be None
    _without_bias: ClassVar[tuple[str, ...]] = ()  # layers for whose bias the operator has no parameter

    def reset_parameters(self) -> None:
        """Initialises all parameters as the layers inside do."""
        for layer in self.children():
            reset = getattr(layer, "reset_parameters", None)  # a subclass may have layers without parameters
            if reset is not None:
                reset()

    def calls_layers(self) -> bool:
        """Whether a layer, of this module or of another one inside, does more than an operator would: also with a bias
        that the operator has no parameter for, or as a norm with another `eps` than the module's."""
        eps = self.__dict__.get("eps")
        for name, layer in self._modules.items():
            if isinstance(layer, FusedModule):
                if has_hooks(layer) or "forward" in layer.__dict__ or layer.calls_layers():
                    return True
            elif isinstance(layer, _READ):
                if does_more(layer) or (name in self._without_bias and layer.bias is not None):
                    return True
                if isinstance(layer, nn.LayerNorm) and eps is not None and layer.eps != eps:
                    return True
        return False

    def by_layers(self, x: Tensor, *mask: Tensor | None) -> Tensor:
        """What `forward` returns, by calls of the layers."""
        raise NotImplementedError

    def add_by_layers(self, x: Tensor, *mask: Tensor | None, inplace: bool, residual: bool) -> Tensor:
        """The same, with `inplace` and `residual` as the forwards of the pair layers have them."""
        if inplace:
            # Inductor can drop a plain clone of what is overwritten.
            return x.add_(self.by_layers(torch.ops.myops._saved_copy(x) if torch.is_grad_enabled() else x, *mask))
        update = self.by_layers(x, *mask)
        return (x + update).to(x.dtype).contiguous() if residual else update

    def __setattr__(self, name: str, value: Any) -> None:
        self._check(name, value)
        super().__setattr__(name, value)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        self._check(name, module)
        super().add_module(name, module)

    def _check(self, name: str, value: Any) -> None:
        former = vars(self).get("_modules", {}).get(name)
        kind_of_part = self._parts.get(name)
        if kind_of_part is not None and isinstance(value, nn.Module) and not isinstance(value, kind_of_part):
            raise TypeError(
                f"{_qualified(type(self))}: expected {name} of type {_qualified(kind_of_part)}, because an operator "
                f"reads its parameters and never calls it, got {_qualified(type(value))}"
            )
        if isinstance(former, _READ) and isinstance(value, nn.Module) and type(value).forward not in _PLAIN:
            kind, *path = self._within or (_qualified(type(self)),)
            plain = next(k.__name__ for k in _READ if isinstance(former, k))
            raise TypeError(
                f"{kind}: expected {'.'.join([*path, name])} to be a plain torch.nn.{plain}, because an operator reads "
                f"its parameters and never calls it, got {_qualified(type(value))}; leave this layer out of what is to "
                "be replaced"
            )


def _qualified(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def normalized(x: Tensor, norm: nn.Module, reader: nn.Module) -> Tensor:
    """`x` by the layer `norm`, in the dtype in which the layer `reader` takes it. The parameters of a norm may be
    float32 beside 16-bit weights, and are not rounded then."""
    weight: Any = norm.weight
    return as_parameters(norm(x.to(weight.dtype)), reader)


def as_parameters(x: Tensor, layer: nn.Module) -> Tensor:
    """A float32 `x` in the dtype of 16-bit parameters, which operators accept it with."""
    weight: Any = layer.weight
    return x.to(weight.dtype) if x.dtype == torch.float32 and weight.dtype.itemsize == 2 else x

"""What modules have in common whose operators read the parameters of the layers inside."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["LayersRead"]

_READ = (nn.Linear, nn.LayerNorm)
_PLAIN = tuple(kind.forward for kind in _READ)


class LayersRead(nn.Module):
    """A module whose operator reads the parameters of its layers, which are never called.

    So what is put in the place of a layer must compute the same. A wrapper that only shows the layer's parameters, as
    adapters of low rank do, would be left out silently.

    Raises:
        TypeError: a layer is replaced by one that isn't a plain ``nn.Linear`` or ``nn.LayerNorm``.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        self._check(name, value)
        super().__setattr__(name, value)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        self._check(name, module)
        super().add_module(name, module)

    def _check(self, name: str, value: Any) -> None:
        former = vars(self).get("_modules", {}).get(name)
        if isinstance(former, _READ) and isinstance(value, nn.Module) and type(value).forward not in _PLAIN:
            raise TypeError(
                f"{type(self).__name__}: expected {name} to be a plain torch.nn.Linear or LayerNorm, because an "
                f"operator reads its parameters and never calls it, got {type(value).__name__}"
            )

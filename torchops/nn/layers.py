"""What modules have in common whose operators read the parameters of the layers inside."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["LayersRead"]

_PLAIN = (nn.Linear.forward, nn.LayerNorm.forward)


class LayersRead(nn.Module):
    """A module whose operator reads the parameters of its layers, which are never called.

    So what is put in the place of a layer must compute the same. A wrapper that only shows the layer's parameters, as
    adapters of low rank do, would be left out silently.

    Raises:
        TypeError: a layer is replaced by one that isn't a plain ``nn.Linear`` or ``nn.LayerNorm``.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Module) and not isinstance(value, LayersRead) and type(value).forward not in _PLAIN:
            raise TypeError(
                f"{type(self).__name__}: expected {name} to be a plain torch.nn.Linear or LayerNorm, because an "
                f"operator reads its parameters and never calls it, got {type(value).__name__}"
            )
        super().__setattr__(name, value)

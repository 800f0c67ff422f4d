"""A layer of a public package whose parts are replacements, and its replacement: in inference, the parts add to a pair
tensor that the layer owns, so their results never exist as tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from torchops.convert.adapter import Adapter
from torchops.convert.module import Replacement
from torchops.nn.layers import has_hooks


class Parts(NamedTuple):
    """The children of a layer: those that must be replacements, and those called as in the original."""

    replaced: Mapping[str, type[Replacement]]
    others: frozenset[str] = frozenset()

    @property
    def layers(self) -> dict[str, str]:
        """None of which only the parameters are read."""
        return {}


class Layer(Replacement):
    """A layer with the children of the original."""

    _names: Parts


def added(part: Any, z: Tensor, *mask: Tensor, inplace: bool = False) -> Tensor:
    """`z` plus the update of a part. Its operator adds it, unless a call of the part would run more than its forward:
    a hook, such as one of ``fully_shard``, or a wrapper that was added."""
    if not isinstance(part, Replacement) or has_hooks(part) or part._compiled_call_impl is not None:
        return z + part(z, *mask)
    operated: Any = part
    return operated.update_(z, *mask) if inplace else operated.updated(z, *mask)


class LayerAdapter(Adapter):
    """How the layers of one file of a package are replaced."""

    def _structure_reason(self, module: nn.Module) -> str | None:
        children = {name for name, child in module._modules.items() if child is not None}
        for name, kind in self.names.replaced.items():
            if not isinstance(module._modules.get(name), kind):
                return f"its {name} is not replaced"
        if missing := self.names.others - children:
            return f"it has no {min(missing)}"
        if more := children - self.names.replaced.keys() - self.names.others:
            return f"it has a layer {min(more)}"
        own = [*module._parameters, *module._buffers]
        return f"it has a tensor {own[0]} of its own" if own else None

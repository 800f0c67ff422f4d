"""A layer of a public package whose parts are replacements, and its replacement: in inference, the parts add to a pair
tensor that the layer owns, so their results never exist as tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from torchops.adapters.module import Adapter, Replacement
from torchops.nn.layers import has_hooks


class Layer(Replacement):
    """A layer with the children of the original."""

    layers: ClassVar[Mapping[str, str]] = {}
    parts: ClassVar[Mapping[str, type[Replacement]]]
    others: ClassVar[frozenset[str]] = frozenset()  # children called as in the original


def added(part: Any, z: Tensor, *mask: Tensor, inplace: bool = False) -> Tensor:
    """`z` plus the update of a part. Its operator adds it, unless a call of the part would run more than its forward:
    a hook, such as one of ``fully_shard``, or a wrapper that was added."""
    if not isinstance(part, Replacement) or has_hooks(part) or part._compiled_call_impl is not None:
        return z + part(z, *mask)
    operated: Any = part
    return operated.update_(z, *mask) if inplace else operated.updated(z, *mask)


class LayerAdapter(Adapter):
    """How the layers of one file of a package are replaced."""

    def _structure_reason(self, module: nn.Module, new: type[Replacement]) -> str | None:
        assert issubclass(new, Layer)
        children = {name for name, child in module._modules.items() if child is not None}
        for name, kind in new.parts.items():
            if not isinstance(module._modules.get(name), kind):
                return f"its {name} is not replaced"
        if missing := new.others - children:
            return f"it has no {min(missing)}"
        if more := children - new.parts.keys() - new.others:
            return f"it has a layer {min(more)}"
        own = [*module._parameters, *module._buffers]
        return f"it has a tensor {own[0]} of its own" if own else None

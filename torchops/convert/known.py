"""Copies modules of public packages to those of :mod:`torchops.nn`."""

from __future__ import annotations

import torch
from torch import nn

from torchops.convert.public_modules import Search, find_replacement
from torchops.convert.triangle import TriangleUpdate
from torchops.nn import TriangleMultiplicativeUpdate

__all__ = ["triangle_update"]


def triangle_update(module: nn.Module) -> TriangleMultiplicativeUpdate:
    """Returns a layer with the values of a module of Boltz, BoltzGen, OpenFold, OpenFold-3, Protenix or ESMFold.

    The module stays as it is. The values are copies, packed if the module has separate layers for ``a`` and ``b``. A
    bias that only some of its layers have is 0 for the others. To keep parameters and their names, use
    :func:`torchops.replace`.

    Args:
        module: one of the classes in ``docs/whole_models.md``.

    Raises:
        TypeError: it is not such a module, or does not compute what this layer computes. The error says why.
    """
    update = module if isinstance(module, TriangleUpdate) else find_replacement(module, Search())
    if not isinstance(update, TriangleUpdate):
        kind = type(module)
        got = update if isinstance(update, str) else f"{kind.__module__}.{kind.__qualname__}"
        raise TypeError(f"triangle_update: expected a triangle update of a known package, got {got}")
    values = update.packed()
    p_out = values["p_out.weight"]
    assert p_out is not None
    c, d = p_out.shape
    bias = any(values[f"{name}.bias"] is not None for name in ("p_in", "g_in", "p_out", "g_out"))
    layer = TriangleMultiplicativeUpdate(
        c, d, update.direction, bias=bias, eps=update.eps, device="meta", dtype=p_out.dtype
    )
    layer.to_empty(device=p_out.device).train(module.training)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            value = values[name]
            parameter.copy_(torch.full_like(parameter, name.endswith("weight")) if value is None else value)
    return layer

"""OpenFold, ``openfold.model.triangular_multiplicative_update``, and OpenFold-3,
``openfold3.core.model.layers.triangular_multiplicative_update``.

Their ``inplace_safe=True`` overwrites ``z`` with the update, or with ``_add_with_inplace=True`` adds the update to it,
and returns it. ``_inplace_chunk_size`` says in how many pieces that is done and changes no value; here there are none.
Flags that choose other kernels choose nothing here, except that ``use_cueq_triangle_kernels`` switches
``inplace_safe`` off, as it does there.

A bfloat16 ``z`` has them compute in bfloat16 whatever the dtype of the parameters, autocast or not; in float16,
OpenFold divides ``a`` and ``b`` by their standard deviation, which the layer norm cancels up to its ``eps``. The
operator accumulates in float32 and has no need to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchops.adapters.triangle import FUSED, SEPARATE, Direction, Names, TriangleAdapter, TriangleUpdate


class InPlaceTriangleUpdate(TriangleUpdate):
    """In the place of those of OpenFold and ESMFold."""

    names = SEPARATE
    # Whether an update in place without the addition overwrites z; those with fused weights return a new tensor.
    overwrites = True

    def forward(
        self,
        z: Tensor,
        mask: Tensor | None = None,
        inplace_safe: bool = False,
        _add_with_inplace: bool = False,
        _inplace_chunk_size: int | None = 256,
    ) -> Tensor:
        return self._forward(z, mask, inplace_safe, _add_with_inplace)

    @classmethod
    def probes(cls) -> Iterable[Mapping[str, Any]]:
        return ({}, {"inplace_safe": True}, {"inplace_safe": True, "_add_with_inplace": True})

    def _forward(self, z: Tensor, mask: Tensor | None, inplace: bool, add: bool) -> Tensor:
        if z.dtype != torch.bfloat16:
            return self._compute(z, mask, inplace, add, self.weights())
        with torch.autocast(z.device.type, enabled=False):
            weights = [None if t is None else t.to(z.dtype) for t in self.weights()]
            return self._compute(z, mask, inplace, add, weights)

    def _compute(
        self, z: Tensor, mask: Tensor | None, inplace: bool, add: bool, weights: list[Tensor | None]
    ) -> Tensor:
        if inplace and add:
            return self.update_(z, mask, weights)
        update = self.update(z, mask, weights)
        return z.copy_(update) if inplace and self.overwrites else update


class KernelsTriangleUpdate(InPlaceTriangleUpdate):
    """In the place of those of OpenFold-3, from 0.5.0 on."""

    def forward(  # type: ignore[override]
        self,
        z: Tensor,
        mask: Tensor | None = None,
        inplace_safe: bool = False,
        use_cueq_triangle_kernels: bool = False,
        use_triton_triangle_kernels: bool = False,
        _add_with_inplace: bool = False,
        _inplace_chunk_size: int | None = 256,
    ) -> Tensor:
        return self._forward(z, mask, inplace_safe and not use_cueq_triangle_kernels, _add_with_inplace)


class CueqTriangleUpdate(InPlaceTriangleUpdate):
    """In the place of those of OpenFold-3 0.3 and 0.4."""

    def forward(  # type: ignore[override]
        self,
        z: Tensor,
        mask: Tensor | None = None,
        inplace_safe: bool = False,
        use_cueq_triangle_kernels: bool = False,
        _add_with_inplace: bool = False,
        _inplace_chunk_size: int | None = 256,
    ) -> Tensor:
        return self._forward(z, mask, inplace_safe and not use_cueq_triangle_kernels, _add_with_inplace)


class FusedInPlaceTriangleUpdate(InPlaceTriangleUpdate):
    """In the place of a ``FusedTriangleMultiplicativeUpdate``."""

    names = FUSED
    overwrites = False


class FusedKernelsTriangleUpdate(KernelsTriangleUpdate):
    names = FUSED
    overwrites = False


class FusedCueqTriangleUpdate(CueqTriangleUpdate):
    names = FUSED
    overwrites = False


def direction(module: nn.Module) -> Direction:
    return "outgoing" if module._outgoing else "incoming"


def _fixed_precision(names: Names, module: nn.Module) -> str | None:
    """Their linear layers can be told to compute in one dtype whatever their input has."""
    fixed = [name for name in names.linears if getattr(module._modules[name], "precision", None) is not None]
    return f"{fixed[0]} has a precision of its own" if fixed else None


def _adapters(file: str) -> tuple[TriangleAdapter, ...]:
    separate = (KernelsTriangleUpdate, CueqTriangleUpdate, InPlaceTriangleUpdate)
    fused = (FusedKernelsTriangleUpdate, FusedCueqTriangleUpdate, FusedInPlaceTriangleUpdate)
    return tuple(
        TriangleAdapter(
            file,
            (f"{prefix}TriangleMultiplicationOutgoing", f"{prefix}TriangleMultiplicationIncoming", base),
            replacements,
            direction,
            norm="LayerNorm",
            linear="Linear",
            refuse=lambda module, names=replacements[0].names: _fixed_precision(names, module),  # type: ignore[misc]
        )
        for prefix, base, replacements in (
            ("", "TriangleMultiplicativeUpdate", separate),
            ("Fused", "FusedTriangleMultiplicativeUpdate", fused),
        )
    )


TRIANGLE_UPDATES = (
    *_adapters("openfold.model.triangular_multiplicative_update"),
    *_adapters("openfold3.core.model.layers.triangular_multiplicative_update"),
)

"""OpenFold, ``openfold.model.triangular_multiplicative_update``, and OpenFold-3,
``openfold3.core.model.layers.triangular_multiplicative_update``.

Their ``inplace_safe=True`` overwrites ``z`` with the update, or with ``_add_with_inplace=True`` adds the update to it,
and returns it. ``_inplace_chunk_size`` is the number of pieces in which that is done and changes no value; here there
are no pieces. Flags that choose other kernels are ignored here, except that ``use_cueq_triangle_kernels`` turns
``inplace_safe`` off, as it does there.

For a bfloat16 ``z``, they compute in bfloat16, whatever the dtype of the parameters, with or without autocast. In
float16, OpenFold divides ``a`` and ``b`` by their standard deviation, which the layer norm cancels up to its ``eps``.
The operator scales ``a`` by about ``1 / sqrt(N)`` instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchops.adapters import attention, transition
from torchops.adapters.attention import TriangleAttention
from torchops.adapters.module import Adapter, Call
from torchops.adapters.triangle import FUSED, SEPARATE, Direction, TriangleUpdate


class InPlaceTriangleUpdate(TriangleUpdate):
    """Replaces those of OpenFold and ESMFold."""

    names = SEPARATE
    # Whether an in-place update without the addition overwrites z. Modules with fused weights return a new tensor.
    overwrites = True
    takes_none = True

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
    """Replaces those of OpenFold-3, from 0.5.0 on."""

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
    """Replaces those of OpenFold-3 0.3 and 0.4."""

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
    """Replaces a ``FusedTriangleMultiplicativeUpdate``."""

    names = FUSED
    overwrites = False


class FusedKernelsTriangleUpdate(KernelsTriangleUpdate):
    names = FUSED
    overwrites = False


class FusedCueqTriangleUpdate(CueqTriangleUpdate):
    names = FUSED
    overwrites = False


class OpenFoldTriangleAttention(TriangleAttention):
    """Replaces OpenFold's ``TriangleAttention``. `inplace_safe` doesn't overwrite any argument."""

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        chunk_size: int | None = None,
        use_memory_efficient_kernel: bool = False,
        use_deepspeed_evo_attention: bool = False,
        use_lma: bool = False,
        inplace_safe: bool = False,
    ) -> Tensor:
        return self.update(x, mask)


class TransposingTriangleAttention(TriangleAttention):
    """Replaces those of OpenFold-3, from 0.5.0 on, whose layers transpose the pair tensor for the ending node, and
    transpose the bias back."""

    names = attention.Names(bias="linear_z")

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        transpose_bias: bool = False,
        chunk_size: int | None = None,
        use_deepspeed_evo_attention: bool = False,
        use_cueq_triangle_kernels: bool = False,
        use_triton_triangle_kernels: bool = False,
        use_lma: bool = False,
        inplace_safe: bool = False,
    ) -> Tensor:
        return self.update(x, mask, transpose_bias)

    @classmethod
    def probes(cls) -> Iterable[Mapping[str, Any]]:
        return (*super().probes(), {"transpose_bias": True})


class CueqTriangleAttention(TriangleAttention):
    """Replaces those of OpenFold-3 0.3.0 and 0.4.0."""

    names = attention.Names(bias="linear_z")

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        chunk_size: int | None = None,
        use_deepspeed_evo_attention: bool = False,
        use_cueq_triangle_kernels: bool = False,
        use_lma: bool = False,
        inplace_safe: bool = False,
    ) -> Tensor:
        return self.update(x, mask)


class KernelsTriangleAttention(TriangleAttention):
    """Replaces those of OpenFold-3 0.4.1."""

    names = attention.Names(bias="linear_z")

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        chunk_size: int | None = None,
        use_deepspeed_evo_attention: bool = False,
        use_cueq_triangle_kernels: bool = False,
        use_triton_triangle_kernels: bool = False,
        use_lma: bool = False,
        inplace_safe: bool = False,
    ) -> Tensor:
        return self.update(x, mask)


class SwiGLUTransition(transition.Transition):
    """Replaces OpenFold-3's ``SwiGLUTransition``. Ignores chunks and their checkpoints, which save memory that is not
    needed here."""

    names = transition.Names(
        "layer_norm",
        "swiglu.linear_a",
        "swiglu.linear_b",
        "linear_out",
        {"swiglu": "swiglu", "swiglu.swish": "silu"},
    )

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        chunk_size: int | None = None,
        ckpt_chunk_size: int | None = None,
    ) -> Tensor:
        update = self._update(x)
        # Without a mask, they multiply by ones in the dtype of x.
        dtype = torch.promote_types(update.dtype, x.dtype if mask is None else mask.dtype)
        if mask is not None:
            mask = mask.unsqueeze(-1)
            reuse = update.dtype == dtype and not update.requires_grad
            update = update.mul_(mask) if reuse else update * mask
        return update.to(dtype if ckpt_chunk_size is None else x.dtype)

    def _update(self, x: Tensor) -> Tensor:
        if x.dtype != torch.bfloat16:
            return self.update(x)
        with torch.autocast(x.device.type, enabled=False):
            return self.update(x, {name: None if t is None else t.to(x.dtype) for name, t in self.weights().items()})

    def calls(self, generator: torch.Generator) -> Iterable[Call]:
        x = self.example(generator)
        mask = torch.rand(x.shape[:-1], generator=generator, device="cpu")
        yield Call("", (x, mask), {}, (0,))
        for arguments in ({}, {"mask": mask, "chunk_size": 3}, {"mask": mask, "ckpt_chunk_size": 2}):
            yield Call(", ".join(arguments), (x,), arguments)


def direction(module: nn.Module) -> tuple[Direction]:
    return ("outgoing" if module._outgoing else "incoming",)


_ROLES = {"norm": "LayerNorm", "linear": "Linear", "attention": "Attention", "swiglu": "SwiGLU"}


def _updates(file: str) -> Iterator[Adapter]:
    for prefix, base, replacements in (
        ("", "TriangleMultiplicativeUpdate", (KernelsTriangleUpdate, CueqTriangleUpdate, InPlaceTriangleUpdate)),
        (
            "Fused",
            "FusedTriangleMultiplicativeUpdate",
            (FusedKernelsTriangleUpdate, FusedCueqTriangleUpdate, FusedInPlaceTriangleUpdate),
        ),
    ):
        classes = (f"{prefix}TriangleMultiplicationOutgoing", f"{prefix}TriangleMultiplicationIncoming", base)
        yield Adapter(file, classes, replacements, _ROLES, direction)


_ATTENTIONS = ("TriangleAttention", "TriangleAttentionEndingNode")
_LAYERS3 = "openfold3.core.model.layers"

MODULES = (
    *_updates("openfold.model.triangular_multiplicative_update"),
    *_updates(f"{_LAYERS3}.triangular_multiplicative_update"),
    Adapter("openfold.model.triangular_attention", _ATTENTIONS, (OpenFoldTriangleAttention,), _ROLES),
    Adapter(
        f"{_LAYERS3}.triangular_attention",
        _ATTENTIONS,
        (TransposingTriangleAttention, KernelsTriangleAttention, CueqTriangleAttention),
        _ROLES,
    ),
    Adapter(f"{_LAYERS3}.transition", ("SwiGLUTransition",), (SwiGLUTransition,), _ROLES),
)
LAYERS: tuple[Adapter, ...] = ()
UNFIT = (
    ("openfold.model.pair_transition", "PairTransition", transition.HAS_RELU),
    (f"{_LAYERS3}.transition", "ReLUTransition", transition.HAS_RELU),
)

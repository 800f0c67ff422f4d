"""Which backend computes triangle attention: the first in `PRIORITY` that has no reason against it."""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from torchops._core.devices import has_bfloat16
from torchops._core.triton.refusal import why_refused
from torchops._triangle_attention.attention.arguments import Inputs, OutputMask, Saved

__all__ = ["MAX_HEAD_DIM", "PRIORITY", "Backend", "backend_for", "why_not_triton"]


class Backend(Protocol):
    """A module of this folder. All sizes are at least 1."""

    def why_not(self, inputs: Inputs) -> str | None:
        """Why it cannot compute this, or None if it can."""

    def forward(self, inputs: Inputs) -> Saved:
        """The result, with strides like those of q, and the logarithms of the sums."""

    def backward(
        self, grad: Tensor, inputs: Inputs, saved: Saved, output_mask: OutputMask
    ) -> tuple[Tensor | None, ...]:
        """The requested gradients of q, k and v, with strides like theirs, and of the bias."""


PRIORITY = ("triton", "aten")
MAX_HEAD_DIM = 128
_MOST_BLOCKS = 65535  # of a grid in its second and third dimension


def backend_for(inputs: Inputs) -> Backend:
    batch, rows, heads, _ = inputs.sizes
    # The module of the Triton backend cannot be imported where it is of no use.
    names = PRIORITY[1:] if why_not_triton(inputs.q, batch, rows, heads, inputs.q.shape[-1]) else PRIORITY
    return next(backend for backend in map(_load, names) if backend.why_not(inputs) is None)


@cache
def _load(name: str) -> Backend:
    return cast(Backend, importlib.import_module(f"torchops._triangle_attention.attention.{name}"))


def why_not_triton(like: Tensor, batch: int, rows: int, heads: int, d: int) -> str | None:
    """Why the Triton kernels cannot compute an attention of these sizes, on the device and in the dtype of `like`."""
    if not like.is_cuda:
        return f"expected a CUDA device, got {like.device}"
    if like.dtype == torch.float64:
        return "expected float32, float16 or bfloat16, got float64"
    if not has_bfloat16(like.device):
        return "expected compute capability 8.0 or newer"
    if max(batch * heads, rows) > _MOST_BLOCKS:
        return f"expected at most {_MOST_BLOCKS} rows, and heads of the batch, got {rows} and {batch * heads}"
    if d > MAX_HEAD_DIM:
        return f"expected heads of at most {MAX_HEAD_DIM} features, got {d}"
    return why_refused() if _has_triton() else "Triton is not installed"


@cache
def _has_triton() -> Any:
    return importlib.util.find_spec("triton") is not None

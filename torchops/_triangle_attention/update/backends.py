"""Which backend computes the update by triangle attention: the first in `PRIORITY` that has no reason against it."""

from __future__ import annotations

import importlib
import math
from functools import cache
from typing import Any, Protocol

from torch import Tensor

from torchops._triangle_attention.attention import backends as attention
from torchops._triangle_attention.update.arguments import Inputs, Kept
from torchops._triangle_attention.update.panels import Steps

__all__ = ["PRIORITY", "Backend", "backend_for", "load", "steps_for", "why_not_triton"]


class Backend(Protocol):
    """A module of this folder. All sizes are at least 1, and the device of x is the current one."""

    def why_not(self, inputs: Inputs) -> str | None:
        """Why it cannot compute this, or None if it can. Those with kernels in Triton are asked where these run."""

    def forward(self, inputs: Inputs, target: Tensor, kept: Kept | None, low_memory: bool = True) -> None:
        """Writes the update of x to `target`, or x plus the update, and then `target` may be x. `low_memory`: memory
        matters more than time."""

    def backward(
        self, grad: Tensor, inputs: Inputs, kept: Kept, output_mask: dict[str, bool], low_memory: bool = False
    ) -> dict[str, Tensor]:
        """The requested gradients of x (contiguous; plus `grad` if the forward pass added x) and of the parameters."""


PRIORITY = ("triton_fused", "triton_steps", "aten")


def backend_for(inputs: Inputs) -> Backend:
    if why_not_triton(inputs.x, inputs.w.q, inputs.w.heads):
        return load("aten")
    return next(backend for backend in map(load, PRIORITY) if backend.why_not(inputs) is None)


def steps_for(x: Tensor, q: Tensor, heads: int) -> Steps:
    """The steps of a panel of x. `q` is the weight."""
    return load("aten" if why_not_triton(x, q, heads) else "triton_steps")


def why_not_triton(x: Tensor, q: Tensor, heads: int) -> str | None:
    *batch, rows, _, _ = x.shape
    reason = attention.why_not_triton(q, math.prod(batch), rows, heads, q.shape[0] // heads)
    if reason is None and not (x.is_cuda and x.stride(-1) == 1):
        return "expected x on a CUDA device, with adjacent features"
    return reason


@cache
def load(name: str) -> Any:
    """A module that needs Triton, which may not be installed."""
    return importlib.import_module(f"torchops._triangle_attention.update.{name}")

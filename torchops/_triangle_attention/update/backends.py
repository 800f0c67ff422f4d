"""Which backend computes the update by triangle attention: `triton_fused.py` if it has no reason against it, or else
panels in the steps of `triton_steps.py`, or of `aten.py`."""

from __future__ import annotations

import importlib
import math
from functools import cache
from typing import Any, Protocol

from torch import Tensor

from torchops._triangle_attention.attention import backends as attention
from torchops._triangle_attention.update import panels, panels_backward
from torchops._triangle_attention.update.arguments import Inputs, Kept
from torchops._triangle_attention.update.panels import Steps

__all__ = ["Backend", "InPanels", "backend_for", "load", "steps_for", "why_not_triton"]


class Backend(Protocol):
    """All sizes are at least 1, and the device of x is the current one."""

    def forward(self, inputs: Inputs, target: Tensor, kept: Kept | None, low_memory: bool = True) -> None:
        """Writes the update of x to `target`, or x plus the update, and then `target` may be x. `low_memory`: memory
        matters more than time."""

    def backward(
        self, grad: Tensor, inputs: Inputs, kept: Kept, output_mask: dict[str, bool], low_memory: bool = False
    ) -> dict[str, Tensor]:
        """The requested gradients of x (contiguous; plus `grad` if the forward pass added x) and of the parameters."""


class InPanels:
    """Computes all that it is given."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps

    def forward(self, inputs: Inputs, target: Tensor, kept: Kept | None, low_memory: bool = True) -> None:
        panels.forward(inputs, target, kept, self.steps)

    def backward(
        self, grad: Tensor, inputs: Inputs, kept: Kept, output_mask: dict[str, bool], low_memory: bool = False
    ) -> dict[str, Tensor]:
        return panels_backward.backward(grad, inputs, kept, output_mask, self.steps)


def backend_for(inputs: Inputs) -> Backend:
    if why_not_triton(inputs.x, inputs.w.q, inputs.w.heads):
        return InPanels(load("aten"))
    fused = load("triton_fused")
    return InPanels(load("triton_steps")) if fused.why_not(inputs) else fused


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

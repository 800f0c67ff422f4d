"""How far rounding may move the gradients of an operator with a layer norm, `y = (x - mean) * rstd`.

Neither the size of a gradient nor ATen's own error bounds this: both can be 0 in a row of equal values, where `rstd` is
`1 / sqrt(eps)`, the most that it can be. With the unit `u` in which the moments are rounded,

- the mean is off by `u * |x|`, and so are differences from it, which makes `u * |x| * rstd` in `y`. What that makes in
  any gradient is measured on the reference in float64, with such errors added to its `y`;
- in `dx = rstd * (h - mean(h) - y * mean(h * y))`, where `h` is the gradient of `y`, the terms may cancel, wholly in a
  row of one element. What is left then is their rounding, times `rstd`: of `h` and of sums, and of `y` twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Norm(TorchFunctionMode):
    """Writes `F.layer_norm` out, with errors of `unit * |x| * rstd` in y if there is a unit, and records of the last
    call what bounds the error of dx."""

    def __init__(self, unit: float = 0.0, seed: int = 0) -> None:
        super().__init__()
        self.unit, self.signs = unit, torch.Generator("cpu").manual_seed(seed)
        self.rstd = self.y = self.of_y = self.h = torch.zeros(())

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (self._layer_norm if func is F.layer_norm else func)(*args, **(kwargs or {}))

    def _layer_norm(
        self, x: Tensor, shape: list[int], weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
    ) -> Tensor:
        dims = tuple(range(-len(shape), 0))

        def largest(t: Tensor) -> Tensor:
            return t.detach().abs().amax(dims, keepdim=True)

        var, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
        rstd = (var + eps).rsqrt()
        y = (x - mean) * rstd
        self.rstd, self.y, self.of_y = rstd.detach(), largest(y), largest(x) * rstd.detach()
        signs = torch.randint(2, x.shape, generator=self.signs, device="cpu").to(x) * 2 - 1
        y = y + self.unit * self.of_y * signs
        if y.requires_grad:
            y.register_hook(lambda grad: setattr(self, "h", largest(grad)))
        y = y if weight is None else y * weight
        return y if bias is None else y + bias

    def error_of_dx(self, of_h: float, of_moments: float, of_y: float) -> Tensor:
        """For each row, from the units in which h and sums, the moments, and the y that dx is made of are rounded."""
        off = of_moments * self.of_y + of_y * self.y
        return self.rstd * self.h * (4 * of_h + 2 * off * (self.y + off))

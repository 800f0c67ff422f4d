"""Sizes of draws: log-uniform, like those of users rather than those of benchmarks. A third are multiples of 64, a
quarter of 8, and the others anything."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

__all__ = ["Function", "Limits", "Sizes", "size"]

Sizes = dict[str, Any]
Function = Callable[..., Any]


@dataclass(frozen=True)
class Limits:
    """What a device computes in a call of some milliseconds."""

    elements: int
    flops: float

    def allow(self, flops: float, *elements: int) -> bool:
        return flops <= self.flops and max(elements) <= self.elements


def size(random: Random, low: int, high: int) -> int:
    """Log-uniform between two sizes, and often a multiple of 8 or 64."""
    value, kind = round(math.exp(random.uniform(math.log(low), math.log(high)))), random.random()
    if kind < 0.3:
        value = max(64, value // 64 * 64)
    elif kind < 0.55:
        value = max(8, value // 8 * 8)
    elif kind < 0.65:
        value |= 1
    return min(high, max(low, value))

"""Attributes of modules that are compared by value, because copies of a module may hold other objects."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["PLAIN", "is_same"]

PLAIN = (bool, int, float, complex, str, type(None), torch.dtype)


def is_same(value: Any, former: Any) -> bool:
    """Whether both are one object, or plain values of one type, or tuples of these, that are equal. A compiler builds
    tuples of attributes anew."""
    if value is former:
        return True
    if type(value) is not type(former):
        return False
    if isinstance(value, tuple):
        return len(value) == len(former) and all(map(is_same, value, former))
    return isinstance(value, PLAIN) and bool(value == former)

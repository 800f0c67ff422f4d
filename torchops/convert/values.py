"""Attributes of modules that are compared by value, because copies of a module may hold other objects."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["PLAIN", "is_same"]

PLAIN = (bool, int, float, complex, str, type(None), torch.dtype)


def is_same(value: Any, former: Any) -> bool:
    """Whether both are one object, or plain values of one type that are equal."""
    return value is former or (isinstance(value, PLAIN) and type(value) is type(former) and bool(value == former))

"""What kernels that are launched from Python ask of devices."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

__all__ = ["has_bfloat16", "has_kernel", "on"]


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Makes `device` current, because kernels are launched there."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@cache
def has_bfloat16(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)


def has_kernel(operator: str, device: torch.device) -> bool:
    """Whether an operator, by its name with the namespace, has a kernel for the device."""
    key = torch._C._dispatch_key_for_device(device.type)
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator, key)

"""What kernels that are launched from Python ask of devices."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

__all__ = ["capability", "has_bfloat16", "has_kernel", "on", "shared_memory"]


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Makes `device` current, because kernels are launched there."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@cache
def capability(device: torch.device | int) -> tuple[int, int]:
    """Of a GPU: that by which its kernels are chosen, which tests pretend with ``TORCHOPS_PRETEND_CAPABILITY``
    (src/ops/pretended_device.h)."""
    pretended = torch.ops.myops._pretended_device()
    return (pretended[0], pretended[1]) if pretended else torch.cuda.get_device_capability(device)


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes that a block on a GPU can have, pretended likewise."""
    if pretended := torch.ops.myops._pretended_device():
        return pretended[2]
    properties: Any = torch.cuda.get_device_properties(device)
    return properties.shared_memory_per_block_optin


def has_bfloat16(device: torch.device) -> bool:
    return capability(device) >= (8, 0)


def has_kernel(operator: str, device: torch.device) -> bool:
    """Whether an operator, by its name with the namespace, has a kernel for the device."""
    key = torch._C._dispatch_key_for_device(device.type)
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator, key)

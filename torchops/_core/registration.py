"""Operators that are written in Python: their schemas, and their kernels for each key of the dispatcher."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from torchops._core import trace

__all__ = [
    "AUTOCAST",
    "below_autograd",
    "define",
    "needs_decomposition",
    "needs_grad",
    "no_derivatives",
    "register",
    "without_autocast",
]

_library = torch.library.Library("myops", "FRAGMENT")
# A process in which torchops is imported again has its operators already.
_defined: set[str] = set()

below_autograd = torch._C._AutoDispatchBelowAutograd


def define(schema: str) -> Any:
    """The operator ``myops::...`` of this schema."""
    name = schema.partition("(")[0]
    if not hasattr(torch.ops.myops, name):
        _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        _defined.add(name)
    return getattr(torch.ops.myops, name).default


def register(
    op: Any,
    *,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    autograd: Callable[..., Any],
    vmap: Callable[..., Any] | None = None,
    autocast: Callable[[Any, str], Callable[..., Any]] | None = None,
    others: Mapping[str, Callable[..., Any] | None] | None = None,
    untraceable: str | None = None,
) -> None:
    """Registers the kernels of an operator that `define` returned.

    Args:
        kernel: for the backends.
        fake: shapes and dtypes of the results.
        autograd: above the backends.
        vmap: the rule of :func:`torch.library.register_vmap`.
        autocast: from the operator and a device type to the kernel for it.
        others: by dispatch key.
        untraceable: the public operator that `torch.jit.trace` is told not to record, if it cannot.
    """
    name = op._schema.name.removeprefix("myops::")
    if name not in _defined:
        return
    for key in ("CPU", "CUDA"):
        _library.impl(name, kernel, key)
    torch.library.register_fake(f"myops::{name}", fake, lib=_library)
    _library.impl(name, autograd, "Autograd")
    if vmap is not None:
        torch.library.register_vmap(op, vmap, lib=_library)
    if autocast is not None:
        for device, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
            _library.impl(name, autocast(op, device), key)
    for key, other in (others or {}).items():
        if other is not None:
            _library.impl(name, other, key)
    if untraceable is not None:
        trace.refuse(untraceable, name)


# --- what kernels for autograd ask -----------------------------------------------------------------------------------


def needs_decomposition(*tensors: Tensor) -> bool:
    """Whether torch.func is active or there is a tangent: these know ATen operators only."""
    if torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.FuncTorchDynamicLayerBackMode):
        return True
    return forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def needs_grad(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def no_derivatives() -> bool:
    """Whether nothing but values can be asked for, of whatever arguments. Then the kernels beneath autograd, which
    check their arguments as well, are all that has to run."""
    return not torch.is_grad_enabled() and forward_ad._current_level < 0 and not needs_decomposition()


# --- autocast --------------------------------------------------------------------------------------------------------

AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
AUTOCAST = AUTOCAST | torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)


def without_autocast(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel of gradients, which has the dtypes of the forward pass also where backward() is called under
    autocast."""

    def call(*args: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(AUTOCAST):
            return kernel(*args)

    return call

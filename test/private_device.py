"""A device of our own, "shelf", whose tensors keep their values in tensors on the CPU, and PyTorch's operators for it.

Importing it takes the key PrivateUse1, of which a process has one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("shelf")

calls: Counter[str] = Counter()
"""How often each operator ran on the device."""


# By storage, which autograd's copies of a tensor share; attributes of the Python object they do not have.
_values: dict[int, Tensor] = {}


def put(values: Tensor) -> Tensor:
    """A tensor on the device that shares the memory of `values`."""
    tensor = torch._C._acc.create_empty_tensor(values.shape, values.dtype)
    _values[tensor.untyped_storage()._cdata] = values.detach()
    return tensor


def take(tensor: Tensor) -> Tensor:
    """The values of a tensor on the device."""
    return _values[tensor.untyped_storage()._cdata]


def on_the_shelf(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs an operator on the values. What it returns is put on the device; what it overwrites is there already."""
    calls[str(op)] += 1
    here = {"device": torch.device("cpu")} if kwargs.get("device") is not None else {}

    def on_cpu(value: Any) -> Any:
        return take(value) if isinstance(value, Tensor) and value.device.type == "shelf" else value

    values = tree_map(on_cpu, (args, kwargs | here))
    return tree_map_only(Tensor, put, op(*values[0], **values[1]))


_library = torch.library.Library("aten", "IMPL")
for _name in map(str, torch._C._dispatch_get_all_op_names()):
    if _name.startswith("aten::") and any(
        torch._C._dispatch_has_kernel_for_dispatch_key(_name, key)
        for key in ("CPU", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
    ):
        _packet, _, _overload = _name.removeprefix("aten::").partition(".")
        _op = getattr(getattr(torch.ops.aten, _packet), _overload or "default")
        _library.impl(_name, partial(on_the_shelf, _op), "PrivateUse1")

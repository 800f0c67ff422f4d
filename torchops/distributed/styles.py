"""Tensor parallelism of :class:`torchops.nn.Dense` by ``parallelize_module``.

This module is imported only when it is asked for: ``torch.distributed.tensor.parallel`` imports FSDP, which may be what
is being imported when :mod:`torchops.distributed` is.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import parallel

from torchops.nn import Dense

__all__ = ["ColwiseParallel", "RowwiseParallel"]


def _as_linear(module: nn.Module) -> nn.Module:
    """For a `Dense`, an ``nn.Linear`` that holds what it holds: parameters and hooks of one are those of the other."""
    if not isinstance(module, Dense):
        return module
    linear = nn.Linear.__new__(nn.Linear)
    linear.__dict__ = module.__dict__
    return linear


class ColwiseParallel(parallel.ColwiseParallel):
    """``torch.distributed.tensor.parallel.ColwiseParallel`` that also takes a :class:`torchops.nn.Dense`.

    Each rank has some of the output features, as of an ``nn.Linear``. The sigmoid needs no communication.

    Args:
        input_layouts, output_layouts, use_local_output: as of PyTorch's class.

    Raises:
        NotImplementedError: the module is no ``Dense``, and PyTorch's class does not take it.

    Example:

        parallelize_module(model, mesh, {"gate": torchops.distributed.ColwiseParallel()})
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        super()._apply(_as_linear(module), device_mesh)
        return module


class RowwiseParallel(parallel.RowwiseParallel):
    """``torch.distributed.tensor.parallel.RowwiseParallel`` that also takes a :class:`torchops.nn.Dense`.

    Each rank has some of the input features, as of an ``nn.Linear``. The sums are added up over the ranks before the
    sigmoid, so the output is replicated; ``output_layouts=Shard(...)`` cuts it then.

    Args:
        input_layouts, output_layouts, use_local_output: as of PyTorch's class.

    Raises:
        NotImplementedError: the module is no ``Dense``, and PyTorch's class does not take it.

    Example:

        parallelize_module(model, mesh, {"out": torchops.distributed.RowwiseParallel()})
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        super()._apply(_as_linear(module), device_mesh)
        return module

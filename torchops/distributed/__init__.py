"""Makes ``DTensor`` a valid argument of the operators, except the float8 ones, for tensor and sequence parallelism.

You don't have to call anything. After ``import torchops``, this module is imported as soon as anything imports
``torch.distributed.tensor``. It isn't imported earlier, because that takes far more time than torchops itself.

``docs/distributed.md`` says what each operator does with which placement, and what that costs. Data parallelism
(``DistributedDataParallel``, ``fully_shard``) passes plain tensors to the operators, so it works without this module.

``ColwiseParallel`` and ``RowwiseParallel`` are PyTorch's parallel styles, which take a :class:`torchops.nn.Dense`, too.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

try:
    from torch.distributed.tensor import DTensor  # noqa: F401
    from torch.distributed.tensor.experimental import register_sharding  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"torchops.distributed: expected a torch with DTensor and register_sharding, got {torch.__version__} ({error})"
    ) from error

from torchops.distributed import attention, rules, transition  # noqa: F401  (they register rules)
from torchops.distributed.triangle import update  # noqa: F401

if TYPE_CHECKING:
    from torchops.distributed.styles import ColwiseParallel, RowwiseParallel

__all__ = ["ColwiseParallel", "RowwiseParallel"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("torchops.distributed.styles"), name)
    raise AttributeError(f"module 'torchops.distributed' has no attribute {name!r}")

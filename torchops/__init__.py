"""Fused, in-place operators for PyTorch. Importing this package registers them as ``torch.ops.myops.*``."""

from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchops._core import library as _library

# The modules imported below look up their operators.
_library.load()

from torchops import cuda, flops, nn, ops, quantization  # noqa: E402
from torchops._core.info import info  # noqa: E402
from torchops._core.when_imported import when_imported  # noqa: E402
from torchops.ops import *  # noqa: E402, F403

if TYPE_CHECKING:
    from torchops import convert as convert
    from torchops import distributed as distributed
    from torchops import inductor as inductor
    from torchops import onnx as onnx
    from torchops.convert import Match as Match
    from torchops.convert import Report as Report
    from torchops.convert import Share as Share
    from torchops.convert import replace as replace

# Imported on first use: torchops.distributed takes far longer to import than everything else, and most programs swap
# no layers.
_LAZY = ("convert", "distributed", "inductor", "onnx")
_OF_CONVERT = ("Match", "Report", "Share", "replace")


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return import_module(f"torchops.{name}")
    if name in _OF_CONVERT:
        return getattr(import_module("torchops.convert"), name)
    raise AttributeError(f"module 'torchops' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_OF_CONVERT})


def _register_backend() -> None:
    """For ``torch.compile(model, backend="torchops")``."""
    registry, inductor = import_module("torch._dynamo.backends.registry"), import_module("torchops.inductor")
    with suppress(AssertionError):  # it has the name from an earlier import of torchops
        registry.register_backend(inductor.backend, name="torchops")


when_imported("torch.utils.flop_counter", flops.register)
when_imported("torch._inductor.lowering", lambda: import_module("torchops.inductor.reinplace").register())
when_imported("torch._dynamo.backends.registry", _register_backend)
when_imported("torchao.utils", quantization.register_with_torchao)
when_imported("torch.distributed.tensor", lambda: import_module("torchops.distributed"))

__version__ = _library.version
cmake_prefix_path = str(_library.prefix)
"""The directory for ``cmake -DCMAKE_PREFIX_PATH=...``, where ``find_package(torchops)`` finds the C++ library."""

__all__ = ["Match", "Report", "Share", "cmake_prefix_path", "info", "replace", *ops.__all__]
__all__ += ["convert", "cuda", "distributed", "flops", "inductor", "nn", "onnx", "ops", "quantization"]

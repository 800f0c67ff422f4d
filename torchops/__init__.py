"""Fused, in-place operators for PyTorch. Importing this package makes them known as ``torch.ops.myops.*``."""

from torchops import _library

# The modules below look their operators up as they are imported.
_library.load()

from torchops import cuda, nn  # noqa: E402
from torchops.ops import (  # noqa: E402
    dense,
    layer_norm,
    layer_norm_,
    sigmoid,
    sigmoid_,
    softmax,
    softmax_,
    square_matmul,
    square_matmul_,
)

__version__ = _library.version
cmake_prefix_path = str(_library.prefix)
"""For ``cmake -DCMAKE_PREFIX_PATH=...``: where ``find_package(torchops)`` finds the C++ library."""

__all__ = [
    "cmake_prefix_path",
    "cuda",
    "dense",
    "layer_norm",
    "layer_norm_",
    "nn",
    "sigmoid",
    "sigmoid_",
    "softmax",
    "softmax_",
    "square_matmul",
    "square_matmul_",
]

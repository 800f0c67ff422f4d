"""Runs a PTX file with the entries of sigmoid.cu on torch tensors.

    make ptx
    python examples/ptx/ptx_sigmoid.py build/ptx/sigmoid.ptx
    python examples/ptx/ptx_sigmoid.py examples/ptx/sigmoid_tanh.ptx

Prints what the driver's assembler says, and how far the results are from `torch.sigmoid` in float64. The second file
is the first one edited; edit it further and run it again.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from ptx_driver import Module, available
from torch import Tensor

THREADS = 256
VECTOR_BYTES = 16
ENTRIES = {torch.float32: "sigmoid_f32", torch.bfloat16: "sigmoid_bf16"}


def sigmoid(module: Module, x: Tensor) -> Tensor:
    """`torch.sigmoid(x)` by the entry of `module` for the type of `x`; returns a new tensor without gradient.

    x: float32 or bfloat16, contiguous, its first element at a multiple of 16 bytes. Raises `TypeError` for other types
    and `ValueError` for other layouts.
    """
    if x.dtype not in ENTRIES:
        raise TypeError(f"sigmoid: expected x of type float32 or bfloat16, got {x.dtype}")
    if not x.is_contiguous() or x.data_ptr() % VECTOR_BYTES:
        raise ValueError(
            f"sigmoid: expected x contiguous and on a multiple of {VECTOR_BYTES} bytes, got strides {x.stride()}"
        )
    y = torch.empty_like(x)
    if x.numel():
        per_block = THREADS * VECTOR_BYTES // x.element_size()
        blocks = -(-x.numel() // per_block)
        module.launch(ENTRIES[x.dtype], blocks, THREADS, [x, y, x.numel()])
    return y


def main() -> int:
    """Runs the file named on the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, help="PTX or cubin with the entries sigmoid_f32 and sigmoid_bf16")
    parser.add_argument("--elements", type=int, default=1_000_003)
    options = parser.parse_args()
    if not available():
        print("a CUDA device and the package cuda-bindings are needed", file=sys.stderr)
        return 2
    module = Module(options.file.read_bytes())
    print(module.log or "(no log: a cubin, or assembled before)")
    for dtype, entry in ENTRIES.items():
        x = torch.linspace(-20, 20, options.elements, device="cuda").to(dtype)
        exact = torch.sigmoid(x.double())
        error = (sigmoid(module, x).double() - exact).abs()
        print(f"{entry}: largest error {error.max().item():.2e}, relative {(error / exact).max().item():.2e}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The steps of docs/ladder.md: one operator, `sigmoid(x @ w.T + b)`, written again and again, each time closer to the
machine.

    python examples/ladder/climb.py

checks and measures them. Steps 1, 2 and 5 are those of `benchmarks/implementations`; the C++ and CUDA files of this
folder are compiled on first use, into `build/ladder`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[2]))
sys.path.append(str(Path(__file__).parents[1] / "ptx"))

import ptx_driver

from benchmarks import implementations
from benchmarks.implementations import py_dense

FOLDER = Path(__file__).parent
BUILD = FOLDER.parents[1] / "build/ladder"

Dense = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Step:
    """A way to write the operator: `make` returns it, or raises an `UnavailableError` that says what is missing."""

    name: str
    devices: tuple[str, ...]
    make: Callable[[], Dense]


class UnavailableError(RuntimeError):
    """Why a step cannot be taken on this machine."""


def differentiable(forward: Dense) -> Dense:
    """A forward pass of any kind with the gradient of step 2, which is all that training needs."""

    class DenseFunction(py_dense.DenseFunction):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
            y = forward(x, w, b)
            ctx.save_for_backward(x, w, y)
            return y

    def dense(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return DenseFunction.apply(x, w, b)

    return dense


def _mode(mode: str, device_type: str) -> Dense:
    if reason := implementations.unavailable(mode, device_type):
        raise UnavailableError(reason)
    found = implementations.find("dense", mode)
    assert found is not None
    return found


# --- C++ -------------------------------------------------------------------------------------------------------------

# What the compiler may use, and what tells at::vec so.
_VECTOR_FLAGS = {
    "AVX512": ["-DCPU_CAPABILITY_AVX512", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma"],
    "AVX2": ["-DCPU_CAPABILITY_AVX2", "-mavx2", "-mfma", "-mf16c"],
}


@functools.cache
def cpp(name: str) -> Dense:
    """The operator `torch.ops.ladder.<name>` of `<name>.cpp`, compiled and loaded."""
    from torch.utils import cpp_extension

    if importlib.util.find_spec("ninja"):  # PyPI's, whose folder is not on the path unless the environment is activated
        os.environ["PATH"] += os.pathsep + importlib.import_module("ninja").BIN_DIR
    if not shutil.which("ninja") or not shutil.which("c++"):
        raise UnavailableError("ninja and a C++ compiler are needed")
    capability = torch.backends.cpu.get_cpu_capability()
    flags = [f"-DCPU_CAPABILITY={capability}", *_VECTOR_FLAGS.get(capability, [])] if name == "dense_vectors" else []
    folder = BUILD / f"{name}-{torch.__version__}"
    folder.mkdir(parents=True, exist_ok=True)
    cpp_extension.load(
        name,
        [str(FOLDER / f"{name}.cpp")],
        # OpenMP's runtime is not linked: torch has loaded the one whose threads at::parallel_for shares.
        extra_cflags=["-O2", "-std=c++20", "-fopenmp", *flags],
        build_directory=str(folder),
        is_python_module=False,
    )
    return differentiable(getattr(torch.ops.ladder, name))


# --- CUDA ------------------------------------------------------------------------------------------------------------

THREADS = 256
# By entry of dense.cu: rows and columns of the tile of a block.
TILES = {"dense_cuda": 64, "dense_tensor_cores": 128}


def compile_cuda(to: Path) -> bytes:
    """dense.cu as PTX for every GPU from compute capability 8.0 on. Needs nvcc, and no GPU."""
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None:
        raise UnavailableError("nvcc is needed")
    to.mkdir(parents=True, exist_ok=True)
    ptx = to / "dense.ptx"
    command = [nvcc, "-ptx", "-O3", "-std=c++17", "-arch=compute_80", str(FOLDER / "dense.cu"), "-o", str(ptx)]
    subprocess.run(command, check=True)
    return ptx.read_bytes()


@functools.cache
def _module() -> ptx_driver.Module:
    if not ptx_driver.available():
        raise UnavailableError("a CUDA device and the package cuda-bindings are needed")
    return ptx_driver.Module(compile_cuda(BUILD))


def cuda(entry: str) -> Dense:
    """An entry of dense.cu, for contiguous bfloat16 matrices."""
    module, tile = _module(), TILES[entry]

    def forward(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        (rows, features), out = x.shape, w.shape[0]
        for t in (x, w, b):
            if t.dtype != torch.bfloat16 or not t.is_contiguous() or t.data_ptr() % 16:
                raise ValueError(f"{entry}: expected contiguous bfloat16 tensors on 16 bytes, got {t.dtype}")
        if entry == "dense_tensor_cores" and (features % 8 or out % 8):
            raise ValueError(f"{entry}: expected multiples of 8 features, got {features} and {out}")
        y = torch.empty(rows, out, dtype=x.dtype, device=x.device)
        if y.numel():
            blocks = -(-rows // tile) * -(-out // tile)
            module.launch(entry, blocks, THREADS, [x, w, b, y, rows, features, out])
        return y

    return differentiable(forward)


# --- all -------------------------------------------------------------------------------------------------------------


def _triton() -> Dense:
    if importlib.util.find_spec("triton") is None:
        raise UnavailableError("triton is not installed")
    return _mode("triton", "cuda")


STEPS = (
    Step("1. Python", ("cpu", "cuda"), lambda: _mode("eager", "cpu")),
    Step("2. autograd.Function", ("cpu", "cuda"), lambda: _mode("py", "cpu")),
    Step("3. C++", ("cpu",), lambda: cpp("dense_loops")),
    Step("4. C++, vectors", ("cpu",), lambda: cpp("dense_vectors")),
    Step("5. Triton", ("cuda",), _triton),
    Step("6. CUDA", ("cuda",), lambda: cuda("dense_cuda")),
    Step("7. CUDA, tensor cores", ("cuda",), lambda: cuda("dense_tensor_cores")),
    Step("8. torchops", ("cpu",), lambda: _mode("cpp", "cpu")),
    Step("8. torchops", ("cuda",), lambda: _mode("cuda", "cuda")),
)

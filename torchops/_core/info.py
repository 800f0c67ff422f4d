"""What this installation was built from, what it runs on, and how its operators are computed there."""

from __future__ import annotations

import platform
import re
from pathlib import Path
from typing import Any

import torch

from torchops._core import _build_info
from torchops._core import library as _library

# The table omits keys without a kernel of ours.
_KEYS = (
    *("CPU", "CUDA", "XPU", "MPS", "PrivateUse1", "Meta", "CompositeExplicitAutograd"),
    *("CompositeImplicitAutograd", "ADInplaceOrView", "Autograd", "AutocastCPU", "AutocastCUDA", "FuncTorchBatched"),
)


def dispatch_keys() -> dict[str, list[str]]:
    """The keys for which each operator has a kernel, including Python kernels and those of other libraries."""
    names = sorted(str(name) for name in torch._C._dispatch_get_all_op_names() if str(name).startswith("myops::"))
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return {name: [key for key in _KEYS if has_kernel(name, key)] for name in names}


def code_for(capability: tuple[int, int], architectures: list[str]) -> str | None:
    """Which of the architectures in the library a GPU runs: machine code of its own kind, or else PTX.

    Machine code of 8.0 runs on 8.0 to 8.9, that of 9.0a on 9.0 alone, that of 10.0f on 10.0 to 10.9. PTX (of 8.0+PTX)
    is compiled by the driver, for any later GPU.
    """
    runs, compiles = [], []
    for entry in architectures:
        number, _, ptx = entry.partition("+")
        exact, family = number.endswith("a"), number.endswith("f")
        major, minor = (int(part) for part in number.rstrip("af").split("."))
        if capability == (major, minor) or (not exact and capability[0] == major and capability[1] > minor):
            runs.append((major, minor, exact or family, f"machine code of {number}"))
        if ptx and not exact and not family and capability >= (major, minor):
            compiles.append((major, minor, False, f"PTX of {number}"))
    return max(runs or compiles)[-1] if runs or compiles else None


def allows_tf32(dtype: torch.dtype) -> bool:
    """Whether products of this dtype may be computed in TF32 on a GPU. Both of torch's interfaces set what is read
    here; `allow_tf32`, the old one, raises when the new one has been used."""
    return dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"


def gemm_on(capability: tuple[int, int], architectures: list[str], gemm_architectures: list[str]) -> str:
    """The GEMM kernels of torchops that a GPU uses; they fuse what surrounds a product."""
    number = ".".join(map(str, capability))
    if code_for(capability, gemm_architectures) is not None:
        return "kernels of " + ", ".join(entry for entry in gemm_architectures if code_for(capability, [entry]))
    if capability == (9, 0) and architectures:
        return f"none in this build: build with {number} in TORCH_CUDA_ARCH_LIST for faster dense and square_matmul"
    return f"none for {number}"


def dense_on(capability: tuple[int, int], architectures: list[str], gemm_architectures: list[str]) -> str:
    """How dense is computed on a GPU."""
    two_steps = "cuBLAS, then one pass for bias and sigmoid"
    if code_for(capability, architectures) is None:
        return "no kernel for this GPU: build with it in TORCH_CUDA_ARCH_LIST"
    tf32 = " also with TF32" if code_for(capability, gemm_architectures) is not None else " without TF32"
    return f"fused kernels (float16, bfloat16, float32{tf32}), else {two_steps}"


def square_matmul_on(capability: tuple[int, int], architectures: list[str], gemm_architectures: list[str]) -> str:
    """How square_matmul_ is computed on a GPU."""
    panels = "cuBLAS, panel by panel through bounded scratch"
    if code_for(capability, architectures) is None:
        return "no kernel for this GPU: build with it in TORCH_CUDA_ARCH_LIST"
    if code_for(capability, gemm_architectures) is not None:
        return f"in place with no scratch (float16, bfloat16), few rows by a copy of them, else {panels}"
    return panels


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _devices(architectures: list[str], gemm_architectures: list[str]) -> list[dict[str, Any]]:
    cpu = {
        "device": "cpu",
        "name": _cpu_name(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "dense": "panels of rows: product by "
        + ("MKL" if torch.backends.mkl.is_available() else "ATen's BLAS")
        + f", bias and sigmoid in the cache, with {torch.backends.cpu.get_cpu_capability()} vectors",
    }
    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        capability = (properties.major, properties.minor)
        build = (capability, architectures, gemm_architectures)
        kernels = {"GEMM": gemm_on(*build), "dense": dense_on(*build), "square_matmul_": square_matmul_on(*build)}
        gpus.append(
            {
                "device": f"cuda:{index}",
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "memory": f"{properties.total_memory / 2**30:.0f} GiB",
                "code": code_for(capability, architectures) or "none",
                **(kernels if architectures else dict.fromkeys(kernels, "none: built without CUDA")),
            }
        )
    return [cpu, *gpus]


def info() -> dict[str, Any]:
    """What ``python -m torchops`` prints, as a dictionary that can be written as JSON.

    Keys: ``version``, ``library`` (path), ``built_for`` and ``running_on`` (versions), ``cuda_architectures``,
    ``gemm_architectures`` (those that have GEMM kernels of their own), ``devices`` (each with what it is and which way
    :func:`torchops.dense` and, on a GPU, :func:`torchops.square_matmul_` take there), ``kernel_path`` (see
    :func:`torchops.cuda.kernel_path`) and ``dispatch_keys`` of every operator. Needs no GPU.

    Example:

        >>> torchops.info()["dispatch_keys"]["myops::sigmoid"][0]
        'CPU'
    """
    architectures, gemm_architectures = (
        [entry for entry in entries.split(";") if entry]
        for entries in (_build_info.cuda_architectures, _build_info.gemm_architectures)
    )
    return {
        "version": _library.version,
        "library": str(_library.prefix / _build_info.library),
        "built_for": {
            "torch": _build_info.torch_version,
            "cuda": _build_info.cuda_version or None,
            "compiler": _build_info.compiler,
        },
        "running_on": {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
            "platform": platform.platform(),
        },
        "cuda_architectures": architectures,
        "gemm_architectures": gemm_architectures,
        "devices": _devices(architectures, gemm_architectures),
        "kernel_path": torch.ops.myops._kernel_path(),
        "dispatch_keys": dispatch_keys(),
    }


def report(facts: dict[str, Any]) -> str:
    """``info()`` as readable text."""
    lines = [f"torchops {facts['version']} ({facts['library']})"]
    for title in ("built_for", "running_on"):
        versions = ", ".join(f"{name} {value or 'off'}" for name, value in facts[title].items())
        lines.append(f"{title.replace('_', ' ') + ':':12}{versions}")
    lines.append(f"CUDA code:  {', '.join(facts['cuda_architectures']) or 'none'}")
    lines.append(f"GEMM code:  {', '.join(facts['gemm_architectures']) or 'none'}")
    lines.append(f"path:       {facts['kernel_path']}")
    lines.append("devices:")
    for device in facts["devices"]:
        first, *rest = device.items()
        lines.append(f"  {first[1]}")
        lines.extend(f"    {name + ':':16}{value}" for name, value in rest)
    lines.append("kernels:")
    return "\n".join([*lines, *_table(facts["dispatch_keys"])])


def _table(operators: dict[str, list[str]]) -> list[str]:
    # It doesn't matter here which of the two composite keys a kernel has, and their names are long.
    short = {key: "Composite" if key.startswith("Composite") else key for key in _KEYS}
    kernels = {name.removeprefix("myops::"): {short[key] for key in keys} for name, keys in operators.items()}
    columns = [key for key in dict.fromkeys(short.values()) if any(key in keys for keys in kernels.values())]
    # Headers of the longest keys take two lines.
    heads = [re.sub(r"^(ADInplace|Autocast|FuncTorch)", r"\1 ", key).rpartition(" ")[::2] for key in columns]
    width = max(map(len, kernels))
    rows = [("", list(line)) for line in zip(*heads, strict=True)]
    rows += [(name, ["x" if key in keys else "." for key in columns]) for name, keys in kernels.items()]
    table = []
    for name, cells in rows:
        marks = " ".join(cell.ljust(max(map(len, head))) for cell, head in zip(cells, heads, strict=True))
        table.append(f"  {name:{width}} {marks}".rstrip())
    return table


def main(arguments: list[str]) -> str:
    """Returns the output of the command."""
    import argparse
    import json

    parser = argparse.ArgumentParser(prog="python -m torchops", description=__doc__)
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--json", action="store_true", help="print JSON instead of text")
    either.add_argument("--check", action="store_true", help="run the operators on each device, beside float64")
    return json.dumps(info(), indent=2) if parser.parse_args(arguments).json else report(info())

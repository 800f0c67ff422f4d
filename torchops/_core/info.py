"""What this installation was built from, what it runs on, and how its operators are computed there."""

from __future__ import annotations

import platform
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from torchops._core import _build_info
from torchops._core import library as _library
from torchops._core.devices import capability
from torchops._core.gpu_kernels import Gpu

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


def allows_tf32(dtype: torch.dtype) -> bool:
    """Whether products of this dtype may be computed in TF32 on a GPU. Both of torch's interfaces set what is read
    here; `allow_tf32`, the old one, raises when the new one has been used."""
    return dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"


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
        "linear layers": f"matmuls by {'MKL' if torch.backends.mkl.is_available() else 'a BLAS'} in panels of rows, "
        f"the rest in the cache, with {torch.backends.cpu.get_cpu_capability()} vectors",
        "triangle_attention": "PyTorch's operators, in panels of rows",
        "softmax": "PyTorch's; in place, with bounded scratch",
        "layer_norm": "one pass over rows of up to 4 MiB",
        "sigmoid": "one pass",
    }
    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        gpu = Gpu(capability(index), architectures, gemm_architectures, find_spec("triton") is not None)
        gpus.append(
            {
                "device": f"cuda:{index}",
                "name": properties.name,
                "capability": gpu.number,
                "memory": f"{properties.total_memory / 2**30:.0f} GiB",
                **gpu.facts,
            }
        )
    return [cpu, *gpus]


def info() -> dict[str, Any]:
    """What ``python -m torchops`` prints, as a dictionary that can be written as JSON.

    Keys: ``version``, ``library`` (path), ``built_for`` and ``running_on`` (versions), ``cuda_architectures``,
    ``gemm_architectures`` (those that have GEMM kernels of their own), ``devices`` (each with what it is, what computes
    each operator there, and on a GPU what it would take to have more), ``kernel_path`` (see
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
        lines.extend(f"    {name + ':':20}{value}" for name, value in rest)
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

"""Several builds of the library in one installation, of which the one for the running torch is taken.

The wheel of a release has, in the folder ``builds``, one for each minor version of torch, with CUDA and without, each
with the layout of a single one: ``_core/_build_info.py``, ``lib`` and ``include``. Those with CUDA share the GEMM
kernels, which include nothing of torch: ``cu13/libtorchops_gemm.so``. ``release/merge_wheels.py`` makes it.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

import torch

FOLDER = Path(__file__).parents[1] / "builds"
REBUILD = "pip install --no-build-isolation --force-reinstall --no-deps ."
_INFO = "torchops._core._build_info"


class Build(NamedTuple):
    """A build, its torch's minor version, such as ``(2, 13)``, and its CUDA's, such as ``(13, 0)``, or ``()``."""

    info: Path
    torch: tuple[int, ...]
    cuda: tuple[int, ...]


def found() -> list[Build]:
    """The builds of this installation."""
    builds = []
    for info in sorted(FOLDER.glob("*/_core/_build_info.py")):
        values = dict(re.findall(r'^(\w+) = "(.*?)"', info.read_text(), re.MULTILINE))
        builds.append(Build(info, numbers(values["torch_version"])[:2], numbers(values["cuda_version"])))
    return builds


def numbers(version: str | None) -> tuple[int, ...]:
    """Those of a version before its first suffix: ``2.13.0+cpu`` is ``(2, 13, 0)``."""
    return tuple(map(int, re.findall(r"\d+", re.split(r"[^\d.]", version or "")[0])))


def installed() -> str:
    """The running torch, for messages."""
    return f"torch {torch.__version__} (CUDA {torch.version.cuda or 'off'})"


def select() -> None:
    """Makes the build for the running torch ``torchops._core._build_info``.

    Without one for the major version of torch's CUDA, that for the CPU is taken, with a warning.

    Raises:
        ImportError: there is none for this minor version of torch.
    """
    minor, cuda = numbers(torch.__version__)[:2], numbers(torch.version.cuda)
    builds = found()
    fitting = [build for build in builds if build.torch == minor]
    if not fitting:
        supported = ", ".join(f"{major}.{minor}" for major, minor in sorted({build.torch for build in builds}))
        raise ImportError(
            f"torchops: expected a torch of these minor versions: {supported}; got {installed()}. Either install one "
            f'of these, as with: pip install "torch=={supported.rpartition(" ")[2]}.*"; or build torchops for yours, '
            f"in a clone of its repository: {REBUILD}"
        )
    of_cuda = [build for build in fitting if cuda and build.cuda[:1] == cuda[:1]]
    of_cpu = [build for build in fitting if not build.cuda]
    build = (of_cuda or of_cpu or fitting)[0]
    if cuda and not of_cuda:
        others = sorted({f"CUDA {build.cuda[0]}" for build in fitting if build.cuda})
        warnings.warn(
            f"torchops: no kernels for {installed()}: those of this installation are for "
            f"{', '.join(others) or 'the CPU'}. Its operators run on the CPU only",
            stacklevel=4,
        )
    spec = importlib.util.spec_from_file_location(_INFO, build.info)
    assert spec is not None
    assert spec.loader is not None
    info = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(info)
    # Its local version names the build; what is installed is of all of them.
    info.version = info.version.partition("+")[0]  # type: ignore[attr-defined]
    sys.modules[_INFO] = info
    vars(sys.modules["torchops._core"])["_build_info"] = info

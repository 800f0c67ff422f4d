"""Loads libtorchops.so into PyTorch's dispatcher, after checking that it was built for the running version of torch.

With CUDA kernels, the dynamic linker loads libtorchops_gemm.so with it.
"""

import struct
from pathlib import Path

import torch

from torchops._core import builds
from torchops._core.builds import REBUILD, installed

if builds.FOLDER.is_dir():
    builds.select()
try:
    from torchops._core import _build_info
except ImportError as error:
    raise ImportError(
        "torchops: expected the compiled library beside the Python modules, got only their source in "
        f"{Path(__file__).parents[1]}. Run from another folder if torchops is installed; if it is not, build it, in "
        f"the folder with its pyproject.toml: {REBUILD}"
    ) from error

version: str = _build_info.version
# In an editable install, the compiled files are not in the folder of this one but where the build put _build_info. Of
# several builds, each has a folder.
prefix: Path = Path(_build_info.__file__).parents[1]


def _minor(torch_version: str) -> str:
    return ".".join(torch_version.split(".")[:2])


def _check_whole(library: Path) -> None:
    """The process dies of SIGBUS where the dynamic linker reads beyond the end of a file that was cut short.

    Raises:
        OSError: the file ends before the segments that its ELF header names.
    """
    with library.open("rb") as file:
        header = file.read(64)
        if len(header) < 64 or header[:5] != b"\x7fELF\x02":
            return  # no library of 64 bits, of which the dynamic linker says so
        (start,), (size, count) = struct.unpack_from("=Q", header, 32), struct.unpack_from("=2H", header, 54)
        file.seek(start)
        table = file.read(size * count)
    if len(table) == size * count:
        segments = (struct.unpack_from("=2I4Q", table, size * i) for i in range(count))
        end = max((offset + length for _, _, offset, _, _, length in segments), default=0)
    else:
        end = start + size * count
    got = library.stat().st_size
    if got < end:
        raise OSError(f"file too short: expected at least {end} bytes, got {got}")


def load() -> None:
    """Load the operators into ``torch.ops.myops``.

    Raises:
        ImportError: the library was built for another minor version of torch, is missing, or does not load. The
            message says what was built, what is installed and which command fixes it.
    """
    library = prefix / _build_info.library
    built = f"torch {_build_info.torch_version} (CUDA {_build_info.cuda_version or 'off'})"
    minor = _minor(_build_info.torch_version)
    rebuild = f"rebuild torchops, in the folder with its pyproject.toml: {REBUILD}"
    # Who has a wheel of several builds may have no clone to rebuild in.
    again = f"install the wheel again: pip install --force-reinstall --no-cache-dir --no-deps torchops=={version}; or "
    fix = (again if builds.FOLDER.is_dir() else "") + rebuild
    if minor != _minor(torch.__version__):
        raise ImportError(
            f"torchops: expected torch {minor}, got {installed()}. This library was built for {built}, and PyTorch's "
            f"C++ ABI changes with the minor version. Either {rebuild}; or install its torch: "
            f'pip install "torch=={minor}.*"'
        )
    if not library.is_file():
        raise ImportError(f"torchops: expected {library}, built for {built}, got no such file. To fix this, {fix}")
    # Where the dynamic linker looks for it, too.
    of_cuda = builds.FOLDER / f"cu{_build_info.cuda_version.partition('.')[0]}"
    needed = (folder / "libtorchops_gemm.so" for folder in (library.parent, of_cuda))
    try:
        for file in (*filter(Path.is_file, needed), library):
            _check_whole(file)
        torch.ops.load_library(str(library))
    except OSError as error:
        reason = error.__cause__ or error
        raise ImportError(
            f"torchops: {file} does not load ({reason}). It was built for {built}, and the process runs "
            f"{installed()}. To fix this, {fix}"
        ) from error

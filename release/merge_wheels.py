"""Makes one wheel out of wheels that were built for different torches::

    python release/merge_wheels.py dist/torchops-*+*.whl --output dist

Each is of the same sources and has a local version, such as ``0.2.0+torch213.cu130``. What depends on the torch moves
to ``torchops/builds/torch213.cu130``, where :mod:`torchops._core.builds` looks for it. The GEMM kernels depend on
nothing but the major version of CUDA: they move to ``torchops/builds/cu13``, where the libraries of its builds look for
them, and must be the same in all these wheels. All else must be the same in all wheels. The result has no local
version, so that a package index takes it. It requires a torch between the oldest and the newest of the given ones.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import re
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

# What depends on the torch. Headers don't, but a build's CMake package looks for them beside itself.
OF_BUILD = ("torchops/_core/_build_info.py", "torchops/lib/", "torchops/include/")
OF_CUDA = "torchops/lib/libtorchops_gemm.so"
_NAME = re.compile(r"torchops-(?P<version>[0-9.]+)\+(?P<local>torch\d+\.\w+)-py3-none-(?P<platform>\w+)\.whl")


class Wheel(NamedTuple):
    """A wheel that was built for one torch, such as ``local`` torch213.cpu and ``minor`` (2, 13)."""

    version: str
    local: str
    platform: str
    minor: tuple[int, int]
    files: dict[str, tuple[bytes, int]]  # with their permissions

    def place(self, name: str) -> str:
        """Where a file of this one is in the merged one."""
        cuda = re.search(r"\.cu(\d+)\d$", self.local)
        if name == OF_CUDA and cuda:
            return f"torchops/builds/cu{cuda[1]}/{Path(name).name}"
        if name.startswith(OF_BUILD):
            return name.replace("torchops/", f"torchops/builds/{self.local}/", 1)
        return name.replace(f"torchops-{self.version}+{self.local}.dist-info/", f"torchops-{self.version}.dist-info/")

    @classmethod
    def read(cls, path: Path) -> Wheel:
        match = _NAME.fullmatch(path.name)
        if match is None:
            raise ValueError(f"expected wheels named torchops-VERSION+LOCAL-py3-none-PLATFORM.whl, got {path.name}")
        with zipfile.ZipFile(path) as archive:
            files = {i.filename: (archive.read(i), i.external_attr) for i in archive.infolist() if not i.is_dir()}
        requirement = re.search(rb"^Requires-Dist: torch==(\d+)\.(\d+)\.\*", files[_metadata(match)][0], re.MULTILINE)
        if requirement is None:
            raise ValueError(f"expected {path.name} to require one minor version of torch")
        return cls(**match.groupdict(), minor=(int(requirement[1]), int(requirement[2])), files=files)


def _metadata(match: re.Match[str]) -> str:
    return f"torchops-{match['version']}+{match['local']}.dist-info/METADATA"


def merge(paths: Sequence[Path], output: Path) -> Path:
    """Writes the wheel to the folder `output`, and returns its path.

    Raises:
        ValueError: these are not wheels of the same sources, for different torches.
    """
    wheels = sorted((Wheel.read(path) for path in paths), key=lambda wheel: wheel.local)
    locals_, versions = [wheel.local for wheel in wheels], {wheel.version for wheel in wheels}
    if len(versions) != 1 or len(set(locals_)) != len(locals_):
        raise ValueError(f"expected one version for different torches, got {', '.join(p.name for p in sorted(paths))}")
    (version,) = versions
    merged: dict[str, tuple[bytes, int]] = {}
    owner: dict[str, str] = {}
    for wheel in wheels:
        info = f"torchops-{version}+{wheel.local}.dist-info/"
        for name, (data, mode) in wheel.files.items():
            if name in (f"{info}RECORD", f"{info}METADATA", f"{info}WHEEL"):
                continue
            to = wheel.place(name)
            if merged.setdefault(to, (data, mode))[0] != data:
                both = f"{owner[to]} and {wheel.local}"
                raise ValueError(f"expected the same {name} in all wheels, got different ones for {both}")
            owner.setdefault(to, wheel.local)
    platform = max((wheel.platform for wheel in wheels), key=_numbers)  # that needs the newest glibc
    info = f"torchops-{version}.dist-info"
    merged[f"{info}/METADATA"] = _with_range(wheels), 0o644 << 16
    tags = f"Wheel-Version: 1.0\nGenerator: torchops\nRoot-Is-Purelib: false\nTag: py3-none-{platform}\n"
    merged[f"{info}/WHEEL"] = tags.encode(), 0o644 << 16
    path = output / f"torchops-{version}-py3-none-{platform}.whl"
    output.mkdir(parents=True, exist_ok=True)
    _write(path, merged, f"{info}/RECORD")
    return path


def _numbers(platform: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", platform)]


def _with_range(wheels: Sequence[Wheel]) -> bytes:
    """The metadata, which is the same but for the version and the torch that is required."""
    texts = set()
    first, last = min(wheel.minor for wheel in wheels), max(wheel.minor for wheel in wheels)
    for wheel in wheels:
        data, _ = wheel.files[f"torchops-{wheel.version}+{wheel.local}.dist-info/METADATA"]
        text = data.decode().replace(f"\nVersion: {wheel.version}+{wheel.local}\n", f"\nVersion: {wheel.version}\n", 1)
        required = f">={first[0]}.{first[1]},<{last[0]}.{last[1] + 1}"
        texts.add(re.sub(r"^Requires-Dist: torch==\S+$", f"Requires-Dist: torch{required}", text, flags=re.MULTILINE))
    if len(texts) != 1:
        raise ValueError("expected the same metadata in all wheels but for version and torch")
    return texts.pop().encode()


def _write(path: Path, files: dict[str, tuple[bytes, int]], record: str) -> None:
    lines = []
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, (data, mode) in sorted(files.items()):
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            lines.append(f"{name},sha256={digest},{len(data)}\n")
            _add(archive, name, data, mode)
        _add(archive, record, "".join([*lines, f"{record},,\n"]).encode(), 0o644 << 16)


def _add(archive: zipfile.ZipFile, name: str, data: bytes, mode: int) -> None:
    # Of no date, so that the same wheels give the same bytes.
    entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
    entry.external_attr, entry.compress_type = mode, zipfile.ZIP_DEFLATED
    archive.writestr(entry, data)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", type=Path, nargs="+")
    parser.add_argument("--output", type=Path, default=Path("dist"), help="a folder (default: dist)")
    options = parser.parse_args()
    try:
        path = merge(options.wheels, options.output)
    except ValueError as error:
        print(f"merge_wheels: {error}", file=sys.stderr)
        return 1
    print(path, f"{path.stat().st_size / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())

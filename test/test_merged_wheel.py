"""One wheel of builds for several torches: what it holds, which of them is loaded, and what is refused.

The builds for other torches are copies of the one for this, under their names.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from merge_wheels import Wheel, main, merge
from test_packaging import TORCH_MINOR, clean, run_python, wheel

__all__ = ["clean", "wheel"]  # fixtures

pytestmark = pytest.mark.xdist_group("packaging")


_AS_THEY_ARE: Mapping[str, bytes] = MappingProxyType({})
GEMM = "torchops/lib/libtorchops_gemm.so"


def as_if(made: Path, folder: Path, minor: str, cuda: str = "", changed: Mapping[str, bytes] = _AS_THEY_ARE) -> Path:
    """A copy of a wheel that says that it is for another torch, with some files changed or added."""
    read = Wheel.read(made)
    local = f"torch{minor.replace('.', '')}.{'cu' + cuda.replace('.', '') if cuda else 'cpu'}"
    path = folder / made.name.replace(read.local, local)
    with zipfile.ZipFile(path, "w") as archive:
        for name, (data, _) in read.files.items():
            if name.endswith("METADATA"):
                data = data.replace(f"torch=={TORCH_MINOR}.*".encode(), f"torch=={minor}.*".encode())
                data = data.replace(f"+{read.local}\n".encode(), f"+{local}\n".encode())
            if name.endswith("_build_info.py"):
                data = data.replace(torch.__version__.encode(), f"{minor}.0".encode())
                data = data.replace(read.local.encode(), local.encode())
                data = re.sub(rb'cuda_version = "[0-9.]*"', f'cuda_version = "{cuda}"'.encode(), data)
            if name not in changed:
                archive.writestr(name.replace(read.local, local), data)
        for name, data in changed.items():
            archive.writestr(name, data)
    return path


@pytest.fixture(scope="module")
def wheels(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """For this torch, an older and a newer one."""
    folder = tmp_path_factory.mktemp("wheels")
    return [wheel, *(as_if(wheel, folder, minor) for minor in ("1.13", "2.99"))]


def installed(made: Path, folder: Path) -> Path:
    """A folder to be first on the path."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--target", folder, made], check=True)
    return folder


def test_wheel(wheels: list[Path], tmp_path: Path) -> None:
    merged = merge(wheels, tmp_path)
    read = Wheel.read(wheels[0])
    assert merged.name == f"torchops-{read.version}-py3-none-{read.platform}.whl"
    assert merge(wheels[::-1], tmp_path / "again").read_bytes() == merged.read_bytes()
    with zipfile.ZipFile(merged) as archive:
        names = archive.namelist()
        about = f"torchops-{read.version}.dist-info"
        metadata = archive.read(f"{about}/METADATA").decode()
        assert f"\nVersion: {read.version}\n" in metadata
        assert "\nRequires-Dist: torch>=1.13,<2.100\n" in metadata
        assert {name for name in names if name.endswith("libtorchops.so")} == {
            f"torchops/builds/{local}/lib/libtorchops.so" for local in (read.local, "torch113.cpu", "torch299.cpu")
        }
        assert "torchops/_core/_build_info.py" not in names
        record = archive.read(f"{about}/RECORD").decode().splitlines()
        assert [line.split(",")[0] for line in record] == names
        for line in record[:-1]:
            name, digest, size = line.rsplit(",", 2)
            data = archive.read(name)
            exact = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            assert (digest, int(size)) == (f"sha256={exact}", len(data))


def test_runs_with_the_torch_that_is_there(wheels: list[Path], clean: tuple[Path, Path], tmp_path: Path) -> None:
    path = installed(merge(wheels, tmp_path / "wheel"), tmp_path / "site")
    code = """
from importlib.metadata import version
import torch, torchops
from torchops._core import _build_info
x, w = torch.rand(3, 5, requires_grad=True), torch.rand(5, 5)
y = torchops.dense(x, w)
torch.testing.assert_close(y, torch.sigmoid(x @ w.T))
y.sum().backward()
assert torchops.__version__ == version("torchops") == _build_info.version, torchops.__version__
print(torchops.cmake_prefix_path, torch.__version__ == _build_info.torch_version)
"""
    result = run_python(clean[0], code, tmp_path, path)
    assert result.returncode == 0, result.stderr
    # Beside a torch with CUDA, a wheel that was built with TORCHOPS_CUDA=OFF has no kernels for it.
    without = torch.version.cuda is not None and Wheel.read(wheels[0]).local.endswith(".cpu")
    assert result.stderr.count("UserWarning: torchops: no kernels for torch") == without
    assert result.stderr.count("Warning") == without
    folder = path / "torchops" / "builds" / Wheel.read(wheels[0]).local
    assert result.stdout.split() == [str(folder), "True"]
    assert (folder / "lib" / "cmake" / "torchops" / "torchopsConfig.cmake").is_file()
    assert (folder / "include" / "torchops" / "ops" / "dense.h").is_file()
    result = run_python(clean[0], "import runpy; runpy.run_module('torchops', run_name='__main__')", tmp_path, path)
    assert result.returncode == 0, result.stderr
    assert str(folder) in result.stdout


def test_a_library_in_builds_finds_torch_by_itself(
    wheels: list[Path], clean: tuple[Path, Path], tmp_path: Path
) -> None:
    """Where torch is a neighbour of torchops."""
    path = installed(merge(wheels, tmp_path / "wheel"), tmp_path / "site")
    (path / "torch").symlink_to(Path(torch.__file__).parent)
    library = path / "torchops" / "builds" / Wheel.read(wheels[0]).local / "lib" / "libtorchops.so"
    result = run_python(clean[0], f"import ctypes; ctypes.CDLL({str(library)!r})", tmp_path)
    assert result.returncode == 0, result.stderr


def test_no_build_for_a_torch_is_an_import_error(wheels: list[Path], clean: tuple[Path, Path], tmp_path: Path) -> None:
    path = installed(merge(wheels[1:], tmp_path / "wheel"), tmp_path / "site")
    result = run_python(clean[0], "import torchops", tmp_path, path)
    assert result.returncode != 0
    assert (
        "ImportError: torchops: expected a torch of these minor versions: 1.13, 2.99; got "
        f"torch {torch.__version__} (CUDA {torch.version.cuda or 'off'}). Either install one of these, as with: "
        'pip install "torch==2.99.*"; or build torchops' in result.stderr
    )


def test_a_damaged_wheel_says_how_to_install_it_again(wheel: Path, clean: tuple[Path, Path], tmp_path: Path) -> None:
    """A library that was cut short would end the process if it was loaded."""
    path = installed(merge([wheel], tmp_path / "wheel"), tmp_path / "site")
    read = Wheel.read(wheel)
    library = path / "torchops" / "builds" / read.local / "lib" / "libtorchops.so"

    def check(says: str) -> None:
        result = run_python(clean[0], "import torchops", tmp_path, path)
        assert result.returncode == 1, result.stderr
        assert f"ImportError: torchops: {says}" in result.stderr
        again = f"pip install --force-reinstall --no-cache-dir --no-deps torchops=={read.version}"
        assert f". To fix this, install the wheel again: {again}; or rebuild torchops" in result.stderr

    for size in (library.stat().st_size * 9 // 10, 100, 10):
        os.truncate(library, size)
        check(f"{library} does not load ({'' if size > 63 else str(library) + ': '}file too short")
    library.unlink()
    check(f"expected {library}, ")


@pytest.mark.parametrize(
    ("cuda", "taken", "warns"), [("None", "cpu", False), ("'13.2'", "cu130", False), ("'12.6'", "cpu", True)]
)
def test_the_cuda_of_torch_chooses(
    wheel: Path, clean: tuple[Path, Path], tmp_path: Path, cuda: str, taken: str, warns: bool
) -> None:
    """A torch of another major version gets the CPU kernels, and one warning."""
    for_cpu = as_if(wheel, tmp_path, TORCH_MINOR)
    of_cuda = as_if(wheel, tmp_path, TORCH_MINOR, "13.0")
    path = installed(merge([for_cpu, of_cuda], tmp_path / "wheel"), tmp_path / "site")
    code = f"""
import warnings, torch
torch.version.cuda = {cuda}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torchops
print(torchops.cmake_prefix_path.rpartition(".")[2])
print(*(w.message for w in caught))
"""
    result = run_python(clean[0], code, tmp_path, path)
    assert result.returncode == 0, result.stderr
    got, text = result.stdout.split("\n", 1)
    assert got == taken
    if warns:
        assert text.count("torchops: no kernels for torch") == 1
        assert "(CUDA 12.6): those of this installation are for CUDA 13. Its operators run on the CPU only" in text
    else:
        assert not text.strip()


def test_builds_of_one_cuda_share_their_gemm_kernels(wheel: Path, tmp_path: Path) -> None:
    def of_cuda(minor: str, cuda: str, kernels: bytes) -> Path:
        return as_if(wheel, tmp_path, minor, cuda, {GEMM: kernels})

    wheels = [of_cuda("2.98", "13.0", b"of 13"), of_cuda("2.99", "13.2", b"of 13"), of_cuda("2.99", "12.8", b"of 12")]
    with zipfile.ZipFile(merge(wheels, tmp_path / "wheel")) as archive:
        shared = {name: archive.read(name) for name in archive.namelist() if name.endswith(Path(GEMM).name)}
    assert shared == {f"torchops/builds/cu{cuda}/libtorchops_gemm.so": f"of {cuda}".encode() for cuda in (12, 13)}
    other = of_cuda("2.97", "13.0", b"of other sources")
    with pytest.raises(
        ValueError, match=rf"same {GEMM} in all .* different ones for torch297.cu130 and torch298.cu130"
    ):
        merge([*wheels, other], tmp_path)


def test_shared_kernels_that_were_cut_short_are_an_import_error(
    wheel: Path, clean: tuple[Path, Path], tmp_path: Path
) -> None:
    """With the torch that would load them."""
    start = Wheel.read(wheel).files["torchops/lib/libtorchops.so"][0][:1000]
    of_cuda, for_cpu = as_if(wheel, tmp_path, TORCH_MINOR, "13.0", {GEMM: start}), as_if(wheel, tmp_path, TORCH_MINOR)
    path = installed(merge([of_cuda, for_cpu], tmp_path / "wheel"), tmp_path / "site")
    code = "import torch; torch.version.cuda = {}; import torchops"
    library = path / "torchops" / "builds" / "cu13" / "libtorchops_gemm.so"
    assert run_python(clean[0], code.format(None), tmp_path, path).returncode == 0
    result = run_python(clean[0], code.format("'13.0'"), tmp_path, path)
    assert f"ImportError: torchops: {library} does not load (file too short: " in result.stderr


def test_what_does_not_fit_is_refused(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other sources, another version, the same torch twice, and a wheel that has no torch in its name."""
    other = as_if(wheel, tmp_path, "2.99", changed={"torchops/py.typed": b"changed"})
    local = Wheel.read(wheel).local
    first, second = sorted((local, "torch299.cpu"))
    with pytest.raises(ValueError, match=rf"same torchops/py.typed in all .* different ones for {first} and {second}"):
        merge([wheel, other], tmp_path)
    with pytest.raises(ValueError, match="expected one version for different torches, got torchops-"):
        merge([wheel, wheel], tmp_path)
    with pytest.raises(ValueError, match=r"expected wheels named .*, got torch-2.13.0-py3-none-any.whl"):
        merge([tmp_path / "torch-2.13.0-py3-none-any.whl"], tmp_path)
    monkeypatch.setattr(sys, "argv", ["merge_wheels", str(wheel), str(other)])
    assert main() == 1
    assert capsys.readouterr().err.startswith("merge_wheels: expected the same torchops/py.typed")

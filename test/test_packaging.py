"""The wheel as its users meet it: in a clean environment, from another folder, and failing with words."""

import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
TORCH_MINOR = ".".join(torch.__version__.split(".")[:2])

# One worker prepares the wheel and its environment.
pytestmark = pytest.mark.xdist_group("packaging")


def run_python(python: Path, code: str, cwd: Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    if path is not None:
        env["PYTHONPATH"] = str(path)
    return subprocess.run([python, "-c", code], cwd=cwd, env=env, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that `make test` has built, or one compiled here.

    That takes minutes, because it is done in a folder of its own: in the checkout's, which has the objects, it would
    get in the way of any other build and of the C++ tests.
    """
    folder = os.environ.get("TORCHOPS_WHEEL_DIR")
    out = Path(folder) if folder else tmp_path_factory.mktemp("wheel")
    if not folder:
        command: list[str | Path] = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", ROOT]
        build = f"build-dir={tmp_path_factory.mktemp('build')}"
        result = subprocess.run([*command, "--wheel-dir", out, "-C", build], capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Python and site-packages of an environment that holds the wheel and, as a neighbour, the torch of this one."""
    root = tmp_path_factory.mktemp("venv")
    venv.create(root, with_pip=False)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(root), "platbase": str(root)}))
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site, wheel], check=True
    )
    here = Path(torch.__file__).parents[1]
    (site / "torch").symlink_to(here / "torch")
    (site / "what_torch_needs.pth").write_text(f"{here}\n")
    return root / "bin" / "python", site


@pytest.fixture
def doctored(clean: tuple[Path, Path], tmp_path: Path) -> Path:
    """A copy of the installed package, to be damaged; its parent goes first on the path."""
    package = tmp_path / "doctored" / "torchops"
    package.parent.mkdir()
    subprocess.run(["cp", "-r", clean[1] / "torchops", package], check=True)
    return package


def import_error(clean: tuple[Path, Path], path: Path, cwd: Path) -> tuple[str, str]:
    """The text and the type of the cause of the ImportError that `import torchops` must raise."""
    code = """
try:
    import torchops
except ImportError as error:
    print(type(error.__cause__).__name__, error, sep=chr(10))
else:
    raise SystemExit(f"no ImportError from {torchops.__file__}")
"""
    result = run_python(clean[0], code, cwd, path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Warning" not in result.stderr
    cause, text = result.stdout.strip().split("\n", 1)
    assert "pip install --no-build-isolation --force-reinstall --no-deps ." in text
    return text, cause


def test_wheel_is_for_any_python_and_this_torch_and_platform(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    cuda = re.findall('^cuda_version = "(.*?)"', archive.read("torchops/_core/_build_info.py").decode(), re.MULTILINE)[
        0
    ]
    torch_part, cuda_part = f"torch{TORCH_MINOR}".replace(".", ""), f"cu{cuda}".replace(".", "") if cuda else "cpu"
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    platforms = rf"({platform}|{platform.replace('linux', r'manylinux_2_[0-9]+')})"
    assert re.fullmatch(rf"torchops-[0-9.]+\+{torch_part}\.{cuda_part}-py3-none-{platforms}\.whl", wheel.name)


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert all(re.match(r"torchops(-[^/]+\.dist-info)?/", name) for name in names)
    for name in [
        "torchops/py.typed",
        "torchops/_core/_build_info.py",
        "torchops/lib/libtorchops.so",
        "torchops/include/torchops/ops/dense.h",
        "torchops/include/torchops/ops/export.h",
        "torchops/lib/cmake/torchops/torchopsConfig.cmake",
    ]:
        assert name in names
    assert ("torchops/lib/libtorchops_gemm.so" in names) == (".cu" in wheel.name)


def test_wheel_requires_the_torch_that_it_was_built_for(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (name for name in archive.namelist() if name.endswith("METADATA"))
    required = re.findall("^Requires-Dist: (.*)$", archive.read(metadata).decode(), re.MULTILINE)
    assert [line for line in required if "extra ==" not in line] == [f"torch=={TORCH_MINOR}.*"]


def test_runs_in_a_clean_environment_from_another_folder(clean: tuple[Path, Path], wheel: Path, tmp_path: Path) -> None:
    code = """
from importlib.metadata import version
import torch, torchops
x, w = torch.rand(3, 5), torch.rand(5, 5)
torch.testing.assert_close(torchops.dense(x, w), torch.sigmoid(x @ w.T))
assert torchops.softmax_(x) is x
print(torchops.__file__, torchops.cmake_prefix_path, torchops.__version__, version("torchops"), sep=chr(10))
"""
    result = run_python(clean[0], code, tmp_path)
    assert result.returncode == 0, result.stderr
    assert "Warning" not in result.stderr
    file, prefix, version, listed = result.stdout.split()
    assert Path(file).parent == Path(prefix) == clean[1] / "torchops"
    assert version == listed
    assert f"-{version}-" in wheel.name


def test_library_finds_torch_by_itself(clean: tuple[Path, Path], tmp_path: Path) -> None:
    library = clean[1] / "torchops" / "lib" / "libtorchops.so"
    result = run_python(clean[0], f"import ctypes; ctypes.CDLL({str(library)!r})", tmp_path)
    assert result.returncode == 0, result.stderr


def test_import_is_light(clean: tuple[Path, Path], tmp_path: Path) -> None:
    code = """
import sys, torch
before = set(sys.modules)
import torchops
print(*(set(sys.modules) - before))
"""
    result = run_python(clean[0], code, tmp_path)
    assert result.returncode == 0, result.stderr
    assert [name for name in result.stdout.split() if name.partition(".")[0] != "torchops"] == []


def test_other_torch_minor_is_an_import_error(clean: tuple[Path, Path], doctored: Path, tmp_path: Path) -> None:
    info = doctored / "_core" / "_build_info.py"
    info.write_text(info.read_text().replace(torch.__version__, "2.99.1"))
    text, _ = import_error(clean, doctored.parent, tmp_path)
    assert text.startswith(f"torchops: expected torch 2.99, got torch {torch.__version__} ")
    assert "built for torch 2.99.1 " in text
    assert 'pip install "torch==2.99.*"' in text


def test_other_torch_patch_is_fine(clean: tuple[Path, Path], doctored: Path, tmp_path: Path) -> None:
    info = doctored / "_core" / "_build_info.py"
    info.write_text(info.read_text().replace(torch.__version__, f"{TORCH_MINOR}.99"))
    result = run_python(clean[0], "import torchops; print(torchops.__file__)", tmp_path, doctored.parent)
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.strip()).parent == doctored


def test_missing_library_is_an_import_error(clean: tuple[Path, Path], doctored: Path, tmp_path: Path) -> None:
    library = doctored / "lib" / "libtorchops.so"
    library.unlink()
    text, _ = import_error(clean, doctored.parent, tmp_path)
    assert text.startswith(f"torchops: expected {library}, built for torch {torch.__version__} ")
    assert "got no such file" in text


def test_library_that_does_not_load_is_an_import_error(
    clean: tuple[Path, Path], doctored: Path, tmp_path: Path
) -> None:
    library = doctored / "lib" / "libtorchops.so"
    library.write_text("no library")
    text, cause = import_error(clean, doctored.parent, tmp_path)
    assert cause == "OSError"
    assert text.startswith(f"torchops: {library} does not load (")
    assert "file too short" in text or "invalid ELF header" in text
    assert f"built for torch {torch.__version__} " in text


def test_source_without_build_is_an_import_error(clean: tuple[Path, Path], doctored: Path, tmp_path: Path) -> None:
    (doctored / "_core" / "_build_info.py").unlink()
    text, _ = import_error(clean, doctored.parent, tmp_path)
    assert text.startswith("torchops: expected the compiled library beside the Python modules")
    assert str(doctored) in text

"""What CMake decides before it compiles: GPUs, CUTLASS, and the name of the wheel.

Torch, nvcc and CUTLASS are ones that only say what they are, so most cases need no CUDA and take about a second.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from source_distribution import unpack

from torchops._core import _build_info

ROOT = Path(__file__).parents[1]
# A cmake that pip installed is a Python module, hence reached through the Python that has it.
_PIP_CMAKE = Path(sysconfig.get_path("scripts")) / "cmake"
CMAKE = str(_PIP_CMAKE) if _PIP_CMAKE.exists() else "cmake"
_ASKED = (
    "TORCH_CUDA_ARCH_LIST",
    "CUDAARCHS",
    "CUDACXX",
    "CUDA_HOME",
    "CUDA_PATH",
    "CMAKE_ARGS",
    "TORCHOPS_CUTLASS_DIR",
)

Done = subprocess.CompletedProcess[str]


def run(*command: str | Path, cwd: Path | None = None, environment: dict[str, str] | None = None) -> Done:
    env = {name: value for name, value in os.environ.items() if name not in _ASKED and not name.startswith("SKBUILD")}
    env.update(environment or {})
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120)


CUTLASS, LEAST, END = re.findall(r'"(nvidia-cutlass>=([0-9.]+),<([0-9.]+))"', (ROOT / "pyproject.toml").read_text())[0]


def words(text: str) -> str:
    """CMake breaks the lines of some messages."""
    return " ".join(text.split())


# --- architectures ---------------------------------------------------------------------------------------------------


def architectures(tmp_path: Path, *definitions: str, **environment: str) -> Done:
    script = tmp_path / "architectures.cmake"
    script.write_text(
        "include(CudaArchitectures)\n"
        "torchops_cuda_architectures()\n"
        'message(STATUS "got ${CMAKE_CUDA_ARCHITECTURES} | ${TORCHOPS_CUDA_ARCHITECTURES} | ${TORCHOPS_SM90A} |'
        ' ${TORCHOPS_GEMM_ARCHITECTURES}.")\n'
    )
    return run(CMAKE, f"-DCMAKE_MODULE_PATH={ROOT / 'cmake'}", *definitions, "-P", script, environment=environment)


@pytest.mark.parametrize(
    ("entries", "for_cmake", "for_python", "hopper"),
    [
        ("", "80;90a-real", "8.0+PTX;9.0a", True),
        ("8.0;9.0", "80-real;90-real", "8.0;9.0", True),
        ("8.0 9.0", "80-real;90-real", "8.0;9.0", True),
        ("9.0+PTX", "90", "9.0+PTX", True),
        ("9.0a", "90a-real", "9.0a", True),
        ("9.0;9.0+PTX;9.0a", "90;90a-real", "9.0+PTX;9.0a", True),
        ("8.0,8.6+PTX", "80-real;86", "8.0;8.6+PTX", False),
        ("10.0f;12.0a+PTX", "100f-real;120a", "10.0f;12.0a+PTX", False),
        # The list that PyTorch itself is built with.
        (
            "7.5 8.0 8.6 9.0 10.0 12.0+PTX",
            "80-real;86-real;90-real;100-real;120",
            "8.0;8.6;9.0;10.0;12.0+PTX",
            True,
        ),
    ],
)
def test_torch_cuda_arch_list(tmp_path: Path, entries: str, for_cmake: str, for_python: str, hopper: bool) -> None:
    expected = f"got {for_cmake} | {for_python} | {'ON' if hopper else 'OFF'} | {'9.0a' if hopper else ''}."
    done = architectures(tmp_path, TORCH_CUDA_ARCH_LIST=entries)
    assert expected in done.stdout, done.stderr
    assert expected in architectures(tmp_path, f"-DTORCH_CUDA_ARCH_LIST={entries}").stdout
    assert ("7.5 in TORCH_CUDA_ARCH_LIST is skipped" in done.stdout) == ("7.5" in entries)


@pytest.mark.parametrize(
    ("entries", "for_cmake", "for_python", "hopper"),
    [
        ("80;90", "80;90", "8.0+PTX;9.0+PTX", True),
        ("80-real;90a-real", "80-real;90a-real", "8.0;9.0a", True),
        ("75;86-real;86-virtual", "86", "8.6+PTX", False),
        ("120-real", "120-real", "12.0", False),
    ],
)
def test_cmake_cuda_architectures(tmp_path: Path, entries: str, for_cmake: str, for_python: str, hopper: bool) -> None:
    expected = f"got {for_cmake} | {for_python} | {'ON' if hopper else 'OFF'} |"
    assert expected in architectures(tmp_path, f"-DCMAKE_CUDA_ARCHITECTURES={entries}").stdout
    assert expected in architectures(tmp_path, CUDAARCHS=entries).stdout


def test_torch_cuda_arch_list_comes_first(tmp_path: Path) -> None:
    done = architectures(tmp_path, "-DCMAKE_CUDA_ARCHITECTURES=90", TORCH_CUDA_ARCH_LIST="8.6")
    assert "got 86-real | 8.6 | OFF" in done.stdout


@pytest.mark.parametrize(
    ("definition", "message"),
    [
        ("TORCH_CUDA_ARCH_LIST=7.0;7.5+PTX", "TORCH_CUDA_ARCH_LIST: expected an architecture of 8.0 or newer"),
        ("TORCH_CUDA_ARCH_LIST=8.0;Hopper", 'expected entries like 8.0, 9.0a or 8.0+PTX, got "Hopper"'),
        ("CMAKE_CUDA_ARCHITECTURES=61", "CMAKE_CUDA_ARCHITECTURES: expected an architecture of 8.0 or newer"),
        ("CMAKE_CUDA_ARCHITECTURES=native", 'expected entries like 80, 90a-real or 80-virtual, got "native"'),
    ],
)
def test_architectures_that_are_none(tmp_path: Path, definition: str, message: str) -> None:
    done = architectures(tmp_path, f"-D{definition}")
    assert done.returncode != 0
    assert message in words(done.stderr)


# --- what can be built -----------------------------------------------------------------------------------------------


class Machine:
    """A Python with any torch, nvcc and CUTLASS."""

    def __init__(self, root: Path, torch: str = "2.13.0+cu130", nvcc: str = "13.0", cutlass: str | None = "4.2.0"):
        self.root = root
        cuda = re.search(r"\+cu(\d+)(\d)$", torch)
        self.write(
            "python/torch/__init__.py",
            f"class version: cuda = {f'{cuda[1]}.{cuda[2]}' if cuda else None!r}\n"
            f"class _C: _GLIBCXX_USE_CXX11_ABI = True\n__version__ = {torch!r}\n",
        )
        (root / "python/torch/include/torch/csrc/api/include").mkdir(parents=True)
        self.write("python/cutlass_library/__init__.py", "")
        if cutlass:
            parts = zip(("MAJOR", "MINOR", "PATCH"), cutlass.split("."), strict=True)
            self.write(
                "python/cutlass_library/source/include/cutlass/version.h",
                "".join(f"#define CUTLASS_{name} {number}\n" for name, number in parts),
            )
        compiler = self.write("nvcc", f"#!/bin/sh\necho 'Cuda compilation tools, release {nvcc}, V{nvcc}.88'\n")
        compiler.chmod(0o755)
        self.environment = {"PYTHONPATH": str(root / "python"), "CUDACXX": str(compiler)}

    def write(self, name: str, text: str) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def configure(self, *definitions: str) -> Done:
        options = (f"-DPython_EXECUTABLE={sys.executable}", *definitions)
        return run(CMAKE, "-S", ROOT, "-B", self.root / "build", *options, environment=self.environment)

    def name(self, cuda: str = "AUTO") -> tuple[Done, str]:
        """What WheelName.cmake says, and the local version that it finds."""
        output = self.root / "name"
        options = (f"-DPython_EXECUTABLE={sys.executable}", f"-DOUTPUT={output}", f"-DTORCHOPS_CUDA={cuda}")
        done = run(CMAKE, *options, "-P", ROOT / "cmake" / "WheelName.cmake", environment=self.environment)
        return done, output.read_text().split()[1] if output.exists() else ""

    def prepare(
        self, out: Path, options: dict[str, str] | None = None, *, source: Path = ROOT, kind: str = "wheel"
    ) -> Done:
        """Has the build backend write the metadata of what a frontend would build from `source`."""
        code = f"import build_backend as b; b.prepare_metadata_for_build_{kind}({str(out)!r}, {options or {}!r})"
        path = os.pathsep.join([str(source / "cmake"), self.environment["PYTHONPATH"]])
        return run(sys.executable, "-c", code, cwd=source, environment={**self.environment, "PYTHONPATH": path})

    def metadata(
        self, options: dict[str, str] | None = None, *, source: Path = ROOT, kind: str = "wheel"
    ) -> tuple[str, Message]:
        """Folder name and metadata of what a frontend would build from `source`."""
        out = self.root / "metadata"
        out.mkdir()
        done = self.prepare(out, options, source=source, kind=kind)
        assert done.returncode == 0, done.stderr
        (folder,) = out.iterdir()
        return folder.name, Parser().parsestr((folder / "METADATA").read_text())


def requirements(metadata: Message) -> list[str]:
    """Those of no extra."""
    return [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]


def test_auto_without_cutlass_warns_and_builds_for_the_cpu(tmp_path: Path) -> None:
    done = Machine(tmp_path, cutlass=None).configure()
    assert done.returncode == 0, done.stderr
    assert "CMake Warning" in done.stderr
    assert f'{sys.executable} -m pip install "{CUTLASS}"' in done.stderr
    assert "CMAKE_CUDA_COMPILER:" not in (tmp_path / "build" / "CMakeCache.txt").read_text()


@pytest.mark.parametrize(
    ("machine", "obstacle"),
    [
        ({"cutlass": None}, "the CUTLASS headers are not installed"),
        (
            {"cutlass": "4.1.0"},
            f"has CUTLASS 4.1.0, while the kernels are written for {LEAST} up to, not including, {END}",
        ),
        (
            {"cutlass": "5.0.0"},
            f"has CUTLASS 5.0.0, while the kernels are written for {LEAST} up to, not including, {END}",
        ),
        ({"nvcc": "12.8"}, "is CUDA 12.8, while torch was built with CUDA 13.0"),
        ({"nvcc": "unknown"}, "--version does not work"),
    ],
)
def test_on_is_an_error_and_auto_a_warning(tmp_path: Path, machine: dict[str, str | None], obstacle: str) -> None:
    made = Machine(tmp_path, **machine)  # type: ignore[arg-type]
    done, local = made.name("AUTO")
    assert (done.returncode, local) == (0, "torch213.cpu")
    assert "CMake Warning" in done.stderr
    assert obstacle in words(done.stderr)
    (tmp_path / "name").unlink()
    done, local = made.name("ON")
    assert (done.returncode != 0, local) == (True, "")
    assert f"TORCHOPS_CUDA=ON, but {obstacle}" in words(done.stderr).replace(f"{tmp_path / 'nvcc'} ", "").replace(
        f"{tmp_path / 'python/cutlass_library/source/include'} ", ""
    )
    done, local = made.name("OFF")
    assert (done.returncode, done.stderr, local) == (0, "", "torch213.cpu")


@pytest.mark.parametrize("page", ["README.md", "docs/install.md"])
def test_pages_name_the_supported_cutlass(page: str) -> None:
    assert set(re.findall(r"nvidia-cutlass[^`\"]*", (ROOT / page).read_text())) == {CUTLASS}


def test_cutlass_of_ones_own(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    done = machine.configure("-DTORCHOPS_CUDA=ON", f"-DTORCHOPS_CUTLASS_DIR={tmp_path}")
    assert done.returncode != 0
    assert "TORCHOPS_CUTLASS_DIR has no cutlass/version.h" in words(done.stderr)


def test_without_torch_says_what_to_do(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    done = run(CMAKE, "-S", ROOT, "-B", tmp_path / "build", f"-DPython_EXECUTABLE={python}")
    assert done.returncode != 0
    assert "No module named 'torch'" in done.stderr
    assert f'{python} -m pip install "torch>=2.11,<2.16" scikit-build-core cmake ninja' in done.stderr
    assert f"{python} -m pip install --no-build-isolation ." in done.stderr


def test_without_a_compiler_says_what_to_do(tmp_path: Path) -> None:
    missing = {"CXX": str(tmp_path / "none")}
    done = run(CMAKE, "-S", ROOT, "-B", tmp_path / "build", environment=missing)
    assert done.returncode != 0
    assert "torchops needs a C++20 compiler, and CMake found none that works: install g++" in words(done.stderr)


def test_without_scikit_build_core_a_frontend_says_what_to_do(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    done = run(python, "-c", "import build_backend", environment={"PYTHONPATH": str(ROOT / "cmake")})
    assert done.returncode == 1
    tools = f"install the build tools with: {python} -m pip install scikit-build-core cmake ninja"
    assert done.stderr.strip() == f"torchops: No module named 'scikit_build_core'; {tools}"


def test_without_torch_or_cmake_a_frontend_says_what_to_do(tmp_path: Path) -> None:
    """The metadata come first, so nothing has been compiled by then."""
    machine = Machine(tmp_path)
    machine.write("python/torch/__init__.py", "raise ImportError('no torch here')")
    done = machine.prepare(tmp_path)
    assert done.returncode == 1
    assert "cannot import torch (ImportError: no torch here)" in words(done.stderr)
    assert f"{sys.executable} -m pip install --no-build-isolation ." in done.stderr
    assert "Traceback" not in done.stderr
    machine.environment["CMAKE_EXECUTABLE"] = str(tmp_path / "none")
    done = machine.prepare(tmp_path)
    assert done.returncode == 1
    assert f"install the build tools with: {sys.executable} -m pip install cmake ninja" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("version", ["2.10.1", "2.16.0"])
def test_torch_outside_the_supported_range(tmp_path: Path, version: str) -> None:
    done, _ = Machine(tmp_path, torch=version).name()
    assert done.returncode != 0
    assert f"has torch {version}." in words(done.stderr)


# --- names -----------------------------------------------------------------------------------------------------------

VERSION = re.findall(r"project\(torchops VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text())[0]


def test_what_it_was_built_with_is_in_its_name(tmp_path: Path) -> None:
    versions = set()
    for number, (torch, nvcc, options, local) in enumerate(
        [
            ("2.13.0+cpu", "13.0", {}, "torch213.cpu"),
            ("2.15.0+cpu", "13.0", {}, "torch215.cpu"),
            ("2.13.0+cu130", "13.0", {}, "torch213.cu130"),
            ("2.13.0+cu128", "12.9", {}, "torch213.cu128"),
            ("2.13.0+cu130", "12.9", {}, "torch213.cpu"),
            ("2.13.0+cu130", "13.0", {"cmake.args": "-DTORCHOPS_CUDA=OFF"}, "torch213.cpu"),
        ]
    ):
        folder, metadata = Machine(tmp_path / str(number), torch, nvcc).metadata(options)
        assert folder == f"torchops-{VERSION}+{local}.dist-info"
        assert metadata["Version"] == f"{VERSION}+{local}"
        assert requirements(metadata) == [f"torch=={'.'.join(torch.split('.')[:2])}.*"]
        versions.add(metadata["Version"])
    assert len(versions) == 4


def test_editable_installs_too(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "2.13.0+cu130")
    folder, metadata = machine.metadata({"cmake.define.TORCHOPS_CUDA": "OFF"}, kind="editable")
    assert folder == f"torchops-{VERSION}+torch213.cpu.dist-info"
    assert requirements(metadata) == ["torch==2.13.*"]


def test_sdist_leaves_the_torch_open(tmp_path: Path) -> None:
    """An index lists the source distribution by its version, and installers refuse a wheel of another one."""
    code = f"import build_backend as b; print(b.build_sdist({str(tmp_path)!r}))"
    done = run(sys.executable, "-c", code, cwd=ROOT, environment={"PYTHONPATH": str(ROOT / "cmake")})
    assert done.returncode == 0, done.stderr
    assert (tmp_path / f"torchops-{VERSION}.tar.gz").exists()
    unpack(tmp_path / f"torchops-{VERSION}.tar.gz", tmp_path)
    source = tmp_path / f"torchops-{VERSION}"
    listed = Parser().parsestr((source / "PKG-INFO").read_text())
    assert listed["Version"] == VERSION
    assert requirements(listed) == ["torch<2.16,>=2.11"]
    assert listed.get_all("Dynamic") == ["Requires-Dist"]
    assert listed.get_all("Provides-Extra") == ["onnx", "bench"]
    assert listed["License-Expression"] == "BSD-3-Clause"
    assert list(source.rglob("*.png")) == []
    assert (source / "benchmarks" / "results").is_dir()
    folder, metadata = Machine(tmp_path / "machine").metadata(source=source)
    assert folder == f"torchops-{VERSION}.dist-info"
    assert requirements(metadata) == ["torch==2.13.*"]


def test_a_build_other_than_its_name_is_refused(tmp_path: Path) -> None:
    done = Machine(tmp_path, "2.13.0+cpu").configure(f"-DSKBUILD_PROJECT_VERSION_FULL={VERSION}+torch213.cu130")
    assert done.returncode != 0
    assert f"is to be torchops {VERSION}+torch213.cu130, but what is configured is {VERSION}+torch213.cpu" in words(
        done.stderr
    )


# --- with the CUDA compiler ------------------------------------------------------------------------------------------


@pytest.mark.skipif(not _build_info.cuda_version, reason="not a CUDA build")
def test_every_cuda_file_is_compiled_for_what_was_asked(tmp_path: Path) -> None:
    """The GEMM kernels for 9.0a alone, whichever way 9.0 was written, and without torch, whose updates don't concern
    them."""

    def commands(entries: str) -> dict[str, str]:
        build = (CMAKE, "-S", ROOT, "-B", tmp_path, f"-DPython_EXECUTABLE={sys.executable}", "-DTORCHOPS_CUDA=ON")
        done = run(*build, "-G", "Ninja", environment={"TORCH_CUDA_ARCH_LIST": entries})
        assert done.returncode == 0, done.stderr
        lines = json.loads((tmp_path / "compile_commands.json").read_text())
        return {line["file"]: line["command"] for line in lines if line["file"].endswith(".cu")}

    for entries, code in (
        ("7.5 8.0 8.6 9.0 10.0 12.0+PTX", {"sm_80", "sm_86", "sm_90", "sm_100", "compute_120", "sm_120"}),
        ("8.6", {"sm_86"}),
    ):
        compiled = commands(entries)
        gemm = {file for file in compiled if "/gemm/" in file}
        assert bool(gemm) == ("9.0" in entries)
        for file, command in compiled.items():
            found = set(re.findall(r",code=\[?([\w,]+)", command))
            assert {word for item in found for word in item.split(",")} == ({"sm_90a"} if file in gemm else code), file
            assert "-fvisibility=hidden" in command, file
            for part in ("torch/include", _build_info.torch_version):
                assert (part in command) == (file not in gemm), (file, part)

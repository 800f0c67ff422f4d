"""`python -m torchops`: what one pastes into a bug report."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from op_db import OPS

import torchops
from torchops._core import _build_info
from torchops._core.gpu_kernels import Gpu, code_for
from torchops._core.info import report

SETTINGS = """
import torch
from torchops._core.info import allows_tf32

matmul = torch.backends.cuda.matmul
found = [allows_tf32(torch.float32)]
for value in (True, False):
    matmul.allow_tf32 = value
    found.append(allows_tf32(torch.float32))
for value in ("medium", "highest"):
    torch.set_float32_matmul_precision(value)
    found.append(allows_tf32(torch.float32))
for value in ("tf32", "ieee"):
    matmul.fp32_precision = value
    found.append(allows_tf32(torch.float32))
assert found == [False, True, False, True, False, True, False], found
matmul.fp32_precision = "tf32"
assert not any(map(allows_tf32, (torch.float64, torch.float16, torch.bfloat16)))
"""


def python(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        cwd=Path(__file__).parent,
    )


def test_tf32_by_either_interface_of_torch() -> None:
    done = python(SETTINGS)
    assert done.returncode == 0, done.stderr


def command(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "torchops", *arguments], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_text() -> None:
    lines = command().splitlines()
    assert lines[0].startswith(f"torchops {torchops.__version__} (")
    built_for = f"torch {_build_info.torch_version}, cuda {_build_info.cuda_version or 'off'}, compiler "
    assert lines[1].startswith(f"built for:  {built_for}")
    assert lines[2].startswith(f"running on: torch {torch.__version__}, cuda {torch.version.cuda or 'off'}, python ")
    assert "  cpu" in lines
    (dense,) = (line for line in lines if line.strip().startswith("dense  "))
    above, header = lines[lines.index("kernels:") + 1 :][:2]
    marked = set()
    for column in re.finditer(r"\S+", header):
        if dense[column.start()] == "x":
            marked.add(above[column.start() :].split(" ")[0] + column.group())
    assert marked >= {"CPU", "Meta", "Autograd", "AutocastCPU", "AutocastCUDA", "FuncTorchBatched"}
    assert "ADInplaceOrView" not in marked
    assert max(map(len, lines[3:])) <= 120


def test_into_a_pipe_that_is_closed() -> None:
    """As by `| head -1`, which may leave before all is written."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as stdout:
        program = [sys.executable, "-m", "torchops"]
        done = subprocess.run(program, stdout=stdout, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parent)
    assert done.returncode == 1
    assert "Error" not in done.stderr


def test_width_with_all_keys_of_the_library() -> None:
    """Also on a machine whose build has one more column."""
    facts = torchops.info()
    for keys in facts["dispatch_keys"].values():
        keys.append("CUDA")
    kernels = report(facts).partition("kernels:\n")[2].splitlines()
    assert len(kernels) == 2 + len(facts["dispatch_keys"])
    assert max(map(len, kernels)) <= 120


def test_json_is_the_dictionary() -> None:
    facts = json.loads(command("--json"))
    here = torchops.info()
    for varies in ("kernel_path", "devices"):
        assert type(facts.pop(varies)) is type(here.pop(varies))
    assert facts == here


def test_dispatch_keys() -> None:
    keys = torchops.info()["dispatch_keys"]
    for case in OPS:
        everywhere = "CompositeExplicitAutograd" in keys[case.qualified]
        assert {"Meta", "Autograd", "FuncTorchBatched"} <= set(keys[case.qualified])
        assert ("CPU" in keys[case.qualified]) != everywhere
        assert ("ADInplaceOrView" in keys[case.qualified]) == (case.mutates is not None)
        in_python = case.name == "triangle_attention"
        compiled = bool(_build_info.cuda_version) and not everywhere
        assert ("CUDA" in keys[case.qualified]) == (in_python or compiled)


@pytest.mark.parametrize(
    ("capability", "architectures", "code"),
    [
        ((9, 0), ["8.0+PTX", "9.0a"], "machine code of 9.0a"),
        ((8, 0), ["8.0+PTX", "9.0a"], "machine code of 8.0"),
        ((8, 9), ["8.0+PTX", "9.0a"], "machine code of 8.0"),
        ((8, 9), ["8.0", "8.6", "9.0"], "machine code of 8.6"),
        ((10, 0), ["8.0+PTX", "9.0a"], "PTX of 8.0"),
        ((12, 0), ["8.0+PTX", "10.0+PTX"], "PTX of 10.0"),
        ((10, 3), ["10.0f"], "machine code of 10.0f"),
        ((10, 3), ["10.0a"], None),
        ((12, 0), ["10.0f"], None),
        ((7, 5), ["8.0+PTX", "9.0a"], None),
        ((10, 0), ["9.0a"], None),
        ((9, 0), ["9.0a+PTX"], "machine code of 9.0a"),
        ((10, 0), ["9.0a+PTX"], None),
        ((9, 0), [], None),
    ],
)
def test_what_a_gpu_runs(capability: tuple[int, int], architectures: list[str], code: str | None) -> None:
    assert code_for(capability, architectures) == code
    gpu = Gpu(capability, architectures, [], True)
    assert gpu.facts["code"] == (code or "none")
    assert ("dense, gate, glu" in gpu.kernels) == (code is not None)


DEFAULT = (["8.0+PTX", "9.0"], ["9.0a"], True)


def test_each_operator_on_hopper() -> None:
    gpu = Gpu((9, 0), *DEFAULT)
    assert gpu.needs == []
    assert gpu.kernels["dense, gate, glu"].startswith("fused kernels in 16 bits and float32 (TF32: dense alone), else")
    assert gpu.kernels["square_matmul_"].startswith("in place with no scratch")
    assert gpu.kernels["transition"].startswith("one kernel in 16 bits up to 128 features")
    assert gpu.kernels["triangle_attention"].startswith("one forward kernel in 16 bits")
    assert max(len(f"    {name + ':':20}{text}") for name, text in gpu.facts.items()) <= 120


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0)])
def test_each_operator_on_others(capability: tuple[int, int]) -> None:
    gpu = Gpu(capability, *DEFAULT)
    assert gpu.needs == []
    assert gpu.kernels["dense, gate, glu"].startswith("fused kernels in 16 bits and float32 without TF32, else")
    assert gpu.kernels["transition"] == "panels: layer_norm, glu, a matmul"
    assert gpu.kernels["square_matmul_"] == "panels of rows: a copy, then a matmul"
    assert gpu.kernels["*_scaled"].startswith("none") == (capability == (8, 0))
    assert gpu.kernels.keys() == Gpu((9, 0), *DEFAULT).kernels.keys()


@pytest.mark.parametrize(
    ("gpu", "needs"),
    [
        (Gpu((9, 0), [], [], True), ["a build with CUDA: see docs/install.md"]),
        (Gpu((9, 0), ["8.0+PTX"], [], True), ["a build with 9.0 in TORCH_CUDA_ARCH_LIST"]),
        (Gpu((8, 9), ["9.0"], ["9.0a"], True), ["a build with 8.9 in TORCH_CUDA_ARCH_LIST"]),
        (Gpu((7, 5), ["8.0+PTX"], [], True), ["a GPU of compute capability 8.0 or newer"]),
        (Gpu((9, 0), *DEFAULT[:2], False), ["Triton, for triangle_attention"]),
    ],
)
def test_what_a_gpu_needs_for_more(gpu: Gpu, needs: list[str]) -> None:
    assert gpu.needs == needs
    assert gpu.facts["more with"] == needs[0]


def test_a_build_without_kernels_has_attention() -> None:
    assert Gpu((9, 0), [], [], True).kernels.keys() == {"all but triangle_attention", "triangle_attention"}
    assert Gpu((9, 0), [], [], False).kernels["triangle_attention"] == "PyTorch's operators, in panels of rows"


PRETENDED = """
import torch, torchops
from torchops._core.devices import capability, shared_memory
print(*torch.ops.myops._pretended_device(), *capability(0), shared_memory(0))
"""


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("8.0", f"8 0 {163 << 10} {164 << 10} 8 0 {163 << 10}"),
        ("8.9", f"8 9 {99 << 10} {100 << 10} 8 9 {99 << 10}"),
    ],
)
def test_a_pretended_gpu(name: str, printed: str) -> None:
    """Its properties come from the variable, so the choice among kernels can be tested on a GPU of another kind."""
    done = python(PRETENDED, TORCHOPS_PRETEND_CAPABILITY=name)
    assert done.stdout.strip() == printed, done.stderr


def test_a_gpu_that_cannot_be_pretended() -> None:
    done = python(PRETENDED, TORCHOPS_PRETEND_CAPABILITY="7.5")
    expected = "ValueError: TORCHOPS_PRETEND_CAPABILITY: expected 8.0, 8.6, 8.9, 9.0, 10.0 or 12.0, got 7.5"
    assert expected in done.stderr


def test_says_for_which_architectures_gemm_kernels_exist() -> None:
    assert torchops.info()["gemm_architectures"] == [
        entry for entry in _build_info.gemm_architectures.split(";") if entry
    ]
    facts = {**torchops.info(), "gemm_architectures": ["9.0a"]}
    assert "GEMM code:  9.0a" in report(facts).splitlines()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_devices() -> None:
    facts = torchops.info()
    gpus = [device for device in facts["devices"] if device["device"] != "cpu"]
    assert [gpu["device"] for gpu in gpus] == [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    assert gpus[0]["name"] == torch.cuda.get_device_name(0)
    if _build_info.cuda_version:
        assert facts["cuda_architectures"]
        assert gpus[0]["code"].startswith(("machine code of", "PTX of"))
        has_gemm = gpus[0]["capability"] == "9.0" and facts["gemm_architectures"] == ["9.0a"]
        assert gpus[0]["square_matmul_"].startswith("in place") == has_gemm
        assert f"  {gpus[0]['device']}" in report(facts)


def test_a_failing_import_says_why(tmp_path: Path) -> None:
    """The command needs the package; what it prints instead is the reason, with the versions."""
    package = Path(torchops.__file__).parent
    copy = tmp_path / "torchops"
    # Of the builds of a merged wheel, the one below is left.
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__", "builds"))
    info = copy / "_core" / "_build_info.py"
    info.write_text(Path(_build_info.__file__).read_text().replace(_build_info.library, "gone.so"))
    # Other finders, such as that of an editable install, come before the path.
    program = (
        f"import runpy, sys; sys.path.insert(0, {str(tmp_path)!r}); "
        "own = [f for f in sys.meta_path if getattr(f, '__module__', '').startswith('_frozen_importlib')]; "
        "sys.meta_path[:] = own; "
        "runpy.run_module('torchops', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode != 0
    assert done.stdout == ""
    reason = done.stderr.splitlines()[-1]
    assert reason.startswith(f"ImportError: torchops: expected {copy / 'gone.so'}, built for ")
    assert f"torch {_build_info.torch_version}" in reason

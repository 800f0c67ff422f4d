"""The PTX example: it assembles with and without a GPU, and on one it computes the sigmoid."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import ptx_driver
import ptx_errors
import ptx_sigmoid
import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples/ptx"
EDITED = FOLDER / "sigmoid_tanh.ptx"
PAGE = ROOT / "docs/ptx.md"
RESULTS = ROOT / "benchmarks/results/nvidia-h100-80gb-hbm3/ptx.json"
needs_gpu = pytest.mark.skipif(not ptx_driver.available(), reason="needs a GPU and cuda-bindings")
dtypes = pytest.mark.parametrize("dtype", ptx_sigmoid.ENTRIES, ids=str)


def _tool(name: str) -> str:
    """The compiler's `name`: on the path, in CUDA_HOME, in NVIDIA's wheels, or the ptxas that comes with triton."""
    folders = [os.environ["PATH"], os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin")]
    nvidia = importlib.util.find_spec("nvidia")
    for root in (nvidia and nvidia.submodule_search_locations) or ():
        folders += map(str, Path(root).glob("cu*/bin"))
    triton = importlib.util.find_spec("triton")
    if triton and triton.origin:
        folders.append(str(Path(triton.origin).parent / "backends/nvidia/bin"))
    found = shutil.which(name, path=os.pathsep.join(folders))
    if not found:
        pytest.skip(f"needs {name} of the CUDA toolkit")
    return found


def _assemble(ptx: str, arch: str, folder: Path) -> None:
    source = folder / "source.ptx"
    source.write_text(ptx)
    command = [_tool("ptxas"), f"-arch={arch}", str(source), "-o", str(folder / "out.cubin")]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What `make ptx` makes of sigmoid.cu."""
    folder = tmp_path_factory.mktemp("ptx")
    nvcc, ptxas = _tool("nvcc"), _tool("ptxas")
    path = os.pathsep.join([str(Path(nvcc).parent), str(Path(ptxas).parent), os.environ["PATH"]])
    command = ["make", "-C", str(ROOT), "ptx", f"PTX_BUILD={folder}"]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PATH": path})
    assert run.returncode == 0, run.stderr
    assert (folder / "sigmoid.cubin").stat().st_size > 0
    assert (folder / "sigmoid_tanh.cubin").stat().st_size > 0
    return (folder / "sigmoid.ptx").read_text()


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_edited_file_assembles(arch: str, tmp_path: Path) -> None:
    _assemble(EDITED.read_text(), arch, tmp_path)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_compiled_file_assembles(arch: str, compiled: str, tmp_path: Path) -> None:
    _assemble(compiled, arch, tmp_path)


@pytest.mark.parametrize("instruction", [*ptx_errors.INSTRUCTIONS, ptx_errors.EX2_RCP], ids=lambda i: i.name)
def test_measured_instructions_assemble(instruction: ptx_errors.Instruction, tmp_path: Path) -> None:
    _assemble(instruction.ptx, "sm_90", tmp_path)


def _entries(ptx: str) -> dict[str, list[str]]:
    found = re.findall(r"\.entry (\w+)\((.*?)\)", ptx, re.DOTALL)
    return {name: re.findall(r"\.param (\.\w+)", parameters) for name, parameters in found}


def test_edited_file_replaces_the_compiled_one(compiled: str) -> None:
    """Same entries with the same parameters and vector accesses; another way to compute."""
    ours, theirs = _entries(EDITED.read_text()), _entries(compiled)
    assert ours == {name: theirs[name] for name in ours}
    assert set(ours) == set(ptx_sigmoid.ENTRIES.values())
    for ptx in (EDITED.read_text(), compiled):
        assert re.findall(r"(?:ld\.global\.nc|st\.global)\.v4\.\w+", ptx)
    assert not re.findall(r"(?:ex2|rcp)\.approx\S* %", EDITED.read_text())
    assert "tanh.approx" not in compiled


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_error_measure(dtype: torch.dtype) -> None:
    """Rounding to nearest is off by half an ulp, and one wrong result among all is found."""

    def scan(function: ptx_errors.Function) -> ptx_errors.Errors:
        inputs = ptx_errors.patterns(dtype, torch.device("cpu"), chunk=2**12)
        return ptx_errors.largest_errors(function, torch.exp2, inputs, dtype)

    def exact(x: Tensor) -> Tensor:
        return torch.exp2(x.double()).to(dtype)

    right = scan(exact)
    # On the CPU float64 becomes float16 by way of float32, which rounds twice.
    assert 0.49 < right.ulp < 0.501
    assert right.subnormal_ulp is not None
    assert right.subnormal_ulp < 0.501
    assert right.special == 0

    eps = torch.finfo(dtype).eps
    wrong = scan(lambda x: torch.where(x == 1, 2 + 6 * eps, exact(x).double()))
    assert (wrong.ulp, wrong.at, wrong.special) == (3.0, 1.0, 0)
    assert wrong.relative == pytest.approx(3 * eps)
    assert scan(lambda x: torch.where(x.isnan(), 0.0, exact(x).double())).special == int(_nans(dtype))
    assert scan(lambda x: torch.where(exact(x).isinf(), torch.finfo(dtype).max, exact(x).double())).special > 0


def _nans(dtype: torch.dtype) -> int:
    return 2 * (round(1 / torch.finfo(dtype).eps) - 1)


def test_wrong_arguments() -> None:
    module: Any = None
    with pytest.raises(TypeError, match=re.escape("expected x of type float32 or bfloat16, got torch.float64")):
        ptx_sigmoid.sigmoid(module, torch.ones(3, dtype=torch.float64))
    for x in (torch.ones(4, 4).T[1:], torch.ones(9)[1:]):
        with pytest.raises(ValueError, match="expected x contiguous and on a multiple of 16 bytes"):
            ptx_sigmoid.sigmoid(module, x)


def test_page_shows_the_committed_figures() -> None:
    tables = ptx_errors.table(json.loads(RESULTS.read_text())).strip().split("\n\n")
    assert len(tables) == 3
    assert [t for t in tables if t not in PAGE.read_text()] == []


def test_page_quotes_the_files(compiled: str) -> None:
    """Every line of PTX on the page is, with the registers renamed, a line of the edited or the compiled file."""

    def normal(text: str) -> set[str]:
        lines = (re.sub(r"%\w+(\.[xyz])?|\$\w+|\[[^]]*\]", "_", line.split("//")[0]) for line in text.splitlines())
        return {" ".join(line.split()) for line in lines}

    known = normal(EDITED.read_text()) | normal(compiled)
    quoted = normal("\n".join(re.findall(r"```ptx\n(.*?)```", PAGE.read_text(), re.DOTALL)))
    assert len(quoted) >= 10
    assert quoted - known - {""} == set()


@pytest.fixture(params=["compiled", "edited"])
def module(request: pytest.FixtureRequest) -> ptx_driver.Module:
    return ptx_driver.Module(EDITED.read_text() if request.param == "edited" else request.getfixturevalue("compiled"))


@needs_gpu
@dtypes
def test_cuda_sigmoid(module: ptx_driver.Module, dtype: torch.dtype) -> None:
    """Sizes around the ends of a vector and of a block. tanh.approx is good to about 2^-11."""
    for size in (0, 1, 3, 4, 5, 7, 8, 9, 2047, 2048, 2049, 1_000_003):
        x = (8 * torch.randn(size, device="cuda")).to(dtype)
        got = ptx_sigmoid.sigmoid(module, x)
        torch.testing.assert_close(got.double(), torch.sigmoid(x.double()), rtol=2**-8, atol=1e-3)


@needs_gpu
def test_cuda_stream_and_graph(module: ptx_driver.Module) -> None:
    """The launch follows torch's current stream, and a graph captures it."""
    x = torch.randn(4096, device="cuda")
    expected = ptx_sigmoid.sigmoid(module, x + 1)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        later = ptx_sigmoid.sigmoid(module, x + 1)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(later, expected)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ptx_sigmoid.sigmoid(module, x)
    x += 1
    graph.replay()
    assert torch.equal(y, expected)


@needs_gpu
def test_cuda_errors_name_the_line() -> None:
    broken = EDITED.read_text().replace("tanh.approx.f32 %v2", "tanh.exact.f32 %v2")
    line = next(i for i, text in enumerate(broken.splitlines(), 1) if "tanh.exact" in text)
    with pytest.raises(RuntimeError, match=rf"CUDA_ERROR_INVALID_PTX\n(.*\n)*.*line {line}"):
        ptx_driver.Module(broken)
    with pytest.raises(ValueError, match="expected tensors on cuda:0, got one on cpu"):
        ptx_driver.Module(EDITED.read_text()).launch("sigmoid_f32", 1, 32, [torch.ones(4)])

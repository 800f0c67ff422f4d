"""What a CUDA build must have and can show without a GPU: the kernels, and tensors of device cuda that hold no data."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from op_db import OPS, OpCase
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from torchops._core import _build_info, library

pytestmark = pytest.mark.skipif(not _build_info.cuda_version, reason="not a CUDA build")

_ROOT = Path(__file__).parents[1]
_CMAKE = (_ROOT / "CMakeLists.txt").read_text()
_STEMS = re.findall(r"set\(TORCHOPS_OPS(.*?)\)", _CMAKE, re.DOTALL)[0].split()
_GEMM = library.prefix / "lib" / "libtorchops_gemm.so"
CASES = [case for case in OPS if case.name.removeprefix("add_").removesuffix("_") in _STEMS]


def _has_kernel(name: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


def test_built_for_the_cuda_of_this_torch() -> None:
    assert _build_info.cuda_version == torch.version.cuda


def _operators(pattern: str) -> list[str]:
    return [name for name in torch._C._dispatch_get_all_op_names() if re.match(pattern, name)]


def _stem(name: str) -> str:
    """Of a public operator, whose overload has a stem of its own."""
    packet, _, overload = name.removeprefix("myops::").partition(".")
    return overload or packet.removeprefix("add_").removesuffix("_")


def test_every_listed_operator_has_a_kernel() -> None:
    public = [name for name in _operators("myops::[^_]") if _stem(name) in _STEMS]
    assert {_stem(name) for name in public} == set(_STEMS)
    assert [name for name in public if not _has_kernel(name, "CUDA")] == []


def test_private_operators_have_the_same_backends_as_the_public_ones() -> None:
    others = (
        "saved_copy|linear$|kernel_path|only_candidate|pretended_device|dense_on_path|keeps_products|"
        "triangle_(attention|rows)"
    )
    private = _operators(rf"myops::_(?!{others})")
    assert private
    stems = (
        *("dense", "gate", "glu", "layer_norm", "softmax", "triangle_multiplicative_update", "transition"),
        "outer_product_mean",
    )
    for name in private:
        beneath = name.removeprefix("myops::_").removeprefix("add_")
        public = next(stem for stem in stems if beneath.startswith(stem))
        composite = _has_kernel(name, "CompositeExplicitAutograd")
        assert composite or _has_kernel(name, "CUDA") == (public in _STEMS), name
        assert composite or _has_kernel(name, "CPU"), name
        assert _has_kernel(name, "Meta")


@pytest.mark.parametrize("op_case", CASES, ids=lambda case: case.name)
def test_fake_tensors_on_cuda(op_case: OpCase) -> None:
    for sample in op_case.samples:
        args, kwargs = sample(torch.bfloat16, "cpu")
        expected = op_case.pure(*args, **kwargs)
        with FakeTensorMode():

            def fake(t: Tensor) -> Tensor:
                return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda")

            args, kwargs = tree_map_only(Tensor, fake, (args, kwargs))
            out = op_case.op(*args, **kwargs)
            out = args[op_case.mutates] if op_case.mutates is not None else out
        assert out.device.type == "cuda", sample.name
        assert (out.shape, out.dtype) == (expected.shape, expected.dtype), sample.name


def _copy_of_the_sources(to: Path) -> Path:
    for name in ("CMakeLists.txt", "pyproject.toml"):
        shutil.copy(_ROOT / name, to)
    for name in ("cmake", "src"):
        shutil.copytree(_ROOT / name, to / name)
    return to / "src" / "cuda"


def _insert(file: Path, text: str, before: str) -> None:
    source = file.read_text()
    assert source.count(before) == 1
    file.write_text(source.replace(before, text + "\n" + before))


def _configure(folder: Path) -> set[str]:
    """Returns the kernels of the copy, as "operation, element, tiling"."""
    options = ("-DTORCHOPS_CUDA=ON", "-DTORCH_CUDA_ARCH_LIST=9.0a", "-DTORCHOPS_WERROR=ON")
    _run("-S", folder, "-B", folder / "build", "-G", "Ninja", f"-DPython_EXECUTABLE={sys.executable}", *options)
    return set(re.findall(r"TORCHOPS_INSTANCE\((.*)\)", (folder / "build/gemm/instances.def").read_text()))


def _run(*arguments: object) -> None:
    done = _cmake(*arguments)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def _cmake(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*_cmake_command(), *map(str, arguments)], capture_output=True, text=True)


def test_gemm_kernels_need_nothing_of_torch() -> None:
    """So one library of them serves the builds for several torches."""
    needed = re.findall(r"NEEDED.*\[(.*)\]", subprocess.check_output(["readelf", "-d", _GEMM], text=True))
    assert f"libcudart.so.{_build_info.cuda_version.partition('.')[0]}" in needed
    assert [name for name in needed if re.match("libtorch|libc10|libpython", name)] == []


def test_gemm_kernels_of_other_sources_or_options_are_refused(tmp_path: Path) -> None:
    gemm = _copy_of_the_sources(tmp_path) / "gemm"

    def takes(kernels: str, name: str) -> bool:
        options = (f"-DTORCHOPS_GEMM_LIBRARY={_GEMM}", f"-DTORCHOPS_KERNELS={kernels}", "-DTORCHOPS_CUDA=ON")
        place = ("-S", tmp_path, "-B", tmp_path / name, "-G", "Ninja", f"-DPython_EXECUTABLE={sys.executable}")
        done = _cmake(*place, *options)
        refused = f"TORCHOPS_GEMM_LIBRARY={_GEMM}: expected one that was built from these sources" in done.stderr
        assert (done.returncode != 0) == refused, done.stderr[-3000:]
        return not refused

    (fitting,) = (kernels for kernels in ("FULL", "REDUCED") if takes(kernels, kernels))
    assert not list((tmp_path / fitting / "gemm").glob("*.cu"))
    with (gemm / "problem.h").open("a") as header:
        header.write("// changed\n")
    assert not takes(fitting, "changed")


def test_an_activation_and_a_tiling_are_a_line_each(tmp_path: Path) -> None:
    """The lines of docs/adding_an_operator.md in a copy of the sources: CMake finds the kernel, nvcc compiles it."""
    page = (_ROOT / "docs" / "adding_an_operator.md").read_text()
    lines = dict(re.findall(r"```cpp\n// (\S+)\n(.*?)```", page, re.DOTALL))
    family = re.search(r"`(template <class F> using TanhFamily.*?;)`", page)
    assert family is not None
    cuda = _copy_of_the_sources(tmp_path)
    _insert(cuda / "base" / "activation.cuh", lines["base/activation.cuh"], "/// F(z) in the type")
    _insert(cuda / "gemm" / "table.def", lines["gemm/table.def"], "#undef TORCHOPS_ELEMENT")
    _insert(cuda / "gemm" / "sm90" / "products" / "ops.cuh", family[1] + "\n", "}  // namespace torchops::cuda::gemm")
    assert "TanhLinear, kBFloat16, k256x64" in _configure(tmp_path)
    unit = "CMakeFiles/torchops_gemm.dir/gemm/TanhLinear_k256x64_kBFloat16.cu.o"
    _run("--build", tmp_path / "build", "--target", unit)


def test_predictions_are_those_that_are_fitted() -> None:
    """The formulas of src/cuda/gemm/times.cpp, beside those of benchmarks/candidates/model.py."""
    program = next(_ROOT.glob("build/*/**/test/cpp/plan_test"), None)
    if program is None:
        pytest.skip("this build has no C++ tests")
    numpy = pytest.importorskip("numpy")
    sys.path.insert(0, str(_ROOT))
    from benchmarks.candidates import model, table

    random = numpy.random.default_rng(0)
    rule = random.integers(0, 3, 500)
    m, n, k = (numpy.exp(random.uniform(0, numpy.log(most), 500)).astype(int) for most in (1 << 20, 8192, 8192))
    sizes = model.Sizes(m.astype(float), n.astype(float), k.astype(float), rule, numpy.zeros(500, bool))
    products = numpy.where(rule == 2, 2, 1)
    given = zip(m, n, k, products, (rule > 0).astype(int), strict=True)
    lines = "".join(" ".join(map(str, line)) + "\n" for line in given)
    got = subprocess.run([program, "times"], input=lines, capture_output=True, text=True, check=True).stdout
    by_size = numpy.array([line.split() for line in got.splitlines()], float)
    times = (_ROOT / "src/cuda/gemm/measured_times.h").read_text()

    def numbers(text: str) -> list[float]:
        return [float(number) for number in re.findall(r"[-\d.e]+", text)]

    def without_ones(values: list[float], *ones: int) -> Any:
        return numpy.array([value for i, value in enumerate(values) if i not in ones])

    of_cublas = numbers(times.split("kCublasTime")[1].split("}};")[0])
    predicted = [model.cublas(sizes, without_ones(of_cublas, 0, 4, 17, 26))]
    few_rows = re.search(r"kFewRowsTime\{(.*)\};", times)
    assert few_rows is not None
    predicted.append(model.few_rows(sizes, numpy.array(numbers(few_rows[1]))))
    named = {(c.way, c.tiling): c for c in table.CANDIDATES}
    tiles = re.findall(r"\{of\(Way::(\w+), \w+::(\w+)\), (.*)\},", times)
    for way, tiling, text in tiles:
        rows, columns, ctas, *coefficients = numbers(text)
        candidate = named[way, tiling]
        assert (candidate.rows, candidate.columns) == (rows, columns)
        x = without_ones(coefficients, 8, 12, 16)
        predicted.append(model.of_tiles(candidate, int(ctas))(sizes, x))
    assert len(tiles) > 20
    numpy.testing.assert_allclose(by_size, numpy.stack(predicted, 1), rtol=1e-6)


def test_a_tiling_and_an_element_are_a_line_for_every_family(tmp_path: Path) -> None:
    table = _copy_of_the_sources(tmp_path) / "gemm" / "table.def"
    operations = re.findall(
        r"^TORCHOPS_OPERATION\((\w+), \w+, \w+, (\w+)<.*>, \((.*?)\), \S+\)$", table.read_text(), re.MULTILINE
    )
    tilings = re.findall(
        r"^(TORCHOPS_\w*TILING)\((\w+), \((.*?)\), \((.*?)\), (.*)\)$", table.read_text(), re.MULTILINE
    )
    assert len(operations) > 30
    added, expected = ["TORCHOPS_ELEMENT(kAdded, cutlass::float_e5m2_t)"], set()
    for family in {family for _, family, _ in operations}:
        macro, _, _, elements, numbers = next(tiling for tiling in tilings if family in tiling[2].split(", "))
        added.append(f"{macro}(kAdded{family}, ({family}), ({elements}, kAdded), {numbers})")
        for operation in (operation for operation in operations if operation[1] == family):
            both = {*operation[2].split(", ")} & {*elements.split(", ")} | {"kAdded"}
            expected |= {f"{operation[0]}, {element}, kAdded{family}" for element in both}
    table.write_text(re.sub(r"(OPERATION\(.*>, \(.*?)\)", r"\1, kAdded)", table.read_text()))
    _insert(table, "\n".join(added), "#undef TORCHOPS_ELEMENT")
    kernels = _configure(tmp_path)
    assert {kernel for kernel in kernels if "kAdded" in kernel} == expected


def _cmake_command() -> list[str]:
    import cmake

    return [str(Path(cmake.CMAKE_BIN_DIR) / "cmake")]

"""What a release is made with, beside the wheels that test_packaging.py examines."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from source_distribution import unpack

ROOT = Path(__file__).parents[1]


def test_version_has_its_section_in_the_changelog() -> None:
    version = re.findall(r"project\(torchops VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text())[0]
    headings = re.findall(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert version in headings


@pytest.mark.parametrize("repository", ["", "owner/torchops"], ids=["unknown", "known"])
def test_an_index_can_show_the_readme(repository: str, tmp_path: Path) -> None:
    """Links and pictures lead to the repository, where that is known, as it is to what is built from the sdist."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GITHUB_")}
    environment |= {"GITHUB_REPOSITORY": repository, "PYTHONPATH": str(ROOT / "cmake")}
    build = [sys.executable, "-c", f"import build_backend; build_backend.build_sdist({str(tmp_path)!r})"]
    done = subprocess.run(build, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("*.tar.gz")
    unpack(archive, tmp_path)
    information = tmp_path / archive.name.removesuffix(".tar.gz") / "PKG-INFO"
    header, _, readme = information.read_text().partition("\n\n")
    lead = re.findall(r"\]\((?!#)([^)\s]+)\)", readme)
    urls = re.findall("^Project-URL: (.*), (.*)$", header, re.MULTILINE)
    if not repository:
        assert readme == (ROOT / "README.md").read_text()
        assert not urls
        return
    assert all(re.match("https?://", address) for address in lead)
    version = re.findall("^Version: (.*)$", header, re.MULTILINE)[0]
    prefix = f"https://github.com/{repository}"
    assert {kind for kind, _ in urls} == {"Source", "Documentation", "Changelog", "Issues"}
    for address in (*lead, *(url for _, url in urls)):
        kind, _, path = address.removeprefix(f"{prefix}/").partition(f"/v{version}/")
        if kind in ("raw", "blob"):
            assert (ROOT / path.partition("#")[0]).exists(), address
            assert (kind == "raw") == path.endswith(".png")
    again = [sys.executable, "-c", "import build_backend; print(build_backend._address())"]
    del environment["GITHUB_REPOSITORY"]
    done = subprocess.run(again, cwd=information.parent, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == prefix


def test_a_wheel_from_a_container_is_the_one_asked_for() -> None:
    asked = ["TORCH_VERSION=2.12.0", "CUDA=ON", "KERNELS=REDUCED", "GEMM_LIBRARY=dist/lib/libtorchops_gemm.so"]

    def recipe(target: str, *more: str) -> str:
        command = ["make", "--dry-run", target, *asked, *more]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    inside = shlex.split(recipe("wheel", "CONTAINER=docker"))
    assert set(asked) <= set(inside[inside.index("wheel-here") :])
    here = recipe("wheel-here")
    assert "torch==2.12.0" in here
    for option in asked[1:]:
        assert f"-C cmake.define.TORCHOPS_{option.replace('=dist', f'={ROOT}/dist')}" in here
    assert "make gemm-here" in recipe("gemm", "CONTAINER=docker")
    assert "TORCHOPS_CUDA=ON" in recipe("gemm-here", "CUDA=AUTO")


def test_instrumented_builds_are_what_their_tests_import(tmp_path: Path) -> None:
    """And not the sources in the folder where make runs, nor an editable install; what tests start, too."""
    package = tmp_path / "site" / "torchops"
    package.mkdir(parents=True)
    for module in ("__init__.py", "nn.py"):
        (package / module).touch()
    probe = tmp_path / "test_probe.py"
    probe.write_text(f"""
import subprocess, sys
import benchmarks, torchops
def test_probe():
    assert torchops.__path__ == [{str(package)!r}]
    program = "import torchops, torchops.nn; print(*torchops.__path__, torchops.nn.__file__)"
    printed = subprocess.check_output([sys.executable, "-c", program], cwd={str(ROOT)!r}, text=True)
    assert printed.split() == [{str(package)!r}, {str(package / "nn.py")!r}]
""")
    environment = Path(sys.executable).parents[1]
    rule = f"probe: ; @$(call PYTEST_IN_SITE,{tmp_path}) -q --config-file=/dev/null --rootdir={tmp_path} {probe}"
    command = ["make", "--silent", f"VENV={environment}", "--eval", rule, "probe"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_workflow_builds_the_wheels_of_the_documentation() -> None:
    documented = re.findall(r"`(torch\d+\.\w+)`", (ROOT / "docs" / "install.md").read_text())
    workflow = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    built, tried = re.findall(r"^ +torch: \[([^]]+)\]$", workflow, re.MULTILINE)
    assert built == tried
    oldest = min(re.findall(r'"(\S+\+cu\d+)"', built), key=lambda torch: [*map(int, re.findall(r"\d+", torch))])
    assert re.findall(r"make gemm .* TORCH_VERSION=(\S+)", workflow) == [oldest]
    assert documented == sorted(f"torch{a}{b}.{c}" for a, b, c in re.findall(r'"(\d+)\.(\d+)\.\d+\+(\w+)"', built))


def test_the_workflow_builds_in_the_image_of_make_wheel() -> None:
    """By its digest, since another image may take its tag."""
    workflow = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    used = re.findall(r"^ +container: (\S+)", workflow, re.MULTILINE)
    assert {*used} == {*re.findall(r"^WHEEL_IMAGE \?= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)}
    assert re.fullmatch(r"quay\.io/pypa/manylinux_2_28_x86_64@sha256:[0-9a-f]{64}", used[0])


@pytest.mark.parametrize("workflow", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda path: path.name)
def test_workflows_pin_their_actions_and_ask_for_few_rights(workflow: Path) -> None:
    text = workflow.read_text()
    used = re.findall(r"uses: (\S+)(.*)", text)
    assert used
    for action, comment in used:
        assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action), action
        assert re.fullmatch(r"  # v\d+\.\d+\.\d+", comment), action
    assert re.search(r"^permissions:( \{\}|\n  contents: read)\n", text, re.MULTILINE)

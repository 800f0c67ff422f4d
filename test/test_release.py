"""What a release is made with, beside the wheels that test_packaging.py examines."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from simple_index import links, write
from source_distribution import unpack

ROOT = Path(__file__).parents[1]


def wheel(folder: Path, local: str, version: str) -> str:
    """A line for the index, of a wheel that holds nothing but its metadata."""
    name = f"torchops-{version}+{local}"
    path = folder / f"{name}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        about = f"{name}.dist-info"
        archive.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: torchops\nVersion: {version}+{local}\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    return f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()} {path.as_uri()}"


def download(index: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command: list[str | Path] = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "torchops"]
    return subprocess.run([*command, "--index-url", index, "--dest", folder], capture_output=True, text=True)


def test_pip_finds_the_wheel_for_its_torch(tmp_path: Path) -> None:
    local_versions = ("torch213.cpu", "torch213.cu130", "torch214.cu130")
    lines = [wheel(tmp_path, local, version) for local in local_versions for version in ("0.2.0", "0.2.1")]
    write(links(lines), tmp_path / "index")
    for local in local_versions:
        got = tmp_path / local
        index = (tmp_path / "index" / local).as_uri()
        done = download(index, got)
        assert done.returncode == 0, done.stderr
        assert [path.name for path in got.iterdir()] == [f"torchops-0.2.1+{local}-py3-none-any.whl"]


def test_index_tells_pip_the_digests(tmp_path: Path) -> None:
    line = wheel(tmp_path, "torch213.cpu", "0.2.0")
    write(links([line.replace("sha256:", "sha256:" + "0" * 8)[:71] + line[71:]]), tmp_path / "index")
    done = download((tmp_path / "index" / "torch213.cpu").as_uri(), tmp_path / "got")
    assert done.returncode != 0
    assert "DO NOT MATCH THE HASHES" in done.stderr


@pytest.mark.parametrize(
    "line",
    [
        f"{'0' * 64} https://example.org/torchops-0.2.0-py3-none-linux_x86_64.whl",
        f"{'0' * 64} https://example.org/torchops-0.2.0.tar.gz",
        "https://example.org/torchops-0.2.0+torch213.cpu-py3-none-linux_x86_64.whl",
    ],
)
def test_index_takes_no_other_files(line: str) -> None:
    with pytest.raises(ValueError, match="expected a SHA-256 and the address of a wheel with a local version"):
        links([line])


def test_index_takes_quoted_addresses() -> None:
    address = "https://example.org/v0.2.0/torchops-0.2.0%2Btorch213.cpu-py3-none-manylinux_2_28_x86_64.whl"
    found = links([f"{'0' * 64} {address}"])
    assert list(found) == ["torch213.cpu"]
    assert f'href="{address}#sha256={"0" * 64}"' in found["torch213.cpu"][0]


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
    asked = ["TORCH_VERSION=2.12.0", "CUDA=ON", "KERNELS=REDUCED"]

    def recipe(target: str, *more: str) -> str:
        command = ["make", "--dry-run", target, *asked, *more]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    inside = shlex.split(recipe("wheel", "CONTAINER=docker"))
    assert set(asked) <= set(inside[inside.index("wheel-here") :])
    here = recipe("wheel-here")
    assert "torch==2.12.0" in here
    for option in asked[1:]:
        assert f"-C cmake.define.TORCHOPS_{option}" in here


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
    assert documented == sorted(f"torch{a}{b}.{c}" for a, b, c in re.findall(r'"(\d+)\.(\d+)\.\d+\+(\w+)"', built))


def test_the_workflow_builds_in_the_image_of_make_wheel() -> None:
    """By its digest, since another image may take its tag."""
    workflow = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    used = re.findall(r"^ +container: (\S+)", workflow, re.MULTILINE)
    assert used == re.findall(r"^WHEEL_IMAGE \?= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
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

"""The build backend: scikit-build-core, with metadata that says which torch and CUDA a wheel was built for.

A wheel works with only one minor version of torch, so it requires exactly that one. Its version names it, and the CUDA
version of its kernels: ``torchops-0.2.0+torch213.cu130-py3-none-linux_x86_64.whl``. CMake decides both from the build
options, which scikit-build-core doesn't pass to metadata providers; so the hooks here record them first.

The source distribution has neither: it works with any supported torch, and its version is the one that an index lists.
Whatever is built from it keeps that version, since installers reject any other.

An index also shows README.md, without the files beside it. Its relative links and pictures refer to the repository, so
in the metadata they get the address of the repository in which a release is built.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

try:
    from scikit_build_core import build as _backend
except ModuleNotFoundError as error:
    _tools = f"{sys.executable} -m pip install scikit-build-core cmake ninja"
    raise SystemExit(f"torchops: {error}; install the build tools with: {_tools}") from None
from scikit_build_core._compat import tomllib
from scikit_build_core.cmake import CMake
from scikit_build_core.errors import CMakeNotFoundError
from scikit_build_core.settings.skbuild_read_settings import SettingsReader

get_requires_for_build_editable = _backend.get_requires_for_build_editable
get_requires_for_build_sdist = _backend.get_requires_for_build_sdist
get_requires_for_build_wheel = _backend.get_requires_for_build_wheel
build_sdist = _backend.build_sdist

ConfigSettings = Mapping[str, "str | list[str]"]
_config_settings: ConfigSettings = {}


def _noting_options(hook: Any) -> Any:
    def noting(directory: str, config_settings: ConfigSettings | None = None, *rest: Any) -> str:
        global _config_settings
        _config_settings = config_settings or {}
        return hook(directory, config_settings, *rest)

    return noting


build_editable = _noting_options(_backend.build_editable)
build_wheel = _noting_options(_backend.build_wheel)
prepare_metadata_for_build_editable = _noting_options(_backend.prepare_metadata_for_build_editable)
prepare_metadata_for_build_wheel = _noting_options(_backend.prepare_metadata_for_build_wheel)


def absolute(markdown: str, address: str, ref: str) -> str:
    """Markdown whose relative links and pictures point to a branch or tag of a GitHub repository."""

    def lead(match: re.Match[str]) -> str:
        kind = "raw" if match[1] else "blob"
        return f"{match[1]}[{match[2]}]({address}/{kind}/{ref}/{match[3]})"

    return re.sub(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)\s]+)\)", lead, markdown)


def _address() -> str:
    """The address of the repository in which a workflow builds, or that a source distribution recorded; else
    unknown."""
    if repository := os.environ.get("GITHUB_REPOSITORY"):
        return f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{repository}"
    noted = Path("PKG-INFO")
    found = re.search("^Project-URL: Source, (.*)$", noted.read_text(), re.MULTILINE) if noted.exists() else None
    return found[1] if found else ""


class Metadata:
    """Provider of the fields ``version``, ``readme``, ``dependencies``, ``optional-dependencies`` and ``urls``.

    Settings: ``torch``, the supported range, and ``extras``, the dependency groups that are also extras.
    """

    def build_state(self, build_state: str) -> None:
        self._sdist = build_state == "sdist"

    def dynamic_metadata(self, settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, Any]:
        match = re.search(r"project\(torchops VERSION ([0-9.]+)", Path("CMakeLists.txt").read_text())
        assert match, "CMakeLists.txt names the version"
        version, torch = match[1], settings["torch"]
        if not self._sdist:
            torch, local = _ask_cmake()
            from_sdist = Path("PKG-INFO").exists()
            version = version if from_sdist else f"{version}+{local}"
        groups = tomllib.loads(Path("pyproject.toml").read_text())["dependency-groups"]
        extras = {name: groups[name] for name in settings["extras"]}
        readme, urls, address = Path("README.md").read_text(), {}, _address()
        if address:
            ref = f"v{match[1]}"
            readme = absolute(readme, address, ref)
            urls = {
                "Source": address,
                "Documentation": f"{address}/blob/{ref}/docs/README.md",
                "Changelog": f"{address}/blob/{ref}/CHANGELOG.md",
                "Issues": f"{address}/issues",
            }
        return {
            "version": version,
            "readme": {"text": readme, "content-type": "text/markdown"},
            "dependencies": [torch],
            "optional-dependencies": extras,
            "urls": urls,
        }

    def dynamic_wheel(self, settings: Mapping[str, Any]) -> dict[str, bool]:
        return {"dependencies": True}


def _ask_cmake() -> tuple[str, str]:
    """The requirement and the local version of a wheel built here. CMake prints what it lacks to build one."""
    settings = SettingsReader.from_file("pyproject.toml", _config_settings).settings
    arguments = [*settings.cmake.args, *shlex.split(os.environ.get("CMAKE_ARGS", ""))]
    options = [f"-D{name}={value}" for name, value in settings.cmake.define.items()]
    options += [argument for argument in arguments if argument.startswith("-D")]
    try:
        cmake = CMake.default_search(version=settings.cmake.version, env=os.environ)
    except CMakeNotFoundError as error:
        raise SystemExit(
            f"torchops: {error}; install the build tools with: {sys.executable} -m pip install cmake ninja"
        ) from None
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "name"
        options += [f"-DOUTPUT={output}", f"-DPython_EXECUTABLE={sys.executable}"]
        script = Path("cmake", "WheelName.cmake")
        result = subprocess.run([cmake.cmake_path, *options, "-P", script], stdout=subprocess.DEVNULL)
        if result.returncode != 0:
            raise SystemExit(1)
        torch, local = output.read_text().split()
    return torch, local

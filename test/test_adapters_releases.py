"""The tests of boltz on other packages and releases under that name, which cannot be installed beside it.

``make test`` installs each into a folder of its own. A process imports one of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FOLDER = Path(sys.prefix, "releases")
FILES = ("test_adapters.py", "test_adapters_parts.py", "test_adapters_layers.py")
# What the tests of a release select, besides those of all packages but boltz. Boltz 1.0 has layers in another file.
RELEASES = {
    "boltz-community": "boltz",
    "boltz-2-0-3": "boltz",
    "boltz-1-0-0": "boltz and not (boltz- and layers) and not layers_that_stay",
}


@pytest.mark.parametrize("name", RELEASES)
def test_release(name: str) -> None:
    release = FOLDER / name
    if not release.is_dir():
        pytest.skip(f"{name} is not installed in {FOLDER}, and no module of it is tested")
    paths = [str(release), *filter(None, [os.environ.get("PYTHONPATH")])]
    selected = f"({RELEASES[name]}) and not boltzgen and not openfold and not protenix and not esmfold"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", selected]
    run = subprocess.run(
        [*command, *(str(HERE / file) for file in FILES)],
        cwd=HERE.parent,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert " passed" in run.stdout

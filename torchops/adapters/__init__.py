"""What public packages call the layers that :func:`torchops.nn.replace` knows: a page for each package.

Nothing here is imported for a package that the process has not imported, and nothing here imports a package. A module
is found by its class: the very object that the package's own file defines under the known name. Its forward must have
the arguments that the adapter honours, it must have the layers and parameters expected and nothing else on it (hooks, a
forward of its own), and it must compute, on a small random problem, what its replacement computes
(:mod:`torchops.adapters.probe`): so a later release of a package that computes something else is left alone.

A copy of such a module in a package of one's own is not replaced, whatever it computes: a few random problems
prove less than a known source. It is reported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module

from torchops.adapters.triangle import TriangleAdapter

__all__ = ["triangle_adapters"]

# The file here for each top-level package.
_FILES = {"boltz": "boltz", "openfold": "openfold", "openfold3": "openfold", "transformers": "esmfold"}


def triangle_adapters() -> Iterator[TriangleAdapter]:
    """Those of the packages that are imported."""
    for file in dict.fromkeys(file for package, file in _FILES.items() if package in sys.modules):
        yield from import_module(f"torchops.adapters.{file}").TRIANGLE_UPDATES

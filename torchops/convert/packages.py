"""Adapters for modules of public packages that :func:`torchops.replace` knows: tables, one file per family of
packages.

Nothing is imported here for a package that the process has not imported, and nothing here imports a package. A module
is recognised by its class, which must be the object that the package's own file defines under the known name. It must
have the expected layers and parameters and nothing else (hooks, an overridden forward). What its forward needs must be
known (:mod:`torchops.convert.signature`). On small random problems, it must compute what its replacement computes
(:mod:`torchops.convert.probe`). So if a later release of a package computes something else, its modules are left
alone.

A copy of such a module in your own package is not replaced, whatever it computes, since a few random problems prove
less than a known source. A copy of a triangle update is reported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from torchops.convert.adapter import Adapter

__all__ = ["adapters", "unfit"]

# The table for each top-level package.
_FILES = {
    "boltz": "boltz",
    "boltzgen": "boltz",
    "openfold": "openfold",
    "openfold3": "openfold",
    "protenix": "openfold",
    "transformers": "openfold",
}


def _pages() -> Iterator[Any]:
    """The files of the packages that are imported."""
    for file in dict.fromkeys(file for package, file in _FILES.items() if package in sys.modules):
        yield import_module(f"torchops.convert.{file}")


def adapters(layers: bool = False) -> Iterator[Adapter]:
    """The adapters of modules; with `layers`, those of layers whose parts are replacements."""
    for page in _pages():
        yield from page.LAYERS if layers else page.MODULES


def unfit() -> Iterator[tuple[type, str]]:
    """Classes that resemble a replaceable one but have no operator, and why."""
    for page in _pages():
        for file, name, reason in page.UNFIT:
            if cls := vars(sys.modules.get(file, sys)).get(name):
                yield cls, reason

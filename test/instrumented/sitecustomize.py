"""Has every process import the torchops of the folder TORCHOPS_SITE: ahead of the path, and of an editable install."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder


class InstrumentedFinder:
    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        if name.partition(".")[0] != "torchops":
            return None
        return PathFinder.find_spec(name, path or [os.environ["TORCHOPS_SITE"]])


sys.meta_path.insert(0, InstrumentedFinder)

"""Puts layers of torchops into existing models: :func:`torchops.replace`.

It swaps what is declared: layers in an ``nn.Sequential``, modules of public packages (a file for each family of them),
and classes that you name. Each is compared with what takes its place (``probe.py``).
"""

from torchops._core.report import Match, Report, Share
from torchops.convert import (  # noqa: F401  (they register what they swap)
    declared,
    gated,
    named,
    public_modules,
    sequential,
)
from torchops.convert.known import triangle_update
from torchops.convert.registry import replace

__all__ = ["Match", "Report", "Share", "replace", "triangle_update"]

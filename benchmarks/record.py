"""What a command has measured: as JSON in a file, and as lines on the terminal."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from . import machine
from .progress import Progress


def write(path: Path, document: dict[str, Any]) -> None:
    """Writes results as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def read(path: Path) -> dict[str, Any]:
    """The results in a file. Some have what describes the machine one level deeper."""
    document: dict[str, Any] = json.loads(path.read_text())
    if isinstance(about := document.get("machine"), dict):
        document |= about
    return document


class Record:
    """The results of one run, with machine, versions, revisions and command.

    The file that `--json` names is written after each result, so that a run that is stopped keeps those before.

    Args:
        options: of the command.
        device: which is measured.
        cases: how many results there will be, if that is known.
        shown: whether this process prints and writes.
        facts: further entries of the document.
    """

    def __init__(
        self, options: argparse.Namespace, device: torch.device, cases: int = 0, shown: bool = True, **facts: Any
    ) -> None:
        self.document: dict[str, Any] = {**machine.describe(device), "command": options.command, **facts}
        self.progress = Progress(cases, shown)
        self._path: Path | None = options.json
        self._shown = shown

    def add(self, section: str, result: Any, text: str = "") -> None:
        """Appends a result to a list in the document, and prints it as `text` or as JSON."""
        self.document.setdefault(section, []).append(result)
        self.progress.finished()
        self.show(text or json.dumps(result))
        self.save()

    def collect(self, section: str, made: Iterable[Any], label: str, text: Callable[[Any], str] = json.dumps) -> None:
        """Adds what is made, one after the other."""
        self.progress.case(label)
        for result in made:
            self.add(section, result, text(result))
            self.progress.case(label)
        self.progress.clear()

    def show(self, text: str) -> None:
        """Prints beside the progress."""
        self.progress.clear()
        if self._shown:
            print(text, flush=True)

    def save(self) -> None:
        """Writes the file, if one was asked for."""
        if self._path and self._shown:
            write(self._path, self.document)

"""A progress bar on a terminal; nothing if stderr is a file or a pipe."""

from __future__ import annotations

import shutil
import sys

WIDTH = 24


class Progress:
    """Counts cases, out of a total if that is known, and shows what the current one is doing."""

    def __init__(self, total: int, shown: bool = True) -> None:
        self._total = total
        self._done = 0
        self._label = ""
        self._shown = shown and sys.stderr.isatty()

    def case(self, label: str) -> None:
        """Starts a new case."""
        self._label = label
        self.state("")

    def state(self, text: str) -> None:
        """Shows what the case is doing now."""
        if self._shown:
            filled = WIDTH * self._done // max(1, self._total)
            bar = f"[{'#' * filled + '-' * (WIDTH - filled)}] {self._done}/{self._total}" if self._total else self._done
            line = f"{bar} {self._label}: {text}"
            print(f"\r{line[: shutil.get_terminal_size().columns - 1]}\x1b[K", end="", file=sys.stderr, flush=True)

    def finished(self) -> None:
        """Ends the case, and frees the line for other output."""
        self._done += 1
        self.clear()

    def clear(self) -> None:
        """Frees the line for other output."""
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

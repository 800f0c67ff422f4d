"""A progress bar without dependencies."""

from __future__ import annotations

import sys
import time
from types import TracebackType


class Progress:
    """Progress bar on stdout; prints only its last line when stdout is no terminal.

    Example:
        >>> with Progress("training", total=40) as bar:
        ...     for epoch in range(40):
        ...         bar.advance(f"loss {1.0 / (epoch + 1):.3f}")
    """

    WIDTH = 28
    REFRESH_SECONDS = 0.1

    def __init__(self, label: str, total: int) -> None:
        self._label = label
        self._total = total
        self._done = 0
        self._note = ""
        self._live = sys.stdout.isatty()
        self._start = time.monotonic()
        self._last_draw = 0.0

    def __enter__(self) -> Progress:
        self._draw()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._draw()
            print()
        else:
            print(self._line())

    def advance(self, note: str = "") -> None:
        """Counts one step as done and shows `note` after the bar."""
        self._done += 1
        self._note = note
        if time.monotonic() - self._last_draw >= self.REFRESH_SECONDS:
            self._draw()

    def _line(self) -> str:
        filled = self.WIDTH * self._done // self._total
        bar = "#" * filled + "." * (self.WIDTH - filled)
        seconds = time.monotonic() - self._start
        return f"{self._label:<28} [{bar}] {self._done:>3}/{self._total} {seconds:5.1f} s  {self._note}"

    def _draw(self) -> None:
        if self._live:
            self._last_draw = time.monotonic()
            # "\x1b[K" erases what a longer previous line left behind.
            print(f"\r{self._line()}\x1b[K", end="", flush=True)

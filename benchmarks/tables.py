"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def row(cells: Sequence[str]) -> str:
    """A row of a table."""
    return f"| {' | '.join(cells)} |"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    return [row(head).replace("|  |", "| |"), "|---" * len(head) + "|", *map(row, rows)]

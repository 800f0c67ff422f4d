"""The pictures of benchmarks/results show all that is in them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks import plots, render

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@pytest.mark.skipif(bool(plots.missing()), reason="needs matplotlib, of the dependency group bench")
def test_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Legends, labels and bars of every picture that `render` draws lie within it."""
    from matplotlib import figure

    drawn: set[Path] = set()
    cut_off = []

    def check(self: Figure, path: Path, **_: object) -> None:
        drawn.add(path)
        self.draw_without_rendering()
        needs, has = self.get_tightbbox(), self.bbox_inches.padded(0.01)
        if not (has.contains(needs.x0, needs.y0) and has.contains(needs.x1, needs.y1)):
            cut_off.append(path.relative_to(render.RESULTS).as_posix())

    monkeypatch.setattr(figure.Figure, "savefig", check)
    for _ in render.pictures():
        pass
    assert drawn
    assert drawn >= set(render.RESULTS.rglob("*.png"))  # a source distribution has none
    assert not cut_off

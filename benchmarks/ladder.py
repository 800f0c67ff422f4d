"""What `examples/ladder/climb.py` has measured, as a table and as a picture. Nothing is measured here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from . import plots, timing
from .machine import revisions
from .operators import OPERATORS
from .report import format_seconds
from .tables import table as markdown

_METHODS = {
    "clock": "with a clock",
    "events": "with CUDA events",
    "graph replay": "by replaying a CUDA graph between events",
}


def documents(folder: Path) -> Iterator[dict[str, Any]]:
    """The ladders of all machines in a folder of results: processors first."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*/ladder.json"))]
    yield from sorted(found, key=lambda document: document["cases"][0]["threads"] is None)


def table(document: dict[str, Any]) -> str:
    """A row for each step: its time, and its speed relative to the first step, for each case."""
    cases = document["cases"]
    names = [*cases[0]["seconds"], *cases[0]["missing"], *cases[0]["wrong"]]
    head = ["step", *(cell for case in cases for cell in (_label(case), "speedup over step 1"))]
    rows = []
    for name in sorted(dict.fromkeys(names)):
        cells = [name]
        for case in cases:
            if name in case["seconds"]:
                cells += [format_seconds(case["seconds"][name]), f"{1 / case['over the first'][name]:.2f}x"]
            else:
                cells += [case["missing"].get(name) or case["wrong"].get(name, ""), ""]
        rows.append(cells)
    about = document["ladder"]
    shape = "{}, in = {}, out = {}".format(*cases[0]["shape"])
    revision = f", {revisions(about)}" if "revision of src" in about else ""
    lines = [
        *markdown(head, rows),
        "",
        f"{about['machine']}, torch {about['torch']}{revision}: {cases[0]['dtype']}, rows = {shape}.",
    ]
    lines[-1] += f" {_regime(cases[0])}."
    loads = [case["other load"] for case in cases if case["other load"] is not None]
    if loads and max(loads) > 0.01:
        lines[-1] += f" Other programs used up to {max(loads):.0%} of the processor time meanwhile."
    return "\n".join([*lines, ""])


def _regime(case: dict[str, Any]) -> str:
    """How, as far as the results say it: "Timed with CUDA events, on cold inputs"."""
    inputs = OPERATORS["dense"].make(tuple(case["shape"]), getattr(torch, case["dtype"]), torch.device("meta"))
    method = f"{_METHODS[case['method']]}, " if "method" in case else ""
    return f"Timed {method}on {'cold' if timing.cold(inputs) else 'warm'} inputs"


def _label(case: dict[str, Any]) -> str:
    threads = case["threads"]
    return "time" if threads is None else f"{threads} thread{'s' if threads > 1 else ''}"


def draw(folder: Path) -> str:
    """Draws the ladders of all machines in a folder into one picture, and returns where it is."""
    found = list(documents(folder))
    if problem := plots.missing():
        return problem
    if not found:
        return "picture: none, no ladder was measured"
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 0.8 + 3.2 * len(found)), layout="constrained")
    for axes, document in zip(figure.subplots(len(found), 1, squeeze=False)[:, 0], found, strict=True):
        cases, about = document["cases"], document["ladder"]
        names = sorted({name for case in cases for name in case["seconds"]})
        height = 0.8 / len(cases)
        for i, case in enumerate(cases):
            at = [k + i * height for k, name in enumerate(names) if name in case["seconds"]]
            present = [name for name in names if name in case["seconds"]]
            bars = axes.barh(at, [case["seconds"][name] * 1e3 for name in present], height, label=_label(case))
            texts = [
                f" {format_seconds(case['seconds'][name])}, {1 / case['over the first'][name]:.2f}x" for name in present
            ]
            axes.bar_label(bars, texts, fontsize=7.5)
        axes.set_yticks([k + 0.4 - height / 2 for k in range(len(names))], names, fontsize=8)
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.margins(x=0.12, y=0.02)
        axes.set_xlabel("time of a call [ms], and how many times as fast as step 1", fontsize=8)
        axes.grid(True, axis="x", linewidth=0.3, alpha=0.6)
        if len(cases) > 1:
            axes.legend(fontsize=8)
        shape = ", ".join(map(str, cases[0]["shape"]))
        axes.set_title(f"{about['machine']}, torch {about['torch']}: ({shape}) {cases[0]['dtype']}", fontsize=9)
    figure.suptitle("sigmoid(x @ w.T + b), forward, step by step")
    path = folder / "ladder.png"
    figure.savefig(path, dpi=plots.DPI)
    return f"picture: {path}"

"""Draws what passes through memory before and after torchops, for docs/tour.md: `python examples/memory_tour.py`.

Each picture has two lists of kernels, and each kernel the tensors that it reads and writes. The traffic is their sum.
The unit is the tensor that the picture names. A tensor counts once for each kernel that reads or writes it: what a
kernel reads again, it finds in a cache.

- Before: one kernel for each operator of PyTorch in eager mode that makes a tensor. test/test_memory_tour.py records
  the operators, and compares. One copy is not in the list, since PyTorch makes it inside an operator: the layer norm of
  `o` in the triangle update copies its transposed input.
- After: what the kernels for the H100 and H200 do in inference, in 16 bits (the layer of the diffusion transformer: in
  float32), as docs/fused_epilogue.md, gate_kernels.md, triangle_update_stages.md and pair_layer.md say. The test
  records the layer of the diffusion transformer, each operator of which is one kernel there. What depends only on
  tensors that stay the same between steps is computed once, so it is not in the list: the bias of the scores in the
  layout of the attention.
- Left out on both sides: one or two numbers per row, such as masks, biases and means; and weights, except in the layer
  of the diffusion transformer, whose rows are so few that weights are not small.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

IMAGES = Path(__file__).parents[1] / "docs/images"


class Kernel(NamedTuple):
    """What it does, and the names of the tensors that it reads and writes, separated by spaces."""

    name: str
    reads: str
    writes: str


class Group(NamedTuple):
    """Kernels that a picture shows as one box."""

    name: str
    kernels: tuple[Kernel, ...]


class Picture(NamedTuple):
    """`sizes` has tensors that are no unit. Boxes are kernels or groups."""

    file: str
    title: str
    unit: str
    sizes: Mapping[str, float]
    before: tuple[Kernel | Group, ...]
    after: tuple[Kernel | Group, ...]


def kernels(boxes: tuple[Kernel | Group, ...]) -> Iterator[Kernel]:
    """Those of all boxes."""
    for box in boxes:
        yield from box.kernels if isinstance(box, Group) else (box,)


def units(names: str, sizes: Mapping[str, float]) -> float:
    """The size of some tensors. A prime marks another tensor of the same size."""
    return sum(sizes.get(name.rstrip("'"), 1) for name in names.split())


def traffic(boxes: tuple[Kernel | Group, ...], sizes: Mapping[str, float]) -> float:
    """All that is read and written."""
    return sum(units(kernel.reads, sizes) + units(kernel.writes, sizes) for kernel in kernels(boxes))


# --- the lists -------------------------------------------------------------------------------------------------------

DENSE = Picture(
    "tour_dense.svg",
    "dense: sigmoid(x @ w.T + b), as many features out as in",
    "x",
    {},
    (Kernel("linear", "x", "z"), Kernel("sigmoid", "z", "y")),
    (Kernel("dense", "x", "y"),),
)
GATE = Picture(
    "tour_gate.svg",
    "gate: v * sigmoid(x @ w.T + b), as many features out as in",
    "x",
    {},
    (Kernel("linear", "x", "z"), Kernel("sigmoid", "z", "g"), Kernel("multiply", "v g", "y")),
    (Kernel("gate", "v x", "y"),),
)
# `p` is a and b before their gates, side by side, and `t` the gates.
TRIANGLE = Picture(
    "tour_triangle_update.svg",
    "The triangle update, outgoing edges",
    "the pair tensor x",
    dict.fromkeys(("p", "r", "t", "ab"), 2),
    (
        Kernel("layer norm", "x", "z"),
        Kernel("linear", "z", "p"),
        Kernel("linear", "z", "r"),
        Kernel("sigmoid", "r", "t"),
        Kernel("multiply", "p t", "ab"),
        Kernel("mask", "ab", "ab'"),
        Kernel("copy", "a", "a'"),
        Kernel("copy", "b", "b'"),
        Kernel("matmul of each channel", "a' b'", "o"),
        Kernel("layer norm", "o", "n"),
        Kernel("linear", "n", "u"),
        Kernel("linear", "z", "h"),
        Kernel("sigmoid", "h", "g"),
        Kernel("multiply", "u g", "y"),
    ),
    (
        Kernel("norm, linear layers, gate, mask", "x", "a b"),
        Kernel("matmul of each channel", "a b", "o"),
        Kernel("two norms, linear layers, gate", "o x", "y"),
    ),
)

ADD = Kernel("add", "x y", "x'")
# Triangle attention with heads * d = c. `s` is the scores.
ATTENTION_BEFORE = (
    Kernel("layer norm", "x", "z"),
    Kernel("linear", "z", "q"),
    Kernel("linear", "z", "k"),
    Kernel("linear", "z", "v"),
    Kernel("scale", "q", "q'"),
    Kernel("copy", "q'", "q''"),
    Kernel("copy", "k", "k'"),
    Kernel("matmul", "q'' k'", "s"),
    Kernel("add the mask", "s", "s'"),
    Kernel("linear", "z", "bias"),
    Kernel("add the bias", "s' bias", "s''"),
    Kernel("softmax", "s''", "s'''"),
    Kernel("copy", "v", "v'"),
    Kernel("matmul", "s''' v'", "o"),
    Kernel("copy", "o", "o'"),
    Kernel("linear", "z", "h"),
    Kernel("sigmoid", "h", "g"),
    Kernel("multiply", "o' g", "u"),
    Kernel("linear", "u", "y"),
)
# For each panel; o takes the place of q.
ATTENTION_AFTER = (
    Kernel("norm, bias", "x", "bias"),
    Kernel("norm, q, k and v", "x", "q k v"),
    Kernel("attention", "q k v bias", "o"),
    Kernel("norm, gate, linear, add", "o x", "x'"),
)
TRANSITION_BEFORE = (
    Kernel("layer norm", "x", "z"),
    Kernel("linear", "z", "hidden"),
    Kernel("silu", "hidden", "hidden'"),
    Kernel("linear", "z", "hidden''"),
    Kernel("multiply", "hidden' hidden''", "hidden'''"),
    Kernel("linear", "hidden'''", "y"),
)
# In place, the last kernel of an update adds it to x.
TRANSITION_AFTER = (Kernel("norm, SwiGLU, linear, add", "x", "x'"),)


def pair_layer(n: int = 768, c: int = 128, heads: int = 4) -> Picture:
    """That of AlphaFold 3, with 4 * c hidden features in its transition."""
    update = tuple(kernels(TRIANGLE.before)), tuple(kernels(TRIANGLE.after))
    parts = {
        "triangle update, outgoing": update,
        "triangle update, incoming": update,
        "triangle attention, starting": (ATTENTION_BEFORE, ATTENTION_AFTER),
        "triangle attention, ending": (ATTENTION_BEFORE, ATTENTION_AFTER),
        "transition": (TRANSITION_BEFORE, TRANSITION_AFTER),
    }
    return Picture(
        "tour_pair_layer.svg",
        f"The pair layer, N = {n}, c = {c}, {heads} heads",
        "the pair tensor x",
        {**TRIANGLE.sizes, "hidden": 4, "s": heads * n / c, "bias": heads / c},
        tuple(Group(name, (*before, ADD)) for name, (before, _) in parts.items()),
        tuple(Group(name, after) for name, (_, after) in parts.items()),
    )


def diffusion(samples: int = 5, tokens: int = 384, c: int = 768, heads: int = 16) -> Picture:
    """A layer of Boltz-2's diffusion transformer over tokens, in inference after `replace`.

    `a` is the features of the tokens, and `c` what they are conditioned on: after `replace`, of one sample instead of
    all. `bias` is that of the scores, of one sample. `w` is a weight.
    """
    norm_before = (
        Kernel("layer norm", "a", "n"),
        Kernel("layer norm", "c", "m"),
        Kernel("linear", "m w", "h"),
        Kernel("sigmoid", "h", "g"),
        Kernel("multiply", "g n", "u"),
        Kernel("linear", "m w", "t"),
        Kernel("add", "u t", "x"),
    )
    gate_before = (
        Kernel("linear", "c w", "h"),
        Kernel("sigmoid", "h", "g"),
        Kernel("multiply", "g y", "u"),
        Kernel("add", "a u", "a'"),
    )
    before = (
        Group("adaptive norm", norm_before),
        Group("q, k, v", tuple(Kernel("linear", "x w", name) for name in "qkv")),
        Group(
            "scores, softmax, values",
            (
                Kernel("repeat the bias", "bias", "s"),
                Kernel("copy", "q", "q'"),
                Kernel("copy", "k", "k'"),
                Kernel("matmul", "q' k'", "s"),
                Kernel("scale", "s", "s'"),
                Kernel("add the bias", "s' s", "s''"),
                Kernel("add the mask", "s''", "s'''"),
                Kernel("softmax", "s'''", "s''''"),
                Kernel("copy", "v", "v'"),
                Kernel("matmul", "s'''' v'", "o"),
            ),
        ),
        Group(
            "gate, linear",
            (
                Kernel("linear", "x w", "h"),
                Kernel("sigmoid", "h", "g"),
                Kernel("copy", "o", "o'"),
                Kernel("multiply", "g o'", "u"),
                Kernel("linear", "u w", "y"),
            ),
        ),
        Group("gate, add", gate_before),
        Group("adaptive norm", norm_before),
        Group(
            "transition",
            (
                Kernel("linear", "x w4", "hidden2"),
                Kernel("silu", "hidden", "hidden'"),
                Kernel("multiply", "hidden' hidden", "hidden''"),
                Kernel("linear", "x w2", "hidden"),
                Kernel("multiply", "hidden'' hidden", "hidden'"),
                Kernel("linear", "hidden' w2", "y"),
            ),
        ),
        Group("gate, add", gate_before),
    )
    norm_after = (
        Kernel("layer norm", "a", "n"),
        Kernel("layer norm", "c1", "m1"),
        Kernel("linear", "m1 w", "t1"),
        Kernel("dense", "m1 w", "g1"),
        Kernel("multiply and add", "t1 g1 n", "x"),
    )
    gate_after = (Kernel("dense", "c1 w", "g1"), Kernel("multiply and add", "a g1 y", "a'"))
    after = (
        Group("adaptive norm", norm_after),
        Group("q, k, v", tuple(Kernel("linear", "x w", name) for name in "qkv")),
        Group("scores, softmax, values", (Kernel("attention", "q k v bias", "o"),)),
        Group("gate, linear", (Kernel("gate", "o x w", "u"), Kernel("linear", "u w", "y"))),
        Group("gate, add", gate_after),
        Group("adaptive norm", norm_after),
        Group(
            "transition",
            (
                Kernel("glu", "x w4", "hidden"),
                Kernel("linear", "x w2", "hidden'"),
                Kernel("multiply", "hidden hidden'", "hidden''"),
                Kernel("linear", "hidden'' w2", "y"),
            ),
        ),
        Group("gate, add", gate_after),
    )
    w = c / (samples * tokens)
    return Picture(
        "tour_diffusion.svg",
        f"A layer of a diffusion step of Boltz-2, {tokens} tokens, {samples} samples",
        "a, the features of all tokens",
        {
            **{"s": heads * tokens / c, "bias": heads * tokens / c / samples},
            **dict.fromkeys(("c1", "m1", "t1", "g1"), 1 / samples),
            **{"hidden": 2, "hidden2": 4, "w": w, "w2": 2 * w, "w4": 4 * w},
        },
        before,
        after,
    )


def pictures() -> tuple[Picture, ...]:
    """In the order of the page."""
    return DENSE, GATE, TRIANGLE, pair_layer(), diffusion()


# --- drawing ---------------------------------------------------------------------------------------------------------

WIDTH, EDGE, GAP, SLOT = 860, 20, 14, 40
STYLE = """
svg { --page: #ffffff; --edge: #d0d7de; --text: #1f2328; --soft: #59636e; --memory: #dfe5ec; --box: #f6f8fa;
  --line: #818b98; --ours: #e6f5e9; --green: #1a7f37; --read: #0969da; --write: #bc4c00;
  font: 13px system-ui, sans-serif }
@media (prefers-color-scheme: dark) { svg { --page: #0d1117; --edge: #3d444d; --text: #f0f6fc; --soft: #9198a1;
  --memory: #2b323b; --box: #151b23; --line: #656c76; --ours: #10261a; --green: #3fb950; --read: #4493f8;
  --write: #f0883e } }
text { fill: var(--text); text-anchor: middle }
.left { text-anchor: start } .right { text-anchor: end }
.head { font-weight: 600; font-size: 15px } .soft { fill: var(--soft); font-size: 12px }
.page { fill: var(--page); stroke: var(--edge) } .memory { fill: var(--memory) }
.box { fill: var(--box); stroke: var(--line) } .ours { fill: var(--ours); stroke: var(--green) }
.read { fill: var(--read) } .write { fill: var(--write) }
.sum { fill: var(--line) } .sum-ours { fill: var(--green) }
"""


class Arrow(NamedTuple):
    label: str
    size: float
    is_read: bool


def arrows(box: Kernel | Group, sizes: Mapping[str, float]) -> list[Arrow]:
    """One for each tensor of a kernel; one for all that a group reads, and one for all that it writes."""
    if isinstance(box, Kernel):
        sides = ((box.reads, True), (box.writes, False))
        return [Arrow(name, units(name, sizes), reads) for names, reads in sides for name in names.split()]
    read = sum(units(kernel.reads, sizes) for kernel in box.kernels)
    return [Arrow("", read, True), Arrow("", traffic((box,), sizes) - read, False)]


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{round(value, 1):g}"


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    shown = text.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x:.0f}" y="{y:.0f}"' + (f' class="{kind}"' if kind else "") + f">{shown}</text>"


def _rectangle(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.0f}" width="{width:.1f}" height="{height:.0f}" rx="4" class="{kind}"/>'


def _arrow(x: float, top: float, bottom: float, arrow: Arrow, thick: float) -> str:
    """As thick as its tensor is large; it leads down from memory, or up to it."""
    half, head = thick / 2, thick / 2 + 4
    start, tip = (top, bottom) if arrow.is_read else (bottom, top)
    neck = tip - 8 if arrow.is_read else tip + 8
    corners = ((-half, start), (half, start), (half, neck), (head, neck), (0, tip), (-head, neck), (-half, neck))
    points = " ".join(f"{x + dx:.1f},{y:.0f}" for dx, y in corners)
    return f'<polygon points="{points}" class="{"read" if arrow.is_read else "write"}"/>'


def _rows(boxes: tuple[Kernel | Group, ...], sizes: Mapping[str, float]) -> list[list[tuple[Kernel | Group, float]]]:
    """Boxes with their widths, as many in a row as fit."""
    rows: list[list[tuple[Kernel | Group, float]]] = [[]]
    for box in boxes:
        width = max(SLOT * len(arrows(box, sizes)), 90 if isinstance(box, Group) else 78)
        if sum(of + GAP for _, of in rows[-1]) + width > WIDTH - 2 * EDGE:
            rows.append([])
        rows[-1].append((box, width))
    return rows


def draw(picture: Picture) -> str:
    """The SVG. It has a page of its own, so it can be read on a light or a dark one."""
    sizes, parts, y = picture.sizes, [], 34.0
    sides = (("eager mode", picture.before, "box"), ("torchops", picture.after, "ours"))
    totals = [traffic(boxes, sizes) for _, boxes, _ in sides]
    scale = min(3.0, 22 / max(a.size for _, boxes, _ in sides for box in boxes for a in arrows(box, sizes)))
    parts.append(_text(EDGE, y, picture.title, "left head"))
    parts.append(_text(EDGE, y + 20, f"Sizes are in units of {picture.unit}.", "left soft"))
    x = EDGE + 330.0
    for label, is_read in (("a kernel reads", True), ("it writes", False)):
        parts.append(_arrow(x, y + 6, y + 24, Arrow("", 1, is_read), 3))
        parts.append(_text(x + 10, y + 20, label, "left soft"))
        x += 115
    parts.append(_text(x, y + 20, "bars: all that is read and written", "left soft"))
    y += 56
    for (name, boxes, kind), total in zip(sides, totals, strict=True):
        length = 560 * total / max(totals)
        parts.append(_text(EDGE, y, name, "left head"))
        parts.append(_rectangle(EDGE + 110, y - 12, length, 14, "sum-ours" if kind == "ours" else "sum"))
        parts.append(_text(EDGE + 120 + length, y, f"{total:.0f}", "left head"))
        y += 16
        for row in _rows(boxes, sizes):
            parts.append(_rectangle(EDGE, y, WIDTH - 2 * EDGE, 24, "memory"))
            if sum(of + GAP for _, of in row) < WIDTH - 2 * EDGE - 60:
                parts.append(_text(WIDTH - EDGE - 8, y + 17, "memory", "right soft"))
            x = EDGE
            for box, width in row:
                each = arrows(box, sizes)
                for i, arrow in enumerate(each):
                    at = x + width * (i + 0.5) / len(each)
                    thick = max(1.0, scale * arrow.size)
                    parts.append(_arrow(at, y + 25, y + 73, arrow, thick))
                    parts.append(_text(at, y + 17, arrow.label or _number(arrow.size)))
                    if arrow.label and arrow.size != 1:
                        parts.append(_text(at + thick / 2 + 9, y + 52, _number(arrow.size), "soft"))
                parts.append(_rectangle(x, y + 74, width, 54, kind))
                lines = textwrap.wrap(box.name, int(width / 7.3))
                for i, line in enumerate(lines):
                    parts.append(_text(x + width / 2, y + 105 + 15 * (i - (len(lines) - 1) / 2), line))
                x += width + GAP
            y += 142
        y += 24
    height = y - 14
    what = f"{picture.title}: memory traffic of {totals[0]:.0f} before and {totals[1]:.0f} after."
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" role="img">'
    page = f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1:.0f}" rx="8" class="page"/>'
    return "\n".join([head, f"<title>{what}</title>", f"<style>{STYLE}</style>", page, *parts, "</svg>\n"])


def main() -> int:
    """Draws; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=IMAGES, help="folder; default: where the page shows them")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    for picture in pictures():
        (options.output / picture.file).write_text(draw(picture))
        before, after = (traffic(boxes, picture.sizes) for boxes in (picture.before, picture.after))
        print(f"{picture.file}: {before:.1f} before, {after:.1f} after")
    return 0


if __name__ == "__main__":
    sys.exit(main())

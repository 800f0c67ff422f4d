"""The candidates, by the names and numbers that src/cuda/gemm has for them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CANDIDATES", "CUBLAS", "RULES", "Candidate"]

RULES = ("dense", "gate", "glu")
_SOURCES = Path(__file__).parents[2] / "src/cuda/gemm"
# As in plan.h, and in spec.h, which reads table.def.
_WAYS = ("kFewRows", "kResidentWeights", "kStreamedWeights", "kSplitFloat32", "kSm80", "kSm80Resident")


@dataclass(frozen=True)
class Candidate:
    """A way, the enumeration of its tilings and one of them, and the outputs of a tile."""

    way: str
    tilings: str = ""
    tiling: str = ""
    number: int = 0
    rows: int = 0
    columns: int = 0

    @property
    def name(self) -> str:
        return f"{self.way} {self.tiling}".strip()

    @property
    def numbers(self) -> tuple[int, int]:
        """As the operator `_only_candidate` takes and returns them."""
        return (_WAYS.index(self.way) if self.way in _WAYS else -1, self.number)

    @property
    def is_sm80(self) -> bool:
        return self.way.startswith("kSm80")


CUBLAS = Candidate("cuBLAS")


def _of_table(macro: str, way: str, tilings: str, families: set[str], columns: tuple[int, int]) -> list[Candidate]:
    lines = re.findall(rf"^{macro}\((\w+), \(([\w, ]+)\), \([\w, ]+\), (.*)\)$", _text("table.def"), re.MULTILINE)
    found = []
    for number, (name, of, numbers) in enumerate(lines):
        rows, wide = (int(numbers.split(", ")[i]) for i in columns)
        if families & set(of.split(", ")):
            found.append(Candidate(way, tilings, name, number, rows, wide))
    return found


def _text(name: str) -> str:
    return (_SOURCES / name).read_text()


def _sm80() -> list[Candidate]:
    names = re.search(r"enum class Sm80Tiling \{ (.*) \};", _text("plan.h"))
    assert names
    found = []
    for number, name in enumerate(names[1].split(", ")):
        rows, columns = map(int, name[1:].split("x"))
        found.append(Candidate("kSm80", "Sm80Tiling", name, number, rows, columns))
    return found


# Warps of the resident tilings divide rows that a CTA takes in turns, which for a prediction are one tile.
CANDIDATES = (
    Candidate("kFewRows"),
    *_of_table("TORCHOPS_NARROW_TILING", "kResidentWeights", "NarrowTiling", {"Narrow"}, (0, 1)),
    *_of_table("TORCHOPS_TILING", "kStreamedWeights", "Tiling", {"Linear", "Streamed", "StreamedSingle"}, (0, 1)),
    *_sm80(),
    Candidate("kSm80Resident", "ResidentTiling", "k64Rows", 0, 128, 64),
    Candidate("kSm80Resident", "ResidentTiling", "k16Rows", 1, 128, 64),
)

"""Writes src/cuda/gemm/measured_times.h."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .fit import Fitted
from .table import RULES

__all__ = ["text"]

_FRAME = """#pragma once

// Written by `python -m benchmarks candidates`, from measurements on an H200: not to be edited. times.h says what the
// numbers are.
namespace torchops::cuda::gemm {{

// clang-format off
constexpr TileTime kTileTimes[] = {{
{tiles}
}};
constexpr FewRowsTime kFewRowsTime{few_rows};
constexpr CublasTime kCublasTime{cublas};
// clang-format on

}}  // namespace torchops::cuda::gemm
"""


def text(fitted: Sequence[Fitted]) -> str:
    """The header."""
    by_way = {f.candidate.way: f for f in fitted}
    x = by_way["cuBLAS"].coefficients
    cublas = _list(
        _list(1, *x[0:3]), _list(1, *x[3:6]), *x[6:8], _list(*x[8:12]), *x[12:15], _list(1, *x[15:18]), x[18],
        _list(*x[19:22]), x[22], _list(1, *x[23:26]),
    )  # fmt: skip
    tiles = "\n".join(f"    {_tile(f)}," for f in fitted if f.candidate.tiling)
    return _FRAME.format(tiles=tiles, few_rows=_list(*by_way["kFewRows"].coefficients), cublas=cublas)


def _tile(f: Fitted) -> str:
    c, x = f.candidate, f.coefficients
    epilogue = _list(*(x[3 + i] if rule in f.rules else 0 for i, rule in enumerate(RULES)))
    alignments = (_list(1, *x[i : i + 3]) if c.is_sm80 else _list(1, 1, 1, 1) for i in (8, 11, 14))
    of = f"of(Way::{c.way}, {c.tilings}::{c.tiling})"
    return _list(of, c.rows, c.columns, f.ctas, *x[0:3], epilogue, *x[6:8], *alignments)


def _list(*values: str | float) -> str:
    return "{" + ", ".join(_words(values)) + "}"


def _words(values: Iterable[str | float]) -> Iterable[str]:
    return (value if isinstance(value, str) else f"{value:.3g}" for value in values)

"""Where the operators were measured to be faster than what Inductor generates for the same place.

`table.json` has one row for each device, operator, dtype, size and use that was measured, with both times. A place is
rewritten only if a row covers it. `python -m benchmarks inductor` measures and writes the rows.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from torchops._core.devices import capability
from torchops._core.gpu_kernels import code_for
from torchops._core.info import allows_tf32
from torchops.inductor.graph import holds

PATH = Path(__file__).with_name("table.json")


@dataclass(frozen=True)
class Use:
    """What a place computes, and what decides whether the operator is faster there.

    Attributes:
        operator: ``dense``, ``gate``, ``glu sigmoid`` or ``glu silu``.
        device: ``cuda`` or ``cpu``.
        capability: of the GPU, such as ``9.0``; for the CPU its vector instructions, such as ``AVX512``.
        dtype: of all operands.
        n_in, n_out: features.
        rows: how many rows of features; a symbol in graphs with dynamic shapes.
        training: whether forward and backward are rewritten, or forward alone.
        fused: whether Inductor would compute the result in the kernel that reads it, without writing it to memory.
    """

    operator: str
    device: str
    capability: str
    dtype: str
    n_in: Any
    n_out: Any
    rows: Any
    training: bool
    fused: bool

    def __str__(self) -> str:
        use = "training" if self.training else "inference"
        read = "its result read by another kernel of Inductor's" if self.fused else "its result written to memory"
        return (
            f"{self.operator}, {self.device} {self.capability}, {self.dtype}, {self.n_in} to {self.n_out} features, "
            f"{self.rows} rows, {use}, {read}"
        )


@dataclass(frozen=True)
class Row:
    """One or several measurements, from `least_rows` to `most_rows` rows, at each of which the operator was faster.

    `ours` and `compiled` are microseconds at `most_rows`; `source` names the measurement.
    """

    operator: str
    device: str
    capability: str
    dtype: str
    n_in: int
    n_out: int
    training: bool
    fused: bool
    least_rows: int
    most_rows: int
    ours: float
    compiled: float
    source: str

    def is_of(self, use: Use) -> bool:
        """Whether the row applies to this use, for some number of rows."""
        same = ("operator", "device", "capability", "dtype", "training", "fused")
        features = holds(self.n_in == use.n_in) and holds(self.n_out == use.n_out)
        return features and all(getattr(self, name) == getattr(use, name) for name in same)


class Table:
    """Rows to look uses up in."""

    def __init__(self, rows: tuple[Row, ...]) -> None:
        self.rows = rows

    def reason_against(self, use: Use) -> str | None:
        """Why a place is left as it is, or None if a row says that the operator is faster."""
        rows = [row for row in self.rows if row.is_of(use)]
        if not rows:
            return f"no measurement says that it would be faster ({use})"
        if any(holds(use.rows >= row.least_rows) and holds(use.rows <= row.most_rows) for row in rows):
            return None
        ranges = ", ".join(f"{row.least_rows} to {row.most_rows}" for row in rows)
        return f"it was measured to be faster for {ranges} rows only ({use})"

    def identity(self) -> str:
        """Equal for equal rows; part of the keys of compiled graphs."""
        return repr(self.rows)


class Everywhere(Table):
    """For tests and measurements: treats the operator as faster everywhere."""

    def __init__(self) -> None:
        super().__init__(())

    def reason_against(self, use: Use) -> str | None:
        return None

    def identity(self) -> str:
        return "everywhere"


def read(path: Path = PATH) -> Table:
    return Table(tuple(Row(**row) for row in json.loads(path.read_text())["rows"]))


def write(table: Table, path: Path = PATH) -> None:
    """Writes one row per line, sorted by what the rows are about."""
    names = [field.name for field in fields(Row)]
    rows = sorted(table.rows, key=lambda row: tuple(getattr(row, name) for name in names))
    lines = ",\n".join("  " + json.dumps(asdict(row)) for row in rows)
    path.write_text('{"rows": [\n' + lines + "\n]}\n")


TABLE = read()


def runs_on(device: torch.device) -> tuple[str, str]:
    """Device and capability, as they appear in the rows."""
    if device.type == "cuda":
        # Graphs can also be compiled for a GPU that this machine doesn't have.
        here = torch.cuda.is_available()
        return "cuda", "{}.{}".format(*capability(device)) if here else "unknown"
    return device.type, torch.backends.cpu.get_cpu_capability()


def dtype_of(tensor: torch.Tensor) -> str:
    """The dtype as it appears in the rows, where float32 products in TF32 differ from those in float32."""
    tf32 = tensor.device.type == "cuda" and allows_tf32(tensor.dtype)
    return str(tensor.dtype).removeprefix("torch.") + " (TF32)" * tf32


def has_kernels(device: torch.device) -> bool:
    """Whether this library has the GEMM kernels that rows of `device` were measured with."""
    if device.type != "cuda":
        return True
    from torchops._core import _build_info

    architectures = [entry for entry in _build_info.gemm_architectures.split(";") if entry]
    return code_for(capability(device), architectures) is not None

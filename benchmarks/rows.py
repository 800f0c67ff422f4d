"""Shared by operators over rows: shapes are (rows, columns), and the least cost is one read and one write."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from .case import BACKWARD, FORWARD, OVERHEAD, Call, Case, Cost, Operator, Shape, Task
from .implementations import eager

TENSOR_BYTES = {"cuda": 2**29, "cpu": 2**26}
CPU_COLUMNS = (256, 4096, 65536)
# In place, for which we have targets. Out of place, only those with torch.compile, which takes a second or two for
# each.
CUDA_COLUMNS = {
    torch.bfloat16: (128, 256, 512, 1000, *(2**i for i in range(10, 19))),
    torch.float32: (256, 1024, 4096, 16384, 32768, 131072),
}
CUDA_COLUMNS_COMPILED = {torch.bfloat16: (256, 1024, 4096, 16384, 65536, 262144)}


def preallocated(function: Callable[..., Tensor]) -> Callable[..., Call]:
    """PyTorch's `out=` a preallocated tensor: shows what a new one costs."""

    def make(x: Tensor, *others: Tensor) -> Call:
        out = torch.empty_like(x)
        return lambda *args: function(*args, out=out)

    return make


class Packed:
    """Two tensors in one. Those of each set of inputs are packed in its first call: `timing` measures later ones."""

    def __init__(self) -> None:
        self._of: dict[int, Tensor] = {}

    def __call__(self, first: Tensor, second: Tensor) -> Tensor:
        key = first.data_ptr()
        if key not in self._of:
            self._of[key] = torch.cat([first, second])
        return self._of[key]


def copy_reference(x: Tensor, *others: Tensor) -> Call:
    """A copy of the first argument to preallocated memory: one read, one write."""
    target = torch.empty_like(x)
    return lambda x, *others: target.copy_(x)


def random_matrix(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    return (torch.randn(shape, device=device, dtype=dtype),)


def row_cost(shape: Shape, task: Task) -> Cost:
    """One read and one write. Backward reads the cotangent and what was saved, and writes the gradient."""
    rows, columns = shape
    return Cost((2 if task in (FORWARD, OVERHEAD) else 5) * rows * columns, 0)


def cases_over_columns(op: str, device_type: str) -> list[Case]:
    """Tensors of one size in bytes, from many short rows to few long ones."""
    if device_type == "cpu":
        # The last case fits the caches.
        cached = [Case(op, (1024, 1024))] if op.endswith("_") else []
        return [*(_case(op, device_type, torch.float32, columns) for columns in CPU_COLUMNS), *cached]
    sizes = CUDA_COLUMNS if op.endswith("_") else CUDA_COLUMNS_COMPILED
    cases = [_case(op, device_type, dtype, size) for dtype, columns in sizes.items() for size in columns]
    # The other operators are trained out of place.
    if op.endswith("_"):
        return cases
    trained = ((1048576, 256), (65536, 4096), (2048, 131072))
    return [*cases, *(Case(op, shape, torch.bfloat16, BACKWARD) for shape in trained)]


def _case(op: str, device_type: str, dtype: torch.dtype, columns: int) -> Case:
    rows = TENSOR_BYTES[device_type] // dtype.itemsize // columns
    in_place = op.endswith("_")
    least = 0.87 if 256 <= columns <= 32768 else 0.70 if columns == 131072 else None
    targets = {"copy": least} if device_type == "cuda" and in_place and least else {}
    compiled = not in_place or columns in CUDA_COLUMNS_COMPILED.get(dtype, ())
    return Case(op, (rows, columns), dtype, targets=targets, sweep="columns", compiled=compiled)


def _memory(op: str, device_type: str) -> list[Case]:
    # Scratch on the CPU is some MiB per thread, so this bound only applies to CUDA.
    bound = 2**20 if device_type == "cuda" else None
    return [Case(op, (16384, 4096), most_bytes=bound)]


def row_operators(
    name: str,
    make: Callable[[Shape, torch.dtype, torch.device], tuple[Tensor, ...]],
    cases: Callable[[str, str], list[Case]] = cases_over_columns,
    into: Callable[..., Call] | None = None,
) -> tuple[Operator, Operator]:
    """The operator that makes a new tensor, and the one that overwrites its argument. `into` is PyTorch's `out=`."""

    def out_of_place(*args: Tensor) -> Call:
        return eager.FUNCTIONS[name]

    dims, small, bounds = ("rows", "columns"), (3, 5), ("copy",)
    references: dict[str, Callable[..., Call]] = {"copy": copy_reference}
    if into is not None:
        references = {"preallocated": into, **references}
    in_place = {"out-of-place": out_of_place, **references}
    other = f"{name}_"
    return (
        Operator(name, dims, make, row_cost, partial(cases, name), small, references, bounds=bounds),
        Operator(
            other,
            dims,
            make,
            row_cost,
            partial(cases, other),
            small,
            in_place,
            bounds=bounds,
            memory=partial(_memory, other),
        ),
    )

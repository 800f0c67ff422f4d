"""What `op_db.py` builds samples and error inputs from: seeded tensors, awkward layouts, common refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

Arguments = tuple[list[Any], dict[str, Any]]


class Make:
    """Makes the tensors of one sample: the same values each time for the same dtype, whatever the device."""

    def __init__(self, dtype: torch.dtype, device: str, requires_grad: bool = False, seed: int = 0):
        self.dtype, self.device, self.requires_grad = dtype, torch.device(device), requires_grad
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(
        self, *shape: int, view: Callable[[Tensor], Tensor] | None = None, scale: float = 1.0, **kwargs: Any
    ) -> Tensor:
        """A leaf of normal values; `view` is applied to it first (and may leave it strided)."""
        dtype, device = kwargs.get("dtype", self.dtype), torch.device(kwargs.get("device", self.device))
        base = (torch.randn(shape, generator=self.generator, dtype=torch.float64) * scale).to(dtype).to(device)
        out = base if view is None else view(base)
        return out.requires_grad_(self.requires_grad and (dtype.is_floating_point or dtype.is_complex))

    def elsewhere(self) -> str:
        """A device type other than this one, for arguments on mixed devices."""
        return "cpu" if self.device.type == "meta" else "meta"


@dataclass(frozen=True)
class Sample:
    """Valid arguments. `build` returns new tensors with the same values at each call."""

    name: str
    build: Callable[[Make], Arguments]
    leaves: bool = True  # False: arguments share memory, so they cannot be independent leaves of a graph
    large: bool = False  # crosses panels and threads; too big for the checks that perturb every element

    def __call__(self, dtype: torch.dtype, device: str, requires_grad: bool = False) -> Arguments:
        return self.build(Make(dtype, device, requires_grad))


@dataclass(frozen=True)
class ErrorInput:
    """Arguments that must be refused with `text`, in which {device} and {elsewhere} stand for devices."""

    name: str
    build: Callable[[Make], Arguments]
    text: str
    error: type[Exception] = RuntimeError

    def __call__(self, dtype: torch.dtype, device: str, requires_grad: bool = False) -> Arguments:
        return self.build(Make(dtype, device, requires_grad))

    def message(self, device: str, op: str) -> str:
        return f"{op}: " + self.text.format(
            device=torch.empty(0, device=device).device, elsewhere="cpu" if device == "meta" else "meta"
        )


def arguments(*args: Any, **kwargs: Any) -> Arguments:
    return list(args), kwargs


def wide(t: Make, *shape: int) -> Tensor:
    """float32 beside arguments of 16 bits."""
    return t(*shape, dtype=torch.float32 if t.dtype.itemsize == 2 else t.dtype)


# --- views that a kernel must not mistake for contiguous memory ----------------------------------------------------


def every_second_column(base: Tensor) -> Tensor:
    return base[..., ::2]


def every_third_row(base: Tensor) -> Tensor:
    return base[::3]


def inner(base: Tensor) -> Tensor:
    """Starts at an odd offset and leaves a margin on both sides of each row."""
    return base[1:-1, 3:-2]


def swapped(base: Tensor) -> Tensor:
    return base.transpose(0, -1)


# --- errors ----------------------------------------------------------------------------------------------------------

ZERO_DIM = "expected {} with at least 1 dimension, got a 0-dimensional tensor"


def dtype_errors(name: str, build: Callable[[Make, torch.dtype], Arguments]) -> tuple[ErrorInput, ...]:
    """All arguments of a dtype that the library does not have."""

    def of(dtype: torch.dtype) -> Callable[[Make], Arguments]:
        return lambda t: build(t, dtype)

    return tuple(
        ErrorInput(
            dtype_name(dtype),
            of(dtype),
            f"expected {name} of dtype float32, float64, float16 or bfloat16, got {dtype_name(dtype)}",
        )
        for dtype in (torch.int64, torch.uint8, torch.bool, torch.complex64, torch.complex128)
    )


def match_errors(name: str, first: str, build: Callable[..., Arguments]) -> tuple[ErrorInput, ...]:
    """One argument, `name`, whose dtype or device is not that of the `first`; `build` gets what to change."""
    dtypes = tuple(
        ErrorInput(
            f"{name}_{dtype_name(dtype)}",
            partial(build, dtype=dtype),
            f"expected {name} of dtype float32 to match {first}, got {dtype_name(dtype)}",
        )
        for dtype in (torch.float64, torch.bfloat16, torch.int64)
    )
    device = ErrorInput(
        f"{name}_elsewhere",
        lambda t: build(t, device=t.elsewhere()),
        f"expected {name} on device {{device}} to match {first}, got {{elsewhere}}",
    )
    return (*dtypes, device)


def overlap_errors(name: str, rest: Callable[[Make, int], list[Any]]) -> tuple[ErrorInput, ...]:
    """Views, of which several elements share a place, as the argument that is overwritten; `rest` gets their rows."""
    views = {
        "expanded": (lambda t: t(1, 4, view=lambda v: v.expand(3, 4)), "(3, 4) with strides (0, 1)"),
        "unfolded": (lambda t: t(9, view=lambda v: v.unfold(0, 4, 1)), "(6, 4) with strides (1, 1)"),
    }
    text = (
        "expected {} without internal overlap, got shape {}: more than one element of the written-to tensor refers to "
        "a single memory location. Please clone() the tensor before performing the operation."
    )

    def of(view: Callable[[Make], Tensor]) -> Callable[[Make], Arguments]:
        def build(t: Make) -> Arguments:
            x = view(t)
            return arguments(x, *rest(t, x.shape[0]))

        return build

    return tuple(
        ErrorInput(f"overlap_{kind}", of(view), text.format(name, what)) for kind, (view, what) in views.items()
    )


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# Layouts of the first argument, for operators that take any shape; the last size is never a power of two.
LAYOUTS: tuple[tuple[str, Callable[[Make], Tensor]], ...] = (
    ("vector", lambda t: t(7)),
    ("matrix", lambda t: t(5, 7)),
    ("four_dims", lambda t: t(2, 3, 1, 7)),
    ("one", lambda t: t(1, 1)),
    ("transposed", lambda t: t(7, 5, view=Tensor.t)),
    ("permuted", lambda t: t(7, 4, 3, view=swapped)),
    ("strided_columns", lambda t: t(5, 14, view=every_second_column)),
    ("strided_rows", lambda t: t(13, 7, view=every_third_row)),
    ("inner_block", lambda t: t(7, 12, view=inner)),
    ("zero_rows", lambda t: t(0, 7)),
    ("zero_rows_inside", lambda t: t(2, 0, 7)),
)
EXPANDED: tuple[tuple[str, Callable[[Make], Tensor]], ...] = (
    ("expanded", lambda t: t(1, 7, view=lambda v: v.expand(5, 7))),
)


def on_layouts(mutates: bool, build: Callable[[Make, Tensor], Arguments], suffix: str = "") -> tuple[Sample, ...]:
    """A sample for each layout of the first argument; one that is overwritten cannot be expanded."""

    def of(x: Callable[[Make], Tensor]) -> Callable[[Make], Arguments]:
        return lambda t: build(t, x(t))

    return tuple(Sample(name + suffix, of(x)) for name, x in (LAYOUTS if mutates else LAYOUTS + EXPANDED))

"""What is measured: operators, their cases, and the least cost of a case."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

Shape = tuple[int, ...]
Call = Callable[..., Any]

Task = Literal["forward", "forward and backward", "training step", "overhead", "overhead with grad"]
"""`forward` runs without grad. A `training step` also waits for the device, as a loop that reads its loss does. The two
`overhead` tasks measure the host time of a call: on CUDA, calls are queued without waiting for them to end."""

FORWARD: Task = "forward"
BACKWARD: Task = "forward and backward"
STEP: Task = "training step"
OVERHEAD: Task = "overhead"
OVERHEAD_GRAD: Task = "overhead with grad"


@dataclass(frozen=True)
class Cost:
    """Elements that must be read or written, each tensor once, and floating-point operations of the products."""

    elements: int
    flops: int


@dataclass(frozen=True)
class Case:
    """One operator at one size.

    `targets` has, by contender, the least ratio (its time over ours) that we aim for. `sweep` names the size along
    which the case is a point in a plot. `compiled` and `autotuned` say whether the compile modes, which compile for
    seconds, take part by default. `most_bytes` limits our peak in the memory benchmark.
    """

    op: str
    shape: Shape
    dtype: torch.dtype = torch.float32
    task: Task = FORWARD
    targets: Mapping[str, float] = field(default_factory=dict)
    sweep: str = ""
    compiled: bool = True
    autotuned: bool = False
    tf32: bool = False
    most_bytes: int | None = None

    @property
    def name(self) -> str:
        return f"{self.task} {self.shape} {self.dtype_name}"

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.") + (" (TF32)" if self.tf32 else "")


@dataclass(frozen=True)
class Operator:
    """An operator of the library, or a model of several calls.

    Args:
        name: the operator; a trailing `_` means that it overwrites its first argument.
        dims: names of the sizes in a shape.
        make: random arguments for a shape, a dtype and a device. The result depends row by row on the rows of `inputs`.
        cost: the cost of a shape and a task.
        cases: the cases for a device type.
        small: a shape for gradient checks.
        references: contenders beside the modes: another way to the result, or less work, such as a copy or a bare
            product. Each is built from one set of arguments, and called with the sets in turn.
        training_references: the same, for forward and backward.
        bounds: the references that compute less than the operator, so that their results aren't checked.
        memory: cases of the memory benchmark, for a device type.
        checked: arguments of the check, made of those of a measurement.
        inputs: how many of the first arguments have a row for each row of the result.
    """

    name: str
    dims: tuple[str, ...]
    make: Callable[[Shape, torch.dtype, torch.device], tuple[Tensor, ...]]
    cost: Callable[[Shape, Task], Cost]
    cases: Callable[[str], list[Case]]
    small: Shape
    references: Mapping[str, Callable[..., Call]] = field(default_factory=dict)
    training_references: Mapping[str, Callable[..., Call]] = field(default_factory=dict)
    bounds: tuple[str, ...] = ()
    memory: Callable[[str], list[Case]] = lambda device_type: []
    checked: Callable[[list[Tensor]], list[Tensor]] = lambda args: args
    inputs: int = 1

    @property
    def mutates(self) -> bool:
        return self.name.endswith("_")

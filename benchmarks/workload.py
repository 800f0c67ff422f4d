"""From a case to what is run: inputs, contenders, and a check of what each contender computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import implementations, timing
from .case import BACKWARD, FORWARD, OVERHEAD, OVERHEAD_GRAD, STEP, Case, Operator
from .operators import OPERATORS

SEED = 0
CHECKED_ROWS = 64
# Limits for ||out - exact|| / ||exact||, in units of the dtype's eps. Long sums may lose some digits; a wrong kernel is
# far off.
ALLOWED_EPS = {torch.bfloat16: 8, torch.float16: 8, torch.float32: 256, torch.float64: 2**16}
# Products of TF32 have 10 bits of mantissa.
ALLOWED_TF32 = 3e-3


def ours(device_type: str) -> str:
    """The mode of torchops on a type of device."""
    return "cuda" if device_type == "cuda" else "cpp"


def default_modes(case: Case, device_type: str) -> list[str]:
    """Every mode that runs here, except those that compile for long and were not requested."""
    left_out = set() if case.compiled else {"compile", "compile-ours"}
    left_out |= set() if case.autotuned else {"compile-max"}
    return [
        mode
        for mode in implementations.MODES
        if mode not in left_out and not implementations.unavailable(mode, device_type)
    ]


@dataclass(frozen=True)
class Workload:
    """Contenders by name, ours first, and sets of inputs to call them with in turn."""

    operator: Operator
    case: Case
    contenders: dict[str, Callable[..., Any]]
    inputs: Sequence[tuple[Tensor, ...]]


def build(
    case: Case, modes: Sequence[str], device: torch.device, references: bool = True, rotated: bool = True
) -> Workload:
    """Makes inputs and contenders. Modes in which the operator doesn't exist are left out."""
    operator = OPERATORS[case.op]
    torch.manual_seed(SEED)
    inputs = timing.rotate(lambda: _inputs(operator, case, device), timing.MAX_ROTATED if rotated else 1)
    functions = {mode: implementations.find(case.op, mode) for mode in modes}
    # In the order of the modes, not of the request: ours comes first.
    contenders = {
        mode: timing.contender(function, case.task)
        for mode in implementations.MODES
        if (function := functions.get(mode)) is not None
    }
    if references:
        by_task = {FORWARD: operator.references, BACKWARD: operator.training_references}
        contenders |= {name: make(*inputs[0]) for name, make in by_task.get(case.task, {}).items()}
    return Workload(operator, case, contenders, inputs)


def _inputs(operator: Operator, case: Case, device: torch.device) -> tuple[Tensor, ...]:
    args = operator.make(case.shape, case.dtype, device)
    if case.task in (FORWARD, OVERHEAD):
        return args
    # The first input of a model is data, which needs no gradient.
    for tensor in args[1:] if case.task == STEP else args:
        tensor.requires_grad_()
    if case.task == OVERHEAD_GRAD:
        return args
    formula = implementations.find(case.op, "eager")
    assert formula is not None
    with torch.no_grad():
        return *args, torch.randn_like(formula(*args))


def relative_error(workload: Workload, name: str) -> float:
    """||out - exact|| / ||exact|| of one contender over some rows, against the formula in float64."""
    case, call, args = workload.case, workload.contenders[name], list(workload.inputs[0])
    rows = torch.linspace(0, args[0].shape[0] - 1, CHECKED_ROWS, device=args[0].device).long()
    formula = implementations.find(case.op, "eager")
    assert formula is not None
    with torch.no_grad():
        inputs = workload.operator.inputs
        exact = formula(*(t[rows].double() for t in args[:inputs]), *(t.double() for t in args[inputs:]))
        if workload.operator.mutates:
            args[0] = args[0].clone()
        out = call(*args)[rows].double()
        return ((out - exact).norm() / exact.norm()).item()


def check(workload: Workload) -> tuple[dict[str, float], dict[str, str]]:
    """Relative errors of the contenders by name, and why each wrong or failing one is so."""
    case = workload.case
    errors: dict[str, float] = {}
    wrong: dict[str, str] = {}
    if case.task != FORWARD:
        return errors, wrong
    allowed = ALLOWED_TF32 if case.tf32 else ALLOWED_EPS[case.dtype] * torch.finfo(case.dtype).eps
    for name in workload.contenders:
        if name in workload.operator.references:
            continue
        try:
            errors[name] = relative_error(workload, name)
        except Exception as raised:
            wrong[name] = timing.first_line(raised)
        else:
            if not errors[name] <= allowed:
                wrong[name] = f"wrong result: relative error {errors[name]:.2g}, at most {allowed:.2g} allowed"
    return errors, wrong

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
# Of a block of rows in float64, the widest input or the result. A formula holds several tensors of that size.
BLOCK_ELEMENTS = 2**22
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
    """The error of the result of one contender over some rows, against the formula in float64."""
    case, call = workload.case, workload.contenders[name]
    args = workload.operator.checked(list(workload.inputs[0]))
    rows = torch.linspace(0, args[0].shape[0] - 1, CHECKED_ROWS, device=args[0].device).long()
    formula = implementations.find(case.op, "eager")
    assert formula is not None
    with torch.no_grad():
        inputs = workload.operator.inputs
        exact = formula(*(t[rows].double() for t in args[:inputs]), *(t.double() for t in args[inputs:]))
        if workload.operator.mutates:
            args[0] = args[0].clone()
        return _distance(call(*args)[rows], exact)


def _distance(got: Tensor, exact: Tensor) -> float:
    """||got - exact|| / ||exact||, or ||got|| where the exact value is 0."""
    return ((got.double() - exact).norm() / (exact.norm().item() or 1.0)).item()


def exact_gradients(workload: Workload) -> list[Tensor]:
    """The gradients of the formula in float64, on the whole problem, since those of weights sum over all rows.

    The result depends row by row on the inputs, so this goes block by block, and no intermediate result of the whole
    problem needs memory in float64.
    """
    *args, cotangent = workload.inputs[0]
    formula = implementations.find(workload.case.op, "eager")
    assert formula is not None
    count = workload.operator.inputs
    weights = [t.detach().double().requires_grad_() for t in args[count:]]
    gradients = [torch.zeros_like(t, dtype=torch.float64, requires_grad=False) for t in args]
    block = max(1, BLOCK_ELEMENTS // max(t[0].numel() for t in (*args[:count], cotangent)))
    for start in range(0, len(cotangent), block):
        rows = slice(start, start + block)
        parts = [*(t[rows].detach().double().requires_grad_() for t in args[:count]), *weights]
        made = torch.autograd.grad(formula(*parts), parts, cotangent[rows].double())
        for i, (gradient, part) in enumerate(zip(gradients, made, strict=True)):
            (gradient[rows] if i < count else gradient).add_(part)
    return gradients


def check(workload: Workload) -> tuple[dict[str, float], dict[str, str]]:
    """Relative errors of the contenders by name, and why each wrong or failing one is so.

    Forward, that is the result. With backward, it is the worst of the gradients. Other tasks are not checked, and
    neither are bounds, which compute something else.
    """
    case = workload.case
    errors: dict[str, float] = {}
    wrong: dict[str, str] = {}
    checked = [name for name in workload.contenders if name not in workload.operator.bounds]
    if case.task not in (FORWARD, BACKWARD) or not checked:
        return errors, wrong
    allowed = ALLOWED_TF32 if case.tf32 else ALLOWED_EPS[case.dtype] * torch.finfo(case.dtype).eps
    exact = exact_gradients(workload) if case.task == BACKWARD else []
    for name in checked:
        try:
            if case.task == FORWARD:
                errors[name] = relative_error(workload, name)
            else:
                gradients = workload.contenders[name](*workload.inputs[0])
                distances = [_distance(*pair) for pair in zip(gradients, exact, strict=True)]
                # Unlike max(), this is NaN wherever it is.
                errors[name] = torch.tensor(distances, dtype=torch.float64).max().item()
        except Exception as raised:
            wrong[name] = timing.first_line(raised)
        else:
            if not errors[name] <= allowed:
                what = "result" if case.task == FORWARD else "gradient"
                wrong[name] = f"wrong {what}: relative error {errors[name]:.2g}, at most {allowed:.2g} allowed"
    return errors, wrong

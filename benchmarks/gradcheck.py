"""`python -m benchmarks gradcheck`: values and derivatives of every implementation in float64.

Numerical differentiation gives the derivative without knowing a formula. PyTorch does it in two ways: slow mode looks
at one entry of the Jacobian at a time, fast mode at a random projection of it. The cotangents of slow mode have a
single 1, which hides a kernel that leaves most of its output unwritten. So the gradients for random cotangents are also
compared with those of the eager formula.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from . import implementations, timing, workload
from . import options as shared
from .case import Operator, Shape
from .operators import OPERATORS
from .options import device_of
from .run import refusal

# Compiled graphs have no second derivative, and neither does code that autograd cannot see.
FIRST_ORDER = {
    *((mode, "square_matmul_") for mode in ("py", "triton")),
    *(("triton", op) for op in ("softmax", "softmax_", "transition")),
}
# The formula overwrites what its own gradient needs, which autograd reports.
IN_PLACE = ("gate_", "layer_norm_", "square_matmul_", "add_transition_")
NO_GRADIENT = {
    *((mode, op) for mode in ("eager", "compile", "compile-max") for op in IN_PLACE),
    *(("eager-in-place", op) for op in ("gate_", "layer_norm_", "softmax_", "add_transition_")),
    *(("triton", op) for op in ("gate_", "layer_norm_", "add_transition_")),
}
# The result is the first argument plus the formula.
ADDING = ("add_transition_",)
# No float64 support.
NO_FLOAT64 = ("quack", "liger")
# Numerical derivatives over the perceptron's thousands of parameters would take minutes; its layers are dense anyway.
LARGE = ("mlp",)


def checks(operator: Operator, mode: str, device: torch.device, shape: Shape = ()) -> dict[str, str]:
    """An empty string or the error, by check. Empty if the operator doesn't exist in this mode."""
    found, formula = (
        implementations.find(operator.name, mode),
        implementations.find(operator.name.removeprefix("add_").rstrip("_"), "eager"),
    )
    if found is None or formula is None or (mode, operator.name) in NO_GRADIENT:
        return {}
    function = _pure(found) if operator.mutates else found
    formula = _added(formula) if operator.name in ADDING else formula
    torch.manual_seed(workload.SEED)
    args = operator.make(shape or operator.small, torch.float64, device)
    for tensor in args:
        tensor.requires_grad_()
    todo: dict[str, Callable[[], object]] = {
        "value": lambda: torch.testing.assert_close(function(*args), formula(*args)),
        "random cotangents": lambda: _random_cotangents(function, formula, args),
    }
    if operator.name not in LARGE:
        todo["gradcheck, fast"] = lambda: gradcheck(function, args, fast_mode=True)
        todo["gradcheck, slow"] = lambda: gradcheck(function, args)
        if not mode.startswith("compile") and (mode, operator.name) not in FIRST_ORDER:
            todo["gradgradcheck"] = lambda: gradgradcheck(function, args, fast_mode=True)
    return {name: _outcome(check) for name, check in todo.items()}


def _pure(function: Callable[..., Any]) -> Callable[..., Any]:
    # A leaf that requires a gradient must not be overwritten; its copy may.
    return lambda x, *others: function(x.clone(), *others)


def _added(formula: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, *others: x + formula(x, *others)


def _random_cotangents(function: Callable[..., Any], formula: Callable[..., Any], args: tuple[Tensor, ...]) -> None:
    out, expected = function(*args), formula(*args)
    cotangent = torch.randn_like(expected)
    for got, right in zip(
        torch.autograd.grad(out, args, cotangent), torch.autograd.grad(expected, args, cotangent), strict=True
    ):
        torch.testing.assert_close(got, right)


def _outcome(check: Callable[[], object]) -> str:
    try:
        check()
    except Exception as error:
        return timing.first_line(error)
    return ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    shared.add(parser, "op", "device", "mode")


def run(options: argparse.Namespace) -> int:
    """Checks and prints. The status is 1 if a check fails."""
    device = device_of(options)
    if reason := refusal(options, device):
        return shared.refused("gradcheck", reason)
    available = [mode for mode in implementations.MODES if not implementations.unavailable(mode, device.type)]
    modes = options.mode or [mode for mode in available if not mode.startswith("compile") and mode not in NO_FLOAT64]
    failed = 0
    for op in options.op or OPERATORS:
        for mode in modes:
            outcomes = checks(OPERATORS[op], mode, device)
            problems = {name: problem for name, problem in outcomes.items() if problem}
            failed += len(problems)
            if outcomes:
                print(f"{op:<16} {mode:<12} {'FAILED' if problems else 'ok: ' + '; '.join(outcomes)}", flush=True)
            for name, problem in problems.items():
                print(f"    {name}: {problem}")
    return 1 if failed else 0

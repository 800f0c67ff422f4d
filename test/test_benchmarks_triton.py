"""The benchmarks' kernels in Triton, interpreted on the CPU. test_benchmarks.py runs them on a GPU."""

from __future__ import annotations

from triton_interpreter import interpreted, needs_triton

CHECKED = """
import sys
from pathlib import Path

import torch

sys.path.append(str(Path.cwd().parent))
from benchmarks import gradcheck, implementations, workload
from benchmarks.case import BACKWARD, FORWARD, Case
from benchmarks.implementations import triton_rows, triton_softmax, triton_square_matmul, triton_transition
from benchmarks.operators import OPERATORS

cpu = torch.device("cpu")
HALF = torch.float16, torch.bfloat16
assert implementations.unavailable("triton", "cpu") == ""


def checked(op, shape, derivatives):
    outcomes = gradcheck.checks(OPERATORS[op], "triton", cpu)
    assert len(outcomes) == derivatives and not any(outcomes.values()), (op, outcomes)
    for dtype in (torch.float64, torch.float32, *HALF):
        for task in (FORWARD,) if op.endswith("_") else (FORWARD, BACKWARD):
            work = workload.build(Case(op, shape, dtype, task), ["triton"], cpu, references=False, rotated=False)
            errors, wrong = workload.check(work)
            assert "triton" in errors and wrong == {}, (op, dtype, task, wrong)
            if op.endswith("_"):
                args = work.inputs[0]
                expected = work.contenders["triton"](args[0].clone(), *args[1:])
                out = work.contenders["triton"](*args)
                assert out is args[0] and torch.equal(out, expected), (op, dtype)
"""

ROWS = """
for whole_row in (triton_rows.WHOLE_ROW, 4):
    for module in (triton_rows, triton_softmax):
        module.WHOLE_ROW = module.PART = whole_row
    for op, derivatives in {
        "sigmoid": 5, "sigmoid_": 5, "softmax": 4, "softmax_": 4, "layer_norm": 5, "layer_norm_": 0
    }.items():
        checked(op, (5, 131 if whole_row > 131 else 35), derivatives)
"""

# The interpreter multiplies the bits of bfloat16 in tl.dot.
GATES = """
HALF = (torch.float16,)
for op, derivatives in {"gate": 5, "gate_": 0, "glu": 5, "swiglu": 5}.items():
    checked(op, (131, 67, 35), derivatives)
"""

# Whole rows in one kernel, and then everything that wider rows take.
PRODUCTS = """
HALF = (torch.float16,)
for widest in (64, 4):
    for module in (triton_square_matmul, triton_transition):
        module.WHOLE_ROWS = dict.fromkeys(module.WHOLE_ROWS, widest)
    triton_square_matmul.PANEL_ROWS, triton_square_matmul.PANEL_ELEMENTS = 50, 1
    checked("square_matmul", (131, 51), 5)
    checked("square_matmul_", (131, 51), 4)
    checked("transition", (67, 51, 70), 4)
    checked("add_transition_", (67, 51, 70), 0)
"""

REFUSED = """
for op in ("gate_", "layer_norm_", "add_transition_"):
    x, *parameters = OPERATORS[op].make(OPERATORS[op].small, torch.float64, cpu)
    out = implementations.find(op, "triton")(x.clone(), *(p.requires_grad_() for p in parameters))
    try:
        out.sum().backward()
    except NotImplementedError:
        pass
    else:
        raise AssertionError(op)
"""


@needs_triton
def test_rows_interpreted() -> None:
    done = interpreted(CHECKED + ROWS)
    assert done.returncode == 0, done.stderr


@needs_triton
def test_gates_interpreted() -> None:
    done = interpreted(CHECKED + GATES + REFUSED)
    assert done.returncode == 0, done.stderr


@needs_triton
def test_products_interpreted() -> None:
    done = interpreted(CHECKED + PRODUCTS)
    assert done.returncode == 0, done.stderr

"""The benchmarks' kernels in Triton over rows: interpreted, on the CPU. test_benchmarks.py runs others on a GPU."""

from __future__ import annotations

from triton_interpreter import interpreted, needs_triton

INTERPRETED = """
import sys
from pathlib import Path

import torch

sys.path.append(str(Path.cwd().parent))
from benchmarks import gradcheck, implementations, workload
from benchmarks.case import BACKWARD, FORWARD, Case
from benchmarks.implementations import triton_rows
from benchmarks.operators import OPERATORS

cpu = torch.device("cpu")
assert implementations.unavailable("triton", "cpu") == ""
for whole_row in (triton_rows.WHOLE_ROW, 64):
    triton_rows.WHOLE_ROW = triton_rows.PART = whole_row
    for op in ("sigmoid", "sigmoid_", "layer_norm"):
        outcomes = gradcheck.checks(OPERATORS[op], "triton", cpu)
        assert len(outcomes) == 5 and not any(outcomes.values()), outcomes
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for task in (FORWARD,) if op.endswith("_") else (FORWARD, BACKWARD):
                work = workload.build(Case(op, (67, 131), dtype, task), ["triton"], cpu, rotated=False)
                errors, wrong = workload.check(work)
                assert "triton" in errors and wrong == {}, (op, dtype, task, wrong)
"""


@needs_triton
def test_rows_interpreted() -> None:
    done = interpreted(INTERPRETED)
    assert done.returncode == 0, done.stderr

"""Contenders whose results or gradients are wrong are not timed."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from checks import assert_all_close
from torch import Tensor

from benchmarks import workload
from benchmarks.case import BACKWARD, Case
from benchmarks.operators import OPERATORS

CPU = torch.device("cpu")
MODES = ("cpp", "eager", "eager-in-place", "py")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", [op for op in OPERATORS if op != "mlp"])
def test_values_in_lower_precision(op: str, dtype: torch.dtype) -> None:
    shape = (131, 67, 35)[: len(OPERATORS[op].dims)]
    work = workload.build(Case(op, shape, dtype), MODES, CPU, rotated=False)
    errors, wrong = workload.check(work)
    assert wrong == {}
    assert {"cpp", "eager"} <= errors.keys()


def test_wrong_results_are_not_timed() -> None:
    work = workload.build(Case("sigmoid", (64, 8)), ["eager"], CPU, rotated=False)
    work.contenders["eager"] = torch.tanh
    assert "wrong result" in workload.check(work)[1]["eager"]


def test_references_are_checked_unless_they_are_bounds() -> None:
    work = workload.build(Case("dense", (64, 8, 5)), ["cpp"], CPU, rotated=False)
    assert workload.check(work)[1] == {}
    assert set(workload.check(work)[0]) == {"cpp", "preallocated"}
    work.contenders["preallocated"] = work.contenders["linear"]
    assert "wrong result" in workload.check(work)[1]["preallocated"]


@pytest.mark.parametrize("op", ["gate", "gate_", "glu", "layer_norm", "layer_norm_", "swiglu", "transition"])
def test_wrong_references_are_not_timed(op: str) -> None:
    """Each reference that is no bound, with a result of the right shape that is off by a percent."""
    work = workload.build(Case(op, OPERATORS[op].small), [], CPU)
    names = set(work.contenders) - set(OPERATORS[op].bounds)
    assert set(workload.check(work)[0]) == names >= {"preallocated"}
    for name in names:
        right = work.contenders[name]
        work.contenders[name] = lambda *args, right=right: right(*args) * 1.01
    assert workload.check(work)[1].keys() == names


def test_packed_weights_are_those_of_the_set_of_inputs() -> None:
    for op in ("glu", "swiglu", "transition", "add_transition_"):
        work = workload.build(Case(op, OPERATORS[op].small), [], CPU)
        assert len(work.inputs) > 1
        for inputs in work.inputs:
            assert workload.check(replace(work, inputs=[inputs]))[1] == {}


@pytest.mark.parametrize("factor", [1.01, math.nan])
@pytest.mark.parametrize("number", range(3))
def test_wrong_gradients_are_not_timed(number: int, factor: float) -> None:
    """Those of the input, of the weight and of the bias."""
    work = workload.build(Case("dense", (64, 8, 5), task=BACKWARD), ["cpp", "eager", "py"], CPU, rotated=False)
    right = work.contenders["eager"]

    def wrong(*args: Tensor) -> list[Tensor]:
        made = [*right(*args)]
        made[number] = made[number] * factor
        return made

    work.contenders["eager"] = wrong
    errors, refused = workload.check(work)
    assert set(errors) == {"cpp", "eager", "py"}
    assert refused == {"eager": f"wrong gradient: relative error {errors['eager']:.2g}, at most 3.1e-05 allowed"}
    assert errors["eager"] == pytest.approx(factor - 1, rel=1e-3, nan_ok=True)


@pytest.mark.parametrize("op", [op for op in OPERATORS if op != "mlp" and not op.endswith("_")])
def test_gradients_in_lower_precision(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (131, 67, 35)[: len(OPERATORS[op].dims)]
    work = workload.build(Case(op, shape, torch.bfloat16, BACKWARD), MODES, CPU, rotated=False)
    whole = workload.exact_gradients(work)
    errors, wrong = workload.check(work)
    assert wrong == {}
    assert {"cpp", "eager"} <= errors.keys()
    monkeypatch.setattr(workload, "BLOCK_ELEMENTS", 1000)
    assert_all_close(workload.exact_gradients(work), whole)

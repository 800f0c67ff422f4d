"""How contenders are timed: in turns, of cold inputs, and without what they do once."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks import timing
from benchmarks.case import FORWARD, Case, Cost
from benchmarks.report import Result

CPU = torch.device("cpu")


def test_a_failing_contender_leaves_the_others_alone() -> None:
    def fails(x: Tensor) -> Tensor:
        raise ValueError("no luck\nand a long explanation")

    measured = timing.measure(
        {"good": torch.sigmoid, "bad": fails}, [(torch.zeros(4),)], FORWARD, CPU, timing.effort("cpu", quick=True)
    )
    assert list(measured.timings) == ["good"]
    assert measured.errors == {"bad": "ValueError: no luck"}


def test_times_and_ratios_are_of_the_calls() -> None:
    measured = timing.measure(
        {"one": lambda x: time.sleep(0.002), "three": lambda x: time.sleep(0.006)},
        [(torch.zeros(1),)],
        FORWARD,
        CPU,
        timing.effort("cpu", quick=True),
    )
    assert 0.002 <= measured.timings["one"].low <= measured.timings["one"].high
    # Sleeps are never shorter than asked for, but a busy machine makes any of them longer.
    assert measured.timings["three"].seconds >= 0.006
    assert measured.timings["one"].ratio == 1.0


def test_each_contender_is_measured_after_each_other_one() -> None:
    called: list[str] = []
    contenders = {name: (lambda x, name=name: called.append(name)) for name in ("a", "b", "c")}
    effort = replace(timing.effort("cpu", quick=True), min_rounds=12)
    timing.measure(contenders, [(torch.zeros(4),)], FORWARD, CPU, effort)
    samples = [name for name, _ in itertools.groupby(called)]
    assert {*itertools.pairwise(samples)} == {*itertools.permutations(contenders, 2)}


def test_no_sample_has_the_first_call_with_a_set_of_inputs() -> None:
    """What a contender does once for each, such as packing weights, is not measured."""
    seen: set[int] = set()
    before: list[int] = []

    class Measuring:
        def __enter__(self) -> None:
            before.append(len(seen))

        def __exit__(self, *error: object) -> None:
            pass

    def call(x: Tensor) -> None:
        seen.add(x.data_ptr())
        time.sleep(2e-3)  # so that a sample has one call

    inputs, effort = [(torch.zeros(4),) for _ in range(8)], timing.effort("cpu", quick=True)
    timing.measure({"one": call}, inputs, FORWARD, CPU, effort, during_rounds=Measuring())
    assert before == [8]


def test_inputs_rotate_past_the_cache() -> None:
    sets = timing.rotate(lambda: (torch.empty(2**24),))
    assert sum(x.nbytes for (x,) in sets) >= timing.ROTATED_BYTES
    assert len({x.data_ptr() for (x,) in sets}) == len(sets)
    assert timing.cold(sets[0])
    assert not timing.cold((torch.empty(2**10),))
    assert not Result(Case("dense", (1, 1, 1)), Cost(1, 1), 0.0).cold
    assert Result(Case("dense", (2**20, 128, 128), torch.bfloat16), Cost(1, 1), 0.0).cold

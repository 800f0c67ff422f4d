"""Parametrisation of the generic suites, and what every test starts from.

A test that takes `case` runs for every operator of `op_db.py`; one that also takes `device`, `dtype`, `sample` or
`error` runs for each of those that the operator has. The mark `ops` narrows this down:

    @pytest.mark.ops(mutating=True, dtypes=[torch.float64], leaves=True, large=False)
    def test_something(case, device, dtype, sample): ...

An operator that has none of the `dtypes` is left out, and with `differentiable=True` one without gradients. Marks of a
module and of a test add up.

`where` is a predicate for what these cannot say; it is called with the chosen values as keyword arguments. CUDA is
among the devices when there is one and the operator has a kernel for it.

A test that passes without having executed an assertion fails: an `assert`, `pytest.raises` or one of `ASSERTING`.
"""

from __future__ import annotations

import functools
import os
import unittest
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest

# Read when torch loads OpenMP: threads that spin while they wait take the cores from the other test processes.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Read when torch is imported: that results of an operator share memory is an error of compiled calls, also outside CI.
os.environ.setdefault("TORCHINDUCTOR_ERROR_ON_CUSTOM_OP_ALIASING", "1")

import torch
from _pytest.assertion import rewrite
from op_db import OPS, SCALED, UPDATES, OpCase
from samples import dtype_name

# --- every test asserts ----------------------------------------------------------------------------------------------

# What these assert counts and explains itself as in the tests.
pytest.register_assert_rewrite(
    "attention_samples",
    "attention_update_samples",
    "checks",
    "cuda_checks",
    "distributed_worker",
    "memory_growth",
    "mutations",
    "pair_bias_samples",
    "sharding",
)

ASSERTING: tuple[tuple[Any, str], ...] = (
    (pytest, "raises"),
    (pytest, "warns"),
    (torch.testing, "assert_close"),
    (torch.library, "opcheck"),
    (unittest.TestCase, "assertMultiLineEqual"),  # of expecttest
)


class Executed:
    """The number of assertions that were executed."""

    count = 0

    @classmethod
    def passed(cls) -> bool:
        cls.count += 1
        return False

    @classmethod
    def calls_of(cls, owner: Any, name: str) -> None:
        function = getattr(owner, name)

        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            cls.count += 1
            return function(*args, **kwargs)

        setattr(owner, name, counted)


# With `enable_assertion_pass_hook`, pytest asks this after each `assert` that holds, and if it is true describes all
# values for the hook `pytest_assertion_pass`. Describing tensors takes longer than the tests, and calls operators under
# whatever mode a test is in; the question alone is enough to count.
rewrite._check_if_assertion_pass_impl = Executed.passed
for _owner, _name in ASSERTING:
    Executed.calls_of(_owner, _name)

if os.environ.get("EXPECTTEST_ACCEPT"):
    # What this accepts, it compares with nothing. It finds the text to write anew by the number of calls above it.
    import expecttest

    _snapshots: Any = expecttest.TestCase
    _inline = _snapshots.assertExpectedInline

    def _accepted(test: Any, actual: str, expect: str, skip: int = 0) -> None:
        Executed.count += 1
        _inline(test, actual, expect, skip + 1)

    _snapshots.assertExpectedInline = _accepted


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    before = Executed.count
    yield
    if Executed.count == before:
        pytest.fail(
            "passed without an executed assertion: don't generate this case, or skip it with the reason "
            "(if all tests say so, delete test/__pycache__, which another configuration wrote)",
            pytrace=False,
        )


# --- parametrisation -------------------------------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    # Cached graphs are found by their operators' names, so they may come from another build of the library. Compiled
    # C++, which is found by its source, is shared by all tests.
    torch._inductor.config.fx_graph_cache = False
    torch._functorch.config.enable_autograd_cache = False
    torch._dynamo.config.automatic_dynamic_local_pgo = False
    config.addinivalue_line(
        "markers", "ops(mutating, differentiable, dtypes, samples, leaves, large, where): narrows the cases of a test"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("serial"):
            item.add_marker(pytest.mark.xdist_group("serial"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" not in metafunc.fixturenames:
        return
    only: dict[str, Any] = {}
    for mark in metafunc.definition.iter_markers("ops"):  # from the nearest
        only = {**mark.kwargs, **only}
    known = ["case", "device", "dtype", "sample", "error"]
    names = [name for name in known if name in metafunc.fixturenames]
    rows = [row for case in (*OPS, *SCALED, *UPDATES) if _wanted(case, only) for row in _rows(case, names, only)]
    metafunc.parametrize(names, [pytest.param(*row.values(), id="-".join(map(_id, row.values()))) for row in rows])


def _wanted(case: OpCase, only: dict[str, Any]) -> bool:
    has = {"mutating": case.mutates is not None, "differentiable": case.differentiable}
    some_dtype = any(d in case.dtypes for d in only.get("dtypes", case.dtypes))
    return some_dtype and all(only.get(name, value) == value for name, value in has.items())


def _rows(case: OpCase, names: list[str], only: dict[str, Any]) -> Iterator[dict[str, Any]]:
    choices: dict[str, list[Any]] = {
        "case": [case],
        "device": case.devices(),
        "dtype": [d for d in only.get("dtypes", case.dtypes) if d in case.dtypes],
        "sample": [
            s
            for s in case.samples
            if ("samples" not in only or s.name in only["samples"])
            and ("leaves" not in only or s.leaves == only["leaves"])
            and ("large" not in only or s.large == only["large"])
        ],
        "error": list(case.errors),
    }
    rows: list[dict[str, Any]] = [{}]
    for name in names:
        rows = [{**row, name: choice} for row in rows for choice in choices[name]]
    where: Callable[..., bool] = only.get("where", lambda **_: True)
    yield from (row for row in rows if where(**row))


def _id(value: Any) -> str:
    return dtype_name(value) if isinstance(value, torch.dtype) else getattr(value, "name", str(value))


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    """Seeded, with at least two threads (so that parallel code runs in parallel) and no compiled code left over."""
    torch.manual_seed(0)
    torch.set_num_threads(max(2, torch.get_num_threads()))
    yield
    torch._dynamo.reset()
    # Test processes share a device, and what Triton and NCCL allocate there can't come from PyTorch's cache.
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 1 << 30:
        torch.cuda.empty_cache()

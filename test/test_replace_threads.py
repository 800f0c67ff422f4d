"""torchops.nn.replace: what other threads see of it, and several threads that call it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
import torch
from test_replace_gates import SwiGLU
from torch import Tensor, nn

from torchops.nn import Replacements, replace

LAYER = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).eval()
X = torch.randn(3, 6)


class Asking(SwiGLU):
    """While its forward is traced, another thread calls `function`."""

    function: Callable[[], Any]
    results: list[Any]

    def forward(self, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as other:
            type(self).results.append(other.submit(type(self).function).result())
        return super().forward(x)


OTHERS: dict[str, Callable[[], Callable[[], Any]]] = {
    "module": lambda: functools.partial(LAYER, X),
    "compiled": lambda: functools.partial(torch.compile(LAYER, backend="eager"), X),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_threads_see_no_trace(name: str) -> None:
    function = OTHERS[name]()
    patched = nn.Module.__call__, nn.Module.__getattr__
    expected = function()  # compiled before: compilation would wait for the end of the trace
    kind: Any = type("Asking", (Asking,), {"function": staticmethod(function), "results": []})
    assert replace(kind()).replaced == ("",)
    assert kind.results
    for result in kind.results:
        torch.testing.assert_close(result, expected)
    assert (nn.Module.__call__, nn.Module.__getattr__) == patched
    assert not torch.fx._symbolic_trace.is_fx_symbolic_tracing()


class Reading(SwiGLU):
    kinds: ClassVar[list[type]] = []

    def forward(self, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as other:
            self.kinds.append(other.submit(lambda: type(self.up.weight)).result())
        return super().forward(x)


def test_other_threads_read_parameters() -> None:
    assert replace(Reading()).replaced == ("",)
    assert set(Reading.kinds) == {nn.Parameter}


def test_several_threads_replace() -> None:
    def replaced(_: int) -> Replacements:
        return replace(nn.ModuleList(SwiGLU() for _ in range(20)))  # whose parameters are drawn meanwhile

    with ThreadPoolExecutor(3) as threads:
        for report in threads.map(replaced, range(8)):
            assert report == Replacements(tuple(map(str, range(20))), {})


def test_compilation_waits() -> None:
    """Otherwise it would raise, or compile what torch.fx has put in place."""
    compiled = torch.compile(LAYER, backend="eager", fullgraph=True)
    compiled(X)
    done, errors = threading.Event(), []

    def compiles() -> None:
        while not done.is_set():
            torch._dynamo.reset()
            try:
                compiled(X)
            except Exception as error:
                errors.append(error)

    thread = threading.Thread(target=compiles)
    thread.start()
    reports = [replace(nn.ModuleList(SwiGLU() for _ in range(20))) for _ in range(3)]
    done.set()
    thread.join()
    assert not errors
    assert [len(report.replaced) for report in reports] == [20] * 3


def test_a_compiler_calls_it() -> None:
    """While another thread does."""
    begun = threading.Event()

    def backend(graph: Any, inputs: Any) -> Any:
        begun.set()
        assert replace(nn.ModuleList(SwiGLU() for _ in range(5))).left == {}
        return graph

    def compiles() -> None:
        torch.compile(nn.Sequential(nn.Linear(6, 6)), backend=backend)(X)

    def replaces() -> None:
        for _ in range(3):
            replace(nn.ModuleList(SwiGLU() for _ in range(5)))

    threads = [threading.Thread(target=function, daemon=True) for function in (replaces, compiles)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert begun.is_set()
    assert not any(thread.is_alive() for thread in threads)


class Replacing(SwiGLU):
    def forward(self, x: Tensor) -> Tensor:
        replace(nn.Sequential(SwiGLU(), nn.Linear(6, 6), nn.Sigmoid()))
        return super().forward(x)


def test_a_traced_forward_calls_it() -> None:
    """It is left, and nothing waits for itself."""
    found: list[Replacements] = []
    thread = threading.Thread(target=lambda: found.append(replace(Replacing())), daemon=True)
    thread.start()
    thread.join(60)
    assert [list(report.left) for report in found] == [[""]]

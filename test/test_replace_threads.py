"""torchops.replace: several threads that call it, and that compile meanwhile."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from test_replace_declared import Fused, SwiGLU
from torch import nn

from torchops import Report, replace

X = torch.randn(3, 6)


def test_several_threads_replace() -> None:
    models = [nn.ModuleList(SwiGLU() for _ in range(20)) for _ in range(8)]  # initial values are random numbers
    with ThreadPoolExecutor(3) as threads:
        for report in threads.map(lambda model: replace(model, {SwiGLU: Fused}), models):
            assert report.replaced == tuple(map(str, range(20)))
            assert report.left == {}


def test_a_compiler_calls_it() -> None:
    """While another thread does: neither waits for the other forever."""
    begun = threading.Event()

    def backend(graph: Any, inputs: Any) -> Any:
        begun.set()
        assert replace(models[0], {SwiGLU: Fused}).left == {}
        return graph

    models = [nn.ModuleList(SwiGLU() for _ in range(5)) for _ in range(4)]
    compiled = torch.compile(nn.Sequential(nn.Linear(6, 6)), backend=backend)

    def compiles() -> None:
        compiled(X)

    def replaces() -> None:
        for model in models[1:]:
            replace(model, {SwiGLU: Fused})

    threads = [threading.Thread(target=function, daemon=True) for function in (replaces, compiles)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert begun.is_set()
    assert not any(thread.is_alive() for thread in threads)


PAIR = nn.Sequential(nn.Linear(6, 6), nn.Sigmoid())


class Replacing(SwiGLU):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        replace(copy.deepcopy(PAIR))
        return super().forward(x)


def test_a_forward_calls_it() -> None:
    """Which is compared, and nothing waits for itself."""
    found: list[Report] = []

    def replaces() -> None:
        found.append(replace(nn.ModuleList([Replacing()]), {Replacing: Fused}))

    thread = threading.Thread(target=replaces, daemon=True)
    thread.start()
    thread.join(60)
    assert [report.replaced for report in found] == [("0",)]

"""The order of calls that use one workspace, without GPUs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from torchops.distributed import symmetric_memory


class Stream:
    """Knows which events work on it comes after."""

    def __init__(self) -> None:
        self.after: set[Any] = set()

    def wait_event(self, event: Any) -> None:
        self.after |= event

    def wait_stream(self, other: Stream) -> None:
        self.after |= other.after

    def record_event(self) -> Any:
        return frozenset(self.after)


def test_a_call_that_exchanges_nothing_comes_after_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda _: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda _: 2)
    monkeypatch.setattr(symmetric_memory, "_stream", lambda _: Stream())
    former = frozenset(["the work of a call on another stream"])
    workspace: Any = SimpleNamespace(used_by=former)
    current = Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current)
    with (
        pytest.raises(MemoryError),
        symmetric_memory.Peers(None, torch.device("cuda"), workspace),
    ):
        raise MemoryError
    assert former <= workspace.used_by

"""torchops.inductor on Inductor itself: the code that it generates, its hooks, its caches, AOTInductor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checks import assert_all_close
from test_compile import allocations
from test_inductor import SIGMOID, everywhere, t, values
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache

import torchops
from torchops.inductor import table

__all__ = ["everywhere"]  # a fixture


@pytest.fixture(autouse=True)
def _off() -> Iterator[None]:
    yield
    torchops.inductor.disable()
    assert config.joint_custom_pre_pass is None
    assert config.post_grad_custom_pre_pass is None


def gate(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.sigmoid(F.linear(x, w, b)) * x


def test_operators_and_memory_of_compiled_code() -> None:
    """Forward and backward are an operator each, nothing else multiplies matrices, and each place counts once.

    Of the size of the pre-activation there are the result, and in backward the gradients of both factors: neither the
    pre-activation itself nor its gradient. The tensors are larger than any scratch.
    """
    arguments = [t(10_000, 4, 64).requires_grad_(), t(64, 64).requires_grad_(), t(64).requires_grad_()]
    compiled = torch.compile(gate, fullgraph=True)
    with torchops.inductor.enable():
        got = values(compiled, arguments, True)
    assert_all_close(got, values(gate, arguments, True))
    assert torchops.inductor.matches() == 1
    outputs: list[Tensor] = []

    def forward() -> None:
        outputs.append(compiled(*arguments))

    def backward() -> None:
        torch.autograd.grad(outputs[-1], arguments, got[0])

    for call, operator, tensors in ((forward, "myops::gate", 1), (backward, "myops::_gate_backward", 2)):
        outputs.append(compiled(*arguments))
        sizes, _ = allocations(call)
        assert len([size for size in sizes if size >= got[0].nbytes // 2]) == tensors
        outputs.append(compiled(*arguments))
        with torch.profiler.profile() as profile:
            call()
        names = [event.name for event in profile.events() or ()]
        ours = [name for name in names if name.startswith("myops::")]
        assert ours == [operator]
        assert not {"aten::mm", "aten::addmm", "aten::bmm", "aten::linear"}.intersection(names)
    assert config.joint_custom_pre_pass is None


class Recording(CustomGraphPass):
    """Somebody else's pass."""

    def __init__(self, uuid: str | None) -> None:
        self.sigmoids: list[int] = []
        self._uuid = uuid

    def __call__(self, graph: fx.Graph) -> None:
        self.sigmoids.append(len(graph.find_nodes(op="call_function", target=SIGMOID)))

    def uuid(self) -> str | None:
        return self._uuid


def test_hooks_that_were_set_before_are_kept() -> None:
    theirs = Recording("theirs")
    with config.patch(joint_custom_pre_pass=theirs, post_grad_custom_pre_pass=theirs):
        with torchops.inductor.enable():
            torch.compile(gate)(t(5, 7), t(7, 7), t(7))
            assert torchops.inductor.matches() == 1
            joint: Any = config.joint_custom_pre_pass
            assert theirs.uuid() in joint.uuid()
            assert len(joint.uuid()) == 2
        # The joint graph reached their pass first, the graph to be compiled after ours.
        assert theirs.sigmoids == [1, 0]
        assert config.joint_custom_pre_pass is theirs
        assert config.post_grad_custom_pre_pass is theirs
    with config.patch(joint_custom_pre_pass=Recording(None)):
        assert torchops.inductor.options()["joint_custom_pre_pass"].uuid() is None
    with config.patch(joint_custom_pre_pass=lambda graph: None):
        assert torchops.inductor.options()["joint_custom_pre_pass"].uuid() is None


def test_switching() -> None:
    """`enable` twice is once; a block ends only what it began; options are for one model."""
    torchops.inductor.enable()
    ours = config.joint_custom_pre_pass
    with torchops.inductor.enable():
        assert config.joint_custom_pre_pass is ours
    assert config.joint_custom_pre_pass is ours
    torchops.inductor.disable()
    torchops.inductor.disable()
    assert config.joint_custom_pre_pass is None
    before = torchops.inductor.matches()
    options = torchops.inductor.options()
    arguments = [t(5, 7), t(7, 7), t(7)]
    torch.compile(gate, options=options)(*arguments)
    assert torchops.inductor.matches() == before + 1
    torch.compiler.reset()
    torch.compile(gate)(*arguments)
    assert torchops.inductor.matches() == before + 1
    theirs = Recording("later")
    torchops.inductor.enable()
    with config.patch(joint_custom_pre_pass=theirs):
        torchops.inductor.disable()
        assert config.joint_custom_pre_pass is theirs
    torchops.inductor.disable()


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_cached_graphs(train: bool) -> None:
    """One from the cache holds the operator and counts, and is not taken for one without the pass, nor that for it."""
    arguments = [t(5, 7).requires_grad_(train), t(7, 7).requires_grad_(train), t(7).requires_grad_(train)]
    seen = []
    with fresh_cache(), config.patch(force_disable_caches=False, fx_graph_cache=True):
        for on in (False, True, True, False):
            torch._dynamo.reset()
            hits, matches = counters["inductor"]["fxgraph_cache_hit"], 0 if on else torchops.inductor.matches()
            if on:
                torchops.inductor.enable()
            compiled = torch.compile(gate)
            values(compiled, arguments, train)
            with torch.profiler.profile() as profile:
                values(compiled, arguments, train)
            torchops.inductor.disable()
            calls = sum(event.name == "myops::gate" for event in profile.events() or ())
            found = counters["inductor"]["fxgraph_cache_hit"] > hits
            seen.append((torchops.inductor.matches() - matches, calls, found))
    assert seen == [(0, 0, False), (1, 1, False), (1, 1, True), (0, 0, True)]


def test_the_cache_knows_other_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph with dense on CUDA is of no use to a library without CUDA."""
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda name, key: True)
    with_cuda = [chain.uuid() for chain in torchops.inductor.options().values()]
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda name, key: False)
    without = [chain.uuid() for chain in torchops.inductor.options().values()]
    assert all(a != b for a, b in zip(with_cuda, without, strict=True))


def test_the_cache_knows_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one table rewrites, another leaves."""
    everywhere = [chain.uuid() for chain in torchops.inductor.options().values()]
    monkeypatch.setattr(table, "TABLE", table.read())
    measured = [chain.uuid() for chain in torchops.inductor.options().values()]
    assert all(a != b for a, b in zip(everywhere, measured, strict=True))


def test_aot_inductor(tmp_path: Path) -> None:
    """A package compiled while the pass is on calls dense."""
    model = nn.Sequential(nn.Linear(7, 7), nn.Sigmoid()).eval()
    x = t(5, 7, dtype=torch.float32)
    with torchops.inductor.enable(), torch.no_grad():
        program = torch.export.export(model, (x,))
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
        assert torchops.inductor.matches() == 1
        with torch.profiler.profile() as profile:
            got = torch._inductor.aoti_load_package(package)(x)
        assert_all_close([got], [model(x)], atol=1e-6, rtol=1e-5)
    assert "myops::dense" in {event.name for event in profile.events() or ()}

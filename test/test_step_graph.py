"""Steps of a sampler that are replayed as CUDA graphs compute what the module does, or run as it does.

Without a GPU, something that calls the function again stands in for the graph.
"""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchops._core import _build_info
from torchops.convert import step_graph
from torchops.convert.step_graph import GraphAdapter, StepGraph, recorded

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() and _build_info.cuda_version else [])]


class Again:
    """In place of a CUDA graph."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.result = pytree.tree_map_only(Tensor, lambda t: torch.full_like(t, float("nan")), function())

    def replay(self) -> None:
        for place, value in zip(*map(pytree.tree_leaves, (self.result, self.function())), strict=True):
            if isinstance(place, Tensor):
                place.copy_(value)


class Step(nn.Module):
    """One step: `x` and `t` change from call to call, everything else stays."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8))
        self.does = ""

    def forward(self, x: Tensor, t: Tensor, feats: dict[str, Any], scale: float = 1.0) -> Tensor:
        y = self.layers(x * t) * scale + feats["bias"] * 2
        if self.does == "random":
            return y + torch.randn_like(y)
        if self.does == "sync":
            return y * float(y.sum() * 0 + 1)
        return feats["function"](y)


def double(x: Tensor) -> Tensor:
    return x * 2


def triple(x: Tensor) -> Tensor:
    return x * 3


def shifted(x: Tensor, by: Tensor) -> Tensor:
    return x + by * 2


def wrapped(module: nn.Module) -> StepGraph:
    step = GraphAdapter(__name__, "Step").replacement(module, {})
    assert isinstance(step, StepGraph)
    return step


def again(function: Callable[[], Any]) -> tuple[Again, Any]:
    def captured() -> Any:
        with step_graph._without_cache():
            return function()

    graph = Again(captured)
    return graph, graph.result


def settings() -> Any:
    return torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")


@pytest.fixture(params=DEVICES)
def step(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[StepGraph, Step, Any]]:
    torch.manual_seed(0)
    module = Step().to(request.param).eval()
    feats = {"bias": torch.randn(8, device=request.param), "function": double, "n": 3, "none": None}
    if request.param == "cpu":
        monkeypatch.setattr(step_graph, "DEVICE", "cpu")
        monkeypatch.setattr(step_graph, "_capture", again)
        monkeypatch.setattr(step_graph, "_settings", settings)
        monkeypatch.setattr(step_graph, "_drawn", lambda: torch.get_rng_state().tolist())
        monkeypatch.setattr(step_graph, "_capturing", lambda: False)
        monkeypatch.setattr(step_graph, "_available", lambda: 2**40)
    with torch.no_grad():
        yield wrapped(module), module, feats


def compare(step: StepGraph, module: nn.Module, feats: dict[str, Any], calls: int = 6, **kwargs: Any) -> None:
    for _ in range(calls):
        x, t = torch.randn(5, 8, device=feats["bias"].device), torch.rand(5, 1, device=feats["bias"].device)
        y = step(x, t, feats, **kwargs)
        torch.testing.assert_close(y, module(x, t, feats, **kwargs))
        x.fill_(float("nan"))  # the result is not the memory of the next one


def graphs(step: StepGraph) -> int:
    return len(list(recorded(step)))


def test_replays(step: tuple[StepGraph, Step, dict[str, Any]]) -> None:
    new, module, feats = step
    compare(new, module, feats, 2)
    assert graphs(new) == 0
    compare(new, module, feats)
    assert graphs(new) == 1
    results = [
        new(torch.randn(5, 8, device=feats["bias"].device), torch.ones(5, 1, device=feats["bias"].device), feats)
        for _ in range(2)
    ]
    assert not torch.equal(*results)


def test_other_sizes_have_graphs_of_their_own_and_few_are_kept(step: tuple[StepGraph, Step, dict[str, Any]]) -> None:
    new, module, feats = step
    for rows in (1, 2, 3, 1):
        for _ in range(4):
            x, t = torch.randn(rows, 8).to(feats["bias"].device), torch.rand(rows, 1).to(feats["bias"].device)
            torch.testing.assert_close(new(x, t, feats), module(x, t, feats))
    assert graphs(new) == 2


@pytest.mark.parametrize(
    "change", ["object", "content", "held", "weight", "weight_object", "scale", "function", "layer"]
)
def test_what_may_not_change(step: tuple[StepGraph, Step, dict[str, Any]], change: str) -> None:
    new, module, feats = step
    held = torch.randn(8, device=feats["bias"].device)
    if change == "held":
        feats["function"] = functools.partial(shifted, by=held)
    compare(new, module, feats)
    kwargs: dict[str, Any] = {}
    layers: Any = module.layers
    if change == "object":
        feats["bias"] = torch.randn_like(feats["bias"])
    elif change == "content":
        feats["bias"].mul_(3)
    elif change == "held":
        held.mul_(3)
    elif change == "weight":
        layers[0].weight.data.mul_(3)
    elif change == "weight_object":
        layers[0].weight.data = torch.randn_like(layers[0].weight)
    elif change == "scale":
        kwargs["scale"] = 3.0
    elif change == "function":
        feats["function"] = triple
    else:
        layers[0] = nn.Linear(8, 16).to(feats["bias"].device)  # which both have
    compare(new, module, feats, **kwargs)
    assert graphs(new) == (2 if kwargs else 1)  # another scale is another kind of call


def test_hooks_run_at_every_call(step: tuple[StepGraph, Step, dict[str, Any]]) -> None:
    new, module, feats = step
    compare(new, module, feats)
    seen = []

    def hook(layer: nn.Module, given: Any, y: Tensor) -> Tensor:
        seen.append(layer)
        return y * 5

    module.layers[1].register_forward_hook(hook)
    compare(new, module, feats)
    assert len(seen) == 12


def test_gradients(step: tuple[StepGraph, Step, dict[str, Any]]) -> None:
    new, module, feats = step
    compare(new, module, feats)
    with torch.enable_grad():
        x, t = (
            torch.randn(5, 8, device=feats["bias"].device, requires_grad=True),
            torch.rand(5, 1, device=feats["bias"].device),
        )
        got = torch.autograd.grad(new(x, t, feats).square().sum(), [x, *new.parameters()])
        expected = torch.autograd.grad(module(x, t, feats).square().sum(), [x, *module.parameters()])
    torch.testing.assert_close(got, expected)


def test_autocast_and_inference_mode(step: tuple[StepGraph, Step, dict[str, Any]]) -> None:
    new, module, feats = step
    compare(new, module, feats)
    with torch.autocast(feats["bias"].device.type, torch.bfloat16):
        compare(new, module, feats)
    with torch.inference_mode():
        compare(new, module, feats)


def test_modules_that_draw_random_numbers_are_no_graphs(step: tuple[StepGraph, Step, dict[str, Any]]) -> None:
    _, module, feats = step
    module.does = "random"
    new = wrapped(module)
    x, t = torch.randn(5, 8, device=feats["bias"].device), torch.rand(5, 1, device=feats["bias"].device)
    torch.manual_seed(1)
    got = [new(x, t, feats) for _ in range(6)]
    torch.manual_seed(1)
    assert all(torch.equal(a, module(x, t, feats)) for a in got)
    assert graphs(new) == 0


def test_a_capture_that_fails(step: tuple[StepGraph, Step, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    _, module, feats = step
    module.does = "sync"
    if not feats["bias"].is_cuda:

        def fails(function: Callable[[], Tensor]) -> None:
            raise RuntimeError("operation not permitted when stream is capturing")

        monkeypatch.setattr(step_graph, "_capture", fails)
    new = wrapped(module)
    with pytest.warns(UserWarning, match="Step runs without a CUDA graph"):
        compare(new, module, feats)
    compare(new, module, feats)
    assert graphs(new) == 0


def test_a_step_that_runs_other_operators_when_it_is_recorded(
    step: tuple[StepGraph, Step, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the graph computes everything."""
    new, module, feats = step
    calls = []

    def changing(x: Tensor) -> Tensor:
        calls.append(x)
        return x + feats["bias"].exp() if len(calls) == 3 else x.clone() + feats["bias"].exp()

    feats["function"] = changing  # its third call is the second of `new`
    compare(new, module, feats)
    (kind,) = step_graph._graphs(new).kinds.values()
    assert kind.recording is not None
    assert kind.recording.constants is None


@pytest.mark.parametrize("share", [0, 1])
def test_constants_are_not_kept_where_memory_is_short(
    step: tuple[StepGraph, Step, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, share: int
) -> None:
    new, module, feats = step
    monkeypatch.setattr(step_graph, "KEPT_SHARE", share)
    compare(new, module, feats)
    (kind,) = step_graph._graphs(new).kinds.values()
    assert (kind.constants is None) == (share == 0)


def test_switches(step: tuple[StepGraph, Step, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    new, module, feats = step
    new.step_graphs = False
    compare(new, module, feats)
    assert graphs(new) == 0
    new.step_graphs = True
    monkeypatch.setenv("TORCHOPS_STEP_GRAPHS", "0")
    compare(new, module, feats)
    assert graphs(new) == 0


def test_copies(step: tuple[StepGraph, Step, dict[str, Any]]) -> None:
    new, module, feats = step
    compare(new, module, feats)
    for copied in (copy.deepcopy(new), pickle.loads(pickle.dumps(new))):
        assert graphs(copied) == 0
        compare(copied, module, feats)
    assert new.state_dict().keys() == module.state_dict().keys()


def test_memory_is_given_back(step: tuple[StepGraph, Step, dict[str, Any]]) -> None:
    new, module, feats = step
    device = feats["bias"].device
    if device.type == "cpu":
        pytest.skip("what stands in for the graph holds its arguments")
    big = {"bias": torch.randn(2**18, 8, device=device), "function": double}
    for _ in range(5):
        new(torch.randn(2**18, 8, device=device), torch.rand(1, device=device), big)
    assert graphs(new) == 1
    del big
    gc.collect()
    assert graphs(new) == 0
    compare(new, module, feats)


def test_threads(step: tuple[StepGraph, Step, dict[str, Any]]) -> None:
    new, module, feats = step
    errors: list[BaseException] = []

    def run() -> None:
        try:
            with torch.no_grad():
                compare(new, module, feats, 20)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors


def test_inside_another_graph_and_compiled(step: tuple[StepGraph, Step, dict[str, Any]]) -> None:
    new, module, feats = step
    x, t = torch.randn(5, 8, device=feats["bias"].device), torch.rand(5, 1, device=feats["bias"].device)
    new(x, t, feats)
    torch.testing.assert_close(torch.compile(new, backend="eager")(x, t, feats), module(x, t, feats))
    if not x.is_cuda:
        return
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        y = new(x, t, feats)
    graph.replay()
    torch.testing.assert_close(y, module(x, t, feats))

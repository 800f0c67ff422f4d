"""``backend="torchops"``: what Python decides, or overwrites, on the way through a forward, in each call anew.

A graph that was recorded once and knew nothing of it would be silently wrong.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchops  # noqa: F401  (registers the backend)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = (nn.Linear(8, 8, dtype=torch.float64) for _ in range(2))
        self.more()

    def more(self) -> None:
        pass

    def gated(self, x: Tensor) -> Tensor:
        return self.up(x) * torch.sigmoid(self.gate(x))


def values(seed: int = 0) -> Tensor:
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer() -> nn.Linear:
    return nn.Linear(8, 8, dtype=torch.float64)


def assert_close(ours: Tensor, theirs: Tensor, tolerance: float = 0.0) -> None:
    """Up to what a gate that isn't rounded in between changes."""
    tolerance = tolerance or (2e-2 if theirs.dtype == torch.bfloat16 else 1e-10)
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


HALVES = {torch.float16, torch.bfloat16}
EPS = {torch.float16: 1.0, torch.bfloat16: 1.0}


def is_half(dtype: torch.dtype) -> bool:
    """Without any method of a value."""
    return dtype is torch.bfloat16


@functools.lru_cache(None)
def remembered(size: int) -> int:
    return 2 if size == 1 else 1


def caught(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except TypeError:
        return 1


def suppressed(size: Any) -> int:
    with contextlib.suppress(Exception):
        return 1 if float(size) < 4 else 2
    return 1


def in_place(m: Any, x: Tensor, y: Tensor) -> Tensor:
    y += x
    return y


# The factor of each forward, which is another one for one row, or for 16 bits.
BRANCHES: dict[str, Callable[[Any, Tensor], Any]] = {
    "size in a set": lambda m, x: 2 if x.shape[0] in {1} else 1,
    "size in a frozenset": lambda m, x: 2 if x.size(0) in frozenset({1}) else 1,
    "rank in a set": lambda m, x: 2 if x.dim() in {2, 3} else 1,
    "rank not in a dict": lambda m, x: 1 if x.ndim not in {2: ""} else 2,
    "size of a dict": lambda m, x: {1: 2}.get(x.shape[0], 1),
    "dtype in a set": lambda m, x: 2 if x.dtype in HALVES else 1,
    "dtype of a dict": lambda m, x: 1 + EPS.get(x.dtype, 1e-6),
    "dtype of a layer": lambda m, x: 1 + EPS.get(m.up.weight.dtype, 1e-6),
    "dtype in a tuple": lambda m, x: 2 if x.dtype in (torch.float16, torch.bfloat16) else 1,
    "dtype, cached": lambda m, x: remembered(x.shape[0]),
    "hash": lambda m, x: 2 if hash(x.shape[0]) == 1 else 1,
    "str": lambda m, x: 2 if str(x.dtype) == "torch.bfloat16" else 1,
    "repr": lambda m, x: 2 if "16" in repr(x.dtype) else 1,
    "f-string": lambda m, x: 2 if f"{x.dtype}".endswith("16") else 1,
    "f-string of repr": lambda m, x: 2 if f"{x.dtype!r}".endswith("16") else 1,
    "format": lambda m, x: 2 if "{}".format(x.dtype).endswith("16") else 1,  # noqa: UP032
    "percent": lambda m, x: 2 if "%s" % x.dtype == "torch.bfloat16" else 1,  # noqa: UP031
    "device": lambda m, x: {"cpu": 1}.get(x.device.type, 2),
    "is": lambda m, x: 2 if x.dtype is torch.bfloat16 else 1,
    "is not": lambda m, x: 1 if x.dtype is not torch.bfloat16 else 2,
    "is, in a function": lambda m, x: 2 if is_half(x.dtype) else 1,
    "is True": lambda m, x: 1 if (x.shape[0] > 1) is True else 2,
    "is False": lambda m, x: 2 if x.is_floating_point() is False else 1,
    "operator.is_": lambda m, x: 2 if operator.is_(x.dtype, torch.bfloat16) else 1,
    "id": lambda m, x: 2 if id(x.dtype) == id(torch.bfloat16) else 1,
    "type": lambda m, x: 2 if type(x.shape[0]) != int else 1,  # noqa: E721
    "isinstance": lambda m, x: 2 if isinstance(x.shape[0], torch.SymInt) else 1,
    "bool": lambda m, x: 2 if bool(x.shape[0] == 1) else 1,
    "not": lambda m, x: 1 if not x.shape[0] == 1 else 2,  # noqa: SIM201
    "match": lambda m, x: matched(x.dtype),
    "caught": lambda m, x: caught(lambda: [1, 2, 1, 1][x.shape[0]]),
    "caught number": lambda m, x: caught(lambda: int(x.shape[0]) + 1),
    "suppressed": lambda m, x: suppressed(x.shape[0]),
    "gradient": lambda m, x: 1 if x.grad_fn is None else 2,
    "dtype of parameters": lambda m, x: 2 if next(m.parameters()).dtype in HALVES else 1,
    "dtype of _parameters": lambda m, x: 2 if m.up._parameters["weight"].dtype in HALVES else 1,
}


def matched(dtype: torch.dtype) -> int:
    match dtype:
        case torch.bfloat16:
            return 2
        case _:
            return 1


def gated_by(function: Callable[[Any, Tensor], Any]) -> Gated:
    class Branching(Gated):
        def forward(self, x: Tensor) -> Tensor:
            return self.gated(x) * function(self, x)

    return Branching()


@pytest.mark.parametrize("name", BRANCHES)
def test_branches(name: str) -> None:
    """They are taken in each call."""
    model = gated_by(BRANCHES[name])
    # TorchDynamo takes `is True` of a size that may vary for false, with any backend.
    function = torch.compile(model, backend="torchops", dynamic=False if name == "is True" else None)
    with torch.no_grad():
        for kind in (torch.float64, torch.bfloat16):
            model.to(kind)
            for x in (values(), values()[:1]):
                expected = model(x.to(kind))
                assert_close(function(x.to(kind)), expected)


def of_an_argument(m: Any, x: Tensor, total: Tensor) -> Tensor:
    total += x
    return m.gated(x) + total


def of_a_buffer(m: Any, x: Tensor, total: Tensor) -> Tensor:
    mean = m.mean
    mean *= 0.5
    return m.gated(x) + mean + total


def of_an_alias(m: Any, x: Tensor, total: Tensor) -> Tensor:
    h = x
    h -= total
    return m.gated(x)


def of_a_view(m: Any, x: Tensor, total: Tensor) -> Tensor:
    view = total.view(-1)
    view += 1.0
    return m.gated(x) + total


def of_a_result(m: Any, x: Tensor, total: Tensor) -> Tensor:
    y = m.gated(x)
    y += total
    return y


def of_data(m: Any, x: Tensor, total: Tensor) -> Tensor:
    total.data = x
    return m.gated(x) + total


def by_operator(m: Any, x: Tensor, total: Tensor) -> Tensor:
    operator.iadd(total, x)
    return m.gated(x) + total


def divided(m: Any, x: Tensor, total: Tensor) -> Tensor:
    total /= 2
    return m.gated(x) + total


def powered(m: Any, x: Tensor, total: Tensor) -> Tensor:
    total **= 2
    return m.gated(x) + total


AUGMENTED = [of_an_argument, of_a_buffer, of_an_alias, of_a_view, of_a_result, of_data, by_operator, divided, powered]


class WithMean(Gated):
    mean: Tensor

    def more(self) -> None:
        self.register_buffer("mean", values(3)[0])


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("forward", AUGMENTED, ids=lambda f: f.__name__)
def test_augmented_assignments(forward: Callable[..., Tensor], autocast: bool) -> None:
    """They overwrite what they do in eager mode, and keep its dtype."""
    model: Any = type("Model", (WithMean,), {"forward": forward, "__module__": __name__})().float()
    former = copy.deepcopy(model)
    results = []
    for call, held in ((torch.compile(model, backend="torchops"), model), (former, former)):
        x, y = values().float(), values(1).float()
        with torch.no_grad(), torch.autocast("cpu", enabled=autocast):
            results.append([call(x, y), x, y, held.mean])
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype
        assert_close(ours, theirs, 2e-2 if autocast else 1e-6)


class Twice(Gated):
    """A layer, a container and parameters with two names, and lists that name what they hold a second time."""

    kind = ""
    inner: Any
    other: Any
    shift: Tensor

    def __init__(self, kind: str) -> None:
        self.kind = kind
        super().__init__()

    def more(self) -> None:
        self.inner = nn.Module()
        self.inner.gate = layer()
        self.body = nn.Sequential(layer())
        self.scale = nn.Parameter(torch.ones(8, dtype=torch.float64))
        self.register_buffer("shift", values(4)[0])
        match self.kind:
            case "layer":
                self.other = self.gate
            case "inner layer":
                self.inner.other = self.inner.gate
            case "holder":
                self.other = self.inner
            case "container":
                self.other = self.body
            case "part of a container":
                self.other = self.body[0]
            case "list":
                self.other = [self.gate]
            case "parameter":
                self.other = self.scale
            case "buffer":
                self.register_buffer("other", self.shift)
            case "parameter of a layer":
                self.other = self.up.weight
            case "dict":
                self.other = {"gate": self.gate}
            case "partial":
                self.other = functools.partial(self.gate)
            case "method":
                self.other = self.gate.forward

    def forward(self, x: Tensor) -> Tensor:
        other: Any = getattr(self, "other", None)
        match self.kind:
            case "layer" | "part of a container" | "container" | "partial" | "method":
                x = x + other(x)
            case "list":
                x = x + other[0](x)
            case "dict":
                x = x + other["gate"](x)
            case "inner layer":
                x = x + self.inner.other(x)
            case "holder":
                x = x + other.gate(x)
            case "parameter" | "buffer":
                x = x * other
            case "parameter of a layer":
                x = F.linear(x, other)
        x = x * self.scale + self.shift
        x = self.body(x) + self.inner.gate(x)
        return self.gated(x)


KINDS = ["layer", "inner layer", "holder", "container", "part of a container", "list", "dict", "partial"]
KINDS += ["method", "parameter", "buffer", "parameter of a layer"]


@pytest.mark.parametrize("kind", KINDS)
def test_two_names(kind: str) -> None:
    """Of which one gets something else later."""
    model: Any = Twice(kind)
    function, x = torch.compile(model, backend="torchops"), values()
    with torch.no_grad():
        assert_close(function(x), model(x))
        model.gate = layer()
        model.inner.gate = layer()
        model.body = nn.Sequential(layer())
        model.scale = nn.Parameter(2 * model.scale)
        model.up.weight = nn.Parameter(model.up.weight * 3)
        assert_close(function(x), model(x))


def test_tied_weights() -> None:
    model, x = gated_by(lambda m, x: 1.0), values()
    model.gate.weight = model.up.weight
    function = torch.compile(model, backend="torchops")
    for _ in range(2):
        leaf = x.clone().requires_grad_()
        results = [torch.autograd.grad(call(leaf).sum(), [leaf, *model.parameters()]) for call in (function, model)]
        for ours, theirs in zip(*results, strict=True):
            assert_close(ours, theirs)
        model.gate.weight = nn.Parameter(values(5)[:1].expand(8, 8).clone())

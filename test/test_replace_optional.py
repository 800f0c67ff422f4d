"""torchops.nn.replace: forwards that do something else where an optional argument is None."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from test_replace_later import Gated, layer, values
from torch import Tensor, nn

from torchops.nn import Replacements, replace

MASK, BIAS = values(1)[:, :1], values(2)
CALLS: dict[str, dict[str, Any]] = {
    "neither": {},
    "None": {"mask": None},
    "mask": {"mask": MASK},
    "bias": {"bias": BIAS},
    "both": {"mask": MASK, "bias": BIAS},
}


class Masked(Gated):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.gated(x) if mask is None else self.gated(x) * mask


class Two(Gated):
    def forward(
        self, x: Tensor, mask: Tensor | None = None, *, bias: Tensor | None = None, scale: float = 2.0
    ) -> Tensor:
        y = self.gated(x) * scale
        if mask is not None:
            y = y * mask
        return y if bias is None else y + bias


class PassedOn(Gated):
    def more(self) -> None:
        self.part = Masked()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        out: Tensor = self.part(self.gated(x), mask)
        return out


class OtherLayers(Gated):
    def more(self) -> None:
        self.up_too, self.gate_too, self.down = layer(), layer(), nn.Sequential(layer())

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None:
            out: Tensor = self.down(self.up_too(x) * torch.sigmoid(self.gate_too(x)))
            return out
        return self.gated(x) * mask


class GatedWithMask(Gated):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.up(x) if mask is None else self.gated(x) * mask


class MakesMask(Gated):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        mask = torch.ones(8, dtype=torch.float64) if mask is None else mask
        return self.gated(x) * mask


class ByPosition(Gated):
    def forward(self, x: Tensor, mask: Tensor | None = None, /, *rest: Any, **more: Any) -> Tensor:
        y = self.gated(x) if mask is None else self.gated(x) * mask
        return y if "bias" not in more else y + more["bias"]


class Switched(Gated):
    """By a mask that is no tensor."""

    def forward(self, x: Tensor, mask: Tensor | float | None = None) -> Tensor:
        if mask is None or mask is False:
            return self.gated(x)
        return self.gated(x) * mask


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.others = nn.ModuleList()

    def forward(self, x: Tensor) -> Tensor:
        for other in self.others:
            x = other(x)
        return x


class CalledOrOpened(Gated):
    """A part is called in one way, and of what it holds, which is nothing yet, the other way calls each."""

    def more(self) -> None:
        self.part = Part()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None:
            out: Tensor = self.part(self.gated(x))
            return out
        for other in self.part.others:
            x = other(x)
        return self.gated(x) * mask


class Attends(Gated):
    """Some of its arguments decide what others are."""

    def more(self) -> None:
        self.part = Both()

    def forward(self, x: Tensor, mask: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        if mask is not None and bias is None:
            bias = mask
        out: Tensor = self.part(self.gated(x), mask, bias)
        return out


class Both(nn.Module):
    def forward(self, x: Tensor, mask: Tensor | None, bias: Tensor | None) -> Tensor:
        x = x if mask is None else x * mask
        return x if bias is None else x + bias


class PassesBothOn(Attends):
    def forward(self, x: Tensor, mask: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        out: Tensor = self.part(self.gated(x), mask, bias)
        return out


class Bounded(Gated):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = torch.nan_to_num(self.gated(x))
        return y if mask is None else y.masked_fill(mask > 0, 1.0)


class Named(Gated):
    """As the new forward names its own."""

    def more(self) -> None:
        self._former, self._without, self._layers = layer(), layer(), layer()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y: Tensor = self._layers(self._without(self._former(self.gated(x))))
        return y if mask is None else y * mask


class Branches(Gated):
    """On values, where no trace can follow."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None:
            return self.up(x) if x.sum() > 0 else self.gate(x)
        return self.gated(x) * mask


# Of a class, how many gates each call has.
GATES: dict[type[Gated], dict[str, int]] = {
    Masked: {"neither": 1, "None": 1, "mask": 1},
    Two: {"neither": 1, "None": 1, "mask": 0, "bias": 0, "both": 1},
    PassedOn: {"neither": 2, "None": 2, "mask": 2},
    OtherLayers: {"neither": 1, "None": 1, "mask": 1},
    GatedWithMask: {"neither": 0, "None": 0, "mask": 1},
    MakesMask: {"neither": 0, "None": 0, "mask": 1},
    Attends: {"neither": 1, "None": 1, "mask": 0, "bias": 0, "both": 1},
    PassesBothOn: {"neither": 1, "None": 1, "mask": 1, "bias": 1, "both": 1},
    Bounded: {"neither": 1, "None": 1, "mask": 1},
    Named: {"neither": 1, "None": 1, "mask": 1},
}
CASES = [(kind, call, count) for kind, counts in GATES.items() for call, count in counts.items()]


def gates_in(model: nn.Module, *args: Any, **more: Any) -> int:
    with torch.profiler.profile() as profile:
        model(*args, **more)
    return sum(event.count for event in profile.key_averages() if event.key in ("myops::gate", "myops::glu"))


@pytest.mark.parametrize(("kind", "call", "count"), CASES, ids=lambda v: getattr(v, "__name__", str(v)))
def test_optional(kind: type[Gated], call: str, count: int) -> None:
    """Values and gradients stay, also of copies and compiled; the operator is called where the forward has its gate."""
    model, more = kind(), CALLS[call]
    former = copy.deepcopy(model)
    report = replace(model)
    assert report.left == {}
    assert "" in report.replaced
    x = values().requires_grad_()
    assert gates_in(model, x, **more) == count
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for new, call_new in ((model, model), *((c, c) for c in copies), (model, compiled)):
        results = []
        for m, forward in ((new, call_new), (former, former)):
            out = forward(x, **more)
            given = [x, *m.parameters()]
            results.append([out, *(g for g in torch.autograd.grad(out.sin().sum(), given, allow_unused=True))])
        for ours, theirs in zip(*results, strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_way_that_cannot_be_traced(sign: int) -> None:
    """The former forward goes it."""
    model = Branches()
    former = copy.deepcopy(model)
    assert replace(model) == Replacements(("",), {})
    x = sign * values().abs()
    torch.testing.assert_close(model(x), former(x))
    assert gates_in(model, x, MASK) == 1
    torch.testing.assert_close(model(x, MASK), former(x, MASK))


@pytest.mark.parametrize("call", ["neither", "mask"])
def test_layers_that_change_later(call: str) -> None:
    """Of both ways, whichever a call takes: then the former forward runs."""
    x, more = values(), CALLS[call]
    for name in ("up", "gate_too", "down.0"):
        model = OtherLayers()
        former = copy.deepcopy(model)
        replace(model)
        for m in (model, former):
            m.get_submodule(name).register_forward_hook(lambda module, args, out: 2 * out)
        torch.testing.assert_close(model(x, **more), former(x, **more))


@pytest.mark.parametrize("call", ["neither", "mask"])
def test_parts_that_come_later(call: str) -> None:
    model, more = CalledOrOpened(), CALLS[call]
    former = copy.deepcopy(model)
    assert replace(model).replaced == ("",)
    other = layer()
    for m in (model, former):
        torch.testing.assert_close(m(values(), **more), former(values(), **more))
        m.part.others.append(other)
    torch.testing.assert_close(model(values(), **more), former(values(), **more))


@pytest.mark.parametrize("mask", [False, True, 0.5])
def test_what_is_no_tensor(mask: Any) -> None:
    """The former forward decides what to do with it."""
    model = Switched()
    former = copy.deepcopy(model)
    assert replace(model).replaced == ("",)
    torch.testing.assert_close(model(values(), mask), former(values(), mask))
    traced = torch.fx.symbolic_trace(model)
    torch.testing.assert_close(traced(values(), MASK), former(values(), MASK))


def test_a_hook_in_one_way() -> None:
    """Before replacing: the former forward goes it."""
    model = OtherLayers()
    model.up_too.register_forward_hook(lambda module, args, out: 2 * out)
    former = copy.deepcopy(model)
    assert replace(model).replaced == ("",)
    assert gates_in(model, values(), MASK) == 1
    for more in ({}, {"mask": MASK}):
        torch.testing.assert_close(model(values(), **more), former(values(), **more))


def test_arguments_of_other_kinds() -> None:
    """A trace can't have them: the module is left."""
    model = ByPosition()
    former = copy.deepcopy(model)
    replace(model)
    for args, more in (((), {}), ((None,), {}), ((MASK,), {}), ((MASK, 1), {}), ((MASK,), {"bias": BIAS})):
        torch.testing.assert_close(model(values(), *args, **more), former(values(), *args, **more))


class Needed(Gated):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None:
            raise ValueError("no mask")
        return self.gated(x) * mask


class Wrong(Gated):
    """What the trace with tensors can't see: that a mask of one column is a scale."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None:
            return self.gated(x)
        return self.gated(x) * mask + Scale.apply(x)


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x


class ToItself(Gated):
    """What no trace sees: whether both arguments are one."""

    def more(self) -> None:
        self.other = layer()

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        context = x if context is None else context
        return self.gated(x) if context is x else self.gated(self.other(context))


@pytest.mark.parametrize("kind", [Needed, Wrong, ToItself])
def test_left(kind: type[Gated]) -> None:
    model = kind()
    report = replace(model)
    assert report.replaced == ()
    assert list(report.left) == [""]
    assert type(model) is kind


def test_a_trial_with_the_optional_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sees an operator that is wrong in every second call, which is the one with the argument."""
    glu, calls = torch.ops.myops.glu, []

    def wrong_with_mask(*args: Any, activation: str) -> Tensor:
        calls.append(args)
        out: Tensor = glu(*args, activation=activation)
        return out if len(calls) % 2 else 2 * out

    monkeypatch.setattr(torch.ops.myops, "glu", wrong_with_mask)
    assert replace(Masked()).left == {"": "a trial gave other results"}

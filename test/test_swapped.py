"""What stands in the place of a module of a declared class: its attributes, calls, buffers and methods."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_replace_declared import Fused, SwiGLU
from torch import Tensor, nn

import torchops

X = torch.randn(3, 6)


def swapped(kind: Callable[[], nn.Module], factory: Callable[[Any], nn.Module]) -> tuple[Any, Any, torchops.Report]:
    """A model of one module, the same without `replace`, and the report."""
    torch.manual_seed(0)
    plain = nn.Sequential(kind())
    model = copy.deepcopy(plain)
    return model, plain, torchops.replace(model, {type(plain[0]): factory})


class Scaled(SwiGLU):
    def __init__(self) -> None:
        super().__init__()
        self.k = 1.0

    def set_k(self, k: float) -> None:
        self.k = k

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.k


class FusedScaled(Fused):
    def __init__(self, of: Any) -> None:
        super().__init__(of)
        self.k = of.k  # as it is now

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.k


@pytest.mark.parametrize("by_method", [False, True])
def test_an_attribute_of_another_value(by_method: bool) -> None:
    model, plain, report = swapped(Scaled, FusedScaled)
    assert report.replaced == ("0",)
    for module in (model[0], plain[0]):
        module.set_k(5.0) if by_method else setattr(module, "k", 5.0)
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert each[0].k == 5.0
        assert torch.equal(each(X), plain(X))
    model[0].k = 1.0
    assert model[0].is_unchanged()
    del model[0].k
    with pytest.raises(AttributeError):
        model[0].k  # noqa: B018


class Optional(SwiGLU):
    SHIFT = 0.0

    def forward(self, x: Tensor, scale: float | None = None, *, shift: float = SHIFT) -> Tensor:
        y = super().forward(x)
        return (y if scale is None else y * scale) + shift


class FusedRenamed(Fused):
    def forward(self, y: Tensor) -> Tensor:
        return super().forward(y)


class FusedIgnoring(Fused):
    def forward(self, x: Tensor, scale: float | None = None, shift: float = 0.0) -> Tensor:
        return super().forward(x)


@pytest.mark.parametrize("factory", [Fused, FusedRenamed, FusedIgnoring])
def test_calls_with_more_than_was_compared(factory: Callable[[Any], nn.Module]) -> None:
    model, plain, report = swapped(Optional, factory)
    assert report.replaced == ("0",)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]]
    calls = [((X, 2.0), {}), ((X,), {"scale": 2.0}), ((X,), {"shift": 1.0}), ((), {"x": X, "scale": 3.0})]
    for args, kwargs in calls:
        assert torch.equal(model[0](*args, **kwargs), plain[0](*args, **kwargs))
    calls = [((X,), {}), ((), {"x": X}), ((X, None), {}), ((X,), {"shift": Optional.SHIFT})]
    for args, kwargs in calls:
        assert torch.equal(model[0](*args, **kwargs), model[0]._operators(X))
    calls = [((), {}), ((X,), {"x": X}), ((X, None, 0.0), {}), ((X,), {"other": 1})]
    for args, kwargs in calls:
        with pytest.raises(TypeError):
            model[0](*args, **kwargs)


class Counting(SwiGLU):
    """With a buffer that each call in training changes."""

    def __init__(self, replaces: bool = False) -> None:
        super().__init__()
        self.replaces = replaces
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            mean = x.detach().reshape(-1, 6).mean(0)
            if self.replaces:
                self.mean = self.mean + mean
            else:
                self.mean.add_(mean)
        return super().forward(x)


class FusedCounting(Fused):
    def __init__(self, of: Any) -> None:
        super().__init__(of)
        self.mean: Tensor
        self.register_buffer("mean", of.mean)


class FusedCountingToo(FusedCounting):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.add_(x.detach().reshape(-1, 6).mean(0))
        return super().forward(x)


@pytest.mark.parametrize("replaces", [False, True])
def test_buffers_are_compared(replaces: bool) -> None:
    model, _, report = swapped(lambda: Counting(replaces), FusedCounting)
    assert "buffer mean afterwards" in report.left["0"]
    assert not model[0].mean.any()
    model, plain, report = swapped(lambda: Counting(replaces), FusedCountingToo)
    assert report.replaced == ("0",)
    model(X), plain(X)
    assert torch.equal(model[0].mean, plain[0].mean)


class WithLength(SwiGLU):
    def __len__(self) -> int:
        return 7


class WithState(SwiGLU):
    def get_extra_state(self) -> int:
        return 3


class WithOldNames(SwiGLU):
    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)


@pytest.mark.parametrize(
    ("kind", "name"),
    [(WithLength, "__len__"), (WithState, "get_extra_state"), (WithOldNames, "_load_from_state_dict")],
)
def test_methods_that_the_class_has(kind: type[nn.Module], name: str) -> None:
    _, _, report = swapped(kind, Fused)
    assert report.left == {"0": f"{kind.__name__} has a {name} of its own"}


def test_a_factory_that_raises() -> None:
    def factory(of: Any) -> nn.Module:
        if of.marked:
            raise ValueError("not this one")
        return Fused(of)

    model = nn.Sequential(SwiGLU(), SwiGLU())
    for i, each in enumerate(model):
        vars(each)["marked"] = i == 1
    report = torchops.replace(model, {SwiGLU: factory})
    assert report.replaced == ("0",)
    assert report.left == {"1": "making what is to replace it raised ValueError: not this one"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(
    "layer",
    [
        lambda: torchops.nn.Transition(8, 16),
        lambda: torchops.nn.TriangleMultiplicativeUpdate(8),
        lambda: torchops.nn.TriangleAttention(8, 2, 4),
    ],
)
def test_layers_with_a_hook_and_float32_norms(layer: Any, residual: bool, dtype: torch.dtype) -> None:
    """Their layers are called, then."""
    module = layer().bfloat16()
    generator = torch.Generator().manual_seed(0)
    for part in module.modules():
        for p in part.parameters(recurse=False):
            p.data = torch.randn(p.shape, generator=generator).to(
                torch.float32 if isinstance(part, nn.LayerNorm) else p.dtype
            )
    x = torch.randn(5, 5, 8, generator=generator).to(dtype)
    expected = module(x, residual=residual)
    next(part for part in module.modules() if isinstance(part, nn.LayerNorm)).register_forward_hook(lambda *_: None)
    out = module(x, residual=residual)
    assert out.dtype == expected.dtype
    assert (out - expected).double().norm() <= 0.03 * expected.double().norm()

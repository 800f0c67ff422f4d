"""torchops.nn.TriangleMultiplicativeUpdate beside the formula of the papers."""

from __future__ import annotations

import copy
import pickle
from typing import Literal

import pytest
import torch
from checks import assert_all_close, random_like
from torch import Tensor, nn
from triangle_reference import triangle_multiplicative_update

from torchops.nn import Transition, TriangleMultiplicativeUpdate

WEIGHTS = ["norm_in.weight", "norm_in.bias", "p_in.weight", "g_in.weight"]
WEIGHTS += ["norm_out.weight", "norm_out.bias", "p_out.weight", "g_out.weight"]
SHAPES = [(6,), (6,), (8, 6), (8, 6), (4,), (4,), (6, 4), (6, 6)]


def randomised(layer: nn.Module) -> nn.Module:
    for i, parameter in enumerate(layer.parameters()):
        parameter.data = random_like(parameter.data, i) / max(1, parameter.dim() - 1) ** 0.5
    return layer


def inputs(dtype: torch.dtype = torch.float64, n: int = 5, c: int = 6) -> tuple[Tensor, Tensor]:
    return random_like(torch.empty(2, n, n, c, dtype=dtype)), random_like(torch.empty(2, n, n, dtype=dtype), 4)


def expected(layer: TriangleMultiplicativeUpdate, x: Tensor, mask: Tensor | None) -> Tensor:
    arguments = {name.replace(".", "_"): value for name, value in layer.named_parameters()}
    return triangle_multiplicative_update(x, layer.direction, mask=mask, eps=layer.eps, **arguments)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
def test_values_and_gradients(direction: Literal["outgoing", "incoming"], bias: bool) -> None:
    layer = TriangleMultiplicativeUpdate(6, 4, direction, bias=bias, eps=1e-3, dtype=torch.float64)
    randomised(layer)
    x, mask = inputs()
    x.requires_grad_()
    for value in (mask, mask > 0, None):
        outs = layer(x, value), expected(layer, x, value)
        cotangent = random_like(x.detach(), 3)
        leaves = [x, *layer.parameters()]
        assert_all_close(*([out, *torch.autograd.grad(out, leaves, cotangent)] for out in outs))
    y = x.detach().clone()
    with torch.no_grad():
        assert layer(y, mask, inplace=True) is y
        assert_all_close([y], [x + expected(layer, x, mask)])


@pytest.mark.parametrize("bias", [True, False])
def test_state_dict(bias: bool) -> None:
    state = TriangleMultiplicativeUpdate(6, 4, bias=bias).state_dict()
    shapes = dict(zip(WEIGHTS, SHAPES, strict=True))
    if bias:
        shapes |= {"p_in.bias": (8,), "g_in.bias": (8,), "p_out.bias": (6,), "g_out.bias": (6,)}
    assert {name: tuple(value.shape) for name, value in state.items()} == shapes
    assert [name for name in state if name in WEIGHTS] == WEIGHTS


def test_initialisation() -> None:
    torch.manual_seed(0)
    layer = TriangleMultiplicativeUpdate(256, 64, bias=True)
    p_in = layer.p_in.weight
    assert p_in.var().item() == pytest.approx(1 / 256, rel=0.05)
    assert p_in.abs().max().item() <= 2 / 0.8796 / 16
    ones: list[Tensor] = [layer.norm_in.weight, layer.norm_out.weight, layer.g_in.bias, layer.g_out.bias]
    zeros: list[Tensor] = [layer.norm_in.bias, layer.norm_out.bias, layer.p_in.bias, layer.p_out.bias]
    zeros += [layer.g_in.weight, layer.p_out.weight, layer.g_out.weight]
    assert all((t == 1).all() for t in ones)
    assert all((t == 0).all() for t in zeros)
    x, mask = inputs(torch.float32, c=256)
    assert not layer(x, mask).any()
    assert "256, 64, direction=outgoing, eps=1e-05" in repr(layer)


def test_on_the_meta_device_and_in_other_dtypes() -> None:
    layer = TriangleMultiplicativeUpdate(6, device="meta", dtype=torch.bfloat16)
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in layer.parameters())
    layer = layer.to_empty(device="cpu")
    layer.reset_parameters()
    randomised(layer)
    for dtype in (torch.bfloat16, torch.float32):
        x, mask = inputs(dtype)
        out = layer(x, mask)
        assert out.dtype == torch.bfloat16
        exact = expected(copy.deepcopy(layer).double(), x.double(), mask.double())
        torch.testing.assert_close(out.double(), exact, rtol=0.05, atol=0.1)


def test_copies_and_pickles() -> None:
    layer = randomised(TriangleMultiplicativeUpdate(6, 4, "incoming"))
    x, mask = inputs(torch.float32)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x, mask), layer(x, mask))


def test_a_direction_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match="expected direction outgoing or incoming, got both"):
        TriangleMultiplicativeUpdate(6, direction="both")  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_no_features() -> None:
    assert TriangleMultiplicativeUpdate(0)(torch.zeros(3, 3, 0)).shape == (3, 3, 0)
    assert Transition(0, 4)(torch.zeros(3, 0)).shape == (3, 0)

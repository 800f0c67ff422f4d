"""torchops.nn.Dense, Gate and GLU beside nn.Linear with the operators that follow it."""

from __future__ import annotations

import copy
import io
import pickle
import re
from typing import Literal

import pytest
import torch
from checks import assert_all_close, random_like
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from torchops.nn import GLU, AttentionPairBias, Dense, Gate, Transition, TriangleAttention, TriangleMultiplicativeUpdate


def pair(*args: object, **kwargs: object) -> tuple[Dense, nn.Linear]:
    torch.manual_seed(7)
    dense = Dense(*args, **kwargs)  # type: ignore[arg-type]
    torch.manual_seed(7)
    return dense, nn.Linear(*args, **kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [None, torch.float64, torch.bfloat16])
def test_initialisation_and_forward(bias: bool, dtype: torch.dtype | None) -> None:
    dense, linear = pair(13, 9, bias=bias, dtype=dtype)
    assert list(dense.state_dict()) == list(linear.state_dict())
    for ours, theirs in zip(dense.parameters(), linear.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.dtype == theirs.dtype == (dtype or torch.get_default_dtype())
    assert (dense.bias is None) == (not bias)
    for shape in ((5, 13), (13,), (2, 3, 13), (0, 13)):
        x = random_like(torch.empty(shape, dtype=dtype))
        torch.testing.assert_close(
            dense(x), torch.sigmoid(linear(x)), atol=1e-2 if dtype == torch.bfloat16 else 1e-6, rtol=0
        )


def test_state_dicts_are_exchanged() -> None:
    dense, linear = Dense(13, 9), nn.Linear(13, 9)
    dense.load_state_dict(linear.state_dict())
    assert_all_close(list(dense.parameters()), list(linear.parameters()))
    other = nn.Linear(13, 9)
    other.load_state_dict(Dense(13, 9).state_dict())
    with pytest.raises(RuntimeError, match="size mismatch"):
        dense.load_state_dict(nn.Linear(13, 8).state_dict())


def test_representation() -> None:
    assert repr(Dense(3, 4)) == "Dense(in_features=3, out_features=4, bias=True)"
    assert repr(nn.Sequential(Dense(3, 4, bias=False))) == (
        "Sequential(\n  (0): Dense(in_features=3, out_features=4, bias=False)\n)"
    )
    assert (Dense(3, 4).in_features, Dense(3, 4).out_features) == (3, 4)


def test_moves_between_dtypes_and_devices() -> None:
    layer = Dense(3, 4)
    x = random_like(torch.empty(5, 3))
    expected = layer(x).detach()
    torch.testing.assert_close(layer.to(torch.float64)(x.double()), expected.double())
    torch.testing.assert_close(layer.bfloat16()(x.bfloat16()), expected.bfloat16(), atol=2e-2, rtol=0)
    assert layer.half()(x.half()).dtype == torch.float16
    with pytest.raises(RuntimeError, match="expected w of dtype float32 to match x, got float16"):
        layer(x)
    meta = layer.to("meta")
    assert meta(x.half().to("meta")).shape == (5, 4)
    with pytest.raises(RuntimeError, match="expected w on device cpu to match x, got meta"):
        meta(x.half())


def test_deferred_initialisation() -> None:
    """Built on the meta device, filled later."""
    layer = Dense(3, 4, device="meta", dtype=torch.float64)
    assert all(p.is_meta and p.dtype == torch.float64 for p in layer.parameters())
    layer = layer.to_empty(device="cpu")
    torch.manual_seed(7)
    layer.reset_parameters()
    assert_all_close(list(layer.parameters()), list(pair(3, 4, dtype=torch.float64)[1].parameters()))
    with torch.device("meta"):
        assert Dense(3, 4).weight.is_meta


def test_copies_and_pickles() -> None:
    layer = Dense(3, 4)
    x = random_like(torch.empty(5, 3))
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for other in (
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        torch.load(file, weights_only=False),
    ):
        assert type(other) is Dense
        assert other.weight is not layer.weight
        assert torch.equal(other(x), layer(x))


def test_trains_like_linear_and_sigmoid() -> None:
    results = []
    for ours in (True, False):
        torch.manual_seed(7)
        model = (
            nn.Sequential(Dense(6, 8), Dense(8, 2))
            if ours
            else nn.Sequential(nn.Linear(6, 8), nn.Sigmoid(), nn.Linear(8, 2), nn.Sigmoid())
        )
        optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
        losses = []
        for step in range(5):
            optimiser.zero_grad()
            loss = (model(random_like(torch.empty(11, 6), step)) - 0.3).square().mean()
            loss.backward()
            optimiser.step()
            losses.append(loss.detach())
        results.append([*losses, *(p.detach() for p in model.parameters())])
    assert_all_close(*results, atol=1e-6, rtol=1e-5)
    assert results[0][0] > results[0][4]


def test_module_hooks_and_parametrisation() -> None:
    """It is an ordinary module: hooks run, and its weight may be computed."""
    layer = nn.utils.parametrizations.weight_norm(Dense(3, 4))
    calls: list[int] = []
    layer.register_forward_hook(lambda *_: calls.append(1))
    x = random_like(torch.empty(5, 3))
    out = layer(x)
    torch.testing.assert_close(out, torch.sigmoid(nn.functional.linear(x, layer.weight, layer.bias)))
    out.sum().backward()
    assert calls == [1]
    assert all(p.grad is not None for p in layer.parameters())


@pytest.mark.parametrize("sizes", [(0, 4), (3, 0)])
def test_empty_layers(sizes: tuple[int, int]) -> None:
    with pytest.warns(UserWarning, match="Initializing zero-element tensors is a no-op"):
        layer = Dense(*sizes)
    out = layer(torch.zeros(5, sizes[0]))
    assert out.shape == (5, sizes[1])
    out.sum().backward()


# --- Gate and GLU ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gate(bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(7)
    gate = Gate(13, 9, bias=bias, dtype=dtype)
    torch.manual_seed(7)
    linear = nn.Linear(13, 9, bias=bias, dtype=dtype)
    assert_all_close(list(gate.parameters()), list(linear.parameters()), rtol=0, atol=0)
    assert list(gate.state_dict()) == list(linear.state_dict())
    assert repr(gate) == f"Gate(in_features=13, out_features=9, bias={bias})"
    tolerance = 0.02 if dtype == torch.bfloat16 else 1e-12
    for shape in ((5, 13), (13,), (2, 3, 13), (0, 13)):
        x = random_like(torch.empty(shape, dtype=dtype))
        v = random_like(torch.empty(*shape[:-1], 9, dtype=dtype), 2)
        torch.testing.assert_close(gate(v, x), v * torch.sigmoid(linear(x)), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["sigmoid", "silu"])
def test_glu(bias: bool, activation: Literal["sigmoid", "silu"]) -> None:
    layer = GLU(13, 9, bias, activation, dtype=torch.float64)
    names = ["value.weight", "value.bias", "gate.weight", "gate.bias"]
    assert list(layer.state_dict()) == [name for name in names if bias or "weight" in name]
    x = random_like(torch.empty(2, 5, 13, dtype=torch.float64)).requires_grad_()
    u = layer.gate(x)
    got, expected = layer(x), layer.value(x) * (nn.functional.silu(u) if activation == "silu" else torch.sigmoid(u))
    leaves = [x, *layer.parameters()]
    cotangent = random_like(expected.detach(), 3)
    results = [[out, *torch.autograd.grad(out, leaves, cotangent)] for out in (got, expected)]
    assert_all_close(*results)
    assert f"activation={activation}" in repr(layer)


def test_glu_of_an_activation_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match="GLU: expected activation sigmoid or silu, got relu"):
        GLU(3, 4, activation="relu")  # type: ignore[arg-type]


@pytest.mark.parametrize("module", [Gate(5, 4), GLU(5, 4, activation="silu")], ids=["gate", "glu"])
def test_gates_are_copied_pickled_and_trained_in_mixed_precision(module: nn.Module) -> None:
    x, v = random_like(torch.empty(3, 5)), random_like(torch.empty(3, 4), 2)
    inputs = (v, x) if isinstance(module, Gate) else (x,)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(*inputs), module(*inputs))
    half = copy.deepcopy(module).bfloat16()
    x.requires_grad_()
    out = half(*inputs)
    assert out.dtype == (torch.float32 if isinstance(module, Gate) else torch.bfloat16)
    torch.testing.assert_close(out, module(*inputs), check_dtype=False, atol=0.03, rtol=0.03)
    out.float().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
    assert all(p.grad is not None and p.grad.dtype == torch.bfloat16 for p in half.parameters())


class Adapter(nn.Module):
    """Shows the parameters of the layer that it adapts, as adapters of low rank do."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer, self.change = layer, nn.Linear(layer.in_features, layer.out_features)

    @property
    def weight(self) -> Tensor:
        return self.layer.weight

    @property
    def bias(self) -> Tensor:
        return self.layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.change(x)


@pytest.mark.parametrize(
    "module",
    [GLU(4, 4), Transition(4), TriangleMultiplicativeUpdate(4), TriangleAttention(4), AttentionPairBias(4, 4, 2)],
    ids=lambda module: type(module).__name__,
)
def test_another_layer_is_not_left_out(module: nn.Module) -> None:
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, nn.Linear)}
    assert layers
    for path, layer in layers.items():
        above, _, name = path.rpartition(".")
        parent = module.get_submodule(above)
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        message = f"{kind}: expected {path} to be a plain torch.nn.Linear, .*, got {__name__}.Adapter;"
        with pytest.raises(TypeError, match=re.escape(message).replace(r"\.\*", ".*")):
            setattr(parent, name, Adapter(layer))
        assert getattr(parent, name) is layer
        with pytest.raises(TypeError, match=f"expected {path} to be"):
            parent.add_module(name, Adapter(layer))
        assert getattr(parent, name) is layer
        setattr(parent, name, weight_norm(copy.deepcopy(layer)))


def test_subclasses_have_modules_of_their_own() -> None:
    class Dropping(Transition):
        def __init__(self) -> None:
            super().__init__(4)
            self.dropout = nn.Dropout(0.1)

        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return self.dropout(super().forward(x))

    assert Dropping()(torch.randn(3, 4)).shape == (3, 4)

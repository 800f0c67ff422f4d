"""transition: what the generic suites do not ask. Gradients that nobody wants, sums in float32, memory, the module."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from checks import assert_all_close, random_like
from test_gates import saved
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from transition_samples import TRANSITION_KEYWORDS, transition_reference

import torchops

OPS = torch.ops.myops
NAMES = ("x", *TRANSITION_KEYWORDS[:-1])
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def values(
    rows: int, c: int, hidden: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> dict[str, Tensor]:
    shapes = [(rows, c), (c,), (c,), (hidden, c), (hidden,), (hidden, c), (hidden,), (c, hidden), (c,)]
    out = {}
    for seed, (name, shape) in enumerate(zip(NAMES, shapes, strict=True)):
        scale = max(shape[1], 1) ** -0.5 if name.endswith("weight") and len(shape) == 2 else 1.0
        out[name] = (random_like(torch.empty(shape, dtype=torch.float64), seed) * scale).to(dtype).to(device)
    return out


KEPT = pytest.mark.parametrize("kept", [False, True], ids=["recomputed", "kept"])


def products_of(given: dict[str, Tensor], kept: bool) -> list[Tensor]:
    """The hidden products, if they are kept."""
    return list(OPS._transition(*given.values(), 1e-5, False)[1:]) if kept else []


def backward(
    given: dict[str, Tensor], grad: Tensor, output_mask: list[bool], *products: Tensor, add_residual: bool = False
) -> list[Tensor]:
    parameters = {name: t for name, t in given.items() if name != "down_bias"}
    return OPS._transition_backward(grad, *parameters.values(), 1e-5, output_mask, add_residual, *products)


@KEPT
@pytest.mark.parametrize("device", DEVICES)
def test_every_subset_of_gradients(device: str, kept: bool) -> None:
    """The same bits whatever else is wanted, and empty tensors for the others."""
    given = values(700, 7, 5, device=device)
    grad, products = random_like(given["x"], 20), products_of(given, kept)
    whole = backward(given, grad, [True] * 9, *products)
    for output_mask in itertools.product([False, True], repeat=9):
        results = backward(given, grad, list(output_mask), *products)
        for got, all_of_it, wanted in zip(results, whole, output_mask, strict=True):
            assert torch.equal(got, all_of_it) if wanted else got.shape == (0,)


# The products, each of rows * c * hidden, where the hidden ones are kept: back through down, dz by up and by gate, and
# the three weights.
COUNTS_OF_KEPT = {
    "down_bias": 0,
    "down_weight": 1,
    "up_bias": 1,
    "up_weight": 2,
    "gate_bias": 1,
    "gate_weight": 2,
    "norm_bias": 3,
    "norm_weight": 3,
    "x": 3,
}
# The same where gate and up are computed again.
COUNTS = {
    "down_bias": 0,
    "down_weight": 3,
    "up_bias": 2,
    "up_weight": 3,
    "gate_bias": 3,
    "gate_weight": 4,
    "norm_bias": 5,
    "norm_weight": 5,
    "x": 5,
}


@KEPT
def test_no_product_that_nobody_asked_for(kept: bool) -> None:
    """Small hidden products are kept on a CPU."""
    rows, c, hidden = (6, 7, 5) if kept else (600, 1, 4096)
    given = values(rows, c, hidden)
    product = 2 * rows * c * hidden

    def training(*names: str) -> int:
        leaves = [given[name].requires_grad_() for name in names]
        with FlopCounterMode(display=False) as counter:
            out = OPS.transition(given["x"], **{k: v for k, v in given.items() if k != "x"})
            torch.autograd.grad(out, leaves, torch.ones_like(out))
        for leaf in leaves:
            leaf.requires_grad_(False)
        return counter.get_total_flops() // product - 3

    for name, count in (COUNTS_OF_KEPT if kept else COUNTS).items():
        assert training(name) == count, name
    again = 0 if kept else 2
    assert training(*NAMES) == 6 + again
    assert training("gate_weight", "up_weight") == 3 + again
    assert training("x", "down_weight") == 4 + again


@KEPT
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("device", DEVICES)
def test_sums_over_rows_are_in_float32(device: str, dtype: torch.dtype, kept: bool) -> None:
    """ATen's layer norm adds up the gradients of its parameters in 16 bits on the CPU, and is ten times as far off."""
    rows = 6000 if device == "cpu" and dtype == torch.bfloat16 else 3000
    given = values(rows, 24, 40, dtype, device)
    grad = random_like(given["x"], 20)
    leaves = {name: t.double().requires_grad_() for name, t in given.items()}
    out = transition_reference(**leaves)
    expected = torch.autograd.grad(out, list(leaves.values()), grad.double())
    gradients = backward(given, grad, [True] * 9, *products_of(given, kept))
    for name, got, exact in zip(NAMES, gradients, expected, strict=True):
        assert got.dtype == dtype
        distance = ((got.double() - exact).norm() / exact.norm()).item()
        assert distance <= 3 * torch.finfo(dtype).eps, name


@KEPT
@pytest.mark.parametrize("device", DEVICES)
def test_adds_the_cotangent_where_asked(device: str, kept: bool) -> None:
    given = values(700, 8, 16, device=device)
    grad, products = random_like(given["x"], 20), products_of(given, kept)
    for output_mask in ([True] * 9, [True] + [False] * 8, [False] + [True] * 8):
        dx, *others = backward(given, grad, output_mask, *products)
        got = backward(given, grad, output_mask, *products, add_residual=True)
        assert torch.equal(got[0], dx + grad if output_mask[0] else dx)
        assert all(map(torch.equal, got[1:], others))


def test_residual_of_a_wider_stream_keeps_its_digits() -> None:
    """The layer's gradient is of 16 bits, that which passes by is not."""
    given = values(30, 8, 16, torch.bfloat16)
    x = given.pop("x").float().requires_grad_()
    given["down_weight"].zero_()
    grad = random_like(torch.empty(30, 8), 20)
    y = x.clone()
    OPS.add_transition_(y, **given)
    (dx,) = torch.autograd.grad(y, x, grad)
    assert torch.equal(dx, grad)


@KEPT
def test_repeatable(kept: bool) -> None:
    given = values(5000, 33, 65)
    grad, products = random_like(given["x"], 20), products_of(given, kept)
    first, second = (backward(given, grad, [True] * 9, *products) for _ in range(2))
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_training_keeps(dtype: torch.dtype) -> None:
    """Both hidden products of more than 128 features, and of few features those that stay in the cache; of a call in
    place none. Gradients are those of recomputed products up to rounding."""
    for rows, c, hidden, keeps in ((9, 136, 8, True), (40, 8, 16, True), (2100, 8, 4096, False)):
        given = {name: t.requires_grad_() for name, t in values(rows, c, hidden, dtype).items()}
        x, weights = given["x"].clone(), {name: t for name, t in given.items() if name != "x"}
        of_new = saved(partial(OPS.transition, x, **weights))
        in_place = saved(partial(OPS.add_transition_, x, **weights))
        assert [sum(t.shape == (rows, hidden) for t in kept) for kept in (of_new, in_place)] == [2 * keeps, 0]


def test_no_product_is_kept_of_a_traced_call_in_place() -> None:
    def function(*given: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in given]
        x, *parameters = (leaf * 1 for leaf in leaves)
        OPS.add_transition_(x, **dict(zip(TRANSITION_KEYWORDS, parameters, strict=False)))
        return torch.autograd.grad(x.sum(), leaves)

    graph = make_fx(function, tracing_mode="fake")(*values(6, 136, 8).values()).graph
    calls = [
        len(graph.find_nodes(op="call_function", target=op.default)) for op in (OPS._transition, OPS._add_transition)
    ]
    assert calls == [0, 1]


def test_what_training_keeps_compiles_nothing_again() -> None:
    """Nothing is kept where the number of rows is open, so that one program serves all of them."""
    given = {name: t.requires_grad_() for name, t in values(1, 8, 4096).items() if name != "x"}
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(partial(OPS.transition, **given), fullgraph=True, backend=counter, dynamic=True)
    for rows in (100, 600):
        x = random_like(torch.empty(rows, 8), rows)
        results = []
        for function in (compiled, partial(OPS.transition, **given)):
            y = function(x)
            results.append([y, *torch.autograd.grad(y, list(given.values()), random_like(y, 20))])
        assert_all_close(*results, atol=1e-3, rtol=1e-3)
    assert counter.frame_count == 1


@pytest.mark.parametrize("shape", [(0, 6), (2, 0, 6), (4, 0)], ids=str)
def test_without_elements(shape: tuple[int, ...]) -> None:
    """Sums over no rows are 0."""
    given = values(1, shape[-1], 5)
    given["x"] = torch.zeros(shape)
    leaves = [t.requires_grad_() for t in given.values()]
    y = OPS.transition(**given)
    assert y.shape == shape
    for gradient, leaf in zip(torch.autograd.grad(y.sum(), leaves), leaves, strict=True):
        assert torch.equal(gradient, torch.zeros_like(leaf))


@pytest.mark.parametrize("in_place", [False, True], ids=["new", "in_place"])
def test_hidden_features_of_a_panel_at_a_time(in_place: bool) -> None:
    given = values(60_000, 16, 64)
    x = given.pop("x")
    (OPS.add_transition_ if in_place else OPS.transition)(x.clone(), **given)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        (OPS.add_transition_ if in_place else OPS.transition)(x, **given)
    sizes = [e.self_cpu_memory_usage for e in profiler.events() if e.self_cpu_memory_usage > 0]
    sizes = [size for size in sizes if size < x.nbytes or in_place]  # the result
    assert 0 < max(sizes) <= 4 << 20
    assert x.nbytes * 4 > 15 * max(sizes), "the panel is a small part of all hidden features"


def test_private_operator_checks_its_arguments() -> None:
    given = values(6, 7, 5)
    x, parameters = given["x"], list(given.values())[1:-1]
    nothing, hidden = [False] * 9, torch.zeros(6, 5)
    for arguments, text in (
        ((x[:1], x, *parameters, 1e-5, nothing), r"expected grad of shape \(6, 7\) to match x, got \(1, 7\)"),
        ((x.double(), x, *parameters, 1e-5, nothing), "expected grad of dtype float32 to match gate_weight"),
        ((x, x, *parameters[:-1], parameters[-1].t(), 1e-5, nothing), r"expected down_weight of shape \(7, 5\)"),
        ((x, x, None, *parameters[1:], 1e-5, [False, True, *nothing[2:]]), "expected output_mask without gradients of"),
        ((x, x, *parameters, 1e-5, nothing, False, hidden), "expected both up and gate or neither, got one of them"),
        ((x, x, *parameters, 1e-5, nothing, False, x, hidden), r"expected up of shape \(6, 5\) to match x and gate"),
        ((x, x, *parameters, 1e-5, nothing, False, hidden, hidden.double()), "expected gate of dtype float32"),
    ):
        for device in ("cpu", "meta"):
            moved = [t.to(device) if isinstance(t, Tensor) else t for t in arguments]
            with pytest.raises(RuntimeError, match=f"^_transition_backward: {text}"):
                OPS._transition_backward(*moved)


def test_in_place_with_tiny_panels_of_overlapping_parameters() -> None:
    """Rows of x are its own norm and weights, in more panels than one: read first, with and without gradients."""
    for requires_grad in (False, True):
        start = (random_like(torch.empty(9000, 6, dtype=torch.float64)) * 0.5).requires_grad_(requires_grad)
        results = []
        for in_place in (True, False):
            x = start * 2
            given: dict[str, Any] = {
                "norm_weight": x[5],
                "gate_weight": x[:4],
                "up_weight": x[8000:8004],
                "down_weight": x[1:5].t(),
            }
            y = torchops.add_transition_(x, **given) if in_place else x + transition_reference(x, **given)
            results.append([y, *(torch.autograd.grad(y.square().sum(), start) if requires_grad else [])])
        assert_all_close(*results)


# --- the module ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
def test_module(bias: bool) -> None:
    layer = torchops.nn.Transition(8, 12, bias=bias, eps=1e-3)
    biases = [f"fc{i}.bias" for i in (1, 2, 3)] if bias else []
    names = ["norm.weight", "norm.bias", *(f"fc{i}.weight" for i in (1, 2, 3)), *biases]
    assert sorted(layer.state_dict()) == sorted(names)
    x = torch.randn(3, 5, 8)
    assert torch.equal(layer(x), torch.zeros_like(x))
    torch.nn.init.normal_(layer.fc3.weight)
    expected = layer.fc3(torch.nn.functional.silu(layer.fc1(layer.norm(x))) * layer.fc2(layer.norm(x)))
    assert_all_close([layer(x)], [expected], atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        y = x.clone()
        assert layer(y, inplace=True) is y
        assert_all_close([y], [x + expected], atol=1e-5, rtol=1e-5)
    layer(x).sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


def test_module_in_mixed_precision_and_compiled() -> None:
    layer: Any = torchops.nn.Transition(8)
    assert layer.hidden == 32
    torch.nn.init.normal_(layer.fc3.weight)
    x = torch.randn(3, 5, 8)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert layer(x).dtype == torch.bfloat16
        y = x.clone()
        layer(y, inplace=True)
        assert y.dtype == torch.float32
        assert_all_close([y], [x + layer(x).float()])
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (3, 5, 17):
        x = torch.randn(rows, 8, requires_grad=True)
        results = [torch.autograd.grad(f(x).square().sum(), [x, *layer.parameters()]) for f in (compiled, layer)]
        assert_all_close(*results)

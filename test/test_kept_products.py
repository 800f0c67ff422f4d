"""Products that training of gate and glu keeps for its gradients: when, and that they change no derivative.

These tests run on a CPU. test_cuda_kept_products.py has what is kept on CUDA.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checks import assert_all_close, random_like
from product_samples import gate_reference, glu_reference
from test_gates import make, saved
from test_inductor import check
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import torchops
from torchops.inductor import table

OPS = torch.ops.myops
HALF, LONG = torch.bfloat16, 1032
SHAPES = {"x": (6, LONG), "w": (5, LONG), "wg": (5, LONG), "b": (5,), "bg": (5,)}


def scaled(*shapes: tuple[int, ...]) -> list[Tensor]:
    """For sums of about 1."""
    return [t / 16 if t.shape[-1] == LONG else t for t in make(*shapes, dtype=HALF)]


def arguments() -> list[Tensor]:
    return scaled(*SHAPES.values())


def recorded(function: Callable[..., Any], *args: Tensor) -> GraphModule:
    """The calls that `function` makes."""
    return make_fx(function, tracing_mode="fake")(*args)


def calls(graph: GraphModule, op: Any) -> list[Any]:
    return graph.graph.find_nodes(op="call_function", target=op.default)


def gradients(*args: Tensor) -> tuple[Tensor, ...]:
    """Of glu, for the cotangent that comes first."""
    grad, *inputs = args
    leaves = [t.detach().requires_grad_() for t in inputs]
    return torch.autograd.grad(torchops.glu(*leaves, activation="silu"), leaves, grad)


# --- when ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("features", "dtype", "x_dtype", "kept"),
    [
        (129, HALF, HALF, True),
        (128, HALF, HALF, False),
        (129, torch.float32, torch.float32, True),
        (128, torch.float64, torch.float64, False),
        (4096, HALF, torch.float32, False),
    ],
)
def test_when(features: int, dtype: torch.dtype, x_dtype: torch.dtype, kept: bool) -> None:
    x = torch.zeros(6, features, dtype=x_dtype, requires_grad=True)
    v, w, wg = (torch.zeros(n, m, dtype=dtype) for n, m in ((6, 8), (8, features), (8, features)))
    for gated, products in ((lambda: torchops.glu(x, w, wg), 2), (lambda: torchops.gate(v, x, w), 1)):
        beside = products == 1  # v
        assert [tuple(t.shape) for t in saved(gated)].count((6, 8)) == products * kept + beside
        with torch.no_grad():
            assert saved(gated) == []


@pytest.mark.parametrize("dtype", [HALF, torch.float16, torch.float32])
def test_no_product_is_kept_in_a_traced_gate_in_place(dtype: torch.dtype) -> None:
    def function(v: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in (v, x, w)]
        return torch.autograd.grad(torchops.gate_(leaves[0] * 1, *leaves[1:]).sum(), leaves)

    graph = recorded(function, *make((6, 8), (6, LONG), (8, LONG), dtype=dtype))
    assert calls(graph, OPS._gate) == []
    assert len(calls(graph, OPS._gate_backward)) == 1


def test_no_product_is_kept_beside_a_float32_value() -> None:
    v, x, w = make((6, 8), (6, LONG), (8, LONG), dtype=HALF)
    assert len(saved(lambda: torchops.gate(v.float(), x.requires_grad_(), w))) == 3


def test_no_product_is_kept_for_the_gradient_of_v_or_in_place() -> None:
    v, x, w = torch.zeros(6, 8, dtype=HALF), torch.zeros(6, LONG, dtype=HALF), torch.zeros(8, LONG, dtype=HALF)
    assert len(saved(lambda: torchops.gate(v.requires_grad_(), x, w))) == 2
    assert len(saved(lambda: torchops.gate_(v.detach().clone(), x.requires_grad_(), w))) == 3


def test_nothing_is_kept_elsewhere() -> None:
    v = torch.zeros(5, 5, device="meta")
    x, w = (torch.zeros(5, 4096, device="meta", requires_grad=True) for _ in range(2))
    assert [t.shape for t in saved(lambda: torchops.glu(x, w, w))] == [x.shape] * 3
    assert [t.shape for t in saved(lambda: torchops.gate(v, x, w))] == [v.shape, x.shape, x.shape]


def test_question_with_wrong_arguments() -> None:
    with pytest.raises(RuntimeError, match=r"^_keeps_products: expected w of shape .* to match x, got \(3,\)"):
        OPS._keeps_products(torch.zeros(5, 7), torch.zeros(3), True)


def test_training() -> None:
    """One call makes the result and both products, and the gradients get these."""
    args = arguments()
    grad = random_like(torch.empty(6, 5, dtype=HALF), 9)
    graph = recorded(gradients, grad, *args)
    assert calls(graph, OPS.glu) == []
    (forward,), (backward,) = calls(graph, OPS._glu), calls(graph, OPS._glu_backward)
    assert [(t.args[0], t.args[1]) for t in backward.args[8:]] == [(forward, 1), (forward, 2)]
    assert_all_close(graph(grad, *args), gradients(grad, *args))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled(dynamic: bool) -> None:
    args = arguments()
    grad = random_like(torch.empty(6, 5, dtype=HALF), 9)
    leaves = [t.requires_grad_() for t in args]
    compiled = torch.compile(
        lambda *inputs: torchops.glu(*inputs, activation="silu"), backend="aot_eager", fullgraph=True, dynamic=dynamic
    )
    y = compiled(*leaves)
    got = torch.autograd.grad(y, leaves, grad)
    assert_all_close([y, *got], [torchops.glu(*leaves, activation="silu"), *gradients(grad, *args)])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("features", "kept"), [(LONG, True), (128, False)])
def test_inductor(features: int, kept: bool, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the pass puts into a graph for training keeps what eager mode keeps, and for inference nothing."""
    monkeypatch.setattr(table, "TABLE", table.Everywhere())
    x, w, wg, b, bg = (t[..., :features] for t in arguments())
    inputs = [x, torch.cat([w, wg]), torch.cat([b, bg])] if packed else [x, w, wg]

    def function(x: Tensor, w: Tensor, other: Tensor) -> Tensor:
        value, gate = F.linear(x, w, other).chunk(2, -1) if packed else (F.linear(x, w), F.linear(x, other))
        return value * F.silu(gate)

    backend = check(function, inputs, True, atol=0.05, rtol=0.05)
    assert [backend.count(op.default) for op in (OPS._glu, OPS.glu)] == [kept, not kept]
    (backward,) = backend.graphs[1].find_nodes(op="call_function", target=OPS._glu_backward.default)
    assert [node.op for node in backward.args[8:]] == ["placeholder"] * 2 * kept
    assert backend.saved_bytes == sum(t.nbytes for t in inputs) + 2 * kept * 6 * 5 * HALF.itemsize
    assert check(function, inputs, False, atol=0.05, rtol=0.05).count(OPS.glu.default) == 1


def test_inference() -> None:
    graph = recorded(lambda x, w, wg: torchops.glu(x, w, wg), *arguments()[:3])
    assert calls(graph, OPS._glu) == []
    assert len(calls(graph, OPS.glu)) == 1


# --- derivatives -----------------------------------------------------------------------------------------------------


def test_gradients_that_are_asked_for() -> None:
    args = arguments()
    for trained in itertools.product([False, True], repeat=5):
        if not any(trained):
            continue

        def function(*inputs: Tensor, trained: tuple[bool, ...] = trained) -> tuple[Tensor, ...]:
            leaves = [t.detach().requires_grad_(wanted) for t, wanted in zip(inputs, trained, strict=True)]
            return torch.autograd.grad(torchops.glu(*leaves).sum(), [t for t in leaves if t.requires_grad])

        graph = recorded(function, *args)
        (backward,) = calls(graph, OPS._glu_backward)
        assert backward.args[7] == list(trained)
        assert_all_close(graph(*args), function(*args))


OPERATORS = [(torchops.gate, gate_reference, OPS._gate), (torchops.glu, glu_reference, OPS._glu)]


def operands(op: Callable[..., Tensor]) -> list[Tensor]:
    return arguments() if op is torchops.glu else scaled((6, 5), SHAPES["x"], SHAPES["w"], SHAPES["b"])


@pytest.mark.parametrize(("op", "reference", "keeping"), OPERATORS)
def test_second_derivatives(op: Callable[..., Tensor], reference: Callable[..., Tensor], keeping: Any) -> None:
    """Products depend on the inputs too."""

    def second(function: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, ...]]:
        def run(*inputs: Tensor) -> tuple[Tensor, ...]:
            leaves = [t.detach().requires_grad_() for t in inputs]
            first = torch.autograd.grad(function(*leaves).square().sum(), leaves, create_graph=True)
            return torch.autograd.grad([t.square().sum() for t in first], leaves)

        return run

    args = operands(op)
    graph = recorded(second(op), *args)
    assert len(calls(graph, keeping)) == 1
    got, eager = graph(*args), second(reference)(*args)
    exact = second(reference)(*(t.double() for t in args))
    for g, e, value in zip(got, eager, exact, strict=True):
        # Biases are few numbers, of which one may be rounded the other way.
        assert (g - value).norm() <= 2 * (e - value).norm() + torch.finfo(HALF).eps / 2 * value.norm()


@pytest.mark.parametrize(("op", "reference", "keeping"), OPERATORS)
def test_forward_mode(op: Callable[..., Tensor], reference: Callable[..., Tensor], keeping: Any) -> None:
    args, tangents = operands(op), operands(op)

    def tangent(*inputs: Tensor) -> Tensor:
        return torch.func.jvp(op, inputs[: len(args)], inputs[len(args) :])[1]

    graph = recorded(tangent, *args, *tangents)
    assert calls(graph, keeping) == []
    torch.testing.assert_close(graph(*args, *tangents), tangent(*args, *tangents))


# --- the operators ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["sigmoid", "silu"])
@pytest.mark.parametrize("rows", [(6,), (2, 3), (), (0,)], ids=str)
def test_values(rows: tuple[int, ...], activation: Any) -> None:
    x, w, wg, b, bg = make((*rows, 7), (5, 7), (5, 7), (5,), (5,))
    for biases in ((b, bg), (None, bg), (None, None)):
        got = OPS._glu(x, w, wg, *biases, activation)
        linear = torch.nn.functional.linear
        products = linear(x, w, biases[0]), linear(x, wg, biases[1])
        assert_all_close(got, [torchops.glu(x, w, wg, *biases, activation=activation), *products])
        assert all(t.is_contiguous() for t in got)
        assert len({t.untyped_storage()._cdata for t in got}) == 3


@pytest.mark.parametrize("rows", [11, 20_011])
def test_masks(rows: int) -> None:
    grad, *inputs = make((rows, 5), (rows, 7), (5, 7), (5, 7), (5,), (5,))
    _, z, u = OPS._glu(*inputs, "silu")
    for mask in itertools.product([False, True], repeat=5):
        rest = (grad, *inputs, "silu", list(mask))
        assert_all_close(OPS._glu_backward(*rest, z, u), OPS._glu_backward(*rest))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_no_argument_is_trusted(device: str) -> None:
    z, x, w, b = (t.to(device) for t in make((6, 5), (6, 7), (5, 7), (5,)))

    def backward(*products: Tensor | None) -> Any:
        return OPS._glu_backward(z, x, w, w, b, b, "silu", [True] * 5, *products)

    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: OPS._glu(x, w, w[:4], b, b, "silu"), r"_glu: expected wg of shape \(5, 7\) to match w, got \(4, 7\)"),
        (lambda: backward(z), "_glu_backward: expected both z and u or neither, got one of them"),
        (lambda: backward(None, z), "_glu_backward: expected both z and u or neither, got one of them"),
        (lambda: backward(z[:5], z), r"_glu_backward: expected z of shape \(6, 5\) to match x and w, got \(5, 5\)"),
        (lambda: backward(z, z[0]), r"_glu_backward: expected u of shape \(6, 5\) to match x and w, got \(5,\)"),
        (lambda: backward(z, z.float()), "_glu_backward: expected u of dtype float64 to match w, got float32"),
    ]
    for call, text in refused:
        with pytest.raises(RuntimeError, match=text):
            call()
    with pytest.raises(ValueError, match="_glu: expected activation sigmoid or silu, got tanh"):
        OPS._glu(x, w, w, b, b, "tanh")


def test_flops() -> None:
    """Given products are not multiplied again."""
    grad, *tensors = make((6, 5), (6, 7), (5, 7), (5, 7))
    inputs = (*tensors, None, None)

    def products(op: Any, *args: Any) -> int:
        with FlopCounterMode(display=False) as counter:
            op(*args)
        return counter.get_total_flops() // 420

    assert products(OPS._glu, *inputs, "silu") == 2
    _, z, u = OPS._glu(*inputs, "silu")
    for mask in itertools.product([False, True], repeat=3):
        rest = (grad, *inputs, "silu", [*mask, False, False])
        own = 2 * mask[0] + mask[1] + mask[2]
        assert products(OPS._glu_backward, *rest, z, u) == own
        again = 1 + (mask[0] or mask[2])
        assert products(OPS._glu_backward, *rest) == own + again

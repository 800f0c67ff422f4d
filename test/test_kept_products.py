"""Products that training of gate and glu keeps for its gradients: when, what reads them, and that they change no
derivative.

These tests run on a CPU. test_cuda_kept_products.py has what is kept on CUDA.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
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


@dataclass(frozen=True)
class Gated:
    """An operator, what training calls in its place, and what that gives to the operator of its gradients."""

    name: str
    function: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    activation: str | None = None  # glu's

    @property
    def op(self) -> Any:
        return OPS.glu if self.activation else OPS.gate

    @property
    def keeping(self) -> Any:
        return OPS._glu if self.activation else OPS._gate

    @property
    def backward(self) -> Any:
        return OPS._glu_backward if self.activation else OPS._gate_backward

    @property
    def products(self) -> int:
        return 2 if self.activation else 1

    def make(self, rows: tuple[int, ...] = (6,), features: int = 7, dtype: torch.dtype = torch.float64) -> list[Tensor]:
        """Its inputs; biases come last."""
        x, w, b = (*rows, features), (5, features), (5,)
        return make(*((x, w, w, b, b) if self.activation else ((*rows, 5), x, w, b)), dtype=dtype)

    def long(self) -> list[Tensor]:
        """With features for which products are kept, and for sums of about 1."""
        return [t / 16 if t.shape[-1] == LONG else t for t in self.make(features=LONG, dtype=HALF)]

    def keep(self, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        return self.keeping(*inputs, *([self.activation] if self.activation else []))

    def linear(self, inputs: list[Any]) -> list[Tensor]:
        """The products, in PyTorch's own operators."""
        if self.activation is None:
            return [F.linear(*inputs[1:])]
        x, w, wg, b, bg = inputs
        return [F.linear(x, w, b), F.linear(x, wg, bg)]

    def rests(self, grad: Tensor, inputs: list[Any], output_mask: list[bool], y: Tensor) -> list[tuple[Any, ...]]:
        """All that its gradients take before the products, in every form: a gate in place has its result for v."""
        if self.activation:
            return [(grad, *inputs, self.activation, output_mask)]
        return [(grad, v, *inputs[1:], output_mask, v_is_y) for v, v_is_y in ((inputs[0], False), (y, True))]

    def gradients(self, *args: Tensor) -> tuple[Tensor, ...]:
        """For the cotangent that comes first."""
        grad, *inputs = args
        leaves = [t.detach().requires_grad_() for t in inputs]
        return torch.autograd.grad(self.function(*leaves), leaves, grad)


GATED = [
    Gated("gate", torchops.gate, gate_reference),
    Gated("glu_sigmoid", torchops.glu, glu_reference, "sigmoid"),
    Gated("glu_silu", partial(torchops.glu, activation="silu"), partial(glu_reference, activation="silu"), "silu"),
]
every = pytest.mark.parametrize("gated", GATED, ids=lambda gated: gated.name)


def recorded(function: Callable[..., Any], *args: Tensor) -> GraphModule:
    """The calls that `function` makes."""
    return make_fx(function, tracing_mode="fake")(*args)


def calls(graph: GraphModule, op: Any) -> list[Any]:
    return graph.graph.find_nodes(op="call_function", target=op.default)


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


# --- training --------------------------------------------------------------------------------------------------------


@every
def test_training(gated: Gated) -> None:
    """One call makes the result and the products, and the gradients get these."""
    args = gated.long()
    grad = random_like(torch.empty(6, 5, dtype=HALF), 9)
    graph = recorded(gated.gradients, grad, *args)
    assert calls(graph, gated.op) == []
    (forward,), (backward,) = calls(graph, gated.keeping), calls(graph, gated.backward)
    given = [t for t in backward.args[1:] if getattr(t, "args", ())[:1] == (forward,)]
    assert [t.args[1] for t in given] == list(range(1, 1 + gated.products))
    assert backward.args[-gated.products :] == tuple(given)
    assert_all_close(graph(grad, *args), gated.gradients(grad, *args))


@every
def test_accuracy(gated: Gated) -> None:
    args = gated.long()
    grad = random_like(torch.empty(6, 5, dtype=HALF), 9)
    leaves = [t.double().requires_grad_() for t in args]
    exact = torch.autograd.grad(gated.reference(*leaves), leaves, grad.double())
    for got, value in zip(gated.gradients(grad, *args), exact, strict=True):
        assert (got - value).norm() <= 0.02 * value.norm()


@every
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled(gated: Gated, dynamic: bool) -> None:
    args = gated.long()
    grad = random_like(torch.empty(6, 5, dtype=HALF), 9)
    leaves = [t.requires_grad_() for t in args]
    compiled = torch.compile(gated.function, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    y = compiled(*leaves)
    got = torch.autograd.grad(y, leaves, grad)
    assert_all_close([y, *got], [gated.function(*leaves), *gated.gradients(grad, *args)])


def _gate(v: Tensor, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return v * torch.sigmoid(F.linear(x, w, b))


def _glu(x: Tensor, w: Tensor, wg: Tensor) -> Tensor:
    return F.linear(x, w) * F.silu(F.linear(x, wg))


def _packed_glu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    value, gate = F.linear(x, w, b).chunk(2, -1)
    return value * F.silu(gate)


WRITTEN_OUT: dict[Callable[..., Tensor], tuple[Gated, Callable[..., list[Tensor]]]] = {
    _gate: (GATED[0], lambda *inputs: [*inputs]),
    _glu: (GATED[2], lambda x, w, wg, b, bg: [x, w, wg]),
    _packed_glu: (GATED[2], lambda x, w, wg, b, bg: [x, torch.cat([w, wg]), torch.cat([b, bg])]),
}


@pytest.mark.parametrize("function", WRITTEN_OUT, ids=lambda function: function.__name__)
@pytest.mark.parametrize(("features", "kept"), [(LONG, True), (128, False)])
def test_inductor(features: int, kept: bool, function: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the pass puts into a graph for training keeps what eager mode keeps, and for inference nothing."""
    monkeypatch.setattr(table, "TABLE", table.Everywhere())
    gated, of = WRITTEN_OUT[function]
    inputs = of(*(t[..., :features] for t in gated.long()))
    backend = check(function, inputs, True, atol=0.05, rtol=0.05)
    assert [backend.count(op.default) for op in (gated.keeping, gated.op)] == [kept, not kept]
    (backward,) = backend.graphs[1].find_nodes(op="call_function", target=gated.backward.default)
    before = len(gated.rests(inputs[0], gated.long(), [], inputs[0])[0])
    assert [node.op for node in backward.args[before:]] == ["placeholder"] * gated.products * kept
    assert backend.saved_bytes == sum(t.nbytes for t in inputs) + gated.products * kept * 6 * 5 * HALF.itemsize
    assert check(function, inputs, False, atol=0.05, rtol=0.05).count(gated.op.default) == 1


def test_inference() -> None:
    graph = recorded(lambda x, w, wg: torchops.glu(x, w, wg), *GATED[1].long()[:3])
    assert calls(graph, OPS._glu) == []
    assert len(calls(graph, OPS.glu)) == 1


# --- derivatives -----------------------------------------------------------------------------------------------------


@every
def test_gradients_that_are_asked_for(gated: Gated) -> None:
    args = gated.long()
    for trained in itertools.product([False, True], repeat=len(args)):
        if not any(trained):
            continue

        def function(*inputs: Tensor, trained: tuple[bool, ...] = trained) -> tuple[Tensor, ...]:
            leaves = [t.detach().requires_grad_(wanted) for t, wanted in zip(inputs, trained, strict=True)]
            return torch.autograd.grad(gated.function(*leaves).sum(), [t for t in leaves if t.requires_grad])

        graph = recorded(function, *args)
        backward = calls(graph, gated.backward)
        # The gradient of v alone is a gate.
        expected = any(trained if gated.activation else trained[1:])
        mask_at = len(args) + (2 if gated.activation else 1)
        assert [call.args[mask_at] for call in backward] == [list(trained)] * expected
        assert len(calls(graph, gated.keeping)) == expected
        assert_all_close(graph(*args), function(*args))


@every
def test_second_derivatives(gated: Gated) -> None:
    """Products depend on the inputs too."""

    def second(function: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, ...]]:
        def run(*inputs: Tensor) -> tuple[Tensor, ...]:
            leaves = [t.detach().requires_grad_() for t in inputs]
            first = torch.autograd.grad(function(*leaves).square().sum(), leaves, create_graph=True)
            return torch.autograd.grad([t.square().sum() for t in first], leaves)

        return run

    args = gated.long()
    graph = recorded(second(gated.function), *args)
    assert len(calls(graph, gated.keeping)) == 1
    got, eager = graph(*args), second(gated.reference)(*args)
    exact = second(gated.reference)(*(t.double() for t in args))
    for g, e, value in zip(got, eager, exact, strict=True):
        # Biases are few numbers, of which one may be rounded the other way.
        assert (g - value).norm() <= 2 * (e - value).norm() + torch.finfo(HALF).eps / 2 * value.norm()


@every
def test_forward_mode(gated: Gated) -> None:
    args, tangents = gated.long(), gated.long()

    def tangent(*inputs: Tensor) -> Tensor:
        return torch.func.jvp(gated.function, inputs[: len(args)], inputs[len(args) :])[1]

    graph = recorded(tangent, *args, *tangents)
    assert calls(graph, gated.keeping) == []
    torch.testing.assert_close(graph(*args, *tangents), tangent(*args, *tangents))


# --- the operators ---------------------------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("rows", [(6,), (2, 3), (), (0,)], ids=str)
def test_values(gated: Gated, rows: tuple[int, ...]) -> None:
    inputs: list[Any] = gated.make(rows)
    for bias in (None, *range(-gated.products, 0)):  # left out, one more each time
        if bias is not None:
            inputs[bias] = None
        got = gated.keep(*inputs)
        assert_all_close(got, [gated.function(*inputs), *gated.linear(inputs)])
        assert all(t.is_contiguous() for t in got)
        assert len({t.untyped_storage()._cdata for t in got}) == 1 + gated.products


def test_values_with_wide_streams() -> None:
    v, x, w, b = make((6, 5), (6, 7), (5, 7), (5,), dtype=torch.float32)
    low = w.bfloat16(), b.bfloat16()
    y, z = OPS._gate(v, x, *low)
    assert (y.dtype, z.dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(y, torchops.gate(v, x, *low), rtol=0.02, atol=0.02)
    torch.testing.assert_close(z, F.linear(x.bfloat16(), *low), rtol=0.02, atol=0.02)


@every
@pytest.mark.parametrize("rows", [11, 20_011])
def test_masks(gated: Gated, rows: int) -> None:
    inputs = gated.make((rows,))
    grad = random_like(torch.empty(rows, 5, dtype=torch.float64), 9)
    y, *products = gated.keep(*inputs)
    before = [t.clone() for t in products]
    for output_mask in itertools.product([False, True], repeat=len(inputs)):
        for rest in gated.rests(grad, inputs, list(output_mask), y):
            assert_all_close(gated.backward(*rest, *products), gated.backward(*rest))
    assert all(map(torch.equal, products, before))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_no_argument_is_trusted(device: str) -> None:
    v, x, w, b = (t.to(device) for t in make((6, 5), (6, 7), (5, 7), (5,)))

    def of_gate(z: Tensor) -> Any:
        return OPS._gate_backward(v, v, x, w, b, [True] * 4, False, z)

    def of_glu(*products: Tensor | None) -> Any:
        return OPS._glu_backward(v, x, w, w, b, b, "silu", [True] * 5, *products)

    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: OPS._gate(v[:5], x, w, b), r"_gate: expected v of shape \(6, 5\) to match x and w, got \(5, 5\)"),
        (lambda: OPS._gate(v, x, w, w), r"_gate: expected b of shape \(5,\) to match w, got \(5, 7\)"),
        (lambda: of_gate(v[:5]), r"_gate_backward: expected z of shape \(6, 5\) to match v, got \(5, 5\)"),
        (lambda: of_gate(v.float()), "_gate_backward: expected z of dtype float64 to match w, got float32"),
        (lambda: OPS._glu(x, w, w[:4], b, b, "silu"), r"_glu: expected wg of shape \(5, 7\) to match w, got \(4, 7\)"),
        (lambda: of_glu(v), "_glu_backward: expected both z and u or neither, got one of them"),
        (lambda: of_glu(None, v), "_glu_backward: expected both z and u or neither, got one of them"),
        (lambda: of_glu(v[:5], v), r"_glu_backward: expected z of shape \(6, 5\) to match x and w, got \(5, 5\)"),
        (lambda: of_glu(v, v[0]), r"_glu_backward: expected u of shape \(6, 5\) to match x and w, got \(5,\)"),
        (lambda: of_glu(v, v.float()), "_glu_backward: expected u of dtype float64 to match w, got float32"),
    ]
    for call, text in refused:
        with pytest.raises(RuntimeError, match=text):
            call()
    with pytest.raises(ValueError, match="_glu: expected activation sigmoid or silu, got tanh"):
        OPS._glu(x, w, w, b, b, "tanh")


@every
def test_flops(gated: Gated) -> None:
    """Given products are not multiplied again."""
    inputs: list[Any] = gated.make()
    inputs[-gated.products :] = [None] * gated.products
    grad = random_like(torch.empty(6, 5, dtype=torch.float64), 9)

    def products(op: Any, *args: Any) -> int:
        with FlopCounterMode(display=False) as counter:
            op(*args)
        return counter.get_total_flops() // 420

    assert products(gated.keep, *inputs) == gated.products
    y, *kept = gated.keep(*inputs)
    for output_mask in itertools.product([False, True], repeat=3):
        rest = gated.rests(grad, inputs, [*output_mask, *[False] * gated.products], y)[0]
        own = (
            2 * output_mask[0] + output_mask[1] + output_mask[2]
            if gated.activation
            else output_mask[1] + output_mask[2]
        )
        assert products(gated.backward, *rest, *kept) == own
        again = 1 + (gated.activation is not None and (output_mask[0] or output_mask[2]))
        assert products(gated.backward, *rest) == own + again

"""The product that training of gate keeps: what reads it. test_kept_products.py has when."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checks import assert_all_close, random_like
from product_samples import gate_reference
from test_gates import make
from test_inductor import check
from test_kept_products import LONG, calls, recorded, scaled
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import torchops
from torchops.inductor import table

OPS = torch.ops.myops
HALF = torch.bfloat16


def arguments() -> list[Tensor]:
    return scaled((6, 5), (6, LONG), (5, LONG), (5,))


def gradients(*args: Tensor) -> tuple[Tensor, ...]:
    """Of gate, for the cotangent that comes first."""
    grad, *inputs = args
    leaves = [t.detach().requires_grad_() for t in inputs]
    return torch.autograd.grad(torchops.gate(*leaves), leaves, grad)


# --- training --------------------------------------------------------------------------------------------------------


def test_training() -> None:
    """One call makes the result and the product, and the gradients get it."""
    args = arguments()
    grad = random_like(args[0], 9)
    graph = recorded(gradients, grad, *args)
    assert calls(graph, OPS.gate) == []
    (forward,), (backward,) = calls(graph, OPS._gate), calls(graph, OPS._gate_backward)
    assert (backward.args[7].args[0], backward.args[7].args[1]) == (forward, 1)
    assert_all_close(graph(grad, *args), gradients(grad, *args))


def test_accuracy() -> None:
    args = arguments()
    grad = random_like(args[0], 9)
    leaves = [t.double().requires_grad_() for t in args]
    exact = torch.autograd.grad(gate_reference(*leaves), leaves, grad.double())
    for got, value in zip(gradients(grad, *args), exact, strict=True):
        assert (got - value).norm() <= 0.02 * value.norm()


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled(dynamic: bool) -> None:
    args = arguments()
    grad = random_like(args[0], 9)
    leaves = [t.requires_grad_() for t in args]
    compiled = torch.compile(torchops.gate, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    y = compiled(*leaves)
    got = torch.autograd.grad(y, leaves, grad)
    assert_all_close([y, *got], [torchops.gate(*leaves), *gradients(grad, *args)])


@pytest.mark.parametrize(("features", "kept"), [(LONG, True), (128, False)])
def test_inductor(features: int, kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the pass puts into a graph for training keeps what eager mode keeps, and for inference nothing."""
    monkeypatch.setattr(table, "TABLE", table.Everywhere())
    v, x, w, b = (t[..., :features] for t in arguments())

    def function(v: Tensor, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return v * torch.sigmoid(F.linear(x, w, b))

    backend = check(function, [v, x, w, b], True, atol=0.05, rtol=0.05)
    assert [backend.count(op.default) for op in (OPS._gate, OPS.gate)] == [kept, not kept]
    (backward,) = backend.graphs[1].find_nodes(op="call_function", target=OPS._gate_backward.default)
    assert [node.op for node in backward.args[7:]] == ["placeholder"] * kept
    assert check(function, [v, x, w, b], False, atol=0.05, rtol=0.05).count(OPS.gate.default) == 1


def test_gradients_that_are_asked_for() -> None:
    args = arguments()
    for trained in itertools.product([False, True], repeat=4):
        if not any(trained):
            continue

        def function(*inputs: Tensor, trained: tuple[bool, ...] = trained) -> tuple[Tensor, ...]:
            leaves = [t.detach().requires_grad_(wanted) for t, wanted in zip(inputs, trained, strict=True)]
            return torch.autograd.grad(torchops.gate(*leaves).sum(), [t for t in leaves if t.requires_grad])

        graph = recorded(function, *args)
        backward = calls(graph, OPS._gate_backward)
        assert [call.args[5] for call in backward] == [list(trained)] * any(trained[1:])
        assert len(calls(graph, OPS._gate)) == any(trained[1:])
        assert_all_close(graph(*args), function(*args))


# --- the operators ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [(6,), (2, 3), (), (0,)], ids=str)
def test_values(rows: tuple[int, ...]) -> None:
    v, x, w, b = make((*rows, 5), (*rows, 7), (5, 7), (5,))
    for bias in (b, None):
        got = OPS._gate(v, x, w, bias)
        assert_all_close(got, [torchops.gate(v, x, w, bias), F.linear(x, w, bias)])
        assert all(t.is_contiguous() for t in got)
        assert len({t.untyped_storage()._cdata for t in got}) == 2


def test_values_with_wide_streams() -> None:
    v, x, w, b = make((6, 5), (6, 7), (5, 7), (5,), dtype=torch.float32)
    low = w.bfloat16(), b.bfloat16()
    y, z = OPS._gate(v, x, *low)
    assert (y.dtype, z.dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(y, torchops.gate(v, x, *low), rtol=0.02, atol=0.02)
    torch.testing.assert_close(z, F.linear(x.bfloat16(), *low), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("rows", [11, 20_011])
def test_masks(rows: int) -> None:
    grad, *inputs = make((rows, 5), (rows, 5), (rows, 7), (5, 7), (5,))
    y, z = OPS._gate(*inputs)
    before = z.clone()
    for mask in itertools.product([False, True], repeat=4):
        for v, v_is_y in ((inputs[0], False), (y, True)):
            rest = (grad, v, *inputs[1:], list(mask), v_is_y)
            assert_all_close(OPS._gate_backward(*rest, z), OPS._gate_backward(*rest))
    assert torch.equal(z, before)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_no_argument_is_trusted(device: str) -> None:
    v, x, w, b = (t.to(device) for t in make((6, 5), (6, 7), (5, 7), (5,)))

    def backward(z: Tensor) -> Any:
        return OPS._gate_backward(v, v, x, w, b, [True] * 4, False, z)

    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: OPS._gate(v[:5], x, w, b), r"_gate: expected v of shape \(6, 5\) to match x and w, got \(5, 5\)"),
        (lambda: OPS._gate(v, x, w, w), r"_gate: expected b of shape \(5,\) to match w, got \(5, 7\)"),
        (lambda: backward(v[:5]), r"_gate_backward: expected z of shape \(6, 5\) to match v, got \(5, 5\)"),
        (lambda: backward(v.float()), "_gate_backward: expected z of dtype float64 to match w, got float32"),
    ]
    for call, text in refused:
        with pytest.raises(RuntimeError, match=text):
            call()


def test_flops() -> None:
    """A given product is not multiplied again."""
    grad, *inputs = make((6, 5), (6, 5), (6, 7), (5, 7))

    def products(op: Any, *args: Any) -> int:
        with FlopCounterMode(display=False) as counter:
            op(*args)
        return counter.get_total_flops() // 420

    assert products(OPS._gate, *inputs, None) == 1
    _, z = OPS._gate(*inputs, None)
    for mask in itertools.product([False, True], repeat=3):
        rest = (grad, *inputs, None, [*mask, False], False)
        assert products(OPS._gate_backward, *rest, z) == mask[1] + mask[2]
        assert products(OPS._gate_backward, *rest) == 1 + mask[1] + mask[2]

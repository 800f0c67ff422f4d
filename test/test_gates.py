"""gate and glu beyond the generic suites: what they save, their private gradients, determinism, packed weights."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from checks import assert_all_close, random_like
from product_samples import gate_reference, glu_reference
from torch import Tensor

import torchops

OPS = torch.ops.myops
LOW = torch.bfloat16


def make(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [random_like(torch.empty(shape, dtype=dtype), i) for i, shape in enumerate(shapes)]


def saved(function: Any) -> list[Tensor]:
    """What autograd keeps of a forward pass."""
    kept: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        function()
    return kept


@pytest.mark.parametrize("trained", ["v", "x", "w", "b", "all"])
def test_no_gate_is_saved(trained: str) -> None:
    """The inputs, and v among them only where the gradient of the gate reads it."""
    inputs = dict(zip("vxwb", make((6, 5), (6, 7), (5, 7), (5,)), strict=True))
    for name, t in inputs.items():
        t.requires_grad_(trained in (name, "all"))
    kept = saved(lambda: torchops.gate(*inputs.values()))
    expected = ["x", "w", "b"] if trained == "v" else ["v", "x", "w", "b"]
    assert {t.data_ptr() for t in kept} == {inputs[name].data_ptr() for name in expected}
    if trained in ("v", "all"):
        v = inputs["v"] * 1
        in_place = saved(lambda: torchops.gate_(v, inputs["x"], inputs["w"], inputs["b"]))
        assert [t.data_ptr() for t in in_place if t.shape == v.shape] == [v.data_ptr()] * (trained == "all")


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_gradients_where_float16_has_no_result(compiled: bool) -> None:
    """The result is 0, and the gradient of a scaled loss is not. So a copy of v is kept."""
    v = torch.full((4, 8), 1e-3, dtype=torch.float16)
    x, w = torch.zeros(4, 3, dtype=torch.float16), torch.zeros(8, 3, dtype=torch.float16)
    b = torch.full((8,), -11.0, dtype=torch.float16, requires_grad=True)

    def gated(v: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torchops.gate_(v * 1, x, w, b)

    y = torch.compile(gated, backend="aot_eager", fullgraph=True)(v, b) if compiled else gated(v, b)
    assert not y.any()
    (db,) = torch.autograd.grad(y, b, torch.full_like(y, 8192))
    s = torch.sigmoid(torch.tensor(-11.0))
    torch.testing.assert_close(db.float(), (4 * 8192 * 1e-3 * s * (1 - s)).expand(8), rtol=1e-2, atol=0)


def test_no_factor_is_saved() -> None:
    inputs = [t.requires_grad_() for t in make((6, 7), (5, 7), (5, 7), (5,), (5,))]
    kept = saved(lambda: torchops.glu(*inputs))
    assert {t.data_ptr() for t in kept} == {t.data_ptr() for t in inputs}


@pytest.mark.parametrize("rows", [11, 20_011])
def test_masks_of_gate(rows: int) -> None:
    grad, *inputs = make((rows, 5), (rows, 5), (rows, 7), (5, 7), (5,))
    leaves = [t.clone().requires_grad_() for t in inputs]
    expected = torch.autograd.grad(gate_reference(*leaves), leaves, grad)
    for output_mask in itertools.product([False, True], repeat=4):
        for v, v_is_y in ((inputs[0], False), (gate_reference(*inputs), True)):
            got = OPS._gate_backward(grad, v, *inputs[1:], list(output_mask), v_is_y)
            for wanted, g, e in zip(output_mask, got, expected, strict=True):
                torch.testing.assert_close(g, e if wanted else e.new_empty(0))


@pytest.mark.parametrize("activation", ["sigmoid", "silu"])
@pytest.mark.parametrize("rows", [11, 20_011])
def test_masks_of_glu(rows: int, activation: str) -> None:
    grad, *inputs = make((rows, 5), (rows, 7), (5, 7), (5, 7), (5,), (5,))
    leaves = [t.clone().requires_grad_() for t in inputs]
    expected = torch.autograd.grad(glu_reference(*leaves, activation=activation), leaves, grad)
    for output_mask in itertools.product([False, True], repeat=5):
        got = OPS._glu_backward(grad, *inputs, activation, list(output_mask))
        for wanted, g, e in zip(output_mask, got, expected, strict=True):
            torch.testing.assert_close(g, e if wanted else e.new_empty(0))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_private_operators_trust_no_argument(device: str) -> None:
    v, x, w, b = (t.to(device) for t in make((6, 5), (6, 7), (5, 7), (5,)))
    gate, glu = OPS._gate_backward, OPS._glu_backward
    every = [True] * 4
    refused: list[tuple[Any, str]] = [
        (lambda: gate(v[:5], v, x, w, b, every), r"grad of shape \(6, 5\) to match v, got \(5, 5\)"),
        (lambda: gate(v.float(), v, x, w, b, every), "grad of dtype float64 to match v, got float32"),
        (lambda: gate(v, v, x[:, :6], w, b, every), r"w of shape \(out, in\) with in = 6 to match x, got \(5, 7\)"),
        (lambda: gate(v, v, x, w, None, every), "output_mask without db where there is no b"),
        (lambda: glu(v[:5], x, w, w, b, b, "silu", [True] * 5), r"grad of shape \(6, 5\) to match x and w, got \(5, 5"),
        (lambda: glu(v, x, w, w[:4], b, b, "silu", [True] * 5), r"wg of shape \(5, 7\) to match w, got \(4, 7\)"),
        (lambda: glu(v, x, w, w, b, b, "tanh", [True] * 5), "activation sigmoid or silu, got tanh"),
        (
            lambda: glu(v, x, w, w, b, None, "silu", [True] * 5),
            "output_mask without gradients of b and bg where there is",
        ),
    ]
    for call, text in refused:
        with pytest.raises(ValueError if "activation" in text else RuntimeError, match=f"_backward: expected {text}"):
            call()


@pytest.mark.parametrize("dtype", [torch.float32, LOW], ids=["float32", "bfloat16"])
def test_gradients_have_the_same_bits_with_any_number_of_threads(dtype: torch.dtype) -> None:
    """All but those of weights: their products sum over rows, which MKL divides among threads on some processors."""
    grad, v, x, w, b = make((40_009, 61), (40_009, 61), (40_009, 19), (61, 19), (61,), dtype=dtype)
    results = []
    former = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            dv, dx, dw, db = OPS._gate_backward(grad, v, x, w, b, [True] * 4)
            of_glu, *dws, db_z, db_t = OPS._glu_backward(grad, x, w, w, b, b, "silu", [True] * 5)
            results.append(([dv, dx, db, of_glu, db_z, db_t], [dw, *dws]))
    finally:
        torch.set_num_threads(former)
    for same, near in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0][0], same, strict=True))
        torch.testing.assert_close(near, results[0][1], rtol=1e-2 if dtype == LOW else 1e-4, atol=1e-2)


def test_halves_of_a_packed_weight() -> None:
    """Their gradients add up in the packed one, as those of F.glu do."""
    x, packed, bias = (t.requires_grad_() for t in make((6, 7), (10, 7), (10,)))
    leaves = [x, packed, bias]
    got = torchops.glu(x, *packed.chunk(2), *bias.chunk(2))
    expected = torch.nn.functional.glu(torch.nn.functional.linear(x, packed, bias))
    cotangent = random_like(got.detach(), 9)
    assert_all_close(*([y, *torch.autograd.grad(y, leaves, cotangent)] for y in (got, expected)))


@pytest.mark.parametrize("compiled", [False, True])
def test_mixed_precision_training(compiled: bool) -> None:
    """A float32 residual stream through layers of bfloat16: values, and the dtypes of all gradients."""
    v, x = (t.float().requires_grad_() for t in make((33, 5), (33, 7)))
    w, wg, b = (t.to(LOW).requires_grad_() for t in make((5, 7), (5, 7), (5,)))
    leaves = [v, x, w, wg, b]

    def function(v: Tensor, x: Tensor, w: Tensor, wg: Tensor, b: Tensor) -> Tensor:
        t = v + torchops.glu(x, w, wg, b, activation="silu")
        torchops.gate_(t, x, w, b)
        return t + torchops.gate(v, x, wg)

    def reference(v: Tensor, x: Tensor, w: Tensor, wg: Tensor, b: Tensor) -> Tensor:
        t = gate_reference(v + glu_reference(x, w, wg, b, activation="silu"), x, w, b)
        return t + gate_reference(v, x, wg)

    run: Any = torch.compile(function, backend="aot_eager", fullgraph=True) if compiled else function
    out, expected = run(*leaves), reference(*leaves)
    assert out.dtype == torch.float32
    cotangent = random_like(out.detach(), 9)
    got, grads = (torch.autograd.grad(y, leaves, cotangent) for y in (out, expected))
    assert [g.dtype for g in got] == [t.dtype for t in leaves]
    assert_all_close([out, *got], [expected, *grads], atol=0.1, rtol=0.05)

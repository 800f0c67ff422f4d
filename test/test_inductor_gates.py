"""torchops.inductor: forms of gates and GLUs, and their gradients. test_inductor_refused.py has what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checks import assert_all_close
from test_inductor import DENSE, GATE, GLU, SIGMOID, Backend, check, everywhere, t, values
from torch import Tensor, fx

from torchops.inductor import table
from torchops.inductor.expressions import Evaluator, formula, points

__all__ = ["everywhere"]  # a fixture

aten = torch.ops.aten
BACKWARD = {
    GATE: torch.ops.myops._gate_backward.default,
    GLU: torch.ops.myops._glu_backward.default,
}


@dataclass(frozen=True)
class Form:
    name: str
    target: Any
    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]


GATED = ((2, 4, 6), (2, 4, 8), (6, 8), (6,))  # v, x, w, b
TWO = ((2, 4, 8), (6, 8), (6, 8))  # x, w, wg
PACKED = ((2, 4, 8), (12, 8), (12,))  # x, w, b


def halves(combine: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda x, w, b: combine(*F.linear(x, w, b).chunk(2, -1))


def residual(x: Tensor, w: Tensor, wg: Tensor) -> Tensor:
    """x has another use, whose gradient is added to those of both products."""
    return x.sin()[..., :6] + F.linear(x, w) * torch.sigmoid(F.linear(x, wg)) + F.linear(x, w)


def stack(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """What one layer hands on, the next one gates and reads."""
    for _ in range(2):
        x = F.glu(F.linear(x, w, b)) * torch.sigmoid(F.linear(x, w[:8], b[:8]))
    return x


FORMS = [
    Form("gate", GATE, lambda v, x, w, b: v * torch.sigmoid(F.linear(x, w, b)), GATED),
    Form("gate_no_bias", GATE, lambda v, x, w: torch.sigmoid(F.linear(x, w)) * v, GATED[:3]),
    Form("gate_2d", GATE, lambda v, x, w, b: v * torch.sigmoid(F.linear(x, w, b)), ((4, 6), (4, 8), (6, 8), (6,))),
    Form("gate_matmul", GATE, lambda v, x, w, b: v * torch.sigmoid(x @ w.T + b), GATED),
    Form("gate_in_out", GATE, lambda v, x, w, b: v * torch.sigmoid(x @ w + b), (*GATED[:2], (8, 6), (6,))),
    Form(
        "gate_of_linear",
        GATE,
        lambda o, wo, x, w: F.linear(o, wo) * torch.sigmoid(F.linear(x, w)),
        ((2, 4, 5), (6, 5), (2, 4, 8), (6, 8)),
    ),
    Form("gate_of_itself", GATE, lambda x, w, b: x * torch.sigmoid(F.linear(x, w, b)), ((4, 6), (6, 6), (6,))),
    Form(
        "gate_twice",
        GATE,
        lambda v, x, w, b: v * torch.sigmoid(F.linear(x, w, b)) * torch.sigmoid(F.linear(x, w + 1, b)),
        GATED,
    ),
    Form(
        "gate_heads",
        GATE,
        lambda v, x, w, b: v.unflatten(-1, (2, 3)) * torch.sigmoid(F.linear(x, w, b)).unflatten(-1, (2, 3)),
        GATED,
    ),
    Form("gate_in_place", GATE, lambda v, x, w, b: v.clone().mul_(F.linear(x, w, b).sigmoid()), GATED),
    Form("sigmoid", GLU, lambda x, w, wg: F.linear(x, w) * torch.sigmoid(F.linear(x, wg)), TWO),
    Form("sigmoid_reversed", GLU, lambda x, w, wg: torch.sigmoid(F.linear(x, wg)) * F.linear(x, w), TWO),
    Form("silu", GLU, lambda x, w, wg: F.silu(F.linear(x, wg)) * F.linear(x, w), TWO),
    Form("silu_written_out", GLU, lambda x, w, wg: (lambda u: u * torch.sigmoid(u) * (x @ w.T))(x @ wg.T), TWO),
    Form("glu", GLU, lambda x, w, b: F.glu(F.linear(x, w, b)), PACKED),
    Form("glu_no_bias", GLU, lambda x, w: F.glu(F.linear(x, w)), PACKED[:2]),
    Form("chunk_silu", GLU, halves(lambda a, b: F.silu(a) * b), PACKED),
    Form("chunk_sigmoid", GLU, halves(lambda a, b: a * torch.sigmoid(b)), PACKED),
    Form("split", GLU, lambda x, w, b: (lambda a, c: c * F.silu(a))(*F.linear(x, w, b).split(6, -1)), PACKED),
    Form("residual", GLU, residual, ((2, 4, 8), (6, 8), (6, 8))),
    Form("dropout", GLU, lambda x, w, wg: F.dropout(F.linear(x, w) * torch.sigmoid(F.linear(x, wg)), 0.0), TWO),
    Form("masked", GLU, lambda x, w, b: F.glu(F.linear(x, w, b)) * (x[..., :1] > 0), PACKED),
    Form("read_by_linear", GATE, lambda v, x, w, u: (v * torch.sigmoid(F.linear(x, w))) @ u, (*GATED[:3], (6, 5))),
    Form("read_transposed", GATE, lambda v, x, w: (lambda y: y @ y.mT)(v * torch.sigmoid(F.linear(x, w))), GATED[:3]),
    Form("stack", GLU, stack, ((4, 8), (16, 8), (16,))),
]


def arguments(form: Form, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [t(*shape, dtype=dtype) for shape in form.shapes]


# What says the same of a gate for inference as for training is tried for training.
INFERENCE = (
    "gate",
    "gate_in_out",
    "gate_of_linear",
    "gate_heads",
    "sigmoid",
    "silu_written_out",
    "glu",
    "split",
    "stack",
)


@pytest.mark.parametrize(
    ("form", "train"),
    [(form, train) for form in FORMS for train in (False, True) if train or form.name in INFERENCE],
    ids=lambda value: getattr(value, "name", "training" if value is True else "inference"),
)
def test_forms(form: Form, train: bool) -> None:
    """The operator and, when training, its backward, with equal values, and no pre-activation beside them."""
    backend = check(form.function, arguments(form), train)
    count = {"gate_twice": 2, "stack": 2}.get(form.name, 1)
    assert backend.count(form.target) == count
    assert backend.count(SIGMOID) == backend.count(DENSE) == 0
    if train:
        assert backend.count(BACKWARD[form.target], 1) == count
        assert backend.count(SIGMOID, 1) == 0


DENSE_FORMS: list[tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = [
    (lambda x, w, b: torch.sigmoid(F.linear(x, w, b)), ((4, 8), (6, 8), (6,))),
    (lambda x, w, b: torch.sigmoid(F.linear(x, w, b)), ((2, 4, 8), (6, 8), (6,))),
    (lambda x, w: torch.sigmoid(F.linear(x, w)), ((2, 4, 8), (6, 8))),
    (lambda x, w, u: torch.sigmoid(F.linear(x, w)) @ u, ((4, 8), (6, 8), (6, 5))),
    (lambda x, w, b: torch.sigmoid(x @ w + b), ((2, 4, 8), (8, 6), (6,))),
    (lambda x, w, v: torch.sigmoid(F.linear(x, w)) + v, ((2, 4, 8), (6, 8), (2, 4, 6))),
]


@pytest.mark.parametrize("index", range(len(DENSE_FORMS)))
def test_gradients_of_dense(index: int) -> None:
    """A sigmoid of a layer that stands alone has its gradients from one operator, too."""
    function, shapes = DENSE_FORMS[index]
    dtype = (torch.float64, torch.bfloat16)[index % 2]
    tolerance = 1e-9 if dtype == torch.float64 else 0.1
    backend = check(function, [t(*shape, dtype=dtype) for shape in shapes], True, atol=tolerance, rtol=tolerance)
    assert backend.count(DENSE) == 1
    assert backend.count(torch.ops.myops._dense_gradients.default, 1) == 1


def test_other_gradients_of_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are not all asked for, they are Inductor's, and that is another use."""
    uses = []
    monkeypatch.setattr(table.Everywhere, "reason_against", lambda self, use: uses.append(use))
    function, shapes = DENSE_FORMS[0]
    x, w, b = (t(*shape) for shape in shapes)
    backend = Backend()
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    w.requires_grad_()
    assert_all_close(values(compiled, [x, w, b], True), values(function, [x, w, b], True))
    assert backend.count(DENSE) == 1
    assert [use.operator for use in uses] == ["dense, its gradients left to Inductor"]
    monkeypatch.undo()
    for later, fused in ((lambda y: y @ y.mT, False), (lambda y: y.sin(), True)):
        uses.clear()
        monkeypatch.setattr(table, "TABLE", table.Everywhere())
        monkeypatch.setattr(table.Everywhere, "reason_against", lambda self, use: uses.append(use))
        check(lambda *a, later=later: later(function(*a)), [x, w.detach(), b], True)
        assert [(use.operator, use.training, use.fused) for use in uses] == [("dense", True, fused)]


def test_slices() -> None:
    """The gradient of a slice is none of those that are known; for inference it is a GLU."""
    form = Form("", GLU, lambda x, w, b: (lambda h: h[..., :6] * F.silu(h[..., 6:]))(F.linear(x, w, b)), PACKED)
    assert check(form.function, arguments(form), False).count(GLU) == 1
    assert check(form.function, arguments(form), True).count(GLU) == 0


@pytest.mark.parametrize("name", ["gate", "silu", "chunk_silu", "glu"])
def test_autocast(name: str) -> None:
    """Casts stand outside, and 16-bit operators are differentiated through float32 inside."""
    (form,) = (form for form in FORMS if form.name == name)

    def function(*arguments: Tensor) -> Tensor:
        v, *rest = arguments
        with torch.autocast("cpu", torch.bfloat16):
            return form.function(v.bfloat16() if form.target is GATE else v, *rest)

    backend = check(function, arguments(form, torch.float32), True, atol=0.1, rtol=0.1)
    # What is gated is cast in the kernel that would gate it.
    assert backend.count(form.target) == (form.target is GLU)


@pytest.mark.parametrize("name", ["gate", "glu", "chunk_silu", "sigmoid"])
def test_dynamic_rows(name: str) -> None:
    """One graph serves any number of rows."""
    (form,) = (form for form in FORMS if form.name == name)
    backend = Backend()
    compiled = torch.compile(form.function, backend=backend, fullgraph=True)
    for rows in (4, 7):
        tensors = [t(2, rows, s[-1]) if len(s) == 3 else t(*s) for s in form.shapes]
        for tensor in (tensor.requires_grad_() for tensor in tensors):
            if tensor.dim() == 3:
                torch._dynamo.mark_dynamic(tensor, 1)
        assert_all_close(values(compiled, tensors, True), values(form.function, tensors, True))
    assert len(backend.graphs) == 2
    assert backend.count(form.target) == backend.count(BACKWARD[form.target], 1) == 1


def test_saves_no_gate() -> None:
    """What lives from forward to backward is x and v, of a GLU x alone."""
    for name, saved in (("gate", (0, 1, 2, 3)), ("silu", (0, 1, 2))):
        (form,) = (form for form in FORMS if form.name == name)
        backend = check(form.function, arguments(form), True)
        assert backend.saved_bytes == sum(arguments(form)[i].nbytes for i in saved)


def test_expressions() -> None:
    """Equal at random points means equal: a small term more is seen, the order of factors is not."""
    graph = fx.Graph()
    u = graph.placeholder("u")
    u.meta["val"] = torch.empty(3, device="meta", dtype=torch.float64)

    def node(target: Any, *args: Any) -> fx.Node:
        made = graph.call_function(target, args)
        made.meta["val"] = u.meta["val"]
        return made

    evaluate = Evaluator(lambda n: points(0) if n is u else None)
    sigmoid = node(aten.reciprocal.default, node(aten.add.Tensor, node(aten.exp.default, node(aten.neg.default, u)), 1))
    expected = formula(lambda u: 1 / (1 + 2.718281828459045 ** (-u)), points(0))
    assert evaluate.is_formula(sigmoid, expected)
    assert not evaluate.is_formula(node(aten.add.Tensor, sigmoid, 1e-6), expected)
    assert not evaluate.is_formula(node(aten.tanh.default, u), expected)
    assert not evaluate.is_formula(node(aten.div.Tensor, sigmoid, 0), expected)
    stream = sigmoid
    for _ in range(3000):
        stream = node(aten.add.Tensor, stream, 0)
    assert not evaluate.is_formula(stream, expected)  # of which there is an end

"""torchops.inductor: gates and GLUs that are refused, why, and what must not be taken for one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checks import assert_all_close
from test_inductor import GATE, GLU, Backend, check, everywhere, t, values
from test_inductor_gates import FORMS, GATED, PACKED, TWO, arguments
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import torchops
from torchops.inductor import table
from torchops.inductor.passes import REPORT, RewriteGates

__all__ = ["everywhere"]  # a fixture


def sigmoid(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.sigmoid(F.linear(x, w, b))


def gate(v: Tensor, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return v * sigmoid(x, w, b)


def nearly_silu(x: Tensor, w: Tensor, wg: Tensor) -> Tensor:
    u = F.linear(x, wg)
    return u / (1 + torch.exp(-u) + 1e-3) * F.linear(x, w)


def thirds(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    first, second, third = F.linear(x, w, b).chunk(3, -1)
    return first * torch.sigmoid(second) + third


def rows_split(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    first, second = F.linear(x, w, b).chunk(2, 1)
    return first * torch.sigmoid(second)


def halves_transposed(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    first, second = F.linear(x, w, b).transpose(0, 1).contiguous().chunk(2, -1)
    return F.silu(first) * second


def two_additions(x: Tensor, w: Tensor, wg: Tensor, b: Tensor) -> Tensor:
    """Almost SiLU: what is multiplied by the sigmoid is its argument and a bias."""
    z = F.linear(x, wg)
    return F.linear(x, w) * ((z + b) * torch.sigmoid(z))


SQUARE = ((4, 4, 6), (4, 4, 8), (6, 8), (6,))  # v, x, w, b of gates whose first dimensions can be exchanged

REFUSED: list[tuple[str, str, Callable[..., Any], tuple[tuple[int, ...], ...]]] = [
    ("gate_returned", "gate left", lambda v, x, w, b: (lambda s: (v * s, s))(sigmoid(x, w, b)), GATED),
    ("gate_reused", "", lambda v, x, w, b: (lambda s: v * s + (1 - s))(sigmoid(x, w, b)), GATED),
    ("value_used", "", lambda x, w, u: (lambda z: z * torch.sigmoid(F.linear(x, u)) + z.cos())(F.linear(x, w)), TWO),
    ("computed", "what is gated is computed by Inductor", lambda v, x, w, b: gate(v.sin(), x, w, b), GATED),
    ("broadcast", "what is gated has another shape", lambda v, x, w, b: gate(v[:1, :1], x, w, b), GATED),
    (
        "transposed",
        "what is gated would have to be copied",
        lambda v, x, w, b: gate(v.mT, x, w, b),
        ((2, 6, 4), *GATED[1:]),
    ),
    (
        "scaled",
        "addmm scales its terms",
        lambda v, x, w, b: v * torch.sigmoid(torch.addmm(b, x, w, alpha=2)),
        ((4, 6), (4, 8), (8, 6), (6,)),
    ),
    ("wider", "", lambda v, *a: v * sigmoid(*(t.float() for t in a)).double(), GATED),
    ("thirds", "", thirds, PACKED),
    ("rows_split", "", rows_split, PACKED),
    ("glu_of_rows", "", lambda x, w, b: F.glu(F.linear(x, w, b), 1), PACKED),
    ("other_silu", "", lambda x, wg: F.silu(F.linear(x, wg)) * x[..., :6], TWO[:2]),
    ("tanh", "", lambda x, w, wg: torch.tanh(F.linear(x, wg)) * F.linear(x, w), TWO),
    ("nearly_silu", "", nearly_silu, TWO),
    ("gate_transposed", "", lambda v, x, w, b: v * sigmoid(x, w, b).transpose(0, 1), SQUARE),
    ("layer_transposed", "", lambda v, x, w, b: v * F.linear(x, w, b).transpose(0, 1).sigmoid(), SQUARE),
    (
        "glu_transposed",
        "",
        lambda x, w, b: F.glu(F.linear(x, w, b).transpose(0, 1).contiguous()),
        ((4, 4, 8), *PACKED[1:]),
    ),
    ("halves_transposed", "", halves_transposed, ((4, 4, 8), *PACKED[1:])),
    ("columns_transposed", "", lambda x, w, b: F.glu(F.linear(x, w, b).mT.contiguous()), ((2, 12, 8), *PACKED[1:])),
    ("two_additions", "", two_additions, (*TWO, (6,))),
    (
        "batch",
        "x is a batch of matrices",
        lambda v, x, w: v * torch.sigmoid(F.linear(x.transpose(0, 1), w)),
        ((4, 4, 6), (4, 4, 8), (6, 8)),
    ),
    ("two_sigmoids", "", lambda x, w, wg: torch.sigmoid(F.linear(x, w)) * torch.sigmoid(F.linear(x, wg)), TWO),
]


class OnlyGates(table.Everywhere):
    """Where a gate is refused, its sigmoid alone is not tried."""

    def reason_against(self, use: table.Use) -> str | None:
        return "it is a test" if use.operator == "dense" else None


# Where it is the gradients that must not be taken for others.
TRAINED = (
    *("gate_returned", "gate_reused", "value_used", "wider", "nearly_silu", "thirds"),
    *("layer_transposed", "halves_transposed", "two_additions", "two_sigmoids"),
)


@pytest.mark.parametrize(
    ("name", "reason", "function", "shapes", "train"),
    [(*refused, train) for refused in REFUSED for train in (False, True) if not train or refused[0] in TRAINED],
    ids=[f"{r[0]}{'-training' * i}" for r in REFUSED for i in (0, 1) if not i or r[0] in TRAINED],
)
def test_refused(
    name: str, reason: str, function: Any, shapes: Any, train: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "TABLE", OnlyGates())
    REPORT.clear()
    backend = check(function, [t(*shape) for shape in shapes], train)
    assert backend.count(GATE) == backend.count(GLU) == 0
    if reason:
        assert reason in "; ".join(str(place) for place in torchops.inductor.report())


def test_frozen() -> None:
    """Where some gradients are not asked for, nothing was measured; a gate without any is rewritten."""
    (form,) = (form for form in FORMS if form.name == "gate")
    for frozen, count in (((2, 3), 0), ((0,), 0), ((1,), 0)):
        tensors = [a.requires_grad_(i not in frozen) for i, a in enumerate(arguments(form))]
        backend = Backend()
        compiled = torch.compile(form.function, backend=backend, fullgraph=True)
        assert_all_close(values(compiled, tensors, True), values(form.function, tensors, True))
        assert backend.count(GATE) == count


BIASES: dict[str, Callable[[Tensor], Tensor]] = {
    "diagonal": lambda t: t.diagonal()[:6],
    "unbind": lambda t: t.unbind(0)[1][:6],
    "as_strided": lambda t: t.as_strided((6,), (1,), 3),
    "unfold": lambda t: t[0].unfold(0, 6, 1)[1],
    "complex": lambda t: torch.view_as_complex(t.view(-1, 2)).real[:6],
    "detached": lambda t: t[1, :6],
}


@pytest.mark.parametrize("name", BIASES)
def test_overwritten_views(name: str) -> None:
    """Whatever view of what is overwritten the bias is; two arguments may be views of one tensor."""

    def function(v: Tensor, x: Tensor, w: Tensor, b: Tensor, *whole: Tensor) -> Tensor:
        y = v * torch.sigmoid(F.linear(x, w, b if whole else BIASES[name](b)))
        with torch.no_grad():
            (*whole, b)[0].mul_(2)
        return y

    for aliased in (False, True):
        results, backend = [], Backend()
        for fn in (torch.compile(function, backend=backend, fullgraph=True), function):
            tensors = [t(*shape).requires_grad_() for shape in (*GATED[:3], (8, 8))]
            b = tensors[3] * 1
            y = fn(*tensors[:3], *((BIASES[name](b), b) if aliased else (b,)))
            results.append([y, *torch.autograd.grad(y.sum(), tensors)])
        assert_all_close(*results)
        assert backend.count(GATE) == 0


@pytest.mark.parametrize(
    "part", [slice(-100, 6), slice(-14, -6), slice(-14, 1), slice(6, 100), slice(-6, 100)], ids=str
)
def test_slices_beyond_the_ends(part: slice) -> None:
    """Python clamps them."""

    def function(v: Tensor, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return v * torch.sigmoid(F.linear(x, w, b)[..., part])

    columns = len(range(12)[part])
    check(function, [t(2, 4, columns), *(t(*shape) for shape in PACKED)], False)


def test_no_matrices() -> None:
    check(lambda x, w: torch.sigmoid(torch.bmm(x, w.expand(x.shape[0], 7, 3))), [t(0, 5, 7), t(7, 3)], False)


def test_weights_that_are_views() -> None:
    """The gradient of a weight of (in, out) is reshaped as its product would be."""
    check(lambda x, w: torch.sigmoid(x @ w.view(8, 6)), [t(4, 8), t(48)], True)
    check(lambda v, x, w: v * torch.sigmoid(x @ w.view(8, 6)), [t(4, 6), t(4, 8), t(48)], True)


@pytest.mark.parametrize("index", [2, 3], ids=["layer", "gate"])
def test_overwritten_biases(index: int) -> None:
    """Autograd does not read a bias again, so that it may be overwritten after use; the gradients of a gate do."""

    def function(x: Tensor, w: Tensor, wg: Tensor, *biases: Tensor) -> Tensor:
        y = F.silu(F.linear(x, wg, biases[0][:6])) * F.linear(x, w, biases[1])
        with torch.no_grad():
            biases[index - 2].add_(1)
        return y

    shapes = (*TWO, (9,), (6,))
    for train, count in ((True, 0), (False, 1)):
        results, backend = [], Backend()
        for fn in (torch.compile(function, backend=backend, fullgraph=True), function):
            with torch.set_grad_enabled(train):
                results.append(values(fn, [t(*shape).requires_grad_(train) for shape in shapes], train))
        assert_all_close(*results)
        assert backend.count(GLU) == count


def test_graphs_without_shapes() -> None:
    function = FORMS[0].function
    module = make_fx(function, tracing_mode="fake")(*arguments(FORMS[0]))
    for node in module.graph.nodes:
        node.meta.pop("val", None)
    RewriteGates()(module.graph)
    assert len(module.graph.find_nodes(op="call_function", target=GATE)) == 0
    module.recompile()
    assert_all_close([module(*arguments(FORMS[0]))], [function(*arguments(FORMS[0]))])

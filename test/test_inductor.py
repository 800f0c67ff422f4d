"""torchops.inductor: which spellings of sigmoid(linear) are rewritten, which are not, and that values stay.

Most tests run the pass on the graphs that AOTAutograd makes with Inductor's decompositions, and run those graphs as
they are; generating code would take most of the time and test Inductor.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checks import assert_all_close, random_like
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import torchops
from torchops.inductor import table
from torchops.inductor.passes import CountMatches, RewriteGates

sys.path.append(str(Path(__file__).parents[1] / "examples/models"))

from conditioned_transition import ConditionedTransition
from gated_attention import GatedAttention
from glu_stack import GLUStack
from triangle_update import TriangleBlock

DENSE = torch.ops.myops.dense.default
GATE = torch.ops.myops.gate.default
GLU = torch.ops.myops.glu.default
SIGMOID = torch.ops.aten.sigmoid.default


@pytest.fixture(autouse=True)
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found is rewritten, wherever it is faster; the tests of the table bring their own."""
    monkeypatch.setattr(table, "TABLE", table.Everywhere())


@dataclass
class Backend:
    """For torch.compile: AOTAutograd, the pass on what would be Inductor's joint graph, and the graph as it is."""

    on: bool = True
    graphs: list[fx.Graph] = field(default_factory=list)
    saved_bytes: int = 0

    def count(self, target: Any, graph: int = 0) -> int:
        return len(self.graphs[graph].find_nodes(op="call_function", target=target))

    def _rewrite(self, module: fx.GraphModule) -> None:
        if self.on:
            RewriteGates()(module.graph)
        module.graph.lint()
        module.recompile()

    def _infer(self, module: fx.GraphModule, inputs: Any) -> Any:
        self._rewrite(module)
        return self._keep(module, inputs)

    def _partition(self, joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        self._rewrite(joint)
        forward, backward = min_cut_rematerialization_partition(joint, inputs, **kwargs)
        (outputs,) = forward.graph.find_nodes(op="output")[0].args
        saved = {node for node in outputs[kwargs["num_fwd_outputs"] :] if isinstance(node.meta["val"], Tensor)}
        self.saved_bytes = sum(node.meta["val"].numel() * node.meta["val"].element_size() for node in saved)
        return forward, backward

    def _keep(self, module: fx.GraphModule, inputs: Any) -> Any:
        self.graphs.append(module.graph)
        return make_boxed_func(module.forward)

    def __call__(self, module: fx.GraphModule, inputs: Any) -> Any:
        return aot_autograd(
            fw_compiler=self._keep,
            bw_compiler=self._keep,
            inference_compiler=self._infer,
            partition_fn=self._partition,
            decompositions=select_decomp_table,
        )(module, inputs)


def values(function: Callable[..., Any], arguments: list[Tensor], train: bool) -> list[Tensor]:
    """The outputs of `function`, and when training the gradients of all arguments and parameters."""
    out = function(*arguments)
    outputs = [out] if isinstance(out, Tensor) else list(out)
    if not train:
        return outputs
    parameters = list(function.parameters()) if isinstance(function, nn.Module) else []
    leaves = [t for t in [*arguments, *parameters] if t.requires_grad]
    cotangents = [random_like(o.detach(), i) for i, o in enumerate(outputs)]
    return [*outputs, *torch.autograd.grad(outputs, leaves, cotangents)]


def check(
    function: Callable[..., Any], arguments: list[Tensor], train: bool, dynamic: bool = False, **tolerances: float
) -> Backend:
    """Compares `function` compiled with the pass with itself."""
    backend = Backend()
    arguments = [t.detach().requires_grad_(train and t.is_floating_point()) for t in arguments]
    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)
    with torch.set_grad_enabled(train):
        assert_all_close(values(compiled, arguments, train), values(function, arguments, train), **tolerances)
    return backend


def t(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return random_like(torch.empty(shape, dtype=dtype), seed=len(shape) + sum(shape))


@dataclass(frozen=True)
class Spelling:
    name: str
    function: Callable[..., Any]
    arguments: Callable[[], list[Tensor]]


def nd(*shape: int) -> Callable[[], list[Tensor]]:
    """x, w (3, 7) and b (3,)."""
    return lambda: [t(*shape), t(3, 7), t(3)]


def in_out(*shape: int, bias: tuple[int, ...] = (3,)) -> Callable[[], list[Tensor]]:
    """x, w (7, 3) and b."""
    return lambda: [t(*shape), t(7, 3), t(*bias)]


SPELLINGS = [
    Spelling("linear", lambda x, w, b: torch.sigmoid(F.linear(x, w, b)), nd(5, 7)),
    Spelling("linear_no_bias", lambda x, w, b: torch.sigmoid(F.linear(x, w)) + b, nd(5, 7)),
    Spelling("linear_4d", lambda x, w, b: torch.sigmoid(F.linear(x, w, b)), nd(2, 3, 5, 7)),
    Spelling("linear_4d_no_bias", lambda x, w, b: F.sigmoid(F.linear(x, w)) + b, nd(2, 3, 5, 7)),
    Spelling("linear_permuted", lambda x, w, b: torch.sigmoid(F.linear(x.transpose(0, 1), w, b)), nd(2, 5, 7)),
    Spelling("linear_strided", lambda x, w, b: torch.sigmoid(F.linear(x.mT, w, b)), nd(2, 7, 5)),
    Spelling("linear_one_out", lambda x, w, b: torch.sigmoid(F.linear(x, w[:1], b[:1])), nd(5, 7)),
    Spelling("linear_zero_rows", lambda x, w, b: torch.sigmoid(F.linear(x, w, b)), nd(0, 7)),
    Spelling("addmm", lambda x, w, b: torch.addmm(b, x, w).sigmoid(), in_out(5, 7)),
    Spelling("addmm_row", lambda x, w, b: torch.addmm(b, x, w).sigmoid(), in_out(5, 7, bias=(1, 3))),
    Spelling("matmul_t", lambda x, w, b: torch.sigmoid(x @ w.T + b), nd(5, 7)),
    Spelling("matmul_t_3d", lambda x, w, b: torch.sigmoid(b + x @ w.T), nd(2, 5, 7)),
    Spelling("matmul_in_out", lambda x, w, b: torch.sigmoid(x @ w + b), in_out(5, 7)),
    Spelling("matmul_in_out_3d", lambda x, w, b: torch.sigmoid(torch.matmul(x, w) + b), in_out(2, 5, 7, bias=(1, 3))),
    Spelling("matmul_row_bias_3d", lambda x, w, b: torch.sigmoid(x @ w + b), in_out(2, 5, 7, bias=(1, 1, 3))),
    Spelling("in_place", lambda x, w, b: (x @ w).add_(b).sigmoid_(), in_out(2, 5, 7)),
    Spelling("einsum", lambda x, w, b: torch.einsum("bic,co->bio", x, w).add(b).sigmoid(), in_out(2, 5, 7)),
    Spelling("tensordot", lambda x, w, b: torch.sigmoid(torch.tensordot(x, w, 1) + b), in_out(2, 5, 7)),
    Spelling(
        "heads", lambda x, w, b: torch.sigmoid((x @ w + b).unflatten(-1, (3, 1)).transpose(1, 2)), in_out(2, 5, 7)
    ),
    Spelling("expit", lambda x, w, b: torch.special.expit(F.linear(x, w, b)), nd(5, 7)),
    Spelling("used_twice", lambda x, w, b: (lambda y: y * (1 - y))(torch.sigmoid(F.linear(x, w, b))), nd(5, 7)),
    Spelling("vmap", lambda x, w, b: torch.vmap(lambda r: torch.sigmoid(F.linear(r, w, b)))(x), nd(4, 5, 7)),
    Spelling("row_times_row", lambda x, w, b: torch.sigmoid(x @ w + x[:1] @ w) + b, in_out(5, 7)),
]


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda s: s.name)
def test_spellings(spelling: Spelling, train: bool) -> None:
    backend = check(spelling.function, spelling.arguments(), train)
    assert backend.count(DENSE) == 1
    assert backend.count(SIGMOID) == 0
    aten = torch.ops.aten
    left = 1 if spelling.name == "row_times_row" else 0
    assert sum(map(backend.count, (aten.addmm.default, aten.mm.default, aten.bmm.default))) <= left


@pytest.mark.parametrize("name", ["linear_4d", "linear_permuted", "matmul_in_out_3d", "einsum"])
def test_dynamic_sizes(name: str) -> None:
    (spelling,) = (s for s in SPELLINGS if s.name == name)
    assert check(spelling.function, spelling.arguments(), True, dynamic=True).count(DENSE) == 1


def saved_elsewhere(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    z = F.linear(x, w, b)
    return torch.sigmoid(z) + z.sin()


def changed_afterwards(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    z = F.linear(x, w, b)
    y = torch.sigmoid(z)
    z.add_(1)
    return y, z


def returned(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    z = F.linear(x, w, b)
    return z, torch.sigmoid(z)


LEFT = [
    Spelling("returned", returned, nd(5, 7)),
    Spelling("saved_elsewhere", saved_elsewhere, nd(5, 7)),
    Spelling("changed_afterwards", changed_afterwards, nd(5, 7)),
    Spelling("silu", lambda x, w, b: F.silu(F.linear(x, w, b)), nd(5, 7)),
    Spelling("product_returned", lambda x, w, b: (lambda p: (p, torch.sigmoid(p + b)))(x @ w), in_out(5, 7)),
    Spelling("bias_of_rows", lambda x, w, b: torch.sigmoid(x @ w + b), in_out(5, 7, bias=(5, 1))),
    Spelling("bias_of_elements", lambda x, w, b: torch.sigmoid(torch.addmm(b, x, w)), in_out(5, 7, bias=(5, 3))),
    Spelling("bias_of_one", lambda x, w, b: torch.sigmoid(x @ w + b), in_out(5, 7, bias=(1,))),
    Spelling("bias_broadcasts_product", lambda x, w, b: torch.sigmoid(x @ w + b), in_out(5, 7, bias=(2, 1, 3))),
    Spelling("bias_of_batch", lambda x, w, b: torch.sigmoid(x @ w + b), in_out(2, 5, 7, bias=(2, 1, 3))),
    Spelling("constant", lambda x, w, b: torch.sigmoid(x @ w + 1) * b, in_out(5, 7)),
    Spelling("two_biases", lambda x, w, b: torch.sigmoid(F.linear(x, w, b) + b), nd(5, 7)),
    Spelling("bias_after_transpose", lambda x, w, b: torch.sigmoid((x @ w).T + b), in_out(3, 7)),
    Spelling("bias_after_reshape", lambda x, w, b: torch.sigmoid((x @ w).view(3, 4) + b), in_out(4, 7, bias=(4,))),
    Spelling("two_products", lambda x, w, b: torch.sigmoid(x @ w + (x + 1) @ w) * b, in_out(5, 7)),
    Spelling("product_twice", lambda x, w, b: torch.sigmoid((lambda p: p + p)(x @ w)) * b, in_out(2, 7)),
    Spelling("beta", lambda x, w, b: torch.sigmoid(torch.addmm(b, x, w, beta=2)), in_out(5, 7)),
    Spelling("alpha", lambda x, w, b: torch.sigmoid(torch.addmm(b, x, w, alpha=0.5)), in_out(5, 7)),
    Spelling("scaled_bias", lambda x, w, b: torch.sigmoid(torch.add(x @ w, b, alpha=2)), in_out(5, 7)),
    Spelling("part", lambda x, w, b: torch.sigmoid((x @ w + b)[:, :2]), in_out(5, 7)),
    Spelling("glu", lambda x, w, b: F.glu(F.linear(x, w[:2], b[:2])), nd(5, 7)),
    Spelling(
        "batched_weights", lambda x, w, b: torch.sigmoid(torch.bmm(x, w)) + b, lambda: [t(2, 5, 7), t(2, 7, 3), t(3)]
    ),
    Spelling("cast", lambda x, w, b: torch.sigmoid(F.linear(x, w, b).float()), nd(5, 7)),
    Spelling("wider_bias", lambda x, w, b: torch.sigmoid(x.float() @ w.float() + b), in_out(5, 7)),
    Spelling("complex", lambda x, w, b: torch.view_as_real(torch.sigmoid((x + 1j) @ (w + 1j))) * b.sum(), in_out(5, 7)),
    Spelling("no_product", lambda x, w, b: torch.sigmoid(x @ w + b + 1), in_out(5, 7)),
]


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("spelling", LEFT, ids=lambda s: s.name)
def test_left_alone(spelling: Spelling, train: bool) -> None:
    backend = check(spelling.function, spelling.arguments(), train)
    assert backend.count(DENSE) == 0


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_autocast(train: bool) -> None:
    """Casts stand outside the pattern; a sigmoid of the result cast up is another function."""

    def function(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return torch.sigmoid(F.linear(x, w, b)), torch.sigmoid(F.linear(x, w, b).float())

    arguments = [t(5, 7, dtype=torch.float32), t(3, 7, dtype=torch.float32), t(3, dtype=torch.float32)]
    backend = check(function, arguments, train, atol=2e-2, rtol=2e-2)
    assert backend.count(DENSE) == 1
    (node,) = backend.graphs[0].find_nodes(op="call_function", target=DENSE)
    assert node.meta["val"].dtype == torch.bfloat16


@pytest.mark.parametrize("shape", [(5, 7), (2, 5, 7)])
def test_strides_of_gradients(shape: tuple[int, ...]) -> None:
    """Those of a weight (in, out) are those of the product that computes them."""
    x, w, b = (argument.requires_grad_() for argument in in_out(*shape)())
    backend = Backend()
    y = torch.compile(lambda x, w, b: torch.sigmoid(x @ w + b), backend=backend, fullgraph=True)(x, w, b)
    gradients = torch.autograd.grad(y.sum(), (x, w, b))
    assert backend.count(DENSE) == 1
    assert [g.stride() for g in gradients] == [t.stride() for t in (x, w, b)]


def test_checkpointing() -> None:
    """What a checkpoint recomputes is recomputed by dense, and not kept."""

    def function(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return checkpoint(lambda x: torch.sigmoid(F.linear(x, w, b)).sin(), x, use_reentrant=False)

    backend = check(function, nd(1000, 7)(), True)
    assert [backend.count(DENSE, graph) for graph in (0, 1)] == [1, 1]
    assert backend.saved_bytes == sum(argument.nbytes for argument in nd(1000, 7)())


def test_log(caplog: pytest.LogCaptureFixture) -> None:
    """Each place is logged with its line of source."""
    with caplog.at_level(logging.INFO, "torchops.inductor"):
        check(lambda x, w, b: torch.sigmoid(F.linear(x, w, b)), nd(5, 7)(), False)
        check(returned, nd(5, 7)(), False)
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("dense replaced: ")
    assert "test_inductor.py" in first
    assert second.startswith("dense left, since the pre-activation has another user: ")


def test_backward_graphs_do_not_count() -> None:
    """The counting pass runs on both graphs; a place that is recomputed is one place."""
    backend = check(
        lambda x, w, b: checkpoint(lambda x: torch.sigmoid(F.linear(x, w, b)).sin(), x, use_reentrant=False),
        nd(50, 7)(),
        True,
    )
    start = torchops.inductor.matches()
    for graph in backend.graphs:
        CountMatches()(graph)
    assert torchops.inductor.matches() == start + 1


def test_graphs_of_other_passes() -> None:
    """Nodes without shapes are left, and a product of one row that is added to itself is no bias."""

    def function(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        row = x[:1] @ w
        return torch.sigmoid(x @ w + b), torch.sigmoid(torch.addmm(b, x, w)), torch.sigmoid(row + row)

    for shapes, expected in ((True, 2), (False, 0)):
        module = make_fx(function, tracing_mode="fake")(*in_out(5, 7)())
        for node in module.graph.nodes:
            if not shapes and node.op == "call_function":
                node.meta.pop("val", None)
        RewriteGates()(module.graph)
        module.recompile()
        assert len(module.graph.find_nodes(op="call_function", target=DENSE)) == expected
        assert_all_close(list(module(*in_out(5, 7)())), list(function(*in_out(5, 7)())))


# --- models ----------------------------------------------------------------------------------------------------------

# What makes them, the shapes of their inputs, and how many operators of each kind they get.
MODELS: dict[str, tuple[Callable[[int], nn.Module], tuple[tuple[int, ...], ...], tuple[int, int, int]]] = {
    "triangle_update": (lambda n: TriangleBlock(n, n), ((2, 5, 5),), (0, 2, 4)),
    "gated_attention": (lambda n: GatedAttention(n, 2), ((2, 9),), (0, 1, 0)),
    "glu_stack": (lambda n: GLUStack(n), ((37,),), (0, 0, 4)),
    # The first gate of AdaLN multiplies a norm, which Inductor computes; its sigmoid alone is left to dense.
    "conditioned_transition": (lambda n: ConditionedTransition(n, n), ((37,), (37,)), (1, 1, 1)),
}


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16], ids=["float64", "float32", "bfloat16"]
)
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, dtype: torch.dtype) -> None:
    """In bfloat16 the pre-activation is not rounded, so results differ by what eager's own roundings come to."""
    make, shapes, counts = MODELS[name]
    model, inputs = make(8).to(dtype), [t(*shape, 8, dtype=dtype) for shape in shapes]
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.2}[dtype]
    for train in (False, True) if dtype == torch.float64 else (True,):
        backend = check(model, inputs, train, atol=tolerance, rtol=tolerance)
        assert tuple(map(backend.count, (DENSE, GATE, GLU))) == counts
    without = Backend(on=False)
    values(torch.compile(model, backend=without), [x.detach().requires_grad_() for x in inputs], True)
    # Of a gate, its bias is saved as well, with which the backward pass computes the gate again.
    assert backend.saved_bytes <= without.saved_bytes + sum(counts) * 8 * dtype.itemsize


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", MODELS)
def test_models_cuda(name: str) -> None:
    """bfloat16 on Inductor, beside float32 without the pass."""
    make, shapes, counts = MODELS[name]
    aligned = [tuple(32 if size == shape[-1] else size for size in shape) for shape in shapes]
    model, inputs = make(128).cuda(), [t(*shape, 128, dtype=torch.float32).cuda() for shape in aligned]
    expected = values(model.float(), [x.requires_grad_() for x in inputs], True)
    halves = [x.detach().bfloat16().requires_grad_() for x in inputs]
    aten = values(model.bfloat16(), halves, True)
    with torchops.inductor.enable():
        got = values(torch.compile(model, fullgraph=True), halves, True)
        assert torchops.inductor.matches() == sum(counts)

    def error(results: list[Tensor]) -> list[float]:
        return [((r.double() - e).norm() / e.norm()).item() for r, e in zip(results, expected, strict=True)]

    for ours, eager in zip(error(got), error(aten), strict=True):
        assert ours <= 1.5 * eager + 1e-2

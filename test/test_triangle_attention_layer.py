"""torchops.nn.TriangleAttention beside the formula of the papers, and the operators beneath it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from attention_update_samples import TOLERANCE, assert_near, leaves_of, reference, weights, with_gradients
from checks import assert_all_close, random_like
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import torchops
from torchops import AttentionWeights, triangle_attention_update
from torchops._triangle_attention.update import operators, panels, panels_backward
from torchops._triangle_attention.update.arguments import Node
from torchops.nn import TriangleAttention

OPS = torch.ops.myops
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"))]
NODES: tuple[Node, Node] = ("starting", "ending")


def check(x: Tensor, mask: Tensor | None, w: AttentionWeights, node: Node) -> None:
    exact = with_gradients(reference, x.detach().double().requires_grad_(), mask, leaves_of(w, torch.float64), node)
    tolerance = TOLERANCE[w.q.dtype]
    got = with_gradients(triangle_attention_update, x.detach().requires_grad_(), mask, leaves_of(w), node)
    assert got[0].dtype == w.q.dtype
    assert got[0].is_contiguous()
    assert_near(got, exact, tolerance)
    y = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)
    with torch.no_grad():
        assert_near([triangle_attention_update(x, mask, w, node)], exact[:1], tolerance)
        version = y._version
        assert triangle_attention_update(y, mask, w, node, inplace=True) is y
        assert y._version == version + 1
    assert_near(
        [y.double() - x], exact[:1], tolerance + 4 * torch.finfo(x.dtype).eps * float(x.norm() / exact[0].norm())
    )


# --- values and gradients --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("panel_bytes", [None, 9000], ids=["whole", "panels"])
@pytest.mark.parametrize("batch", [(), (2,), (2, 3)], ids=str)
@pytest.mark.parametrize("node", NODES)
def test_values_and_gradients(
    monkeypatch: pytest.MonkeyPatch, node: Node, batch: tuple[int, ...], panel_bytes: int | None, device: str
) -> None:
    """Panels of many of a batch, and of some rows of one."""
    if panel_bytes:
        for module in (panels, panels_backward):
            monkeypatch.setattr(module, "budget", lambda *_: panel_bytes)
    for gate, biases, masked in ((True, True, False), (True, False, True), (False, True, True)):
        w = weights(gate=gate, biases=biases, device=device)
        x = random_like(torch.empty(*batch, 11, 11, 12, dtype=torch.float64), 20).to(device)
        mask = random_like(torch.empty(*batch, 11, 11)).to(device) > -0.5
        mask[..., 3, :] = False  # a row without keys
        mask[..., 5] = False
        check(x, mask if masked else None, w, node)
    check(x, mask.double() * 0.5, w._replace(norm_weight=None), node)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("node", NODES)
def test_dtypes(node: Node, dtype: torch.dtype, device: str) -> None:
    """Also a float32 x beside parameters of 16 bits, and sizes that no block of a kernel divides."""
    for x_dtype in {dtype, torch.float32}:
        w = weights(24, 2, 16, dtype=dtype, device=device)
        x = random_like(torch.empty(2, 19, 19, 24, dtype=torch.float64), 20).to(device, x_dtype)
        check(x, random_like(torch.empty(2, 19, 19)).to(device) > -1, w, node)


def test_gradients_that_nobody_asks_for() -> None:
    """The same values whatever else is wanted, and empty tensors for the others; no product for them. The kernel makes
    those products that the formula counts (without a gate: the counter misses a product that adds in place)."""
    w = weights(dtype=torch.float32)
    x, parameters, how = torch.randn(1, 7, 7, 12), list(w[:10]), (3, 1e-5, True)
    update, product, logsumexp = OPS._triangle_attention_update_kept(x, None, parameters, *how)
    grad = torch.randn_like(update)

    def backward(output_mask: list[bool]) -> list[Tensor]:
        return OPS._triangle_attention_update_backward(grad, x, product, logsumexp, None, parameters, *how, output_mask)

    whole = backward([True] * 11)
    plain = [None if i in (6, 7) else t for i, t in enumerate(parameters)]
    counts = []
    for i in range(11):
        output_mask = [j == i for j in range(11)]
        with FlopCounterMode(display=False) as counter:
            got = backward(output_mask)
        counts.append(counter.get_total_flops())
        made = []
        for function in (OPS._triangle_attention_update_backward, operators.backward_kernel):
            with FlopCounterMode(display=False) as counter:
                function(grad, x, product, logsumexp, None, plain, *how, output_mask)
            made.append(counter.get_total_flops())
        assert made[0] == made[1]
        for g, expected, want in zip(got, whole, output_mask, strict=True):
            assert_all_close([g], [expected]) if want else None
            assert want or g.shape == (0,)
    assert counts[10] == 0, "a sum over rows"
    assert counts[9] < counts[7] < counts[6] < counts[4] < counts[0]


# --- what the dispatcher asks for ------------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
def test_opcheck_of_the_helpers(masked: bool) -> None:
    w, x = weights(4, 2, 2), random_like(torch.empty(2, 3, 3, 4, dtype=torch.float64))
    args = (x, random_like(x[..., 0]) > -0.5 if masked else None, list(w[:10]), 2, 1e-5, True)
    torch.library.opcheck(OPS._triangle_attention_update_kept.default, args)
    grad, *kept = OPS._triangle_attention_update_kept(*args)
    arguments = (grad, x, *kept, *args[1:], [True, False] * 5 + [True])
    torch.library.opcheck(OPS._triangle_attention_update_backward.default, arguments)


def test_transforms_of_nothing() -> None:
    w, x = weights(dtype=torch.float32), torch.zeros(2, 0, 3, 3, 12)
    mask = torch.ones(2, 0, 3, 3)
    mapped = torch.func.vmap(lambda x, mask: triangle_attention_update(x, mask, w, "ending"))(x, mask)
    tangent = torch.func.jvp(lambda x: triangle_attention_update(x, mask, w), (x,), (x,))[1]
    assert mapped.shape == tangent.shape == x.shape


@pytest.mark.parametrize("inplace", [False, True], ids=["new", "in_place"])
def test_compiled(inplace: bool) -> None:
    """One node in one graph for all N; in training, on an intermediate."""
    layer = torchops.nn.TriangleAttention(8, 2, 4, "ending")
    torch.nn.init.normal_(layer.mha.linear_o.weight)  # type: ignore[arg-type, union-attr]
    names: list[list[str]] = []
    graphs = 0

    def backend(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Any:
        names.append([str(node.target) for node in graph.graph.nodes if "attention" in str(node.target)])
        return torch._dynamo.lookup_backend("aot_eager")(graph, _inputs)

    def model(x: Tensor, mask: Tensor) -> Tensor:
        y = x * 2
        out = layer(y, mask, inplace=inplace)
        return out + y if inplace else out

    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    for n in (5, 6, 9):
        x, mask = torch.randn(2, n, n, 8, requires_grad=True), torch.rand(2, n, n) > 0.3
        results = []
        for function in (compiled, model):
            out = function(x, mask)
            results.append([out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])])
        assert_all_close(*results, rtol=1e-4, atol=1e-4)
        # Dynamo starts again once where a graph has a float, here eps: not another graph, of other sizes.
        graphs = graphs or len(names)
    assert len(names) == graphs
    assert {len(found) for found in names} == {1}


@pytest.mark.parametrize("dropout", [None, 0.0, 0.5], ids=["layer", "pair_layer", "pair_layer_dropout"])
def test_compiled_in_place_in_training(dropout: float | None) -> None:
    """Inductor would drop a plain clone of an argument of the graph that the layer overwrites."""
    layer = TriangleAttention(8, 2, 4) if dropout is None else torchops.nn.PairLayer(8, 2, 4, dropout=dropout)
    for number, parameter in enumerate(layer.parameters()):
        parameter.data = random_like(parameter, number) / 3
    results = []
    options: dict[str, Any] = {"fallback_random": True}  # the same numbers as in eager
    for function in (torch.compile(layer, options=options), layer):
        torch.manual_seed(0)
        x = random_like(torch.empty(2, 5, 5, 8), 1).requires_grad_()
        out = function(x * 1, inplace=True)
        results.append([out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])])
    assert_all_close(*results, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_backward_under_autocast(dtype: torch.dtype) -> None:
    """Of a forward pass outside of it: the same gradients, and those of gradients."""
    layer, x = TriangleAttention(12, 3, 5, bias=True, dtype=dtype), torch.randn(2, 6, 6, 12, dtype=dtype)
    leaves = [x.requires_grad_(), *layer.parameters()]
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.3)
    results = []
    for enabled in (False, True):
        y = layer(x)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            (dx,) = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)
            results.append([dx.detach(), *torch.autograd.grad(y, leaves, torch.ones_like(y))])
    for got, expected in zip(results[1], results[0], strict=True):
        assert torch.equal(got, expected)


# --- the module ------------------------------------------------------------------------------------------------------

SHAPES = {
    "layer_norm.weight": (12,),
    "layer_norm.bias": (12,),
    "linear.weight": (3, 12),
    **{f"mha.linear_{name}.weight": (15, 12) for name in "qkvg"},
    "mha.linear_o.weight": (12, 15),
}


@pytest.mark.parametrize("bias", [False, True])
def test_module(bias: bool) -> None:
    layer = TriangleAttention(12, 3, 5, "ending", bias=bias, eps=1e-3)
    shapes = SHAPES | ({"mha.linear_g.bias": (15,), "mha.linear_o.bias": (12,)} if bias else {})
    assert {name: tuple(t.shape) for name, t in layer.state_dict().items()} == shapes
    x = torch.randn(2, 6, 6, 12)
    mask = torch.rand(2, 6, 6) > 0.3
    assert not layer(x, mask).any()
    for i, parameter in enumerate(layer.parameters()):
        parameter.data = random_like(parameter.data, i)
    expected = reference(x, mask, layer.weights(), "ending")
    assert_all_close([layer(x, mask)], [expected], rtol=1e-4, atol=1e-4)
    other: Any = copy.deepcopy(layer)
    with torch.no_grad():
        assert_all_close([other(x.clone(), mask, inplace=True)], [x + expected], rtol=1e-4, atol=1e-4)
    layer(x).sum().backward()
    assert all(p.grad is not None for p in layer.parameters())
    assert "12, heads=3, head_dim=5, node=ending, eps=0.001" in repr(layer)


def test_a_node_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match="expected node starting or ending, got both"):
        TriangleAttention(12, node="both")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected node starting or ending, got both"):
        triangle_attention_update(torch.zeros(3, 3, 12), None, weights(), "both")  # type: ignore[arg-type]

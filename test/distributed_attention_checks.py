"""Checks of triangle attention's update and of whole pair layers on four processes, against one:
distributed_triangle_worker.py runs them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_worker import assert_same, full
from sharding import Communication, distribute, placement
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_module, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import torchops
from torchops import AttentionWeights, triangle_attention_update

C, HEADS, WIDTH = 6, 2, 4
SHAPES = {"bias_weight": (HEADS, C), "out": (C, WIDTH)} | dict.fromkeys(("q", "k", "v", "gate"), (WIDTH, C))
VECTORS = {"norm_weight": C, "norm_bias": C, "gate_bias": WIDTH, "out_bias": C}

# As in distributed_triangle_worker.py: the placement of x and of the result, and what is communicated, forward and
# backward. Of rows the bias is gathered, and its gradient reduced; for the ending node, x and the update go to columns
# and back, which gloo does by gathering, and so do the mask and, in the gradient, what comes in and what goes out.
LINES = """
    R  starting 5 float full  -> R  : none / none
    S0 starting 5 float full  -> S0 : none / none
    S0 ending   5 bool  plain -> S0 : none / none
    S1 starting 7 float full  -> S1 : all_gather / all_gather, reduce_scatter
    S1 starting 5 none  plain -> S1 : all_gather / all_gather, reduce_scatter
    S1 ending   8 float full  -> S1 : 4 all_gather / 5 all_gather, reduce_scatter
    S1 ending   5 none  plain -> S1 : 3 all_gather / 4 all_gather, reduce_scatter
    S1 ending   3 bool  full  -> S1 :
    S1 starting 3 bool  full  -> S1 :
    S2 starting 8 float full  -> S1 :
    S3 ending   5 float full  -> R  :
    P  starting 5 none  full  -> R  :
"""


def arguments(n: int, mask: str, form: str, device: str) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    weights = {name: normal(*shape) for name, shape in SHAPES.items()}
    if form == "full":
        weights |= {name: normal(size) for name, size in VECTORS.items()}
    x, kept = normal(4, n, n, C).to(device), (normal(4, n, n) > -0.8).to(device)
    given = {"float": kept.double(), "bool": kept, "none": None}[mask]
    return x, given, {name: t.to(device) for name, t in weights.items()}


def update(x: Any, mask: Any, weights: dict[str, Any], node: Any, inplace: bool = False) -> Any:
    parameters = {name: weights.get(name) for name in (*SHAPES, *VECTORS)}
    return triangle_attention_update(x, mask, AttentionWeights(**parameters, heads=HEADS), node, inplace=inplace)  # type: ignore[arg-type]


def sharded(t: Tensor | None, mesh: DeviceMesh, places: list[Any]) -> Any:
    """Of a mask, dimensions that x does not share are not."""
    if t is None:
        return None
    at = [p if getattr(p, "dim", 0) < t.ndim else Replicate() for p in places]
    if mesh.ndim == 1:
        return distribute(t, mesh, at[0])
    return distribute_tensor(t.detach(), mesh, at, src_data_rank=None).requires_grad_(t.requires_grad)


def check_line(line: str, mesh: DeviceMesh) -> None:
    inputs, _, rest = line.partition("->")
    outputs, _, communicated = rest.partition(":")
    place, node, n, mask, form = inputs.split()
    given = arguments(int(n), mask, form, mesh.device_type)
    check_against_one(given, node, mesh, [placement(place)], [placement(outputs.strip())], communicated.strip())


def check_against_one(
    given: tuple[Tensor, Tensor | None, dict[str, Tensor]],
    node: str,
    mesh: DeviceMesh,
    places: list[Any],
    expected_places: list[Any],
    communicated: str = "",
) -> None:
    x, mask, weights = given
    leaves = [t.requires_grad_() for t in (x, *weights.values())]
    x_there = sharded(x, mesh, places)
    mask_there = sharded(mask, mesh, [p if isinstance(p, Replicate) or p.is_shard() else Replicate() for p in places])
    weights_there = {name: sharded(t, mesh, [Replicate()] * mesh.ndim) for name, t in weights.items()}
    leaves_there = [x_there, *weights_there.values()]
    expected = update(x, mask, weights, node)
    cotangent = torch.randn(expected.shape, dtype=expected.dtype, generator=torch.Generator().manual_seed(1))
    cotangent = cotangent.to(x.device)
    with torch.no_grad(), Communication() as forward:
        out = update(x_there, mask_there, weights_there, node)
    assert out.placements == tuple(expected_places), out.placements
    assert_same(out, expected)
    out = update(x_there, mask_there, weights_there, node)
    assert_same(out, expected)
    cotangent_there = distribute_tensor(cotangent, mesh, out.placements, src_data_rank=None)
    with Communication() as backward:
        grads = torch.autograd.grad(out, leaves_there, cotangent_there)
    if communicated and mesh.device_type == "cpu":
        assert f"{forward} / {backward}" == communicated
    for got, exact in zip(grads, torch.autograd.grad(expected, leaves, cotangent), strict=True):
        assert_same(got, exact)


def check_two_dimensions(places: str, mesh: DeviceMesh) -> None:
    both = init_device_mesh(mesh.device_type, (2, 2))
    at = [placement(p) for p in places.split()]
    for node in ("starting", "ending"):
        check_against_one(arguments(7, "float", "full", mesh.device_type), node, both, at, at)


def check_asked(mesh: DeviceMesh) -> None:
    """Gradients of some arguments alone, of sharded rows, of which one rank has none."""
    for node in ("starting", "ending"):
        for asked in (["x"], ["norm_bias"], ["bias_weight"], ["k"], ["gate_bias", "out"], ["out_bias"]):
            grads = []
            for place in (None, "S1"):
                x, mask, weights = arguments(3, "bool", "full", mesh.device_type)
                values: dict[str, Any] = {"x": x, **weights}
                if place is not None:
                    mask = sharded(mask, mesh, [placement(place)])
                    values = {
                        name: sharded(t, mesh, [placement(place) if name == "x" else Replicate()])
                        for name, t in values.items()
                    }
                leaves = [values[name].requires_grad_() for name in asked]
                out = update(values.pop("x"), mask, values, node)
                grads.append(torch.autograd.grad(full(out).square().sum(), leaves))
            for exact, got in zip(*grads, strict=True):
                assert_same(got, exact)


def check_in_place(mesh: DeviceMesh) -> None:
    x, mask, weights = arguments(7, "float", "full", mesh.device_type)
    there = {name: sharded(t, mesh, [Replicate()]) for name, t in weights.items()}
    for node in ("starting", "ending"):
        expected = x + update(x, mask, weights, node)
        for place in ("R", "S0", "S1"):
            ours = sharded(x.clone(), mesh, [placement(place)])
            local = ours.to_local().data_ptr()
            assert update(ours, sharded(mask, mesh, [placement(place)]), there, node, inplace=True) is ours
            assert_same(ours, expected)
            assert ours.to_local().data_ptr() == local
            assert ours.placements == (placement(place),)
    for place in ("S2", "S3"):
        ours = sharded(x.clone(), mesh, [placement(place)])
        with pytest.raises(RuntimeError, match="_update_: expected x replicated or sharded along rows or the batch"):
            update(ours, None, there, "starting", inplace=True)
        assert_same(ours, x)


def check_attention_alone(mesh: DeviceMesh) -> None:
    """Of q, k and v: along the batch, rows, or heads."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(4, 5, 4, n, 3, dtype=torch.float64, generator=generator) for n in (5, 6, 6))
    bias = torch.randn(4, 1, 4, 5, 6, dtype=torch.float64, generator=generator)
    mask = torch.rand(4, 5, 1, 1, 6, generator=generator) > 0.3
    attention: Any = torchops.triangle_attention
    leaves = [t.to(mesh.device_type).requires_grad_() for t in (q, k, v, bias)]
    mask = mask.to(mesh.device_type)
    expected = attention(*leaves, mask)
    exact = torch.autograd.grad(expected.square().sum(), leaves)
    for of_q, of_bias, of_mask in (("R", "R", "R"), ("S0", "S0", "S0"), ("S1", "R", "S1"), ("S2", "S2", "R")):
        there = [distribute(t, mesh, placement(of_q)) for t in leaves[:3]]
        there.append(distribute(leaves[3], mesh, placement(of_bias)))
        with Communication() as moved:
            out = attention(*there, distribute(mask, mesh, placement(of_mask)))
        assert str(moved) == "none"
        assert out.placements == (placement(of_q),)
        assert_same(out, expected)
        for got, value in zip(torch.autograd.grad(full(out).square().sum(), there), exact, strict=True):
            assert_same(got, value)


# --- layers ----------------------------------------------------------------------------------------------------------


class Stack(nn.Module):
    """Two pair layers."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            torchops.nn.PairLayer(C, HEADS, 2, dropout=dropout, dtype=torch.float64) for _ in range(2)
        )
        generator = torch.Generator().manual_seed(0)
        for p in self.parameters():
            p.data = torch.randn(p.shape, dtype=p.dtype, generator=generator) / 3

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask)
        return x


def check_layers_by_rows(mesh: DeviceMesh) -> None:
    """A stack whose parameters every rank has, of rows: values, gradients, and in place."""
    x, mask, _ = arguments(7, "float", "plain", mesh.device_type)
    one, several = Stack().to(mesh.device_type), distribute_module(Stack().to(mesh.device_type), mesh)
    results = []
    for model, given, factors in ((one, x, mask), (several, *(sharded(t, mesh, [placement("S1")]) for t in (x, mask)))):
        out = model(given.requires_grad_(), factors)
        results.append((out, *torch.autograd.grad(full(out).square().mean(), [given, *model.parameters()])))
    for exact, got in zip(*results, strict=True):
        assert_same(got, exact)
    assert results[1][0].placements == (placement("S1"),)
    for layer in several.layers:  # type: ignore[union-attr]
        layer.checkpoint = True
    ours_again: Any = sharded(x.detach(), mesh, [placement("S1")]).requires_grad_()
    again = several(ours_again, sharded(mask, mesh, [placement("S1")]))
    grads = torch.autograd.grad(full(again).square().mean(), [ours_again, *several.parameters()])
    for exact, got in zip(results[0][1:], grads, strict=True):
        assert_same(got, exact)
    with torch.no_grad():
        ours: Any = sharded(x.detach().clone(), mesh, [placement("S1")])
        for layer in several.eval().layers:  # type: ignore[union-attr]
            assert layer(ours, sharded(mask, mesh, [placement("S1")]), inplace=True) is ours
    assert_same(ours, results[0][0])


def check_dropout(mesh: DeviceMesh) -> None:
    """Of sharded rows: a row that is left out is so on all ranks, and what is kept is scaled."""
    x, _, _ = arguments(7, "none", "plain", mesh.device_type)
    torch.manual_seed(3)
    layer: Any = distribute_module(Stack(dropout=0.5).to(mesh.device_type), mesh).layers[0]  # type: ignore[index]
    ours: Any = sharded(x, mesh, [placement("S1")])
    for part, of in (("tri_mul_out", "rows"), ("tri_att_end", "columns")):
        kept = layer._kept(ours, of)
        dist.all_gather_object(drawn := [None] * mesh.size(), full(kept).tolist())
        assert drawn == drawn[:1] * mesh.size()
        assert full(kept).unique().tolist() == [0, 2]
        added = layer._add(getattr(layer, part), ours, (None,), kept, False)
        assert added.placements == ours.placements
        assert_same(added, x + full(kept) * full(getattr(layer, part)(ours)))


def check_training(wrap: Callable[[Any], nn.Module], mesh: DeviceMesh) -> None:
    """The gradients of each rank with one of a batch of four are those of one process with all of it."""
    x, mask, _ = arguments(5, "float", "plain", mesh.device_type)
    one, several = Stack().to(mesh.device_type), wrap(Stack().to(mesh.device_type))
    one(x, mask).square().mean().backward()
    batch = slice(dist.get_rank(), dist.get_rank() + 1)
    several(x[batch], mask[batch]).square().mean().backward()  # type: ignore[index]
    for p, q in zip(several.parameters(), one.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert_same(p.grad, q.grad)


def _fully_shard(model: Any) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def checks() -> dict[str, Callable[[DeviceMesh], None]]:
    lines = [" ".join(line.split()) for line in LINES.strip().splitlines()]
    return {
        **{f"attention {line}": partial(check_line, line) for line in lines},
        "attention, rows and batch": partial(check_two_dimensions, "S0 S1"),
        "attention, rows twice": partial(check_two_dimensions, "S1 S1"),
        "attention, gradients that are asked for": check_asked,
        "attention in place": check_in_place,
        "attention alone": check_attention_alone,
        "layers by rows": check_layers_by_rows,
        "layers by rows, dropout": check_dropout,
        "layers, DistributedDataParallel": partial(check_training, DistributedDataParallel),
        "layers, fully_shard": partial(check_training, _fully_shard),
    }

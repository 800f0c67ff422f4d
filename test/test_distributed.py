"""DTensor placements and communication of every operator, on a mesh that has no other ranks than this process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checks import tensors
from samples import Make
from sharding import CASES, Communication, ShardingCase, distribute, merges_sharded_dims, placement
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import torchops

ALLOWED = [pytest.param(case, id=case.name) for case in CASES if not case.refused]
REFUSED = [pytest.param(case, id=case.name) for case in CASES if case.refused]
MAKE = Make(torch.float64, "cpu", requires_grad=True)


@pytest.fixture(scope="module", autouse=True)
def _ranks() -> Iterator[None]:
    """The process group "fake": collectives return at once, with values that mean nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def mesh(_ranks: None) -> DeviceMesh:
    return DeviceMesh("cpu", [0, 1])


@pytest.fixture(scope="module")
def mesh_2d(_ranks: None) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))


@pytest.mark.parametrize("sharding", ALLOWED)
def test_placement_and_communication(sharding: ShardingCase, mesh: DeviceMesh) -> None:
    args, kwargs = sharding.sharded(mesh, sharding.build(MAKE))
    with torch.no_grad(), Communication() as moved:
        out: Any = sharding.case.wrapper(*args, **kwargs)
    assert out.placements == (sharding.output,)
    assert str(moved) == sharding.communication[0]


@pytest.mark.parametrize("sharding", REFUSED)
def test_refuses_to_move_what_it_overwrites(sharding: ShardingCase, mesh: DeviceMesh) -> None:
    args, kwargs = sharding.sharded(mesh, sharding.build(MAKE))
    before = args[0].to_local().clone()
    expected = rf"{sharding.case.name}: expected [avx] replicated or sharded.*, got shape \(4, 5, \d\) with placements"
    with torch.no_grad(), pytest.raises(RuntimeError, match=expected):
        sharding.case.wrapper(*args, **kwargs)
    assert torch.equal(args[0].to_local(), before)


@pytest.mark.parametrize("sharding", ALLOWED)
def test_gradients(sharding: ShardingCase, mesh: DeviceMesh) -> None:
    full = sharding.build(MAKE)
    args, kwargs = sharding.sharded(mesh, full)
    leaves = tensors((args, kwargs))
    if sharding.case.mutates is not None:
        args[0] = args[0] * 1
    out: Any = sharding.case.wrapper(*args, **kwargs)
    assert out.placements == (sharding.output,)
    where = Replicate() if isinstance(sharding.output, Partial) else sharding.output
    cotangent = distribute(torch.ones(out.shape, dtype=out.dtype), mesh, where)
    if sharding.sequence_product and not merges_sharded_dims(mesh):
        with pytest.raises(RuntimeError, match="flatten multiple dimensions"):
            torch.autograd.grad(out, leaves, cotangent)
        return
    with Communication() as moved:
        grads = torch.autograd.grad(out, leaves, cotangent)
    assert str(moved) == sharding.communication[1]
    assert [g.shape for g in grads] == [t.shape for t in tensors(full)]


def test_every_rule_has_cases() -> None:
    registered = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
    names = {op._schema.name.partition("::")[2] for op in registered if op.namespace == "myops"}
    written_out = {"transition", "add_transition_"}
    elsewhere = {"triangle_attention"}  # distributed_attention_checks.py
    public = {name for name in names if not name.startswith("_")}
    assert {case.case.name for case in CASES} == (public | written_out) - elsewhere


# Placements of x, w and the result.
ON_TWO_DIMENSIONS = [
    ("S0 R", "R S0", "S0 S2"),  # data parallel, columns of w
    ("S0 S2", "R S1", "S0 R"),  # data parallel, rows of w
    ("S0 S1", "R R", "S0 S1"),  # data and sequence parallel
    ("S1 S2", "R S1", "S1 R"),
    ("S2 S2", "S1 S1", "R R"),
    ("R S2", "S0 S1", "S2 R"),
]


def dense_on_two_dimensions(mesh_2d: DeviceMesh, x_on: str, w_on: str) -> tuple[Any, Any, Any]:
    x, w = (
        distribute_tensor(t, mesh_2d, [placement(text) for text in on.split()], src_data_rank=None).requires_grad_()
        for t, on in ((torch.randn(4, 8, 8), x_on), (torch.randn(12, 8), w_on))
    )
    b = distribute_tensor(torch.randn(12), mesh_2d, [Replicate(), Replicate()], src_data_rank=None)
    return x, w, torchops.dense(x, w, b)


@pytest.mark.parametrize(("x_on", "w_on", "out_on"), ON_TWO_DIMENSIONS)
def test_dense_on_two_dimensions(mesh_2d: DeviceMesh, x_on: str, w_on: str, out_on: str) -> None:
    _, _, y = dense_on_two_dimensions(mesh_2d, x_on, w_on)
    assert y.placements == tuple(placement(text) for text in out_on.split())
    assert y.shape == (4, 8, 12)


@pytest.mark.parametrize(("x_on", "w_on"), [on[:2] for on in ON_TWO_DIMENSIONS])
def test_gradients_of_dense_on_two_dimensions(mesh_2d: DeviceMesh, x_on: str, w_on: str) -> None:
    if "S1" in x_on and not merges_sharded_dims(mesh_2d["rows"]):
        pytest.skip("this torch cannot merge dimensions of which the second is sharded")
    x, w, y = dense_on_two_dimensions(mesh_2d, x_on, w_on)
    dx, dw = torch.autograd.grad(y.sum(), [x, w])
    assert (dx.shape, dw.shape) == (x.shape, w.shape)


def test_layer_norm_decisions_depend_on_normalized_shape(mesh: DeviceMesh) -> None:
    # DTensor remembers decisions; with and without the second dimension they differ, for the same tensors.
    x = distribute(torch.randn(4, 6, 8), mesh, Shard(1))
    layer_norm = torch.ops.myops.layer_norm
    for _ in range(2):
        assert layer_norm(x, (8,)).placements == (Shard(1),)
        assert layer_norm(x, (6, 8)).placements == (Replicate(),)


@pytest.mark.parametrize("where", ["R", "S0", "S1"])
def test_private_operators(mesh: DeviceMesh, where: str) -> None:
    """Those that autograd does not reach with DTensors, or not in all their forms."""
    on = (placement(where),)
    rows = on if where != "R" else (Replicate(),)
    summed = (Replicate(),) if where == "R" else (Partial(),)
    x = distribute(torch.randn(4, 6, 8), mesh, on[0])
    weight = distribute(torch.randn(8), mesh, Replicate())
    assert torch.ops.myops._saved_copy(x).placements == on
    y, mean, rstd = torch.ops.myops._layer_norm(x, [8], weight, None, 1e-5)
    assert (y.placements, mean.placements, rstd.placements) == (rows, rows, rows)
    moments = mean, rstd
    grads = torch.ops.myops._layer_norm_backward(x, x, [8], *moments, weight, [True, True, True])
    assert [g.placements for g in grads] == [rows, summed, summed]
    expected = torch.ops.myops._layer_norm(x.to_local(), [8], weight.to_local(), None, 1e-5)
    mean, rstd = torch.ops.myops._layer_norm_(x, [8], weight, None, 1e-5)
    assert (mean.placements, rstd.placements) == (rows, rows)
    assert mean.shape == (4, 6, 1)
    for got, value in zip((x, mean, rstd), expected, strict=True):
        assert torch.equal(got.to_local(), value)
    assert torch.ops.myops._softmax_backward(x, x, -1).placements == rows
    dz, db = torch.ops.myops._dense_backward(x, x)
    assert (dz.placements, db.placements) == (on, summed)
    # What nobody asked for is an empty tensor on every rank.
    empty = (Replicate(),)
    dz, db = torch.ops.myops._dense_backward(x, x, [False, True])
    assert (dz.placements, db.placements) == (empty, summed)
    grads = torch.ops.myops._layer_norm_backward(x, x, [8], *moments, weight, [False, True, False])
    assert [g.placements for g in grads] == [empty, summed, empty]
    w = distribute(torch.randn(8, 8), mesh, Replicate())
    products = torch.ops.myops._glu(x, w, w, None, weight, "silu")
    assert [t.placements for t in products] == [rows] * 3
    y, product = torch.ops.myops._gate(x, x, w, weight)
    assert (y.placements, product.placements) == (rows, rows)
    for given in ((), (False, product)):
        grads = torch.ops.myops._gate_backward(x, x, x, w, weight, [True] * 4, *given)
        assert [g.placements for g in grads] == [rows, rows, summed, summed]
    for given in ((), products[1:]):
        grads = torch.ops.myops._glu_backward(x, x, w, w, None, weight, "silu", [True, True, True, False, True], *given)
        assert [g.placements for g in grads if g.numel()] == [rows, summed, summed, summed]


def test_products_of_glu_in_columns(mesh: DeviceMesh) -> None:
    x = distribute(torch.randn(4, 6, 8), mesh, Replicate())
    w = distribute(torch.randn(8, 8), mesh, Shard(0))
    products = torch.ops.myops._glu(x, w, w, None, None, "silu")
    assert [t.placements for t in products] == [(Shard(2),)] * 3
    output_mask = [True, True, True, False, False]
    grads = torch.ops.myops._glu_backward(products[0], x, w, w, None, None, "silu", output_mask, *products[1:])
    assert [g.placements for g in grads[:3]] == [(Partial(),), (Shard(0),), (Shard(0),)]


GRADIENTS = {
    # Placements of (grad, y, x, w), and of (dx, dw, db).
    "R R R R": "R R R",
    "S0 S0 S0 R": "S0 P P",
    "S1 S1 S1 R": "S1 P P",
    "S2 S2 R S0": "P S0 S0",
    "R R S2 S1": "S2 S1 R",
    "S0 R S0 R": "S0 P P",
}


@pytest.mark.parametrize("arguments", GRADIENTS)
@pytest.mark.parametrize("output_mask", [(True, True, True), (False, True, False), (True, False, True)], ids=str)
def test_dense_gradients(mesh: DeviceMesh, arguments: str, output_mask: tuple[bool, ...]) -> None:
    tensors = [torch.randn(4, 6, 8), torch.rand(4, 6, 8), torch.randn(4, 6, 10), torch.randn(8, 10)]
    sharded = [distribute(t, mesh, placement(text)) for t, text in zip(tensors, arguments.split(), strict=True)]
    grads = torch.ops.myops._dense_gradients(*sharded, list(output_mask))
    expected = [placement(text) for text in GRADIENTS[arguments].split()]
    for got, where, wanted, shape in zip(grads, expected, output_mask, ((4, 6, 10), (8, 10), (8,)), strict=True):
        assert got.placements == ((where,) if wanted else (Replicate(),))
        assert got.shape == (shape if wanted else (0,))


def test_fewer_rows_than_ranks(mesh: DeviceMesh) -> None:
    x = distribute(torch.randn(1, 8), mesh, Shard(0))
    assert torch.ops.myops.softmax(x).placements == (Replicate(),)


def test_merged_dimensions(mesh: DeviceMesh) -> None:
    # Rows of a flattened sharded sequence are sharded in strides, which is as good.
    if not merges_sharded_dims(mesh):
        pytest.skip("this torch refuses to merge a sharded dimension with another")
    x = distribute(torch.randn(4, 6, 8), mesh, Shard(1)).view(24, 8)
    with Communication() as moved:
        y = torch.ops.myops.layer_norm(x, [8])
        torchops.softmax_(torchops.sigmoid_(y))
    assert x.placements == y.placements != (Shard(0),)
    assert str(moved) == "none"


def test_mixed_with_plain_tensors(mesh: DeviceMesh) -> None:
    x, w = distribute(torch.randn(4, 8), mesh, Shard(1)), distribute(torch.randn(6, 8), mesh, Shard(1))
    for arguments in ((x, torch.randn(6, 8)), (torch.randn(4, 8), w), (x, w, torch.randn(6))):
        with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
            torchops.dense(*arguments)


def test_checks_see_global_shapes(mesh: DeviceMesh) -> None:
    x, w = distribute(torch.randn(4, 8), mesh, Shard(1)), distribute(torch.randn(6, 4), mesh, Replicate())
    with pytest.raises(RuntimeError, match=r"dense: expected w of shape \(out, in\) with in = 8 to match x, got"):
        torchops.dense(x, w)


def triangle(
    x: Any, direction: Any = "outgoing", mask: Any = None, g_out: Any = None, add_residual: bool = False
) -> Any:
    weights = {"p_in_weight": (4, 3), "g_in_weight": (4, 3), "p_out_weight": (3, 2), "g_out_weight": (3, 3)}
    made: dict[str, Any] = {name: torch.ones(shape) for name, shape in weights.items()}
    made["g_out_weight"] = made["g_out_weight"] if g_out is None else g_out
    if isinstance(x, DTensor):
        made = {n: t if isinstance(t, DTensor) else distribute(t, x.device_mesh, Replicate()) for n, t in made.items()}
    op = torchops.add_triangle_multiplicative_update_ if add_residual else torchops.triangle_multiplicative_update
    return op(x, direction, mask=mask, **made)


def transition(x: Any, gate: Any, up: Any, down: Any, op: str = "transition") -> Any:
    return getattr(torchops, op)(x, gate_weight=gate, up_weight=up, down_weight=down)


def attention(x: Any, mask: Any, inplace: bool = False) -> Any:
    weights: Any = torchops.nn.TriangleAttention(8, 2, 4).weights()
    tensors: Any = {name: t.detach() for name, t in weights._asdict().items() if isinstance(t, Tensor)}
    if isinstance(x, DTensor):
        tensors = {name: distribute(t, x.device_mesh, Replicate()) for name, t in tensors.items()}
    update = torchops.triangle_attention_update
    return update(x, mask, weights._replace(**tensors), inplace=inplace)


def t(*shape: int) -> Tensor:
    return torch.ones(shape)


EXPANDED = torch.ones(1, 6, 8).expand(6, 6, 8)
# Functions, and arguments with placements, all wrong in one way.
WRONG: dict[str, tuple[Any, list[tuple[Any, str]]]] = {
    "dense b": (torchops.dense, [(t(3, 4), "R"), (t(6, 4), "S1"), (t(3, 6), "R")]),
    "dense short b": (torchops.dense, [(t(3, 4), "R"), (t(6, 4), "S1"), (t(1), "R")]),
    "square_matmul b": (torchops.square_matmul, [(t(3, 4), "S1"), (t(4, 6), "S0")]),
    "transition up": (transition, [(t(5, 4), "R"), (t(8, 4), "S0"), (t(7, 4), "S0"), (t(4, 8), "S1")]),
    "add_transition_ up": (
        lambda x, gate, up, down: transition(x, gate, up, down, op="add_transition_"),
        [(t(5, 4), "R"), (t(8, 4), "S0"), (t(7, 4), "S0"), (t(4, 8), "S1")],
    ),
    "triangle direction": (lambda x: triangle(x, "sideways"), [(t(6, 6, 3), "S0")]),
    "triangle mask": (lambda x, mask: triangle(x, mask=mask), [(t(6, 6, 3), "S0"), (t(6, 1), "R")]),
    "triangle x": (triangle, [(t(6, 4, 3), "S0")]),
    "triangle x dtype": (triangle, [(t(6, 6, 3).half(), "S0")]),
    "triangle weight": (lambda x, w: triangle(x, g_out=w), [(t(6, 6, 3), "S0"), (t(3, 1), "R")]),
    "triangle_ overlap": (lambda x: triangle(x, add_residual=True), [(EXPANDED[..., :3], "R")]),
    "triangle_ mask": (lambda x, m: triangle(x, mask=m, add_residual=True), [(t(6, 6, 3), "S0"), (t(6, 1), "R")]),
    "attention mask": (attention, [(t(6, 6, 8), "S0"), (t(6, 1), "R")]),
    "attention mask dtype": (attention, [(t(6, 6, 8), "S0"), (t(6, 6).long(), "R")]),
    "attention x": (attention, [(t(6, 4, 8), "S0"), (None, "R")]),
    "attention x dtype": (attention, [(t(6, 6, 8).half(), "S0"), (None, "R")]),
    "attention_ overlap": (lambda x: attention(x, None, inplace=True), [(EXPANDED, "R")]),
    "attention_ mask": (lambda x, m: attention(x, m, inplace=True), [(t(6, 6, 8), "S0"), (t(6, 1), "R")]),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", WRONG)
def test_checks_without_gradients(mesh: DeviceMesh, name: str, mode: Any) -> None:
    """The same errors as of whole tensors, though the parts would fit, also where no kernel for autograd runs."""
    function, given = WRONG[name]
    with mode():
        with pytest.raises((RuntimeError, ValueError)) as whole:
            function(*(x for x, _ in given))
        sharded = [None if x is None else distribute(x, mesh, placement(on)) for x, on in given]
        with pytest.raises((RuntimeError, ValueError)) as parts, Communication() as moved:
            function(*sharded)
    assert parts.type is whole.type
    assert str(parts.value) == str(whole.value)
    assert str(moved) == "none"


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_compiled_with_dynamic_sizes(mesh: DeviceMesh, mode: Any) -> None:
    w = distribute(t(6, 8), mesh, Shard(1))
    compiled = torch.compile(torchops.dense, backend="aot_eager", fullgraph=True, dynamic=True)
    with mode():
        for n in (4, 5):
            x: Any = distribute(t(n, 8), mesh, Replicate())
            expected: Any = torchops.dense(x, w)
            got: Any = compiled(x, w)
            torch.testing.assert_close(got.to_local(), expected.to_local())


@pytest.mark.parametrize(("x_on", "w_on", "out_on"), [("R", "S0", "S1"), ("S1", "S1", "R"), ("S0", "R", "S0")])
def test_compiled(mesh: DeviceMesh, x_on: str, w_on: str, out_on: str) -> None:
    def gate(x: Tensor, w: Tensor) -> Tensor:
        y = torchops.dense(x, w)
        return torchops.sigmoid_(y * 2)

    x = distribute(torch.randn(4, 8, requires_grad=True), mesh, placement(x_on))
    w = distribute(torch.randn(6, 8, requires_grad=True), mesh, placement(w_on))
    y: Any = torch.compile(gate, backend="aot_eager", fullgraph=True)(x, w)
    expected: Any = gate(x, w)
    assert y.placements == expected.placements == (placement(out_on),)
    torch.testing.assert_close(y.to_local(), expected.to_local())
    cotangent = distribute(torch.randn(4, 6), mesh, placement(out_on))
    got, exact = (torch.autograd.grad(out, [x, w], cotangent) for out in (y, expected))
    for g, e in zip(got, exact, strict=True):
        assert isinstance(g, DTensor)
        assert isinstance(e, DTensor)
        torch.testing.assert_close(g.to_local(), e.to_local())


LOADED = "('torchops.distributed' in sys.modules, 'torch.distributed.tensor' in sys.modules)"


@pytest.mark.parametrize(
    "steps",
    [
        ("import torchops", "assert not any({})", "import torch.distributed.tensor", "assert all({})"),
        ("import torch.distributed.tensor", "import torchops", "assert all({})"),
    ],
    ids=["torchops_first", "torch_distributed_first"],
)
def test_registered_by(steps: tuple[str, ...]) -> None:
    """In a fresh process: torchops alone does not load torch.distributed.tensor, but joins it before or after."""
    program = "\n".join(["import sys", *steps]).replace("{}", LOADED)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr

"""One of two processes that compute together, with gloo on the CPU or NCCL on two GPUs.

    python distributed_worker.py RANK DEVICE RENDEZVOUS_FILE RESULT_FILE

It runs the checks below one after the other, each against the same computation in this one process, and writes what
came of them to RESULT_FILE. test_distributed_values.py starts it, so that torch is imported twice and not twice per
check.
"""

from __future__ import annotations

import datetime
import json
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import distributed_hopper_checks
import pytest
import torch
import torch.distributed as dist
from samples import Make
from sharding import CASES, Communication, ShardingCase, distribute, merges_sharded_dims, placement
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import torchops
from torchops.distributed import ColwiseParallel, RowwiseParallel

# All in float64, so nothing but the order of additions differs.
TOLERANCE = 1e-12


def full(x: Any) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def assert_same(got: Any, expected: Tensor) -> None:
    torch.testing.assert_close(full(got.detach()), expected.detach(), rtol=TOLERANCE, atol=TOLERANCE)


# --- operators -------------------------------------------------------------------------------------------------------


def check_values(sharding: ShardingCase, mesh: DeviceMesh) -> None:
    arguments = sharding.build(Make(torch.float64, mesh.device_type))
    args, kwargs = sharding.sharded(mesh, arguments)
    expected = sharding.case.reference(*arguments[0], **arguments[1])
    with torch.no_grad():
        out: Any = sharding.case.wrapper(*args, **kwargs)
    assert out.placements == (sharding.output,)
    assert_same(out, expected)
    if sharding.case.mutates is not None:
        assert out is args[0]


def check_gradients(sharding: ShardingCase, mesh: DeviceMesh) -> None:
    arguments = sharding.build(Make(torch.float64, mesh.device_type, requires_grad=True))
    args, kwargs = sharding.sharded(mesh, arguments)
    leaves = [t for t in args if isinstance(t, Tensor)]
    expected_leaves = [t for t in arguments[0] if isinstance(t, Tensor)]
    expected = sharding.case.reference(*arguments[0], **arguments[1])
    if sharding.case.mutates is not None:
        args[0] = args[0] * 1
    out: Any = sharding.case.wrapper(*args, **kwargs)
    assert_same(out, expected)
    if sharding.case.mutates is not None:
        assert out.placements == args[0].placements == (sharding.inputs[0],)
    if sharding.sequence_product and not merges_sharded_dims(mesh):
        return  # test_distributed.py asserts that it raises
    cotangent = torch.randn(expected.shape, dtype=expected.dtype, generator=torch.Generator().manual_seed(1))
    cotangent = cotangent.to(expected.device)
    where = Replicate() if isinstance(out.placements[0], Partial) else out.placements[0]
    grads = torch.autograd.grad(out, leaves, distribute(cotangent, mesh, where))
    expected_grads = torch.autograd.grad(expected, expected_leaves, cotangent)
    for grad, exact in zip(grads, expected_grads, strict=True):
        assert_same(grad, exact)


def check_half(mesh: DeviceMesh) -> None:
    """Sizes that take the fused kernel on a GPU, in the dtype that it is for."""
    make = Make(torch.float64, mesh.device_type)
    x, w, b = make(256, 128), make(192, 128, scale=0.1), make(192)
    expected = torch.sigmoid(x @ w.T + b)
    for where in ((Replicate(), Shard(0), Shard(0)), (Shard(1), Shard(1), Replicate()), (Shard(0), *[Replicate()] * 2)):
        sharded = [distribute(t.bfloat16(), mesh, p) for t, p in zip((x, w, b), where, strict=True)]
        got = full(torchops.dense(*sharded))
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=2e-2)


def check_dense_gradients(mesh: DeviceMesh) -> None:
    """As one operator; what its ranks have of it adds up to the whole."""
    make = Make(torch.float64, mesh.device_type)
    tensors = make(3, 5, 6), make(3, 5, 6), make(3, 5, 7), make(6, 7)
    output_mask = [True, True, True]
    expected = torch.ops.myops._dense_gradients(*tensors, output_mask)
    for where in ("R R R R", "S0 S0 S0 R", "S1 S1 S1 R", "S2 S2 R S0", "R R S2 S1", "S2 S0 R S1"):
        sharded = [distribute(t, mesh, placement(text)) for t, text in zip(tensors, where.split(), strict=True)]
        for got, value in zip(torch.ops.myops._dense_gradients(*sharded, output_mask), expected, strict=True):
            assert_same(got, value)


# --- tensor parallelism ----------------------------------------------------------------------------------------------


class Norm(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return torchops.layer_norm(x, self.weight.shape, self.weight, self.bias)


class Gates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = Norm(6), torchops.nn.Dense(6, 10), torchops.nn.Dense(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.norm(x)))


PLANS: dict[str, tuple[dict[str, ParallelStyle], str]] = {
    # The plan, and what its forward communicates.
    "as_stock": ({"up": ColwiseParallel(), "down": RowwiseParallel()}, "all_reduce"),
    "no_local_tensors": (
        {
            "up": ColwiseParallel(use_local_output=False),
            "down": RowwiseParallel(use_local_output=False),
        },
        "all_reduce",
    ),
    "column_to_replicated": ({"up": ColwiseParallel(output_layouts=Replicate())}, "all_gather"),
    "row_from_replicated": ({"down": RowwiseParallel(input_layouts=Replicate())}, "all_reduce"),
}


def check_plan(name: str, mesh: DeviceMesh) -> None:
    plan, communication = PLANS[name]
    torch.manual_seed(0)
    single = Gates().to(mesh.device_type, torch.float64)
    parallel = Gates().to(mesh.device_type, torch.float64)
    parallel.load_state_dict(single.state_dict())
    parallelize_module(parallel, mesh, plan)
    x = Make(torch.float64, mesh.device_type, requires_grad=True)(3, 4, 6)
    with Communication() as moved:
        y = parallel(x)
    assert str(moved) == communication, str(moved)
    expected = single(x)
    assert_same(y, expected)
    assert_gradients_agree(parallel, single, y, expected)


def assert_gradients_agree(parallel: nn.Module, single: nn.Module, y: Any, expected: Tensor) -> None:
    full(y).square().sum().backward()
    expected.square().sum().backward()
    for (name, p), (_, q) in zip(parallel.named_parameters(), single.named_parameters(), strict=True):
        assert p.grad is not None, name
        assert q.grad is not None, name
        assert_same(p.grad, q.grad)


def check_stock_styles(mesh: DeviceMesh) -> None:
    """Ours are PyTorch's for an nn.Linear and an nn.Embedding. PyTorch's refuse a Dense, and leave it as it was."""
    for ours in (ColwiseParallel, RowwiseParallel):
        (stock,) = ours.__bases__
        for make in (lambda: nn.Linear(6, 10), lambda: nn.Embedding(6, 10)):
            modules = [parallelize_module(make(), mesh, style()) for style in (ours, stock)]
            of: list[Any] = [list(module.parameters()) for module in modules]
            assert [p.placements for p in of[0]] == [p.placements for p in of[1]]
        dense = torchops.nn.Dense(6, 10)
        with pytest.raises(NotImplementedError, match=r"nn\.Linear"):
            parallelize_module(dense, mesh, stock())
        assert all(type(p) is nn.Parameter for p in dense.parameters())
        assert parallelize_module(dense, mesh, ours()) is dense
        assert type(dense) is torchops.nn.Dense


def check_sequence_parallel(mesh: DeviceMesh) -> None:
    """Norm on a sharded sequence, gathered for the column-parallel layer, scattered after the row-parallel one."""
    torch.manual_seed(0)
    single = Gates().to(mesh.device_type, torch.float64)
    parallel = Gates().to(mesh.device_type, torch.float64)
    parallel.load_state_dict(single.state_dict())
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    parallelize_module(parallel, mesh, plan)
    x = Make(torch.float64, mesh.device_type)(3, 4, 6)
    y = parallel(distribute(x, mesh, Shard(1)))
    assert y.placements == (Shard(1),)
    expected = single(x)
    assert_same(y, expected)
    assert_gradients_agree(parallel, single, y, expected)


def check_data_and_tensor_parallel(mesh: DeviceMesh) -> None:
    """fully_shard over a parallelized model, on a mesh with one dimension for each."""
    both = init_device_mesh(mesh.device_type, (1, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    single = Gates().to(mesh.device_type, torch.float64)
    parallel = Gates().to(mesh.device_type, torch.float64)
    parallel.load_state_dict(single.state_dict())
    parallelize_module(parallel, both["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(parallel, mesh=both["data"])
    x = Make(torch.float64, mesh.device_type)(3, 4, 6)
    y, expected = parallel(x), single(x)
    assert_same(y, expected)
    assert_gradients_agree(parallel, single, y, expected)


def check_pending_communication(mesh: DeviceMesh) -> None:
    """In-place operators wait for a tensor that is still being gathered."""
    x = Make(torch.float64, mesh.device_type)(4, 5, 7)
    expected = torch.softmax(x, -1)
    pending: Any = distribute(x, mesh, Shard(2)).redistribute(placements=[Replicate()], async_op=True)
    torchops.softmax_(pending)
    assert_same(pending, expected)


# --- data parallelism ------------------------------------------------------------------------------------------------


class Model(nn.Module):
    """Every in-place operator on intermediates, beside Dense."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.gate = nn.Linear(7, 12), torchops.nn.Dense(7, 12)
        self.square = nn.Parameter(torch.randn(12, 12) / 4)
        self.weight, self.bias = nn.Parameter(torch.ones(12)), nn.Parameter(torch.zeros(12))
        self.out = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.value(x) * self.gate(x)
        h = torchops.square_matmul_(h, self.square)
        h = torchops.layer_norm_(h, (12,), self.weight, self.bias)
        h = torchops.softmax_(h @ h.mT) @ h
        return self.out(h * torchops.sigmoid_(h + 1))


def losses(model: nn.Module, x: Tensor, target: Tensor, steps: int = 6) -> list[float]:
    """Of training on this rank's samples; the mean over ranks is that over all samples."""
    # A large eps: with a small one, gradients that are zero but for rounding would move parameters.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3)
    out = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        out.append(loss.item())
    return out


def check_training(wrap: Callable[[nn.Module], nn.Module], mesh: DeviceMesh) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(Model(), nn.Tanh(), nn.Linear(3, 7), Model()).to(mesh.device_type, torch.float64)

    make = Make(torch.float64, mesh.device_type)
    x, target = make(8, 5, 7), 2 + make(8, 5, 3, scale=0.1)
    single = build()
    expected = losses(single, x, target)
    mine = slice(4 * mesh.get_local_rank(), 4 * mesh.get_local_rank() + 4)
    model = wrap(build())
    mean = torch.tensor(losses(model, x[mine], target[mine]), dtype=torch.float64, device=x.device) / 2
    dist.all_reduce(mean)
    torch.testing.assert_close(mean.tolist(), expected, rtol=TOLERANCE, atol=TOLERANCE)
    assert expected[-1] < 0.8 * expected[0], "nothing was learnt, so the comparison says little"
    for p, q in zip(model.parameters(), single.parameters(), strict=True):
        assert_same(p, q)


def check_ddp(mesh: DeviceMesh) -> None:
    check_training(DistributedDataParallel, mesh)


def check_fully_shard(mesh: DeviceMesh) -> None:
    def wrap(model: nn.Module) -> nn.Module:
        for block in model.children():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    check_training(wrap, mesh)


def checks() -> dict[str, Callable[[DeviceMesh], None]]:
    table: dict[str, Callable[[DeviceMesh], None]] = {}
    for case in CASES:
        if not case.refused:
            table[f"values {case.name}"] = partial(check_values, case)
        # What is refused otherwise is moved there and back where a gradient is recorded; a partial sum cannot be.
        if not case.refused or case.inputs[0] != Partial():
            table[f"gradients {case.name}"] = partial(check_gradients, case)
    for plan in PLANS:
        table[f"plan {plan}"] = partial(check_plan, plan)
    return {
        **table,
        "half": check_half,
        "_dense_gradients": check_dense_gradients,
        "pending communication": check_pending_communication,
        "data and tensor parallel": check_data_and_tensor_parallel,
        "sequence parallel": check_sequence_parallel,
        "stock styles": check_stock_styles,
        "DistributedDataParallel": check_ddp,
        "fully_shard": check_fully_shard,
        **distributed_hopper_checks.checks_of_two(),
    }


def run(
    table: dict[str, Callable[[DeviceMesh], None]], world: int, rank: int, device: str, rendezvous: str, result: str
) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=60),
    )
    mesh = init_device_mesh(device, (world,))
    outcomes = dict.fromkeys(table, "not run, after a failure before it")
    for name, check in table.items():
        try:
            check(mesh)
            outcomes[name] = ""
        except Exception:
            # The other rank may wait for this one now; it fails in its turn.
            outcomes[name] = traceback.format_exc()
            break
    Path(result).write_text(json.dumps(outcomes))
    dist.destroy_process_group()


if __name__ == "__main__":
    run(checks(), 2, int(sys.argv[1]), *sys.argv[2:])

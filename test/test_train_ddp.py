"""The ring all-reduce and the training example on processes of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import allreduce_bench
import pytest
import ring
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

ROOT = Path(__file__).parents[1]
# On loopback, whatever the name of this machine resolves to; one thread each, since the processes share the cores.
ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
PROCESSES = 4


def _in_ring_order(inputs: list[Tensor]) -> Tensor:
    """The sum that `ring_all_reduce_` promises, bit by bit: chunk c in the order c, c + 1, ..., c - 1."""
    size = len(inputs)
    chunks = [x.flatten().tensor_split(size) for x in inputs]
    sums = []
    for c in range(size):
        total = chunks[c][c].clone()
        for step in range(1, size):
            total += chunks[(c + step) % size][c]
        sums.append(total)
    return torch.cat(sums).view_as(inputs[0])


def _inputs(shape: tuple[int, ...], dtype: torch.dtype, size: int) -> list[Tensor]:
    generators = [torch.Generator().manual_seed(k) for k in range(size)]
    return [torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for g in generators]


def _check_sums(group: dist.ProcessGroup | None, size: int, rank: int) -> None:
    for shape in ((0,), (1,), (3,), (4,), (5,), (7, 13), (101, 31)):
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            inputs = _inputs(shape, dtype, size)
            for piece_bytes in (16, ring.PIECE_BYTES):
                x = inputs[rank].clone()
                assert ring.ring_all_reduce_(x, group, piece_bytes) is x
                assert torch.equal(x, _in_ring_order(inputs)), (size, shape, dtype, piece_bytes)
            library = inputs[rank].clone()
            dist.all_reduce(library, group=group)
            if size <= 2:
                # a + b is b + a, so there is one sum only.
                assert torch.equal(x, library)
            elif dtype == torch.float64:
                torch.testing.assert_close(x, library, rtol=0, atol=1e-14)
            # Whole numbers have one sum in any order.
            whole = torch.arange(x.numel(), dtype=dtype) % 8 + rank
            expected = whole.clone()
            dist.all_reduce(expected, group=group)
            assert torch.equal(ring.ring_all_reduce_(whole, group), expected)


def _check_hook(group: dist.ProcessGroup | None, size: int, rank: int) -> None:
    """Gradients of a model with several buckets are those without a hook, averaged."""
    gradients = []
    for hook in (False, True):
        torch.manual_seed(0)
        network = torch.nn.Sequential(torch.nn.Linear(5, 40), torch.nn.Tanh(), torch.nn.Linear(40, 3)).double()
        model = torch.nn.parallel.DistributedDataParallel(network, process_group=group, bucket_cap_mb=0.001)
        if hook:
            model.register_comm_hook(ring.RingState(group), ring.ring_hook)
        for step in range(2):
            model.zero_grad()
            x = torch.randn(8, 5, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)
            model(x).square().mean().backward()
        gradients.append([p.grad.clone() for p in network.parameters() if p.grad is not None])
    assert len(gradients[1]) == 4
    for got, expected in zip(gradients[1], gradients[0], strict=True):
        if size <= 2:
            assert torch.equal(got, expected)
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-15)


def _worker(rank: int, file: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=PROCESSES)
    try:
        for size in range(1, PROCESSES + 1):
            # Of the last processes, so that a number in the group is not the number in the world.
            members = list(range(PROCESSES - size, PROCESSES))
            group = dist.new_group(members)
            if rank in members:
                _check_sums(group, size, members.index(rank))
                _check_hook(group, size, members.index(rank))
        with pytest.raises(ValueError, match="expected x contiguous, got strides"):
            ring.ring_all_reduce_(torch.ones(4, 4).T)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def test_ring_of_one_to_four_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    processes = spawn(_worker, args=(str(tmp_path / "store"),), nprocs=PROCESSES, join=False)
    assert processes is not None
    while not processes.join():
        pass
    assert [p.exitcode for p in processes.processes] == [0] * PROCESSES


def _torchrun(folder: Path, processes: int, *options: str) -> Any:
    result = folder / "result.json"
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    command = [*launch, "--standalone", "--local-addr", "127.0.0.1", str(ROOT / "examples/train_ddp.py")]
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [*command, *options, "--json", str(result)], capture_output=True, text=True, env=environment, timeout=300
    )
    assert run.returncode == 0, run.stderr
    return json.loads(result.read_text())


def test_training_is_the_same_with_either(tmp_path: Path) -> None:
    """Two processes, float64: the losses and parameters agree in every bit, and the loss falls."""
    options = ("--device", "cpu", "--dtype", "float64", "--epochs", "2")
    default, ours = (_torchrun(tmp_path, 2, *options, "--allreduce", name) for name in ("default", "ring"))
    assert ours == default
    assert ours["losses"][-1] < 0.5 * ours["losses"][0]
    assert ours["accuracy"] > 0.9


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_training_on_cuda_is_the_same_with_either(tmp_path: Path) -> None:
    options = ("--device", "cuda", "--dtype", "float64", "--epochs", "2")
    default, ours = (_torchrun(tmp_path, 2, *options, "--allreduce", name) for name in ("default", "ring"))
    assert ours == default


def test_cost_model_and_table() -> None:
    """A machine that follows the model is predicted exactly, and 2 (p - 1) / p of the bytes count."""
    latency, bandwidth, processes = 1e-5, 4e9, 4
    document: dict[str, Any] = {"processes": processes, "backend": "none", "rows": []}
    for size in (2**10, 2**20, 2**30):
        seconds = 2 * (processes - 1) * (latency + size / processes / bandwidth)
        document["rows"].append({"bytes": size, "seconds": dict.fromkeys(allreduce_bench.CALLS, seconds)})
        if size == 2**20:
            middle = seconds
    assert allreduce_bench.model(document)(2**20) == pytest.approx(middle)
    lines = allreduce_bench.table(document).splitlines()
    assert lines[-1].startswith("| 1 GiB | 403 ms | 403 ms | 4 | 403 ms | 4 |")

"""Trains a classifier with DistributedDataParallel, its gradients averaged by the library or by a ring of our own.

    torchrun --standalone --nproc-per-node 2 examples/train_ddp.py --allreduce ring -m cpp

With a GPU for every process it uses NCCL, and otherwise gloo on the CPU. `-m` selects how the dense layers are
computed: see benchmarks/implementations. The data are 10 clusters in 64 dimensions, drawn from a seed. Each process
trains on its share of every batch, so the number of processes changes the losses only by rounding.

    torchrun --standalone --nproc-per-node 2 examples/train_ddp.py --bench --json allreduce.json
    python examples/train_ddp.py --table allreduce.json

measure the ring beside the library's all-reduce and print the measurements as Markdown.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import allreduce_bench
import torch
import torch.distributed as dist
from ring import RingState, ring_hook
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.append(str(Path(__file__).parents[1]))
from benchmarks.implementations import MODES, Dense, unavailable

SEED = 0
CLASSES, FEATURES, SAMPLES = 10, 64, 4096
LEARNING_RATE = 1e-2


def make_data(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows around the centres of their clusters, and the clusters' numbers: the same in every process."""
    generator = torch.Generator().manual_seed(SEED)
    centres = torch.randn(CLASSES, FEATURES, generator=generator, dtype=torch.float64)
    labels = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    noise = torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64)
    return (centres[labels] + 1.5 * noise).to(dtype), labels


def make_model(mode: str) -> nn.Module:
    """64-128-64-10, the inner layers `sigmoid(x @ w.T + b)` as computed by `mode`."""
    torch.manual_seed(SEED)
    return nn.Sequential(Dense(FEATURES, 128, mode), Dense(128, 64, mode), nn.Linear(64, CLASSES))


def train(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Trains and returns the mean loss of each epoch, the accuracy, and a digest of the parameters."""
    if options.mode.startswith("compile"):
        # Each layer is a graph of its own. There is nothing to cut at the buckets, and the cut expects larger ones.
        torch._dynamo.config.optimize_ddp = False
    rank, size = dist.get_rank(), dist.get_world_size()
    dtype = getattr(torch, options.dtype)
    x, labels = (t.to(device) for t in make_data(dtype))
    network = make_model(options.mode).to(device, dtype)
    # Small buckets, so that even this model has several, which are reduced while the backward pass goes on.
    model = DistributedDataParallel(
        network, device_ids=[device] if device.type == "cuda" else None, bucket_cap_mb=options.bucket_kib / 1024
    )
    if options.allreduce == "ring":
        model.register_comm_hook(RingState(), ring_hook)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    shuffle = torch.Generator().manual_seed(SEED)
    losses = []
    for _ in range(options.epochs):
        total = torch.zeros((), dtype=torch.float64, device=device)
        # A last, smaller batch would weigh the processes' shares unequally.
        batches = torch.randperm(SAMPLES, generator=shuffle).to(device).split(options.batch)
        batches = [rows for rows in batches if len(rows) == options.batch]
        for rows in batches:
            share = rows.view(size, -1)[rank]
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x[share]), labels[share])
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        losses.append(total.item() / (size * len(batches)))
    with torch.no_grad():
        accuracy = (network(x).argmax(1) == labels).double().mean().item()
    digests: list[str] = [""] * size
    dist.all_gather_object(digests, _digest(network))
    if len(set(digests)) > 1:
        raise RuntimeError("the processes' parameters have drifted apart")
    return {"losses": losses, "accuracy": accuracy, "digest": digests[0]}


def _digest(network: nn.Module) -> str:
    parameters = [p.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() for p in network.parameters()]
    return hashlib.sha256(b"".join(parameters)).hexdigest()


def _run(options: argparse.Namespace, device: torch.device) -> None:
    if options.bench:
        from benchmarks import machine  # needs torchops, as training in mode eager does not

        about = machine.describe(device)
        result = allreduce_bench.bench(device, about["machine"]) | about
        result["command"] = machine.command("examples/train_ddp.py", processes=dist.get_world_size())
    else:
        result = train(options, device)
    if dist.get_rank() == 0:
        if options.bench:
            print(allreduce_bench.report(result), end="")
        else:
            where = f"{dist.get_world_size()} processes, {dist.get_backend()}"
            print(f"{where}, {options.allreduce} all-reduce, {options.mode}: accuracy {result['accuracy']:.1%}, losses")
            print(*(f"{loss:.6f}" for loss in result["losses"]), f"parameters {result['digest'][:16]}")
        if options.json:
            options.json.write_text(json.dumps(result, indent=2) + "\n")


def main() -> int:
    """Trains, measures or prints a table, as the command line says; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--allreduce", choices=["default", "ring"], default="default")
    parser.add_argument("-m", "--mode", choices=MODES, default="eager", help="how the dense layers are computed")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda if there is one for every process")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=256, help="rows of all processes together")
    parser.add_argument("--bucket-kib", type=float, default=32, help="gradients that are reduced together")
    parser.add_argument("--bench", action="store_true", help="measure the all-reduces instead of training")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--table", type=Path, help="print a file written by --bench --json as Markdown")
    options = parser.parse_args()
    if options.table:
        print(allreduce_bench.report(json.loads(options.table.read_text())), end="")
        return 0
    if "LOCAL_RANK" not in os.environ:
        print("run it with torchrun: torchrun --standalone --nproc-per-node 2 examples/train_ddp.py", file=sys.stderr)
        return 2
    size, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    if options.batch % size:
        parser.error(f"--batch {options.batch} is not divisible by the {size} processes")
    enough = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device(options.device or ("cuda" if enough else "cpu"))
    if reason := unavailable(options.mode, device.type):
        parser.error(reason)
    if device.type == "cuda":
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    try:
        _run(options, device)
        dist.barrier()  # nobody leaves while another still waits for gloo
    finally:
        # The model holds the group. A thread of gloo that outlives Python aborts when it frees its last tensor.
        gc.collect()
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())

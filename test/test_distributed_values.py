"""Sharded operators and training on two processes, against one; the checks are in distributed_worker.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from distributed_worker import checks

FOLDER = Path(__file__).parent
CHECKS = list(checks())
GPUS = torch.cuda.device_count()


def outcomes(worker: str, checks: list[str], ranks: int, device: str, folder: Path) -> list[dict[str, str]]:
    """What each rank of `worker` says of each check."""
    # One machine: no name of it needs to be found in a network.
    env = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, "OMP_NUM_THREADS": "1"}
    path = os.pathsep.join(entry for entry in sys.path if entry)
    results = [folder / f"rank{rank}.json" for rank in range(ranks)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(FOLDER / worker), str(rank), device, str(folder / "rendezvous"), str(result)],
            env={**env, "PYTHONPATH": path},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, result in enumerate(results)
    ]
    try:
        errors = [process.communicate(timeout=240)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [
        json.loads(result.read_text()) if result.exists() else dict.fromkeys(checks, f"the process ended: {error}")
        for result, error in zip(results, errors, strict=True)
    ]


@pytest.fixture(scope="module")
def gloo(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return outcomes("distributed_worker.py", CHECKS, 2, "cpu", tmp_path_factory.mktemp("gloo"))


@pytest.fixture(scope="module")
def nccl(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return outcomes("distributed_worker.py", CHECKS, 2, "cuda", tmp_path_factory.mktemp("nccl"))


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("check", CHECKS)
def test_two_processes(check: str, gloo: list[dict[str, str]]) -> None:
    assert [rank[check] for rank in gloo] == ["", ""]


@pytest.mark.xdist_group("nccl")
@pytest.mark.skipif(GPUS < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("check", CHECKS if GPUS >= 2 else ["all"])
def test_two_gpus_cuda(check: str, nccl: list[dict[str, str]]) -> None:
    assert [rank[check] for rank in nccl] == ["", ""]

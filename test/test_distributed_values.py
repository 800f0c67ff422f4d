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

WORKER = Path(__file__).parent / "distributed_worker.py"
CHECKS = list(checks())
GPUS = torch.cuda.device_count()


def _outcomes(device: str, folder: Path) -> list[dict[str, str]]:
    """What each rank says of each check."""
    # One machine: no name of it needs to be found in a network.
    env = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, "OMP_NUM_THREADS": "1"}
    path = os.pathsep.join(entry for entry in sys.path if entry)
    results = [folder / f"rank{rank}.json" for rank in range(2)]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), device, str(folder / "rendezvous"), str(result)],
            env={**env, "PYTHONPATH": path},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, result in enumerate(results)
    ]
    try:
        errors = [rank.communicate(timeout=240)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [
        json.loads(result.read_text()) if result.exists() else dict.fromkeys(CHECKS, f"the process ended: {error}")
        for result, error in zip(results, errors, strict=True)
    ]


@pytest.fixture(scope="module")
def gloo(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return _outcomes("cpu", tmp_path_factory.mktemp("gloo"))


@pytest.fixture(scope="module")
def nccl(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return _outcomes("cuda", tmp_path_factory.mktemp("nccl"))


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("check", CHECKS)
def test_two_processes(check: str, gloo: list[dict[str, str]]) -> None:
    assert [rank[check] for rank in gloo] == ["", ""]


@pytest.mark.xdist_group("nccl")
@pytest.mark.skipif(GPUS < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("check", CHECKS if GPUS >= 2 else ["all"])
def test_two_gpus_cuda(check: str, nccl: list[dict[str, str]]) -> None:
    assert [rank[check] for rank in nccl] == ["", ""]

"""The triangle update of sharded tensors on four processes, against one; the checks are in
distributed_triangle_worker.py."""

from __future__ import annotations

import pytest
import torch
from distributed_triangle_worker import WORLD, checks
from test_distributed_values import outcomes

WORKER = "distributed_triangle_worker.py"
CHECKS = list(checks())
GPUS = torch.cuda.device_count()


@pytest.fixture(scope="module")
def gloo(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return outcomes(WORKER, CHECKS, WORLD, "cpu", tmp_path_factory.mktemp("gloo"))


@pytest.fixture(scope="module")
def nccl(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return outcomes(WORKER, CHECKS, WORLD, "cuda", tmp_path_factory.mktemp("nccl"))


@pytest.mark.xdist_group("gloo triangle")
@pytest.mark.parametrize("check", CHECKS)
def test_four_processes(check: str, gloo: list[dict[str, str]]) -> None:
    assert [rank[check] for rank in gloo] == [""] * WORLD


@pytest.mark.xdist_group("nccl")
@pytest.mark.skipif(GPUS < WORLD, reason=f"needs {WORLD} GPUs")
@pytest.mark.parametrize("check", CHECKS if GPUS >= WORLD else ["all"])
def test_four_gpus_cuda(check: str, nccl: list[dict[str, str]]) -> None:
    assert [rank[check] for rank in nccl] == [""] * WORLD

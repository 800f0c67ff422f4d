"""The ladder of docs/ladder.md and what else the examples teach: each step computes the same, and the commands run."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import climb
import pytest
import steps
import torch
from test_ptx import _assemble
from torch import Tensor

from benchmarks import ladder

ROOT = Path(__file__).parents[1]
# Whole tiles of no step, of some, and more than one of each.
SHAPES = [(1, 1, 1), (37, 19, 45), (6, 64, 32), (130, 40, 136)]

# One worker compiles the C++ steps.
pytestmark = pytest.mark.xdist_group("ladder")


def arguments(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> list[Tensor]:
    rows, features, out = shape
    sizes = ((rows, features), (out, features), (out,))
    return [torch.randn(size, device=device).to(dtype).requires_grad_() for size in sizes]


def of_device(device: str) -> list[steps.Step]:
    return [step for step in steps.STEPS if device in step.devices]


def same_as_float64(step: steps.Step, shape: tuple[int, ...], device: str, dtype: torch.dtype) -> None:
    try:
        dense = step.make()
    except steps.UnavailableError as reason:
        pytest.skip(str(reason))
    args = arguments(shape, device, dtype)
    exact = [t.detach().double().requires_grad_() for t in args]
    y, expected = dense(*args), torch.sigmoid(exact[0] @ exact[1].T + exact[2])
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(y, expected.to(dtype), rtol=tolerance, atol=tolerance)
    g = torch.randn_like(y)
    got, wanted = torch.autograd.grad(y, args, g), torch.autograd.grad(expected, exact, g.double())
    for one, other in zip(got, wanted, strict=True):
        scale = other.abs().max().item()
        torch.testing.assert_close(one.double(), other, rtol=0, atol=tolerance * max(scale, 1))


def test_a_step_that_fails_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> steps.Dense:
        raise subprocess.CalledProcessError(2, "nvcc")

    python = steps.STEPS[0]
    monkeypatch.setattr(steps, "STEPS", (python, steps.Step("3. C++", ("cpu",), fails)))
    found, missing = climb.available("cpu")
    assert list(found) == [python.name]
    assert missing == {"3. C++": "CalledProcessError: Command 'nvcc' returned non-zero exit status 2."}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("step", of_device("cpu"), ids=lambda step: step.name)
def test_step(step: steps.Step, shape: tuple[int, ...]) -> None:
    same_as_float64(step, shape, "cpu", torch.float32)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shape", [(1, 8, 8), (37, 24, 40), (300, 128, 264), (1000, 200, 128)], ids=str)
@pytest.mark.parametrize("step", of_device("cuda"), ids=lambda step: step.name)
def test_step_on_cuda(step: steps.Step, shape: tuple[int, ...]) -> None:
    same_as_float64(step, shape, "cuda", torch.bfloat16)


@pytest.mark.parametrize("name", ["dense_loops", "dense_vectors"])
def test_cpp_steps_refuse_what_they_cannot_read(name: str) -> None:
    x, w, b = arguments((3, 5, 7), "cpu", torch.float32)
    dense = steps.cpp(name)
    for wrong in ((x.double(), w, b), (x.T, w, b), (x, w[:, 1:].contiguous(), b), (x, w, b[1:])):
        with pytest.raises(RuntimeError, match="dense: expected"):
            dense(*wrong)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_cuda_steps_compile(arch: str, tmp_path: Path) -> None:
    try:
        ptx = steps.compile_cuda(tmp_path).decode()
    except steps.UnavailableError as reason:
        pytest.skip(str(reason))
    assert set(re.findall(r"\.entry (\w+)", ptx)) == set(steps.TILES)
    _assemble(ptx, arch, tmp_path)


def test_climb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["climb.py", "--device", "cpu", "--quick", "--shape", "60,16,40", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    assert climb.main() == 0
    (document,) = (json.loads(path.read_text()) for path in tmp_path.glob("*/ladder.json"))
    names = [step.name for step in of_device("cpu")]
    assert [case["threads"] for case in document["cases"]] == [1, torch.get_num_threads()]
    for case in document["cases"]:
        assert list(case["seconds"]) == names
        assert case["over the first"][names[0]] == 1
    table = ladder.table(document)
    assert [line.split(" | ")[0][2:] for line in table.splitlines()[2 : 2 + len(names)]] == names


def test_a_step_that_is_missing_or_wrong_is_in_the_table() -> None:
    case = {
        "shape": [2, 3, 4], "dtype": "bfloat16", "threads": None, "seconds": {"1. Python": 2e-3, "6. CUDA": 1e-3},
        "over the first": {"1. Python": 1.0, "6. CUDA": 0.4}, "other load": None,
        "missing": {"5. Triton": "triton is not installed"}, "wrong": {"7. CUDA, tensor cores": "wrong result"},
    }  # fmt: skip
    table = ladder.table({"ladder": {"machine": "a GPU", "torch": "2.13"}, "cases": [case]})
    assert table.splitlines()[2:6] == [
        "| 1. Python | 2.00 ms | 1.00x |",
        "| 5. Triton | triton is not installed |  |",
        "| 6. CUDA | 1.00 ms | 2.50x |",
        "| 7. CUDA, tensor cores | wrong result |  |",
    ]


# --- autograd --------------------------------------------------------------------------------------------------------


@pytest.fixture
def backward_graph() -> Any:
    """The program, whose graph needs torchviz, and not the program dot, which only draws it."""
    return importlib.import_module("backward_graph")


def test_backward_graph_has_our_nodes(backward_graph: Any) -> None:
    source = backward_graph.graph().source
    for label in ("torchops: Gate", "torchops: Softmax", "Sigmoid", "Mul", "gate.weight", "value.bias"):
        assert f'"{label}"' in source or f"label={label}" in source
    # One graph has our nodes in the place of the other's.
    ours, theirs = source.split("cluster in PyTorch")
    assert "Sigmoid" not in ours
    assert "torchops: " not in theirs


def test_picture_of_the_backward_graph(backward_graph: Any) -> None:
    """The committed one has the labels of the graph."""
    drawn = [text.text for text in ElementTree.parse(backward_graph.PICTURE).iter("{http://www.w3.org/2000/svg}text")]
    labels = [label.strip('"') for label in re.findall(r'label=("[^"]*"|[\w.]+)', backward_graph.graph().source)]
    assert sorted(filter(None, drawn)) == sorted(labels)


def test_hooks_modes_and_checkpoints() -> None:
    program = ROOT / "examples/hooks_modes_checkpoints.py"
    done = subprocess.run([sys.executable, program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "gradients: after softmax_, before softmax_, the weight has its gradient",
        "modules: Dense (4, 8)",
        "saved: 4 tensors; close: True",
        "recorded: True False True False",
        "version: 0 1 inference tensor: True",
        "a leaf: a leaf Variable that requires grad is being used in an in-place operation.",
        "a saved value: one of the variables needed for gradient computation has been modified",
        "checkpointing nothing: dense ran 1 times, softmax 1",
        "checkpointing all: dense ran 2 times, softmax 2",
        "checkpointing all but dense: dense ran 1 times, softmax 2",
    ]

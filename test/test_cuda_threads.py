"""A thread whose first call to CUDA is one of ours: it has no context yet, and TMA's descriptors want one."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import torchops

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def of_module(module: nn.Module, *shape: int) -> Callable[[], Tensor]:
    return partial(module.to("cuda", torch.bfloat16), random(*shape))


CALLS: dict[str, Callable[[], Callable[[], Tensor]]] = {
    "dense": lambda: of_module(torchops.nn.Dense(128, 128), 4096, 128),
    "gate": lambda: partial(torchops.gate, random(4096, 128), random(4096, 128), random(128, 128)),
    "glu": lambda: of_module(torchops.nn.GLU(128, 128), 4096, 128),
    "wide glu": lambda: of_module(torchops.nn.GLU(512, 512), 4096, 512),
    "square_matmul": lambda: partial(torchops.square_matmul, random(4, 256, 256), random(4, 256, 256)),
    "transition": lambda: of_module(torchops.nn.Transition(128, 512), 4096, 128),
    "triangle update": lambda: of_module(torchops.nn.TriangleMultiplicativeUpdate(128), 64, 64, 128),
}


def in_a_new_thread(call: Callable[[], Tensor]) -> Tensor:
    results: list[Tensor | BaseException] = []

    def work() -> None:
        try:
            results.append(call())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if isinstance(results[0], BaseException):
        raise results[0]
    return results[0]


@pytest.mark.parametrize("name", CALLS)
def test_a_new_thread(name: str) -> None:
    torch.manual_seed(0)
    call = CALLS[name]()
    with torch.no_grad():
        want = call().clone()  # what runs once in a process has run, and its memory is free for the other thread
        got = in_a_new_thread(lambda: torch.no_grad()(call)())
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_the_first_backward() -> None:
    """The thread of autograd has called nothing before; all that is looked up once in a process is known."""
    code = """
import torch, torchops
torch.manual_seed(0)
m = torchops.nn.TriangleMultiplicativeUpdate(128).to("cuda", torch.bfloat16)
x = torch.randn(32, 32, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
with torch.autograd.set_multithreading_enabled(False):
    torch.autograd.grad(m(x).sum(), [x, *m.parameters()])
torch.autograd.grad(m(x), [x, *m.parameters()], torch.ones_like(x))
torch.cuda.synchronize()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr

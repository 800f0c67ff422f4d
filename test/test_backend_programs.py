"""Forwards of random steps, some of them gates, by ``torch.compile(model, backend="torchops")`` beside eager mode."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from checks import assert_all_close
from torch import Tensor, nn

SIZES = 3, 5


class Program(nn.Module):
    """Five steps on two streams, with layers that may be one, without biases, or frozen."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        choose = random.Random(seed)
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=choose.random() < 0.7).double() for _ in range(4))
        self.steps = [choose.randrange(9) for _ in range(5)]
        if choose.random() < 0.3:
            self.layers[3] = self.layers[0]
        for p in self.parameters():
            p.requires_grad_(choose.random() < 0.8)

    def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        for i, step in enumerate(self.steps):
            a, b = self.layers[i % 4], self.layers[(i + 1) % 4]
            if step == 0:
                x = x * torch.sigmoid(a(v))
            elif step == 1:
                x = F.silu(a(x)) * b(x)
            elif step == 2:
                x = x + torch.sigmoid(a(x)) * v
            elif step == 3:
                v = F.glu(torch.cat([a(x), b(x)], -1), -1)
            elif step == 4:
                x = x.clone()
                x *= torch.sigmoid(b(v))
            elif step == 5:
                x, v = x.transpose(0, 1).contiguous().transpose(0, 1), v.sigmoid()
            elif step == 6:
                x = torch.sigmoid(a(x) + v) * v
            elif step == 7:
                x = x + 0
                x[0] += v[0]
                x = x * a(v).sigmoid()
            else:
                x = torch.relu(a(x)) * torch.sigmoid(b(x))
        return x, v


# Sizes of gradients are nodes of the graph if sizes are dynamic; 7, 37, 53, 61 and 115 have them between forward and
# backward.
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("seed", [*range(8), 37, 53, 61, 115])
def test_training(seed: int, dynamic: bool) -> None:
    torch.compiler.reset()
    program = Program(seed)
    compiled = torch.compile(program, backend="torchops", dynamic=dynamic)
    for size in SIZES:
        inputs = [torch.randn(size, 8, dtype=torch.float64) for _ in range(2)]
        found = []
        for function in (program, compiled):
            leaves = [t.clone().requires_grad_() for t in inputs]
            y, z = function(*leaves)
            wanted = [*leaves, *(p for p in program.parameters() if p.requires_grad)]
            grads = torch.autograd.grad(y.square().sum() + z.sum(), wanted, materialize_grads=True)
            found.append([y, z, *grads])
        assert_all_close(found[1], found[0], atol=1e-10, rtol=1e-10)

"""The report of replace() by class and share of the parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchops
from torchops import replace


class Gated(nn.Module):
    def __init__(self, n: int = 4) -> None:
        super().__init__()
        self.value, self.gate = nn.Linear(n, n), nn.Linear(n, n)

    def forward(self, x: Tensor) -> Tensor:
        return self.value(x) * self.gate(x).sigmoid()


class Fused(nn.Module):
    def __init__(self, of: Any) -> None:
        super().__init__()
        self.value, self.gate = of.value, of.gate

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.value, self.gate
        return torchops.glu(x, value.weight, gate.weight, value.bias, gate.bias)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList(Gated() for _ in range(3))
        self.plain, self.scale = Plain(), nn.Parameter(torch.ones(20))
        self.again = self.plain


def test_shares() -> None:
    """They add up to 1, and each parameter counts once, where it is used."""
    model: Any = Model()
    model.gates[1].gate.register_forward_hook(lambda *a: None)
    report = replace(model, {Gated: Fused})
    total = 3 * 40 + 20 + 20
    assert sum(share.parameters for share in report.shares) == pytest.approx(1)
    found = {(s.kind, s.fate): (s.modules, round(s.parameters * total), s.reason) for s in report.shares}
    assert found == {
        ("Gated", "replaced"): (2, 80, ""),
        ("Gated", "left"): (1, 40, "gate: Linear has hooks"),
        ("Plain", "not known"): (1, 20, ""),
        ("Model", "not known"): (1, 20, ""),
    }
    assert [share.parameters for share in report.shares] == sorted((s.parameters for s in report.shares), reverse=True)
    first = str(report).splitlines()[0]
    assert "Gated" in first
    assert "50.0%" in first
    assert "2 x  replaced" in first


def test_nothing_to_report() -> None:
    assert "Report(" in str(replace(nn.Identity()))

"""Writes what the C++ program beside this file serves: one model as an AOTInductor package and as TorchScript.

    python export.py OUT [--device cuda]

writes to the folder OUT

- ``router.pt2``: compiled ahead of time for the device, for any number of tokens from 1 on;
- ``router.ts``: the same model scripted, which moves to any device;
- ``reference.pt``: a list of (input, expected output) at several numbers of tokens, computed in eager mode.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

import torchops

FEATURES, HIDDEN, EXPERTS = 96, 160, 24
# One token needs its own entry: torch.export specialises sizes 0 and 1 unless the dimension allows them.
TOKENS = (1, 2, 7, 64, 1000)


class Router(nn.Module):
    """The router of a mixture of experts: for each token the probability of each expert.

    The hidden units are gated by one fused ``dense``; the logits are normalised in place.
    """

    def __init__(self, features: int = FEATURES, hidden: int = HIDDEN, experts: int = EXPERTS) -> None:
        super().__init__()
        self.value = nn.Linear(features, hidden)
        self.gate = torchops.nn.Dense(features, hidden)
        self.logits = nn.Linear(hidden, experts)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.logits(self.value(x) * self.gate(x))
        torchops.softmax_(logits)
        return logits


def export(out: Path, device: str) -> None:
    """Writes the three files; ``out`` is created if need be."""
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = Router().to(device).eval().requires_grad_(False)

    tokens = torch.export.Dim("tokens", min=1)
    program = torch.export.export(model, (torch.randn(5, FEATURES, device=device),), dynamic_shapes=({0: tokens},))
    torch._inductor.aoti_compile_and_package(program, package_path=str(out / "router.pt2"))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # TorchScript is; this shows that it works
        torch.jit.script(model).save(str(out / "router.ts"))

    inputs = [torch.randn(n, FEATURES, device=device) for n in TOKENS]
    torch.save([(x.cpu(), model(x).cpu()) for x in inputs], out / "reference.pt")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    arguments = parser.parse_args()
    export(arguments.out, arguments.device)

"""The same operators written in several ways: one name, a mode, for each way.

| mode | what runs |
|---|---|
| `cuda`, `cpp` | the operator of torchops, on CUDA and on the CPU |
| `triton` | Triton kernels, on CUDA only: `triton_dense.py`, `triton_softmax.py` |
| `compile` | `torch.compile` of the formula in `eager.py`; `compile-max` with autotuning |
| `eager` | the formula in `eager.py`, one PyTorch operator after the other |
| `py` | an `autograd.Function` with its backward written out: `py_*.py` |

Read them in the order eager, py, triton, and then `src/cpu` and `src/cuda`. All take tensors only, so that they can
stand in for each other: `dense(x, w, b)`, `gate(v, x, w, b)`, `glu(x, w, wg, b, bg)` and, with SiLU, `swiglu`,
`sigmoid(x)`, `softmax(x)`, `layer_norm(x, weight, bias)`, `square_matmul(a, b)`, and the forms that overwrite their
first argument, whose names end in `_`. Triton and torchops are imported when they are asked for.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Function = Callable[..., Any]

# In the order in which tables and pictures show them.
MODES = ("cuda", "cpp", "triton", "compile", "compile-max", "eager", "py")
OURS = ("cuda", "cpp")

_COMPILE_OPTIONS: dict[str, dict[str, Any]] = {
    "compile": {},
    "compile-max": {"mode": "max-autotune-no-cudagraphs"},
}
_MODULES = {
    "eager": ("eager",),
    "cuda": ("library",),
    "cpp": ("library",),
    "py": ("py_dense", "py_gates", "py_rows", "py_in_place"),
    "triton": ("triton_dense", "triton_softmax"),
}


def unavailable(mode: str, device_type: str) -> str:
    """Why a mode cannot run on a kind of device here, or an empty string."""
    needed = {"cuda": "cuda", "triton": "cuda", "cpp": "cpu"}.get(mode, device_type)
    if mode == "triton" and importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    interpreted = mode == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    if needed != device_type and not interpreted:
        return f"mode {mode} runs on {needed}, not on {device_type}"
    return ""


def find(op: str, mode: str) -> Function | None:
    """The implementation of an operator, or `None` where there is none in this mode.

    Each call in a compile mode returns a function that is compiled anew.

    Example::

        >>> find("softmax", "py")(torch.zeros(1, 2))
        tensor([[0.5000, 0.5000]])
    """
    if mode in _COMPILE_OPTIONS:
        formula = find(op, "eager")
        return formula and torch.compile(formula, dynamic=False, fullgraph=True, **_COMPILE_OPTIONS[mode])
    if op == "mlp":
        dense = find("dense", mode)
        return dense and mlp(dense)
    for name in _MODULES[mode]:
        functions: dict[str, Function] = importlib.import_module(f"{__name__}.{name}").FUNCTIONS
        if op in functions:
            return functions[op]
    return None


def mlp(dense: Function) -> Function:
    """A multi-layer perceptron of `dense` layers: `f(x, w1, b1, w2, b2, ...)`, each layer fed by the one before it."""

    def forward(x: Tensor, *parameters: Tensor) -> Tensor:
        for w, b in zip(parameters[::2], parameters[1::2], strict=True):
            x = dense(x, w, b)
        return x

    return forward


class Dense(nn.Linear):
    """`nn.Linear` with a sigmoid behind it, computed by the `dense` of one mode.

    Example::

        >>> Dense(3, 4, mode="py")(torch.zeros(2, 3)).shape
        torch.Size([2, 4])
    """

    def __init__(self, in_features: int, out_features: int, mode: str) -> None:
        super().__init__(in_features, out_features)
        function = find("dense", mode)
        assert function is not None
        self._function = function

    def forward(self, input: Tensor) -> Tensor:
        return self._function(input, self.weight, self.bias)

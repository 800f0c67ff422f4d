"""The same operators written in several ways: one name, a mode, for each way.

| mode | what runs |
|---|---|
| `cuda`, `cpp` | the operator of torchops, on CUDA and on the CPU |
| `compile-ours` | `torch.compile` of that operator |
| `quack`, `liger` | two libraries of GPU kernels, if they are installed (group `peers`): `quack_rows.py`, `liger.py` |
| `triton` | Triton kernels, on CUDA only: `triton_*.py` |
| `compile` | `torch.compile` of the formula in `eager.py`; `compile-max` with autotuning |
| `eager` | the formula in `eager.py`, one PyTorch operator after the other |
| `eager-in-place` | the same formula where every operator overwrites what it can, `torch.softmax(x, -1, out=x)` say |
| `py` | an `autograd.Function` with its backward written out: `py_*.py` |

Read them in the order eager, py, triton, and then `src/cpu` and `src/cuda`. All take tensors only, so that they can
stand in for each other: `dense(x, w, b)`, `gate(v, x, w, b)`, `glu(x, w, wg, b, bg)` and, with SiLU, `swiglu`,
`sigmoid(x)`, `softmax(x)`, `layer_norm(x, weight, bias)`, `square_matmul(a, b)`,
`transition(x, weight, bias, gate, up, down)`, and the forms that overwrite their first argument, whose names end in
`_`. Triton and torchops are imported when they are asked for.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Function = Callable[..., Any]

# In the order of tables and plots.
MODES = (
    "cuda",
    "cpp",
    "compile-ours",
    "quack",
    "liger",
    "triton",
    "compile",
    "compile-max",
    "eager",
    "eager-in-place",
    "py",
)
OURS = ("cuda", "cpp")

# What is compiled, with the options.
_COMPILED: dict[str, tuple[str, dict[str, Any]]] = {
    "compile-ours": ("cpp", {}),
    "compile": ("eager", {}),
    "compile-max": ("eager", {"mode": "max-autotune-no-cudagraphs"}),
}
_MODULES = {
    "eager": ("eager",),
    "eager-in-place": ("eager_in_place",),
    "cuda": ("library",),
    "cpp": ("library",),
    "py": ("py_dense", "py_gates", "py_rows", "py_in_place"),
    "triton": (
        "triton_dense",
        "triton_gates",
        "triton_softmax",
        "triton_rows",
        "triton_square_matmul",
        "triton_transition",
    ),
    "quack": ("quack_rows",),
    "liger": ("liger",),
}
# Packages that a mode needs: distribution and module. They only run on CUDA.
_PACKAGES = {
    "triton": ("triton", "triton"),
    "quack": ("quack-kernels", "quack"),
    "liger": ("liger-kernel", "liger_kernel"),
}


def unavailable(mode: str, device_type: str) -> str:
    """Why a mode cannot run here on a device type, or an empty string."""
    needed = {"cuda": "cuda", "cpp": "cpu"}.get(mode, "cuda" if mode in _PACKAGES else device_type)
    distribution, module = _PACKAGES.get(mode, ("", ""))
    if module and importlib.util.find_spec(module) is None:
        return f"{distribution} is not installed"
    interpreted = mode == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    if needed != device_type and not interpreted:
        return f"mode {mode} runs on {needed}, not on {device_type}"
    return _broken(mode)


@functools.cache
def _broken(mode: str) -> str:
    """Why an installed peer cannot be imported here, or an empty string."""
    try:
        for name in _MODULES[mode] if mode in ("quack", "liger") else ():
            importlib.import_module(f"{__name__}.{name}")
    except Exception as error:
        return f"{_PACKAGES[mode][0]} does not load: {type(error).__name__}: {error}".splitlines()[0]
    return ""


def find(op: str, mode: str) -> Function | None:
    """The implementation of an operator, or `None` if there is none in this mode.

    In a compile mode, each call returns a newly compiled function.

    Example::

        >>> find("softmax", "py")(torch.zeros(1, 2))
        tensor([[0.5000, 0.5000]])
    """
    if mode in _COMPILED:
        source, options = _COMPILED[mode]
        function = find(op, source)
        return function and torch.compile(function, dynamic=False, fullgraph=True, **options)
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

"""Layers of torchops in quantized models.

**torchao's tensors.** ``torchao.quantization.quantize_`` replaces the weights of ``nn.Linear`` by a tensor subclass:
also those of the layers of a :class:`torchops.nn.GLU`, and with ``filter_fn=quantizable`` those of a
:class:`torchops.nn.Dense` and a ``Gate``. With such a weight, ``dense``, ``gate`` and ``glu`` compute
``torch.nn.functional.linear``, with all that torchao does for it, and the rest after it. You don't have to call
anything for that.

**Quantizers of graphs** (PT2E, ``torchao.quantization.pt2e``) look for ``linear``, which :func:`written_out` puts into
an exported program.

Neither uses the fused eight-bit operators, which are :func:`torchops.dense_scaled`, ``gate_scaled`` and ``glu_scaled``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from torchops.nn import Dense, Gate, layers

if TYPE_CHECKING:
    from torch.export import ExportedProgram

__all__ = ["quantizable", "written_out"]


def quantizable(module: nn.Module, name: str = "") -> bool:
    """Whether torchao can quantize the weight of ``module``: a ``filter_fn`` for ``torchao.quantization.quantize_``.

    torchao's own takes every ``nn.Linear`` and nothing else. This one also takes :class:`torchops.nn.Dense` and
    ``Gate``, and leaves out the layers of the pair modules, whose operators need plain weights. It is for
    configurations that replace weights. Those that replace modules, such as ``QATConfig``, raise for a ``Dense``.

    Args:
        module: a part of the model.
        name: its name in the model, which does not matter.

    Example:

        >>> torchops.quantization.quantizable(torchops.nn.Dense(3, 4))
        True
        >>> torchops.quantization.quantizable(torchops.nn.Transition(3).fc1)
        False
    """
    if isinstance(module, nn.Linear):
        # Of attention, which reads the weight of this layer for a kernel of its own.
        return not isinstance(module, (layers.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear))
    return isinstance(module, (Dense, Gate))


def _dense(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    return torch.sigmoid(linear(x, w, b))


def _gate(v: Tensor, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    return v * torch.sigmoid(linear(x, w, b))


def _glu(
    x: Tensor,
    w: Tensor,
    wg: Tensor,
    b: Tensor | None = None,
    bg: Tensor | None = None,
    *,
    activation: str = "sigmoid",
) -> Tensor:
    act = silu if activation == "silu" else torch.sigmoid
    return linear(x, w, b) * act(linear(x, wg, bg))


_WRITTEN_OUT = (
    (torch.ops.myops.dense, _dense),
    (torch.ops.myops.gate, _gate),
    (torch.ops.myops.glu, _glu),
)


def written_out(program: ExportedProgram) -> ExportedProgram:
    """Returns the program with ``dense``, ``gate`` and ``glu`` written as ``aten.linear`` and what follows it.

    Use it for quantizers of graphs, before ``prepare_pt2e``. They find a ``linear`` by its metadata, which this
    function adds. Arguments must be of one dtype, as for ``linear``. All other operators stay.

    Args:
        program: what ``torch.export.export`` returned.

    Returns:
        A new program.

    Raises:
        RuntimeError: dtypes are mixed.

    Example:

        >>> layer = torchops.nn.Dense(3, 4).eval()
        >>> program = torch.export.export(layer, (torch.zeros(2, 3),))
        >>> nodes = torchops.quantization.written_out(program).graph.nodes
        >>> print(*(node.target for node in nodes if node.op == "call_function"))
        aten.linear.default aten.sigmoid.default
    """
    former = {node.name for node in program.graph.nodes if node.target is torch.ops.aten.linear.default}
    program = program.run_decompositions({packet.default: function for packet, function in _WRITTEN_OUT})
    for node in program.graph.nodes:
        if node.target is torch.ops.aten.linear.default and node.name not in former:
            node.meta["source_fn_stack"] = [(node.name, linear)]
    return program


def register_with_torchao() -> None:
    """Tell torchao's subclasses: those that exist, and, through their base, those that will."""
    from torchao.utils import TorchAOBaseTensor

    for cls in _with_subclasses(TorchAOBaseTensor):
        for packet, function in _WRITTEN_OUT:
            cls.implements_torch_function([packet, packet.default])(_handler(function, _CHECKS.get(packet)))


def _with_subclasses(cls: Any) -> Iterator[Any]:
    yield cls
    for subclass in cls.__subclasses__():
        yield from _with_subclasses(subclass)


def _check_gate(v: Tensor, x: Tensor, w: Tensor, b: Tensor | None = None) -> None:
    shape = (*x.shape[:-1], w.shape[0])
    if tuple(v.shape) != shape:
        raise RuntimeError(f"gate: expected v of shape {shape} to match x and w, got {tuple(v.shape)}")


def _check_glu(*args: Any, activation: str = "sigmoid") -> None:
    if activation not in ("sigmoid", "silu"):
        raise ValueError(f"glu: expected activation sigmoid or silu, got {activation}")


# What `linear` and the rest after it would let pass: the operators are not called, so neither are their checks.
_CHECKS: dict[Any, Callable[..., None]] = {torch.ops.myops.gate: _check_gate, torch.ops.myops.glu: _check_glu}


def _handler(function: Callable[..., Tensor], check: Callable[..., None] | None) -> Callable[..., Tensor]:
    def call(func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
        if check is not None:
            check(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))

    return call

"""What a survey draws: an operator's sizes, its arguments, and PyTorch's ways to the same result.

A draw depends on the seed, the operator, the task, its number and the type of device, so
each can be drawn again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor

import torchops

from ..case import BACKWARD, FORWARD, Task
from ..square_matmul import orthogonal
from . import attention
from .sizes import Function, Limits, Sizes, size

__all__ = ["SURVEYED", "Draw", "Surveyed", "draw"]

# The choices of each device. A CPU of two cores would take minutes for a GPU's largest.
_ELEMENTS = {"cuda": 1 << 27, "cpu": 1 << 22}
_FLOPS = {"cuda": 4e11, "cpu": 5e8}
_DTYPES = {
    "cuda": (torch.bfloat16, torch.bfloat16, torch.float16, torch.float32),
    "cpu": (torch.float32, torch.float32, torch.bfloat16),
}
_FLOAT32_SLOWER = 12  # than 16 bits by tensor cores


@dataclass(frozen=True)
class Surveyed:
    """An operator: how it is called, and PyTorch's ways to the same result.

    `sizes` draws, and returns None for a size that the limits do not allow. `tensors` makes the arguments of ours and
    of the others, all of which get gradients in training. `training` names those of `eager` that have gradients for all
    of them.
    """

    name: str
    sizes: Callable[[Random, Limits], Sizes | None]
    tensors: Callable[[Sizes, Callable[..., Tensor]], tuple[Tensor | None, ...]]
    ours: Callable[[Sizes], Function]
    eager: Callable[[Sizes], Mapping[str, Function]]
    tasks: tuple[Task, ...] = (FORWARD, BACKWARD)
    training: tuple[str, ...] = ("eager",)


@dataclass(frozen=True)
class Draw:
    """One call of one operator."""

    op: Surveyed
    task: Task
    number: int
    sizes: Sizes
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return f"{self.op.name}, {self.task}"

    def tensors(self, device: torch.device) -> tuple[Tensor, ...]:
        """The arguments, and the cotangent behind them if there are gradients."""

        def new(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(shape, device=device) * scale).to(self.dtype)

        given = tuple(t for t in self.op.tensors(self.sizes, new) if t is not None)
        if self.task == FORWARD:
            return given
        with torch.no_grad():
            cotangent = torch.randn_like(self.op.ours(self.sizes)(*given))
        return *(t.requires_grad_() for t in given), cotangent

    def ways(self) -> dict[str, Function]:
        """Ours first."""
        others = self.op.eager(self.sizes)
        if self.task == BACKWARD:
            others = {name: others[name] for name in self.op.training}
        return {"torchops": self.op.ours(self.sizes), **others}


def draw(op: Surveyed, task: Task, seed: int, number: int, device_type: str) -> Draw:
    """The draw of this number."""
    random = Random(f"{seed} {op.name} {task} {number}")
    dtype = random.choice(_DTYPES[device_type])
    slower = _FLOAT32_SLOWER if device_type == "cuda" and dtype == torch.float32 else 1
    limits = Limits(_ELEMENTS[device_type], _FLOPS[device_type] / slower / (3 if task == BACKWARD else 1))
    while (sizes := op.sizes(random, limits)) is None:
        pass
    return Draw(op, task, number, sizes, dtype)


# --- layers ----------------------------------------------------------------------------------------------------------


def _layer(random: Random, limits: Limits) -> Sizes | None:
    rows, k, n = size(random, 1, 1 << 20), size(random, 8, 8192), size(random, 8, 8192)
    sizes = {"rows": rows, "in": k, "out": n, "bias": random.random() < 0.6}
    return sizes if limits.allow(2.0 * rows * k * n, rows * max(k, n), 2 * n * k) else None


def _dense_tensors(s: Sizes, new: Callable[..., Tensor]) -> tuple[Tensor | None, ...]:
    bias = new(s["out"]) if s["bias"] else None
    return new(s["rows"], s["in"]), new(s["out"], s["in"], scale=s["in"] ** -0.5), bias


def _gate_tensors(s: Sizes, new: Callable[..., Tensor]) -> tuple[Tensor | None, ...]:
    return new(s["rows"], s["out"]), *_dense_tensors(s, new)


def _glu_sizes(random: Random, limits: Limits) -> Sizes | None:
    sizes = _layer(random, Limits(limits.elements // 2, limits.flops / 2))
    choices = {"activation": random.choice(["sigmoid", "silu"]), "packed": random.choice([True, False])}
    return sizes and {**sizes, "bias": False, **choices}


def _glu_tensors(s: Sizes, new: Callable[..., Tensor]) -> tuple[Tensor | None, ...]:
    weights = 1 if s["packed"] else 2
    shape = (2 // weights * s["out"], s["in"])
    return new(s["rows"], s["in"]), *(new(*shape, scale=s["in"] ** -0.5) for _ in range(weights))


def _glu(s: Sizes) -> Function:
    def ours(x: Tensor, *weights: Tensor) -> Tensor:
        return torchops.glu(x, *(weights[0].chunk(2) if s["packed"] else weights), activation=s["activation"])

    return ours


def _glu_ways(s: Sizes) -> dict[str, Function]:
    activations: dict[str, Function] = {"sigmoid": torch.sigmoid, "silu": F.silu}
    activation = activations[s["activation"]]

    def eager(x: Tensor, *weights: Tensor) -> Tensor:
        w, wg = weights[0].chunk(2) if s["packed"] else weights
        return F.linear(x, w) * activation(F.linear(x, wg))

    def of_packed(x: Tensor, both: Tensor) -> Tensor:
        value, gate = F.linear(x, both).chunk(2, -1)
        return value * activation(gate)

    return {"eager": eager, **({"one product of packed weights": of_packed} if s["packed"] else {})}


def _square_sizes(random: Random, limits: Limits) -> Sizes | None:
    rows, n = size(random, 1, 1 << 20), size(random, 8, 8192)
    return {"rows": rows, "n": n} if limits.allow(2.0 * rows * n * n, rows * n, n * n) else None


def _square_tensors(s: Sizes, new: Callable[..., Tensor]) -> tuple[Tensor | None, ...]:
    b = new(s["n"], s["n"], scale=s["n"] ** -0.5)
    return new(s["rows"], s["n"]), orthogonal(b.float()).to(b.dtype)


# --- rows ------------------------------------------------------------------------------------------------------------


def _row_sizes(random: Random, limits: Limits) -> Sizes | None:
    rows, n = size(random, 1, 1 << 20), size(random, 2, 1 << 17)
    return {"rows": rows, "n": n} if 1 << 12 <= rows * n <= limits.elements else None


def _matrix(s: Sizes, new: Callable[..., Tensor]) -> tuple[Tensor | None, ...]:
    return (new(s["rows"], s["n"]),)


# --- pair layers -----------------------------------------------------------------------------------------------------


def _transition_sizes(random: Random, limits: Limits) -> Sizes | None:
    rows = size(random, 64, 1 << 19)
    c = random.choice([16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768])
    hidden = c * random.choice([2, 4])
    return {"rows": rows, "c": c, "hidden": hidden} if limits.allow(6.0 * rows * c * hidden, rows * hidden) else None


def _transition_tensors(s: Sizes, new: Callable[..., Tensor]) -> tuple[Tensor | None, ...]:
    c, hidden = s["c"], s["hidden"]
    gate, up = (new(hidden, c, scale=c**-0.5) for _ in range(2))
    return new(s["rows"], c), new(c), new(c), gate, up, new(c, hidden, scale=hidden**-0.5)


def _transition(s: Sizes) -> Function:
    names = ("norm_weight", "norm_bias", "gate_weight", "up_weight", "down_weight")
    return lambda x, *w: torchops.transition(x, **dict(zip(names, w, strict=True)))


def _eager_transition(x: Tensor, norm: Tensor, bias: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    z = F.layer_norm(x, x.shape[-1:], norm, bias)
    return F.linear(F.silu(F.linear(z, gate)) * F.linear(z, up), down)


def _outer_product_sizes(random: Random, limits: Limits) -> Sizes | None:
    n, sequences = size(random, 16, 900), size(random, 1, 8192)
    c, out = random.choice([8, 16, 32, 32]), random.choice([32, 64, 128, 128, 256])
    products = n * n * c * c
    sizes = {"S": sequences, "N": n, "C": c, "out": out}
    return sizes if limits.allow(2.0 * products * (sequences + out), products, sequences * n * c) else None


def _outer_product_tensors(s: Sizes, new: Callable[..., Tensor]) -> tuple[Tensor | None, ...]:
    a, b = (new(1, s["S"], s["N"], s["C"], scale=s["S"] ** -0.25) for _ in range(2))
    return a, b, new(s["out"], s["C"] ** 2, scale=1 / s["C"]), new(s["out"])


def _eager_outer_product(a: Tensor, b: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(torch.einsum("zsic,zsjd->zijcd", a, b).flatten(-2), weight, bias)


def _triangle_sizes(random: Random, limits: Limits) -> Sizes | None:
    n, c = size(random, 16, 900), random.choice([16, 32, 64, 96, 128, 128, 192, 256])
    sizes = {"N": n, "c": c, "direction": random.choice(["outgoing", "incoming"])}
    return sizes if limits.allow(n * n * c * (12.0 * c + 2 * n), 2 * n * n * c) else None


def _triangle_tensors(s: Sizes, new: Callable[..., Tensor]) -> tuple[Tensor | None, ...]:
    n, c = s["N"], s["c"]

    def weight(rows: int) -> Tensor:
        return new(rows, c, scale=c**-0.5)

    return (new(1, n, n, c), new(c), new(c), weight(2 * c), weight(2 * c), new(c), new(c), weight(c), weight(c))


def _triangle(s: Sizes) -> Function:
    steps = ("norm_in_weight", "norm_in_bias", "p_in_weight", "g_in_weight")
    names = (*steps, *(name.replace("_in_", "_out_") for name in steps))
    return lambda x, *w: torchops.triangle_multiplicative_update(x, s["direction"], **dict(zip(names, w, strict=True)))


def _triangle_ways(s: Sizes) -> dict[str, Function]:
    def eager(x: Tensor, *w: Tensor) -> Tensor:
        z = F.layer_norm(x, x.shape[-1:], w[0], w[1])
        factors = torch.sigmoid(F.linear(z, w[3])) * F.linear(z, w[2])
        a, b = factors.movedim(-1, 1).contiguous().chunk(2, 1)
        o = (a @ b.mT if s["direction"] == "outgoing" else a.mT @ b).movedim(1, -1)
        return F.linear(F.layer_norm(o, x.shape[-1:], w[4], w[5]), w[6]) * torch.sigmoid(F.linear(z, w[7]))

    return {"eager": eager}


SURVEYED = {
    op.name: op
    for op in (
        Surveyed(
            "dense",
            _layer,
            _dense_tensors,
            lambda s: torchops.dense,
            lambda s: {
                "eager": lambda *args: torch.sigmoid(F.linear(*args)),
                "in place": lambda *args: F.linear(*args).sigmoid_(),
            },
        ),
        Surveyed(
            "gate",
            _layer,
            _gate_tensors,
            lambda s: torchops.gate,
            lambda s: {
                "eager": lambda v, *args: v * torch.sigmoid(F.linear(*args)),
                "in place": lambda v, *args: F.linear(*args).sigmoid_().mul_(v),
            },
        ),
        Surveyed(
            "glu",
            _glu_sizes,
            _glu_tensors,
            _glu,
            _glu_ways,
        ),
        Surveyed(
            "square_matmul_",
            _square_sizes,
            _square_tensors,
            lambda s: torchops.square_matmul_,
            lambda s: {"eager": lambda a, b: a.copy_(a @ b)},
            (FORWARD,),
        ),
        Surveyed(
            "softmax",
            _row_sizes,
            _matrix,
            lambda s: lambda x: torchops.softmax(x, -1),
            lambda s: {"eager": lambda x: torch.softmax(x, -1)},
        ),
        Surveyed(
            "softmax_",
            _row_sizes,
            _matrix,
            lambda s: lambda x: torchops.softmax_(x, -1),
            lambda s: {"eager": lambda x: torch.softmax(x, -1, out=x)},
            (FORWARD,),
        ),
        Surveyed(
            "layer_norm",
            _row_sizes,
            lambda s, new: (new(s["rows"], s["n"]), new(s["n"]), new(s["n"])),
            lambda s: lambda x, *affine: torchops.layer_norm(x, x.shape[-1:], *affine),
            lambda s: {"eager": lambda x, *affine: F.layer_norm(x, x.shape[-1:], *affine)},
        ),
        Surveyed(
            "sigmoid",
            _row_sizes,
            _matrix,
            lambda s: torchops.sigmoid,
            lambda s: {"eager": torch.sigmoid},
        ),
        Surveyed(
            "sigmoid_",
            _row_sizes,
            _matrix,
            lambda s: torchops.sigmoid_,
            lambda s: {"eager": torch.sigmoid_},
            (FORWARD,),
        ),
        Surveyed(
            "transition", _transition_sizes, _transition_tensors, _transition, lambda s: {"eager": _eager_transition}
        ),
        Surveyed(
            "outer_product_mean",
            _outer_product_sizes,
            _outer_product_tensors,
            lambda s: torchops.outer_product_mean,
            lambda s: {"eager": _eager_outer_product},
        ),
        Surveyed("triangle_multiplicative_update", _triangle_sizes, _triangle_tensors, _triangle, _triangle_ways),
        Surveyed(
            "triangle_attention",
            attention.sizes,
            attention.tensors,
            lambda s: torchops.triangle_attention,
            lambda s: {"SDPA": attention.sdpa},
            training=("SDPA",),
        ),
        Surveyed(
            "triangle_attention of samples",
            attention.sample_sizes,
            attention.sample_tensors,
            lambda s: torchops.triangle_attention,
            lambda s: {"SDPA": attention.sdpa},
            training=("SDPA",),
        ),
        Surveyed(
            "attention_pair_bias",
            attention.sample_sizes,
            attention.pair_bias_tensors,
            attention.pair_bias,
            lambda s: {"eager": attention.eager_pair_bias(s)},
        ),
    )
}

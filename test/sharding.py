"""What each operator does with sharded arguments: the cases of test_distributed.py (placements) and
distributed_worker.py (values).

A case is one line: the placement of each tensor among the arguments, that of the result, and what has to be
communicated for it, forward and backward:

    S2 S1 R -> R : all_reduce / none

R is replicated, S1 sharded along dimension 1, P a partial sum. `-> refused` marks an operator that would have to move
the tensor that it overwrites.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from op_db import OPS, OpCase
from samples import Arguments, Make, arguments
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._pytree import tree_map_only

REFUSED = "refused"


@dataclass(frozen=True)
class ShardingCase:
    case: OpCase
    variant: str
    build: Callable[[Make], Arguments]
    line: str

    @property
    def name(self) -> str:
        return f"{self.case.name}{self.variant} {self.line}"

    @property
    def inputs(self) -> list[Placement]:
        return [placement(text) for text in self.line.split("->")[0].split()]

    @property
    def refused(self) -> bool:
        return self.line.endswith(REFUSED)

    @property
    def sequence_product(self) -> bool:
        """Whether the gradient of a product merges dimensions of which the second is sharded."""
        return self.case.name.startswith(
            ("dense", "gate", "glu", "square_matmul", "transition")
        ) and self.line.startswith("S1")

    @property
    def output(self) -> Placement:
        return placement(self.line.split("->")[1].split(":")[0].strip())

    @property
    def communication(self) -> tuple[str, str]:
        """Forward and backward."""
        forward, _, backward = self.line.partition(":")[2].partition("/")
        return forward.strip() or "none", backward.strip() or "none"

    def sharded(self, mesh: DeviceMesh, full: Arguments) -> Arguments:
        """The arguments as distributed leaves with the values of `full`."""
        placements = iter(self.inputs)
        return tree_map_only(Tensor, lambda t: distribute(t, mesh, next(placements)), full)


def placement(text: str) -> Placement:
    if text == "R":
        return Replicate()
    return Partial() if text == "P" else Shard(int(text[1:]))


def distribute(full: Tensor, mesh: DeviceMesh, where: Placement) -> Any:
    """`full`, which every rank has, as a leaf; a partial sum has all of it on rank 0."""
    if isinstance(where, Partial):
        part = full.detach() * (mesh.get_local_rank() == 0)
        out = DTensor.from_local(part, mesh, [where], run_check=False)
    else:
        out = distribute_tensor(full.detach(), mesh, [where], src_data_rank=None)
    return out.requires_grad_(full.requires_grad)


def merges_sharded_dims(mesh: DeviceMesh) -> bool:
    """Torch before 2.13 (seen on 2.11) cannot, and refuses the gradient of nn.Linear for sharded sequences as well."""
    try:
        distribute(torch.zeros(2, 4, 3), mesh, Shard(1)).view(8, 3)
    except RuntimeError:
        return False
    return True


class Communication:
    """Counts collectives within it; `str` of it reads like the cases."""

    def __enter__(self) -> Communication:
        self.mode = CommDebugMode()
        self.mode.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self.mode.__exit__(*exc)

    def __str__(self) -> str:
        counts = self.mode.get_comm_counts()
        names = {getattr(op, "_overloadpacket", op).__name__.split("_tensor")[0]: n for op, n in counts.items()}
        names = {name.removesuffix("_into"): n for name, n in names.items()}
        return ", ".join(f"{n} {name}" if n > 1 else name for name, n in names.items()) or "none"


def _layer_norm(dims: int, affine: bool) -> Callable[[Make], Arguments]:
    def build(t: Make) -> Arguments:
        x = t(4, 5, 7)
        shape = list(x.shape[-dims:])
        return arguments(x, shape, *([t(*shape), t(*shape)] if affine else []))

    return build


def _transition(t: Make) -> Arguments:
    weights = {"gate_weight": t(9, 7), "gate_bias": t(9), "up_weight": t(9, 7), "down_weight": t(7, 9)}
    return arguments(t(4, 5, 7), norm_weight=t(7), **weights, down_bias=t(7))


def _outer_product_mean(t: Make, bias: Tensor | None) -> Arguments:
    norm = t(4, 5, 7, view=lambda n: n.abs() + 1)
    return arguments(t(4, 3, 5, 2), t(4, 3, 7, 3), t(9, 6), bias, norm)


# Sizes that two ranks cannot share evenly.
BUILD: dict[str, Callable[[Make], Arguments]] = {
    "dense": lambda t: arguments(t(4, 5, 7), t(9, 7), t(9)),
    "dense no bias": lambda t: arguments(t(4, 5, 7), t(9, 7)),
    "dense vector": lambda t: arguments(t(7), t(9, 7), t(9)),
    "gate": lambda t: arguments(t(4, 5, 9), t(4, 5, 7), t(9, 7), t(9)),
    "gate no bias": lambda t: arguments(t(4, 5, 9), t(4, 5, 7), t(9, 7)),
    "glu": lambda t: arguments(t(4, 5, 7), t(9, 7), t(9, 7), t(9), t(9)),
    "glu gate bias": lambda t: arguments(t(4, 5, 7), t(9, 7), t(9, 7), None, t(9), activation="silu"),
    "outer_product_mean": lambda t: _outer_product_mean(t, t(9)),
    "outer_product_mean no bias": lambda t: _outer_product_mean(t, None),
    "sigmoid": lambda t: arguments(t(4, 5, 7)),
    "square_matmul": lambda t: arguments(t(4, 5, 7), t(7, 7)),
    "square_matmul transposed": lambda t: arguments(t(4, 5, 7), t(7, 7), transpose_b=True),
    "square_matmul batch": lambda t: arguments(t(4, 5, 7), t(4, 7, 7)),
    "softmax": lambda t: arguments(t(4, 5, 7)),
    "softmax 1": lambda t: arguments(t(4, 5, 7), 1),
    "layer_norm": _layer_norm(1, affine=True),
    "layer_norm plain": _layer_norm(1, affine=False),
    "layer_norm plain 2": _layer_norm(2, affine=False),
    "transition": _transition,
}

LINES: dict[str, str] = {
    "dense": """
        R R R -> R
        S0 R R -> S0
        S1 R R -> S1
        R S0 S0 -> S2
        R S0 R -> S2
        S2 S1 R -> R : all_reduce
        R S1 R -> R : all_reduce
        S2 R R -> R : all_gather
        S2 S0 S0 -> S2 : all_gather / all_gather
        S1 S1 R -> S1 : all_gather / all_gather
        P R R -> S0 : reduce_scatter / reduce_scatter
    """,
    "dense no bias": """
        S1 R -> S1
        R S0 -> S2
        S2 S1 -> R : all_reduce
    """,
    "dense vector": """
        R S0 S0 -> S0
        S0 S1 R -> R : all_reduce
    """,
    "gate": """
        R R R R -> R
        S0 S0 R R -> S0
        S1 S1 R R -> S1
        S2 R S0 S0 -> S2
    """,
    "gate no bias": """
        S1 S1 R -> S1
        S2 R S0 -> S2
    """,
    "gate_": """
        R R R R -> R
        S0 S0 R R -> S0
        S1 S1 R R -> S1
        S2 R S0 S0 -> S2
        P R R R -> refused
    """,
    "glu": """
        R R R R R -> R
        S0 R R R R -> S0
        S1 R R R R -> S1
        R S0 S0 S0 S0 -> S2
    """,
    "glu gate bias": """
        S1 R R R -> S1
        R S0 S0 S0 -> S2
    """,
    "outer_product_mean": """
        R R R R R -> R
        S0 S0 R R S0 -> S0
        S2 R R R S1 -> S1
        R S2 R R S2 -> S2
        R R S0 S0 R -> S3
    """,
    "outer_product_mean no bias": """
        S0 S0 R S0 -> S0
        S1 S1 R R -> P
    """,
    "sigmoid": """
        R -> R
        S0 -> S0
        S2 -> S2
        P -> S0 : reduce_scatter
    """,
    "sigmoid_": """
        R -> R
        S0 -> S0
        S2 -> S2
        P -> refused
    """,
    "square_matmul": """
        R R -> R
        S0 R -> S0
        S1 R -> S1
        S2 R -> P
        R S0 -> P
        R S1 -> S2
        S2 S0 -> P
        S2 S1 -> S2 : all_gather / all_gather
        P R -> P
    """,
    "square_matmul transposed": """
        S1 R -> S1
        R S0 -> S2
        R S1 -> P
        S2 S0 -> S2 : all_gather / all_gather
        S2 S1 -> P
    """,
    "square_matmul batch": """
        R R -> R
        S0 S0 -> S0
        S1 R -> S1
        P R -> P
    """,
    "square_matmul_ batch": """
        S0 S0 -> S0
        S1 R -> S1
        S2 R -> refused
    """,
    "square_matmul_": """
        R R -> R
        S0 R -> S0
        S1 R -> S1
        P R -> P
        R S0 -> R : all_gather / none
        S2 R -> refused
        S2 S0 -> refused
    """,
    "softmax": """
        R -> R
        S0 -> S0
        S1 -> S1
        S2 -> R : all_gather
        P -> S0 : reduce_scatter
    """,
    "softmax 1": """
        S0 -> S0
        S1 -> R : all_gather
        S2 -> S2
    """,
    "softmax_": """
        R -> R
        S0 -> S0
        S1 -> S1
        S2 -> refused
        P -> refused
    """,
    "softmax_ 1": """
        S1 -> refused
        S2 -> S2
    """,
    "layer_norm": """
        R R R -> R
        S0 R R -> S0
        S1 R R -> S1
        S1 S0 S0 -> S1 : 2 all_gather / all_gather
        S2 R R -> R : all_gather / all_gather
    """,
    "layer_norm plain": """
        S1 -> S1
    """,
    "layer_norm plain 2": """
        S0 -> S0
        S1 -> R : all_gather / all_gather
    """,
    "layer_norm_": """
        R R R -> R
        S0 R R -> S0
        S1 R R -> S1
        S2 R R -> refused
    """,
    "layer_norm_ plain": """
        S1 -> S1
    """,
    "layer_norm_ plain 2": """
        S0 -> S0
        S1 -> refused
    """,
    "transition": """
        R R R R R R R -> R
        S0 R R R R R R -> S0
        S1 R R R R R R -> S1
        R R S0 S0 S0 S1 R -> P
        S2 R R R R R R -> R : all_gather / all_gather
    """,
    "add_transition_": """
        R R R R R R R -> R
        S0 R R R R R R -> S0
        S1 R R R R R R -> S1
        R R S0 S0 S0 S1 R -> R : all_reduce / none
        S2 R R R R R R -> refused
    """,
}


def _cases() -> Iterator[ShardingCase]:
    for key, lines in LINES.items():
        op, _, variant = key.partition(" ")
        case = next(case for case in OPS if case.name == op)
        build = BUILD[f"{case.twin or op} {variant}".strip()]
        for line in lines.strip().splitlines():
            yield ShardingCase(case, f" {variant}" if variant else "", build, line.strip())


CASES = tuple(_cases())

"""The way of the triangle update of sharded rows that GPUs of compute capability 9.0 take: checks for
distributed_triangle_worker.py, with the kernels of distributed_hopper_kernels.py, and for distributed_worker.py, whose
two GPUs may have the library's."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_hopper_kernels import replaced
from sharding import distribute, placement
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

import torchops
from torchops.distributed import symmetric_memory
from torchops.distributed.symmetric_memory import Collectives
from torchops.distributed.triangle import hopper, hopper_gradients

Arguments = Callable[..., dict[str, Tensor]]
AgainstReference = Callable[..., None]


def check_blocks(
    n: int, blocks: list[int], shares: bool, against_reference: AgainstReference, arguments: Arguments, mesh: Any
) -> None:
    """Values and gradients, against the whole tensor in one process."""
    for direction in ("outgoing", "incoming"):
        for mask in ("float", "bool", None):
            with replaced(shares=shares) as made:
                rows = [placement("S1")]
                against_reference(arguments(n, mask, plain=mask is None), direction, mesh, rows, rows)
            # Of each element of the batch of 4: once without gradients, then with; and in the backward pass, all rows
            # at once, unless the mask needs a gradient.
            again = [] if mask == "float" else [sum(blocks)] * 4
            assert made == (blocks if direction == "outgoing" else [sum(blocks)]) * 8 + again, made


def check_narrow(shares: bool, arguments: Arguments, mesh: Any) -> None:
    """Rows that end in padding, no batch, and sizes that a block doesn't divide; also in place."""
    for direction in ("outgoing", "incoming"):
        given: Any = arguments(20, "bool", dtype=torch.float32)
        given |= {"x": given["x"][0], "mask": given["mask"][0]}
        expected = torchops.triangle_multiplicative_update(**given, direction=direction)
        ours = {k: distribute(v, mesh, placement("S0" if k in ("x", "mask") else "R")) for k, v in given.items()}
        with replaced(shares=shares) as made:
            out: Any = torchops.triangle_multiplicative_update(**ours, direction=direction)
            torch.testing.assert_close(out.full_tensor(), expected)
            local, x = ours["x"].to_local().data_ptr(), given["x"]
            torchops.add_triangle_multiplicative_update_(**ours, direction=direction)
            torch.testing.assert_close(ours["x"].full_tensor(), x + expected)
            assert ours["x"].to_local().data_ptr() == local
        assert made == ([3, 2] if direction == "outgoing" else [5]) * 2, made


def check_strided(arguments: Arguments, mesh: Any) -> None:
    """In place, with local rows that are not contiguous."""
    given: Any = arguments(8)
    x = given.pop("x")
    expected = x + torchops.triangle_multiplicative_update(x, **given)
    own = distribute_tensor(x, mesh, [placement("S1")], src_data_rank=None).to_local()
    strided = torch.empty(own.mT.shape, dtype=own.dtype).mT.copy_(own)
    ours = DTensor.from_local(strided, mesh, [placement("S1")], run_check=False)
    rest: Any = {k: distribute(v, mesh, placement("S1" if k == "mask" else "R")) for k, v in given.items()}
    with replaced() as made:
        torchops.add_triangle_multiplicative_update_(ours, **rest)
    assert made == [1, 1] * 4
    assert ours.to_local().data_ptr() == strided.data_ptr()
    torch.testing.assert_close(ours.full_tensor(), expected)


def check_aliases(arguments: Arguments, mesh: Any) -> None:
    """In place, with a mask in the memory of x, and with a weight beside x in its storage."""
    given: Any = arguments(8)
    x = given.pop("x")
    whole = torch.cat([torch.full_like(x[:1], 0.5), x])
    given["mask"] = whole[:-1, ..., 0].clone()
    expected = x + torchops.triangle_multiplicative_update(x, **given)
    weights: Any = {name: t for name, t in given.items() if name != "mask"}
    replicated = {name: distribute(t, mesh, placement("R")) for name, t in weights.items()}

    def rows(local: Tensor) -> Any:
        return DTensor.from_local(local, mesh, [placement("S1")], run_check=False)

    own = distribute_tensor(whole, mesh, [placement("S1")], src_data_rank=None).to_local().clone()
    ours = rows(own[1:])
    with replaced():
        torchops.add_triangle_multiplicative_update_(ours, mask=rows(own[:-1, ..., 0]), **replicated)
    torch.testing.assert_close(ours.full_tensor(), expected)

    own = distribute_tensor(x, mesh, [placement("S1")], src_data_rank=None).to_local()
    weight = weights["g_out_weight"]
    arena = torch.cat([own.flatten(), weight.flatten()])
    ours = rows(arena[: own.numel()].view(own.shape))
    beside = DTensor.from_local(arena[own.numel() :].view(weight.shape), mesh, [Replicate()], run_check=False)
    mask: Any = distribute(given["mask"], mesh, placement("S1"))
    with replaced():
        torchops.add_triangle_multiplicative_update_(ours, mask=mask, **(replicated | {"g_out_weight": beside}))
    torch.testing.assert_close(ours.full_tensor(), expected)


def check_others(against_reference: AgainstReference, arguments: Arguments, mesh: Any) -> None:
    """Rows and batch, rows of two dimensions of the mesh, uneven rows, and kernels that refuse."""
    both = init_device_mesh(mesh.device_type, (2, 2))
    for places, n, refuses, outgoing, incoming in (
        ("S0 S1", 8, False, [2, 2] * 4, [4] * 4),
        ("S1 S1", 8, False, [], []),
        ("S1", 7, False, [], []),
        ("S1", 8, True, [1] * 2, [2] * 2),
    ):
        at = [placement(p) for p in places.split()]
        for direction in ("outgoing", "incoming"):
            with replaced(refuses) as made:
                against_reference(arguments(n), direction, both if len(at) == 2 else mesh, at, at)
            assert made == (outgoing if direction == "outgoing" else incoming), (places, n, made)


def check_ranks_without_memory(mesh: Any) -> None:
    """If one rank fails, all use collectives, and are not asked again."""
    group, made = mesh.get_group(), torch.empty(8, dtype=torch.uint8)
    for step, failing in (("_allocate", [0]), ("_rendezvous", [1, 2]), ("_allocate", range(mesh.size())), ("", [])):

        def answer(name: str, step: str = step, failing: Any = failing) -> Any:
            if name == step and dist.get_rank() in failing:
                raise RuntimeError("out of memory")
            return made

        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            patch.setattr(symmetric_memory, "_allocate", lambda *_, of=answer: of("_allocate"))
            patch.setattr(symmetric_memory, "_rendezvous", lambda *_, of=answer: of("_rendezvous"))
            workspace = symmetric_memory._new_workspace(group, torch.device("cpu"), 8)
        assert (workspace is None) == bool(step)
        assert symmetric_memory._workspaces.pop(group, None) is workspace
        assert symmetric_memory._reachable_groups.pop(group, True) == (not step)
        assert len([w for w in warned if "out of memory" in str(w.message)]) == (dist.get_rank() in failing)


def checks(against_reference: AgainstReference, arguments: Arguments) -> dict[str, Callable[[DeviceMesh], None]]:
    """For four processes on the CPU."""

    def on_cpu(check: Callable[[DeviceMesh], None]) -> Callable[[DeviceMesh], None]:
        return lambda mesh: check(mesh) if mesh.device_type == "cpu" else None

    return {
        "blocks of a rank's rows": on_cpu(partial(check_blocks, 8, [1, 1], False, against_reference, arguments)),
        "blocks in shared memory": on_cpu(partial(check_blocks, 8, [1, 1], True, against_reference, arguments)),
        "uneven blocks": on_cpu(partial(check_blocks, 20, [3, 2], False, against_reference, arguments)),
        "uneven blocks in shared memory": on_cpu(partial(check_blocks, 20, [3, 2], True, against_reference, arguments)),
        "blocks of padded rows": on_cpu(partial(check_narrow, False, arguments)),
        "blocks of padded rows in shared memory": on_cpu(partial(check_narrow, True, arguments)),
        "blocks of strided rows": on_cpu(partial(check_strided, arguments)),
        "blocks of rows whose memory is shared": on_cpu(partial(check_aliases, arguments)),
        "ranks without symmetric memory": on_cpu(check_ranks_without_memory),
        "where there are no blocks": on_cpu(partial(check_others, against_reference, arguments)),
    }


# --- two GPUs -------------------------------------------------------------------------------------------------------


def check_rows_in_16_bits(dtype: torch.dtype, n: int, direction: Any, mesh: DeviceMesh) -> None:
    """Large enough for two blocks per rank; on the CPU, only the script is checked."""
    c, d = (128, 64) if mesh.device_type == "cuda" else (16, 8)
    n = n if mesh.device_type == "cuda" else n // 64 * 2
    torch.manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=mesh.device_type).to(dtype)

    x, mask = normal(2, n, n, c), normal(2, n, n) > -1
    given: Any = {
        name: normal(*shape) / shape[1] ** 0.5
        for name, shape in {
            "p_in_weight": (2 * d, c), "g_in_weight": (2 * d, c), "p_out_weight": (c, d), "g_out_weight": (c, c)
        }.items()
    } | {"p_in_bias": normal(2 * d), "norm_in_weight": normal(c), "norm_out_bias": normal(d)}  # fmt: skip
    rest: Any = {name: distribute_tensor(t, mesh, [Replicate()]) for name, t in given.items()}
    ours, of_mask = (distribute_tensor(t, mesh, [placement("S1")]) for t in (x, mask))
    update = torchops.triangle_multiplicative_update
    with torch.no_grad():
        expected = update(x, direction, mask=mask, **given).double()
        with answers(hopper, "_rows_in") as taken:
            out: Any = update(ours, direction, mask=of_mask, **rest)
        assert taken == [True] * len(taken)
        assert bool(taken) == hopper._is_hopper(x.device)
        assert_near(out, expected)
        for _ in range(3):  # memory that is used again
            again: Any = update(ours, direction, mask=of_mask, **rest)
            assert torch.equal(again.to_local(), out.to_local())
        with by_collectives():
            again = update(ours, direction, mask=of_mask, **rest)
        # Incoming, collectives round all parts of the product before they add them.
        assert_near(again, expected)
        assert direction == "incoming" or torch.equal(again.to_local(), out.to_local())
        changed: Any = ours.clone()
        torchops.add_triangle_multiplicative_update_(changed, direction, mask=of_mask, **rest)
        assert_near(changed.double() - ours.double(), expected)
    check_gradients_in_16_bits(x, mask, given, direction, mesh)


def assert_near(ours: Any, expected: Tensor) -> None:
    assert (ours.full_tensor().double() - expected).norm() < 0.01 * expected.norm()


def check_gradients_in_16_bits(
    x: Tensor, mask: Tensor, given: dict[str, Tensor], direction: Any, mesh: DeviceMesh
) -> None:
    """Against those of one GPU, which has the same kernels."""
    ours, of_mask = (distribute_tensor(t, mesh, [placement("S1")]) for t in (x, mask))
    cotangent = torch.randn_like(x)
    dist.broadcast(cotangent, 0)
    update, leaves = torchops.triangle_multiplicative_update, [x, *given.values()]
    leaves = [t.requires_grad_() for t in leaves]
    rest: Any = dict(zip(given, leaves[1:], strict=True))
    expected = torch.autograd.grad(update(x, direction, mask=mask, **rest), leaves, cotangent)
    rest = {name: distribute_tensor(t.detach(), mesh, [Replicate()]).requires_grad_() for name, t in given.items()}
    sharded = [ours.requires_grad_(), *rest.values()]
    there = distribute_tensor(cotangent, mesh, [placement("S1")])
    for way in (nullcontext, by_collectives, nullcontext):
        with way(), answers(hopper_gradients, "_in_backward") as taken:
            out: Any = update(ours, direction, mask=of_mask, **rest)
            grads: Any = torch.autograd.grad(out, sharded, there)
        assert taken == [True] * len(x) * hopper._is_hopper(x.device)
        for name, grad, value in zip(["x", *given], grads, expected, strict=True):
            distance = (grad.full_tensor().double() - value.double()).norm() / value.double().norm()
            assert distance < 0.02, (name, distance)


@contextmanager
def answers(module: ModuleType, operator: str) -> Iterator[list[bool]]:
    """What an operator returns: whether it had kernels."""
    given, asked = [], getattr(module, operator)

    def spy(*args: Any) -> bool:
        given.append(asked(*args))
        return bool(given[-1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, operator, spy)
        yield given


@contextmanager
def by_collectives() -> Iterator[None]:
    """Where ranks could read each other's memory, they don't."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper, "peers", lambda group, *_: Collectives(group))
        yield


def checks_of_two() -> dict[str, Callable[[DeviceMesh], None]]:
    return {
        f"triangle update of rows in {dtype}, {direction}, N = {n}": partial(check_rows_in_16_bits, dtype, n, direction)
        for dtype, n, direction in (
            (torch.bfloat16, 1280, "outgoing"),
            (torch.bfloat16, 1280, "incoming"),
            (torch.float16, 642, "outgoing"),
            (torch.float16, 130, "incoming"),
        )
    }

"""One of four processes that compute a triangle update, triangle attention or pair layers together, with gloo on the
CPU or NCCL on four GPUs.

    python distributed_triangle_worker.py RANK DEVICE RENDEZVOUS_FILE RESULT_FILE

As distributed_worker.py; test_distributed_triangle.py starts it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import distributed_attention_checks
import distributed_hopper_checks
import pytest
import torch
import torch.distributed as dist
from distributed_worker import assert_same, full, run
from sharding import Communication, distribute, placement
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from triangle_reference import triangle_multiplicative_update as reference

import torchops

WORLD = 4
C, D = 6, 4
SHAPES = {"p_in_weight": (2 * D, C), "g_in_weight": (2 * D, C), "p_out_weight": (C, D), "g_out_weight": (C, C)}
VECTORS = {"norm_in": C, "norm_out": D}
BIASES = {"p_in_bias": 2 * D, "g_in_bias": 2 * D, "p_out_bias": C, "g_out_bias": C}


def arguments(
    n: int, mask: str | None = "float", plain: bool = False, device: str = "cpu", dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    out = {"x": normal(4, n, n, C)} | {name: normal(*shape) / shape[1] ** 0.5 for name, shape in SHAPES.items()}
    if not plain:
        out |= {name: normal(size) for name, size in BIASES.items()}
        out |= {f"{name}_{kind}": 1 + normal(size) for name, size in VECTORS.items() for kind in ("weight", "bias")}
    if mask is not None:
        factors = normal(4, n, n)
        out["mask"] = factors if mask == "float" else factors > -0.5
    return {name: (t if t.dtype == torch.bool else t.to(dtype)).to(device) for name, t in out.items()}


# Placement of x along one dimension of the mesh, the direction, N, the mask, whether without biases and norms: the
# placement of the result, and what is communicated, forward and backward. By groups of channels, outgoing gathers b and
# adds up parts of db; incoming adds up parts of o and gathers d_o.
LINES = """
    R  outgoing 5 float full  -> R  : none / none
    S0 outgoing 5 float full  -> S0 : none / none
    S0 incoming 5 bool  plain -> S0 : none / none
    S1 outgoing 7 float full  -> S1 : 4 all_gather / 4 all_gather, 4 reduce_scatter
    S1 outgoing 5 bool  plain -> S1 : 4 all_gather / 4 all_gather, 4 reduce_scatter
    S1 outgoing 5 none  full  -> S1 : 4 all_gather / 4 all_gather, 4 reduce_scatter
    S1 incoming 8 float full  -> S1 : 4 reduce_scatter / 4 all_gather
    S1 incoming 5 float plain -> S1 : 4 reduce_scatter / 4 all_gather
    S1 incoming 7 none  full  -> S1 : 4 reduce_scatter / 4 all_gather
    S2 outgoing 8 float full  -> S1 :
    S2 incoming 5 none  full  -> S1 :
    S3 outgoing 5 float full  -> R  :
    P  outgoing 5 float full  -> R  :
"""


def differentiable(t: Tensor) -> bool:
    return t.is_floating_point()


def check_line(line: str, mesh: DeviceMesh) -> None:
    inputs, _, rest = line.partition("->")
    outputs, _, communicated = rest.partition(":")
    place, direction, n, mask, form = inputs.split()
    full_args = arguments(int(n), None if mask == "none" else mask, form == "plain", mesh.device_type)
    check_against_reference(
        full_args, direction, mesh, [placement(place)], [placement(outputs.strip())], communicated.strip()
    )


def check_against_reference(
    values: dict[str, Tensor],
    direction: Any,
    mesh: DeviceMesh,
    places: list[Any],
    expected_places: list[Any],
    communicated: str = "",
) -> None:
    leaves = {k: v.requires_grad_(differentiable(v)) for k, v in values.items()}

    def sharded(name: str, t: Tensor) -> Any:
        nowhere = [Replicate()] * mesh.ndim
        at = [p if getattr(p, "dim", 9) < 3 else Replicate() for p in places] if name == "mask" else places
        if mesh.ndim == 1:
            return distribute(t, mesh, at[0] if name in ("x", "mask") else Replicate())
        out = distribute_tensor(t.detach(), mesh, at if name in ("x", "mask") else nowhere, src_data_rank=None)
        return out.requires_grad_(t.requires_grad)

    ours = {k: sharded(k, v) for k, v in leaves.items()}
    x, x_full = ours.pop("x"), leaves["x"]
    rest: Any = ours
    rest_full: Any = {k: v for k, v in leaves.items() if k != "x"}
    expected = reference(x_full, direction, **rest_full)
    with torch.no_grad(), Communication() as moved:
        out: Any = torchops.triangle_multiplicative_update(x, direction, **rest)
    assert out.placements == tuple(expected_places), out.placements
    assert_same(out, expected)
    if communicated and mesh.device_type == "cpu":
        assert str(moved) == communicated.split(" / ")[0], str(moved)

    out = torchops.triangle_multiplicative_update(x, direction, **rest)
    assert_same(out, expected)
    cotangent = torch.randn(expected.shape, dtype=expected.dtype, generator=torch.Generator().manual_seed(1))
    cotangent = cotangent.to(expected.device)
    inputs = [x, *(t for t in rest.values() if t.requires_grad)]
    with Communication() as moved:
        there = distribute_tensor(cotangent, mesh, out.placements, src_data_rank=None)
        grads = torch.autograd.grad(out, inputs, there)
    if communicated and mesh.device_type == "cpu":
        assert str(moved) == communicated.split(" / ")[1], str(moved)
    exact = torch.autograd.grad(
        expected, [x_full, *(t for t in rest_full.values() if t.requires_grad)], cotangent, retain_graph=True
    )
    for grad, value in zip(grads, exact, strict=True):
        assert_same(grad, value)


def check_two_dimensions(places: str, mesh: DeviceMesh) -> None:
    both = init_device_mesh(mesh.device_type, (2, 2))
    at = [placement(p) for p in places.split()]
    for direction in ("outgoing", "incoming"):
        check_against_reference(arguments(7, device=mesh.device_type), direction, both, at, at)


def check_asked(mesh: DeviceMesh) -> None:
    """Gradients of some arguments alone, of sharded rows."""
    values = arguments(5, device=mesh.device_type)
    for direction in ("outgoing", "incoming"):
        for asked in (
            ["x"],
            ["norm_in_weight"],
            ["norm_out_bias", "g_out_bias"],
            ["mask"],
            ["p_in_bias"],
            ["p_out_bias"],
        ):
            leaves = {k: v.detach().clone().requires_grad_(k in asked) for k, v in values.items()}
            ours = {
                k: distribute(v, mesh, placement("S1") if k in ("x", "mask") else Replicate())
                for k, v in leaves.items()
            }
            for function, exactly in (
                (torchops.triangle_multiplicative_update, reference),
                (update_of_copy, lambda x, *args, **rest: x + reference(x, *args, **rest)),
            ):
                results = []
                for given, compute in ((leaves, exactly), (ours, function)):
                    rest: Any = {k: v for k, v in given.items() if k != "x"}
                    out = compute(given["x"], direction, **rest)
                    results.append(torch.autograd.grad(full(out).square().sum(), [given[k] for k in asked]))
                for exact, grad in zip(*results, strict=True):
                    assert_same(grad, exact)


def update_of_copy(x: Tensor, direction: Any, **rest: Any) -> Tensor:
    return torchops.add_triangle_multiplicative_update_(x.clone(), direction, **rest)


def check_in_place(mesh: DeviceMesh) -> None:
    given: Any = arguments(7, device=mesh.device_type)
    x = given.pop("x")
    for direction in ("outgoing", "incoming"):
        expected = x + reference(x, direction, **given)
        for place in ("R", "S0", "S1"):
            ours: Any = distribute(x.clone(), mesh, placement(place))
            rest: Any = {
                k: distribute(v, mesh, placement(place) if k == "mask" else Replicate()) for k, v in given.items()
            }
            local = ours.to_local().data_ptr()
            out: Any = torchops.add_triangle_multiplicative_update_(ours, direction, **rest)
            assert out is ours
            assert_same(ours, expected)
            assert ours.to_local().data_ptr() == local
            assert ours.placements == (placement(place),)
    rest = {k: distribute(v, mesh, Replicate()) for k, v in given.items()}
    for place in ("S2", "S3"):
        ours = distribute(x.clone(), mesh, placement(place))
        with pytest.raises(
            RuntimeError, match="_update_: expected x replicated or sharded along rows or the batch, got"
        ):
            torchops.add_triangle_multiplicative_update_(ours, **rest)
        assert_same(ours, x)


def check_mixed(mesh: DeviceMesh) -> None:
    """A float32 stream with 16-bit parameters, or under autocast; and a product that float16 has no numbers for."""
    for dtype in (torch.bfloat16, torch.float16):
        exact: Any = arguments(33, "bool", plain=True, device=mesh.device_type)
        exact["p_in_weight"] *= 130 if dtype == torch.float16 else 1
        exact = {k: v.to(dtype).double() for k, v in exact.items()}  # the mask, too
        x = distribute(exact.pop("x").float(), mesh, placement("S1")).requires_grad_()
        for direction, autocast in (("outgoing", False), ("incoming", False), ("outgoing", True)):
            rest: Any = {
                k: distribute(v.float() if autocast else v.to(dtype), mesh, placement("S1" if k == "mask" else "R"))
                for k, v in exact.items()
            }
            expected = reference(full(x.detach()).double(), direction, **exact)
            with torch.autocast(mesh.device_type, dtype, enabled=autocast):
                out: Any = torchops.triangle_multiplicative_update(x, direction, **rest)  # type: ignore[arg-type]
            assert out.dtype == dtype
            error = (full(out.detach()).double() - expected).norm() / expected.norm()
            assert error < 0.02, error
            (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
            assert grad.dtype == torch.float32
            assert grad.isfinite().all()


def check_range_of_float16(mesh: DeviceMesh) -> None:
    """Products that just fit, as they do in one process; 65 is above a power of 4. Their mean is far above what the
    layer norm leaves of them, so roundings count: one in one process, and more where ranks add up parts."""
    torch.manual_seed(0)
    ones = torch.ones(2 * D)
    values: Any = {name: torch.randn(*shape) for name, shape in SHAPES.items()}
    values |= {"p_in_weight": torch.zeros(2 * D, C), "p_in_bias": 100 + torch.randn(2 * D) / 4}
    values |= {"g_in_weight": torch.randn(2 * D, C) / 9, "g_in_bias": 9 * ones}
    values = {name: t.half().to(mesh.device_type) for name, t in values.items()}
    x = torch.randn(65, 65, C).half().to(mesh.device_type)
    ours: Any = {name: distribute(t, mesh, Replicate()) for name, t in values.items()}
    for direction in ("outgoing", "incoming"):
        expected = torchops.triangle_multiplicative_update(x, direction, **values)
        assert expected.isfinite().all()
        out: Any = torchops.triangle_multiplicative_update(distribute(x, mesh, placement("S0")), direction, **ours)
        error = (full(out).double() - expected.double()).norm() / expected.double().norm()
        assert direction == "incoming" or error < 0.02, error
        exact = reference(x.double(), direction, **{name: t.double() for name, t in values.items()})
        alone, shared = ((t.double() - exact).norm() for t in (expected, full(out)))
        assert shared < (1.1 if direction == "outgoing" else 2) * alone, (shared, alone)


def check_plain_tensors_among_them(mesh: DeviceMesh) -> None:
    values: Any = arguments(5, device=mesh.device_type)
    x = distribute(values.pop("x"), mesh, placement("S1"))
    with pytest.raises(RuntimeError, match="expected DTensors on one mesh, got a Tensor"):
        torchops.triangle_multiplicative_update(x, **values)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            torchops.nn.TriangleMultiplicativeUpdate(C, D, direction, bias=True, dtype=torch.float64)
            for direction in ("outgoing", "incoming")
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x, mask)
        return x


def check_training(wrap: Callable[[Any], nn.Module], mesh: DeviceMesh) -> None:
    """Each rank with one of a batch of four, against all of it in one process."""

    def build() -> Blocks:
        torch.manual_seed(0)
        model = Blocks().to(mesh.device_type)
        for p in model.parameters():
            p.data = torch.randn(p.shape, dtype=p.dtype).to(p.device) / 3
        return model

    values = arguments(5, device=mesh.device_type)
    x, mask = values["x"], values["mask"]

    def losses(model: nn.Module, batch: slice) -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        out = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(x[batch], mask[batch]).square().mean()
            loss.backward()
            optimizer.step()
            out.append(loss.item())
        return out

    single, model = build(), wrap(build())
    expected = losses(single, slice(0, 4))
    rank = dist.get_rank()
    mean = torch.tensor(losses(model, slice(rank, rank + 1)), dtype=torch.float64, device=x.device) / WORLD
    dist.all_reduce(mean)
    torch.testing.assert_close(mean.tolist(), expected, rtol=1e-10, atol=1e-10)
    assert expected[-1] < expected[0]
    for p, q in zip(model.parameters(), single.parameters(), strict=True):
        assert_same(p, q)


def _fully_shard(model: Any) -> nn.Module:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def checks() -> dict[str, Callable[[DeviceMesh], None]]:
    lines = [" ".join(line.split()) for line in LINES.strip().splitlines()]
    return {
        **{line: partial(check_line, line) for line in lines},
        "rows and batch": partial(check_two_dimensions, "S0 S1"),
        "rows twice": partial(check_two_dimensions, "S1 S1"),
        "gradients that are asked for": check_asked,
        "in place": check_in_place,
        "mixed precision": check_mixed,
        "range of float16": check_range_of_float16,
        "plain tensors": check_plain_tensors_among_them,
        "DistributedDataParallel": partial(check_training, DistributedDataParallel),
        "fully_shard": partial(check_training, _fully_shard),
        **distributed_attention_checks.checks(),
        **distributed_hopper_checks.checks(check_against_reference, arguments),
    }


if __name__ == "__main__":
    run(checks(), WORLD, int(sys.argv[1]), *sys.argv[2:])

"""The steps of a triangle update on some rows of a pair tensor, by the kernels for compute capability 9.0; and the way
of sharded rows that they are for, on one GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cuda_checks import error
from torch import Tensor
from triangle_reference import rows_weights as weights
from triangle_reference import triangle_multiplicative_update as reference

import torchops

if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a GPU of compute capability 9.0", allow_module_level=True)

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from torchops import _distributed_triangle_hopper as hopper
from torchops._distributed_triangle import _in_order as in_order

rows_in = torch.ops.myops._triangle_rows_in.default
rows_out = torch.ops.myops._triangle_rows_out.default
update = torchops.triangle_multiplicative_update


def channels(d: int, rows: int, n: int, extra: int) -> Tensor:
    """NaN, for rows that end `extra` elements after the padding."""
    width = -(-n // 16) * 16
    return torch.full((d, rows, width + extra), float("nan"), device="cuda")


def by_blocks(
    x: Tensor, mask: Tensor | None, w: dict[str, Tensor], blocks: list[int], scale: float, adds: bool, extra: int
) -> tuple[Tensor, Tensor, Tensor]:
    """a and b, and the result, whose blocks overwrite those of x if `adds`."""
    n, d = x.shape[1], w["p_out_weight"].shape[1]
    width = -(-n // 16) * 16
    a, bs, first = channels(d, n, n, extra).to(x.dtype), [], 0
    for rows in blocks:
        part = slice(first, first + rows)
        b = channels(d, rows, n, extra).to(x.dtype)
        of_mask = None if mask is None else mask[part]
        assert rows_in(x[part], of_mask, in_order(w), scale, 1e-5, a[:, part, :width], b[..., :width])
        bs.append(b)
        first += rows
    b = torch.cat(bs, 1)
    for made in (a, b):
        assert (made[..., n:width] == 0).all()
        assert made[..., width:].isnan().all()
    o = channels(d, n, n, extra).to(x.dtype)
    torch.bmm(a[..., :width], b[..., :width].mT, out=o[..., :n])
    out, first = x if adds else torch.full(x.shape, float("nan"), device="cuda", dtype=x.dtype), 0
    for rows in blocks:
        part = slice(first, first + rows)
        assert rows_out(o[:, part, :n], x[part], in_order(w), 1e-5, 1e-5 * scale**2, out[part], adds)
        first += rows
    return a[..., :width], b[..., :width], out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("n", "blocks", "c", "d", "full", "mask", "adds", "extra"),
    [
        (128, [64, 64], 128, 128, False, None, False, 0),
        (77, [1, 40, 36], 128, 64, True, "bool", True, 0),
        (200, [64, 128, 8], 64, 128, True, "float", False, 64),
        (65, [65], 40, 24, True, "float32", True, 16),
        (3, [2, 1], 8, 8, False, "bool", False, 0),
        (1000, [7, 993], 128, 128, True, None, True, 24),
    ],
)
def test_blocks(
    dtype: torch.dtype,
    n: int,
    blocks: list[int],
    c: int,
    d: int,
    full: bool,
    mask: str | None,
    adds: bool,
    extra: int,
) -> None:
    torch.manual_seed(0)
    w, x = weights(c, d, full, dtype), torch.randn(n, n, c, device="cuda").to(dtype)
    factors = None if mask is None else torch.rand(n, n, device="cuda").mT  # whose rows are not contiguous
    if factors is not None and mask != "float32":
        factors = factors > 0.3 if mask == "bool" else factors.to(dtype)
    scale = 2.0**-4 if dtype == torch.float16 else 1.0
    whole = by_blocks(x.clone(), factors, w, [n], scale, adds, extra)
    parts = by_blocks(x.clone(), factors, w, blocks, scale, adds, extra)
    for got, expected in zip(parts, whole, strict=True):
        assert torch.equal(got, expected)  # a position is computed in the same way wherever it is
    exact: Any = {name: t.double() for name, t in w.items()}
    of_exact = factors if factors is None or mask == "bool" else factors.double()
    residual = x.double() if adds else 0
    expected = reference(x.double(), mask=of_exact, **exact) + residual
    ours = update(x, mask=factors, **w).double() + residual  # type: ignore[arg-type]
    assert error(parts[2], expected) <= 1.1 * error(ours, expected) + torch.finfo(dtype).eps


def test_layouts() -> None:
    """Rows of a transposed x, packed or separate weights that are not aligned, and an x that is not."""
    torch.manual_seed(0)
    n, c, d = 96, 64, 32
    w, x = weights(c, d, True, torch.bfloat16), torch.randn(n, n, c, device="cuda").bfloat16()
    expected = by_blocks(x.clone(), None, w, [n], 1.0, False, 0)

    def shifted(t: Tensor) -> Tensor:
        return t.new_empty(t.numel() + 1)[1:].view(t.shape).copy_(t)

    for given in (x.mT.contiguous().mT, x.transpose(0, 1).contiguous().transpose(0, 1), shifted(x)):
        moved = {name: shifted(t) for name, t in w.items()}
        for got, value in zip(by_blocks(given, None, moved, [32, 64], 1.0, False, 0), expected, strict=True):
            assert torch.equal(got, value)


def test_refused() -> None:
    """Nothing is written."""

    def shifted(t: Tensor) -> Tensor:
        return t.new_empty(t.numel() + 1)[1:].view(t.shape)

    def answers(
        c: int, d: int, dtype: torch.dtype, of_x: torch.dtype | None = None, aligned: bool = True
    ) -> list[bool]:
        n, rows, width = 40, 24, 48
        x, w = torch.ones(rows, n, c, device="cuda", dtype=of_x or dtype), in_order(weights(c, d, False, dtype))
        a, b = (torch.full((d, rows, width), 7.0, device="cuda", dtype=dtype) for _ in range(2))
        out = torch.full((rows, n, c), 7.0, device="cuda", dtype=dtype)
        if not aligned:
            a, out = shifted(a).fill_(7), shifted(out).fill_(7)
        got = [rows_in(x, None, w, 1.0, 1e-5, a, b), rows_out(b[..., :n], x, w, 1e-5, 1e-5, out, False)]
        assert all((t == 7).all() or done for t, done in ((a, got[0]), (out, got[1])))
        return got

    assert answers(64, 32, torch.bfloat16) == [True, True]
    assert answers(64, 32, torch.bfloat16, aligned=False) == [False, False]
    assert answers(136, 32, torch.bfloat16) == [False, False]
    assert answers(64, 136, torch.bfloat16) == [False, False]
    assert answers(64, 12, torch.float16) == [False, False]
    assert answers(60, 32, torch.float16) == [False, False]
    assert answers(64, 32, torch.bfloat16, torch.float32) == [False, False]
    for path in ("cublas", "portable"):
        with torchops.cuda.dense_path(path):
            assert answers(64, 32, torch.bfloat16) == [False, False]


# --- sharded rows, all on one rank ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    if not dist.is_nccl_available():
        pytest.skip("needs NCCL")
    store: Any = getattr(dist, "HashStore")()  # noqa: B009 (mypy does not know it)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    yield init_device_mesh("cuda", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
@pytest.mark.parametrize("n", [1100, 520, 77])
def test_one_rank(direction: Any, n: int, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(x: Tensor, *args: Any) -> bool:
        calls.append(len(x))
        return bool(rows_in(x, *args))

    monkeypatch.setattr(hopper, "_rows_in", counted)
    torch.manual_seed(0)
    w, x = weights(128, 128, True, torch.bfloat16), torch.randn(2, n, n, 128, device="cuda").bfloat16()
    mask = torch.rand(2, n, n, device="cuda") > 0.2
    ours: Any = {name: distribute_tensor(t, mesh, [Replicate()]) for name, t in w.items()}
    ours["mask"] = distribute_tensor(mask, mesh, [Shard(1)])
    of_x: Any = distribute_tensor(x, mesh, [Shard(1)])
    with torch.no_grad():
        expected = update(x, direction, mask=mask, **w).double()  # type: ignore[arg-type]
        got: Any = update(of_x, direction, **ours)
        assert len(calls) == 2 * -(-n // max(-(-n // 2), 256))
        assert error(got.to_local(), expected) < 0.005
        torchops.triangle_multiplicative_update_(of_x, direction, **ours)
        assert error(of_x.to_local(), x.double() + expected) < 0.005
    # The product that a backward pass reads.
    leaf = distribute_tensor(x, mesh, [Shard(1)]).requires_grad_()
    grad: Any = torch.autograd.grad(update(leaf, direction, **ours).sum(), leaf)[0]
    alone = x.clone().requires_grad_()
    (exact,) = torch.autograd.grad(update(alone, direction, mask=mask, **w).sum(), alone)  # type: ignore[arg-type]
    assert error(grad.to_local(), exact.double()) < 0.02

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
from torchops._core.devices import capability

if not torch.cuda.is_available() or capability(0) != (9, 0):
    pytest.skip("needs a GPU of compute capability 9.0", allow_module_level=True)

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from torchops.distributed.triangle import hopper
from torchops.distributed.triangle.update import _in_order as in_order

rows_in = torch.ops.myops._triangle_rows_in.default
rows_out = torch.ops.myops._triangle_rows_out.default
out_backward = torch.ops.myops._triangle_rows_out_backward.default
in_backward = torch.ops.myops._triangle_rows_in_backward.default
parameter_gradients = torch.ops.myops._triangle_rows_parameter_gradients.default
update = torchops.triangle_multiplicative_update


def channels(d: int, rows: int, n: int, extra: int) -> Tensor:
    """NaN, for rows that end `extra` elements after the padding."""
    width = -(-n // 16) * 16
    return torch.full((d, rows, width + extra), float("nan"), device="cuda")


def shifted(t: Tensor) -> Tensor:
    """A copy that is not aligned."""
    return t.new_empty(t.numel() + 1)[1:].view(t.shape).copy_(t)


def by_blocks(
    x: Tensor, mask: Tensor | None, w: dict[str, Tensor], blocks: list[int], scale: float, residual: bool, extra: int
) -> tuple[Tensor, Tensor, Tensor]:
    """a and b, and the result, whose blocks overwrite those of x if `residual`."""
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
    out, first = x if residual else torch.full(x.shape, float("nan"), device="cuda", dtype=x.dtype), 0
    for rows in blocks:
        part = slice(first, first + rows)
        assert rows_out(o[:, part, :n], x[part], in_order(w), 1e-5, 1e-5 * scale**2, out[part], residual)
        first += rows
    return a[..., :width], b[..., :width], out


def mask_and_scale(kind: str | None, dtype: torch.dtype, *shape: int) -> tuple[Tensor | None, float]:
    """A mask whose rows are not contiguous, and what a is multiplied by."""
    scale = 2.0**-4 if dtype == torch.float16 else 1.0
    if kind is None:
        return None, scale
    factors = torch.rand(*shape, device="cuda").mT
    return {"bool": factors > 0.3, "float": factors.to(dtype), "float32": factors}[kind], scale


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("n", "blocks", "c", "d", "full", "mask", "add_residual", "extra"),
    [
        (128, [64, 64], 128, 128, False, None, False, 0),
        (77, [1, 40, 36], 128, 64, True, "bool", True, 0),
        (200, [64, 128, 8], 64, 128, True, "float", False, 64),
        (200, [150, 50], 64, 64, False, None, False, 48),  # rows begin at multiples of 128 bytes
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
    add_residual: bool,
    extra: int,
) -> None:
    torch.manual_seed(0)
    w, x = weights(c, d, full, dtype), torch.randn(n, n, c, device="cuda").to(dtype)
    factors, scale = mask_and_scale(mask, dtype, n, n)
    whole = by_blocks(x.clone(), factors, w, [n], scale, add_residual, extra)
    parts = by_blocks(x.clone(), factors, w, blocks, scale, add_residual, extra)
    for got, expected in zip(parts, whole, strict=True):
        assert torch.equal(got, expected)  # a position is computed in the same way wherever it is
    exact: Any = {name: t.double() for name, t in w.items()}
    of_exact = factors if factors is None or mask == "bool" else factors.double()
    residual = x.double() if add_residual else 0
    expected = reference(x.double(), mask=of_exact, **exact) + residual
    ours = update(x, mask=factors, **w).double() + residual  # type: ignore[arg-type]
    assert error(parts[2], expected) <= 1.1 * error(ours, expected) + torch.finfo(dtype).eps


def test_layouts() -> None:
    """Rows of a transposed x, packed or separate weights that are not aligned, and an x that is not."""
    torch.manual_seed(0)
    n, c, d = 96, 64, 32
    w, x = weights(c, d, True, torch.bfloat16), torch.randn(n, n, c, device="cuda").bfloat16()
    expected = by_blocks(x.clone(), None, w, [n], 1.0, False, 0)

    for given in (x.mT.contiguous().mT, x.transpose(0, 1).contiguous().transpose(0, 1), shifted(x)):
        moved = {name: shifted(t) for name, t in w.items()}
        for got, value in zip(by_blocks(given, None, moved, [32, 64], 1.0, False, 0), expected, strict=True):
            assert torch.equal(got, value)


def test_refused() -> None:
    """Nothing is written."""

    def answers(
        c: int, d: int, dtype: torch.dtype, of_x: torch.dtype | None = None, aligned: bool = True
    ) -> list[bool]:
        n, rows, width = 40, 24, 48
        x, w = torch.ones(rows, n, c, device="cuda", dtype=of_x or dtype), in_order(weights(c, d, False, dtype))
        a, b = (torch.full((d, rows, width), 7.0, device="cuda", dtype=dtype) for _ in range(2))
        out = torch.full((rows, n, c), 7.0, device="cuda", dtype=dtype)
        if not aligned:
            a, out = shifted(a), shifted(out)
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
        with torchops.cuda.kernel_path(path):
            assert answers(64, 32, torch.bfloat16) == [False, False]


# --- gradients --------------------------------------------------------------------------------------------------------


def nan(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, float("nan"), device="cuda", dtype=dtype)


def apart(listed: list[Any]) -> list[Any]:
    """With separate parameters for a and b, if they are packed."""
    out = list(listed)
    for first in (2, 3, 6, 7) if listed[4] is None else ():
        if out[first] is not None:
            out[first], out[first + 2] = out[first].chunk(2)
    return out


def sums_of(listed: list[Any], batch: int) -> Tensor:
    weights_apart = [apart(listed)[i] for i in (12, 14, 2, 6, 4, 8)]
    return nan(batch, sum(len(t) * (t.shape[1] + 1) for t in weights_apart))


def backward_by_blocks(
    x: Tensor,
    grad: Tensor,
    mask: Tensor | None,
    listed: list[Any],
    direction: str,
    blocks: list[int],
    scale: float,
    add_residual: bool,
    extra: int,
) -> tuple[Tensor, list[Tensor]]:
    """dx (batch, N, N, c), and the gradients of the parameters in `listed`. The input steps have the blocks in reverse
    order, so that theirs are others than those of the output steps."""
    batch, n, _, c = x.shape
    d, width, eps = listed[12].shape[1], -(-n // 16) * 16, 1e-5

    def turned(t: Any) -> Any:
        return t if t is None or direction == "outgoing" else t.transpose(0, 1)

    def parts(sizes: list[int]) -> list[slice]:
        ends = torch.tensor(sizes).cumsum(0).tolist()
        return [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]

    sums, dxs = sums_of(listed, batch * len(blocks)), []
    for element in range(batch):
        rows, of_rows = x[element], grad[element]
        y, mask_y = turned(rows), None if mask is None else turned(mask[element])
        a, b, o, d_o, da, db = (channels(d, n, n, extra).to(x.dtype) for _ in range(6))
        assert rows_in(y, mask_y, listed, scale, eps, a[..., :width], b[..., :width])
        torch.bmm(a[..., :n], b[..., :n].mT, out=o[..., :n])
        dz, moments = nan(n, n, c, dtype=x.dtype), nan(n, n, 2)
        own = sums[element * len(blocks) :]
        for part, of_part in zip(parts(blocks), own, strict=False):
            wanted = (d_o[:, part, :width], dz[part], moments[part], of_part)
            assert out_backward(of_rows[part], o[:, part, :n], rows[part], listed, eps, eps * scale**2, *wanted)
        assert (d_o[..., n:width] == 0).all()
        assert d_o[..., width:].isnan().all()
        torch.bmm(d_o[..., :n], b[..., :n], out=da[..., :n])
        torch.bmm(d_o[..., :n].mT, a[..., :n], out=db[..., :n])
        dz_y, moments_y, residual = turned(dz), turned(moments), turned(of_rows) if add_residual else None
        for part, of_part in zip(parts(blocks[::-1]), own, strict=False):
            of_mask = None if mask_y is None else mask_y[part]
            of_residual = None if residual is None else residual[part]
            read = (da[:, part, :width], db[:, part, :n], y[part], of_mask, listed, scale, eps, moments_y[part])
            assert in_backward(*read, dz_y[part], of_residual, of_part)
        dxs.append(dz)
    return torch.stack(dxs), parameter_gradients(sums, listed, [t is not None for t in listed])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
@pytest.mark.parametrize(
    ("batch", "n", "blocks", "c", "d", "full", "mask", "add_residual", "extra", "packed"),
    [
        (1, 128, [64, 64], 128, 128, False, None, False, 0, True),
        (2, 77, [1, 40, 36], 128, 64, True, "bool", True, 0, False),
        (1, 200, [64, 128, 8], 64, 128, True, "float", False, 64, True),
        (3, 65, [65], 40, 24, True, "float32", True, 16, False),
        (2, 3, [2, 1], 8, 8, False, "bool", False, 0, True),
        (1, 501, [7, 494], 128, 128, True, None, True, 24, False),
    ],
)
def test_gradients(
    dtype: torch.dtype,
    direction: Any,
    batch: int,
    n: int,
    blocks: list[int],
    c: int,
    d: int,
    full: bool,
    mask: str | None,
    add_residual: bool,
    extra: int,
    packed: bool,
) -> None:
    torch.manual_seed(0)
    w = weights(c, d, full, dtype)
    x, grad = (torch.randn(batch, n, n, c, device="cuda").to(dtype) for _ in range(2))
    factors, scale = mask_and_scale(mask, dtype, batch, n, n)
    listed = in_order(w) if packed else apart(in_order(w))
    whole, _ = backward_by_blocks(x, grad, factors, listed, direction, [n], scale, add_residual, extra)
    dx, of_parameters = backward_by_blocks(x, grad, factors, listed, direction, blocks, scale, add_residual, extra)
    assert torch.equal(dx, whole)  # a position is computed in the same way wherever it is

    def gradients(function: Any, low: bool) -> dict[str, Tensor]:
        leaves = {name: (t if low else t.double()).clone().requires_grad_() for name, t in {"x": x, **w}.items()}
        of_mask = factors if low or factors is None or mask == "bool" else factors.double()
        y = function(leaves["x"], direction, mask=of_mask, **{name: t for name, t in leaves.items() if name != "x"})
        made = torch.autograd.grad(y, list(leaves.values()), grad if low else grad.double())
        return dict(zip(leaves, (t.double() for t in made), strict=True))

    ours, exact = gradients(update, True), gradients(reference, False)
    for made in (ours, exact):
        made["x"] += grad.double() if add_residual else 0
    got = {"x": dx}
    for i, name in enumerate(in_order({name: name for name in w})):
        if name is None:
            assert packed or i in (4, 5, 8, 9) or of_parameters[i].numel() == 0
        else:
            in_two = not packed and i in (2, 3, 6, 7)
            got[name] = torch.cat([of_parameters[i], of_parameters[i + 2]]) if in_two else of_parameters[i]
    for name, value in exact.items():
        assert got[name].dtype == dtype
        assert got[name].shape == value.shape
        most = 1.25 * error(ours[name], value) + 2 * torch.finfo(dtype).eps
        assert error(got[name], value) <= most, name


def test_wanted_gradients() -> None:
    """Each is the same whichever others are wanted, and for weights and sums whose rows are not contiguous."""
    torch.manual_seed(0)
    listed = in_order(weights(64, 32, True, torch.bfloat16))
    for given in (listed, apart(listed)):
        sums = torch.randn(3, sums_of(given, 1).shape[1], device="cuda")
        everything = parameter_gradients(sums, given, [t is not None for t in given])
        for strided in (False, True):
            inputs: Any = [t.t().contiguous().t() if strided and t is not None and t.ndim == 2 else t for t in given]
            for which in range(3):
                output_mask = [t is not None and (strided or i % 3 == which) for i, t in enumerate(given)]
                of_sums = sums.t().contiguous().t() if strided else sums
                for made, asked, expected in zip(
                    parameter_gradients(of_sums, inputs, output_mask), output_mask, everything, strict=True
                ):
                    assert torch.equal(made, expected) if asked else made.shape == (0,)
        none = parameter_gradients(sums[:0], given, [t is not None for t in given])
        assert all((t == 0).all() for t in none)
    with pytest.raises(RuntimeError, match="expected parameters of dtype float16 or bfloat16, got float32"):
        parameter_gradients(sums, [None if t is None else t.float() for t in given], [False] * 16)


@pytest.mark.parametrize("path", ["auto", "cublas", "portable"])
def test_gradients_refused(path: Any) -> None:
    """Nothing is written."""
    n, rows = 40, 24

    def answers(c: int, d: int, dtype: torch.dtype, *, of_x: torch.dtype | None = None, odd: str = "") -> list[bool]:
        def full(name: str, *shape: int, of: torch.dtype = dtype) -> Tensor:
            made = torch.full(shape, 7.0, device="cuda", dtype=of)
            return shifted(made) if name == odd else made

        width = 40 if dtype == torch.float32 else 48
        x, listed = torch.ones(rows, n, c, device="cuda", dtype=of_x or dtype), in_order(weights(c, d, False, dtype))
        grad, o, db = full("grad", rows, n, c), full("o", d, rows, width), full("db", d, rows, width)
        d_o, da, dz = full("d_o", d, rows, width), full("da", d, rows, width), full("dz", rows, n, c)
        moments = full("moments", rows, n, 2, of=torch.float32)
        both = full("both", sums_of(listed, 1).shape[1], 2, of=torch.float32)
        sums = both[:, 0] if odd == "sums" else both[:, 0].clone()
        with torchops.cuda.kernel_path(path):
            got = [out_backward(grad, o[..., :n], x, listed, 1e-5, 1e-5, d_o, dz, moments, sums)]
            assert got[0] or all((t == 7).all() for t in (d_o, dz, moments, sums))
            for written in (dz, sums):
                written.fill_(7)
            got.append(in_backward(da, db, x, None, listed, 1.0, 1e-5, moments, dz, None, sums))
            assert got[1] or all((t == 7).all() for t in (dz, sums))
        return got

    runs = [path == "auto"] * 2
    assert answers(64, 32, torch.bfloat16) == runs
    assert answers(64, 32, torch.bfloat16, odd="d_o") == [False, runs[1]]
    assert answers(64, 32, torch.bfloat16, odd="da") == [runs[0], False]
    for odd in ("dz", "moments", "sums"):
        assert answers(64, 32, torch.bfloat16, odd=odd) == [False, False]
    for c, d in ((136, 32), (64, 136), (64, 12), (60, 32)):
        assert answers(c, d, torch.bfloat16) == [False, False]
    assert answers(64, 32, torch.bfloat16, of_x=torch.float32) == [False, False]
    assert answers(64, 32, torch.float32) == [False, False]


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
        blocks = -(-n // max(-(-n // 2), 256)) if direction == "outgoing" else 1
        assert len(calls) == 2 * blocks
        assert error(got.to_local(), expected) < 0.005
        torchops.add_triangle_multiplicative_update_(of_x, direction, **ours)
        assert error(of_x.to_local(), x.double() + expected) < 0.005
    # The product that a backward pass reads.
    leaf = distribute_tensor(x, mesh, [Shard(1)]).requires_grad_()
    grad: Any = torch.autograd.grad(update(leaf, direction, **ours).sum(), leaf)[0]
    alone = x.clone().requires_grad_()
    (exact,) = torch.autograd.grad(update(alone, direction, mask=mask, **w).sum(), alone)  # type: ignore[arg-type]
    assert error(grad.to_local(), exact.double()) < 0.02

"""Kernels of the triangle update's sharded rows, in PyTorch's operators, and memory that processes share, in files: for
distributed_hopper_checks.py, which runs on CPUs."""

from __future__ import annotations

import math
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor  # with it, torchops has rules for DTensor
from torch import Tensor
from torch.nn.functional import layer_norm, linear

from torchops.distributed import symmetric_memory
from torchops.distributed.triangle import hopper, hopper_gradients
from torchops.distributed.triangle.rows import Layers, apart

_own_rows = hopper.OwnRows.__init__

# On a CPU, the operators themselves only check their arguments.
_checked_in, _checked_out = hopper._rows_in, hopper._rows_out
_checked_out_backward, _checked_in_backward = hopper_gradients._out_backward, hopper_gradients._in_backward


def _rows_in(
    x: Tensor, mask: Tensor | None, parameters: list[Any], scale: float, eps: float, a: Tensor, b: Tensor
) -> bool:
    assert not _checked_in(x, mask, parameters, scale, eps, a, b)
    w, n = apart(parameters), x.shape[1]
    z = layer_norm(x, x.shape[2:], w.norm_in, w.norm_in_bias, eps)
    factor = 1 if mask is None else mask.to(x.dtype).unsqueeze(-1)
    for made, layers, by in (
        (a, (w.p_a, w.p_a_bias, w.g_a, w.g_a_bias), scale),
        (b, (w.p_b, w.p_b_bias, w.g_b, w.g_b_bias), 1),
    ):
        made.zero_()
        values = linear(z, *layers[:2]) * torch.sigmoid(linear(z, *layers[2:])) * factor * by
        made[..., :n] = values.movedim(-1, 0)
    return True


def _rows_out(
    o: Tensor, x: Tensor, parameters: list[Any], eps: float, eps_out: float, out: Tensor, add_residual: bool
) -> bool:
    assert not _checked_out(o, x, parameters, eps, eps_out, out, add_residual)
    w = apart(parameters)
    z = layer_norm(x, x.shape[2:], w.norm_in, w.norm_in_bias, eps)
    rows = layer_norm(o.movedim(0, -1), o.shape[:1], w.norm_out, w.norm_out_bias, eps_out)
    update = linear(rows, w.p_out, w.p_out_bias) * torch.sigmoid(linear(z, w.g_out, w.g_out_bias))
    out.copy_(x + update if add_residual else update)
    return True


# --- gradients -------------------------------------------------------------------------------------------------------

# Of each layer in this order, for the normalised rows xhat that it reads: du.T @ xhat, and the sum of du.
SUMS = ("p_out", "g_out", "p_a", "g_a", "p_b", "g_b")


def _sums(sums: Tensor, w: Layers) -> dict[str, tuple[Tensor, Tensor]]:
    layers = [getattr(w, name) for name in SUMS]
    parts = sums.split([t.numel() + len(t) for t in layers])
    pairs = (part.split([t.numel(), len(t)]) for part, t in zip(parts, layers, strict=True))
    return {name: (m.view_as(t), db) for name, t, (m, db) in zip(SUMS, layers, pairs, strict=True)}


def _affine(rows: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    rows = rows if weight is None else rows * weight
    return rows if bias is None else rows + bias


def _through_norm(grad: Tensor, rows: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    _, mean, rstd = torch.native_layer_norm(rows, rows.shape[-1:], None, None, eps)
    grads = torch.ops.aten.native_layer_norm_backward(
        grad, rows.contiguous(), rows.shape[-1:], mean, rstd, weight, None, [True, False, False]
    )
    return grads[0]


def _add_layer(into: tuple[Tensor, Tensor], du: Tensor, xhat: Tensor) -> None:
    m, db = into
    m.copy_(du.flatten(0, -2).T @ xhat.flatten(0, -2))
    db.copy_(du.flatten(0, -2).sum(0))


def _out_backward(
    grad: Tensor, o: Tensor, x: Tensor, parameters: list[Any], eps: float, eps_out: float, d_o: Tensor, dz: Tensor,
    moments: Tensor, sums: Tensor,
) -> bool:  # fmt: skip
    read = (grad, o, x, parameters, eps, eps_out)
    assert not _checked_out_backward(*read, d_o, dz, moments.float(), sums.float())
    w = apart(parameters)
    _, mean, rstd = torch.native_layer_norm(x, x.shape[2:], None, None, eps)
    moments.copy_(torch.cat([rstd, -mean * rstd], -1))
    xhat = x * rstd - mean * rstd
    rows = o.movedim(0, -1)
    ohat = layer_norm(rows, o.shape[:1], None, None, eps_out)
    y = linear(_affine(ohat, w.norm_out, w.norm_out_bias), w.p_out, w.p_out_bias)
    opened = torch.sigmoid(linear(_affine(xhat, w.norm_in, w.norm_in_bias), w.g_out, w.g_out_bias))
    dy, du = grad * opened, grad * y * opened * (1 - opened)
    dz.copy_(_affine(du @ w.g_out, w.norm_in, None))
    into = _sums(sums, w)
    _add_layer(into["p_out"], dy, ohat)
    _add_layer(into["g_out"], du, xhat)
    d_o.zero_()
    d_o[..., : x.shape[1]] = _through_norm(dy @ w.p_out, rows, w.norm_out, eps_out).movedim(-1, 0)
    return True


def _in_backward(
    da: Tensor, db: Tensor, x: Tensor, mask: Tensor | None, parameters: list[Any], scale: float, eps: float,
    moments: Tensor, dz: Tensor, residual: Tensor | None, sums: Tensor,
) -> bool:  # fmt: skip
    read = (da, db, x, mask, parameters, scale, eps, moments.float())
    assert not _checked_in_backward(*read, dz, residual, sums.float())
    w, n = apart(parameters), x.shape[1]
    xhat = x * moments[..., :1] + moments[..., 1:]
    z = _affine(xhat, w.norm_in, w.norm_in_bias)
    factor: Any = 1 if mask is None else mask.to(x.dtype).unsqueeze(-1)
    total, into = dz.clone(), _sums(sums, w)
    for channels, by, p, g in ((da, scale, "p_a", "g_a"), (db, 1, "p_b", "g_b")):
        grad = channels[..., :n].movedim(0, -1) * by * factor
        value = linear(z, getattr(w, p), getattr(w, f"{p}_bias"))
        opened = torch.sigmoid(linear(z, getattr(w, g), getattr(w, f"{g}_bias")))
        dv, du = grad * opened, grad * value * opened * (1 - opened)
        _add_layer(into[p], dv, xhat)
        _add_layer(into[g], du, xhat)
        total += _affine(dv @ getattr(w, p) + du @ getattr(w, g), w.norm_in, None)
    dx = _through_norm(total, x, None, eps)
    dz.copy_(dx if residual is None else dx + residual)
    return True


def _parameter_gradients(sums: Tensor, parameters: list[Any], output_mask: list[bool]) -> list[Tensor]:
    w, dtype = apart(parameters), sums.dtype
    out = {name: None if t is None else torch.zeros_like(t, dtype=dtype) for name, t in w._asdict().items()}

    def add(name: str, t: Tensor) -> None:
        if (to := out[name]) is not None:
            to += t

    for name, (m, db) in _sums(sums.sum(0), w).items():
        norm, weight = "norm_out" if name == "p_out" else "norm_in", getattr(w, name)
        gamma, beta = getattr(w, norm), getattr(w, f"{norm}_bias")
        add(name, (m if gamma is None else m * gamma) + (0 if beta is None else db[:, None] * beta))
        add(f"{name}_bias", db)
        add(norm, (weight * m).sum(0))
        add(f"{norm}_bias", db @ weight)
    if parameters[Layers._fields.index("p_b")] is None:
        for name in ("p_a", "p_a_bias", "g_a", "g_a_bias"):
            of_a, of_b = out[name], out.pop(name.replace("_a", "_b"))
            out[name] = None if of_a is None or of_b is None else torch.cat([of_a, of_b])
    made = [out.get(name) for name in Layers._fields]
    nothing = sums.new_empty(0)
    return [nothing if t is None or not asked else t for t, asked in zip(made, output_mask, strict=True)]


# --- memory that other processes read --------------------------------------------------------------------------------


class _Stream:
    """Everything has happened when a call returns."""

    def wait_stream(self, _: Any) -> None:
        pass

    wait_event = wait_stream

    def record_event(self) -> Any:
        return self


class _Files:
    """A workspace and its handle: a file for each rank."""

    def __init__(self, group: Any, size: int) -> None:
        self.group, self.size, self.handle, self.used_by = group, size, self, None
        folder = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder, dist.get_global_rank(group, 0), group)
        paths = [Path(folder[0]) / str(rank) for rank in range(dist.get_world_size(group))]
        if dist.get_rank(group) == 0:
            for path in paths:
                path.write_bytes(b"\xff" * size)  # not a number
        dist.barrier(group)
        self.ranks = [torch.from_file(str(path), True, size, dtype=torch.uint8) for path in paths]

    def barrier(self, channel: int) -> None:
        assert symmetric_memory._agreed(self.group, channel) == [channel] * len(self.ranks)

    def get_buffer(self, rank: int, shape: Any, dtype: torch.dtype, offset: int) -> Tensor:
        size = math.prod(shape)
        return self.ranks[rank].view(dtype)[offset : offset + size].view(shape)


def _peers(group: Any, device: torch.device, size: int) -> symmetric_memory.Peers:
    workspace: Any = _Files(group, size)
    return symmetric_memory.Peers(group, device, workspace)


@contextmanager
def replaced(refuses: bool = False, shares: bool = False) -> Iterator[list[int]]:
    """Yields the numbers of rows of the blocks that were made. Memory that nobody wrote is NaN. With `shares`, ranks
    read each other's memory, and rows of channels have gaps, as for large N."""
    made: list[int] = []
    of_factors: list[weakref.ref[Tensor]] = []  # da and db of earlier elements

    def rows_in(x: Tensor, *args: Any) -> bool:
        assert not any(gradient() is not None for gradient in of_factors)
        made.append(len(x))
        return not refuses and _rows_in(x, *args)

    def in_backward(da: Tensor, db: Tensor, *args: Any) -> bool:
        of_factors.extend(weakref.ref(gradient) for gradient in (da, db))
        return _in_backward(da, db, *args)

    def far_apart(self: hopper.OwnRows, *args: Any) -> None:
        _own_rows(self, *args)
        self.stride += 4
        self.channels_shape = (self.d, self.own, self.stride)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper, "_rows_in", rows_in)
        patch.setattr(hopper, "_rows_out", _rows_out)
        patch.setattr(hopper_gradients, "_out_backward", _out_backward)
        patch.setattr(hopper_gradients, "_in_backward", in_backward)
        patch.setattr(hopper_gradients, "_parameter_gradients", _parameter_gradients)
        patch.setattr(hopper, "_have_kernels", lambda x, p_out: x.dtype == p_out.dtype)
        patch.setattr(hopper, "LEAST_ROWS", 1)
        patch.setattr(hopper, "_MULTIPLE", 1)
        if shares:
            patch.setattr(hopper.OwnRows, "__init__", far_apart)
            patch.setattr(hopper, "peers", _peers)
            patch.setattr(symmetric_memory, "_stream", lambda _: _Stream())
            patch.setattr(torch.cuda, "current_stream", _Stream)
            patch.setattr(torch.cuda, "stream", nullcontext)
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield made
        finally:
            torch.use_deterministic_algorithms(False)

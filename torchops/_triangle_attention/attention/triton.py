"""Launches of the Triton kernels of triangle attention (`kernels.py`).

The bias is read as ``(h, j, k)``, in aligned rows that end at a multiple of `_PADDING`, with -inf beyond the last key.
So loads are as wide for odd K as for even ones, and there is no tail of keys to mask. Any other bias is copied, which
has K / (R * d) of the bytes of q. At N = 768 on an H100, copying a bias with heads last made no visible difference to
the time of the forward pass (1461 us, and 1463 without the copy; bfloat16, 4 heads of 32).
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from torchops._core import devices
from torchops._core.devices import on
from torchops._core.info import allows_tf32
from torchops._core.triton.launch import Launch, launch_unless, noting
from torchops._triangle_attention.attention import kernels, kernels_backward
from torchops._triangle_attention.attention.arguments import Inputs, OutputMask, Saved
from torchops._triangle_attention.attention.aten import features_adjacent
from torchops._triangle_attention.attention.backends import why_not_triton

__all__ = [
    *("Prepared", "mask_bias_of", "attend", "attend_backward", "backward", "forward", "new_dbias", "of_keys"),
    *("padded", "padded_bias", "padded_width", "processors", "shared_memory", "sum_of_dbias", "why_not"),
]

_PADDING = 128  # every BLOCK_K divides it
_PARTIAL_BYTES = 48 << 20  # limit for the parts of the gradient of the bias


class _Launch(NamedTuple):
    """A tile of queries by keys, and how Triton compiles its loop."""

    block_j: int
    block_k: int
    warps: int
    stages: int
    registers: int | None = None
    """At most this many per thread; with fewer, a multiprocessor holds more programs."""

    def arguments(self, dtype: torch.dtype) -> dict[str, Any]:
        made = {
            "BLOCK_J": self.block_j,
            "BLOCK_K": self.block_k,
            "STAGES": None if dtype == torch.float32 else self.stages,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }
        return made if self.registers is None else made | {"maxnreg": self.registers}


# By kernel: rows of (largest padded head dimension, launch). Those for 32 are the best of sweeps on an H100. In a
# profile of the pair layer's training (4 heads, N = 768, bfloat16, a mask that leaves out a tenth), they took 1254 us
# forward, 1238 for q, 1074 for bias and 1486 for kv. Without the register limit, kv would fit 3 programs on a
# multiprocessor, not 4. The other rows were not swept.
_LAUNCHES = {
    "forward": {32: _Launch(64, 64, 4, 3), 64: _Launch(64, 64, 4, 2), 128: _Launch(128, 64, 8, 2)},
    "q": {32: _Launch(64, 64, 4, 3), 64: _Launch(64, 64, 4, 2), 128: _Launch(64, 64, 4, 2)},
    "kv": {32: _Launch(64, 64, 4, 3, 128), 64: _Launch(64, 64, 4, 2), 128: _Launch(64, 64, 8, 2)},
    "bias": {32: _Launch(64, 64, 4, 3, 168), 64: _Launch(64, 64, 4, 2), 128: _Launch(64, 64, 8, 2)},
}

# For float32, whose tiles have twice the bytes and whose products take three passes unless tf32 is allowed, with heads
# of up to 32 features and many programs. In the same sweep, these took 5505, 7092, 10042 and 4374 us.
_FLOAT32_LAUNCHES = {
    "forward": _Launch(128, 32, 8, 2, 128),
    "q": _Launch(128, 32, 8, 2, 128),
    "kv": _Launch(64, 64, 4, 2),
    "bias": _Launch(128, 64, 8, 2),
}
# Few programs, or few queries: tiles that leave no multiprocessor without work. On an H200, with 5 rows of 384 and 16
# heads of 24, these took 62, 81, 127 and 92 us; those above took 100, 114, 238 and 136.
_FEW_FLOAT32 = _Launch(32, 32, 2, 2)
# Heads of more than 32 features, up to 64.
_WIDE_FLOAT32 = {
    "forward": _Launch(32, 32, 2, 2),
    "q": _Launch(64, 32, 4, 2),
    "kv": _Launch(64, 32, 4, 2),
    "bias": _Launch(64, 64, 4, 2),
}


@cache
def _launch(kernel: str, d: int, dtype: torch.dtype, small: bool = False, few: bool = False) -> _Launch:
    if dtype != torch.float32:
        return next(launch for up_to, launch in _LAUNCHES[kernel].items() if padded(d) <= up_to)
    if padded(d) <= 32:
        return _FEW_FLOAT32 if few else _FLOAT32_LAUNCHES[kernel]
    if padded(d) <= 64 and not small:
        return _WIDE_FLOAT32[kernel]
    return _Launch(32, 16 if small and padded(d) > 64 and kernel in ("q", "kv") else 32, 4, 2)


_KERNELS = {
    "forward": kernels.forward,
    "q": kernels_backward.backward_q,
    "kv": kernels_backward.backward_kv,
    "bias": kernels_backward.backward_bias,
}


def _is_small(device: torch.device) -> bool:
    """Whether programs have 99 KiB of shared memory, as on compute capability 8.6, 8.9 and 12.0, or less. For float32
    and heads of 128, tiles of 32 keys take 101."""
    return shared_memory(device) < 101 << 10


def _are_few(q: Tensor) -> bool:
    """Whether float32 has less than two waves of programs of 128 queries, or mostly empty ones."""
    batch, rows, heads, queries, _ = q.shape
    programs = batch * rows * heads * _blocks(queries, 128)
    return q.dtype == torch.float32 and (queries <= 64 or programs < 4 * processors(q.device))


@cache
def _launcher(
    kernel: str,
    d: int,
    dtype: torch.dtype,
    masked: bool,
    tf32: bool,
    small: bool = False,
    few: bool = False,
    **constants: bool,
) -> Launch:
    """A kernel with its constants, which don't depend on the numbers of rows, queries and keys."""
    precision = "tf32" if tf32 or dtype != torch.float32 else "tf32x3"  # three products have the accuracy of float32
    options = {"D": d, "PADDED_D": padded(d), "MASKED": masked, "PRECISION": precision}
    return Launch(_KERNELS[kernel], **options, **constants, **_launch(kernel, d, dtype, small, few).arguments(dtype))


@cache
def _prepare_launcher(d: int) -> Launch:
    return Launch(kernels_backward.prepare, D=d, PADDED_D=padded(d), BLOCK_J=64)


_mask_launcher = Launch(kernels.add_of_mask, BLOCK=512)
_transpose_launcher = Launch(kernels_backward.transpose, BLOCK=64)
_parts_launcher = Launch(kernels_backward.sum_parts, BLOCK=1024)


def padded(d: int) -> int:
    """The sizes of tiles are powers of two, and those of products at least 16."""
    return max(16, 1 << (d - 1).bit_length())


def _blocks(n: int, size: int) -> int:
    return -(-n // size)


def _is_readable(t: Tensor) -> bool:
    return t.shape[-1] == 1 or features_adjacent(t)


def _readable(t: Tensor) -> Tensor:
    """With adjacent features; all other strides are arbitrary."""
    return t if _is_readable(t) else t.contiguous()


def _laid_out_like(made: Tensor | None, t: Tensor) -> Tensor | None:
    """Returns `made`, which was made for ``_readable(t)``, with the strides of ``torch.empty_like(t)``, as the fake
    kernels promise."""
    return made if made is None or _is_readable(t) else torch.empty_like(t).copy_(made)


def padded_bias(bias: Tensor) -> Tensor:
    """The bias as (batch, heads, queries, keys), in rows that end at a multiple of `_PADDING` and hold -inf beyond the
    last key."""
    bias = bias.squeeze(1)
    keys = bias.shape[-1]
    aligned = bias.stride(-1) == 1 and all(s % 16 == 0 for s in bias.stride()[:-1]) and bias.data_ptr() % 16 == 0
    if keys % _PADDING == 0 and aligned:
        return bias
    padded = bias.new_empty(*bias.shape[:-1], padded_width(keys))
    padded[..., keys:].fill_(float("-inf"))
    padded[..., :keys].copy_(bias)
    return padded


def of_keys(bias: Tensor, keys: int) -> Tensor:
    """The transpose of a bias that `padded_bias` made: (batch, heads, k, j), in rows padded in the same way."""
    batch, heads, queries, _ = bias.shape
    width = padded_width(queries)
    made = bias.new_empty((batch, heads, keys, width))
    grid = width // 64, _blocks(keys, 64), batch * heads
    _transpose_launcher(grid, bias, made, bias.stride()[:3], made.stride()[:3], queries, keys, heads)
    return made


def padded_width(n: int) -> int:
    return _blocks(n, _PADDING) * _PADDING


def _strides(t: Tensor) -> tuple[int, ...]:
    return t.stride()[:4]


def mask_bias_of(mask: Tensor, width: int) -> Tensor:
    """What a mask (batch, rows, keys) of any dtype adds to the scores, as (batch, rows, width) in float32."""
    batch, rows, keys = mask.shape
    mask_bias = mask.new_empty((batch, rows, width), dtype=torch.float32)
    mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    _mask_launcher((rows, batch, 1), mask, mask_bias, mask.stride(), rows, keys, width)
    return mask_bias


def why_not(inputs: Inputs) -> str | None:
    batch, rows, heads, _ = inputs.sizes
    return why_not_triton(inputs.q, batch, rows, heads, inputs.q.shape[-1])


def forward(inputs: Inputs) -> Saved:
    q, k, v = map(_readable, inputs[:3])
    out, lse = torch.empty_like(q), q.new_empty(inputs.sizes, dtype=torch.float32)
    bias = padded_bias(inputs.bias)
    with on(q.device):
        attend(Prepared(q, k, v, bias, _mask_bias_of(inputs.mask, bias), inputs.scale), Saved(out, lse))
    return Saved(cast(Tensor, _laid_out_like(out, inputs.q)), lse)


class Prepared(NamedTuple):
    """Inputs as the kernels take them, with the tensors' device as the current one."""

    q: Tensor
    k: Tensor
    v: Tensor
    """q, k and v have contiguous features."""
    bias: Tensor
    """From `padded_bias`."""
    mask_bias: Tensor | None
    """From `mask_bias_of`, for a mask."""
    scale: float
    scaled: bool = False
    """q is multiplied by ``scale * LOG2E`` and the bias by LOG2E, as in `kernels.py`."""


def attend(inputs: Prepared, saved: Saved) -> None:
    """The forward pass, which writes to `saved`: by the kernel in CUDA (src/cuda/attention), if there is one that is
    faster for these. `saved.out` may be q."""
    q, k, v, bias, mask_bias, scale, scaled = inputs
    out, lse = saved
    batch, rows, heads, queries, d = q.shape
    tf32, small, few = allows_tf32(q.dtype), _is_small(q.device), _are_few(q)
    launch = _launcher("forward", d, q.dtype, mask_bias is not None, tf32, small, few, SCALED=scaled)
    launch_unless(
        torch.ops.myops._triangle_attention_core.default, (*inputs, *saved),
        launch, (_blocks(queries, launch.options["BLOCK_J"]), rows, batch * heads),
        q, k, v, bias, lse if mask_bias is None else mask_bias, out, lse,
        _strides(q), _strides(k), _strides(v), bias.stride()[:3], _strides(out),
        rows, queries, k.shape[3], heads, scale, bias.shape[-1],
    )  # fmt: skip


def backward(grad: Tensor, inputs: Inputs, saved: Saved, output_mask: OutputMask) -> tuple[Tensor | None, ...]:
    grad, q, k, v, out = map(_readable, (grad, *inputs[:3], saved.out))
    padded = padded_bias(inputs.bias)
    # empty_like() of the readable tensors, because gradients are written by contiguous rows too.
    dq, dk, dv = (torch.empty_like(t) if want else None for t, want in zip((q, k, v), output_mask[:3], strict=True))
    with on(q.device):
        dbias = new_dbias(grad, k.shape[3], padded) if output_mask[3] else None
        prepared = Prepared(q, k, v, padded, _mask_bias_of(inputs.mask, padded), inputs.scale)
        attend_backward(grad, prepared, Saved(out, saved.logsumexp), (dq, dk, dv), dbias)
        # A copy if there are several parts, as the first part is a view of a larger tensor.
        summed = None if dbias is None else sum_of_dbias(dbias).to(inputs.bias.dtype, copy=len(dbias) > 1).unsqueeze(1)
    dq, dk, dv = map(_laid_out_like, (dq, dk, dv), inputs[:3])
    return dq, dk, dv, summed


def _mask_bias_of(mask: Tensor | None, bias: Tensor) -> Tensor | None:
    return None if mask is None else mask_bias_of(mask[:, :, 0, 0], bias.shape[-1])


def attend_backward(
    grad: Tensor,
    inputs: Prepared,
    saved: Saved,
    into: tuple[Tensor | None, Tensor | None, Tensor | None],
    dbias: Tensor | None,
    accumulate: bool = False,
    bias_of_keys: Tensor | None = None,
    lse_delta: Tensor | None = None,
) -> None:
    """The backward pass. Gradients of q, k and v go to the tensors in `into` that are not None. That of the bias goes
    to `dbias` (from `new_dbias`), or is added to it. `bias_of_keys` is what
    `of_keys` makes of the bias. `lse_delta` are log_sums and delta as `prepare` computes them, if they are known
    already. Gradients are those of the unscaled arguments, even if these are `scaled`.

    The last kernel computes the gradients of k and v, each tile from its own part of k and v, so they may overwrite
    these.
    """
    q, k, v, bias, mask_bias, scale, scaled = inputs
    out, lse = saved
    batch, rows, heads, queries, d = q.shape
    keys, q_width, width = k.shape[3], padded_width(queries), bias.shape[-1]
    if lse_delta is None:
        lse_delta = q.new_empty((2, batch * rows * heads * q_width), dtype=torch.float32)
        prepare = _prepare_launcher(d)
        prepare(
            (q_width // prepare.options["BLOCK_J"], rows, batch * heads),
            grad, out, lse, *lse_delta, _strides(grad), _strides(out), rows, queries, heads, q_width,
        )  # fmt: skip
    strides = *map(_strides, (grad, q, k, v)), bias.stride()[:3]
    sizes = rows, queries, keys, heads, scale, q_width, width
    gap = len(lse_delta[0])
    small, few = _is_small(q.device), _are_few(q)
    how = d, q.dtype, mask_bias is not None, allows_tf32(q.dtype), small, few
    tensors = grad, q, k, v, bias, lse if mask_bias is None else mask_bias, lse_delta
    if dbias is not None:
        grid = _tiles(_launch("bias", d, q.dtype, small, few), queries, keys), len(dbias), batch * heads
        launch = _launcher("bias", *how, ACCUMULATE=accumulate, SCALED=scaled)
        launch(grid, *tensors, dbias, *strides, *sizes, _blocks(rows, len(dbias)), gap)
    dq, dk, dv = into
    if dq is not None:
        launch = _launcher("q", *how, SCALED=scaled)
        grid = _blocks(queries, launch.options["BLOCK_J"]), rows, batch * heads
        launch(grid, *tensors, dq, *strides, _strides(dq), *sizes, gap)
    if dk is not None or dv is not None:
        launch = _launcher("kv", *how, WANT_K=dk is not None, WANT_V=dv is not None, SCALED=scaled)
        either = k if dk is None else dk, v if dv is None else dv
        bias_of_keys = of_keys(bias, keys) if bias_of_keys is None else bias_of_keys
        launch(
            (_blocks(keys, launch.options["BLOCK_K"]), rows, batch * heads),
            grad, q, k, v, bias_of_keys, *tensors[5:], *either, *strides[:4], bias_of_keys.stride()[:3],
            *map(_strides, either), *sizes, gap,
        )  # fmt: skip


def new_dbias(q: Tensor, keys: int, bias: Tensor, wide: bool = False) -> Tensor:
    """Allocates the gradient of a bias from `padded_bias`: sums over shares of the rows of q, or of a tensor like it,
    (parts, batch, heads, queries, keys), so that each multiprocessor gets at least 32 warps, of which it holds about 12
    at a time. On an H100, with N = 768 and 4 heads of 32, one part took 1274 us, two 1138, and four 1137. Float32 if
    there are several parts, or something is to be added."""
    batch, rows, heads, queries, d = q.shape
    launch = _launch("bias", d, q.dtype, _is_small(q.device), _are_few(q))
    nbytes = 4 * batch * heads * queries * keys
    warps = _tiles(launch, queries, keys) * batch * heads * launch.warps
    parts = max(1, min(_blocks(32 * processors(q.device), warps), _PARTIAL_BYTES // nbytes, rows))
    parts = _blocks(rows, _blocks(rows, parts))
    return q.new_empty((parts, batch, heads, queries, keys), dtype=torch.float32 if wide or parts > 1 else bias.dtype)


def sum_of_dbias(dbias: Tensor) -> Tensor:
    """The sum of the parts, (batch, heads, queries, keys), in the memory of the first one."""
    if len(dbias) > 1:
        size = dbias[0].numel()
        _parts_launcher((_blocks(size, 1024), 1, 1), dbias, len(dbias), size)
    return dbias[0]


def _tiles(launch: _Launch, queries: int, keys: int) -> int:
    return _blocks(queries, launch.block_j) * _blocks(keys, launch.block_k)


def processors(device: torch.device) -> int:
    return _of_processors(device)[0]


def shared_memory(device: torch.device) -> int:
    """Bytes that a program can have."""
    return _of_processors(device)[1]


def _of_processors(device: torch.device) -> tuple[int, int]:
    """The properties of a device. For meta tensors, those of the device for which launches are noted."""
    return _properties(noting.device if device.type == "meta" and noting.device else device)


@cache
def _properties(device: torch.device) -> tuple[int, int]:
    """The number of multiprocessors and the bytes of shared memory; for the interpreter, a few and no limit."""
    if device.type != "cuda":
        return 4, sys.maxsize
    properties: Any = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, devices.shared_memory(device)

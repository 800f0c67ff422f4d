"""Triangle attention on a GPU: the launches of its kernels in Triton (`_attention_kernels.py`).

The bias is read in the layout ``(h, j, k)``, in aligned rows that end at a multiple of `_PADDING`, with -inf beyond N:
so loads are as wide for odd N as for even ones, and there is no tail of keys to mask. Any other bias is copied, which
takes 1 / d of the bytes of q. At N = 768 on an H100 the copy of a bias with heads last did not show in the time of the
forward pass (1461 us, and 1463 without it; bfloat16, 4 heads of 32).
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from torchops import _attention_kernels as kernels
from torchops._triton_launch import Launch, noting

__all__ = [
    *("MAX_HEAD_DIM", "added_by", "attend", "attend_backward", "backward", "forward", "new_dbias", "of_keys"),
    *("on", "padded_bias", "padded_width", "processors", "shared_memory", "sum_of_dbias"),
]

MAX_HEAD_DIM = 128

_PADDING = 128  # every BLOCK_K divides it
_PARTIAL_BYTES = 48 << 20  # what parts of the gradient of the bias may take


class _Launch(NamedTuple):
    """Tile of queries by keys, and how Triton compiles its loop."""

    block_j: int
    block_k: int
    warps: int
    stages: int
    registers: int | None = None
    """Of a thread, at most: with fewer, a processor holds more programs."""

    def arguments(self, dtype: torch.dtype) -> dict[str, Any]:
        made = {
            "BLOCK_J": self.block_j,
            "BLOCK_K": self.block_k,
            "STAGES": None if dtype == torch.float32 else self.stages,
            "num_warps": self.warps,
            "num_stages": self.stages,
            "enable_fp_fusion": True,  # by default from some versions on, it is not
        }
        return made if self.registers is None else made | {"maxnreg": self.registers}


# By kernel, and the padded head dimension up to which a row counts. Those of 32 are the best of sweeps on an H100. In a
# profile of the pair layer's training (4 heads, N = 768, bfloat16, a mask that leaves out a tenth) they took 1254 us
# forward, 1238 for q, 1074 for bias and 1486 for kv, of which with all registers that it would take a processor holds
# 3 programs, not 4. Others were not swept.
_LAUNCHES = {
    "forward": {32: _Launch(64, 64, 4, 3), 64: _Launch(64, 64, 4, 2), 128: _Launch(128, 64, 8, 2)},
    "q": {32: _Launch(64, 64, 4, 3), 64: _Launch(64, 64, 4, 2), 128: _Launch(64, 64, 4, 2)},
    "kv": {32: _Launch(64, 64, 4, 3, 128), 64: _Launch(64, 64, 4, 2), 128: _Launch(64, 64, 8, 2)},
    "bias": {32: _Launch(64, 64, 4, 3, 168), 64: _Launch(64, 64, 4, 2), 128: _Launch(64, 64, 8, 2)},
}

# In float32, whose tiles have twice the bytes, and where three products make one unless tf32 is allowed. Swept as
# above, these took 5505, 7092, 10042 and 4374 us, and what larger heads have 12428, 16512, 24687 and 13684.
_FLOAT32_LAUNCHES = {
    "forward": _Launch(128, 32, 8, 2, 128),
    "q": _Launch(128, 32, 8, 2, 128),
    "kv": _Launch(64, 64, 4, 2),
    "bias": _Launch(128, 64, 8, 2),
}


@cache
def _launch(kernel: str, d: int, dtype: torch.dtype) -> _Launch:
    if dtype == torch.float32:
        return _FLOAT32_LAUNCHES[kernel] if _padded(d) <= 32 else _Launch(32, 32, 4, 2)
    return next(launch for up_to, launch in _LAUNCHES[kernel].items() if _padded(d) <= up_to)


_KERNELS = {
    "forward": kernels.forward,
    "q": kernels.backward_q,
    "kv": kernels.backward_kv,
    "bias": kernels.backward_bias,
}


@cache
def _launcher(kernel: str, d: int, dtype: torch.dtype, masked: bool, tf32: bool, **constants: bool) -> Launch:
    """A kernel with its constants, which don't depend on N."""
    precision = "tf32" if tf32 or dtype != torch.float32 else "tf32x3"  # three products have the accuracy of float32
    options = {"D": d, "PADDED_D": _padded(d), "MASKED": masked, "PRECISION": precision}
    return Launch(_KERNELS[kernel], **options, **constants, **_launch(kernel, d, dtype).arguments(dtype))


@cache
def _prepare_launcher(d: int) -> Launch:
    return Launch(kernels.prepare, D=d, PADDED_D=_padded(d), BLOCK_J=64)


_mask_launcher = Launch(kernels.add_of_mask, BLOCK=512)
_transpose_launcher = Launch(kernels.transpose, BLOCK=64)
_parts_launcher = Launch(kernels.sum_parts, BLOCK=1024)


def _padded(d: int) -> int:
    return max(16, 1 << (d - 1).bit_length())


def _blocks(n: int, size: int) -> int:
    return -(-n // size)


def _readable(t: Tensor) -> Tensor:
    """Rows of the features must be contiguous. All other strides are read as they are."""
    return t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


def _laid_out_like(made: Tensor | None, t: Tensor) -> Tensor | None:
    """`made` for ``_readable(t)``, in the strides that ``torch.empty_like(t)`` has, as the fake kernels promise."""
    return made if made is None or _readable(t) is t else torch.empty_like(t).copy_(made)


def padded_bias(bias: Tensor) -> Tensor:
    """The bias as (batch, heads, n, n), in rows that end at a multiple of `_PADDING`, which hold -inf beyond n."""
    bias = bias.squeeze(1)
    n = bias.shape[-1]
    aligned = bias.stride(-1) == 1 and all(s % 16 == 0 for s in bias.stride()[:-1]) and bias.data_ptr() % 16 == 0
    if n % _PADDING == 0 and aligned:
        return bias
    padded = bias.new_empty(*bias.shape[:-1], padded_width(n))
    padded[..., n:].fill_(float("-inf"))
    padded[..., :n].copy_(bias)
    return padded


def of_keys(bias: Tensor) -> Tensor:
    """Of a bias as `padded_bias` makes it, (batch, heads, k, j) in rows like its own."""
    n = bias.shape[-2]
    batch, heads, _, width = *bias.shape[:3], padded_width(n)
    made = bias.new_empty((batch, heads, n, width))
    grid = width // 64, _blocks(n, 64), batch * heads
    _transpose_launcher(grid, bias, made, bias.stride()[:3], made.stride()[:3], n, heads)
    return made


def padded_width(n: int) -> int:
    return _blocks(n, _PADDING) * _PADDING


def _strides(t: Tensor) -> tuple[int, ...]:
    return t.stride()[:4]


def added_by(mask: Tensor, width: int) -> Tensor:
    """What a mask, (batch, rows, n) and of any dtype, adds to scores, (batch, rows, width) in float32."""
    batch, rows, n = mask.shape
    added = mask.new_empty((batch, rows, width), dtype=torch.float32)
    mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    _mask_launcher((rows, batch, 1), mask, added, mask.stride(), rows, n, width)
    return added


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Launches go to the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """The result, of strides like q's, and the logarithms of sums, (batch, rows, heads, n)."""
    batch, rows, heads, n, _ = q.shape
    given_q = q
    q, k, v = _readable(q), _readable(k), _readable(v)
    out = torch.empty_like(q)
    lse = q.new_empty((batch, rows, heads, n), dtype=torch.float32)
    bias = padded_bias(bias)
    with on(q.device):
        attend(q, k, v, bias, _added(mask, bias), scale, out, lse)
    return cast(Tensor, _laid_out_like(out, given_q)), lse


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    added: Tensor | None,
    scale: float,
    out: Tensor,
    lse: Tensor,
    scaled: bool = False,
) -> None:
    """The forward pass with everything prepared: a bias as `padded_bias` makes it, a mask as `added_by` does, features
    that are contiguous, and the device of the tensors the current one. `scaled`: q is times ``scale * LOG2E`` and the
    bias times LOG2E, as in `_attention_kernels.py`."""
    batch, rows, heads, n, d = q.shape
    launch = _launcher("forward", d, q.dtype, added is not None, torch.backends.cuda.matmul.allow_tf32, SCALED=scaled)
    launch(
        (_blocks(n, launch.options["BLOCK_J"]), rows, batch * heads),
        q, k, v, bias, lse if added is None else added, out, lse,
        _strides(q), _strides(k), _strides(v), bias.stride()[:3], _strides(out),
        rows, n, heads, scale, bias.shape[-1],
    )  # fmt: skip


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    wanted: tuple[bool, bool, bool, bool],
) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v and bias that are wanted; the first three of strides like theirs."""
    given = q, k, v
    grad, q, k, v, out = map(_readable, (grad, q, k, v, out))
    padded = padded_bias(bias)
    # Like what is read: gradients are written in rows, too.
    dq, dk, dv = (torch.empty_like(t) if want else None for t, want in zip((q, k, v), wanted[:3], strict=True))
    with on(q.device):
        dbias = new_dbias(grad, padded) if wanted[3] else None
        attend_backward(grad, q, k, v, padded, _added(mask, padded), out, lse, scale, (dq, dk, dv), dbias)
        # Not a part of a larger one.
        made = None if dbias is None else sum_of_dbias(dbias).to(bias.dtype, copy=len(dbias) > 1).unsqueeze(1)
    dq, dk, dv = map(_laid_out_like, (dq, dk, dv), given)
    return dq, dk, dv, made


def _added(mask: Tensor | None, bias: Tensor) -> Tensor | None:
    return None if mask is None else added_by(mask[:, :, 0, 0], bias.shape[-1])


def attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    added: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    into: tuple[Tensor | None, Tensor | None, Tensor | None],
    dbias: Tensor | None,
    adds: bool = False,
    bias_of_keys: Tensor | None = None,
    numbers: Tensor | None = None,
    scaled: bool = False,
) -> None:
    """The backward pass with everything prepared, as for `attend`: gradients of q, k and v go to `into`, where there is
    a tensor; that of the bias to `dbias`, as `new_dbias` makes it, or is added to it. `bias_of_keys` is
    ``of_keys(bias)``; `numbers`, log_sums and delta, are as `prepare` makes them of the rest, where they are known.
    Gradients are those of what is not `scaled`.

    The last kernel makes the gradients of k and v, each tile from its own part of these: they may take their place.
    """
    batch, rows, heads, n, d = q.shape
    width = bias.shape[-1]
    if numbers is None:
        numbers = q.new_empty((2, batch * rows * heads * width), dtype=torch.float32)
        prepare = _prepare_launcher(d)
        prepare(
            (width // prepare.options["BLOCK_J"], rows, batch * heads),
            grad, out, lse, *numbers, _strides(grad), _strides(out), rows, n, heads, width,
        )  # fmt: skip
    strides = *map(_strides, (grad, q, k, v)), bias.stride()[:3]
    sizes = rows, n, heads, scale, width
    gap = len(numbers[0])
    how = d, q.dtype, added is not None, torch.backends.cuda.matmul.allow_tf32
    inputs = grad, q, k, v, bias, lse if added is None else added, numbers
    if dbias is not None:
        grid = _tiles(_launch("bias", d, q.dtype), n), len(dbias), batch * heads
        launch = _launcher("bias", *how, ADDS=adds, SCALED=scaled)
        launch(grid, *inputs, dbias, *strides, *sizes, _blocks(rows, len(dbias)), gap)
    dq, dk, dv = into
    if dq is not None:
        launch = _launcher("q", *how, SCALED=scaled)
        grid = _blocks(n, launch.options["BLOCK_J"]), rows, batch * heads
        launch(grid, *inputs, dq, *strides, _strides(dq), *sizes, gap)
    if dk is not None or dv is not None:
        launch = _launcher("kv", *how, WANT_K=dk is not None, WANT_V=dv is not None, SCALED=scaled)
        either = k if dk is None else dk, v if dv is None else dv
        bias_of_keys = of_keys(bias) if bias_of_keys is None else bias_of_keys
        launch(
            (_blocks(n, launch.options["BLOCK_K"]), rows, batch * heads),
            grad, q, k, v, bias_of_keys, *inputs[5:], *either, *strides[:4], bias_of_keys.stride()[:3],
            *map(_strides, either), *sizes, gap,
        )  # fmt: skip


def new_dbias(q: Tensor, bias: Tensor, wide: bool = False) -> Tensor:
    """For the gradient of a bias as `padded_bias` makes it: sums over shares of the rows of q, or of a tensor like it,
    (parts, batch, heads, n, n), so that each processor has at least 32 warps, of which it holds about 12 at a time:
    on an H100, with N = 768 and 4 heads of 32, one part took 1274 us, two 1138, and four 1137. Float32 where there are
    several, or something is to be added."""
    batch, rows, heads, n, d = q.shape
    launch, nbytes = _launch("bias", d, q.dtype), 4 * batch * heads * n * n
    warps = _tiles(launch, n) * batch * heads * launch.warps
    parts = max(1, min(_blocks(32 * processors(q.device), warps), _PARTIAL_BYTES // nbytes, rows))
    parts = _blocks(rows, _blocks(rows, parts))
    return q.new_empty((parts, batch, heads, n, n), dtype=torch.float32 if wide or parts > 1 else bias.dtype)


def sum_of_dbias(dbias: Tensor) -> Tensor:
    """(batch, heads, n, n), in the memory of the first part."""
    if len(dbias) > 1:
        size = dbias[0].numel()
        _parts_launcher((_blocks(size, 1024), 1, 1), dbias, len(dbias), size)
    return dbias[0]


def _tiles(launch: _Launch, n: int) -> int:
    return _blocks(n, launch.block_j) * _blocks(n, launch.block_k)


def processors(device: torch.device) -> int:
    return _of_processors(device)[0]


def shared_memory(device: torch.device) -> int:
    """Bytes that a program can have."""
    return _of_processors(device)[1]


def _of_processors(device: torch.device) -> tuple[int, int]:
    """Of a device; of that for which launches are noted, where there is no device."""
    return _properties(noting.device if device.type == "meta" and noting.device else device)


@cache
def _properties(device: torch.device) -> tuple[int, int]:
    """How many processors, and the bytes of shared memory; of the interpreter, a few and any number."""
    if device.type != "cuda":
        return 4, sys.maxsize
    properties: Any = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.shared_memory_per_block_optin

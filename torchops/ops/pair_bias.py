"""Attention with pair bias, as in AlphaFold 3. See :mod:`torchops.ops`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import SymInt, Tensor

from torchops._core.checks import DTYPES, check_device, check_dtype, check_layout, check_shape, expect, name_of
from torchops.ops.attention import triangle_attention

__all__ = ["PairBiasWeights", "attend", "attention_pair_bias", "check_inputs", "with_rows"]

_OP = "attention_pair_bias"
_OPS: Any = torch.ops.myops


class PairBiasWeights(NamedTuple):
    """The parameters of attention with pair bias, of ``c`` features in and out, and ``heads`` heads of ``d``."""

    q: Tensor
    """``(heads * d, c)``, like ``k``, ``v`` and ``gate``."""
    q_bias: Tensor | None
    """``(heads * d,)``, or ``None``."""
    k: Tensor
    v: Tensor
    gate: Tensor
    out: Tensor
    """``(c, heads * d)``."""
    z_norm_weight: Tensor | None
    """``(c_z,)``, like ``z_norm_bias``; ``None`` means 1 and 0. Either may be float32 beside 16-bit weights."""
    z_norm_bias: Tensor | None
    bias_weight: Tensor | None
    """``(heads, c_z)``: gives the bias of the scores. ``None`` if ``z`` is that bias."""
    norm_weight: Tensor | None
    """``(c,)``, like ``norm_bias``, of the layer norm of ``s``, if there is one."""
    norm_bias: Tensor | None
    heads: int
    eps: float = 1e-5
    normalize: bool = False
    """Whether ``s`` goes through a layer norm first."""


def attention_pair_bias(
    s: Tensor,
    z: Tensor,
    mask: Tensor | None,
    weights: PairBiasWeights,
    keys: Tensor | None = None,
    *,
    residual: bool = False,
) -> Tensor:
    """Attention of tokens or atoms with a bias from their pairs, gated (`Abramson et al. 2024
    <https://doi.org/10.1038/s41586-024-07487-w>`_, supplement, algorithm 24), as a new contiguous tensor.

    .. code-block:: text

        q, k, v = s @ q.T + q_bias, keys @ k.T, keys @ v.T
        bias = layer_norm(z) @ bias_weight.T
        o = triangle_attention(q, k, v, bias, mask)        of heads; rows are samples
        (o * sigmoid(s @ gate.T)) @ out.T

    Args:
        s: of shape ``(*batch, Q, c)``; or ``(*batch, samples, Q, c)``, with samples that share ``z``, which is read
            once for all of them.
        z: pairs of queries and keys, of shape ``(*batch, Q, K, c_z)``; or the bias itself, ``(*batch, Q, K, heads)``,
            if ``weights.bias_weight`` is ``None``.
        mask: of the keys, of shape ``(*batch, K)``, or ``(*batch, samples, K)``; bool or floating-point, or ``None``. A
            key whose mask is 0 (``False``) has no weight; any other number keeps it. Where no key is kept, all are. It
            has no gradient.
        weights: the parameters. With ``weights.normalize``, ``s`` and ``keys`` go through a layer norm first.
        keys: what ``k`` and ``v`` are computed from: of the shape of ``s``, but with ``K`` in the place of ``Q``.
            Default: ``s``.
        residual: return the sum with ``s`` instead, in the dtype of ``s``.

    Dtypes: float32, float64, float16 or bfloat16, one for all parameters. If that is float16 or bfloat16, ``s`` and
    ``keys``, ``z``, and the weights and biases of the norms may each be float32. Under ``torch.autocast``, products and
    the attention run in the lower precision.

    Memory: the norm of ``s``, if there is one, ``q``, ``k``, ``v``, ``o``, the gated ``o`` and the result; the norm of
    ``z`` and the bias; what :func:`triangle_attention` needs; and on other devices than the CPU, a copy of the weights
    of ``q``, ``k`` and ``v``. The scores of all samples never exist, and training does not keep them either; but
    transforms of :mod:`torch.func`, forward mode and double backward compute them.

    Raises:
        TypeError: an argument has a wrong type, such as a number instead of a tensor.
        RuntimeError: the shapes do not match; devices differ; or dtypes are not supported together.

    Example:

        >>> weights = torchops.nn.AttentionPairBias(8, 4, heads=2).weights()
        >>> samples, pairs = torch.randn(3, 5, 8), torch.randn(5, 5, 4)
        >>> torchops.attention_pair_bias(samples, pairs, None, weights).shape
        torch.Size([3, 5, 8])
    """
    check(s, z, mask, weights, keys)
    w = weights
    x = _input(with_rows(s, z), w)
    k_in = None if keys is None else _input(with_rows(keys, z), w)
    q, k, v = _projections(x, k_in, w)
    o = attend(q, k, v, _bias(z, w), mask, w.heads)
    del q, k, v
    update = _OPS._linear(_OPS.gate(o, x, w.gate, None), w.out, None).view(s.shape)
    return (s + update).to(s.dtype).contiguous() if residual else update


def with_rows(s: Tensor, z: Tensor) -> Tensor:
    """``(batch, samples, N, c)``, with one sample if ``s`` has none."""
    rows = s if s.dim() == z.dim() else s.unsqueeze(-3)
    return rows[None].flatten(0, -4)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, heads: int) -> Tensor:
    """Of ``(batch, samples, N, heads * d)``, like the result, a bias ``(*batch, Q, K, heads)`` and a mask as
    :func:`attention_pair_bias` takes it."""
    if mask is not None:
        mask = mask.unsqueeze(-2) if mask.dim() == bias.dim() - 2 else mask
        mask = (mask if mask.dtype == torch.bool else mask != 0)[None].flatten(0, -3)
        mask = mask.expand(-1, q.shape[1], -1)[:, :, None, None]
    q, k, v = (t.unflatten(-1, (heads, t.shape[-1] // heads)).transpose(-3, -2) for t in (q, k, v))
    bias = bias[None].flatten(0, -4).permute(0, 3, 1, 2).unsqueeze(1)
    return triangle_attention(q, k, v, bias, mask).transpose(-3, -2).flatten(-2)


# --- steps -----------------------------------------------------------------------------------------------------------


def _norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """The parameters stay float32 beside an x of 16 bits, and otherwise take its dtype."""
    weight, bias = (t if t is None or t.dtype == torch.float32 else t.to(x.dtype) for t in (weight, bias))
    normed: Tensor = _OPS.layer_norm(x, x.shape[-1:], weight, bias, eps)
    return normed


def _under_autocast(device_type: str) -> bool:
    """Meta tensors, and some devices of other backends, have no autocast to ask for. Dynamo of torch 2.11 cannot trace
    the question which ones have."""
    if torch.compiler.is_compiling():
        return device_type in ("cpu", "cuda") and torch.is_autocast_enabled(device_type)
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


def _as_parameters(x: Tensor, w: PairBiasWeights) -> Tensor:
    return x if _under_autocast(x.device.type) else x.to(w.q.dtype)


def _input(s: Tensor, w: PairBiasWeights) -> Tensor:
    return _as_parameters(_norm(s, w.norm_weight, w.norm_bias, w.eps) if w.normalize else s, w)


def _projections(x: Tensor, keys: Tensor | None, w: PairBiasWeights) -> Sequence[Tensor]:
    """q, k and v. A CPU would gain nothing from a packed copy of the weights."""
    if x.device.type != "cpu":
        return _packed_projections(x, keys, w)
    k_in = x if keys is None else keys
    return _OPS._linear(x, w.q, w.q_bias), _OPS._linear(k_in, w.k, None), _OPS._linear(k_in, w.v, None)


def _packed_projections(x: Tensor, keys: Tensor | None, w: PairBiasWeights) -> Sequence[Tensor]:
    """In one product of each input."""
    width = w.q.shape[0]
    if keys is not None:
        return _OPS._linear(x, w.q, w.q_bias), *_OPS._linear(keys, torch.cat((w.k, w.v)), None).split(width, -1)
    bias = None if w.q_bias is None else torch.cat((w.q_bias, w.q_bias.new_zeros(2 * width)))
    packed: Sequence[Tensor] = _OPS._linear(x, torch.cat((w.q, w.k, w.v)), bias).split(width, -1)
    return packed


def _bias(z: Tensor, w: PairBiasWeights) -> Tensor:
    if w.bias_weight is None:
        return _as_parameters(z, w)
    bias: Tensor = _OPS._linear(_as_parameters(_norm(z, w.z_norm_weight, w.z_norm_bias, w.eps), w), w.bias_weight, None)
    return bias


# --- checks ----------------------------------------------------------------------------------------------------------

_Shapes = dict[str, tuple[Any, tuple[Any, ...], str]]
"""By name: a tensor or None, the shape that it must have, and what asks for that."""


def check(s: Tensor, z: Tensor, mask: Tensor | None, w: PairBiasWeights, keys: Tensor | None) -> None:
    """Raises what :func:`attention_pair_bias` does for these arguments."""
    if not isinstance(w, PairBiasWeights):
        raise TypeError(f"{_OP}: expected weights of type PairBiasWeights, got {type(w).__name__}")
    if not isinstance(w.heads, (int, SymInt)):
        raise TypeError(f"{_OP}: expected heads of type int, got {type(w.heads).__name__}")
    if not isinstance(w.q, Tensor):
        raise TypeError(f"{_OP}: expected q of type Tensor, got {type(w.q).__name__}")
    check_layout(_OP, "q", w.q)
    expected = "float32, float64, float16 or bfloat16"
    expect(w.q.dtype in DTYPES, lambda: f"{_OP}: expected q of dtype {expected}, got {name_of(w.q.dtype)}")
    expect(
        w.q.dim() == 2 and w.heads >= 1 and w.q.shape[0] > 0 and w.q.shape[0] % w.heads == 0,
        lambda: f"{_OP}: expected q of shape (heads * d, c) with heads = {w.heads}, got {tuple(w.q.shape)}",
    )
    check_inputs(s, z, mask, keys, w.q.shape[1], w.heads if w.bias_weight is None else None)
    autocast = _under_autocast(w.q.device.type)
    for name, t in (("s", s), ("keys", keys), ("z", z)):
        if t is not None:
            _check_like(name, t, w.q, autocast, or_float32=True)
    for name, (t, shape, of) in _of_weights(w, z.shape[-1]).items():
        if t is None:
            continue
        if not isinstance(t, Tensor):
            raise TypeError(f"{_OP}: expected {name} of type Tensor, got {type(t).__name__}")
        check_layout(_OP, name, t)
        _check_like(name, t, w.q, autocast, or_float32="norm" in name)
        check_shape(_OP, name, t, shape, of)
    if mask is not None:
        check_device(_OP, "mask", mask, w.q.device, "q")


def check_inputs(
    s: Tensor, z: Tensor, mask: Tensor | None, keys: Tensor | None, c: Any, c_z: Any, parameters: str = "q"
) -> None:
    """Checks kinds and shapes, for `c` features of `s`, and `c_z` of `z` unless any will do. They match what is named
    `parameters`."""
    for name, t in (("s", s), ("z", z), ("mask", mask), ("keys", keys)):
        if t is None and name in ("mask", "keys"):
            continue
        if not isinstance(t, Tensor):
            raise TypeError(f"{_OP}: expected {name} of type Tensor, got {type(t).__name__}")
        check_layout(_OP, name, t)
    expect(
        z.dim() >= 3 and s.dim() in (z.dim() - 1, z.dim()),
        lambda: (
            f"{_OP}: expected s of shape (*batch, Q, c) or (*batch, samples, Q, c) and z of shape (*batch, Q, K, c_z), "
            f"got {tuple(s.shape)} and {tuple(z.shape)}"
        ),
    )
    of_keys: Any = s.shape if keys is None else keys.shape
    count = of_keys[-2] if len(of_keys) > 1 else "K"
    check_shape(_OP, "s", s, (*s.shape[:-1], c), parameters)
    if keys is not None:
        check_shape(_OP, "keys", keys, (*s.shape[:-2], count, s.shape[-1]), "s")
    of_z = (*s.shape[: z.dim() - 3], s.shape[-2], count, z.shape[-1] if c_z is None else c_z)
    check_shape(_OP, "z", z, of_z, "s" if keys is None else "s and keys")
    if mask is not None:
        expect(
            mask.dtype == torch.bool or mask.is_floating_point(),
            lambda: f"{_OP}: expected mask of dtype bool or floating-point, got {name_of(mask.dtype)}",
        )
        leading = s.shape[:-2] if mask.dim() == s.dim() - 1 else z.shape[:-3]
        check_shape(_OP, "mask", mask, (*leading, z.shape[-2]), "z")


def _of_weights(w: PairBiasWeights, c_z: Any) -> _Shapes:
    (width, c), like_q, of_z = w.q.shape, ("k", "v", "gate"), ("z_norm_weight", "z_norm_bias")
    shapes: dict[str, tuple[Any, ...]] = {
        **dict.fromkeys(like_q, (width, c)),
        **{"q_bias": (width,), "out": (c, width), "bias_weight": (w.heads, c_z)},
        **dict.fromkeys(of_z, (c_z,)),
        **dict.fromkeys(("norm_weight", "norm_bias"), (c,)),
    }
    for name in (*like_q, "out"):
        if getattr(w, name) is None:
            raise TypeError(f"{_OP}: expected {name} of type Tensor, got NoneType")
    unread = ("norm_weight", "norm_bias") if not w.normalize else ()
    for name in (*unread, *(of_z if w.bias_weight is None else ())):
        if getattr(w, name) is not None:
            needed = "bias_weight" if name in of_z else "normalize"
            raise RuntimeError(f"{_OP}: expected no {name} without {needed}, got one")
    return {name: (getattr(w, name), shape, "z" if name in of_z else "q") for name, shape in shapes.items()}


def _check_like(name: str, t: Tensor, q: Tensor, autocast: bool, *, or_float32: bool) -> None:
    if autocast:
        _check_autocast(name, t, q)
    else:
        check_dtype(_OP, name, t, q.dtype, "q", or_float32=or_float32)
    check_device(_OP, name, t, q.device, "q")


def _check_autocast(name: str, t: Tensor, q: Tensor) -> None:
    """Autocast casts to a lower precision, but not float64."""
    wide = q.dtype == torch.float64
    expected = "float64" if wide else "float32, float16 or bfloat16"
    expect(
        t.is_floating_point() and (t.dtype == torch.float64) == wide,
        lambda: f"{_OP}: expected {name} of dtype {expected} to match q, got {name_of(t.dtype)}",
    )

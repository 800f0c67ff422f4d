"""As `test_properties.py`, for operators on pair tensors, and for products of eight bits."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import triangle_reference
from torch import Tensor
from triangle_attention_samples import NAMES, update_reference

import torchops
from torchops import AttentionWeights, triangle_attention_update
from torchops._triangle_attention.update import panels

pytest.importorskip("hypothesis", reason="hypothesis is not installed")

from hypothesis import assume, given, note
from hypothesis import strategies as st
from test_properties import DTYPE, Draw, Shape, overlapping, strided

SIZE = st.one_of(st.integers(1, 9), st.sampled_from([16, 17, 32]))
BATCH = st.sampled_from([(), (), (1,), (2,), (2, 1)])


def drawn(draw: Draw, shape: Shape, dtype: torch.dtype, *, written: bool = False, scale: float = 1.0) -> Tensor:
    t = strided(draw, shape, dtype, "cpu", expand=not written, negate=not written)
    assume(bool(t.isfinite().all()))
    return t if written else t * scale if scale != 1.0 else t


def optional(draw: Draw, *args: Any, **kwargs: Any) -> Tensor | None:
    return drawn(draw, *args, **kwargs) if draw(st.booleans()) else None


def parts_of_one_storage(draw: Draw, arguments: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of the same shapes, of which any may overlap any other."""
    names = [name for name, value in arguments.items() if isinstance(value, Tensor)]
    pieces = overlapping(draw, [tuple(arguments[name].shape) for name in names], dtype, "cpu")
    base = pieces[0]._base  # type: ignore[union-attr]
    assert base is not None
    base *= 0.3  # about the size that weights have
    return arguments | dict(zip(names, pieces, strict=True))


def doubled(value: Any) -> Any:
    floating = isinstance(value, Tensor) and value.is_floating_point()
    return value.detach().double().requires_grad_(value.requires_grad) if floating else value


def distance(got: Tensor, exact: Tensor) -> float:
    """The greatest difference, in units of the greatest value, or of 1 where that is less."""
    if not exact.numel():
        return 0.0
    return (got.double() - exact).abs().max().item() / max(1.0, exact.abs().max().item())


# What is left where large terms cancel, which PyTorch's operators may round in a luckier way.
LEFT = {torch.float64: 1e-9, torch.float32: 2e-3, torch.float16: 0.02, torch.bfloat16: 0.1}


def assert_near(got: Tensor, plain: Tensor, exact: Tensor) -> None:
    """Not much farther from the value in float64 than PyTorch's operators in the same dtype."""
    assert (got.shape, got.dtype) == (plain.shape, plain.dtype)
    assume(bool(plain.isfinite().all()) and bool(exact.isfinite().all()))
    assert distance(got, exact) <= 4 * distance(plain, exact) + LEFT[got.dtype]


def compare(function: Any, reference: Any, leaves: dict[str, Any], draw: Draw) -> None:
    """Values, and gradients of those arguments that require one."""
    for name, value in leaves.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            leaves[name] = value.detach().requires_grad_(draw(st.booleans()))
    plain_leaves = {
        n: v.detach().clone().requires_grad_(v.requires_grad) if isinstance(v, Tensor) else v for n, v in leaves.items()
    }
    exact_leaves = {n: doubled(v) for n, v in leaves.items()}
    got, plain, exact = function(**leaves), reference(**plain_leaves), reference(**exact_leaves)
    assert_near(got.detach(), plain.detach(), exact.detach())
    wanted = [n for n, v in leaves.items() if isinstance(v, Tensor) and v.requires_grad]
    note(f"gradients of {wanted}")
    assert got.requires_grad == bool(wanted)
    if wanted:
        g = drawn(draw, tuple(got.shape), got.dtype)
        of = ((got, leaves, g), (plain, plain_leaves, g.to(plain.dtype)), (exact, exact_leaves, g.double()))
        gradients = [torch.autograd.grad(y, [inputs[n] for n in wanted], grad) for y, inputs, grad in of]
        for one, other, true in zip(*gradients, strict=True):
            assert_near(one, other, true)


# --- the triangle update ---------------------------------------------------------------------------------------------


def update_arguments(draw: Draw, written: bool = False) -> dict[str, Any]:
    dtype, batch = draw(DTYPE), draw(BATCH)
    # With one feature all rows are equal after the norm, and what each loses in 16 bits adds up.
    n, c, d = draw(st.one_of(st.just(0), SIZE)), draw(SIZE.filter(lambda c: c > 1 or dtype.itemsize > 2)), draw(SIZE)
    torch.manual_seed(draw(st.integers(0, 99)))
    of_x = torch.float32 if dtype.itemsize == 2 and draw(st.booleans()) else dtype
    note(f"batch {batch}, N {n}, c {c}, d {d}, x {of_x}, weights {dtype}")
    mask = draw(st.sampled_from([None, torch.bool, dtype]))
    return {
        "x": drawn(draw, (*batch, n, n, c), of_x, written=written),
        "direction": draw(st.sampled_from(["outgoing", "incoming"])),
        "mask": None if mask is None else (torch.rand(*batch, n, n) > 0.3).to(mask),
        "norm_in_weight": optional(draw, (c,), dtype),
        "norm_in_bias": optional(draw, (c,), dtype),
        "p_in_weight": drawn(draw, (2 * d, c), dtype, scale=c**-0.5),
        "p_in_bias": optional(draw, (2 * d,), dtype),
        "g_in_weight": drawn(draw, (2 * d, c), dtype, scale=c**-0.5),
        "g_in_bias": optional(draw, (2 * d,), dtype),
        "norm_out_weight": optional(draw, (d,), dtype),
        "norm_out_bias": optional(draw, (d,), dtype),
        "p_out_weight": drawn(draw, (c, d), dtype, scale=d**-0.5),
        "p_out_bias": optional(draw, (c,), dtype),
        "g_out_weight": drawn(draw, (c, c), dtype, scale=c**-0.5),
        "g_out_bias": optional(draw, (c,), dtype),
        "eps": 0.1,  # rows of one value are no test of rounding
    }


@given(data=st.data())
def test_triangle_update(data: st.DataObject) -> None:
    arguments = update_arguments(data.draw)
    compare(
        torchops.triangle_multiplicative_update, triangle_reference.triangle_multiplicative_update, arguments, data.draw
    )


@given(data=st.data())
def test_triangle_update_in_place(data: st.DataObject) -> None:
    arguments = update_arguments(data.draw, written=True)
    if data.draw(st.integers(0, 2)) == 0:
        arguments = parts_of_one_storage(data.draw, arguments, arguments["p_in_weight"].dtype)
    assert_overwrites(
        torchops.add_triangle_multiplicative_update_, triangle_reference.add_triangle_multiplicative_update_, arguments
    )


def assert_overwrites(function: Any, reference: Any, arguments: dict[str, Any]) -> None:
    """x gets the value of `reference`, and nothing beside its elements changes."""
    x, version = arguments["x"], arguments["x"]._version
    plain, exact = (reference(**of) for of in (arguments, {name: doubled(value) for name, value in arguments.items()}))
    around = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    before = around.clone()
    others = [(t, t.clone()) for t in arguments.values() if isinstance(t, Tensor) and t is not x]
    assert function(**arguments) is x
    assert x._version == version + 1
    for now, then in others:
        if now.untyped_storage().data_ptr() != x.untyped_storage().data_ptr():
            assert torch.equal(now, then)
    assert_near(x, plain.to(x.dtype), exact)
    x.zero_()
    before.as_strided(x.shape, x.stride(), x.storage_offset()).zero_()
    torch.testing.assert_close(around, before, rtol=0, atol=0, equal_nan=True)


# --- attention -------------------------------------------------------------------------------------------------------


def written_out(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None) -> Tensor:
    s = q @ k.mT * q.shape[-1] ** -0.5 + bias
    return torch.softmax(s if mask is None else s.masked_fill(~mask, -torch.inf), -1) @ v


@given(data=st.data())
def test_triangle_attention(data: st.DataObject) -> None:
    draw = data.draw
    dtype, batch, n, heads = draw(DTYPE), draw(st.integers(1, 2)), draw(SIZE), draw(st.integers(1, 4))
    rows, keys = draw(st.integers(1, 5)), draw(st.one_of(st.just(n), SIZE))
    d = draw(st.sampled_from([4, 8, 16, 17, 32]))
    torch.manual_seed(draw(st.integers(0, 99)))
    note(f"batch {batch}, R {rows}, Q {n}, K {keys}, H {heads}, d {d}, {dtype}")
    sizes = {"q": n, "k": keys, "v": keys}
    arguments: dict[str, Any] = {t: drawn(draw, (batch, rows, heads, size, d), dtype) for t, size in sizes.items()}
    arguments["bias"] = drawn(draw, (batch, 1, heads, n, keys), dtype)
    mask = torch.rand(batch, rows, 1, 1, keys) > 0.3
    mask[..., 0] = True  # what a row without keys gives is a matter of definition
    arguments["mask"] = mask if draw(st.booleans()) else None
    compare(torchops.triangle_attention, written_out, arguments, draw)


# --- the update by triangle attention ---------------------------------------------------------------------------------


def attention_arguments(draw: Draw, written: bool = False) -> dict[str, Any]:
    dtype, batch = draw(DTYPE), draw(BATCH)
    n, c = draw(st.one_of(st.just(0), SIZE)), draw(SIZE.filter(lambda c: c > 1 or dtype.itemsize > 2))
    heads = draw(st.integers(1, 3))
    width = heads * draw(st.sampled_from([1, 4, 8, 16, 17]))
    torch.manual_seed(draw(st.integers(0, 99)))
    of_x = torch.float32 if dtype.itemsize == 2 and draw(st.booleans()) else dtype
    note(f"batch {batch}, N {n}, c {c}, {heads} heads, {width} features, x {of_x}, weights {dtype}")
    of_mask, gated = draw(st.sampled_from([None, torch.bool, dtype])), draw(st.booleans())
    return {
        "x": drawn(draw, (*batch, n, n, c), of_x, written=written),
        "mask": None if of_mask is None else (torch.rand(*batch, n, n) > 0.3).to(of_mask),
        "node": draw(st.sampled_from(["starting", "ending"])),
        # Small, as scores are then: where one key has all the weight, gradients cancel, and what is left of them is the
        # rounding of large scores.
        "norm_weight": optional(draw, (c,), dtype, scale=0.3),
        "norm_bias": optional(draw, (c,), dtype, scale=0.1),
        "bias_weight": drawn(draw, (heads, c), dtype, scale=c**-0.5),
        **{name: drawn(draw, (width, c), dtype, scale=0.25 * c**-0.5) for name in "qkv"},
        "gate": drawn(draw, (width, c), dtype, scale=c**-0.5) if gated else None,
        "gate_bias": optional(draw, (width,), dtype) if gated else None,
        "out": drawn(draw, (c, width), dtype, scale=width**-0.5),
        "out_bias": optional(draw, (c,), dtype),
        "heads": heads,
    }


def with_a_key_in_every_row(mask: Tensor | None) -> None:
    """What a row without keys gives is a matter of definition, and tested elsewhere."""
    if mask is not None:
        mask[..., :1] = 1
        mask[..., :1, :] = 1


def attention_update(x: Tensor, mask: Tensor | None, node: Any, adds: str = "", **weights: Any) -> Tensor:
    return triangle_attention_update(
        x, mask, AttentionWeights(**weights, eps=0.1), node, inplace=adds == "in place", residual=adds == "residual"
    )


def attention_update_written_out(
    x: Tensor, mask: Tensor | None, node: str, adds: str = "", *, heads: int, **w: Any
) -> Tensor:
    made = update_reference(x, mask, [w[name] for name in NAMES], heads, 0.1, node == "ending")
    return x + made if adds else made


@given(data=st.data())
def test_attention_update(data: st.DataObject) -> None:
    arguments = attention_arguments(data.draw)
    mask = arguments.pop("mask")
    with_a_key_in_every_row(mask)
    arguments["adds"] = data.draw(st.sampled_from(["", "residual"]))
    compare(
        lambda **given: attention_update(mask=mask, **given),
        lambda **given: attention_update_written_out(mask=mask, **given),
        arguments,
        data.draw,
    )


@given(data=st.data())
def test_attention_update_in_place(data: st.DataObject) -> None:
    arguments = attention_arguments(data.draw, written=True)
    if data.draw(st.integers(0, 2)) == 0:
        arguments = parts_of_one_storage(data.draw, arguments, arguments["q"].dtype)
    with_a_key_in_every_row(arguments["mask"])
    # With small panels, x is read after a part of it has been overwritten.
    panel_bytes = data.draw(st.sampled_from([1, panels.CPU_BYTES]))
    with mock.patch.object(panels, "CPU_BYTES", panel_bytes):
        assert_overwrites(attention_update, attention_update_written_out, arguments | {"adds": "in place"})


# --- eight bits ------------------------------------------------------------------------------------------------------


@given(data=st.data())
def test_eight_bits(data: st.DataObject) -> None:
    draw, eight = data.draw, torch.float8_e4m3fn
    leading, inner, out = draw(BATCH), draw(SIZE), draw(SIZE)
    leading = (*leading, draw(st.one_of(st.just(0), SIZE)))
    torch.manual_seed(draw(st.integers(0, 99)))
    x, w, wg = (
        strided(draw, shape, torch.float32, "cpu", negate=False).clamp(-400, 400).nan_to_num().to(eight)
        for shape in ((*leading, inner), (out, inner), (out, inner))
    )
    scale_x = torch.rand((*leading, 1) if draw(st.booleans()) else (1,)) + 0.5
    scale_w, scale_wg = (torch.rand((1, out) if draw(st.booleans()) else (1,)) / inner**0.5 for _ in range(2))
    dtype = draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    b, bg = (torch.randn(out).to(dtype) if draw(st.booleans()) else None for _ in range(2))
    activation: Any = draw(st.sampled_from(["sigmoid", "silu"]))
    note(f"x {tuple(x.shape)} of strides {x.stride()}, out {out}, {dtype}")

    def linear(w: Tensor, scale: Tensor, b: Tensor | None) -> Tensor:
        z = (x.double() @ w.double().T) * scale_x.double() * scale.double()
        return z if b is None else z + b.double()

    z, u = linear(w, scale_w, b), linear(wg, scale_wg, bg)
    v = strided(draw, (*leading, out), dtype, "cpu")
    assume(bool(v.isfinite().all()))
    calls = (
        (torchops.dense_scaled(x, w, scale_x, scale_w, b, out_dtype=dtype), torch.sigmoid(z)),
        (torchops.gate_scaled(v, x, w, scale_x, scale_w, b), v.double() * torch.sigmoid(z)),
        (
            torchops.glu_scaled(
                x,
                w,
                wg,
                scale_x,
                scale_w,
                scale_wg,
                b,
                bg,
                activation=activation,
                out_dtype=dtype,
            ),
            z * (torch.sigmoid(u) if activation == "sigmoid" else torch.nn.functional.silu(u)),
        ),
    )
    for got, exact in calls:
        assert got.dtype == dtype
        assert got.shape == exact.shape
        assert got.is_contiguous()
        assert distance(got, exact) <= 4 * torch.finfo(dtype).eps + 1e-5

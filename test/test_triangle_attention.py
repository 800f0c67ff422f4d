"""Triangle attention beyond `op_db.py`: larger sizes, rows without keys, strides, and private operators."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from attention_samples import (
    DEVICES,
    DTYPES,
    arguments,
    assert_close,
    check,
    exact,
    with_gradients,
)
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode
from triangle_attention_samples import attention_reference as reference

import torchops

OPS = torch.ops.myops

# --- values and gradients --------------------------------------------------------------------------------------------

# Queries, d and what else; on CUDA the tail of a block of keys, more than one block, one key more, and odd features.
SIZES: dict[str, dict[str, Any]] = {
    "odd": {"n": 13, "d": 5, "batch": 2, "heads": 3},
    "block": {"n": 64, "d": 32},
    "rows": {"n": 33, "rows": 4, "d": 24},
    "one_more": {"n": 129, "rows": 3, "d": 32},
    "wide": {"n": 70, "rows": 3, "d": 128, "heads": 1},
    "window": {"n": 32, "keys": 128, "rows": 2, "d": 32},
    "more_keys": {"n": 33, "keys": 139, "rows": 3, "d": 24, "batch": 2},
    "fewer_keys": {"n": 139, "keys": 33, "rows": 3, "d": 48},
    "one_query": {"n": 1, "keys": 70, "rows": 5, "d": 16},
    "one_key": {"n": 70, "keys": 1, "rows": 2, "d": 16},
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("size", SIZES)
def test_values_and_gradients(size: str, masked: bool, dtype: torch.dtype, device: str) -> None:
    check(arguments(**SIZES[size], masked=masked, dtype=dtype, device=device, requires_grad=True))


@pytest.mark.parametrize("device", DEVICES)
def test_panels(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """In several panels, of which the last is smaller."""
    from torchops._triangle_attention.attention import aten

    monkeypatch.setattr(aten, "_PANEL_BYTES", 50000)
    for masked, keys in product((False, True), (23, 9, 50)):
        check(arguments(23, keys=keys, masked=masked, device=device, requires_grad=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_row_without_keys(dtype: torch.dtype, device: str) -> None:
    """Is what it is without a mask; a key that is not kept has no weight, even if its values are not numbers."""
    q, k, v, bias, _ = arguments(20, dtype=dtype, device=device)
    mask = torch.ones(1, 20, 1, 1, 20, dtype=torch.bool, device=device)
    mask[:, 3] = False
    whole = torchops.triangle_attention(q, k, v, bias)
    torch.testing.assert_close(torchops.triangle_attention(q, k, v, bias, mask), whole)
    mask[:, 5, ..., 7:] = False
    row = torchops.triangle_attention(q, k, v, bias, mask)[:, 5]
    fewer: Any = [t[:, 5:6, :, :7] for t in (q, k, v)]
    expected = OPS.triangle_attention(*fewer, bias[..., :7, :7])[:, 0]
    torch.testing.assert_close(row[:, :, :7], expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("node", ["starting", "ending"])
def test_views(node: str, dtype: torch.dtype, device: str) -> None:
    """Of one product for q, k, v and a bias with heads last: the layout of the result allows the heads to be joined
    without a copy."""
    n, heads, d = 17, 2, 16
    product = torch.randn(1, n, n, 3 * heads * d, dtype=dtype, device=device)
    bias = torch.randn(1, n, n, heads, dtype=dtype, device=device)
    mask = torch.rand(1, n, n, device=device) > 0.2
    if node == "ending":
        product, bias, mask = product.transpose(1, 2), bias.transpose(1, 2), mask.mT
    q, k, v = (t.unflatten(-1, (heads, d)).transpose(-3, -2) for t in product.chunk(3, -1))
    strided = q, k, v, bias.movedim(-1, 1).unsqueeze(1), mask[:, :, None, None]
    assert not any(t.is_contiguous() for t in strided[:4])
    leaves = [t.detach().requires_grad_() for t in strided[:4]]
    got = check((*leaves, strided[-1]))  # type: ignore[arg-type]
    joined = got[0].transpose(-3, -2).flatten(-2)
    assert joined.untyped_storage().data_ptr() == got[0].untyped_storage().data_ptr()
    expanded = mask[:, :1, None, None].expand(1, n, 1, 1, n)
    check((*leaves, expanded))  # type: ignore[arg-type]
    own = [t.detach()[:, :, :, :7].requires_grad_() for t in leaves[:1]]  # some of the queries
    of_some = leaves[3].detach()[..., :7, :].requires_grad_()
    check((*own, *leaves[1:3], of_some, strided[-1]))  # type: ignore[arg-type]
    features = (leaves[0].mT.contiguous().mT, *leaves[1:], None)  # features that are not side by side
    check(tuple(t if t is None else t.detach().requires_grad_() for t in features))  # type: ignore[arg-type]


# Features are adjacent here, and not in torch.empty_like() of these, except where N is larger than the head.
STRIDES = {
    "windows": lambda device: torch.randn(1, 3, 2, 20, device=device).unfold(-1, 16, 1),
    "more windows": lambda device: torch.randn(1, 3, 2, 55, device=device).unfold(-1, 16, 1),
    "rows overlap": lambda device: torch.randn(1, 2, 5, 10, device=device).unfold(-1, 8, 1).permute(0, 3, 1, 2, 4),
    "heads overlap": lambda device: torch.randn(1, 3, 5, 9, device=device).unfold(-1, 8, 1).transpose(2, 3),
    "of a stride of 1": lambda device: torch.randn(24, device=device).as_strided((1, 3, 1, 5, 8), (24, 8, 1, 0, 1)),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("strides", STRIDES)
def test_strides_that_empty_like_does_not_keep(strides: str, which: int, device: str) -> None:
    strided = STRIDES[strides](device)
    args: list[Any] = [torch.randn(strided.shape, device=device) for _ in range(3)]
    args[which] = strided
    batch, _, heads, n, _ = strided.shape
    args.append(torch.randn(batch, 1, heads, n, n, device=device))
    check((*(t.requires_grad_() for t in args), None))


@pytest.mark.parametrize(
    "output_mask", list(product([False, True], repeat=4)), ids=lambda w: "".join(str(int(x)) for x in w)
)
def test_only_what_is_asked_for(output_mask: tuple[bool, ...]) -> None:
    q, k, v, bias, mask = arguments(6, keys=5, masked=True)
    out, logsumexp = OPS._triangle_attention(q, k, v, bias, mask, 0.25)
    grads = OPS._triangle_attention_backward(
        torch.randn_like(q), q, k, v, bias, mask, out, logsumexp, 0.25, output_mask
    )
    assert [g.shape for g in grads] == [
        t.shape if w else (0,) for t, w in zip((q, k, v, bias), output_mask, strict=True)
    ]


# --- what the dispatcher asks for ------------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
def test_opcheck(masked: bool) -> None:
    q, k, v, bias, mask = arguments(5, keys=7, dtype=torch.float32, masked=masked)
    torch.library.opcheck(OPS._triangle_attention.default, (q, k, v, bias, mask, 0.25))
    out, logsumexp = OPS._triangle_attention(q, k, v, bias, mask, 0.25)
    arguments_of_backward = torch.randn_like(q), q, k, v, bias, mask, out, logsumexp, 0.25
    for output_mask in ([True] * 4, [False, True, False, True]):
        torch.library.opcheck(OPS._triangle_attention_backward.default, (*arguments_of_backward, output_mask))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled(dynamic: bool, device: str) -> None:
    """With the operator in one graph; dynamic, one graph for all numbers of queries and keys."""
    counter = CompileCounterWithBackend("inductor")

    def model(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None) -> Tensor:
        return torchops.triangle_attention(q * 2, k, v, bias.sigmoid(), mask) + 1

    def expected_model(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None) -> Tensor:
        return reference(q * 2, k, v, bias.sigmoid(), mask) + 1

    compiled = torch.compile(model, fullgraph=True, backend=counter, dynamic=dynamic)
    sizes = ((6, 9), (7, 5), (11, 11)) if dynamic else ((6, 9),)
    for n, keys in sizes:
        args = arguments(n, keys=keys, dtype=torch.float32, device=device, masked=True, requires_grad=True)
        cotangent = torch.randn_like(args[0])
        got = with_gradients(compiled, args, cotangent)
        assert_close(got, with_gradients(expected_model, exact(args), cotangent), 1e-5)
    assert counter.frame_count == 1


@pytest.mark.parametrize("device", DEVICES)
def test_vmap(device: str) -> None:
    given: Any = arguments(5, keys=7, batch=3, device=device, masked=True)
    stacked = [torch.stack([t, t.flip(0)]) for t in given]
    expected = torch.stack([torchops.triangle_attention(*args) for args in zip(*stacked, strict=True)])
    torch.testing.assert_close(torch.func.vmap(OPS.triangle_attention)(*stacked), expected)
    *rows, bias, mask = stacked
    shared = torch.func.vmap(OPS.triangle_attention, (0, 0, 0, None, None))(*rows, bias[0], mask[0])
    torch.testing.assert_close(shared[0], expected[0])


def test_vmap_over_nothing() -> None:
    q, k, v, bias, mask = arguments(5, 4, batch=3, masked=True)
    empty: Any = [t.new_empty(0, *t.shape) for t in (q, k, v, bias)]
    assert torch.vmap(torchops.triangle_attention)(*empty).shape == (0, *q.shape)
    some = torch.vmap(torchops.triangle_attention, (1, None, None, None, None))(
        empty[0].movedim(0, 1), k, v, bias, mask
    )
    assert some.shape == (0, *q.shape)
    kept = OPS._triangle_attention(q, k, v, bias, mask, 0.5)

    def backward(grad: Tensor) -> Any:
        return OPS._triangle_attention_backward(grad, q, k, v, bias, mask, *kept, 0.5, [True] * 4)

    grads = torch.vmap(backward)(empty[0])
    assert [g.shape for g in grads] == [(0, *t.shape) for t in (q, k, v, bias)]


def test_flops() -> None:
    """Two products of 2 * R * H * Q * K * d in the forward pass; the gradients compute that of scores again."""
    n, keys, d, heads = 6, 7, 5, 2
    product = 2 * n * heads * n * keys * d
    counts = {}
    for wanted in ("", "q", "k", "v", "b", "qkvb"):
        args = arguments(n, d, keys=keys, heads=heads)
        for name, t in zip("qkvb", args, strict=False):
            assert t is not None
            t.requires_grad_(name in wanted)
        with FlopCounterMode(display=False) as counter:
            out = torchops.triangle_attention(*args)
            if wanted:
                out.sum().backward()
        counts[wanted] = counter.get_total_flops() / product
    assert counts == {"": 2, "q": 2 + 3, "k": 2 + 3, "v": 2 + 2, "b": 2 + 2, "qkvb": 2 + 5}


def test_private_arguments_are_checked() -> None:
    q, k, v, bias, mask = arguments(4, masked=True)
    out, logsumexp = OPS._triangle_attention(q, k, v, bias, mask, 0.25)
    good = {"grad": q, "q": q, "k": k, "v": v, "bias": bias, "mask": mask, "out": out, "logsumexp": logsumexp}
    for name in good:
        for bad in (good[name][..., :2], good[name].float().to(torch.complex64)):
            with pytest.raises(
                RuntimeError, match=f"_triangle_attention_backward: expected .*{name if name != 'q' else ''}"
            ):
                OPS._triangle_attention_backward(**good | {name: bad}, scale=0.25, output_mask=[True] * 4)
        if name != "mask":
            with pytest.raises(TypeError, match=f"_triangle_attention_backward: expected {name} of type Tensor, got"):
                OPS._triangle_attention_backward(**good | {name: None}, scale=0.25, output_mask=[True] * 4)
    for count in (3, 5):
        with pytest.raises(RuntimeError, match=f"expected output_mask of 4 values, got {count}"):
            OPS._triangle_attention_backward(**good, scale=0.25, output_mask=[True] * count)
    with pytest.raises(RuntimeError, match="_triangle_attention: expected no argument that needs a gradient"):
        OPS._triangle_attention(q.requires_grad_(), k, v, bias, mask, 0.25)

"""Triangle attention: values and gradients against float64, transforms and errors."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from attention_samples import (
    DEVICES,
    DTYPES,
    TOLERANCE,
    arguments,
    assert_close,
    check,
    exact,
    reference,
    with_gradients,
)
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import torchops

OPS = torch.ops.myops

# --- values and gradients --------------------------------------------------------------------------------------------

# N, d and what else; on CUDA the tail of a block of keys, more than one block, one key more, and odd features.
SIZES: dict[str, dict[str, Any]] = {
    "one": {"n": 1},
    "odd": {"n": 13, "d": 5, "batch": 2, "heads": 3},
    "block": {"n": 64, "d": 32},
    "rows": {"n": 33, "rows": 4, "d": 24},
    "one_more": {"n": 129, "rows": 3, "d": 32},
    "wide": {"n": 70, "rows": 3, "d": 128, "heads": 1},
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("size", SIZES)
def test_values_and_gradients(size: str, masked: bool, dtype: torch.dtype, device: str) -> None:
    check(arguments(**SIZES[size], masked=masked, dtype=dtype, device=device, requires_grad=True))


@pytest.mark.parametrize("device", DEVICES)
def test_scale(device: str) -> None:
    check(arguments(9, device=device, dtype=torch.float32, requires_grad=True), scale=0.7)


@pytest.mark.parametrize("device", DEVICES)
def test_panels(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """In several panels, of which the last is smaller."""
    from torchops._triangle_attention.attention import aten

    monkeypatch.setattr(aten, "_PANEL_BYTES", 50000)
    for masked in (False, True):
        check(arguments(23, masked=masked, device=device, requires_grad=True))


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


@pytest.mark.parametrize("device", DEVICES)
def test_float32_bias(device: str) -> None:
    q, k, v, bias, mask = arguments(12, dtype=torch.bfloat16, device=device, masked=True, requires_grad=True)
    bias = bias.detach().float().requires_grad_()
    got = check((q, k, v, bias, mask))
    assert (got[0].dtype, got[-1].dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "shape", [(0, 4, 2, 4, 8), (1, 0, 2, 4, 8), (1, 4, 0, 4, 8), (1, 0, 2, 0, 8), (1, 4, 2, 4, 0)], ids=str
)
def test_empty(shape: tuple[int, ...], device: str) -> None:
    batch, rows, heads, n, _ = shape
    q, k, v = (torch.randn(shape, device=device, requires_grad=True) for _ in range(3))
    bias = torch.randn(batch, 1, heads, n, n, device=device, requires_grad=True)
    mask = torch.ones(batch, rows, 1, 1, n, dtype=torch.bool, device=device)
    out = torchops.triangle_attention(q, k, v, bias, mask)
    assert out.shape == shape
    assert out.numel() == 0
    out.sum().backward()
    for t in (q, k, v, bias):
        assert t.grad is not None
        assert t.grad.shape == t.shape
        assert not t.grad.any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kept", range(4), ids=["q", "k", "v", "bias"])
def test_one_gradient_alone(kept: int, device: str) -> None:
    args = arguments(10, dtype=torch.float32, device=device, masked=True, requires_grad=True)
    cotangent = torch.randn_like(args[0])
    expected = with_gradients(torchops.triangle_attention, args, cotangent)[1 + kept]
    alone: Any = [t if i == kept or t is None else t.detach() for i, t in enumerate(args)]
    out = torchops.triangle_attention(*alone)
    (got,) = torch.autograd.grad(out, [alone[kept]], cotangent)
    assert torch.equal(got, expected)


@pytest.mark.parametrize(
    "output_mask", list(product([False, True], repeat=4)), ids=lambda w: "".join(str(int(x)) for x in w)
)
def test_only_what_is_asked_for(output_mask: tuple[bool, ...]) -> None:
    q, k, v, bias, mask = arguments(6, masked=True)
    out, logsumexp = OPS._triangle_attention(q, k, v, bias, mask, 0.25)
    grads = OPS._triangle_attention_backward(
        torch.randn_like(q), q, k, v, bias, mask, out, logsumexp, 0.25, output_mask
    )
    assert [g.shape for g in grads] == [
        t.shape if w else (0,) for t, w in zip((q, k, v, bias), output_mask, strict=True)
    ]


# --- what the dispatcher asks for ------------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
def test_derivatives(masked: bool) -> None:
    q, k, v, bias, mask = arguments(4, 3, masked=masked, requires_grad=True)
    leaves = [q, k, v, bias]

    def function(*given: Any) -> Tensor:
        return OPS.triangle_attention(*given, mask=mask)

    assert torch.autograd.gradcheck(function, leaves, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
def test_opcheck(masked: bool) -> None:
    args = arguments(5, dtype=torch.float32, masked=masked, requires_grad=True)
    torch.library.opcheck(OPS.triangle_attention.default, args)
    q, k, v, bias, mask = (t if t is None else t.detach() for t in args)
    torch.library.opcheck(OPS._triangle_attention.default, (q, k, v, bias, mask, 0.25))
    assert q is not None
    out, logsumexp = OPS._triangle_attention(q, k, v, bias, mask, 0.25)
    arguments_of_backward = torch.randn_like(q), q, k, v, bias, mask, out, logsumexp, 0.25
    for output_mask in ([True] * 4, [False, True, False, True]):
        torch.library.opcheck(OPS._triangle_attention_backward.default, (*arguments_of_backward, output_mask))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled(dynamic: bool, device: str) -> None:
    """With the operator in one graph; dynamic, one graph for all N."""
    graphs = 0

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        nonlocal graphs
        graphs += 1
        return torch._dynamo.lookup_backend("inductor")(graph, inputs)

    def model(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None) -> Tensor:
        return torchops.triangle_attention(q * 2, k, v, bias.sigmoid(), mask) + 1

    def expected_model(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None) -> Tensor:
        return reference(q * 2, k, v, bias.sigmoid(), mask) + 1

    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=dynamic)
    sizes = (6, 7, 11) if dynamic else (6,)
    for n in sizes:
        args = arguments(n, dtype=torch.float32, device=device, masked=True, requires_grad=True)
        cotangent = torch.randn_like(args[0])
        got = with_gradients(compiled, args, cotangent)
        assert_close(got, with_gradients(expected_model, exact(args), cotangent), 1e-5)
    assert graphs == 1


@pytest.mark.parametrize("device", DEVICES)
def test_transforms(device: str) -> None:
    q, k, v, bias, mask = arguments(5, batch=3, device=device, masked=True)
    assert mask is not None
    stacked = [torch.stack([t, t.flip(0)]) for t in (q, k, v, bias, mask)]
    expected = torch.stack([torchops.triangle_attention(*args) for args in zip(*stacked, strict=True)])
    mapped = torch.func.vmap(OPS.triangle_attention)(*stacked)
    torch.testing.assert_close(mapped, expected)
    shared = torch.func.vmap(OPS.triangle_attention, in_dims=(0, 0, 0, None, None))(*stacked[:3], bias, mask)
    each = [OPS.triangle_attention(*args, bias, mask) for args in zip(*stacked[:3], strict=True)]
    torch.testing.assert_close(shared, torch.stack(each))

    def loss(function: Any, q: Tensor, bias: Tensor) -> Tensor:
        return function(q, k, v, bias, mask).square().sum()

    for transform in (torch.func.grad, torch.func.jacrev, torch.func.jacfwd):
        got, written = (
            transform(partial(loss, function), argnums=(0, 1))(q, bias)
            for function in (OPS.triangle_attention, reference)
        )
        for g, e in zip(got, written, strict=True):
            torch.testing.assert_close(g, e)


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


@pytest.mark.parametrize("device", DEVICES)
def test_autocast(device: str) -> None:
    """In the lower precision, gradients in that of the arguments; float64 is left alone."""
    args = arguments(8, dtype=torch.float32, device=device, masked=True, requires_grad=True)
    cotangent = torch.randn_like(args[0])
    with torch.autocast(device, torch.bfloat16):
        got = with_gradients(torchops.triangle_attention, args, cotangent)
        assert torchops.triangle_attention(*arguments(8, device=device)).dtype == torch.float64
    assert got[0].dtype == torch.bfloat16
    assert {g.dtype for g in got[1:]} == {torch.float32}
    assert_close(got, with_gradients(reference, exact(args), cotangent), TOLERANCE[torch.bfloat16])


def test_backward_under_autocast() -> None:
    """Of a forward pass outside of it: the same gradients, and those that can be differentiated."""
    args = arguments(5, 8, dtype=torch.float32, requires_grad=True)
    out = torchops.triangle_attention(*args)
    inputs = [t for t in args if t is not None and t.requires_grad]
    for create_graph in (False, True):
        results = []
        for enabled in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                given = out, inputs, torch.ones_like(out)
                results.append(torch.autograd.grad(*given, retain_graph=True, create_graph=create_graph))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_flops() -> None:
    """Two products of 2 * R * H * N * N * d in the forward pass; the gradients compute that of scores again."""
    n, d, heads = 6, 5, 2
    product = 2 * n * heads * n * n * d
    counts = {}
    for wanted in ("", "q", "k", "v", "b", "qkvb"):
        args = arguments(n, d, heads=heads)
        for name, t in zip("qkvb", args, strict=False):
            assert t is not None
            t.requires_grad_(name in wanted)
        with FlopCounterMode(display=False) as counter:
            out = torchops.triangle_attention(*args)
            if wanted:
                out.sum().backward()
        counts[wanted] = counter.get_total_flops() / product
    assert counts == {"": 2, "q": 2 + 3, "k": 2 + 3, "v": 2 + 2, "b": 2 + 2, "qkvb": 2 + 5}


# --- errors ----------------------------------------------------------------------------------------------------------

ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"q": torch.randn(4, 2, 4, 8)}, r"expected q of shape (batch, R, H, N, d), got (4, 2, 4, 8)"),
    ({"q": torch.ones(1, 4, 2, 4, 8).long()}, "expected q of dtype float32, float64, float16 or bfloat16, got int64"),
    ({"k": torch.randn(1, 4, 2, 5, 8)}, "expected k of shape (1, 4, 2, 4, 8) to match q, got (1, 4, 2, 5, 8)"),
    ({"v": torch.randn(1, 4, 2, 4, 7)}, "expected v of shape (1, 4, 2, 4, 8) to match q, got (1, 4, 2, 4, 7)"),
    ({"v": torch.randn(1, 4, 2, 4, 8).double()}, "expected v of dtype float32 to match q, got float64"),
    ({"bias": torch.randn(1, 2, 4, 4)}, "expected bias of shape (1, 1, 2, 4, 4) to match q, got (1, 2, 4, 4)"),
    ({"bias": torch.randn(1, 1, 2, 4, 4).half()}, "expected bias of dtype float32 to match q, got float16"),
    ({"bias": torch.randn(1, 1, 2, 4, 4).to_sparse()}, "expected bias of layout strided, got sparse_coo"),
    ({"mask": torch.ones(1, 4, 1, 1, 4)}, "expected mask of dtype bool, got float32"),
    ({"mask": torch.ones(1, 4, 4).bool()}, "expected mask of shape (1, 4, 1, 1, 4) to match q, got (1, 4, 4)"),
    ({"k": torch.randn(1, 4, 2, 4, 8, device="meta")}, "expected k on device cpu to match q, got meta"),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "text"), ERRORS, ids=[text[:40] for _, text in ERRORS])
def test_errors(changed: dict[str, Any], text: str) -> None:
    q, k, v, bias, _ = arguments(4, 8, dtype=torch.float32)
    given = {"q": q, "k": k, "v": v, "bias": bias} | changed
    for requires_grad in (False, True):
        for t in given.values():
            if t.is_floating_point() and t.layout == torch.strided:
                t.requires_grad_(requires_grad)
        with pytest.raises(RuntimeError) as raised:
            torchops.triangle_attention(**given)
        assert str(raised.value).startswith(f"triangle_attention: {text}")
    if all(t.device.type == "cpu" and t.layout == torch.strided for t in given.values()):
        for device in ("meta", *(["cuda"] if torch.cuda.is_available() else [])):
            with pytest.raises(RuntimeError) as raised:
                torchops.triangle_attention(**{name: t.detach().to(device) for name, t in given.items()})
            assert str(raised.value).startswith(f"triangle_attention: {text}")
        mode = FakeTensorMode()
        fake: dict[str, Any] = {name: mode.from_tensor(t) for name, t in given.items()}
        with mode, pytest.raises(RuntimeError) as raised:
            torchops.triangle_attention(**fake)
        assert str(raised.value).startswith(f"triangle_attention: {text}")


@pytest.mark.parametrize("name", ["q", "k", "v", "bias"])
@pytest.mark.parametrize(("value", "kind"), [("text", "str"), (None, "NoneType")])
def test_type_errors(name: str, value: Any, kind: str) -> None:
    given: dict[str, Any] = dict(zip(("q", "k", "v", "bias"), arguments(4), strict=False))
    with pytest.raises(TypeError) as raised:
        torchops.triangle_attention(**given | {name: value})
    assert str(raised.value) == f"triangle_attention: expected {name} of type Tensor, got {kind}"


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

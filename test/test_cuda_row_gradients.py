"""The gradients of softmax and layer_norm on a GPU: every length of rows, layouts, what is asked for, and bits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from cuda_checks import poisoned_memory
from torch import Tensor

import torchops
from torchops._core import _build_info

if not torch.cuda.is_available() or not _build_info.cuda_version:
    pytest.skip("needs a GPU and a build with CUDA", allow_module_level=True)

OPS = torch.ops.myops
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
COLUMNS = [1, 3, 8, 31, 64, 100, 256, 257, 1000, 1024, 4096, 5000, 16384, 16400, 131072]
SHAPES = [
    *((rows, columns) for rows in (1, 5) for columns in COLUMNS),
    *((1000, columns) for columns in COLUMNS if columns <= 16400),
    *((70001, columns) for columns in COLUMNS if columns <= 256),
    # Around the lengths where other threads share a row, up to clusters of 16 blocks and past them.
    *((7, 8 * vectors) for vectors in (2, 5, 9, 17, 33, 65, 128, 129, 512, 513, 2048, 2049, 4097, 8200, 32768, 32769)),
    (3000, 72),
    (700, 1032),
    # Clusters that have many rows each.
    (400, 32768),
    (64, 131072),
    # Vocabularies; rows that are no whole vectors.
    (9, 50257),
    (5, 151936),
    (3, 262143),
]
MASKS = [output_mask for output_mask in itertools.product((True, False), repeat=3) if any(output_mask)]


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    with poisoned_memory():
        yield


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.float32).to(dtype)


def assert_accurate(got: Tensor, aten: Tensor, exact: Tensor, scale: Tensor) -> None:
    """At most 1.1 times ATen's error and some roundings; `scale` is what was added up. In 16 bits that is a part of one
    rounding of the result, a larger one for few elements. In float32 and float64 the sums round too. They are added in
    another order than ATen's, so either may be closer by several roundings of what was added, above all where it
    cancels. In float64 ATen counts as exact."""
    assert got.shape == aten.shape == exact.shape
    assert got.dtype == aten.dtype
    assert got.is_contiguous()
    added = scale.double().norm().item()
    if got.dtype in (torch.float32, torch.float64):
        roundings, norm = 4.0, max(exact.norm().item(), added)
    else:
        roundings, norm = 0.5 if exact.numel() < 2000 else 0.1, max(exact.norm().item(), 1e-3 * added)
    error, theirs = ((t.double() - exact).norm().item() for t in (got, aten))
    limit = 1.1 * theirs + roundings * torch.finfo(got.dtype).eps * norm
    assert error <= limit, f"{tuple(exact.shape)}: error {error:.3g}, ATen's {theirs:.3g}"


def aten_softmax(grad: Tensor, y: Tensor) -> Tensor:
    return torch._softmax_backward_data(grad, y, -1, y.dtype)


def check_softmax(grad: Tensor, y: Tensor) -> None:
    got = OPS._softmax_backward(grad, y, -1)
    assert_accurate(got, aten_softmax(grad, y), aten_softmax(grad.double(), y.double()), grad * y)
    assert torch.equal(OPS._softmax_backward(grad, y, -1), got)


Gradients = list[Tensor]


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    var, mean = torch.var_mean(x.double(), -1, correction=0, keepdim=True)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return mean.to(wide), torch.rsqrt(var + 1e-5).to(wide)


def aten_layer_norm(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None) -> Gradients:
    w = torch.ones_like(x[0]) if weight is None else weight
    shape = [x.size(-1)]
    return list(
        torch.ops.aten.native_layer_norm_backward(
            grad.contiguous(), x.contiguous(), shape, mean, rstd, w, w, [True, True, True]
        )
    )


def check_layer_norm(grad: Tensor, x: Tensor, weight: Tensor | None, output_mask: tuple[bool, ...]) -> Gradients:
    mean, rstd = moments(x)
    call: Callable[[], Gradients] = lambda: OPS._layer_norm_backward(  # noqa: E731
        grad, x, [x.size(-1)], mean, rstd, weight, output_mask
    )
    got = call()
    aten = aten_layer_norm(grad, x, mean, rstd, weight)
    exact = aten_layer_norm(
        grad.double(), x.double(), mean.double(), rstd.double(), None if weight is None else weight.double()
    )
    scales = (grad * rstd, grad, grad)
    # Without a weight, whose dtype says that of the bias, the sums are not rounded.
    unrounded = [False, *[weight is None and x.dtype in (torch.float16, torch.bfloat16)] * 2]
    for wanted, one, theirs, value, scale, is_float32 in zip(
        output_mask, got, aten, exact, scales, unrounded, strict=True
    ):
        if wanted:
            assert not is_float32 or one.dtype == torch.float32
            assert_accurate(one.to(x.dtype) if is_float32 else one, theirs, value, scale)
        else:
            assert one.shape == (0,)
    for one, again in zip(got, call(), strict=True):
        assert torch.equal(one, again)
    return got


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_softmax_of_every_length(shape: tuple[int, int], dtype: torch.dtype) -> None:
    check_softmax(random(*shape, dtype=dtype), torch.softmax(random(*shape, dtype=dtype), -1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layer_norm_of_every_length(shape: tuple[int, int], dtype: torch.dtype) -> None:
    grad, x = random(*shape, dtype=dtype), random(*shape, dtype=dtype) + 1
    check_layer_norm(grad, x, random(shape[1], dtype=dtype) + 1, (True, True, True))
    check_layer_norm(grad, x, None, (True, False, False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(1000, 64), (1000, 1000), (300, 2056), (40, 65536), (50, 37)], ids=str)
def test_every_mask_gives_the_same_bits(shape: tuple[int, int], affine: bool, dtype: torch.dtype) -> None:
    grad, x = random(*shape, dtype=dtype), random(*shape, dtype=dtype)
    weight = random(shape[1], dtype=dtype) if affine else None
    everything = check_layer_norm(grad, x, weight, (True, True, True))
    for output_mask in MASKS:
        got = check_layer_norm(grad, x, weight, output_mask)
        if shape[1] % 8 == 0:
            for wanted, one, other in zip(output_mask, got, everything, strict=True):
                assert not wanted or torch.equal(one, other), output_mask


def layouts(shape: tuple[int, int], dtype: torch.dtype) -> Iterator[Tensor]:
    rows, columns = shape
    yield random(rows, columns + 8, dtype=dtype)[:, :columns]
    yield random(rows, columns + 8, dtype=dtype)[:, 8:]
    yield random(rows, columns + 3, dtype=dtype)[:, 1 : columns + 1]
    yield random(rows * columns + 1, dtype=dtype)[1:].view(shape)
    yield random(rows, 2 * columns, dtype=dtype)[:, ::2]
    yield random(columns, rows, dtype=dtype).t()
    yield random(1, columns, dtype=dtype).expand(shape)
    yield random(rows, 1, dtype=dtype).expand(shape)
    yield random(1, 1, dtype=dtype).expand(shape)


@pytest.mark.parametrize("output_mask", MASKS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normalized_shape", [(7,), (3, 7), (2, 3, 5), (4, 8), (3, 96)], ids=str)
def test_many_rows_of_any_shape(
    normalized_shape: tuple[int, ...], dtype: torch.dtype, output_mask: tuple[bool, ...]
) -> None:
    """Beyond 65536 rows, ATen's kernel writes out of bounds for several dimensions, and makes no gradient of a bias
    alone. Rows of these lengths take that kernel where they are no whole vectors."""
    rows = 70001
    x, grad = (random(rows, *normalized_shape, dtype=dtype) for _ in range(2))
    weight = random(*normalized_shape, dtype=dtype)
    dims = tuple(range(-len(normalized_shape), 0))
    mean = x.double().mean(dims, keepdim=True)
    rstd = (x.double().var(dims, keepdim=True, correction=0) + 1e-5).rsqrt()
    moments = torch.float64 if dtype == torch.float64 else torch.float32
    got = OPS._layer_norm_backward(grad, x, normalized_shape, mean.to(moments), rstd.to(moments), weight, output_mask)
    exact_x, exact_weight = x.double().cpu().requires_grad_(), weight.double().cpu().requires_grad_()
    bias = torch.zeros_like(exact_weight, requires_grad=True)
    y = F.layer_norm(exact_x, normalized_shape, exact_weight, bias)
    exact = torch.autograd.grad(y, (exact_x, exact_weight, bias), grad.double().cpu())
    for wanted, g, value in zip(output_mask, got, exact, strict=True):
        if wanted:
            assert g.shape == value.shape
            assert (g.double().cpu() - value).norm() <= max(4 * torch.finfo(dtype).eps, 1e-5) * value.norm()
        else:
            assert g.numel() == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(9, 8), (33, 264), (9, 4096), (5, 40_000), (7, 129), (5, 20_001), (3, 50_257)], ids=str
)
def test_layouts(shape: tuple[int, int], dtype: torch.dtype) -> None:
    dense, weight = random(*shape, dtype=dtype), random(shape[1] + 1, dtype=dtype)[1:]
    y = torch.softmax(dense, -1)
    for other in layouts(shape, dtype):
        check_softmax(other, y)
        check_softmax(dense, other)
        check_layer_norm(other, dense, weight, (True, True, True))
    for x in itertools.islice(layouts(shape, dtype), 6):
        check_layer_norm(dense, x, weight, (True, True, True))


def test_batches_of_rows() -> None:
    x, grad = random(3, 4, 5, 64, dtype=torch.bfloat16), random(3, 5, 4, 64, dtype=torch.bfloat16).transpose(1, 2)
    y = torch.softmax(x, -1)
    rows = OPS._softmax_backward(grad.reshape(-1, 64), y.view(-1, 64), -1)
    assert torch.equal(OPS._softmax_backward(grad, y, 3), rows.view_as(x))
    torch.testing.assert_close(
        OPS._softmax_backward(grad, y, 1), torch._softmax_backward_data(grad, y, 1, y.dtype), rtol=0, atol=0
    )
    mean, rstd = moments(x.flatten(2))
    weight = random(5, 64, dtype=torch.bfloat16)
    output_mask = [True, True, True]
    got = OPS._layer_norm_backward(grad, x, [5, 64], mean.unsqueeze(-1), rstd.unsqueeze(-1), weight, output_mask)
    flat = OPS._layer_norm_backward(
        grad.flatten(2).flatten(0, 1),
        x.view(12, 320),
        [320],
        mean.view(12, 1),
        rstd.view(12, 1),
        weight.view(320),
        output_mask,
    )
    for one, other in zip(got, flat, strict=True):
        assert torch.equal(one, other.view_as(one))


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0,), (), (8,)], ids=str)
def test_softmax_of_few_elements(shape: tuple[int, ...]) -> None:
    grad, y = random(*shape, dtype=torch.float32), torch.softmax(random(*shape, dtype=torch.float32), -1)
    torch.testing.assert_close(OPS._softmax_backward(grad, y, -1), aten_softmax(grad, y))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2000, 128), (77, 4096), (9, 65536)], ids=str)
def test_training(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Through autograd, the new and the in-place form, beside ATen."""
    leaf, grad = random(*shape, dtype=dtype), random(*shape, dtype=dtype)
    w, b = (random(shape[1], dtype=dtype) for _ in range(2))
    forms: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], Callable[..., Tensor]]] = {
        "softmax": (
            lambda x, w, b: torchops.softmax(x),
            lambda x, w, b: torchops.softmax_(x * 1),
            lambda x, w, b: torch.softmax(x, -1),
        ),
        "layer_norm": (
            lambda x, w, b: torchops.layer_norm(x, w.shape, w, b),
            lambda x, w, b: torchops.layer_norm_(x * 1, w.shape, w, b),
            lambda x, w, b: F.layer_norm(x, w.shape, w, b),
        ),
        "plain": (
            lambda x, w, b: torchops.layer_norm(x, w.shape),
            lambda x, w, b: torchops.layer_norm_(x * 1, w.shape),
            lambda x, w, b: F.layer_norm(x, w.shape),
        ),
    }

    def gradients(function: Callable[..., Tensor], *tensors: Tensor) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in tensors]
        y = function(*leaves)
        found = torch.autograd.grad(y, leaves, grad.to(y.dtype), allow_unused=True)
        return [g for g in found if g is not None]

    for new, in_place, aten in forms.values():
        exact = gradients(aten, leaf.double(), w.double(), b.double())
        theirs = gradients(aten, leaf, w, b)
        for form in (new, in_place):
            for got, other, value in zip(gradients(form, leaf, w, b), theirs, exact, strict=True):
                error, limit = ((t.double() - value).norm() / value.norm() for t in (got, other))
                assert error <= 1.5 * limit + 0.5 * torch.finfo(dtype).eps


def test_double_backward() -> None:
    x, w = (random(*s, dtype=torch.float64).requires_grad_() for s in ((3, 8), (8,)))
    assert torch.autograd.gradgradcheck(torchops.softmax, (x,))
    assert torch.autograd.gradgradcheck(lambda x, w: torchops.layer_norm(x, (8,), w), (x, w))
    x = random(5, 64, dtype=torch.float32).requires_grad_()

    def second(softmax: Callable[..., Tensor]) -> Tensor:
        (dx,) = torch.autograd.grad(softmax(x, -1).square().sum(), x, create_graph=True)
        (ddx,) = torch.autograd.grad(dx.square().sum(), x)
        return ddx

    torch.testing.assert_close(second(torchops.softmax), second(torch.softmax))


def test_in_a_graph_on_another_stream() -> None:
    grad, x = (random(1000, 1024, dtype=torch.bfloat16) for _ in range(2))
    y, (mean, rstd), weight = torch.softmax(x, -1), moments(x), random(1024, dtype=torch.bfloat16)

    def work() -> list[Tensor]:
        layer_norm = OPS._layer_norm_backward(grad, x, [1024], mean, rstd, weight, [True, True, True])
        return [OPS._softmax_backward(grad, y, -1), *layer_norm]

    expected = work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = work()
    graph.replay()
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)

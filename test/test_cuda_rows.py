"""What only the CUDA kernels of sigmoid, softmax and layer_norm have: row lengths where one kernel takes over from
another, rows that begin anywhere, streams, graphs, more than 2^31 elements, and no second buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cuda_checks import poisoned_memory
from torch import Tensor

import torchops
from torchops._core import _build_info

if not torch.cuda.is_available() or not _build_info.cuda_version:
    pytest.skip("needs a GPU and a build with CUDA", allow_module_level=True)

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
# In 16-byte vectors: the longest rows of each kernel, up to clusters of 16 blocks.
LIMITS = (2, 4, 6, 8, 16, 32, 64, 128, 192, 256, 896, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)

Operator = Callable[..., Tensor]
# By name: the operator, its in-place form (both of a matrix and its parameters), and ATen's.
OPERATORS: dict[str, tuple[Operator, Operator, Operator]] = {
    "sigmoid": (
        lambda x, w, b: torchops.sigmoid(x),
        lambda x, w, b: torchops.sigmoid_(x),
        lambda x, w, b: torch.sigmoid(x),
    ),
    "softmax": (
        lambda x, w, b: torchops.softmax(x),
        lambda x, w, b: torchops.softmax_(x),
        lambda x, w, b: torch.softmax(x, -1),
    ),
    "layer_norm": (
        lambda x, w, b: torchops.layer_norm(x, w.shape, w, b),
        lambda x, w, b: torchops.layer_norm_(x, w.shape, w, b),
        lambda x, w, b: F.layer_norm(x, w.shape, w, b),
    ),
}


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    with poisoned_memory():
        yield


@pytest.fixture(params=OPERATORS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda", dtype=torch.float32) * scale).to(dtype)


def parameters(columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return random(columns, dtype=dtype) + 1, random(columns, dtype=dtype)


def relative_error(got: Tensor, exact: Tensor) -> float:
    """||got - exact|| / ||exact||; NaN is infinite."""
    assert got.shape == exact.shape
    error = (got.double() - exact).norm() / exact.norm()
    return error.nan_to_num(nan=float("inf")).item()


def assert_accurate(name: str, got: Tensor, x: Tensor, w: Tensor, b: Tensor, ratio: float, slack: float) -> None:
    aten = OPERATORS[name][2]
    # Against ATen in float64, float64 itself cannot be better than a rounding or two.
    slack = 2.0 if x.dtype == torch.float64 else slack
    exact = aten(x.double(), w.double(), b.double())
    error, theirs = relative_error(got, exact), relative_error(aten(x, w, b), exact)
    allowed = ratio * theirs + slack * torch.finfo(x.dtype).eps
    assert error <= allowed, f"relative error {error:.3g}, ATen's {theirs:.3g}"


def columns_of(dtype: torch.dtype) -> list[int]:
    size = 16 // dtype.itemsize
    around = [limit * size + extra for limit in LIMITS for extra in (-1, 0, 1, size, size + 3)]
    return [1, 2, 3, 7, 8, 15, 17, 33, 100, *around]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_length(name: str, dtype: torch.dtype) -> None:
    op, in_place, _ = OPERATORS[name]
    for columns in columns_of(dtype):
        # Several blocks, and a part of the last one.
        x = random(300 if columns < 100 else 37 if columns < 4000 else 3, columns, dtype=dtype, scale=3.0)
        w, b = parameters(columns, dtype)
        y = op(x, w, b)
        assert_accurate(name, y, x, w, b, ratio=1.5, slack=0.5)
        assert torch.equal(in_place(x.clone(), w, b), y), columns


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [128, 1000, 4096, 32768])
def test_as_accurate_as_aten(name: str, dtype: torch.dtype, columns: int) -> None:
    x = random(2**22 // columns, columns, dtype=dtype, scale=2.0)
    w, b = parameters(columns, dtype)
    assert_accurate(name, OPERATORS[name][0](x, w, b), x, w, b, ratio=1.1, slack=0.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [5, 129, 2049, 40_000])
@pytest.mark.parametrize("start", [0, 1, 3, 8])
def test_rows_begin_anywhere(name: str, dtype: torch.dtype, columns: int, start: int) -> None:
    op, in_place, _ = OPERATORS[name]
    for width in (columns + start, columns + start + 5):
        base = random(9, width, dtype=dtype)
        x = base[:, start : start + columns]
        w, b = (p[1:] for p in parameters(columns + 1, dtype))
        y = op(x, w, b)
        assert_accurate(name, y, x, w, b, ratio=1.5, slack=0.5)
        before = base.clone()
        in_place(x, w, b)
        assert_accurate(name, x, before[:, start : start + columns], w, b, ratio=1.5, slack=0.5)
        assert torch.equal(base[:, :start], before[:, :start])
        assert torch.equal(base[:, start + columns :], before[:, start + columns :])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [8, 250, 256, 1000, 1536, 2048, 4096, 8192, 131072])
def test_parameters_anywhere(dtype: torch.dtype, columns: int) -> None:
    """Those that are missing, or lie elsewhere than at a multiple of 16 bytes, are not read by whole vectors."""
    x = random(5, columns, dtype=dtype, scale=3.0)
    w, b = parameters(columns, dtype)
    ones, zeros = torch.ones_like(w), torch.zeros_like(b)
    w_apart, b_apart = (torch.cat([t[:1], t])[1:] for t in (w, b))
    for some, all_of_them in [
        ((None, None), (ones, zeros)),
        ((w, None), (w, zeros)),
        ((None, b), (ones, b)),
        ((w_apart, b), (w, b)),
        ((w, b_apart), (w, b)),
        ((None, b_apart), (ones, b)),
    ]:
        y = torchops.layer_norm(x, (columns,), *some)
        torch.testing.assert_close(y, torchops.layer_norm(x, (columns,), *all_of_them))
        assert torch.equal(torchops.layer_norm_(x.clone(), (columns,), *some), y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [7, 1000])
@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.transpose(0, 1),
        lambda t: t.permute(2, 0, 1),
        lambda t: t.transpose(1, 2),
        lambda t: t[..., ::2],
        lambda t: t[1:, 1:, 1:],
    ],
    ids=["rows_swapped", "permuted", "columns_apart", "every_second", "inner"],
)
def test_layouts_in_place(name: str, dtype: torch.dtype, columns: int, view: Callable[[Tensor], Tensor]) -> None:
    base = random(5, 6, columns, dtype=dtype)
    x = view(base)
    w, b = parameters(x.shape[-1], dtype)
    before = x.clone()
    OPERATORS[name][1](x, w, b)
    assert_accurate(name, x, before, w, b, ratio=1.5, slack=0.5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kilobytes", "rows"), [(33, 170), (48, 170), (65, 170), (130, 90), (257, 48), (512, 48)])
@pytest.mark.parametrize("name", ["softmax", "layer_norm"], indirect=True)
def test_clusters_that_have_many_rows(name: str, dtype: torch.dtype, kilobytes: int, rows: int) -> None:
    """Blocks go on to the next row before others have ended the last one; no row may depend on those around it."""
    op, in_place, _ = OPERATORS[name]
    columns = kilobytes * 1024 // dtype.itemsize
    base = random(rows, columns + 16, dtype=dtype, scale=3.0)
    x = base[:, 8:-8]
    w, b = parameters(columns, dtype)
    x[17], x[18, 5], x[23] = float("nan"), float("nan"), 0.37
    before = base.clone()
    y = op(x, w, b)
    assert torch.equal(base.view(torch.uint8), before.view(torch.uint8))
    assert y[17:19].isnan().all()
    others = torch.ones(rows, device="cuda", dtype=torch.bool)
    others[17:19] = False
    assert_accurate(name, y[others], x[others], w, b, ratio=1.5, slack=0.5)
    for i in (0, 1, 19, 23, rows // 2, rows - 1):
        assert torch.equal(op(x[i : i + 1], w, b), y[i : i + 1]), i
    in_place(x, w, b)
    torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(base[:, :8], before[:, :8])
    assert torch.equal(base[:, -8:], before[:, -8:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [40_960, 131_072])
def test_long_rows_without_parameters_and_moments(dtype: torch.dtype, columns: int) -> None:
    x = random(64, columns, dtype=dtype, scale=2.0) + 3
    w, b = parameters(columns + 1, dtype)
    # Parameters that don't begin at a 16-byte boundary are read one number at a time.
    for weight, bias in ((None, None), (w[1:], None), (w[1:], b[:-1])):
        wide = [None if p is None else p.double() for p in (weight, bias)]
        exact = F.layer_norm(x.double(), (columns,), wide[0], wide[1])
        theirs = F.layer_norm(x, (columns,), weight, bias)
        y, mean, rstd = torch.ops.myops._layer_norm(x, [columns], weight, bias, 1e-5)
        assert torch.equal(y, torchops.layer_norm(x, (columns,), weight, bias))
        assert relative_error(y, exact) <= 1.5 * relative_error(theirs, exact) + torch.finfo(dtype).eps
        var, center = torch.var_mean(x.double(), -1, correction=0, keepdim=True)
        accurate = 1e-12 if dtype == torch.float64 else 1e-5
        torch.testing.assert_close(mean.double(), center, rtol=accurate, atol=0)
        torch.testing.assert_close(rstd.double(), torch.rsqrt(var + 1e-5), rtol=accurate, atol=0)


@pytest.mark.parametrize("columns", [1000, 20_000, 40_001, 100_000, 130_000])
@pytest.mark.parametrize("center", [0.37, 12345.0, 123450.0])
def test_rows_far_from_zero(center: float, columns: int) -> None:
    """Their mean has too few digits in float32, which shows in the variance unless it is corrected."""
    w, b = parameters(columns, torch.float32)
    constant = torch.full((40, columns), center, device="cuda")
    y, mean, rstd = torch.ops.myops._layer_norm(constant, [columns], w, b, 1e-5)
    torch.testing.assert_close(y, b.expand_as(y), rtol=0, atol=1e-6)
    torch.testing.assert_close(mean, torch.full_like(mean, center), rtol=1e-7, atol=0)
    torch.testing.assert_close(rstd, torch.full_like(rstd, 1e-5**-0.5), rtol=1e-5, atol=0)
    x = constant + 1e-5 * center * torch.randn(40, columns, device="cuda")
    y, mean, rstd = torch.ops.myops._layer_norm(x, [columns], w, b, 1e-12)
    var = torch.var(x.double(), -1, correction=0, keepdim=True)
    torch.testing.assert_close(rstd.double(), torch.rsqrt(var + 1e-12), rtol=2e-4, atol=0)
    exact = F.layer_norm(x.double(), (columns,), w.double(), b.double(), 1e-12)
    assert relative_error(y, exact) < 2e-4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [6, 3000, 70_000, 600_000])
def test_special_values(dtype: torch.dtype, columns: int) -> None:
    inf, nan, most = float("inf"), float("nan"), torch.finfo(dtype).max
    rows = [[0.0], [-inf], [inf], [nan], [-inf, nan], [-inf, 1.0], [inf, -inf], [most, -most], [most / 2, 1.0, nan]]
    x = torch.zeros(len(rows) + 2, columns, device="cuda", dtype=dtype)
    for i, row in enumerate(rows):
        x[i] = row[-1]
        x[i, : len(row)] = torch.tensor(row, dtype=torch.float64).to(dtype)
    x[-2], x[-1] = most, -most
    for got, expected in (
        (torchops.softmax(x), torch.softmax(x, -1)),
        (torchops.sigmoid(x), torch.sigmoid(x)),
    ):
        torch.testing.assert_close(got, expected, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sigmoid_keeps_the_digits_of_small_results(dtype: torch.dtype) -> None:
    x = torch.linspace(-80, 20, 100_003, device="cuda", dtype=torch.float64).to(dtype)
    exact = torch.sigmoid(x.double())
    normal = exact > torch.finfo(dtype).tiny
    error = ((torchops.sigmoid(x).double() - exact) / exact)[normal].abs().max()
    aten = ((torch.sigmoid(x).double() - exact) / exact)[normal].abs().max()
    allowed = max(1.1 * aten.item(), (4 if dtype == torch.float64 else 2) * torch.finfo(dtype).eps)
    assert error <= allowed


@pytest.mark.parametrize("columns", [100, 4099, 100_000, 300_000])
def test_same_bits_every_time(name: str, columns: int) -> None:
    x = random(64, columns, dtype=torch.float32)
    w, b = parameters(columns, torch.float32)
    first = OPERATORS[name][0](x, w, b)
    for _ in range(5):
        assert torch.equal(OPERATORS[name][0](x, w, b), first)


@pytest.mark.parametrize("columns", [128, 5000, 131072])
def test_gradients_have_the_same_bits_every_time(columns: int) -> None:
    x = random(300, columns, dtype=torch.float32).requires_grad_()
    w, b = (p.requires_grad_() for p in parameters(columns, torch.float32))
    g = random(300, columns, dtype=torch.float32)
    first = torch.autograd.grad(torchops.layer_norm(x, w.shape, w, b), (x, w, b), g)
    for _ in range(3):
        again = torch.autograd.grad(torchops.layer_norm(x, w.shape, w, b), (x, w, b), g)
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


@pytest.mark.parametrize("columns", [128, 5000, 131072])
def test_runs_on_the_current_stream(name: str, columns: int) -> None:
    _, in_place, aten = OPERATORS[name]
    w, b = parameters(columns, torch.float32)
    new = random(64, columns, dtype=torch.float32)
    expected = aten(new, w, b)
    x = torch.zeros_like(new)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.copy_(new)
        in_place(x, w, b)
    stream.synchronize()
    torch.testing.assert_close(x, expected)


@pytest.mark.parametrize("columns", [128, 5000, 131072, 300_001])
def test_graph_replay(name: str, columns: int) -> None:
    op, in_place, aten = OPERATORS[name]
    w, b = parameters(columns, torch.float32)
    x, z = (random(64, columns, dtype=torch.float32) for _ in range(2))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = op(x, w, b)
        in_place(z, w, b)
    for _ in range(2):
        new = random(64, columns, dtype=torch.float32)
        x.copy_(new)
        z.copy_(new)
        graph.replay()
        torch.testing.assert_close(y, aten(new, w, b))
        assert torch.equal(y, z)


def test_no_synchronisation(name: str) -> None:
    op, in_place, _ = OPERATORS[name]
    tensors = [random(40, columns, dtype=torch.float32) for columns in (128, 5000, 131072, 300_001)]
    affine = [parameters(t.shape[1], torch.float32) for t in tensors]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for x, (w, b) in zip(tensors, affine, strict=True):
            y = op(x, w, b)
            assert in_place(x, w, b).shape == y.shape
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("shape", [(2**23 + 3, 257), (2**24 + 1, 128), (40, 2**26 - 3)], ids=str)
def test_more_elements_than_32_bits_count(name: str, shape: tuple[int, int]) -> None:
    rows, columns = shape
    x = torch.empty(shape, device="cuda", dtype=torch.bfloat16)
    for part in x.split(max(1, 2**28 // columns)):
        part.normal_()
    w, b = parameters(columns, torch.bfloat16)
    step = max(1, 2**24 // columns)
    checked = [slice(0, step), slice(rows // 2, rows // 2 + step), slice(rows - step, rows)]
    before = [x[s].clone() for s in checked]
    OPERATORS[name][1](x, w, b)
    for s, old in zip(checked, before, strict=True):
        assert_accurate(name, x[s], old, w, b, ratio=1.5, slack=0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_second_buffer(name: str, dtype: torch.dtype) -> None:
    def growth(x: Tensor, *args: Any) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        OPERATORS[name][1](x, *args)
        return torch.cuda.max_memory_allocated() - start

    x = torch.ones(2**13, 2**14, device="cuda", dtype=dtype)
    assert growth(x, *parameters(2**14, dtype)) < 2**20
    # Rows whose elements lie apart: a few rows of scratch.
    assert growth(x.t(), *parameters(2**13, dtype)) <= 2**25


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU")
def test_other_device(name: str) -> None:
    op, in_place, aten = OPERATORS[name]
    for columns in (128, 5000, 131072):
        x = random(8, columns, dtype=torch.float32).to("cuda:1")
        w, b = (p.to("cuda:1") for p in parameters(columns, torch.float32))
        torch.testing.assert_close(op(x, w, b), aten(x, w, b))
        torch.testing.assert_close(in_place(x.clone(), w, b), aten(x, w, b))


@pytest.mark.serial
@pytest.mark.parametrize("name", ["softmax", "layer_norm"], indirect=True)
def test_more_rows_than_a_grid_has_blocks(name: str) -> None:
    """Rows that begin between 16-byte boundaries take a block each, and 2^31 of them more than a grid has along x."""
    rows = (1 << 31) + 5
    if torch.cuda.mem_get_info()[0] < 5 * rows:
        pytest.skip("needs 10 GiB")
    x = torch.ones(rows + 1, device="cuda", dtype=torch.bfloat16)[1:].view(rows, 1)
    w, b = (torch.ones(1, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    y = OPERATORS[name][0](x, w, b)
    assert bool((y == 1).all())  # of one element, softmax is 1 and layer_norm its bias

"""Products of eight-bit operands beyond `op_db.py`: to the last digit against float64 of the values that they stand
for, larger sizes, other paths, torch._scaled_mm, and what is left of transforms without gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checks import assert_all_close, to_float64
from op_db import SCALED, OpCase
from scaled_samples import ACTIVATIONS, EIGHT, RESULTS, scaled_linear
from torch import Tensor

import torchops
from torchops._core import _build_info
from torchops._core.devices import capability

CUDA = torch.cuda.is_available() and bool(_build_info.cuda_version) and capability(0) >= (8, 9)
DEVICES = ["cpu", *(["cuda"] if CUDA else [])]
# leading sizes, in, out
SHAPES: list[Any] = [
    ((5,), 16, 16),
    ((3, 7), 48, 32),
    ((1,), 64, 16),
    ((), 32, 48),
    ((2, 1, 3), 7, 5),
    ((33,), 130, 65),
    ((129,), 256, 272),
    ((70,), 1040, 144),
    ((300,), 1040, 592),
    ((0,), 16, 16),
    ((4,), 0, 16),
    ((4,), 16, 0),
]
LARGE = [((1000,), 512, 384), ((300,), 4112, 200), ((3000,), 272, 2064), ((17,), 2048, 4096), ((2048,), 4096, 3072)]
SCALES = ["tensor", "rows", "x", "w"]

pytestmark = pytest.mark.parametrize("device", DEVICES)
of_each = pytest.mark.parametrize("op", SCALED, ids=lambda op: op.name)
dense, gate, glu = SCALED


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def operands(shape: Any, device: str, scales: str, bias: torch.dtype | None) -> tuple[Tensor, ...]:
    """x, w, scale_x, scale_w, b, for preactivations of standard deviation about 1."""
    leading, in_features, out_features = shape
    x = (torch.randn(*leading, in_features, device=device) * 20).to(EIGHT)
    w = (torch.randn(out_features, in_features, device=device) * 50).to(EIGHT)
    of_x = [*leading, 1] if scales in ("rows", "x") else [1]
    of_w = [1, out_features] if scales in ("rows", "w") else []
    scale_x = (torch.rand(of_x, device=device) + 0.5) / 20
    scale_w = (torch.rand(of_w, device=device) + 0.5) / 50 / max(in_features, 1) ** 0.5
    b: Any = None if bias is None else torch.randn(out_features, device=device).to(bias)
    return x, w, scale_x, scale_w, b


def arguments(
    op: OpCase,
    device: str,
    shape: Any = ((4,), 16, 32),
    scales: str = "rows",
    *,
    bias: torch.dtype | None = torch.float32,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Any]:
    """By their names."""
    x, w, scale_x, scale_w, b = operands(shape, device, scales, bias)
    given: dict[str, Any] = {"x": x, "w": w, "scale_x": scale_x, "scale_w": scale_w, "b": b}
    if op is gate:
        return given | {"v": torch.randn(*shape[0], shape[2], device=device).to(dtype)}
    if op is glu:
        _, wg, _, scale_wg, bg = operands(shape, device, scales, bias)
        given |= {"wg": wg, "scale_wg": scale_wg, "bg": bg}
    return given | {"out_dtype": dtype}


def assert_exact(op: OpCase, given: dict[str, Any]) -> None:
    """To the rounding of the result (of a GLU on a GPU, of its value too), and to those of sums in float32, which on a
    GPU are partly those of tensor cores, by how much they can change a product. Memory that a kernel does not write is
    NaN."""
    (_, exact), on_cuda = to_float64(([], given)), given["x"].is_cuda
    reference, parts = op.reference(**exact), []
    if op is gate:
        parts = [exact["v"]]
    elif op is glu:
        names = (("x", f"w{part}", "scale_x", f"scale_w{part}", f"b{part}") for part in ("", "g"))
        parts = [scaled_linear(*(exact[name] for name in of)) for of in names]
    dtype = given["v"].dtype if op is gate else given.get("out_dtype", torch.bfloat16)
    torch.full(reference.shape, float("nan"), dtype=dtype, device=given["x"].device)
    y = op.wrapper(**given)
    assert y.dtype == dtype
    assert y.shape == reference.shape
    assert y.is_contiguous()
    of_sums = 2**-11 if on_cuda else 2**-21
    slope = sum(((1 + p.abs()) for p in parts), torch.ones_like(reference)) ** 2 if parts else 1 + reference.abs()
    roundings = 2 if op is glu and on_cuda else 1
    of_dtype = torch.finfo(dtype).eps / 2 * 1.1 * roundings
    excess = (y.double() - reference).abs() - of_dtype * reference.abs() - of_sums * slope
    assert excess.numel() == 0 or excess.max() <= torch.finfo(dtype).tiny


@pytest.mark.parametrize("dtype", RESULTS, ids=str)
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@of_each
def test_values(device: str, op: OpCase, shape: Any, scales: str, dtype: torch.dtype) -> None:
    for bias in (None, dtype, torch.float32):
        given = arguments(op, device, shape, scales, bias=bias, dtype=dtype)
        for activation in ACTIVATIONS if op is glu else [None]:
            assert_exact(op, given | ({"activation": activation} if activation else {}))


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_large(device: str, shape: Any, scales: str) -> None:
    assert_exact(dense, arguments(dense, device, shape, scales))


@pytest.mark.parametrize("shape", [((129,), 256, 272), ((300,), 130, 65), ((0,), 16, 16), ((3000,), 256, 272)], ids=str)
@of_each
def test_without_a_fused_kernel(device: str, op: OpCase, shape: Any) -> None:
    with torchops.cuda.kernel_path("cublas"):
        for scales in SCALES:
            for dtype in RESULTS:
                assert_exact(op, arguments(op, device, shape, scales, dtype=dtype))


@of_each
def test_layouts_without_a_fused_kernel(device: str, op: OpCase) -> None:
    with torchops.cuda.kernel_path("cublas"):
        for sample in op.samples:
            args, kwargs = sample(torch.float32, device)
            assert_exact(op, dict(zip((a.name for a in op.op._schema.arguments), args, strict=False)) | kwargs)


def test_panels(device: str) -> None:
    """More rows than a panel has, on every path."""
    for path in ("auto", "cublas"):
        for features in (64, 72):
            with torchops.cuda.kernel_path(path):
                assert_exact(dense, arguments(dense, device, ((9000 if device == "cuda" else 3000,), features, 2064)))


@of_each
def test_the_packet_finds_the_overload(device: str, op: OpCase) -> None:
    given = arguments(op, device)
    assert torch.equal(op.op.overloadpacket(**given), op.wrapper(**given))


@pytest.mark.parametrize("scales", ["tensor", "rows"])
def test_as_scaled_mm(device: str, scales: str) -> None:
    x, w, scale_x, scale_w, _ = operands(((130,), 256, 272), device, scales, None)
    z = torch._scaled_mm(x, w.t(), scale_x, scale_w, out_dtype=torch.bfloat16)
    y = torchops.dense_scaled(x, w, scale_x, scale_w)
    torch.testing.assert_close(y, torch.sigmoid(z), rtol=2e-2, atol=4e-3)


def test_extreme_values(device: str) -> None:
    """The largest and the smallest numbers, NaN, and scales whose product would overflow."""
    x = torch.zeros(20, 32, device=device)
    x[:, 0] = torch.linspace(-448, 448, 20)
    w = torch.zeros(16, 32, device=device)
    w[:, 0] = 2.0**-9
    w[:, 5] = 1.0
    scale_x, scale_w = torch.full((20, 1), 1e-30, device=device), torch.full((1, 16), 1e30, device=device)
    given: dict[str, Any] = {
        "w": w.to(EIGHT),
        "scale_x": scale_x,
        "scale_w": scale_w,
        "b": None,
        "out_dtype": torch.float32,
    }
    assert_exact(dense, given | {"x": x.to(EIGHT)})
    x[3, 5] = float("nan")
    y = torchops.dense_scaled(x.to(EIGHT), **given)
    assert torch.equal(y.isnan(), x.isnan().any(-1, keepdim=True).expand(20, 16))


@of_each
def test_same_bits_again(device: str, op: OpCase) -> None:
    given = arguments(op, device, ((700,), 1024, 528))
    assert torch.equal(op.wrapper(**given), op.wrapper(**given))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(device: str, dynamic: bool) -> None:
    def function(given: list[dict[str, Any]]) -> list[Tensor]:
        return [op.wrapper(**arguments) * 2 for op, arguments in zip(SCALED, given, strict=True)]

    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic)
    for rows in (5, 9):
        given = [arguments(op, device, ((rows,), 16, 32)) for op in SCALED]
        assert_all_close(compiled(given), function(given))


def test_export_with_any_number_of_rows(device: str) -> None:
    class Layer(torch.nn.Module):
        def forward(self, x: Tensor, w: Tensor, scale_x: Tensor, scale_w: Tensor) -> Tensor:
            return torchops.dense_scaled(x, w, scale_x, scale_w)

    given = operands(((5,), 16, 32), device, "rows", None)[:4]
    rows = torch.export.Dim("rows")
    shapes = {"x": {0: rows}, "w": None, "scale_x": {0: rows}, "scale_w": None}
    program = torch.export.export(Layer(), given, dynamic_shapes=shapes)
    assert any(node.target is torch.ops.myops.dense.scaled for node in program.graph.nodes)
    other = operands(((9,), 16, 32), device, "rows", None)[:4]
    assert torch.equal(program.module()(*other), torchops.dense_scaled(*other))


def test_vmap(device: str) -> None:
    x, w, scale_x, scale_w, b = operands(((4, 16), 16, 32), device, "rows", torch.float32)
    y = torch.func.vmap(torchops.dense_scaled, in_dims=(0, None, 0, None, None))(x, w, scale_x, scale_w, b)
    torch.testing.assert_close(y, torchops.dense_scaled(x, w, scale_x, scale_w, b))


@of_each
def test_autocast_changes_nothing(device: str, op: OpCase) -> None:
    given = arguments(op, device, dtype=torch.float32)
    with torch.autocast(device, torch.float16 if device == "cuda" else torch.bfloat16):
        y = op.wrapper(**given)
    assert y.dtype == torch.float32
    assert torch.equal(y, op.wrapper(**given))


@of_each
def test_no_gradient(device: str, op: OpCase) -> None:
    given = arguments(op, device)
    given["b"].requires_grad_()
    y = op.wrapper(**given)
    assert y.requires_grad
    missing = f"derivative for {op.without_overload} is not implemented"
    with pytest.raises(RuntimeError, match=missing):
        y.sum().backward()
    with torch.no_grad():
        assert not op.wrapper(**given).requires_grad


def test_a_dtype_that_is_none(device: str) -> None:
    x, w, scale_x, scale_w, _ = operands(((4,), 16, 32), device, "rows", None)
    with pytest.raises(TypeError, match="dense_scaled: expected out_dtype of type dtype or None, got str"):
        torchops.dense_scaled(x, w, scale_x, scale_w, out_dtype="float32")  # type: ignore[arg-type]

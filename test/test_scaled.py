"""dense of eight-bit operands against float64 of the values that they stand for, and against torch._scaled_mm; and what
it shares with gate and glu of those, whose values are in `test_scaled_gates.py`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from checks import assert_all_close
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import torchops
from torchops._core import _build_info

EIGHT = torch.float8_e4m3fn
OUT = [torch.bfloat16, torch.float16, torch.float32]
CUDA = torch.cuda.is_available() and bool(_build_info.cuda_version) and torch.cuda.get_device_capability() >= (8, 9)
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
    ((0,), 16, 16),
    ((4,), 0, 16),
    ((4,), 16, 0),
]
LARGE = [((1000,), 512, 384), ((300,), 4112, 200), ((3000,), 272, 2064), ((17,), 2048, 4096), ((2048,), 4096, 3072)]
SCALES = ["tensor", "rows", "x", "w"]
OPERATORS = ["dense", "gate", "glu"]

pytestmark = pytest.mark.parametrize("device", DEVICES)
of_each = pytest.mark.parametrize("op", OPERATORS)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def arguments(
    shape: tuple[tuple[int, ...], int, int],
    device: str,
    scales: str = "rows",
    bias: torch.dtype | None = torch.float32,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """x, w, scale_x, scale_w, b, for preactivations of standard deviation about 1."""
    leading, in_features, out_features = shape
    x = (torch.randn(*leading, in_features, device=device) * 20).to(EIGHT)
    w = (torch.randn(out_features, in_features, device=device) * 50).to(EIGHT)
    of_x = [*leading, 1] if scales in ("rows", "x") else [1]
    of_w = [1, out_features] if scales in ("rows", "w") else []
    scale_x = (torch.rand(of_x, device=device) + 0.5) / 20
    scale_w = (torch.rand(of_w, device=device) + 0.5) / 50 / max(in_features, 1) ** 0.5
    b = None if bias is None else torch.randn(out_features, device=device).to(bias)
    return x, w, scale_x, scale_w, b


def value(shape: Any, device: str, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape[0], shape[2], device=device).to(dtype)


def named(op: str, device: str, shape: Any = ((4,), 16, 32), scales: str = "rows") -> dict[str, Tensor]:
    """Arguments of an operator by their names."""
    given: Any = dict(zip(("x", "w", "scale_x", "scale_w", "b"), arguments(shape, device, scales), strict=True))
    if op == "gate":
        given["v"] = value(shape, device, torch.bfloat16)
    elif op == "glu":
        given.update(wg=given["w"], scale_wg=given["scale_w"], bg=given["b"])
    return given


def scaled(op: str) -> Callable[..., Tensor]:
    return getattr(torchops, f"{op}_scaled")


def linear(x: Tensor, w: Tensor, scale_x: Tensor, scale_w: Tensor, b: Tensor | None) -> Tensor:
    """In float64."""
    z = (x.double() @ w.double().T) * scale_x.double() * scale_w.double().reshape(-1)
    return z if b is None else z + b.double()


def exact(x: Tensor, w: Tensor, scale_x: Tensor, scale_w: Tensor, b: Tensor | None) -> Tensor:
    return torch.sigmoid(linear(x, w, scale_x, scale_w, b))


def assert_exact(y: Tensor, reference: Tensor, in_features: int) -> None:
    """To the rounding of the result; and in float32, of sums, which on a GPU are partly those of tensor cores."""
    assert y.shape == reference.shape
    assert y.is_contiguous()
    of_sums = (2**-12 if y.is_cuda else 2**-22) * 2
    tolerance = max(torch.finfo(y.dtype).eps / 2 * 1.2, of_sums)
    torch.testing.assert_close(y.double(), reference, rtol=tolerance, atol=of_sums)


def poison(shape: torch.Size, dtype: torch.dtype, device: str) -> None:
    torch.full(shape, float("nan"), dtype=dtype, device=device)


@pytest.mark.parametrize("dtype", OUT, ids=str)
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values(device: str, shape: Any, scales: str, dtype: torch.dtype) -> None:
    for bias in (None, dtype, torch.float32):
        given = arguments(shape, device, scales, bias)
        reference = exact(*given)
        poison(reference.shape, dtype, device)
        y = torchops.dense_scaled(*given, out_dtype=dtype)
        assert y.dtype == dtype
        assert_exact(y, reference, shape[1])


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_large(device: str, shape: Any, scales: str) -> None:
    given = arguments(shape, device, scales)
    reference = exact(*given)
    poison(reference.shape, torch.bfloat16, device)
    assert_exact(torchops.dense_scaled(*given), reference, shape[1])


@pytest.mark.parametrize("shape", [((129,), 256, 272), ((300,), 130, 65), ((0,), 16, 16)], ids=str)
def test_without_a_fused_kernel(device: str, shape: Any) -> None:
    with torchops.cuda.kernel_path("cublas"):
        for scales in SCALES:
            for dtype in OUT:
                given = arguments(shape, device, scales)
                assert_exact(torchops.dense_scaled(*given, out_dtype=dtype), exact(*given), shape[1])


def test_panels(device: str) -> None:
    """More rows than a panel has, on every path."""
    for path in ("auto", "cublas"):
        for features in (64, 72):
            given = arguments(((9000 if device == "cuda" else 3000,), features, 2064), device)
            with torchops.cuda.kernel_path(path):
                assert_exact(torchops.dense_scaled(*given), exact(*given), features)


def test_bfloat16_is_the_default(device: str) -> None:
    given = arguments(((5,), 16, 32), device)
    y = torchops.dense_scaled(*given)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, torchops.dense_scaled(*given, out_dtype=torch.bfloat16))
    assert torch.equal(y, torch.ops.myops.dense.scaled(*given))
    assert torch.equal(y, torch.ops.myops.dense(*given))


@pytest.mark.parametrize("scales", ["tensor", "rows"])
def test_as_scaled_mm(device: str, scales: str) -> None:
    x, w, scale_x, scale_w, _ = arguments(((130,), 256, 272), device, scales, None)
    z = torch._scaled_mm(x, w.t(), scale_x, scale_w, out_dtype=torch.bfloat16)
    y = torchops.dense_scaled(x, w, scale_x, scale_w)
    torch.testing.assert_close(y, torch.sigmoid(z), rtol=2e-2, atol=4e-3)


def test_extreme_values(device: str) -> None:
    """The largest and the smallest numbers, NaN, and scales whose product would overflow."""
    x = torch.zeros(20, 32, device=device)
    x[:, 0] = torch.linspace(-448, 448, 20)
    x[3, 5] = float("nan")
    w = torch.zeros(16, 32, device=device)
    w[:, 0] = 2.0**-9
    w[:, 5] = 1.0
    scale_x, scale_w = torch.full((20, 1), 1e-30, device=device), torch.full((1, 16), 1e30, device=device)
    given = x.to(EIGHT), w.to(EIGHT), scale_x, scale_w, None
    y = torchops.dense_scaled(*given, out_dtype=torch.float32)
    assert y[3].isnan().all()
    assert not torch.cat([y[:3], y[4:]]).isnan().any()
    assert_exact(y[4:], exact(*given)[4:], 32)


@pytest.mark.parametrize("layout", ["transposed", "narrowed", "expanded", "offset", "strided_scales"])
def test_layouts(device: str, layout: str) -> None:
    x, w, scale_x, scale_w, b = arguments(((40,), 64, 48), device)
    if layout == "transposed":
        x, w = x.t().contiguous().t(), w.t().contiguous().t()
    elif layout == "narrowed":
        x, w = arguments(((40,), 80, 96), device)[0][:, 3:67], arguments(((1,), 64, 96), device)[1][::2]
    elif layout == "expanded":
        x = x[:1].expand(40, 64)
    elif layout == "offset":
        x = torch.empty(40 * 64 + 1, device=device, dtype=EIGHT)[1:].view(40, 64).copy_(x)
    else:
        scale_x, scale_w = scale_x.expand(40, 3)[:, :1], scale_w.repeat(1, 2)[:, ::2]
        scale_x, b = torch.rand(40, 2, device=device)[:, 1:], torch.randn(96, device=device)[::2]
    for path in ("auto", "cublas"):
        with torchops.cuda.kernel_path(path):
            y = torchops.dense_scaled(x, w, scale_x, scale_w, b)
        assert_exact(y, exact(x, w, scale_x, scale_w, b), 64)


def test_same_bits_again(device: str) -> None:
    given = arguments(((700,), 1024, 528), device)
    assert torch.equal(torchops.dense_scaled(*given), torchops.dense_scaled(*given))


@of_each
def test_opcheck(device: str, op: str) -> None:
    """All but the check of the schema against what a call changes, which compares tensors by arithmetic that there is
    none of in eight bits; the next test does it instead."""
    utils = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    shapes: list[Any] = [((5,), 16, 32), ((2, 3), 7, 5)]
    for shape in shapes:
        for scales in SCALES if op == "dense" else ["rows"]:
            given = named(op, device, shape, scales)
            options = {} if op == "gate" else {"out_dtype": torch.float32}
            torch.library.opcheck(getattr(torch.ops.myops, op).scaled, (), given | options, test_utils=utils)
            given.pop("b")
            torch.library.opcheck(getattr(torch.ops.myops, op).scaled, (), given, test_utils=utils)


def test_arguments_stay_as_they_are(device: str) -> None:
    given = arguments(((5,), 16, 32), device)
    before = [t.clone() for t in given if t is not None]
    y = torchops.dense_scaled(*given)
    for t, old in zip(given, before, strict=True):
        assert t is not None
        assert torch.equal(t.float(), old.float())
        assert y.untyped_storage().data_ptr() != t.untyped_storage().data_ptr()


@of_each
def test_meta_and_fake(device: str, op: str) -> None:
    function, given = scaled(op), named(op, device, ((2, 3), 16, 32))
    y = function(**{name: t.to("meta") for name, t in given.items()})
    assert (y.device.type, y.shape, y.dtype) == ("meta", (2, 3, 32), torch.bfloat16)
    with FakeTensorMode() as mode:
        fake = function(**{name: mode.from_tensor(t) for name, t in given.items()})
    assert (fake.device.type, fake.shape, fake.dtype) == (device, (2, 3, 32), torch.bfloat16)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(device: str, dynamic: bool) -> None:
    def function(given: dict[str, dict[str, Tensor]]) -> list[Tensor]:
        return [scaled(op)(**arguments) * 2 for op, arguments in given.items()]

    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic)
    for rows in (5, 9):
        given = {op: named(op, device, ((rows,), 16, 32)) for op in OPERATORS}
        assert_all_close(compiled(given), function(given))


def test_export_with_any_number_of_rows(device: str) -> None:
    class Layer(torch.nn.Module):
        def forward(self, x: Tensor, w: Tensor, scale_x: Tensor, scale_w: Tensor) -> Tensor:
            return torchops.dense_scaled(x, w, scale_x, scale_w)

    given = arguments(((5,), 16, 32), device, bias=None)[:4]
    rows = torch.export.Dim("rows")
    shapes = {"x": {0: rows}, "w": None, "scale_x": {0: rows}, "scale_w": None}
    program = torch.export.export(Layer(), given, dynamic_shapes=shapes)
    assert any(node.target is torch.ops.myops.dense.scaled for node in program.graph.nodes)
    other = arguments(((9,), 16, 32), device, bias=None)[:4]
    assert torch.equal(program.module()(*other), torchops.dense_scaled(*other))


def test_vmap(device: str) -> None:
    x, w, scale_x, scale_w, b = arguments(((4, 16), 16, 32), device)
    y = torch.func.vmap(torchops.dense_scaled, in_dims=(0, None, 0, None, None))(x, w, scale_x, scale_w, b)
    torch.testing.assert_close(y, torchops.dense_scaled(x, w, scale_x, scale_w, b))


def test_autocast_changes_nothing(device: str) -> None:
    given = arguments(((5,), 16, 32), device)
    with torch.autocast(device, torch.float16 if device == "cuda" else torch.bfloat16):
        y = torchops.dense_scaled(*given, out_dtype=torch.float32)
    assert y.dtype == torch.float32
    assert torch.equal(y, torchops.dense_scaled(*given, out_dtype=torch.float32))


@of_each
def test_flops_and_no_gradient(device: str, op: str) -> None:
    given = named(op, device, ((2, 5), 16, 32))
    given["b"].requires_grad_()
    with FlopCounterMode(display=False) as counter:
        y = scaled(op)(**given)
    assert counter.get_total_flops() == 2 * 10 * 16 * 32 * (2 if op == "glu" else 1)
    assert y.requires_grad
    with pytest.raises(RuntimeError, match=f"derivative for myops::{op} is not implemented"):
        y.sum().backward()
    with torch.no_grad():
        assert not scaled(op)(**given).requires_grad


def wrong(device: str) -> dict[str, dict[str, Any]]:
    """By what each is refused with."""

    def t(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.ones(shape, device=device).to(dtype)

    dense, gate, glu = (f"{op}.scaled: expected" for op in OPERATORS)
    of_w = "w of shape (out, in) with in = 16 to match x, got"
    of_scale_x = "scale_x of one element or of shape (4, 1) to match x, got"
    half, bfloat16 = torch.float16, torch.bfloat16
    return {
        f"{dense} x of dtype float8_e4m3fn, got float32": {"x": t(4, 16)},
        f"{dense} x of dtype float8_e4m3fn, got float8_e5m2": {"x": t(4, 16, dtype=torch.float8_e5m2)},
        f"{dense} x with at least 1 dimension, got a 0-dimensional tensor": {"x": t(dtype=EIGHT)},
        f"{dense} w of dtype float8_e4m3fn, got bfloat16": {"w": t(32, 16, dtype=bfloat16)},
        f"{dense} {of_w} (16, 32)": {"w": t(16, 32, dtype=EIGHT)},
        f"{dense} {of_w} (16,)": {"w": t(16, dtype=EIGHT)},
        f"{dense} scale_x of dtype float32, got bfloat16": {"scale_x": t(4, 1, dtype=bfloat16)},
        f"{dense} {of_scale_x} (4,)": {"scale_x": t(4)},
        f"{dense} {of_scale_x} (5, 1)": {"scale_x": t(5, 1)},
        f"{dense} scale_w of dtype float32, got float64": {"scale_w": t(dtype=torch.float64)},
        f"{dense} scale_w of one element or of shape (1, 32) to match w, got (32, 1)": {"scale_w": t(32, 1)},
        f"{dense} b of dtype bfloat16 or float32 to match the result, got float16": {"b": t(32, dtype=half)},
        f"{dense} b of dtype float32 to match the result, got float16": {
            "b": t(32, dtype=half),
            "out_dtype": torch.float32,
        },
        f"{dense} b of shape (32,) to match w, got (16,)": {"b": t(16)},
        f"{dense} out_dtype bfloat16, float16 or float32, got float64": {"out_dtype": torch.float64},
        f"{dense} scale_w on device {{device}} to match w, got meta": {"scale_w": t(1).to("meta")},
        f"{gate} v of dtype bfloat16, float16 or float32, got float8_e4m3fn": {"v": t(4, 32, dtype=EIGHT)},
        f"{gate} v of shape (4, 32) to match x and w, got (4, 16)": {"v": t(4, 16)},
        f"{gate} x of dtype float8_e4m3fn, got float32": {"x": t(4, 16)},
        f"{gate} b of dtype float16 or float32 to match the result, got bfloat16": {
            "b": t(32, dtype=bfloat16),
            "v": t(4, 32, dtype=half),
        },
        f"{glu} wg of dtype float8_e4m3fn, got float32": {"wg": t(32, 16)},
        f"{glu} wg of shape (32, 16) to match w, got (16, 16)": {"wg": t(16, 16, dtype=EIGHT)},
        f"{glu} scale_wg of one element or of shape (1, 32) to match wg, got (32, 1)": {"scale_wg": t(32, 1)},
        f"{glu} bg of shape (32,) to match wg, got (16,)": {"bg": t(16)},
        f"{glu} activation sigmoid or silu, got tanh": {"activation": "tanh"},
        f"{glu} out_dtype bfloat16, float16 or float32, got int8": {"out_dtype": torch.int8},
    }


@pytest.mark.parametrize("text", wrong("cpu"))
def test_errors(device: str, text: str) -> None:
    op, changed = text.partition(".")[0], wrong(device)[text]
    given = named(op, device) | changed
    modes: list[Any] = [nullcontext(), *([] if "{device}" in text else [FakeTensorMode(allow_non_fake_inputs=True)])]
    for mode in modes:
        with mode, pytest.raises(ValueError if "activation" in changed else RuntimeError) as raised:
            scaled(op)(**given)
        assert str(raised.value).splitlines()[0] == text.format(device=given["x"].device)


LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "sparse_coo": (Tensor.to_sparse, "sparse_coo"),
    "nested": (lambda t: torch.nested.nested_tensor([t]), "a nested tensor"),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@of_each
def test_other_layouts(device: str, op: str, layout: str, inference: bool) -> None:
    """Of any argument, which no kernel takes."""
    given = named(op, device)
    change, shown = LAYOUTS[layout]
    for name, tensor in given.items():
        with torch.inference_mode(inference), pytest.raises(RuntimeError) as raised:
            scaled(op)(**{**given, name: change(tensor.float())})
        assert str(raised.value).splitlines()[0] == f"{op}.scaled: expected {name} of layout strided, got {shown}"


def test_type_errors_name_the_function(device: str) -> None:
    x, w, _, scale_w, _ = arguments(((4,), 16, 32), device)
    number: Any = 3.0
    with pytest.raises(TypeError, match="dense_scaled: expected scale_x of type Tensor, got float"):
        torchops.dense_scaled(x, w, number, scale_w)
    with pytest.raises(TypeError, match="dense: expected b of type Tensor or None, got float"):
        torchops.dense(torch.ones(2, 3), torch.ones(4, 3), number)
    with pytest.raises(TypeError, match="dense: expected w of type Tensor, got float"):
        torchops.dense(torch.ones(2, 3), number)
    with pytest.raises(TypeError, match="dense_scaled: expected out_dtype of type dtype or None, got str"):
        torchops.dense_scaled(x, w, scale_w, scale_w, out_dtype="float32")  # type: ignore[arg-type]

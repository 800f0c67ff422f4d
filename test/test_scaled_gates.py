"""gate and glu of eight-bit operands against float64 of the values that they stand for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_scaled import DEVICES, EIGHT, OUT, SCALES, SHAPES, arguments, linear, poison
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import torchops

ACTIVATIONS: dict[Any, Callable[[Tensor], Tensor]] = {"sigmoid": torch.sigmoid, "silu": torch.nn.functional.silu}

pytestmark = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def value(shape: Any, device: str, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape[0], shape[2], device=device).to(dtype)


def assert_exact(y: Tensor, reference: Tensor, *parts: Tensor, roundings: int = 1) -> None:
    """To `roundings` of the dtype; and to those of the sums in `parts`, by how much they can change a product."""
    assert y.shape == reference.shape
    assert y.is_contiguous()
    of_sums = 2**-11 if y.is_cuda else 2**-20
    scale = sum(((1 + p.abs()) for p in parts), torch.ones_like(reference))
    of_dtype = torch.finfo(y.dtype).eps / 2 * 1.1 * roundings
    excess = (y.double() - reference).abs() - of_dtype * reference.abs() - of_sums * scale**2
    assert excess.numel() == 0 or excess.max() <= torch.finfo(y.dtype).tiny


@pytest.mark.parametrize("dtype", OUT, ids=str)
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("shape", [*SHAPES, ((300,), 1040, 592)], ids=str)
def test_gate(device: str, shape: Any, scales: str, dtype: torch.dtype) -> None:
    for bias in (None, dtype, torch.float32):
        given, v = arguments(shape, device, scales, bias), value(shape, device, dtype)
        poison(v.shape, dtype, device)
        y = torchops.gate_scaled(v, *given)
        assert y.dtype == dtype
        assert_exact(y, v.double() * torch.sigmoid(linear(*given)), v.double())


@pytest.mark.parametrize("dtype", OUT, ids=str)
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [*SHAPES, ((300,), 1040, 592)], ids=str)
def test_glu(device: str, shape: Any, activation: Any, scales: str, dtype: torch.dtype) -> None:
    for bias in (None, dtype):
        x, w, scale_x, scale_w, b = arguments(shape, device, scales, bias)
        _, wg, _, scale_wg, bg = arguments(shape, device, scales, bias)
        z, t = linear(x, w, scale_x, scale_w, b), linear(x, wg, scale_x, scale_wg, bg)
        poison(z.shape, dtype, device)
        y = torchops.glu_scaled(x, w, wg, scale_x, scale_w, scale_wg, b, bg, activation=activation, out_dtype=dtype)
        assert y.dtype == dtype
        assert_exact(y, z * ACTIVATIONS[activation](t), z, t, roundings=2 if y.is_cuda else 1)


def test_without_a_fused_kernel(device: str) -> None:
    shape = ((3000,), 256, 272)
    x, w, scale_x, scale_w, b = arguments(shape, device)
    v = value(shape, device, torch.bfloat16)
    z = linear(x, w, scale_x, scale_w, b)
    with torchops.cuda.kernel_path("cublas"):
        assert_exact(torchops.gate_scaled(v, x, w, scale_x, scale_w, b), v.double() * torch.sigmoid(z), v.double())
        y = torchops.glu_scaled(x, w, w, scale_x, scale_w, scale_w, b, activation="silu")
    t = linear(x, w, scale_x, scale_w, None)
    assert_exact(y, z * torch.nn.functional.silu(t), z, t, roundings=2)


@pytest.mark.parametrize("layout", ["transposed", "expanded", "offset"])
def test_layouts_of_v(device: str, layout: str) -> None:
    given = arguments(((40,), 64, 48), device)
    v = value(((40,), 64, 48), device, torch.bfloat16)
    if layout == "transposed":
        v = v.t().contiguous().t()
    elif layout == "expanded":
        v = v[:1].expand(40, 48)
    else:
        v = torch.zeros(40 * 48 + 1, device=device, dtype=v.dtype)[1:].view(40, 48).copy_(v)
    before = v.clone()
    assert_exact(torchops.gate_scaled(v, *given), v.double() * torch.sigmoid(linear(*given)), v.double())
    assert torch.equal(v, before)


def test_opcheck(device: str) -> None:
    utils = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    shape: Any = ((2, 3), 16, 32)
    x, w, scale_x, scale_w, b = arguments(shape, device)
    v = value(shape, device, torch.float16)
    torch.library.opcheck(torch.ops.myops.gate.scaled, (v, x, w, scale_x, scale_w, b), test_utils=utils)
    glu = (x, w, w, scale_x, scale_w, scale_w, b, b)
    options = {"activation": "silu", "out_dtype": torch.float16}
    torch.library.opcheck(torch.ops.myops.glu.scaled, glu, options, test_utils=utils)


def test_compile_and_fake(device: str) -> None:
    @torch.compile(fullgraph=True, dynamic=True)
    def f(v: Tensor, x: Tensor, w: Tensor, scale_x: Tensor, scale_w: Tensor) -> Tensor:
        return torchops.gate_scaled(v, x, w, scale_x, scale_w) + torchops.glu_scaled(x, w, w, scale_x, scale_w, scale_w)

    for rows in (5, 9):
        x, w, scale_x, scale_w, _ = arguments(((rows,), 16, 32), device)
        v = value(((rows,), 16, 32), device, torch.bfloat16)
        y = f(v, x, w, scale_x, scale_w)
        eager = torchops.gate_scaled(v, x, w, scale_x, scale_w).double()
        eager += torchops.glu_scaled(x, w, w, scale_x, scale_w, scale_w).double()
        torch.testing.assert_close(y.double(), eager, rtol=1e-2, atol=1e-2)
    with FakeTensorMode() as mode:
        fake = f.__wrapped__(*(mode.from_tensor(t) for t in (v, x, w, scale_x, scale_w)))  # type: ignore[attr-defined]
    assert (fake.device.type, fake.shape, fake.dtype) == (device, v.shape, v.dtype)


def test_flops_and_no_gradient(device: str) -> None:
    x, w, scale_x, scale_w, _ = arguments(((2, 5), 16, 32), device)
    v = value(((2, 5), 16, 32), device, torch.bfloat16)
    with FlopCounterMode(display=False) as counter:
        gate = torchops.gate_scaled(v.requires_grad_(), x, w, scale_x, scale_w)
        torchops.glu_scaled(x, w, w, scale_x, scale_w, scale_w)
    assert counter.get_total_flops() == 3 * 2 * 10 * 16 * 32
    with pytest.raises(RuntimeError, match="derivative for myops::gate is not implemented"):
        gate.sum().backward()


def wrong(device: str) -> dict[str, tuple[str, dict[str, Any], str]]:
    def t(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.ones(shape, device=device).to(dtype)

    gate, glu = "gate", "glu"
    return {
        "v_dtype": (gate, {"v": t(4, 32, dtype=EIGHT)}, "v of dtype bfloat16, float16 or float32, got float8_e4m3fn"),
        "v_shape": (gate, {"v": t(4, 16)}, "v of shape (4, 32) to match x and w, got (4, 16)"),
        "gate_x": (gate, {"x": t(4, 16)}, "x of dtype float8_e4m3fn, got float32"),
        "gate_b": (
            gate,
            {"b": t(32, dtype=torch.bfloat16), "v": t(4, 32, dtype=torch.float16)},
            "b of dtype float16 or float32 to match the result, got bfloat16",
        ),
        "wg_dtype": (glu, {"wg": t(32, 16)}, "wg of dtype float8_e4m3fn, got float32"),
        "wg_shape": (glu, {"wg": t(16, 16, dtype=EIGHT)}, "wg of shape (32, 16) to match w, got (16, 16)"),
        "scale_wg": (
            glu,
            {"scale_wg": t(32, 1)},
            "scale_wg of one element or of shape (1, 32) to match wg, got (32, 1)",
        ),
        "bg_shape": (glu, {"bg": t(16)}, "bg of shape (32,) to match wg, got (16,)"),
        "activation": (glu, {"activation": "tanh"}, "activation sigmoid or silu, got tanh"),
        "out_dtype": (glu, {"out_dtype": torch.int8}, "out_dtype bfloat16, float16 or float32, got int8"),
    }


@pytest.mark.parametrize("name", wrong("cpu"))
def test_errors(device: str, name: str) -> None:
    x, w, scale_x, scale_w, b = arguments(((4,), 16, 32), device)
    given = {"x": x, "w": w, "scale_x": scale_x, "scale_w": scale_w, "b": b}
    op, changed, text = wrong(device)[name]
    if op == "gate":
        given["v"] = value(((4,), 16, 32), device, torch.bfloat16)
    else:
        given.update(wg=w, scale_wg=scale_w, bg=b)
    function: Any = getattr(torchops, f"{op}_scaled")
    for mode in (torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True)):
        with mode, pytest.raises(ValueError if name == "activation" else RuntimeError) as raised:
            function(**{**given, **changed})
        assert str(raised.value).splitlines()[0] == f"{op}.scaled: expected {text}"


LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "sparse_coo": (Tensor.to_sparse, "sparse_coo"),
    "nested": (lambda t: torch.nested.nested_tensor([t]), "a nested tensor"),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", ["dense", "gate", "glu"])
def test_other_layouts(device: str, op: str, layout: str, inference: bool) -> None:
    """Of any argument, which no kernel takes."""
    x, w, scale_x, scale_w, b = arguments(((4,), 16, 32), device)
    given = {"x": x, "w": w, "scale_x": scale_x, "scale_w": scale_w, "b": b}
    if op == "gate":
        given["v"] = value(((4,), 16, 32), device, torch.bfloat16)
    elif op == "glu":
        given.update(wg=w, scale_wg=scale_w, bg=b)
    function: Any = getattr(torchops, f"{op}_scaled")
    change, shown = LAYOUTS[layout]
    for name, tensor in given.items():
        changed = change(torch.ones(2, 2, device=device) if tensor is None else tensor.float())
        with torch.inference_mode(inference), pytest.raises(RuntimeError) as raised:
            function(**{**given, name: changed})
        assert str(raised.value).splitlines()[0] == f"{op}.scaled: expected {name} of layout strided, got {shown}"

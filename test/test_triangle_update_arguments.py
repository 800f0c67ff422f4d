"""The triangle multiplicative update: what it refuses, and parameters that are packed or not."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from triangle_samples import beneath, small

import torchops
from torchops.distributed.triangle import update as sharded

OPS = torch.ops.myops

ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"x": (4, 3)}, r"expected x of shape \(..., N, N, c\), got \(4, 3\)"),
    ({"x": (4, 5, 3)}, r"expected x of shape \(..., N, N, c\), got \(4, 5, 3\)"),
    ({"mask": (4, 4)}, r"expected mask of shape \(2, 4, 4\) to match x, got \(4, 4\)"),
    ({"mask": (2, 4, 4, 1)}, r"expected mask of shape \(2, 4, 4\) to match x, got \(2, 4, 4, 1\)"),
    ({"p_in_weight": (3, 3)}, r"expected p_in_weight of shape \(2d, c\) to match x, got \(3, 3\)"),
    ({"p_in_weight": (4, 4)}, r"expected p_in_weight of shape \(2d, c\) to match x, got \(4, 4\)"),
    ({"p_in_weight": (0, 3)}, r"expected p_in_weight of shape \(2d, c\) with d > 0, got \(0, 3\)"),
    ({"p_in_weight": (4,)}, r"expected p_in_weight of shape \(2d, c\) to match x, got \(4,\)"),
    ({"g_in_weight": (2, 3)}, r"expected g_in_weight of shape \(4, 3\) to match p_in_weight, got \(2, 3\)"),
    ({"p_in_bias": (2,)}, r"expected p_in_bias of shape \(4,\) to match p_in_weight, got \(2,\)"),
    ({"norm_in_weight": (2,)}, r"expected norm_in_weight of shape \(3,\) to match x, got \(2,\)"),
    ({"norm_out_weight": (3,)}, r"expected norm_out_weight of shape \(2,\) to match x and p_in_weight, got \(3,\)"),
    ({"p_out_weight": (2, 3)}, r"expected p_out_weight of shape \(3, 2\) to match x and p_in_weight, got \(2, 3\)"),
    ({"g_out_weight": (3, 2)}, r"expected g_out_weight of shape \(3, 3\) to match x and p_in_weight, got \(3, 2\)"),
    ({"g_out_bias": (1,)}, r"expected g_out_bias of shape \(3,\) to match x and p_in_weight, got \(1,\)"),
    ({"p_out_weight": torch.float32}, "expected p_out_weight of dtype float64 to match p_in_weight, got float32"),
    ({"x": torch.float32}, "expected x of dtype float64 to match p_in_weight, got float32"),
    ({"p_in_weight": torch.int64}, "expected p_in_weight of dtype float32, float64, float16 or bfloat16, got int64"),
    ({"mask": torch.int64}, "expected mask of dtype bool or a floating-point dtype, got int64"),
    ({"direction": "both"}, "expected direction outgoing or incoming, got both"),
]


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("device", ["cpu", "meta", "fake", *(["cuda"] if torch.cuda.is_available() else [])])
@pytest.mark.parametrize("op", ["triangle_multiplicative_update", "add_triangle_multiplicative_update_"])
@pytest.mark.parametrize(
    ("changed", "text"), ERRORS, ids=lambda value: "-".join(value) if isinstance(value, dict) else ""
)
def test_errors(changed: dict[str, Any], text: str, op: str, device: str, training: bool) -> None:
    x, given = small()
    given["p_out_bias"].requires_grad_(training)
    everything: dict[str, Any] = {"x": x} | given
    for name, change in changed.items():
        if isinstance(change, tuple):
            everything[name] = torch.zeros(change, dtype=torch.float64)
        else:
            everything[name] = everything[name].to(change) if isinstance(change, torch.dtype) else change
    before = everything["x"].clone()
    with FakeTensorMode() if device == "fake" else nullcontext() as mode:
        moved = mode.from_tensor if mode else lambda t: t.to(device)
        everything = {name: moved(t) if isinstance(t, Tensor) else t for name, t in everything.items()}
        with pytest.raises(ValueError if "direction" in changed else RuntimeError, match=f"^{op}: {text}"):
            getattr(OPS, op)(**everything)
    assert device in ("meta", "fake") or torch.equal(everything["x"].cpu(), before)
    assert everything["x"]._version == 0


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("op", ["triangle_multiplicative_update", "add_triangle_multiplicative_update_"])
def test_errors_when_compiled(op: str, dynamic: bool) -> None:
    """The text reaches the user from inside a trace as well."""
    x, given = small()
    given["direction"] = "both"  # type: ignore[assignment]
    compiled = torch.compile(lambda x: getattr(OPS, op)(x, **given), fullgraph=True, backend="eager", dynamic=dynamic)
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match=f"{op}: expected direction outgoing or incoming"):
        compiled(x)


def test_errors_of_python_and_of_overwriting() -> None:
    x, given = small()
    function: Any = torchops.triangle_multiplicative_update
    with pytest.raises(TypeError, match="unexpected keyword argument 'precision'"):
        function(x, **given, precision="high")
    del given["p_in_weight"]
    with pytest.raises(TypeError, match="p_in_weight"):
        function(x, **given)
    x, given = small()
    with pytest.raises(RuntimeError, match="single memory location"):
        OPS.add_triangle_multiplicative_update_(x[:1].expand(2, 4, 4, 3), **given)
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        OPS.add_triangle_multiplicative_update_(x.requires_grad_(), **given)


def test_what_cannot_be_saved_is_refused_before_anything_is_written() -> None:
    for name in small()[1]:
        x, given = small()
        if not isinstance(given[name], Tensor):
            continue
        with torch.inference_mode():
            given[name] = given[name].clone()
        target = x.clone().requires_grad_() * 1
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
            OPS.add_triangle_multiplicative_update_(target, **given)
        assert torch.equal(target, x)
        assert target._version == 0


def test_private_arguments_are_checked() -> None:
    x, given = small()
    layers = beneath(given)
    _, product = OPS._triangle_multiplicative_update(x, None, layers, True, 1e-5, True)
    backward = OPS._triangle_multiplicative_update_backward
    nothing = [False] * 18
    for arguments, text in (
        ((x, x, [], None, layers, True, 1e-5, nothing), "expected product as a list of one tensor, got one of 0"),
        ((x, x, [None], None, layers, True, 1e-5, nothing), "expected product as a list of one tensor, got none in it"),
        ((x, x, [product[..., :-1]], None, layers, True, 1e-5, nothing), "expected product of shape"),
        ((x[:1], x, [product], None, layers, True, 1e-5, nothing), "expected grad of shape"),
        ((x, x, [product], None, layers, True, 1e-5, [False, True, *nothing[2:]]), "without the gradient of a mask"),
        ((x, x, [product], None, layers[:-1], True, 1e-5, nothing), "expected 16 parameters, got 15"),
        ((x, x, [product], None, [*layers[:2], None, *layers[3:]], True, 1e-5, nothing), r"as parameters\[2\]"),
    ):
        with pytest.raises(RuntimeError, match=text):
            backward(*arguments)


def packed(given: dict[str, Tensor]) -> list[Tensor | None]:
    """The same parameters as the public operators have them: p and g in the places of a, and none in those of b."""
    layers = beneath(given)
    for name, place in (("p_in", 2), ("g_in", 6)):
        layers[place : place + 4] = [given[f"{name}_weight"], given.get(f"{name}_bias"), None, None]
    return layers


@pytest.mark.parametrize("biases", [False, True], ids=["plain", "biases"])
def test_packed_parameters_and_their_halves_agree(biases: bool) -> None:
    x, given = small()
    if not biases:
        given = {name: t for name, t in given.items() if name == "mask" or not name.endswith("_bias")}
    mask, apart, whole = given["mask"], beneath(given), packed(given)
    results = [OPS._triangle_multiplicative_update(x, mask, layers, False, 1e-5, True) for layers in (apart, whole)]
    assert torch.equal(results[0][0], results[1][0])
    backward = OPS._triangle_multiplicative_update_backward
    gradients = [
        backward(x, x, [product], mask, layers, False, 1e-5, [True, True, *(t is not None for t in layers)])
        for layers, (_, product) in zip((apart, whole), results, strict=True)
    ]
    of_apart, of_whole = gradients
    for place in (2, 3, 6, 7):
        if whole[place] is not None:
            of_apart[2 + place] = torch.cat([of_apart[2 + place], of_apart[4 + place]])
            of_apart[4 + place] = of_whole[4 + place]  # of nothing
            assert of_whole[4 + place].numel() == 0
    assert all(map(torch.equal, of_apart, of_whole))


def test_packed_parameters_are_halved_without_the_dispatcher() -> None:
    """A call of it takes a microsecond or more of the host's time, and a step of training would make dozens."""
    x, given = small(torch.float32, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        OPS.triangle_multiplicative_update(x, **given).sum().backward()
    names = {event.name for event in profiler.events()}
    assert "myops::_triangle_multiplicative_update_backward" in names
    assert "aten::split_with_sizes" not in names


def test_packed_parameters_are_checked() -> None:
    x, given = small()
    layers = packed(given)
    forward = OPS._triangle_multiplicative_update
    for place, value, text in (
        (2, layers[2][:-1], r"expected p_in_weight of shape \(2d, c\)"),  # type: ignore[index]
        (2, layers[2][:0], r"expected p_in_weight of shape \(2d, c\) with d > 0"),  # type: ignore[index]
        (6, layers[6][:-1], r"expected g_in_weight of shape \(\d+, \d+\) to match p_in_weight"),  # type: ignore[index]
        (12, layers[12].float(), "expected p_out_weight of dtype float64 to match p_in_weight"),  # type: ignore[union-attr]
        (5, torch.zeros(2, dtype=x.dtype), "expected no bias of b beside packed weights"),
        (6, None, r"a weight as parameters\[6\]"),
        (8, layers[6], r"a weight as parameters\[4\]"),
    ):
        with pytest.raises(RuntimeError, match=text):
            forward(x, None, [*layers[:place], value, *layers[place + 1 :]], True, 1e-5, False)


@pytest.mark.parametrize(
    ("n", "d", "dtype", "padded"),
    [
        (64, 2, torch.float32, (64, 64)),
        (65, 2, torch.bfloat16, (80, 80)),
        (511, 1, torch.bfloat16, (512, 512)),
        (513, 1, torch.bfloat16, (528, 576)),
        (513, 1, torch.float32, (520, 544)),
        (520, 129, torch.bfloat16, (528, 528)),
    ],
)
def test_padding_of_the_product(n: int, d: int, dtype: torch.dtype, padded: tuple[int, int]) -> None:
    """Rows and columns; rows of large matrices begin at multiples of 128 bytes."""
    layers: list[Tensor | None] = [None] * 16
    for place, shape in ((2, (2 * d, 1)), (6, (2 * d, 1)), (12, (1, d)), (14, (1, 1))):
        layers[place] = torch.ones(shape, dtype=dtype)
    x = torch.randn(n, n, 1).to(dtype)
    for device in ("cpu", "meta"):
        on_device = [None if t is None else t.to(device) for t in layers]
        _, product = OPS._triangle_multiplicative_update(x.to(device), None, on_device, True, 1e-5, True)
        assert product.shape == (d, *padded)
        assert product.is_contiguous()
    assert sharded._padded(n, d, dtype) == padded

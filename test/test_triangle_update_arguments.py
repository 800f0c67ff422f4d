"""The triangle multiplicative update: what it refuses, and parameters that are packed or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from triangle_samples import beneath, small

import torchops
from torchops.distributed.triangle import update as sharded

OPS = torch.ops.myops


def test_errors_of_python() -> None:
    x, given = small()
    function: Any = torchops.triangle_multiplicative_update
    with pytest.raises(TypeError, match="unexpected keyword argument 'precision'"):
        function(x, **given, precision="high")
    del given["p_in_weight"]
    with pytest.raises(TypeError, match="p_in_weight"):
        function(x, **given)


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

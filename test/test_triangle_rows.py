"""The private operators for some rows of a pair tensor, wherever they have no kernels: they check what they are given,
and refuse it. test_cuda_triangle_rows.py has the kernels, distributed_hopper_checks.py what calls them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

N, ROWS, C, D = 20, 3, 8, 16
DEVICES = ["cpu", "meta", *(["cuda"] if torch.cuda.is_available() else [])]


def parameters(device: str, dtype: torch.dtype = torch.float32, packed: bool = False) -> list[Tensor | None]:
    def ones(*shape: int) -> Tensor:
        return torch.ones(shape, dtype=dtype, device=device)

    separate = [ones(2 * D, C), None, None, None] if packed else [ones(D, C), ones(D), ones(D, C), ones(D)]
    return [ones(C), ones(C), *separate, *separate, ones(D), ones(D), ones(C, D), ones(C), ones(C, C), ones(C)]


def inputs(device: str, **changed: Any) -> tuple[Any, ...]:
    made = {
        "x": torch.ones(ROWS, N, C, device=device),
        "mask": None,
        "parameters": parameters(device),
        "a": torch.full((D, ROWS, 24), 7.0, device=device),
        "b": torch.full((D, ROWS, 24), 7.0, device=device),
    } | changed
    return made["x"], made["mask"], made["parameters"], 1.0, 1e-5, made["a"], made["b"]


def outputs(device: str, **changed: Any) -> tuple[Any, ...]:
    made = {
        "o": torch.ones(D, ROWS, 24, device=device)[..., :N],
        "x": torch.ones(ROWS, N, C, device=device),
        "parameters": parameters(device),
        "out": torch.full((ROWS, N, C), 7.0, device=device),
    } | changed
    return made["o"], made["x"], made["parameters"], 1e-5, 1e-5, made["out"], False


rows_in = torch.ops.myops._triangle_rows_in.default
rows_out = torch.ops.myops._triangle_rows_out.default


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("packed", [True, False])
def test_refused(device: str, packed: bool) -> None:
    """float32, on every device."""
    given = parameters(device, packed=packed)
    for mask in (None, torch.ones(ROWS, N, device=device) > 0):
        arguments = inputs(device, parameters=given, mask=mask)
        assert rows_in(*arguments) is False
        *_, a, b = arguments
        assert device == "meta" or (a == 7).all()
        assert device == "meta" or (b == 7).all()
    arguments = outputs(device, parameters=given)
    assert rows_out(*arguments) is False
    assert device == "meta" or (arguments[-2] == 7).all()
    assert rows_out(*outputs(device, out=arguments[1], x=arguments[1])) is False


@pytest.mark.parametrize("device", DEVICES)
def test_arguments_are_checked(device: str) -> None:
    def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.ones(shape, device=device, dtype=dtype)

    good, of_memory = parameters(device), ones(2 * D, ROWS, 24)
    on_other_device = torch.ones(D, ROWS, 24, device="meta" if device == "cpu" else "cpu")
    shape = r"of shape \(16, 3, 24\) to match x and the weights, got"
    for changed, text in (
        ({"x": ones(2, ROWS, N, C)}, r"x of shape \(rows, N, c\), got \(2, 3, 20, 8\)"),
        ({"x": ones(ROWS, N, C, dtype=torch.int64)}, "x of dtype float32 to match a_p_weight, got int64"),
        ({"x": ones(ROWS, N, C + 1)}, r"a_p_weight of shape \(d, c\) to match x, got \(16, 8\)"),
        ({"x": ones(ROWS, N + 5, C)}, r"a of shape \(16, 3, 32\) to match x and the weights, got \(16, 3, 24\)"),
        ({"mask": ones(N, N)}, r"mask of shape \(3, 20\) to match x, got \(20, 20\)"),
        ({"mask": ones(ROWS, N, dtype=torch.int64)}, "mask of dtype bool or a floating-point dtype, got int64"),
        ({"parameters": good[:-1]}, "16 parameters, got 15"),
        ({"parameters": [*good[:2], None, *good[3:]]}, r"a weight as parameters\[2\], got none"),
        ({"parameters": [*good[:12], ones(D, D), *good[13:]]}, "p_out_weight of shape"),
        ({"a": ones(D, ROWS, N)}, f"a {shape} .16, 3, 20."),
        ({"b": ones(D, N, 24)}, f"b {shape} .16, 20, 24."),
        ({"a": ones(D, ROWS, 24, dtype=torch.float64)}, "a of dtype float32 to match the weights, got float64"),
        ({"b": on_other_device}, "b on "),
        ({"a": ones(D, 1, 24).expand(D, ROWS, 24)}, "a without internal overlap"),
        ({"a": of_memory[:D], "b": of_memory[D:]}, "b without memory of a, got some of it"),
        ({"b": ones(D, ROWS, 24).to_sparse()} if device == "cpu" else {"b": ones(1)}, "b "),
    ):
        with pytest.raises(RuntimeError, match=f"^_triangle_rows_in: expected {text}"):
            rows_in(*inputs(device, **changed))
    both = ones(ROWS + 1, N, C)
    for changed, text in (
        ({"o": ones(D, ROWS, 24)}, r"o of shape \(16, 3, 20\) to match x and the weights, got \(16, 3, 24\)"),
        ({"o": ones(D, ROWS, N, dtype=torch.bfloat16)}, "o of dtype float32 to match the weights, got bfloat16"),
        ({"out": ones(ROWS, N, C, dtype=torch.bfloat16)}, "out of dtype float32 to match the weights, got bfloat16"),
        ({"out": ones(N, N, C)}, r"out of shape \(3, 20, 8\) to match x, got \(20, 20, 8\)"),
        ({"out": ones(1, N, C).expand(ROWS, N, C)}, "out without internal overlap"),
        ({"x": both[:-1], "out": both[1:]}, "out without memory of x, got some of it"),
    ):
        with pytest.raises(RuntimeError, match=f"^_triangle_rows_out: expected {text}"):
            rows_out(*outputs(device, **changed))


def test_opcheck() -> None:
    for op, arguments in ((rows_in, inputs("cpu")), (rows_out, outputs("cpu"))):
        torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))


def test_lazy_bits() -> None:
    """What is read may have them; what is written may not."""
    x = torch.ones(ROWS, N, C)
    negated = torch._neg_view(x)
    assert rows_in(*inputs("cpu", x=negated, mask=torch._neg_view(x[..., 0]))) is False
    assert rows_out(*outputs("cpu", x=negated, out=negated)) is False
    with pytest.raises(RuntimeError, match="expected a of shape"):
        rows_in(*inputs("cpu", x=negated, a=torch.ones(1)))

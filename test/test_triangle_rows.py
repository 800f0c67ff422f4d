"""The private operators for some rows of a pair tensor, wherever they have no kernels: they check what they are given,
and refuse it. test_cuda_triangle_rows.py has the kernels, distributed_hopper_checks.py what calls them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

N, ROWS, C, D = 20, 3, 8, 16
SUMS = C * (D + 1) + C * (C + 1) + 4 * D * (C + 1)
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


def output_gradients(device: str, **changed: Any) -> dict[str, Any]:
    return {
        "grad": torch.ones(ROWS, N, C, device=device),
        "o": torch.ones(D, ROWS, 24, device=device)[..., :N],
        "x": torch.ones(ROWS, N, C, device=device),
        "parameters": parameters(device),
        "eps": 1e-5,
        "eps_out": 1e-5,
        "d_o": torch.full((D, ROWS, 24), 7.0, device=device),
        "dz": torch.full((ROWS, N, C), 7.0, device=device),
        "moments": torch.full((ROWS, N, 2), 7.0, device=device),
        "sums": torch.full((SUMS,), 7.0, device=device),
    } | changed


def input_gradients(device: str, **changed: Any) -> dict[str, Any]:
    return {
        "da": torch.ones(D, ROWS, 24, device=device),
        "db": torch.ones(D, ROWS, N, device=device),
        "x": torch.ones(ROWS, N, C, device=device),
        "mask": None,
        "parameters": parameters(device),
        "scale": 1.0,
        "eps": 1e-5,
        "moments": torch.ones(ROWS, N, 2, device=device),
        "dz": torch.full((ROWS, N, C), 7.0, device=device),
        "residual": None,
        "sums": torch.full((SUMS,), 7.0, device=device),
    } | changed


rows_in = torch.ops.myops._triangle_rows_in.default
rows_out = torch.ops.myops._triangle_rows_out.default
out_backward = torch.ops.myops._triangle_rows_out_backward.default
in_backward = torch.ops.myops._triangle_rows_in_backward.default
parameter_gradients = torch.ops.myops._triangle_rows_parameter_gradients.default


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

    gradients = output_gradients(device, parameters=given)
    assert out_backward(**gradients) is False
    for optional in (None, torch.ones(ROWS, N, C, device=device)):
        mask = None if optional is None else optional[..., 0]
        later = input_gradients(device, parameters=given, mask=mask, residual=optional)
        assert in_backward(**later) is False
        written = [gradients[name] for name in ("d_o", "dz", "moments", "sums")] + [later["dz"], later["sums"]]
        assert device == "meta" or all((t == 7).all() for t in written)


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


@pytest.mark.parametrize("device", DEVICES)
def test_arguments_of_gradients_are_checked(device: str) -> None:
    def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.ones(shape, device=device, dtype=dtype)

    good, both, channels = parameters(device), ones(ROWS + 1, N, C), ones(2 * D, ROWS, 24)
    on_other_device = torch.ones(ROWS, N, 2, device="meta" if device == "cpu" else "cpu")
    of_float32 = ones(D * ROWS * 24)
    bad_parameters: list[tuple[dict[str, Any], str]] = [
        ({"x": ones(2, ROWS, N, C)}, r"x of shape \(rows, N, c\), got \(2, 3, 20, 8\)"),
        ({"parameters": good[:-1]}, "16 parameters, got 15"),
        ({"parameters": [*good[:12], ones(D, D), *good[13:]]}, "p_out_weight of shape"),
        ({"moments": ones(ROWS, N, 1)}, r"moments of shape \(3, 20, 2\) to match x, got \(3, 20, 1\)"),
        ({"moments": ones(ROWS, N, 2, dtype=torch.float64)}, "moments of dtype float32, got float64"),
        ({"moments": on_other_device}, "moments on device"),
        ({"dz": ones(N, N, C)}, r"dz of shape \(3, 20, 8\) to match x, got \(20, 20, 8\)"),
        ({"dz": ones(ROWS, N, C, dtype=torch.bfloat16)}, "dz of dtype float32 to match the weights, got bfloat16"),
        ({"dz": ones(1, N, C).expand(ROWS, N, C)}, "dz without internal overlap"),
        ({"x": both[:-1], "dz": both[1:]}, "dz without memory of x, got some of it"),
        ({"sums": ones(SUMS + 1)}, rf"sums of shape \({SUMS},\) to match the weights, got \({SUMS + 1},\)"),
        ({"sums": ones(1, SUMS)}, rf"sums of shape \({SUMS},\) to match the weights, got \(1, {SUMS}\)"),
        ({"sums": ones(SUMS, dtype=torch.float16)}, "sums of dtype float32, got float16"),
        ({"sums": ones(1).expand(SUMS)}, "sums without internal overlap"),
        ({"dz": both[1:], "sums": both.flatten()[:1].as_strided((SUMS,), (0,))}, "sums without internal overlap"),
    ]
    if device == "cpu":
        bad_parameters.append(({"dz": ones(ROWS, N, C).to_sparse()}, "dz of layout strided, got sparse_coo"))
    padded = r"of shape \(16, 3, 24\) to match x and the weights, got"
    for changed, text in (
        *bad_parameters,
        ({"grad": ones(ROWS, N, C + 8)}, r"grad of shape \(3, 20, 8\) to match x, got"),
        ({"grad": ones(ROWS, N, C, dtype=torch.float64)}, "grad of dtype float32 to match the weights, got float64"),
        ({"o": ones(D, ROWS, 24)}, r"o of shape \(16, 3, 20\) to match x and the weights, got \(16, 3, 24\)"),
        ({"d_o": ones(D, ROWS, N)}, rf"d_o {padded} \(16, 3, 20\)"),
        ({"d_o": ones(D, 1, 24).expand(D, ROWS, 24)}, "d_o without internal overlap"),
        ({"o": channels[:D, :, :N], "d_o": channels[D:]}, "d_o without memory of o, got some of it"),
        ({"grad": both[:-1], "dz": both[1:]}, "dz without memory of grad, got some of it"),
        (
            {"d_o": of_float32.view(D, ROWS, 24), "dz": of_float32[: ROWS * N * C].view(ROWS, N, C)},
            "dz without memory of d_o, got some of it",
        ),
    ):
        with pytest.raises(RuntimeError, match=f"^_triangle_rows_out_backward: expected {text}"):
            out_backward(**output_gradients(device, **changed))
    for changed, text in (
        *bad_parameters,
        ({"da": ones(D, ROWS, N - 1)}, r"da of shape \(16, 3, 20\) to match x and the weights, got \(16, 3, 19\)"),
        ({"da": ones(D, ROWS + 1, 24)}, rf"da {padded} \(16, 4, 24\)"),
        ({"db": ones(D, ROWS)}, r"db of shape \(16, 3, 20\) to match x and the weights, got \(16, 3\)"),
        ({"db": ones(D, ROWS, 24, dtype=torch.float64)}, "db of dtype float32 to match the weights, got float64"),
        ({"mask": ones(N, N)}, r"mask of shape \(3, 20\) to match x, got \(20, 20\)"),
        ({"residual": ones(ROWS, N)}, r"residual of shape \(3, 20, 8\) to match x, got \(3, 20\)"),
        ({"residual": both[:-1], "dz": both[1:]}, "dz without memory of the residual, got some of it"),
        ({"mask": both[:-1, :, 0], "dz": both[1:]}, "dz without memory of the mask, got some of it"),
        ({"moments": both[:-1, :, :2], "dz": both[1:]}, "dz without memory of moments, got some of it"),
        ({"da": of_float32.view(D, ROWS, 24), "sums": of_float32[:SUMS]}, "sums without memory of da, got some of it"),
    ):
        with pytest.raises(RuntimeError, match=f"^_triangle_rows_in_backward: expected {text}"):
            in_backward(**input_gradients(device, **changed))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("packed", [True, False])
def test_parameter_gradients(device: str, packed: bool) -> None:
    """Without kernels there are no sums: only tensors without data have results, and float32 has no kernels."""
    given, sums = parameters(device, packed=packed), torch.ones(2, SUMS, device=device)
    output_mask = [t is not None and i % 3 != 0 for i, t in enumerate(given)]
    if device == "meta":
        for made, asked, parameter in zip(
            parameter_gradients(sums, given, output_mask), output_mask, given, strict=True
        ):
            assert made.shape == (parameter.shape if asked and parameter is not None else (0,))
            assert made.device.type == "meta"
    else:
        with pytest.raises(
            RuntimeError, match=r"^_triangle_rows_parameter_gradients: expected (sums on|parameters of)"
        ):
            parameter_gradients(sums, given, output_mask)
    weight = "p_in_weight" if packed else "a_p_weight"
    shape = r"\(2d, c\)" if packed else r"\(d, c\)"
    for arguments, text in (
        ((sums[0], given, output_mask), rf"sums of shape \(batch, size\), got \({SUMS},\)"),
        (
            (sums[:, 1:], given, output_mask),
            rf"sums of shape \(2, {SUMS}\) to match the weights, got \(2, {SUMS - 1}\)",
        ),
        ((sums.double(), given, output_mask), "sums of dtype float32, got float64"),
        ((sums, given[:3], output_mask), "16 parameters, got 3"),
        ((sums, [*given[:2], None, *given[3:]], output_mask), r"a weight as parameters\[2\], got none"),
        ((sums, [*given[:2], sums[0], *given[3:]], output_mask), rf"{weight} of shape {shape}, got \({SUMS},\)"),
        ((sums, [sums[0], *given[1:]], output_mask), rf"norm_in_weight of shape \(8,\) to match {weight}, got"),
        (
            (sums, [*given[:14], sums, given[15]], output_mask),
            rf"g_out_weight of shape \(8, 8\) to match {weight}, got",
        ),
        (
            (sums, [None, *given[1:]], [True] * 16),
            r"output_mask without the gradient of parameters\[0\], which is none",
        ),
    ):
        with pytest.raises(RuntimeError, match=f"^_triangle_rows_parameter_gradients: expected {text}"):
            parameter_gradients(*arguments)


def test_opcheck() -> None:
    for op, arguments in ((rows_in, inputs("cpu")), (rows_out, outputs("cpu"))):
        torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))
    for op, named in ((out_backward, output_gradients("cpu")), (in_backward, input_gradients("cpu"))):
        torch.library.opcheck(op, (), named, test_utils=("test_schema", "test_faketensor"))


def test_lazy_bits() -> None:
    """What is read may have them; what is written may not."""
    x = torch.ones(ROWS, N, C)
    negated = torch._neg_view(x)
    assert rows_in(*inputs("cpu", x=negated, mask=torch._neg_view(x[..., 0]))) is False
    assert rows_out(*outputs("cpu", x=negated, out=negated)) is False
    with pytest.raises(RuntimeError, match="expected a of shape"):
        rows_in(*inputs("cpu", x=negated, a=torch.ones(1)))
    assert out_backward(**output_gradients("cpu", grad=negated, dz=negated)) is False
    assert in_backward(**input_gradients("cpu", residual=negated, mask=torch._neg_view(x[..., 0]))) is False
    with pytest.raises(RuntimeError, match="expected d_o of shape"):
        out_backward(**output_gradients("cpu", grad=negated, d_o=torch.ones(1)))
    with pytest.raises(RuntimeError, match="expected da of shape"):
        in_backward(**input_gradients("cpu", x=negated, da=torch.ones(1)))
    with pytest.raises(RuntimeError, match="expected sums on a device with kernels for them, got cpu"):
        parameter_gradients(torch._neg_view(torch.ones(2, SUMS)), parameters("cpu"), [False] * 16)

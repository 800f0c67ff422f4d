"""Comparisons that several suites share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from op_db import OpCase
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only


def to_float64(arguments: Any) -> Any:
    """The same values in float64, as new leaves. Masks stay."""

    def cast(t: Tensor) -> Tensor:
        return t.detach().double().requires_grad_(t.requires_grad) if is_operand(t) else t

    return tree_map_only(Tensor, cast, arguments)


def worst(got: Tensor, exact: Tensor) -> float:
    """The largest error; infinite where one of the two is not finite and they differ."""
    assert got.shape == exact.shape
    if got.numel() == 0:
        return 0.0
    got, exact = got.detach().double().cpu(), exact.detach().double().cpu()
    error = torch.where((got == exact) | (got.isnan() & exact.isnan()), 0.0, (got - exact).abs())
    return error.nan_to_num(nan=float("inf")).max().item()


def assert_as_good_as_aten(
    case: OpCase,
    got: Tensor,
    aten: Tensor,
    exact: Tensor,
    what: str = "output",
    computed_in: torch.dtype | None = None,
) -> None:
    """Asserts that `got` is about as near to the float64 value `exact` as what ATen computes in the same dtype.

    `computed_in` is the dtype of its products where that is not its own.
    """
    dtype = computed_in or got.dtype
    assert got.dtype == aten.dtype, what
    assert got.shape == exact.shape, what
    scale = max(1.0, exact.detach().abs().max().item()) if exact.numel() else 1.0
    allowed = 1.5 * worst(aten, exact) + case.slack[dtype] * torch.finfo(dtype).eps * scale
    error = worst(got, exact)
    assert error <= allowed, f"{what}: error {error:.3g}, allowed {allowed:.3g} (ATen's {worst(aten, exact):.3g})"


def is_operand(value: Any) -> bool:
    """Whether it is a tensor, and no mask."""
    return isinstance(value, Tensor) and value.dtype != torch.bool


def tensors(arguments: Any) -> list[Tensor]:
    """The tensors in lists, tuples and dictionaries, such as positional and keyword arguments, in order, but masks."""
    return [t for t in tree_leaves(arguments) if is_operand(t)]


def with_tensors(arguments: Any, values: Iterable[Any]) -> Any:
    """The arguments with `values`, in order, in the place of the tensors."""
    rest = iter(values)
    return tree_map_only(Tensor, lambda t: next(rest) if is_operand(t) else t, arguments)


def expanded(arguments: Any) -> bool:
    """Whether an argument has several elements in one place."""
    return any(t.numel() and t.stride(d) == 0 and t.shape[d] > 1 for t in tensors(arguments) for d in range(t.dim()))


def gradients(
    function: Callable[..., Tensor], arguments: Any, cotangent: Tensor, create_graph: bool = False
) -> tuple[Tensor, list[Tensor]]:
    """The value of `function` and the gradient of each argument that requires one, for a given cotangent."""
    args, kwargs = arguments
    out = function(*args, **kwargs)
    leaves = [t for t in tensors(arguments) if t.requires_grad]
    grads = torch.autograd.grad(out, leaves, cotangent.to(out.dtype), create_graph=create_graph)
    return out, list(grads)


def random_like(x: Tensor, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)


def assert_all_close(got: Sequence[Tensor], expected: Sequence[Tensor], **tolerances: Any) -> None:
    assert 0 < len(got) == len(expected)
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e, **tolerances)

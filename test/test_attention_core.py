"""Argument checks of the private operator for the kernel of triangle attention, and its answer without a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

core = torch.ops.myops._triangle_attention_core.default


def arguments(device: str = "cpu") -> dict[str, Any]:
    def of(*shape: int) -> Tensor:
        return torch.ones(shape, dtype=torch.bfloat16, device=device)

    return {
        "q": of(2, 3, 4, 5, 8),
        "k": of(2, 3, 4, 6, 8),
        "v": of(2, 3, 4, 6, 8),
        "bias": of(2, 4, 5, 64),
        "mask": torch.zeros(2, 3, 64, device=device),
        "scale": 1.0,
        "scaled": False,
        "out": of(2, 3, 4, 5, 8),
        "logsumexp": torch.ones(2, 3, 4, 5, device=device),
    }


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_without_kernel(device: str) -> None:
    args = arguments(device)
    assert core(**args) is False
    if device == "cpu":
        assert (args["out"] == 1).all()
        assert (args["logsumexp"] == 1).all()


def test_fake_tensors() -> None:
    with FakeTensorMode():
        assert core(**arguments()) is False


ERRORS: list[tuple[str, Callable[[Tensor], Any], str]] = [
    ("q", lambda t: t.int(), "q of dtype float32, float64, float16 or bfloat16, got int32"),
    ("q", lambda t: t[0], r"q of shape \(batch, R, H, Q, d\), got \(3, 4, 5, 8\)"),
    ("k", lambda t: t.half(), "k of dtype bfloat16 to match q, got float16"),
    ("k", lambda t: t[:, :2], r"k of shape \(2, 3, 4, 6, 8\).*got \(2, 2, 4, 6, 8\)"),
    ("k", lambda t: t[0], r"k of shape \(batch, R, H, K, d\), got \(3, 4, 6, 8\)"),
    ("v", lambda t: t[:, :, :, 1:], r"v of shape \(2, 3, 4, 6, 8\).*got \(2, 3, 4, 5, 8\)"),
    ("bias", lambda t: t[:, :, :4], r"bias of shape \(2, 4, 5, 64\).*got \(2, 4, 4, 64\)"),
    ("bias", lambda t: t[..., :5], "bias of at least as many columns as there are keys, 6, got 5"),
    ("bias", lambda t: t[0], r"bias of shape \(batch, H, Q, width\), got \(4, 5, 64\)"),
    ("mask", lambda t: t[..., :63].contiguous(), r"mask of shape \(2, 3, 64\).*got \(2, 3, 63\)"),
    ("mask", lambda t: t.half(), "mask contiguous and of dtype float32, got dtype float16"),
    ("out", lambda t: t[:1], r"out of shape \(2, 3, 4, 5, 8\).*got \(1, 3, 4, 5, 8\)"),
    ("out", lambda t: t[:1].expand_as(t), "out without internal overlap"),
    ("logsumexp", lambda t: t.mT.contiguous().mT, "logsumexp contiguous and of dtype float32"),
]


@pytest.mark.parametrize(("name", "change", "text"), ERRORS, ids=range(len(ERRORS)))
def test_errors(name: str, change: Callable[[Tensor], Any], text: str) -> None:
    args = arguments()
    args[name] = change(args[name])
    with pytest.raises(RuntimeError, match=f"^_triangle_attention_core: expected {text}"):
        core(**args)


def test_out_may_be_q() -> None:
    args = arguments()
    qkv = torch.ones(2, 3, 5, 3 * 4 * 8, dtype=torch.bfloat16)
    args["q"], args["k"], args["v"] = (t.unflatten(-1, (4, 8)).transpose(2, 3) for t in qkv.chunk(3, -1))
    assert core(**args | {"out": args["q"]}) is False
    with pytest.raises(RuntimeError, match="expected out and logsumexp without memory of q, got"):
        core(**args | {"out": args["k"]})


@pytest.mark.parametrize("name", ["q", "bias", "mask"])
def test_what_is_written_is_not_read(name: str) -> None:
    args = arguments()
    written = "logsumexp" if name == "mask" else "out"
    memory = args[name].new_zeros(args[name].numel() + args[written].numel())
    args[name] = memory[: args[name].numel()].view_as(args[name])
    args[written] = memory[1 : 1 + args[written].numel()].view_as(args[written])
    with pytest.raises(RuntimeError, match=f"expected out and logsumexp without memory of {name}, got some of it"):
        core(**args)


@pytest.mark.parametrize("name", ["q", "mask", "out", "logsumexp"])
def test_lazy_bits(name: str) -> None:
    """What is read is negated first; what would have to be copied back is refused."""
    args = arguments()
    args[name] = torch._neg_view(args[name])
    assert core(**args) is False

"""triangle_attention_update: what it refuses, and arguments that share memory, or whose memory holds other values."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attention_update_samples import leaves_of, weights
from checks import assert_all_close, random_like
from torch import Tensor

from torchops import AttentionWeights, triangle_attention_update
from torchops._triangle_attention.update import aten, panels
from torchops._triangle_attention.update.arguments import check_writable

OPS = torch.ops.myops


def negated(t: Any) -> Any:
    """t, of which the memory holds -t."""
    lazy = torch.complex(torch.zeros_like(t), -t).conj().imag if isinstance(t, Tensor) else t
    assert not isinstance(t, Tensor) or lazy.is_neg()
    return lazy


def test_tensors_whose_memory_holds_other_values() -> None:
    plain = leaves_of(weights(dtype=torch.float32))
    x = torch.randn(4, 4, 12)
    leaves = [t for t in plain if isinstance(t, Tensor)]
    expected = triangle_attention_update(x, None, plain)
    cotangent = random_like(expected.detach(), 3)
    grads = torch.autograd.grad(expected, leaves, cotangent)
    lazy = AttentionWeights._make(map(negated, plain))
    got = triangle_attention_update(negated(x), None, lazy)
    assert_all_close([got, *torch.autograd.grad(got, leaves, negated(cotangent))], [expected, *grads])
    with torch.no_grad():
        assert_all_close([triangle_attention_update(x, None, lazy)], [expected])
        y = negated(x)
        triangle_attention_update(y, None, lazy, inplace=True)
        assert_all_close([y], [x + expected])
        zeros = plain._replace(out_bias=torch._efficientzerotensor((12,)))
        held = plain._replace(out_bias=torch.zeros(12))
        assert_all_close([triangle_attention_update(x, None, zeros)], [triangle_attention_update(x, None, held)])


@pytest.mark.parametrize("name", ["mask", "norm_weight", "bias_weight", "q", "gate", "gate_bias", "out", "out_bias"])
def test_separate_tensors_over_the_memory_that_is_overwritten(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(panels, "CPU_BYTES", 1)  # each row is written before the next is read
    w = weights(dtype=torch.float32)
    memory = bytearray(4 * 768)
    x, shared = (torch.frombuffer(memory, dtype=torch.float32) for _ in range(2))
    x = x.normal_().view(8, 8, 12)
    size = (8, 8) if name == "mask" else getattr(w, name).shape
    shared = shared[: math.prod(size)].view(size)

    def given(t: Tensor) -> tuple[Tensor | None, AttentionWeights]:
        return (t, w) if name == "mask" else (None, w._replace(**{name: t}))  # type: ignore[arg-type]

    expected = x + triangle_attention_update(x, *given(shared.clone()))
    triangle_attention_update(x, *given(shared), inplace=True)
    assert_all_close([x], [expected])


def test_version_counter_of_what_fails_halfway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(panels, "CPU_BYTES", 1)
    w, x = weights(dtype=torch.float32), torch.randn(4, 4, 12)
    add = aten.add
    added: list[None] = []

    def failing(*args: Any) -> None:
        if added:
            raise MemoryError
        add(*args)
        added.append(None)

    monkeypatch.setattr(aten, "add", failing)
    old = x.clone()
    with pytest.raises(MemoryError):
        triangle_attention_update(x, None, w, inplace=True)
    assert not torch.equal(x, old)
    assert x._version == 1


def test_overlap_in_training() -> None:
    w = leaves_of(weights(dtype=torch.float32))
    memory = torch.randn(16, 12)
    x, gate, mask = memory.view(4, 4, 12), memory[:15], memory[:, 0].view(4, 4)
    old = x.clone()
    expected = old + triangle_attention_update(old, mask.clone(), w._replace(gate=gate.clone()))
    triangle_attention_update(x, mask, w._replace(gate=gate), inplace=True)
    cotangent = torch.randn(4, 4, 12)
    leaves: Any = [w.q, w.gate_bias, w.out]
    got, reference = (torch.autograd.grad(y, leaves, cotangent) for y in (x, expected))
    assert_all_close([x, *got], [expected, *reference])


def test_parameters_and_mask_that_are_overwritten_meanwhile() -> None:
    w = weights(dtype=torch.float32)
    memory = torch.randn(40, 40, 12)
    old = memory.clone()
    overlapping = w._replace(bias_weight=memory[0, :3], out=memory[1, :15].T, norm_weight=memory[2, 0])
    copies = AttentionWeights._make(t.clone() if isinstance(t, Tensor) else t for t in overlapping)
    triangle_attention_update(memory, memory[..., 0], overlapping, "ending", inplace=True)
    assert_all_close([memory], [old + triangle_attention_update(old, old[..., 0], copies, "ending")])


def test_inference_tensors_and_no_elements() -> None:
    w = leaves_of(weights(dtype=torch.float32))
    with torch.no_grad():
        triangle_attention_update(torch.zeros(0, 1, 12).expand(0, 0, 12), None, w, inplace=True)
    with torch.inference_mode():
        made = torch.randn(4, 4, 12)
        triangle_attention_update(made, None, w, inplace=True)
        before = made.clone()
    for grad in (True, False):
        with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match="inference tensor outside InferenceMode"):
            triangle_attention_update(made, None, w, inplace=True)
        assert torch.equal(made, before)


@pytest.mark.parametrize(
    ("sizes", "strides", "overlaps"),
    [
        ((2, 2, 3), (3, 20, 2), False),  # interleaved: 0 2 4, 3 5 7
        ((2, 2, 3), (2, 20, 2), True),
        ((3, 3, 2), (4, 30, 6), False),  # 0 4 8, 6 10 14
        ((4, 3, 3), (4, 30, 6), True),
        ((2, 3, 3, 2), (5, 100, 20, 3), False),
        ((2, 3, 3, 2), (3, 100, 20, 3), True),
    ],
)
def test_overlap_is_found_where_there_is_one(sizes: tuple[int, ...], strides: tuple[int, ...], overlaps: bool) -> None:
    """As in the operators in C++, here sigmoid_: with strides that are not nested too."""
    places = torch.arange(300).as_strided(sizes, strides)
    assert (len(places.unique()) < places.numel()) == overlaps
    for device in ("cpu", "meta"):
        x = torch.zeros(300, device=device).as_strided(sizes, strides)
        for called in (lambda x: check_writable("update_", x), lambda x: OPS.sigmoid_(x)):
            if overlaps:
                with pytest.raises(RuntimeError, match="_: expected x with"):
                    called(x)
            else:
                called(x)


X = torch.zeros(4, 4, 12)


@pytest.mark.parametrize("inplace", [False, True])
def test_a_mask_has_no_gradient(inplace: bool) -> None:
    mask = torch.ones(4, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"^triangle_attention_update_?: expected mask that needs no gradient"):
        triangle_attention_update(X.clone(), mask, weights(dtype=torch.float32), inplace=inplace)


@pytest.mark.parametrize("inplace", [False, True])
def test_no_tensor(inplace: bool) -> None:
    with pytest.raises(TypeError, match=r"^triangle_attention_update_?: expected x of type Tensor, got NoneType$"):
        triangle_attention_update(None, None, weights(dtype=torch.float32), inplace=inplace)  # type: ignore[arg-type]


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("name", ["x", "mask", "q", "out_bias"])
def test_type_errors(name: str, inplace: bool) -> None:
    x, mask, w = (3 if name == "x" else X), (3 if name == "mask" else None), weights(dtype=torch.float32)
    if name in w._fields:
        w = w._replace(**{name: 3})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=f"^triangle_attention_update: expected {name} of type Tensor, got int$"):
        triangle_attention_update(x, mask, w, inplace=inplace)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "kind"), [("heads", "int"), ("eps", "float")])
@pytest.mark.parametrize("value", ["a", None, [1]], ids=str)
def test_numbers_of_a_wrong_type_are_named(name: str, kind: str, value: Any) -> None:
    w = weights(dtype=torch.float32)
    expected = f"^triangle_attention_update: expected {name} of type {kind}, got {type(value).__name__}$"
    with pytest.raises(TypeError, match=expected), torch.no_grad():
        triangle_attention_update(X, None, w._replace(**{name: value}))


def test_private_arguments() -> None:
    w = weights(dtype=torch.float32)
    _, product, logsumexp = OPS._triangle_attention_update_kept(X, None, w[:10], 3, 1e-5, False)
    for count in (10, 12):
        with pytest.raises(RuntimeError, match=f"expected output_mask of 11 elements, got {count}"):
            OPS._triangle_attention_update_backward(
                X, X, product, logsumexp, None, w[:10], 3, 1e-5, False, [True] * count
            )
    nested = torch.nested.nested_tensor([torch.zeros(4, 12), torch.zeros(3, 12)])
    with pytest.raises(RuntimeError, match="expected x of layout strided, got a nested tensor"):
        triangle_attention_update(nested, None, w)

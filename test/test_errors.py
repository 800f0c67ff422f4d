"""Bad input: one text on every backend and under FakeTensor, and arguments that are left as they were."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from checks import tensors
from op_db import OpCase
from samples import ErrorInput
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only


def message_of(case: OpCase, error: ErrorInput, arguments: Any, **kwargs: Any) -> str:
    args, keywords = arguments
    with pytest.raises(error.error) as raised:
        case.op(*args, **keywords, **kwargs)
    assert type(raised.value) is error.error
    return str(raised.value).partition("\n")[0]


def test_text(case: OpCase, device: str, error: ErrorInput) -> None:
    assert message_of(case, error, error(torch.float32, device)) == error.message(device, case.name)


def test_text_when_training(case: OpCase, device: str, error: ErrorInput) -> None:
    """With gradients on, the autograd kernel sees the arguments first."""
    arguments = error(torch.float32, device, requires_grad=True)
    if case.mutates is not None and error.name != "expanded":
        arguments[0][case.mutates] = arguments[0][case.mutates].clone()
    assert message_of(case, error, arguments) == error.message(device, case.name)


def test_text_on_meta(case: OpCase, error: ErrorInput) -> None:
    assert message_of(case, error, error(torch.float32, "meta")) == error.message("meta", case.name)


@pytest.mark.parametrize("requires_grad", [False, True], ids=["inference", "training"])
def test_text_with_fake_tensors(case: OpCase, device: str, error: ErrorInput, requires_grad: bool) -> None:
    real = error(torch.float32, device, requires_grad)
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fake = tree_map_only(torch.Tensor, mode.from_tensor, real)
        if case.mutates is not None and requires_grad and error.name != "expanded":
            fake[0][case.mutates] = fake[0][case.mutates].clone()
        assert message_of(case, error, fake) == error.message(device, case.name)


# Dynamo may not put cpu and meta tensors in one graph; the FakeTensor test has them.
@pytest.mark.ops(where=lambda error, **_: not error.name.endswith("_elsewhere"))
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_text_when_compiled(case: OpCase, error: ErrorInput, dynamic: bool) -> None:
    """The text reaches the user from inside a trace as well (wrapped by Dynamo, which adds where it happened)."""
    args, kwargs = error(torch.float32, "cpu")

    def function(args: list[Any], kwargs: dict[str, Any]) -> Any:
        return case.op(*args, **kwargs)

    compiled = torch.compile(function, backend="eager", fullgraph=True, dynamic=dynamic)
    with pytest.raises((error.error, torch._dynamo.exc.TorchRuntimeError)) as raised:
        compiled(args, kwargs)
    expected, text = error.message("cpu", case.name), str(raised.value)
    if dynamic:  # a size may be the symbol for it
        expected, text = (re.sub(r"(?<=[(, =])(s\d+|\d+)(?=[,)\s]|$)", "#", t) for t in (expected, text))
    assert expected in text


@pytest.mark.parametrize("requires_grad", [False, True], ids=["inference", "training"])
def test_arguments_are_untouched(case: OpCase, device: str, error: ErrorInput, requires_grad: bool) -> None:
    arguments = error(torch.float32, device, requires_grad)
    if case.mutates is not None and requires_grad and error.name != "expanded":
        arguments[0][case.mutates] = arguments[0][case.mutates].clone()
    before = [(t, t.detach().clone(), t._version, t.grad_fn) for t in tensors(arguments)]
    message_of(case, error, arguments)
    for now, then, version, history in before:
        assert now.is_meta or torch.equal(now, then)
        assert now._version == version
        assert now.grad_fn is history


@pytest.mark.ops(mutating=True, dtypes=[torch.float32])
def test_a_leaf_that_requires_grad_is_refused(case: OpCase, device: str, dtype: torch.dtype) -> None:
    """As in ATen: its old value is what the gradient belongs to. Without recording, it may be overwritten."""
    sample = next(s for s in case.samples if s.name == "matrix")
    args, kwargs = sample(dtype, device, requires_grad=True)
    leaf = case.mutated(args)
    before = leaf.detach().clone()
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad is being used in an in-place operation"):
        case.op(*args, **kwargs)
    assert torch.equal(leaf, before)
    assert leaf._version == 0
    with torch.no_grad():
        case.op(*args, **kwargs)
    assert leaf.is_leaf
    assert not torch.equal(leaf, before)

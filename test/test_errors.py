"""Bad input: one text on every backend and under FakeTensor, and arguments that are left as they were."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import tensors
from op_db import OpCase
from samples import ErrorInput, Sample
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

import torchops


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
    if case.mutates is not None and "overlap" not in error.name:
        arguments[0][case.mutates] = arguments[0][case.mutates].clone()
    assert message_of(case, error, arguments) == error.message(device, case.name)


def test_text_on_meta(case: OpCase, error: ErrorInput) -> None:
    assert message_of(case, error, error(torch.float32, "meta")) == error.message("meta", case.name)


# The devices of fake tensors are seen by our kernels for autograd; without one, they are compared by PyTorch.
@pytest.mark.ops(where=lambda case, error, **_: case.differentiable or not error.name.endswith("_elsewhere"))
@pytest.mark.parametrize("requires_grad", [False, True], ids=["inference", "training"])
def test_text_with_fake_tensors(case: OpCase, device: str, error: ErrorInput, requires_grad: bool) -> None:
    real = error(torch.float32, device, requires_grad)
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fake = tree_map_only(torch.Tensor, mode.from_tensor, real)
        if case.mutates is not None and requires_grad and "overlap" not in error.name:
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
        # (torch 2.12 quotes the text)
        size = r"(?<=[(, =])(\(s\d+//2\)|s\d+(\*s\d+)?|\d+)(?=[,)\s'\"]|$)"
        expected, text = (re.sub(size, "#", t) for t in (expected, text))
    assert expected in text


@pytest.mark.parametrize("requires_grad", [False, True], ids=["inference", "training"])
def test_arguments_are_untouched(case: OpCase, device: str, error: ErrorInput, requires_grad: bool) -> None:
    arguments = error(torch.float32, device, requires_grad)
    if case.mutates is not None and requires_grad and "overlap" not in error.name:
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


@pytest.mark.ops(mutating=True, dtypes=[torch.float32], samples=["matrix"])
def test_what_cannot_be_saved_is_refused_before_anything_is_written(
    case: OpCase, device: str, dtype: torch.dtype, sample: Sample
) -> None:
    """Each argument as an inference tensor, beside others that require a gradient: used, or refused at once."""
    assert case.mutates is not None
    count = len(tensors(sample(dtype, device)))
    for position in range(count):
        args, kwargs = sample(dtype, device, requires_grad=True)
        args[case.mutates] = args[case.mutates].clone()
        target = case.mutated(args)
        old = tensors((args, kwargs))[position]
        with torch.inference_mode():
            made = old.clone()
        instead = {id(old): made}.get
        args, kwargs = tree_map_only(Tensor, lambda t: instead(id(t), t), (args, kwargs))  # noqa: B023
        before, refused = target.detach().clone(), ""
        try:
            case.op(*args, **kwargs)
        except RuntimeError as error:
            refused = str(error)
        if refused:
            assert re.search("[Ii]nference tensor", refused)
            assert torch.equal(target, before)
        else:
            leaves = [t for t in tensors((args, kwargs)) if t.is_leaf and t.requires_grad]
            assert all(g is not None for g in torch.autograd.grad(case.mutated(args).sum(), leaves))


# --- types -----------------------------------------------------------------------------------------------------------


@pytest.mark.ops(samples=["matrix"], dtypes=[torch.float32], where=lambda case, **_: not case.private)
def test_a_wrong_type_is_a_type_error(case: OpCase, sample: Sample) -> None:
    """As from PyTorch's own functions: for what is no tensor, in place of each tensor; None is one where it may be left
    out."""
    args, kwargs = sample(torch.float32, "cpu")
    parameters = inspect.signature(case.wrapper).parameters
    given = dict(zip(parameters, args, strict=False)) | kwargs
    shown = case.wrapper.__name__
    for name in [name for name, value in given.items() if isinstance(value, Tensor)]:
        with pytest.raises(TypeError) as raised:
            case.wrapper(**{**given, name: "no tensor"})
        expected = parameters[name].annotation.replace("|", "or")
        assert str(raised.value) == f"{shown}: expected {name} of type {expected}, got str"
        if expected == "Tensor":
            for casts, infers in ((False, False), (True, False), (False, True)):
                autocast = torch.autocast("cpu", torch.bfloat16, enabled=casts)
                with pytest.raises(TypeError) as raised, autocast, torch.inference_mode(infers):
                    case.wrapper(**{**given, name: None})
                assert str(raised.value) == f"{case.name}: expected {name} of type Tensor, got NoneType"
    nothing = {name: None if isinstance(value, Tensor) else value for name, value in given.items()}
    with pytest.raises(TypeError) as raised, torch.inference_mode():
        case.wrapper(**nothing)
    first = next(iter(given)) if case.differentiable else "x"
    assert str(raised.value) == f"{case.name}: expected {first} of type Tensor, got NoneType"


def test_other_wrong_types_are_type_errors() -> None:
    x = torch.rand(2, 3)
    for call, text in (
        (lambda: torchops.softmax(x, 1.5), "softmax: expected dim of type int, got float"),  # type: ignore[arg-type]
        (lambda: torchops.layer_norm(x, 3), "layer_norm: expected normalized_shape of type tuple of ints, got int"),  # type: ignore[arg-type]
        (
            lambda: torchops.layer_norm(x, (3.0,)),  # type: ignore[arg-type]
            "layer_norm: expected normalized_shape of type tuple of ints, got tuple of something else",
        ),
        (lambda: torchops.glu(x, x, x, activation=1), "glu: expected activation of type str, got int"),  # type: ignore[arg-type]
        (
            lambda: torchops.nn.Transition(3)([x], residual=True),
            "transition: expected x of type Tensor, got list",
        ),
    ):
        with pytest.raises(TypeError) as raised:
            call()
        assert str(raised.value) == text


# --- a call that fails below the checks ------------------------------------------------------------------------------


@pytest.mark.ops(mutating=True, samples=["matrix"], dtypes=[torch.float32])
def test_version_when_the_kernel_fails(case: OpCase, sample: Sample) -> None:
    """What a failed call did not write is no modification: a backward that reads it goes on."""

    def failing(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("out of luck")

    args, kwargs = sample(torch.float32, "cpu")
    x = args[0]
    leaf = torch.ones_like(x, requires_grad=True)
    product = leaf * x
    with warnings.catch_warnings(), torch.library._scoped_library("myops", "IMPL") as library:
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        # By default, torch 2.11 overrides kernels of C++ alone.
        library.impl(case.registered, failing, "CPU", allow_override=True)
        with pytest.raises(RuntimeError, match="out of luck"):
            case.op(*args, **kwargs)
    assert x._version == 0
    product.sum().backward()
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, x)


# --- private operators -----------------------------------------------------------------------------------------------


def _helper_errors() -> list[tuple[str, str, Callable[[Callable[..., Tensor]], list[Any]], str]]:
    dense, norm, softmax = "_dense_backward", "_layer_norm_backward", "_softmax_backward"
    all_of_them, f64 = [True, True, True], torch.float64

    def backward(**changed: Any) -> Callable[[Callable[..., Tensor]], list[Any]]:
        def build(t: Callable[..., Tensor]) -> list[Any]:
            given = {name: t(*shape, **kwargs) for name, (shape, kwargs) in changed.items()}
            defaults = {"grad": t(4, 8), "x": t(4, 8), "mean": t(4, 1), "rstd": t(4, 1), "weight": t(8)}
            a = {**defaults, **given}
            return [a["grad"], a["x"], [8], a["mean"], a["rstd"], a["weight"], all_of_them]

        return build

    return [
        (dense, "grad_shape", lambda t: [t(3, 7), t(4, 8)], "expected grad of shape (4, 8) to match y, got (3, 7)"),
        (dense, "grad_rank", lambda t: [t(8), t(4, 8)], "expected grad of shape (4, 8) to match y, got (8,)"),
        (
            dense,
            "grad_dtype",
            lambda t: [t(4, 8, dtype=f64), t(4, 8)],
            "expected grad of dtype float32 to match y, got float64",
        ),
        (dense, "zero_dim", lambda t: [t(), t()], "expected y with at least 1 dimension, got a 0-dimensional tensor"),
        (norm, "mean_shape", backward(mean=((1, 1), {})), "expected mean of shape (4, 1) to match x, got (1, 1)"),
        (norm, "rstd_shape", backward(rstd=((4,), {})), "expected rstd of shape (4, 1) to match x, got (4,)"),
        (
            norm,
            "rstd_dtype",
            backward(rstd=((4, 1), {"dtype": f64})),
            "expected rstd of dtype float32 for x of dtype float32, got float64",
        ),
        (norm, "grad_shape", backward(grad=((4, 7), {})), "expected grad of shape (4, 8) to match x, got (4, 7)"),
        (
            norm,
            "grad_dtype",
            backward(grad=((4, 8), {"dtype": f64})),
            "expected grad of dtype float32 to match x, got float64",
        ),
        (
            norm,
            "weight_shape",
            backward(weight=((7,), {})),
            "expected weight of shape (8,) to match normalized_shape, got (7,)",
        ),
        (
            norm,
            "x_shape",
            backward(x=((4, 7), {})),
            "expected x of shape (..., 8) to match normalized_shape, got (4, 7)",
        ),
        (
            softmax,
            "grad_shape",
            lambda t: [t(1, 8), t(4, 8), -1],
            "expected grad of shape (4, 8) to match y, got (1, 8)",
        ),
        (
            softmax,
            "grad_dtype",
            lambda t: [t(4, 8, dtype=f64), t(4, 8), -1],
            "expected grad of dtype float32 to match y, got float64",
        ),
        (
            softmax,
            "y_dtype",
            lambda t: [t(4, 8), t(4, 8, dtype=torch.int64), -1],
            "expected y of dtype float32, float64, float16 or bfloat16, got int64",
        ),
        (
            "_saved_copy",
            "dtype",
            lambda t: [t(3, dtype=torch.int64)],
            "expected x of dtype bool or a floating-point dtype, got int64",
        ),
        (
            "_layer_norm",
            "shape",
            lambda t: [t(4, 8), [7], None, None, 1e-5],
            "expected x of shape (..., 7) to match normalized_shape, got (4, 8)",
        ),
        (
            "_layer_norm_",
            "shape",
            lambda t: [t(4, 8), [7], None, None, 1e-5],
            "expected x of shape (..., 7) to match normalized_shape, got (4, 8)",
        ),
        *(
            (
                name,
                "rank",
                lambda t: [t(3), [2, 2, 3], None, None, 1e-5],
                "expected x of shape (..., 2, 2, 3) to match normalized_shape, got (3,)",
            )
            for name in ("_layer_norm", "_layer_norm_")
        ),
        (
            "_dense_on_path",
            "shape",
            lambda t: [t(5, 7), t(3, 6), None, "auto"],
            "expected w of shape (out, in) with in = 7 to match x, got (3, 6)",
        ),
    ]


@pytest.mark.parametrize("backend", ["cpu", "meta", "composite", *(["cuda"] if torch.cuda.is_available() else [])])
@pytest.mark.parametrize(
    ("name", "what", "build", "text"), _helper_errors(), ids=lambda v: v if isinstance(v, str) else ""
)
def test_private_operators(name: str, what: str, build: Any, text: str, backend: str) -> None:
    """They are reached by anyone, so they check what they are given: one text on every backend."""
    device = "cpu" if backend == "composite" else backend
    op = getattr(torch.ops.myops, name).default
    arguments = build(lambda *shape, dtype=torch.float32: torch.ones(shape, dtype=dtype, device=device))
    composite = torch._C.DispatchKey.CompositeExplicitAutograd
    shown = {"_layer_norm": "layer_norm", "_layer_norm_": "layer_norm_", "_dense_on_path": "dense"}.get(name, name)
    with pytest.raises(RuntimeError, match="^" + re.escape(f"{shown}: {text}")):
        op._op_dk(composite, *arguments) if backend == "composite" else op(*arguments)

"""torch.autocast: the dtypes of ATen's operators, gradients, the cache of weights, compiled and exported code.

An operator that overwrites its argument keeps the dtype of that, and its other arguments are cast to it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from checks import assert_all_close, assert_as_good_as_aten, gradients, random_like, tensors, to_float64, with_tensors
from op_db import OPS, OpCase
from samples import Arguments, Sample
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import vmap
from torch.utils._python_dispatch import TorchDispatchMode

import torchops
from torchops.nn import Dense

pytestmark = pytest.mark.ops(differentiable=True)

LOW, FULL = torch.bfloat16, torch.float32
BY_NAME = {case.name: case for case in OPS}


class Casts(TorchDispatchMode):
    """Counts the casts of tensors of one shape."""

    def __init__(self, shape: tuple[int, ...]):
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._to_copy.default and args[0].shape == self.shape
        return func(*args, **(kwargs or {}))


def mixed(arguments: Arguments, first: torch.dtype, rest: torch.dtype, norms: torch.dtype | None = None) -> Arguments:
    """The first tensor in one dtype and the others in another, as new leaves that keep their strides. Parameters of
    folded layer norms, which are named so or come first in a list, may get a third one."""
    args, kwargs = arguments
    of_norms = [t for name, t in kwargs.items() if name.startswith("norm_")]
    of_norms += [t for value in args if isinstance(value, list) for t in value[:2]]

    def cast(number: int, t: Tensor) -> Tensor:
        dtype = first if number == 0 else rest
        if norms is not None and any(t is of_norm for of_norm in of_norms):
            dtype = norms
        return t.detach().to(dtype).requires_grad_(t.requires_grad)

    return with_tensors(arguments, itertools.starmap(cast, enumerate(tensors(arguments))))


def aten_has_it(case: OpCase, device: str, sample: Sample, first: torch.dtype, rest: torch.dtype) -> bool:
    """On the CPU, ATen's layer_norm takes parameters of another dtype only if x is the low one and both are there."""
    if case.name != "layer_norm" or device != "cpu" or first == rest:
        return True
    return first == LOW and sample.name not in ("bias_only", "float32_bias")


def empty(sample: Sample) -> bool:
    return tensors(sample(torch.float32, "cpu"))[0].numel() == 0


def under_autocast(function: Callable[..., Tensor], device: str) -> Callable[..., Tensor]:
    """The forward pass alone: what autocast is on in, a backward pass should not be."""

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        with torch.autocast(device, LOW):
            return function(*args, **kwargs)

    return forward


@pytest.mark.parametrize(("first", "rest"), [(FULL, FULL), (LOW, FULL), (FULL, LOW)])
@pytest.mark.ops(
    mutating=False,
    leaves=True,
    large=False,
    # ATen's layer_norm has no gradient for the moments of no elements.
    where=lambda case, sample, **_: case.name != "layer_norm" or not empty(sample),
)
def test_like_aten(case: OpCase, device: str, sample: Sample, first: torch.dtype, rest: torch.dtype) -> None:
    """Values, gradients and the dtypes of both, for input and parameters of one dtype and of two."""
    if not aten_has_it(case, device, sample, first, rest):
        pytest.skip("ATen's layer_norm takes no parameters of this dtype on the CPU")
    arguments = mixed(sample(torch.float32, device, requires_grad=True), first, rest)
    exact_arguments = to_float64(arguments)
    exact = case.reference(*exact_arguments[0], **exact_arguments[1])
    cotangent = random_like(exact)
    got, got_grads = gradients(under_autocast(case.op, device), arguments, cotangent)
    aten, aten_grads = gradients(under_autocast(case.reference, device), arguments, cotangent)
    _, exact_grads = gradients(case.reference, exact_arguments, cotangent)
    assert got.dtype == aten.dtype
    assert_as_good_as_aten(case, got, aten, exact, computed_in=LOW if case.casts_weights else None)
    for got_grad, aten_grad, exact_grad in zip(got_grads, aten_grads, exact_grads, strict=True):
        assert got_grad.dtype == aten_grad.dtype
        error, of_aten = ((grad.double() - exact_grad).abs().sum() for grad in (got_grad, aten_grad))
        assert error <= max(0.05 * exact_grad.abs().sum() + 0.05, case.slack[LOW] * of_aten)


OTHER = torch.float16


@pytest.mark.parametrize(
    ("first", "rest"), [(FULL, LOW), (LOW, FULL), (torch.float64, FULL), (OTHER, OTHER), (OTHER, FULL)]
)
@pytest.mark.ops(mutating=True, leaves=True, large=False)
def test_in_place_keeps_the_dtype(
    case: OpCase, device: str, sample: Sample, first: torch.dtype, rest: torch.dtype
) -> None:
    arguments = mixed(sample(torch.float32, device, requires_grad=True), first, rest)
    if case.casts_weights and first == torch.float64:
        pytest.skip("an error: see test_weights_alone_are_cast")
    weights = LOW if case.casts_weights and first != OTHER else first
    same = mixed(arguments, first, weights, FULL if rest == FULL else weights)
    cotangent = random_like(case.mutated(arguments[0]))
    got, got_grads = gradients(under_autocast(case.pure, device), arguments, cotangent)
    expected, expected_grads = gradients(case.pure, same, cotangent)
    assert got.dtype == first
    assert_all_close([got], [expected])
    for got_grad, expected_grad, leaf in zip(got_grads, expected_grads, tensors(arguments), strict=True):
        assert got_grad.dtype == leaf.dtype
        # A float32 leaf beside 16-bit weights may get its gradient unrounded.
        dtype = expected_grad.dtype if case.casts_weights else leaf.dtype
        # From other kernels, an element that almost cancels is as exact as the largest ones.
        eps = torch.finfo(dtype).eps
        largest = expected_grad.abs().max().item() if expected_grad.numel() else 0.0
        tolerances = {"rtol": 2 * eps, "atol": eps * largest} if device == "cuda" else {}
        assert_all_close([got_grad.to(dtype)], [expected_grad.to(dtype)], **tolerances)


@pytest.mark.ops(samples=["matrix"], mutating=False, dtypes=[torch.float32, torch.float64])
def test_float16_and_float64(case: OpCase, device: str, sample: Sample, dtype: torch.dtype) -> None:
    """Autocast to another dtype than bfloat16; and float64, which it leaves alone."""
    args, kwargs = sample(dtype, device)
    with torch.autocast(device, torch.float16):
        assert case.op(*args, **kwargs).dtype == case.reference(*args, **kwargs).dtype


@contextmanager
def fake_cuda() -> Iterator[None]:
    """Autocast to float16 of tensors without data that claim to be on a GPU. torch.autocast itself asks for one."""
    former = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.float16)
    try:
        with FakeTensorMode():
            yield
    finally:
        torch.set_autocast_enabled("cuda", former[0])
        torch.set_autocast_dtype("cuda", former[1])


def on_cuda(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def test_rules_of_another_device() -> None:
    """Softmax and layer_norm are wide on a GPU."""
    with fake_cuda():
        x, w, b = on_cuda(3, 5), on_cuda(5, 5), on_cuda(5)
        low = on_cuda(3, 5, dtype=torch.float16)
        for got, reference in [
            (torchops.dense(x, w), torch.nn.functional.linear(x, w)),
            (torchops.dense(low, w, b), torch.nn.functional.linear(x, w)),
            (torchops.gate(x, x, w, b), x),
            (torchops.gate(low, x, w, b), low),
            (torchops.gate_(x, low, w, b), x),
            (torchops.glu(x, w, w, b), low),
            (torchops.transition(x, gate_weight=w, up_weight=w, down_weight=w), low),
            (torchops.add_transition_(x, gate_weight=w, up_weight=w, down_weight=w, norm_bias=b), x),
            (torchops.square_matmul(x, w), x @ w),
            (torchops.sigmoid(low), torch.sigmoid(low)),
            (torchops.softmax(low), torch.softmax(low, -1)),
            (torchops.layer_norm(low, [5], b), torch.nn.functional.layer_norm(low, [5], b)),
            (torchops.softmax_(low), low),
            (torchops.layer_norm_(low, [5], b), low),
            (torchops.square_matmul_(low, w), low),
        ]:
            assert got.dtype == reference.dtype
            assert got.device == reference.device


def test_weights_alone_are_cast() -> None:
    """float32 inputs are read as they are, others are cast like the weights; what is overwritten is never cast,
    and the weights are cast to it if it has 16 bits."""
    x, v, w = torch.randn(3, 5), torch.randn(3, 4), torch.randn(4, 5)
    with torch.autocast("cpu", LOW), Casts((3, 5)) as casts:
        assert torch.equal(torchops.gate(v, x, w), torchops.gate(v, x, w.to(LOW)))
        assert torch.equal(torchops.glu(x, w, w), torchops.glu(x, w.to(LOW), w.to(LOW)))
        assert casts.count == 0
        half = x.half()
        assert torch.equal(torchops.gate(v, half, w), torchops.gate(v, half.to(LOW), w.to(LOW)))
        assert torchops.gate(v.half(), half, w).dtype == LOW
        assert casts.count == 2 + 2  # the casts of these lines, and those of the operators
        assert torch.equal(torchops.gate_(v.half(), half, w), torchops.gate_(v.half(), half, w.half()))
        with pytest.raises(RuntimeError, match="gate_: expected v of dtype bfloat16 or float32 to match w, got"):
            torchops.gate_(v.double(), x, w)
        assert torchops.gate(v.double(), x.double(), w.double()).dtype == torch.float64


def test_off_inside() -> None:
    x, w = torch.randn(3, 5), torch.randn(4, 5)
    exact = torchops.dense(x, w)
    with torch.autocast("cpu", LOW):
        assert torchops.dense(x, w).dtype == LOW
        with torch.autocast("cpu", enabled=False):
            assert torch.equal(torchops.dense(x, w), exact)
        assert torchops.dense(x, w).dtype == LOW
    assert torch.equal(torchops.dense(x, w), exact)


def test_mixed_devices() -> None:
    """Autocast of the one device, dispatched to for the sake of the other tensor: the usual error, and no recursion."""
    x, w = torch.randn(3, 5), torch.randn(4, 5)
    with fake_cuda():
        fake = on_cuda(4, 5)
        with pytest.raises(RuntimeError, match="dense: expected w on device cuda:0 to match x, got cpu"):
            torchops.dense(on_cuda(3, 5, dtype=torch.float16), torch.empty(4, 5, dtype=torch.float16))
        with pytest.raises(RuntimeError, match="dense: expected w on device cpu to match x, got cuda:0"):
            torchops.dense(torch.empty(3, 5), fake)
    with torch.autocast("cpu", LOW), pytest.raises(RuntimeError, match="dense: expected w of dtype bfloat16"):
        torchops.dense(x, w.to("meta"))


@pytest.mark.parametrize("cache", [True, False])
def test_weights_are_cast_once(cache: bool) -> None:
    layer = Dense(5, 5)
    x = torch.randn(3, 5)
    with torch.autocast("cpu", LOW, cache_enabled=cache), Casts((5, 5)) as casts:
        layer(layer(x)).sum().backward()
    # Backward casts the gradient back, once for each cast.
    assert casts.count == (2 if cache else 4)
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32


def model() -> torch.nn.Module:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense, self.norm = Dense(6, 6), torch.nn.LayerNorm(6)
            self.mix = torch.nn.Parameter(torch.randn(6, 6) * 0.5)

        def forward(self, x: Tensor) -> Tensor:
            y = torchops.layer_norm(self.dense(x), [6], self.norm.weight, self.norm.bias)
            t = y * 2
            torchops.square_matmul_(t, self.mix)
            torchops.softmax_(t)
            with torch.autocast("cpu", enabled=False):
                return torchops.square_matmul(t.float(), self.mix) + torchops.square_matmul(y, self.mix.to(y.dtype))

    return Model()


def outputs_and_gradients(function: Any, parameters: Sequence[Tensor], x: Tensor) -> list[Tensor]:
    with torch.autocast("cpu", LOW):
        out = function(x)
    return [out, *torch.autograd.grad(out, [x, *parameters], random_like(out))]


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic: bool) -> None:
    module = model()
    parameters = list(module.parameters())
    compiled = torch.compile(module, backend="aot_eager_decomp_partition", fullgraph=True, dynamic=dynamic)
    for rows in (3, 7):
        x = torch.randn(rows, 6, requires_grad=True)
        expected = outputs_and_gradients(module, parameters, x)
        got = outputs_and_gradients(compiled, parameters, x)
        assert [t.dtype for t in got] == [t.dtype for t in expected]
        assert_all_close(got[:1], expected[:1])
        # The traced gradient of layer_norm is rounded to bfloat16 in other places than the kernel's.
        assert_all_close(got, expected, rtol=0.05, atol=0.05)


class InAutocast(torch.nn.Module):
    """Only what is entered inside a program becomes part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = model()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", LOW):
            return self.inner(x)


@pytest.mark.parametrize("decomposed", [False, True])
def test_exported(decomposed: bool) -> None:
    module = InAutocast().eval()
    x = torch.randn(3, 6)
    exported = torch.export.export(module, (x,), dynamic_shapes=({0: torch.export.Dim("rows", min=2)},))
    if decomposed:
        exported = exported.run_decompositions()
    with torch.no_grad():
        for rows in (3, 5):
            x = torch.randn(rows, 6)
            expected = module(x)
            got = exported.module()(x)
            assert got.dtype == expected.dtype
            assert_all_close([got], [expected])


@pytest.mark.parametrize(
    "name",
    [
        *("dense", "gate", "gate_", "glu", "square_matmul", "softmax", "layer_norm", "square_matmul_", "layer_norm_"),
        *("transition", "add_transition_"),
    ],
)
def test_under_vmap(name: str) -> None:
    """vmap comes before autocast, and takes the operator apart: the casts must come before that too.

    One thing differs: inside torch.func autocast is on again, and the product of a float32 square_matmul_ is rounded.
    """
    case = BY_NAME[name]
    batch = torch.randn(4, 3, 5).to(LOW)
    weight = torch.randn(5, 5)
    others: dict[str, tuple[Any, ...]]
    others = {
        "dense": (weight,),
        "gate": (batch[0], weight),
        "glu": (weight, weight),
        "square_matmul": (weight,),
        "softmax": (),
        "layer_norm": ([5], weight[0]),
        "transition": (weight[0], None, weight, None, weight, None, weight),
    }
    rest = others[name.removeprefix("add_").rstrip("_")]
    with torch.autocast("cpu", LOW):
        got = vmap(lambda x: case.call(case.pure, x, *rest))(batch)
        expected = torch.stack([case.call(case.pure, x, *rest) for x in batch])
    assert got.dtype == expected.dtype
    # What a transition keeps between its steps is rounded once in its kernel, and twice where it is taken apart.
    inner = {"rtol": 0.016, "atol": 2**-8 * expected.abs().max().item()} if "transition" in name else {}
    assert_all_close([got], [expected], **inner)


@pytest.mark.ops(samples=["matrix"], mutating=False, leaves=True, dtypes=[torch.float32])
def test_backward_inside(case: OpCase, device: str, sample: Sample, dtype: torch.dtype) -> None:
    """Of a forward pass that ran outside: ATen's gradients may be rounded there, but there are gradients."""
    arguments = sample(dtype, device, requires_grad=True)
    args, kwargs = arguments
    result = case.op(*args, **kwargs)
    cotangent = random_like(result)
    expected, expected_grads = gradients(case.op, arguments, cotangent)
    with torch.autocast(device, LOW):
        got_grads = torch.autograd.grad(result, tensors(arguments), cotangent)
    assert_all_close([result], [expected])
    assert_all_close([*got_grads], [*expected_grads], atol=0.1, rtol=0.05)


def test_of_grad_transform() -> None:
    x, w = torch.randn(3, 5), torch.randn(4, 5)
    with torch.autocast("cpu", LOW):
        got = torch.func.grad(lambda w: torchops.dense(x, w).float().square().sum())(w)
        expected = torch.func.grad(lambda w: torch.sigmoid(torch.nn.functional.linear(x, w)).float().square().sum())(w)
    assert got.dtype == torch.float32
    assert_all_close([got], [expected], rtol=0.02, atol=0.02)


def test_softmax_casts_into_its_result() -> None:
    """As with ATen's, whose kernel casts: the float32 result is all that is made."""
    made: list[Any] = []

    class Made(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is not torch.ops.prim.device.default:
                made.append(func)
            return func(*args, **(kwargs or {}))

    with fake_cuda():
        x = on_cuda(3, 5, dtype=torch.float16)
        with Made():
            torchops.softmax(x)
    assert made == [torch.ops.aten._to_copy.default, torch.ops.myops.softmax_.default]

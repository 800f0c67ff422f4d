"""Kernels, tensors and modes of others, which must meet our operators as they meet ATen's."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import assert_all_close, gradients, random_like, tensors
from op_db import OPS, OpCase
from samples import Arguments, Sample
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import torchops

DOCUMENTED = re.findall(
    r"```python\n(.*?)```", (Path(__file__).parents[1] / "docs" / "other_backends.md").read_text(), re.DOTALL
)[0]

matrix = pytest.mark.ops(samples=["matrix"], dtypes=[torch.float64])
# Of a private operator, __torch_function__ sees the overload.
public = pytest.mark.ops(where=lambda case, **_: not case.private)


# --- kernels ---------------------------------------------------------------------------------------------------------


def test_documented_override() -> None:
    """The lines of the document replace our kernel, under autograd too, until their library goes."""
    x, w = torch.randn(3, 5), torch.randn(4, 5, requires_grad=True)
    ours = torchops.dense(x, w)
    names: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*[Oo]verriding a previously registered kernel")
        exec(DOCUMENTED.replace("return torch.sigmoid", "return 0.5 * torch.sigmoid"), names)
    try:
        y = torchops.dense(x, w)
        assert_all_close([y], [ours / 2])
        (grad,) = torch.autograd.grad(y.sum(), w)
        # Autograd knows the operator, not the kernel: its formula reads y.
        assert_all_close([grad], [((ours / 2) * (1 - ours / 2)).t() @ x])
    finally:
        names["library"]._destroy()
    assert torch.equal(torchops.dense(x, w), ours)


def private_backend() -> None:
    """Runs in a process of its own: a private backend that has the public operators alone."""
    from private_device import calls, on_the_shelf, put, take

    def arguments(case: OpCase) -> tuple[Arguments, Arguments]:
        sample = next(s for s in case.samples if s.name == "matrix")
        cpu = sample(torch.float32, "cpu", requires_grad=True)
        there = tree_map_only(Tensor, lambda t: put(t.detach().clone()).requires_grad_(), cpu)
        return cpu, there

    def run(case: OpCase, args: Arguments, cotangent: Tensor) -> list[Tensor]:
        values = [args[0][0] * 1.0, *args[0][1:]] if case.mutates is not None else args[0]
        out = case.op(*values, **args[1])
        out = values[0] if case.mutates is not None else out
        return [out, *torch.autograd.grad(out, tensors(args), cotangent)]

    keys = torchops.info()["dispatch_keys"]
    for case in (case for case in OPS if "CompositeExplicitAutograd" not in keys[case.qualified]):
        _, there = arguments(case)
        missing = rf"Could not run '{case.qualified}' with arguments from the 'shelf' backend"
        with torch.no_grad(), pytest.raises(NotImplementedError, match=missing):
            case.op(*there[0], **there[1])

    names: dict[str, Any] = {}
    exec(DOCUMENTED.replace('my_dense, "CPU"', 'my_dense, "PrivateUse1"'), names)
    assert "PrivateUse1" in torchops.info()["dispatch_keys"]["myops::dense"]
    names["library"]._destroy()
    library = torch.library.Library("myops", "IMPL")
    for case in OPS:
        library.impl(case.name, partial(on_the_shelf, case.op), "PrivateUse1")

    for case in (case for case in OPS if case.name != "triangle_attention"):  # of which the helpers have no fallback
        cpu, there = arguments(case)
        cotangent = random_like(case.pure(*cpu[0], **cpu[1]))
        calls.clear()
        got = run(case, there, put(cotangent))
        assert_all_close([take(t) for t in got], run(case, cpu, cotangent))
        # The forward pass of layer_norm in training is a helper.
        assert calls[str(case.op)] > 0 or "layer_norm" in case.name, case.name
        with torch.no_grad():
            calls.clear()
            case.op(*there[0], **there[1])
        assert calls[str(case.op)] == 1, case.name
    print("passed")


def test_private_backend() -> None:
    # Its threads cannot be joined once Python, which has its kernels, is going down.
    program = "import os, sys, test_backends; test_backends.private_backend(); sys.stdout.flush(); os._exit(0)"
    done = subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parent, capture_output=True, text=True)
    assert done.stdout == "passed\n", done.stderr


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
@pytest.mark.parametrize("affine", [True, False])
def test_fallbacks_of_the_helpers(dtype: torch.dtype, affine: bool) -> None:
    """On the CPU, where there are kernels to compare with."""

    def both(name: str, *args: Any, **kwargs: Any) -> None:
        op = getattr(torch.ops.myops, name).default
        copies, kept = tree_map_only(Tensor, Tensor.clone, (args, kwargs))
        results = op._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *copies, **kept), op(*args, **kwargs)
        got, expected = ([r] if isinstance(r, Tensor) else r for r in results)
        tolerance = {"rtol": 0.02, "atol": 0.02} if dtype == torch.bfloat16 else {}
        assert_all_close(got, expected, **tolerance)
        assert all(g.is_contiguous() for g in got)

    x, grad = (random_like(torch.empty(3, 4, 5, dtype=dtype), seed) for seed in (1, 2))
    weight, bias = (random_like(x[0], 3), random_like(x[0], 4)) if affine else (None, None)
    y = torch.sigmoid(x)
    for dense_mask in [(True, True), (True, False), (False, True)]:
        both("_dense_backward", grad, y, dense_mask)
        both("_dense_backward", grad.mT, y.mT, dense_mask)
    v, x, w, b = (random_like(x.new_empty(s), i) for i, s in enumerate([(3, 4, 6), (3, 4, 5), (6, 5), (6,)]))
    v, x = v / 4, x / 4  # sums in bfloat16 are rounded in another order
    gate_bias = b if affine else None
    for gate_mask in [(True, True, True, affine), (True, False, False, affine), (False, True, False, False)]:
        both("_gate_backward", v + 1, v, x, w, gate_bias, gate_mask)
        _, product = torch.ops.myops._gate(v, x, w, gate_bias)
        both("_gate_backward", v + 1, v, x, w, gate_bias, gate_mask, False, product)
    for glu_mask in [(True, True, True, affine, affine), (False, False, True, affine, False)]:
        for activation in ("sigmoid", "silu"):
            both("_glu_backward", v, x, w, w + 1, gate_bias, gate_bias, activation, glu_mask)
            products = torch.ops.myops._glu(x, w, w + 1, gate_bias, gate_bias, activation)[1:]
            both("_glu_backward", v, x, w, w + 1, gate_bias, gate_bias, activation, glu_mask, *products)
    both("_layer_norm", x, [4, 5], weight, bias, 1e-5)
    both("_layer_norm_", x.clone(), [4, 5], weight, bias, 1e-5)
    _, mean, rstd = torch.ops.myops._layer_norm(x, [4, 5], weight, bias, 1e-5)
    for norm_mask in [(True, affine, affine), (False, False, True), (True, False, False)]:
        both("_layer_norm_backward", grad, x, [4, 5], mean, rstd, weight, norm_mask)
    for dim in (0, -1):
        both("_softmax_backward", v, torch.softmax(v, dim), dim)
    gate, up, down = (random_like(x.new_empty(s), i) / 4 for i, s in enumerate([(6, 5), (6, 5), (5, 6)]))
    norm = {"norm_weight": w[0], "norm_bias": w[1]} if affine else {}
    biases = {"gate_bias": b, "up_bias": b + 1, "down_bias": w[2]} if affine else {}
    both("_add_transition", x, gate_weight=gate, up_weight=up, down_weight=down, **norm, **biases)
    given = (norm.get("norm_weight"), norm.get("norm_bias"), gate, gate_bias, up, gate_bias, down, 1e-5)
    everything, only_x = (True, *[affine] * 2, *[True, affine] * 3), (True, *[False] * 8)
    for transition_mask in [everything, only_x, (False, False, affine, True, *[False] * 5)]:
        for add_residual in (False, True):
            both("_transition", x, *given[:-1], biases.get("down_bias"), 1e-5, add_residual)
            both("_transition_backward", grad, x, *given, transition_mask, add_residual)
            products = torch.ops.myops._transition(x, *given[:-1], None, 1e-5, add_residual)[1:]
            both("_transition_backward", grad, x, *given, transition_mask, add_residual, *products)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize(("shape", "dims"), [((3, 0), 1), ((0, 5), 1), ((0, 0), 1), ((2, 0, 4), 2), ((0,), 1)], ids=str)
def test_helpers_without_elements(shape: tuple[int, ...], dims: int, dtype: torch.dtype) -> None:
    """All backends agree: the moments of no elements are NaN, sums over no rows 0; the shapes are those of Meta."""
    trailing = list(shape[-dims:])
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]

    def arguments(device: str) -> dict[str, list[Any]]:
        x, row = torch.ones(shape, dtype=dtype, device=device), torch.ones(trailing, dtype=dtype, device=device)
        moment = torch.ones(*shape[:-dims], *[1] * dims, device=device)
        return {
            "_dense_backward": [x, x],
            "_layer_norm": [x, trailing, row, None, 1e-5],
            "_layer_norm_": [x, trailing, None, row, 1e-5],
            "_layer_norm_backward": [x, x, trailing, moment, moment, row, [True, True, True]],
        }

    for name in arguments("cpu"):
        op = getattr(torch.ops.myops, name).default
        composite = op._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *arguments("cpu")[name])
        meta = op(*arguments("meta")[name])
        poison = [torch.full((64,), 7.0) for _ in range(64)]  # what memory held before must not show
        del poison
        for device in devices:
            got = op(*arguments(device)[name])
            assert_all_close([t.cpu() for t in got], composite, equal_nan=True)
            assert [(t.shape, t.stride(), t.dtype) for t in got] == [(t.shape, t.stride(), t.dtype) for t in meta]


# --- __torch_function__ ----------------------------------------------------------------------------------------------


class Named(Tensor):
    """Keeps its class through every function, and remembers them."""

    seen: list[Any] = []  # noqa: RUF012 (mypy does not know ClassVar of a Tensor)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


@public
@matrix
def test_torch_function_of_a_subclass(case: OpCase, sample: Sample) -> None:
    args, kwargs = sample(torch.float64, "cpu")
    expected = case.pure(*args, **kwargs)
    args = [args[0].as_subclass(Named), *args[1:]]
    Named.seen.clear()
    out = case.wrapper(*args, **kwargs)
    assert case.op.overloadpacket in Named.seen
    assert type(out) is Named
    assert (out is args[0]) == (case.mutates is not None)
    assert_all_close([out.as_subclass(Tensor)], [expected])


@public
@matrix
def test_torch_function_mode(case: OpCase, sample: Sample) -> None:
    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append((func, args))
            return func(*args, **(kwargs or {}))

    args, kwargs = sample(torch.float64, "cpu")
    seen: list[Any] = []
    with Mode():
        case.wrapper(*args, **kwargs)
    assert [func for func, _ in seen] == [case.op.overloadpacket]
    assert seen[0][1][0] is args[0]


@public
@matrix
def test_torch_function_of_what_is_no_tensor(case: OpCase, sample: Sample) -> None:
    """An object that only has the method, in any place."""

    class Like:
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func, types

    args, kwargs = sample(torch.float64, "cpu")
    for index in (i for i, a in enumerate(args) if isinstance(a, Tensor)):
        replaced = [*args[:index], Like(), *args[index + 1 :]]
        out = case.wrapper(*replaced, **kwargs)
        expected = (case.op.overloadpacket, (Like,))
        # A wrapper in place returns its first argument.
        assert out == expected or (case.mutates is not None and out is replaced[0])


# --- __torch_dispatch__ ----------------------------------------------------------------------------------------------


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


@public
@matrix
def test_torch_dispatch_mode(case: OpCase, sample: Sample) -> None:
    """Without gradients the operator itself; in training, one that overwrites is its twin, or that with the residual
    inside, and a copy."""
    args, kwargs = sample(torch.float64, "cpu")
    with Seen() as seen:
        case.wrapper(*args, **kwargs)
    assert seen.ops == [case.op]

    arguments = sample(torch.float64, "cpu", requires_grad=True)
    with Seen() as seen:
        case.pure(*arguments[0], **arguments[1])
    ours = {op for op in seen.ops if op.namespace == "myops"}
    forward = case.twin or case.name
    if case.name in ("layer_norm", "layer_norm_", "transition", "triangle_attention") or "multiplicative" in case.name:
        forward = f"_{forward}"
    if case.name == "add_transition_":
        forward = "_add_transition"
    assert getattr(torch.ops.myops, forward).default in ours
    assert (torch.ops.aten.copy_.default in seen.ops) == (case.mutates is not None)


class Boxed(Tensor):
    """Holds another tensor and opens it for every operator."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Boxed:
        tensor = Tensor._make_wrapper_subclass(cls, held.shape, strides=held.stride(), dtype=held.dtype)
        tensor.held = held
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        opened = tree_map_only(Boxed, lambda t: t.held, (args, kwargs or {}))
        out = func(*opened[0], **opened[1])
        if func is torch.ops.aten.copy_.default:
            return args[0]
        return tree_map_only(Tensor, Boxed, out)


@matrix
def test_torch_dispatch_of_a_subclass(case: OpCase, sample: Sample) -> None:
    """A wrapper around every argument: values and gradients, and what it holds is overwritten in place."""
    arguments = sample(torch.float64, "cpu", requires_grad=True)
    boxed = tree_map_only(Tensor, lambda t: Boxed(t.detach().clone()).requires_grad_(), arguments)
    cotangent = random_like(case.pure(*arguments[0], **arguments[1]))
    expected, expected_grads = gradients(case.pure, arguments, cotangent)

    args = [boxed[0][0] * 1.0, *boxed[0][1:]]
    out = case.wrapper(*args, **boxed[1])
    got_grads: Any = torch.autograd.grad(out, tensors(boxed), Boxed(cotangent))
    assert isinstance(out, Boxed)
    assert_all_close([out.held, *(g.held for g in got_grads)], [expected, *expected_grads])

    if case.mutates is not None:
        plain = tree_map_only(Tensor, Tensor.detach, boxed)
        first: Any = plain[0][0]
        held = first.held
        returned: Any = case.wrapper(*plain[0], **plain[1])
        assert returned is first
        assert first.held is held
        assert_all_close([held], [expected])

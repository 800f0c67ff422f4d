"""The gradients of dense as one operator, which has one kernel on some GPUs and is composed of others elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
from checks import assert_all_close, random_like
from test_backends import Boxed
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import torchops

OP = torch.ops.myops._dense_gradients
ONE, PASS = OP.default, torch.ops.myops._dense_backward.default


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


HALF = torch.bfloat16


def leaves(n: int = 16, k: int = 24, rows: tuple[int, ...] = (10,), dtype: torch.dtype = HALF) -> list[Tensor]:
    shapes = ((*rows, k), (n, k), (n,))
    return [random_like(torch.empty(s, dtype=dtype), i).requires_grad_() for i, s in enumerate(shapes)]


def gradients(arguments: list[Tensor], cotangent: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, ...]:
    y = torchops.dense(*arguments)
    grad = random_like(y.detach(), 9) if cotangent is None else cotangent
    return torch.autograd.grad(y, arguments, grad, **kwargs)


# --- the operator ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("n", "k"), [(3, 7), (8, 8), (0, 7), (3, 0)], ids=str)
@pytest.mark.parametrize("rows", [(5,), (2, 3), (), (0,), (2, 0), (9001,)], ids=str)
def test_values(rows: tuple[int, ...], n: int, k: int, dtype: torch.dtype) -> None:
    x, w, _ = (t.detach() for t in leaves(n, k, rows, dtype))
    y = torch.sigmoid(x @ w.T)
    grad = random_like(y)
    dz = (grad.double() * y.double() * (1 - y.double())).reshape(prod(rows), n)
    exact = (dz @ w.double()).view(x.shape), dz.T @ x.double().reshape(prod(rows), k), dz.sum(0)
    tolerance: dict[str, Any] = {"rtol": 0.02, "atol": 0.2} if dtype == torch.bfloat16 else {}
    for output_mask in ([True] * 3, [True, False, False], [False, True, True], [False, False, True], [False] * 3):
        got = OP(grad, y, x, w, output_mask)
        for wanted, one, value in zip(output_mask, got, exact, strict=True):
            assert one.dtype == dtype
            assert one.is_contiguous()
            if wanted:
                torch.testing.assert_close(one, value.to(dtype), **tolerance)
            else:
                assert one.shape == (0,)


ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "grad_shape": ({"grad": (4, 3)}, "expected grad of shape (5, 3) to match y, got (4, 3)"),
    "grad_rank": ({"grad": (15,)}, "expected grad of shape (5, 3) to match y, got (15,)"),
    "grad_dtype": ({"grad": torch.float64}, "expected grad of dtype float32 to match y, got float64"),
    "y_zero_dim": ({"y": ()}, "expected y with at least 1 dimension, got a 0-dimensional tensor"),
    "y_dtype": ({"y": torch.int64}, "expected y of dtype float32, float64, float16 or bfloat16, got int64"),
    "w_rank": ({"w": (3,)}, "expected w of shape (out, in) with out = 3 to match y, got (3,)"),
    "w_out": ({"w": (4, 7)}, "expected w of shape (out, in) with out = 3 to match y, got (4, 7)"),
    "w_dtype": ({"w": torch.float16}, "expected w of dtype float32 to match y, got float16"),
    "x_in": ({"x": (5, 6)}, "expected x of shape (5, 7) to match y and w, got (5, 6)"),
    "x_rows": ({"x": (6, 7)}, "expected x of shape (5, 7) to match y and w, got (6, 7)"),
    "x_rank": ({"x": (1, 5, 7)}, "expected x of shape (5, 7) to match y and w, got (1, 5, 7)"),
    "x_dtype": ({"x": torch.bfloat16}, "expected x of dtype float32 to match y, got bfloat16"),
}


@pytest.mark.parametrize("device", ["cpu", "meta", *(["cuda"] if torch.cuda.is_available() else [])])
@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str, device: str) -> None:
    changed, text = ERRORS[name]
    tensors = {}
    for argument, shape in {"grad": (5, 3), "y": (5, 3), "x": (5, 7), "w": (3, 7)}.items():
        change = changed.get(argument, shape)
        sizes, dtype = (change, torch.float32) if isinstance(change, tuple) else (shape, change)
        tensors[argument] = torch.zeros(sizes, dtype=dtype, device=device)
    operators: list[Any] = [lambda: OP(*tensors.values(), [True] * 3)]
    if not {"x", "w"} & changed.keys():
        operators.append(lambda: torch.ops.myops._dense_backward(tensors["grad"], tensors["y"]))
    for operator, op in zip(operators, ("_dense_gradients", "_dense_backward"), strict=False):
        with pytest.raises(RuntimeError) as caught:
            operator()
        assert str(caught.value).splitlines()[0] == f"{op}: {text}"


def test_another_device() -> None:
    x = torch.zeros(5, 7)
    with pytest.raises(RuntimeError, match=r"_dense_gradients: expected w on device .* to match y, got"):
        OP(x, x, x, torch.zeros(7, 7, device="meta"), [True] * 3)


def test_derivatives() -> None:
    """Of the operator itself: what double backward sees."""
    shapes = (4, 3), (4, 3), (4, 5), (3, 5)
    grad, y, x, w = (torch.randn(s, dtype=torch.float64).requires_grad_() for s in shapes)
    for output_mask in ([True] * 3, [False, True, True], [True, False, False]):

        def function(*arguments: Tensor, output_mask: list[bool] = output_mask) -> tuple[Tensor, ...]:
            return tuple(t for t, wanted in zip(OP(*arguments, output_mask), output_mask, strict=True) if wanted)

        assert torch.autograd.gradcheck(function, (grad, y, x, w), check_forward_ad=True, check_batched_grad=True)


# --- who takes it ----------------------------------------------------------------------------------------------------


def chosen(arguments: list[Tensor]) -> bool:
    with Seen() as seen:
        torchops.dense(*arguments).sum().backward()
    return ONE in seen.ops


def test_when() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert chosen(leaves(dtype=dtype))
        assert chosen(leaves(dtype=dtype)[:2])
        for frozen in (0, 1):  # one of the two products is no reason to keep what the other one reads
            arguments = leaves(dtype=dtype)
            arguments[frozen].requires_grad_(False)
            assert not chosen(arguments)
    with torchops.cuda.kernel_path("cublas"):
        assert not chosen(leaves())


@pytest.mark.parametrize("bias", [True, False])
def test_gradients_are_those_that_are_taken_alone(bias: bool) -> None:
    arguments = leaves(rows=(3, 5))[: 3 if bias else 2]
    y = torchops.dense(*arguments)
    grad = random_like(y.detach(), 9)
    alone = [torch.autograd.grad(y, argument, grad, retain_graph=True)[0] for argument in arguments]
    assert_all_close(gradients(arguments), alone, rtol=0.02, atol=0.01)


def test_second_derivatives() -> None:
    def reference(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.sigmoid(torch.nn.functional.linear(x, w, b))

    results = []
    for function in (torchops.dense, reference):
        arguments = leaves(dtype=torch.float64)
        y = function(*arguments)
        first = torch.autograd.grad(y, arguments, random_like(y.detach(), 9), create_graph=True)
        results.append(torch.autograd.grad([(g**2).sum() for g in first], arguments))
    assert_all_close(*results)


def test_batched_cotangents() -> None:
    arguments = leaves()
    cotangents = random_like(torch.empty(4, 10, 16, dtype=HALF), 5)
    batched = gradients(arguments, cotangents, is_grads_batched=True)
    for i, cotangent in enumerate(cotangents):
        assert_all_close([b[i] for b in batched], gradients(arguments, cotangent), rtol=0.02, atol=0.1)


def test_vjp_and_vmap() -> None:
    x, w, b = (t.detach() for t in leaves())
    cotangent = random_like(torch.empty(10, 16, dtype=HALF), 9)
    expected = gradients(leaves())
    assert_all_close(torch.func.vjp(torchops.dense, x, w, b)[1](cotangent), expected, rtol=0.02, atol=0.1)
    y = torchops.dense(x, w, b)
    mapped = torch.func.vmap(lambda g: OP(g, y, x, w, [True, True, False]))(torch.stack([cotangent, -cotangent]))
    assert_all_close([t[0] for t in mapped[:2]], expected[:2], rtol=0.02, atol=0.1)


COTANGENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded": lambda t: t[:1].expand_as(t),
    "transposed": lambda t: t.T.contiguous().T,
    "negative": lambda t: torch._neg_view(-t),
}


@pytest.mark.parametrize("view", COTANGENTS)
def test_views(view: str) -> None:
    arguments, grad = leaves(), COTANGENTS[view](random_like(torch.empty(10, 16, dtype=HALF), 5))
    expected = gradients(arguments, grad.clone(memory_format=torch.contiguous_format).resolve_neg())
    assert_all_close(gradients(arguments, grad), expected)


def test_subclass() -> None:
    arguments = [Boxed(t.detach()).requires_grad_() for t in leaves()]
    cotangent = random_like(torch.empty(10, 16, dtype=HALF), 9)
    got: Any = gradients(arguments, Boxed(cotangent))
    assert_all_close([g.held for g in got], gradients(leaves(), cotangent))


# --- compiled --------------------------------------------------------------------------------------------------------


def test_traced_backward() -> None:
    graphs: list[Any] = []

    def keep(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    function = torch.compile(torchops.dense, backend=backend, fullgraph=True)
    arguments = leaves()
    y = function(*arguments)
    cotangent = random_like(y.detach(), 9)
    grads = torch.autograd.grad(y, arguments, cotangent)
    assert_all_close(grads, gradients(leaves()))
    forward, backward = ({node.target for node in graph.graph.nodes} for graph in graphs)
    assert torch.ops.myops.dense.default in forward
    assert ONE in backward
    assert not {PASS, torch.ops.aten.mm.default} & backward

    # A graph takes no random generator in torch 2.12.
    graph = make_fx(lambda g, *args: gradients(list(args), g), tracing_mode="fake")(cotangent, *leaves())
    assert ONE in {node.target for node in graph.graph.nodes}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_for_any_number_of_rows(backend: str) -> None:
    """One graph: choosing the operator asks for no number of rows."""
    compiled = torch.compile(torchops.dense, backend=backend, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (10, 30, 7, 1001):
            arguments = leaves(rows=(rows,))
            torch._dynamo.mark_dynamic(arguments[0], 0)
            y = compiled(*arguments)
            grad = random_like(y.detach(), 9)
            if backend == "aot_eager":
                with Seen() as seen:
                    got = torch.autograd.grad(y, arguments, grad)
                assert ONE in seen.ops
                assert PASS not in seen.ops
            else:
                got = torch.autograd.grad(y, arguments, grad)
            assert_all_close(got, gradients(leaves(rows=(rows,)), grad))


def test_sizes_that_are_not_known() -> None:
    """A dynamic number of features is not specialised."""
    compiled = torch.compile(torchops.dense, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for n in (16, 24, 100):
            arguments = leaves(n=n)
            torch._dynamo.mark_dynamic(arguments[1], 0)
            torch._dynamo.mark_dynamic(arguments[2], 0)
            y = compiled(*arguments)
            grad = random_like(y.detach(), 9)
            with Seen() as seen:
                got = torch.autograd.grad(y, arguments, grad)
            assert ONE in seen.ops
            assert_all_close(got, gradients(leaves(n=n), grad))


def test_compiled_autograd() -> None:
    arguments = leaves()
    expected = gradients(arguments)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        y = torchops.dense(*arguments)
        y.backward(random_like(y.detach(), 9))
    assert_all_close([t.grad for t in arguments if t.grad is not None], expected)

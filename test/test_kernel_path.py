"""torchops.cuda.kernel_path: whose path it is, and that graphs keep it. The CPU has one path, so kernels that only say
which one they see stand in for its own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchops
from torchops.cuda import kernel_path


def current() -> str:
    return torch.ops.myops._kernel_path()


@pytest.fixture(autouse=True)
def _auto() -> Iterator[None]:
    yield
    kernel_path("auto")


@pytest.fixture
def seen() -> Iterator[list[str]]:
    """What path each call of a kernel has seen."""
    paths: list[str] = []

    def dense(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        paths.append(f"forward {current()}")
        return torch.sigmoid(nn.functional.linear(x, w, b))

    def backward(grad: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        paths.append(f"backward {current()}")
        dz = grad * y * (1 - y)
        return dz, dz.sum(0)

    with warnings.catch_warnings(), torch.library._scoped_library("myops", "IMPL") as library:
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        library.impl("dense", dense, "CPU")
        library.impl("_dense_backward", backward, "CPU")
        yield paths


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(3, 4), torch.randn(5, 4, requires_grad=True), torch.randn(5, requires_grad=True)


def test_with_statement() -> None:
    with kernel_path("cublas"):
        assert current() == "cublas"
        with kernel_path("fused"):
            assert current() == "fused"
        assert current() == "cublas"
        with pytest.raises(ZeroDivisionError), kernel_path("auto"):
            raise ZeroDivisionError
        assert current() == "cublas"
    assert current() == "auto"


def test_with_statements_of_one_object() -> None:
    """One after another, within one another, and after a call that set another path."""
    path = kernel_path("cublas")
    for _ in range(2):
        with path:
            assert current() == "cublas"
            with path:
                assert current() == "cublas"
            assert current() == "cublas"
        assert current() == "auto"
    kernel_path("fused")
    with pytest.raises(ZeroDivisionError), path:
        raise ZeroDivisionError
    with path:
        assert current() == "cublas"
    assert current() == "fused"


def test_call() -> None:
    kernel_path("cublas")
    assert current() == "cublas"
    kernel_path("fused")
    assert current() == "fused"


def test_wrong_name() -> None:
    with pytest.raises(ValueError, match=r"^kernel_path: expected path auto, fused, portable or cublas, got triton$"):
        kernel_path("triton")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^_kernel_path: expected path auto, fused, portable or cublas, got triton"):
        torch.ops.myops._kernel_path("triton")
    with pytest.raises(ValueError, match=r"^_dense_on_path: expected path auto, fused, portable or cublas, got triton"):
        torch.ops.myops._dense_on_path(torch.ones(2, 3), torch.ones(4, 3), None, "triton")
    assert current() == "auto"


def test_info_asks_and_does_not_set() -> None:
    """Also while other threads run."""
    done = threading.Event()
    others: set[str] = set()

    def ask() -> None:
        kernel_path("fused")
        while not done.is_set():
            others.add(current())

    thread = threading.Thread(target=ask)
    thread.start()
    with kernel_path("cublas"):
        for _ in range(3):
            assert torchops.info()["kernel_path"] == "cublas"
    done.set()
    thread.join()
    assert others == {"fused"}


def test_of_the_thread() -> None:
    results: list[str] = []
    with kernel_path("cublas"):
        thread = threading.Thread(target=lambda: results.append(current()))
        thread.start()
        thread.join()
    assert results == ["auto"]


@pytest.mark.parametrize("thread", [False, True], ids=["here", "other_thread"])
def test_backward_takes_the_path_of_forward(seen: list[str], thread: bool) -> None:
    x, w, b = tensors()
    with kernel_path("cublas"):
        y = torchops.dense(x, w, b)
    z = torchops.dense(x, w, b)

    def backward() -> None:
        with kernel_path("fused"):
            y.sum().backward()
            z.sum().backward()
            seen.append(current())

    if thread:
        other = threading.Thread(target=backward)
        other.start()
        other.join()
    else:
        backward()
    assert seen == ["forward cublas", "forward auto", "backward cublas", "backward auto", "fused"]


def two_paths(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    with torchops.cuda.kernel_path("cublas"):
        first = torchops.dense(x, w, b)
        with torchops.cuda.kernel_path("fused"):
            second = torch.ops.myops.dense.default(x, w, b)
    return first, second, torch.ops.myops.dense(x, w, b)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled(seen: list[str], backend: str) -> None:
    """The graph keeps the paths, at every run and in every thread, and leaves the thread's own alone."""
    x, w, b = tensors()
    compiled = torch.compile(two_paths, backend=backend, fullgraph=True)
    expected = two_paths(x, w, b)
    compiled(x, w, b)
    results: list[tuple[Tensor, ...]] = []

    def run() -> None:
        seen.clear()
        results.append(compiled(x, w, b))

    for other in (False, True):
        if other:
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
        else:
            run()
        # The order is the compiler's.
        assert sorted(seen) == ["forward auto", "forward cublas", "forward fused"]
        for got, wanted in zip(results[-1], expected, strict=True):
            torch.testing.assert_close(got, wanted)
        assert current() == "auto"
    got_grads = torch.autograd.grad(sum(t.sum() for t in results[-1]), [w, b])  # type: ignore[arg-type]
    torch.testing.assert_close(got_grads, torch.autograd.grad(sum(t.sum() for t in expected), [w, b]))  # type: ignore[arg-type]


def test_a_failed_trace_leaves_no_path_behind() -> None:
    def wrong(x: Tensor, w: Tensor) -> Tensor:
        with torchops.cuda.kernel_path("cublas"):
            return torchops.dense(x, w)

    with pytest.raises(Exception, match="dense: expected w of shape"):
        torch.compile(wrong, backend="eager", fullgraph=True)(torch.ones(2, 3), torch.ones(4, 5))
    assert current() == "auto"
    assert torch.overrides._get_current_function_mode_stack() == []


@pytest.mark.parametrize("op", ["gate", "gate_", "glu"])
def test_gates_are_refused_in_graphs(op: str) -> None:
    """No operator of theirs carries a path, and a graph that silently took another would be worse."""
    x, w = torch.ones(4, 4), torch.ones(4, 4)

    def on_path(path: Any) -> Tensor:
        with torchops.cuda.kernel_path(path):
            return getattr(torchops, op)(x.clone(), x, w) if op != "glu" else torchops.glu(x, w, w)

    compiled = torch.compile(on_path, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled("auto"), on_path("cublas"))
    with pytest.raises(Exception, match=f"kernel_path: expected dense within a traced function, got myops.{op}"):
        compiled("cublas")
    assert torch.overrides._get_current_function_mode_stack() == []


def test_triangle_updates_are_refused_in_graphs() -> None:
    x, w = torch.ones(3, 3, 2), torch.ones(2, 2)
    weights: dict[str, Any] = {"p_in_weight": w, "g_in_weight": w, "p_out_weight": w[:, :1], "g_out_weight": w}

    def on_path(path: Any) -> Tensor:
        with torchops.cuda.kernel_path(path):
            return torchops.triangle_multiplicative_update(x, **weights)

    compiled = torch.compile(on_path, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled("auto"), on_path("cublas"))
    with pytest.raises(Exception, match=r"expected dense within a traced function, got myops\.triangle"):
        compiled("cublas")


def test_triangle_attention_is_refused_in_graphs() -> None:
    q, bias = torch.ones(1, 2, 1, 3, 4), torch.ones(1, 1, 1, 3, 3)

    def on_path(path: Any) -> Tensor:
        with torchops.cuda.kernel_path(path):
            return torchops.triangle_attention(q, q, q, bias)

    compiled = torch.compile(on_path, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled("auto"), on_path("fused"))
    with pytest.raises(Exception, match=r"expected dense within a traced function, got myops\.triangle_attention"):
        compiled("fused")


@pytest.mark.parametrize("residual", [False, True])
def test_transitions_are_refused_in_graphs(residual: bool) -> None:
    layer, x = torchops.nn.Transition(4), torch.ones(3, 4)

    def on_path(path: Any) -> Tensor:
        with torchops.cuda.kernel_path(path):
            return layer(x, residual=residual)

    compiled = torch.compile(on_path, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled("auto"), on_path("cublas"))
    with pytest.raises(Exception, match=r"expected dense within a traced function, got myops\._?\w*transition"):
        compiled("cublas")


def test_backward_of_gates_takes_the_path_of_forward() -> None:
    seen: list[str] = []

    def gate_backward(grad: Tensor, v: Tensor, x: Tensor, w: Tensor, b: Any, *rest: Any) -> tuple[Tensor, ...]:
        seen.append(f"gate {current()}")
        return v.clone(), x.clone(), w.clone(), w.new_empty(0)

    def glu_backward(grad: Tensor, x: Tensor, w: Tensor, wg: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        seen.append(f"glu {current()}")
        return x.clone(), w.clone(), wg.clone(), w.new_empty(0), w.new_empty(0)

    x, w = torch.ones(4, 4), torch.ones(4, 4, requires_grad=True)
    with warnings.catch_warnings(), torch.library._scoped_library("myops", "IMPL") as library:
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        library.impl("_gate_backward", gate_backward, "CPU")
        library.impl("_glu_backward", glu_backward, "CPU")
        with kernel_path("cublas"):
            results = [torchops.gate(x, x, w), torchops.gate_(x.clone(), x, w), torchops.glu(x, w, w)]
        for y in results:
            y.sum().backward()
    assert seen == ["gate cublas", "gate cublas", "glu cublas"]


@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")
@pytest.mark.parametrize("strict", [False, True])
def test_exported(strict: bool) -> None:
    class Gates(nn.Module):
        def forward(self, x: Tensor, w: Tensor, b: Tensor) -> Any:
            return two_paths(x, w, b)

    arguments = tuple(t.detach() for t in tensors())
    program = torch.export.export(Gates(), arguments, strict=strict)
    ops = [(n.target, n.args[3:]) for n in program.graph.nodes if n.op == "call_function"]
    on_path = torch.ops.myops._dense_on_path.default
    assert ops == [(on_path, ("cublas",)), (on_path, ("fused",)), (torch.ops.myops.dense.default, ())]
    torch.testing.assert_close(program.module()(*arguments), two_paths(*arguments))


def test_around_a_compiled_function(seen: list[str]) -> None:
    """The path of the thread that runs it, whenever it was compiled."""
    x, w, b = tensors()
    compiled = torch.compile(lambda: torchops.dense(x, w, b), backend="aot_eager", fullgraph=True)
    with kernel_path("cublas"):
        compiled()
    compiled()
    with kernel_path("fused"):
        compiled()
    assert seen == ["forward cublas", "forward auto", "forward fused"]


def test_transforms_and_autocast() -> None:
    """The operator that graphs hold is dense in every other way."""
    x, w, b = (t.detach() for t in tensors())
    on_path = torch.ops.myops._dense_on_path
    expected = torch.sigmoid(nn.functional.linear(x, w, b))
    torch.testing.assert_close(torch.vmap(lambda row: on_path(row, w, b, "cublas"))(x), expected)
    (gradient,) = torch.func.jacrev(lambda w: on_path(x, w, b, "cublas").sum(0).sum(0, keepdim=True))(w)
    (wanted,) = torch.func.jacrev(lambda w: torchops.dense(x, w, b).sum(0).sum(0, keepdim=True))(w)
    torch.testing.assert_close(gradient, wanted)
    with torch.autocast("cpu"):
        assert on_path(x, w, b, "cublas").dtype == torch.bfloat16


@pytest.mark.parametrize(("name", "path"), [("", "auto"), ("cublas", "cublas"), ("quick", "auto")])
def test_environment(name: str, path: str) -> None:
    """A wrong name is reported once, and taken for auto: it comes from outside of the program."""
    program = (
        "import threading, torchops; paths = []; "
        "ask = lambda: paths.append(torchops.info()['kernel_path']); ask(); ask(); "
        "thread = threading.Thread(target=ask); thread.start(); thread.join(); print(*paths)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "TORCHOPS_KERNEL_PATH": name},
        cwd=os.path.dirname(__file__),
    )
    assert done.stdout.split() == [path] * 3, done.stderr
    warning = "TORCHOPS_KERNEL_PATH: expected auto, fused, portable or cublas, got quick; taking auto"
    assert done.stderr.count(warning) == (name == "quick")

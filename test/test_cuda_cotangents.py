"""What only the CUDA gradients of glu and gate beyond 128 features can get wrong: tile edges, turns, strides, which of
them are wanted, the order of sums. Those of few features are tested by the generic suites."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cuda_checks import error, gradients, poison, random
from product_samples import gate_reference, glu_reference
from torch import Tensor

import torchops
from torchops._core import _build_info

if not torch.cuda.is_available() or not _build_info.cuda_version:
    pytest.skip("needs a GPU and a build with CUDA", allow_module_level=True)

OPS = torch.ops.myops
DTYPES = [torch.bfloat16, torch.float16]
PATHS = ["fused", "portable", "cublas"]
# An operator with a private one for its gradients: inputs of (rows, k) to n features, and their number.
GATES = ["gate", "gate_"]
OPERATORS = ["sigmoid", "silu", *GATES]


def operator(name: Any) -> tuple[Callable[..., Tensor], Callable[..., Tensor], Callable[..., tuple[Tensor, ...]]]:
    """The operator, its reference, and its gradients (grad, inputs, mask)."""
    if name == "gate":
        return torchops.gate, gate_reference, lambda g, inputs, output_mask: OPS._gate_backward(g, *inputs, output_mask)
    if name == "gate_":  # whose gradients read the result
        return (
            lambda v, *inputs: torchops.gate_(v * 1, *inputs),
            gate_reference,
            lambda g, inputs, output_mask: OPS._gate_backward(
                g, torchops.gate(*inputs), *inputs[1:], output_mask, True
            ),
        )
    return (
        lambda *inputs: torchops.glu(*inputs, activation=name),
        lambda *inputs: glu_reference(*inputs, activation=name),
        lambda g, inputs, output_mask: OPS._glu_backward(g, *inputs, name, output_mask),
    )


def inputs_of(name: str, rows: int, k: int, n: int, dtype: torch.dtype, biased: bool = True) -> list[Tensor | None]:
    """Those of glu have one packed weight if the number of rows is even."""
    x, packed = random(rows, k, dtype=dtype), random(2 * n, k, dtype=dtype, scale=k**-0.5)
    w, wg = packed.chunk(2)
    b = random(n + 1, dtype=dtype)[1:] if biased else None  # of no alignment
    if name in GATES:
        return [random(rows, n, dtype=dtype), x, w, b]
    return [x, w, wg.clone() if rows % 2 else wg, b, random(2 * n, dtype=dtype)[::2] if biased else None]


def double(inputs: list[Any]) -> list[Any]:
    return [None if t is None else t.double() for t in inputs]


@pytest.mark.parametrize("path", ["auto", *PATHS])
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        (1, 136, 8),
        (77, 136, 264),
        (1000, 192, 192),
        (4097, 256, 256),
        # Some columns and features of a cluster's do not exist.
        (20000, 200, 136),
        (999, 136, 248),
        (20001, 384, 384),
        (3001, 1032, 520),
        (2048, 128, 512),
        # A sum over few rows for many features, and more rows than fit one piece of the sums.
        (130, 512, 2056),
        (70001, 136, 136),
        # What TMA cannot read or write.
        (500, 260, 264),
        (500, 264, 260),
    ],
    ids=str,
)
def test_gradients(shape: tuple[int, int, int], dtype: torch.dtype, name: str, path: Any) -> None:
    rows, k, n = shape
    function, reference, _ = operator(name)
    for biased in (True, False):
        inputs, grad = inputs_of(name, rows, k, n, dtype, biased), random(rows, n, dtype=dtype)
        exact = gradients(reference, double(inputs), grad.double())
        eager = gradients(reference, inputs, grad)
        for columns in (n, 2 * n, k):
            poison(rows, columns, dtype=dtype)
        with torchops.cuda.kernel_path(path):
            got = gradients(function, inputs, grad)
            again = gradients(function, inputs, grad)
        for g, other, value, repeated in zip(got, eager, exact, again, strict=True):
            assert g.is_contiguous()
            assert (g.shape, g.dtype) == (other.shape, other.dtype)
            assert error(g, value) <= 1.5 * error(other, value) + torch.finfo(dtype).eps / 4
            assert torch.equal(g, repeated)


@pytest.mark.parametrize("path", ["fused", "portable", "cublas"])
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "n"), [(82965, 256), (27655, 256), (50001, 64)])
def test_no_row_is_missing_in_the_gradients_of_weights(
    rows: int, n: int, dtype: torch.dtype, name: str, path: Any
) -> None:
    """Products of cuBLAS that sum over rows in parts may end before the last rows. x is float32, or else 16 bits."""
    function, reference, _ = operator(name)
    for wide in (True, False):
        inputs = inputs_of(name, rows, n, n, dtype, biased=False)
        if wide:
            inputs[1 if name in GATES else 0] = random(rows, n, dtype=torch.float32)
        grad = random(rows, n, dtype=dtype)
        last = rows - rows // 128 * 128
        grad[:-last] = 0  # so that the last ones are all that counts
        exact = gradients(reference, double(inputs), grad.double())
        with torchops.cuda.kernel_path(path):
            got = gradients(function, inputs, grad)
        for g, value in zip(got, exact, strict=True):
            assert error(g, value) <= 1e-2


@pytest.mark.parametrize("name", OPERATORS)
def test_panels_of_float32(name: str) -> None:
    """So many rows that their product leaves the L2 cache."""
    test_gradients((100001, 64, 136), torch.float32, name, "auto")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("rows", [300, 5001])
def test_which_gradients_are_wanted(rows: int, name: str, path: Any) -> None:
    function, _, backward = operator(name)
    inputs, grad = inputs_of(name, rows, 256, 192, torch.bfloat16), random(rows, 192, dtype=torch.bfloat16)
    with torchops.cuda.kernel_path(path):
        every = gradients(function, inputs, grad)
        for output_mask in itertools.product([False, True], repeat=len(inputs)):
            for wanted, got, other in zip(output_mask, backward(grad, inputs, list(output_mask)), every, strict=True):
                assert got.shape == (other.shape if wanted else (0,))
                if wanted:
                    assert error(got, other.double()) <= torch.finfo(got.dtype).eps / 2


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "columns": lambda t: t[:, 8:],
    "unaligned": lambda t: t[:, 1:-7],
    "row_step": lambda t: torch.cat([t, t], 1).view(-1, t.shape[1])[::2, 8:],
    "transposed": lambda t: t[:, 8:].T.contiguous().T,
    "expanded": lambda t: t[:1, 8:].expand(t.shape[0], -1),
    "batch": lambda t: t[:, 8:].unflatten(0, (3, -1)),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("k", [248, 264])  # glu: all gradients but dx from one pass, and from several
def test_views(k: int, view: str, name: str, path: Any) -> None:
    function, reference, _ = operator(name)
    of = VIEWS[view]
    rows, n, dtype = 1503, 200, torch.bfloat16
    inputs, grad = inputs_of(name, rows, k, n, dtype), of(random(rows, n + 8, dtype=dtype))
    place = 1 if name in GATES else 0
    inputs[place] = of(random(rows, k + 8, dtype=dtype))
    if name in GATES:
        inputs[0] = of(random(rows, n + 8, dtype=dtype))
    exact, eager = gradients(reference, double(inputs), grad.double()), gradients(reference, inputs, grad)
    with torchops.cuda.kernel_path(path):
        got = gradients(function, inputs, grad)
    for g, other, value in zip(got, eager, exact, strict=True):
        assert error(g, value) <= 1.5 * error(other, value)


@pytest.mark.parametrize("name", OPERATORS)
def test_special_values(name: str) -> None:
    """A NaN in a row stays in its row of what belongs to rows, one in a column in its column."""
    rows, k, n = 1000, 256, 192
    inputs, grad = inputs_of(name, rows, k, n, torch.bfloat16), random(rows, n, dtype=torch.bfloat16)
    grad[123, 45] = float("nan")
    with torchops.cuda.kernel_path("fused"):
        got = operator(name)[2](grad, inputs, [True] * len(inputs))
    by_name = dict(zip(["v", "x", "w", "b"] if name in GATES else ["x", "w", "wg", "b", "bg"], got, strict=True))
    for of, g in by_name.items():
        expected = torch.zeros_like(g, dtype=torch.bool)
        if of == "x":
            expected[123] = True
        elif of == "v":
            expected[123, 45] = True
        else:
            expected[45] = True
        assert torch.equal(g.isnan(), expected), of


@pytest.mark.parametrize("name", ["silu", "gate"])
def test_memory(name: str) -> None:
    """Beside the gradients there are the cotangents of the products, and little for the sums."""
    rows, k, n = 65536, 256, 256
    inputs, grad = inputs_of(name, rows, k, n, torch.bfloat16), random(rows, n, dtype=torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    got = operator(name)[2](grad, inputs, [True] * len(inputs))
    extra = torch.cuda.max_memory_allocated() - before - sum(g.nbytes for g in got)
    assert extra <= (1 if name == "gate" else 2) * 1.15 * grad.nbytes + (16 << 20)

"""torch.utils.flop_counter counts our operators as it counts the ATen reference, forward and backward."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import random_like, tensors
from op_db import OpCase
from samples import Arguments, Sample
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import torchops

# ATen multiplies a matrix with a vector by mv and addmv, and einsum one sequence by mul, which the counter does not
# know; ours counts them.
UNCOUNTED_BY_ATEN = {
    *(
        "vector",
        "vector_no_bias",
        "vector_tb",
        "vector_silu",
        "zero_in_vector",
        "none_bias",
        "one_pair",
        "one_sequence",
    ),
}


def flops(function: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def forward_and_backward(function: Callable[..., Tensor], arguments: Arguments) -> Callable[[], None]:
    def run() -> None:
        args, kwargs = arguments
        out = function(*args, **kwargs)
        torch.autograd.grad(out, [t for t in tensors(arguments) if t.requires_grad], random_like(out))

    return run


def counted(case: OpCase, sample: Sample, **_: Any) -> bool:
    """Whether there is something to count in the reference, forward and backward."""
    args, kwargs = sample(torch.float32, "cpu")
    return sample.name not in UNCOUNTED_BY_ATEN and flops(lambda: case.reference(*args, **kwargs)) > 0


def keeps_products(case: OpCase, args: Sequence[Any]) -> bool:
    """Whether training saves what backward of others multiplies again."""
    if case.name == "transition":
        return True  # all samples in float32
    operands = {"gate": args[1:3], "glu": args[:2]}.get(case.name)
    return operands is not None and bool(torch.ops.myops._keeps_products(*operands, case.name == "glu"))


@pytest.mark.ops(dtypes=[torch.float32], leaves=True, large=False, where=counted)
def test_like_aten(case: OpCase, device: str, sample: Sample) -> None:
    arguments = sample(torch.float32, device)
    args, kwargs = arguments
    forward = flops(lambda: case.pure(*args, **kwargs))
    assert forward == flops(lambda: case.reference(*args, **kwargs)) > 0
    if not case.differentiable or case.recomputes is None:
        return

    arguments = sample(torch.float32, device, requires_grad=True)
    ours = flops(forward_and_backward(case.pure, arguments))
    again = 0 if keeps_products(case, args) else round(forward * case.recomputes)
    assert ours == flops(forward_and_backward(case.reference, arguments)) + again
    assert ours > forward > 0


def test_numbers() -> None:
    """2 * 6 * 7 * 5 for x of 6 rows of 7 and 5 columns out; twice that again for the two gradients."""
    x, w, b = torch.randn(2, 3, 7), torch.randn(5, 7, requires_grad=True), torch.randn(5, requires_grad=True)
    assert flops(lambda: torchops.dense(x, w, b)) == 420
    assert flops(lambda: torchops.dense(x, w, b).sum().backward()) == 2 * 420
    x.requires_grad_()
    assert flops(lambda: torchops.dense(x, w, b).sum().backward()) == 3 * 420
    assert flops(lambda: torchops.dense(x[0, 0], w, b)) == 70
    assert flops(lambda: torchops.square_matmul_(torch.zeros(4, 3), torch.zeros(3, 3))) == 72
    assert flops(lambda: torchops.square_matmul(torch.zeros(3), torch.zeros(3, 3))) == 18
    assert flops(lambda: torchops.square_matmul(torch.zeros(0, 3), torch.zeros(3, 3))) == 0


@pytest.mark.ops(where=lambda case, **_: not any(counted(case, sample) for sample in case.samples if not sample.large))
def test_what_does_not_multiply_counts_as_nothing(case: OpCase) -> None:
    """As with ATen's softmax: beside a product that is counted, so that nothing counted is not mistaken for it."""
    sample = next(s for s in case.samples if s.name == "matrix")
    arguments = sample(torch.float32, "cpu", requires_grad=True)

    def run() -> None:
        forward_and_backward(case.pure, arguments)()
        torchops.dense(torch.zeros(2, 3), torch.zeros(5, 3))

    assert flops(run) == 2 * 2 * 3 * 5


@pytest.mark.parametrize("rows", [(6,), (2, 3), ()], ids=str)
def test_gradients_at_once(rows: tuple[int, ...]) -> None:
    """Of the two products those that the mask asks for."""
    x, w, y = torch.randn(*rows, 7), torch.randn(5, 7), torch.rand(*rows, 5)
    product = 70 * (6 if rows else 1)
    for mask in itertools.product([False, True], repeat=3):
        gradients = partial(torch.ops.myops._dense_gradients, y, y, x, w, mask)
        assert flops(gradients) == product * sum(mask[:2])


def test_numbers_of_gates() -> None:
    """The gradients compute again what they read of the forward pass, and nothing else."""
    v, x, w, wg = torch.randn(6, 5), torch.randn(6, 7), torch.randn(5, 7), torch.randn(5, 7)

    def training(function: Callable[..., Tensor], *trained: Tensor) -> int:
        for t in trained:
            t.requires_grad_()
        count = flops(lambda: function().sum().backward())
        for t in trained:
            t.requires_grad_(False)
        return count // 420

    def gate() -> Tensor:
        return torchops.gate(v, x, w)

    def glu() -> Tensor:
        return torchops.glu(x, w, wg)

    assert flops(gate) == 420
    assert flops(glu) == 2 * 420
    assert training(gate, v) == 1 + 1
    assert training(gate, w) == 1 + 2
    assert training(gate, v, x, w) == 1 + 3
    assert training(glu, w) == 2 + 2
    assert training(glu, wg) == 2 + 3
    assert training(glu, x) == 2 + 4
    assert training(glu, x, w, wg) == 2 + 6


def test_numbers_of_outer_products() -> None:
    """3 * 4 * 5 * 6 of them, sums over 7 sequences, to 8 features. Backward computes them again for two gradients."""
    shapes = (7, 3, 5), (7, 4, 6), (8, 30), (8,), (3, 4)
    outer = 2 * 3 * 4 * 30
    assert flops(partial(torchops.outer_product_mean, *map(torch.rand, shapes))) == outer * (7 + 8)
    for asked in itertools.product([False, True], repeat=5):
        leaves = [torch.rand(shape, requires_grad=ask) for shape, ask in zip(shapes, asked, strict=True)]
        da, db, dweight, _, dnorm = asked
        again, back = dweight or dnorm, da or db or dnorm
        expected = outer * (7 * (1 + again + da + db) + 8 * (1 + back + dweight))
        if any(asked):
            assert flops(forward_and_backward(torchops.outer_product_mean, ([*leaves], {}))) == expected, asked


def test_by_operator_and_module() -> None:
    model = torch.nn.Sequential(torchops.nn.Dense(7, 5), torch.nn.Linear(5, 3))
    with FlopCounterMode(display=False) as counter:
        model(torch.randn(6, 7))
    counts = counter.get_flop_counts()
    assert counts["Global"] == {torch.ops.myops.dense: 420, torch.ops.aten.addmm: 180}
    assert counts["Sequential.0"] == {torch.ops.myops.dense: 420}


def test_without_data() -> None:
    """On the meta device, where the size of a model is no matter."""
    x, w = torch.empty(2**20, 2**12, device="meta"), torch.empty(2**13, 2**12, device="meta", requires_grad=True)
    assert flops(lambda: torchops.dense(x, w).sum().backward()) == 2 * 2 * 2 ** (20 + 12 + 13)


@pytest.mark.parametrize("first", ["torch.utils.flop_counter", "torchops"])
def test_imported_in_either_order(first: str) -> None:
    """The formulas wait for the counter, which is imported as if nobody had waited."""
    program = f"""
import sys, torch, {first}
import torchops
assert ("torch.utils.flop_counter" in sys.modules) == {first != "torchops"}
import importlib.util
assert importlib.util.find_spec("torch.utils.flop_counter").origin.endswith("flop_counter.py")
import torch.utils.flop_counter as counter
registry = counter.flop_registry
assert torch.ops.myops.dense in registry and torch.ops.myops.square_matmul_ in registry
assert "torch.utils.flop_counter" not in [getattr(finder, "module", None) for finder in sys.meta_path]
assert type(counter.__spec__.loader) is type(torch.__spec__.loader) is type(counter.__loader__)
import importlib
importlib.reload(counter)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stderr

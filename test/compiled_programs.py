"""Programs of several in-place operators with reads, clones and views between them, to be compared eager and compiled.

A program takes :class:`Operators` and its inputs, overwrites some of them, and returns tensors. :data:`PROGRAMS` has
those written by hand; :func:`random_program` writes another one for each seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import torchops

Program = Callable[..., Any]


class Operators:
    """The in-place operators of torchops, on tensors whose last dimension has any size."""

    def sigmoid_(self, x: Tensor) -> None:
        torchops.sigmoid_(x)

    def softmax_(self, x: Tensor, dim: int = -1) -> None:
        torchops.softmax_(x, dim)

    def layer_norm_(self, x: Tensor) -> None:
        torchops.layer_norm_(x, [x.shape[-1]])

    def square_matmul_(self, x: Tensor) -> None:
        torchops.square_matmul_(x, _matrix(x))

    def gate_(self, x: Tensor) -> None:
        torchops.gate_(x, torch.ones_like(x), _matrix(x))

    def add_transition_(self, x: Tensor) -> None:
        w = _matrix(x)
        torchops.add_transition_(x, gate_weight=w, up_weight=w, down_weight=w)


class Aten(Operators):
    """The same in ATen's operators, as a reference of what PyTorch itself compiles right."""

    def sigmoid_(self, x: Tensor) -> None:
        x.sigmoid_()

    def softmax_(self, x: Tensor, dim: int = -1) -> None:
        x.copy_(torch.softmax(x, dim))

    def layer_norm_(self, x: Tensor) -> None:
        x.copy_(F.layer_norm(x, x.shape[-1:]))

    def square_matmul_(self, x: Tensor) -> None:
        x.copy_(x @ _matrix(x))

    def gate_(self, x: Tensor) -> None:
        x.mul_(torch.sigmoid(F.linear(torch.ones_like(x), _matrix(x))))

    def add_transition_(self, x: Tensor) -> None:
        w, z = _matrix(x), F.layer_norm(x, x.shape[-1:])
        x.add_(F.linear(F.silu(F.linear(z, w)) * F.linear(z, w), w))


def _matrix(x: Tensor) -> Tensor:
    n = x.shape[-1]
    row = torch.arange(n, dtype=x.dtype, device=x.device)
    return torch.cos(row[:, None] * 3 + row) / n


# --- by hand ---------------------------------------------------------------------------------------------------------


def read_then_overwritten(o: Operators, x: Tensor, y: Tensor) -> None:
    x += y
    o.sigmoid_(y)


def cloned_between(o: Operators, x: Tensor) -> Tensor:
    o.sigmoid_(x)
    first = x.clone()
    o.sigmoid_(x)
    return first


def two_clones(o: Operators, x: Tensor) -> tuple[Tensor, ...]:
    y = x.clone()
    o.softmax_(x, 0)
    z = x.clone()
    o.softmax_(x)
    return y, z, x * 1


def rows_of_one_another(o: Operators, x: Tensor) -> Tensor:
    y = x[0].clone()
    o.sigmoid_(x[0])
    x[1].copy_(y)
    o.softmax_(x[1])
    return x * 1


def one_row(o: Operators, x: Tensor) -> Tensor:
    o.softmax_(x[1])
    return x.clone()


def corner(o: Operators, x: Tensor) -> None:
    o.softmax_(x[1:, 2:])


def last_rows_transposed(o: Operators, x: Tensor) -> None:
    o.layer_norm_(x[1:].transpose(0, 1))


def last_columns(o: Operators, x: Tensor) -> Tensor:
    o.softmax_(x[..., 1:])
    return x.sum(-1)


def each_row(o: Operators, x: Tensor) -> None:
    for i in range(2):
        o.softmax_(x[i])


def each_row_read_before(o: Operators, x: Tensor) -> list[Tensor]:
    rows = []
    for i in range(2):
        rows.append(x[i].clone())
        o.layer_norm_(x[i])
    return rows


def moving_average(o: Operators, mean: Tensor, y: Tensor) -> None:
    mean.lerp_(y, 0.5)
    o.softmax_(y)


def clone_overwritten_later(o: Operators, x: Tensor) -> Tensor:
    t = x.clone()
    o.layer_norm_(x)
    o.softmax_(t)
    return t


def states(o: Operators, x: Tensor) -> list[Tensor]:
    collected = []
    for _ in range(3):
        o.add_transition_(x)
        collected.append(x.clone())
    return collected


def sum_read_before(o: Operators, x: Tensor) -> Tensor:
    total = x.sum(0)
    o.softmax_(x)
    return total


def product_read_before(o: Operators, x: Tensor) -> Tensor:
    product = x @ _matrix(x)
    o.square_matmul_(x)
    return product


def swapped(o: Operators, x: Tensor, y: Tensor) -> None:
    t = x.clone()
    x.copy_(y)
    y.copy_(t)
    o.sigmoid_(x)
    o.softmax_(y)


def concatenated(o: Operators, x: Tensor, y: Tensor) -> Tensor:
    both = torch.cat([x, y])
    o.softmax_(x)
    o.layer_norm_(both)
    return torch.cat([both, x])


def stacked_before_and_after(o: Operators, x: Tensor) -> Tensor:
    before = x * 2
    o.sigmoid_(x)
    between = x * 2
    o.softmax_(x)
    return torch.stack([before, between, x])


def overlapping_views(o: Operators, x: Tensor) -> Tensor:
    head, tail = x[..., :3], x[..., 1:]
    o.sigmoid_(head)
    read = tail.clone()
    o.softmax_(tail)
    return read + head.sum()


def intermediate_with_readers(o: Operators, x: Tensor) -> tuple[Tensor, ...]:
    t = x * 2
    before = t + 1
    o.softmax_(t)
    between = t * 3
    o.layer_norm_(t)
    return before, between, t


def view_of_intermediate(o: Operators, x: Tensor) -> Tensor:
    t = x + 1
    flat = t.view(-1, t.shape[-1])
    o.softmax_(flat)
    return t * flat.sum()


def same_value_twice(o: Operators, x: Tensor) -> tuple[Tensor, Tensor]:
    t = x.to(x.dtype) * 1
    u = t.clone()
    o.sigmoid_(t)
    o.softmax_(u)
    return t, u


def argument_of_another(o: Operators, x: Tensor, y: Tensor) -> None:
    torchops.gate_(x, y, _matrix(y)) if type(o) is Operators else x.mul_(torch.sigmoid(F.linear(y, _matrix(y))))
    o.softmax_(y)
    torchops.gate_(y, x, _matrix(x)) if type(o) is Operators else y.mul_(torch.sigmoid(F.linear(x, _matrix(x))))


def chain_of_an_input(o: Operators, x: Tensor) -> Tensor:
    o.sigmoid_(x)
    o.softmax_(x, 1)
    o.layer_norm_(x)
    o.gate_(x)
    return x * 2


def overwritten_by_something_else(o: Operators, x: Tensor) -> Tensor:
    o.softmax_(x)
    y = x * 3
    x.copy_(y + 1)
    return y


def returned_alias(o: Operators, x: Tensor) -> tuple[Tensor, Tensor]:
    row = x[0]
    o.sigmoid_(x)
    return row, row.clone()


def buffer_between(o: Operators, x: Tensor, y: Tensor) -> Tensor:
    t = torch.empty_like(x)
    t.copy_(x)
    o.softmax_(t)
    y.add_(t)
    o.sigmoid_(x)
    t.add_(x)
    return t


PROGRAMS: dict[Program, int] = {
    read_then_overwritten: 2,
    cloned_between: 1,
    two_clones: 1,
    rows_of_one_another: 1,
    one_row: 1,
    corner: 1,
    last_rows_transposed: 1,
    last_columns: 1,
    each_row: 1,
    each_row_read_before: 1,
    moving_average: 2,
    clone_overwritten_later: 1,
    states: 1,
    sum_read_before: 1,
    product_read_before: 1,
    swapped: 2,
    concatenated: 2,
    stacked_before_and_after: 1,
    overlapping_views: 1,
    intermediate_with_readers: 1,
    view_of_intermediate: 1,
    same_value_twice: 1,
    argument_of_another: 2,
    chain_of_an_input: 1,
    overwritten_by_something_else: 1,
    returned_alias: 1,
    buffer_between: 2,
}
"""Each with the number of its inputs, which are of one shape with three dimensions."""


# --- by chance -------------------------------------------------------------------------------------------------------

_INPUTS = 2
_VIEWS = ("{}[0]", "{}[1:]", "{}[..., 1:]", "{}[:, 1]", "{}.transpose(0, 1)", "{}.flatten(0, -2)")
_IN_PLACE = (
    *("o.sigmoid_({})", "o.softmax_({})", "o.softmax_({}, 0)", "o.layer_norm_({})"),
    *("o.square_matmul_({})", "o.gate_({})", "o.add_transition_({})"),
)
_OWN = ("{} * 2", "{}.clone()", "{} + 1", "{}.to(torch.float32)", "torch.cat([{}, {}])[:2]")


@dataclass
class _Name:
    """A variable of a generated program. Those of one `base` share memory."""

    name: str
    base: int
    whole: bool  # has the shape of the inputs


def random_source(seed: int, length: int = 9) -> str:
    """The source of a program `f(o, x0, x1)`."""
    choose = random.Random(seed)
    names = [_Name(f"x{i}", i, True) for i in range(_INPUTS)]
    lines, returned = [f"def f(o, {', '.join(n.name for n in names)}):"], []
    for step in range(length):
        source, name, kind = choose.choice(names), f"t{step}", choose.random()
        if kind < 0.4:
            lines.append(f"    {choose.choice(_IN_PLACE).format(source.name)}")
        elif kind < 0.5:
            others = [n for n in names if n.whole and n.base != source.base]
            if source.whole and others:
                other = choose.choice(others)
                operation = choose.choice(("{}.copy_({})", "{}.add_({})", "{}.lerp_({}, 0.5)"))
                lines.append(f"    {operation.format(source.name, other.name)}")
            else:
                lines.append(f"    {source.name}.mul_(0.5)")
        elif kind < 0.65 and source.whole:
            lines.append(f"    {name} = {choose.choice(_VIEWS).format(source.name)}")
            names.append(_Name(name, source.base, False))
        elif kind < 0.9:
            expression = choose.choice(_OWN)
            lines.append(f"    {name} = {expression.format(source.name, source.name)}")
            names.append(_Name(name, len(lines) + _INPUTS, source.whole and "cat" not in expression))
        else:
            lines.append(f"    {name} = {source.name}.sum(-1)")
            returned.append(name)
    made = [n.name for n in names[_INPUTS:]]
    returned += [n for n in made if choose.random() < 0.5]
    lines.append(f"    return [{', '.join(returned)}]")
    return "\n".join(lines)


def random_program(seed: int) -> Program:
    """The program of :func:`random_source`."""
    scope: dict[str, Any] = {"torch": torch}
    exec(compile(random_source(seed), f"<program {seed}>", "exec"), scope)
    program: Program = scope["f"]
    return program

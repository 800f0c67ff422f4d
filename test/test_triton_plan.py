"""Plans of launches in Triton: what is noted, where scratch memory lies, and when a plan is used again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_triton_launch import Kernel
from torch import Tensor
from triton_interpreter import interpreted, needs_triton

from torchops._core.triton import launch as _triton_launch
from torchops._core.triton import plan as _triton_plan
from torchops._core.triton.launch import Launch, launch_unless, noting
from torchops._core.triton.plan import Found, Plan, Plans, UnplannableError

CPU = torch.device("cpu")


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(_triton_launch, "stream_of", lambda device: 5)
    monkeypatch.setattr(_triton_launch, "is_watched", lambda: False)
    monkeypatch.setattr(_triton_plan, "is_watched", lambda: False)
    monkeypatch.setattr(_triton_plan, "stream_of", lambda device: 5)
    return Kernel()


def test_made_again_with_other_pointers(monkeypatch: pytest.MonkeyPatch, kernel: Kernel) -> None:
    launch = Launch(kernel, BLOCK=16, num_warps=4)

    def make(x: Tensor) -> None:
        launch((2, 1, 1), x[1:], 8, 3)

    x, y = torch.zeros(3, 8), torch.ones(3, 8)
    plan = Plan(make, [x], CPU)
    assert kernel.compiled == 0
    assert noting.calls is None
    plan.run([x], [x.data_ptr()])
    assert (kernel.compiled, kernel.launched) == (1, [])  # Triton compiles, and launches
    for t in (x, y):
        plan.run([t], [t.data_ptr()])
    assert [args for _, args in kernel.launched] == [(t.data_ptr() + 32, 8, 3, 16) for t in (x, y)]
    assert kernel.compiled == 1
    monkeypatch.setattr(_triton_plan, "is_watched", lambda: True)
    plan.run([x], [x.data_ptr()])
    assert len(kernel.launched) == 3  # by the launch itself, which lets Triton call hooks


def test_scratch_lies_where_nothing_else_is_in_use(kernel: Kernel) -> None:
    launch = Launch(kernel, BLOCK=16, num_warps=4)

    def make(x: Tensor) -> None:
        first, second, third = (x.new_empty(size) for size in (1000, 128, 900))
        for t in (first, second, first, third, second):
            launch((1, 1, 1), t, 8, 3)

    plan = Plan(make, [torch.zeros(4)], CPU)
    at = [place.offset for step in plan._steps for _, place in step._args.places if place.number == 1]
    first, second, again, third, last = at
    assert first == again
    assert second == last
    assert third == first  # which is not read any more
    assert not first <= second < first + 4000
    assert plan._nbytes == 4096 + 512


@pytest.mark.parametrize("answers", [[True, True, True], [False, True], [True, False, True]], ids=str)
def test_an_operator_instead_of_a_launch(kernel: Kernel, answers: list[bool]) -> None:
    """It is asked in the first run, and then again only if it has computed it."""
    launch, given = Launch(kernel, BLOCK=16, num_warps=4), []
    expected = list(answers)

    def operator(x: Tensor, scratch: Tensor, number: float) -> bool:
        given.append((x.data_ptr(), x.shape, x.stride(), scratch.shape, scratch.stride(), scratch.dtype, number))
        return answers.pop(0)

    def make(x: Tensor) -> None:
        scratch = x.new_empty(6, 5, dtype=torch.float16).mT
        launch_unless(operator, (x[1:].mT, scratch, 0.5), launch, (2, 1, 1), x, 8, 3)

    plan = Plan(make, [torch.zeros(3, 8)], CPU)
    assert not given
    for _ in range(3):
        x = torch.zeros(3, 8)
        plan.run([x], [x.data_ptr()])
        seen = (x.data_ptr() + 32, (8, 2), (1, 8), (5, 6), (1, 5), torch.float16, 0.5)
        assert given[-1] == seen or expected == [False, True]
    asked = 1 if not expected[0] else 3
    assert len(given) == asked
    assert kernel.compiled + len(kernel.launched) == 3 - sum(expected[:asked])


def test_no_plan_for_operators_on_numbers(kernel: Kernel) -> None:
    x = torch.zeros(3, 8)
    for operator in (lambda t: t + 1, lambda t: t.mT.reshape(24), lambda t: t.mT.contiguous(), lambda t: t.zero_()):
        with pytest.raises(UnplannableError):
            Plan(operator, [x], CPU)
        # As in a kernel, where operators of operators are not taken apart.
        with pytest.raises(UnplannableError), torch._C._AutoDispatchBelowAutograd():
            Plan(operator, [x], CPU)
        assert noting.calls is None
    Plan(lambda t: t.mT[1:].unflatten(0, (-1, 7)).view(1, 7, 3), [x], CPU)
    with torch._C._AutoDispatchBelowAutograd():
        Plan(lambda t: t.mT[1:].unflatten(0, (-1, 7)).reshape(1, 7, 3).split(1, -1), [x], CPU)


def test_kept_by_what_decides(monkeypatch: pytest.MonkeyPatch, kernel: Kernel) -> None:
    plans, x = Plans(most=4), torch.zeros(64)
    assert plans.find("how", [x]) == Found(None, [], None)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    found = plans.find("how", [x, None])
    assert found.plan is None
    assert found.pointers == [x.data_ptr(), 0]
    plan = plans.add(found, lambda *_: None, [x, None], CPU)
    assert plans.find("how", [x.clone(), None]).plan is plan
    others: list[Any] = [x[:63], x.half(), x.expand(2, 64), torch.zeros(65)[1:], None]
    for other in others:
        assert plans.find("how", [other, None]).plan is None
    assert plans.find("otherwise", [x, None]).plan is None
    assert plans.add(plans.find("copied", [x]), lambda t: t.clone(), [x], CPU) is False
    assert plans.find("copied", [x]).plan is False

    def fails(t: Tensor) -> None:
        raise ValueError("no plan")

    with pytest.raises(ValueError, match="no plan"):
        plans.add(plans.find("fails", [x]), fails, [x], CPU)
    assert plans.find("fails", [x]).plan is None
    for i in range(4):
        plans.add(plans.find(i, [x]), lambda *_: None, [x], CPU)
    assert len(plans._kept) <= 4


INTERPRETED = """
import torch
from torchops._triangle_attention.update import triton_fused as fused, triton_fused_backward as gradients
from torchops._triangle_attention.update.arguments import Arguments, Kept, inputs_of
from torchops._triangle_attention.update.panels_backward import GRADIENTS
from torchops._core.triton.plan import Plan

torch.manual_seed(0)
fused.budget = gradients.budget = lambda *_: 4000
c, heads, n, ending = 24, 2, 5, True
shapes = (c,), (c,), (heads, c), (16, c), (16, c), (16, c), (16, c), (16,), (c, 16), (c,)
parameters = [(torch.randn(shape) / shape[-1] ** 0.5).half() for shape in shapes]
x, mask = torch.randn(1, n, n, c), torch.rand(1, n, n) > 0.3
made = [torch.empty(1, n, n, c).half(), torch.empty(1, n, n, 16).half(), torch.empty(1, n, heads, n)]


def forward(x, mask, *rest):
    inputs = inputs_of(Arguments(x, mask, rest[:10], heads, 1e-5, ending))
    fused.forward(inputs, rest[10], Kept(*rest[11:]))


def backward(grad, x, o, logsumexp, mask, *rest):
    inputs = inputs_of(Arguments(x, mask, rest[:10], heads, 1e-5, ending))
    into = dict(zip(GRADIENTS, rest[10:], strict=True))
    gradients.backward_into(into, grad, inputs, Kept(o, logsumexp), False)


def check(function, given, made):
    function(*given, *made)
    expected, got = made, [torch.full_like(t, 7) for t in made]
    plan = Plan(function, [*given, *got], torch.device("cpu"))
    plan.run([*given, *got], [])
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)), function


check(forward, (x, mask, *parameters), made)
grad = torch.randn(x.shape).half()
check(backward, (grad, x, *made[1:], mask, *parameters), [torch.empty_like(t) for t in (x, *parameters)])
"""


@needs_triton
def test_attention_interpreted() -> None:
    """A plan of the update's kernels, on the CPU, does what they do one by one."""
    done = interpreted(INTERPRETED)
    assert done.returncode == 0, done.stderr

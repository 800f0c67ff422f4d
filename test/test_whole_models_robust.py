"""Whole models of public packages after `replace`: copied, loaded, cast, compiled, interrupted, and trained.

Each must compute what the released model does, within a rounding of float32. What their modules do one by one is in
test_adapters*.py.
"""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import whole_models
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from benchmarks.whole.deviations import mapped
from benchmarks.whole.frame import Subject, ran_in
from torchops import replace
from torchops.convert.module import Replacement
from torchops.convert.swapped import Swapped

pytestmark = [pytest.mark.xdist_group("adapters"), pytest.mark.filterwarnings("ignore")]

Outputs = dict[str, Tensor]


class Models:
    """A model as released and after `replace`, of the same parameters, and the released outputs."""

    def __init__(self, name: str) -> None:
        self.released, self.outputs = whole_models.subject(name)
        self.model = copy.deepcopy(self.released.model)
        self.report = replace(self.model)

    def of(self, model: nn.Module) -> Subject:
        return self.released._replace(model=model)

    def copy(self) -> nn.Module:
        return copy.deepcopy(self.model)


@pytest.fixture(scope="module", params=[name for name in whole_models.PACKAGES if find_spec(name) is not None])
def models(request: pytest.FixtureRequest) -> Iterator[Models]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the layers are too small for more
    try:
        yield Models(request.param)
    finally:
        torch.set_num_threads(threads)


def same(got: Outputs, expected: Outputs, tolerance: float = 2e-5) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        error = (got[name].double() - value.double()).norm() / value.double().norm()
        assert error <= tolerance, f"{name}: {error:.1e}"


def test_as_released(models: Models) -> None:
    assert models.report.replaced
    same(models.of(models.model).run("float32"), models.outputs)


def test_copied(models: Models) -> None:
    same(models.of(models.copy()).run("float32"), models.outputs)


def test_pickled(models: Models) -> None:
    same(models.of(pickle.loads(pickle.dumps(models.model))).run("float32"), models.outputs)


def test_state_dicts_load_both_ways(models: Models) -> None:
    """Also of another model, after a prediction, by copying and by assigning."""
    other = copy.deepcopy(models.released.model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.05)
    expected, state = models.of(other).run("float32"), other.state_dict()
    new = models.copy()
    models.of(new).run("float32")
    assert list(new.state_dict()) == list(state)
    for assign in (False, True):
        again = copy.deepcopy(new)
        again.load_state_dict(copy.deepcopy(state), assign=assign)
        same(models.of(again).run("float32"), expected)
        back = copy.deepcopy(models.released.model)
        back.load_state_dict(again.state_dict())
        assert all(map(torch.equal, back.parameters(), other.parameters()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_cast_there_and_back(models: Models, dtype: torch.dtype) -> None:
    """The parameters are those of the cast released model, and modules that were read before read the new ones."""
    new, old = models.copy(), copy.deepcopy(models.released.model)
    models.of(new).run("float32")
    for model in (new, old):
        model.to(dtype)
    assert all(
        p.dtype == q.dtype and torch.equal(p, q) for p, q in zip(new.parameters(), old.parameters(), strict=True)
    )
    assert all(p.dtype == dtype for p in new.parameters() if p.is_floating_point())
    for model in (new, old):
        model.float()
    same(models.of(new).run("float32"), models.of(old).run("float32"))


def test_changed_inputs_of_the_same_sizes(models: Models) -> None:
    features = {
        name: value.flip(-2) if name in ("msa", "ref_pos") else value
        for name, value in models.released.features.items()
    }
    changed = models.released._replace(features=features)
    same(changed._replace(model=models.model).run("float32"), changed.run("float32"))
    same(models.of(models.model).run("float32"), models.outputs)


PARTS = "msa_module", "pairformer_module", "pairformer_stack"


def calls(models: Models) -> dict[str, Any]:
    """The arguments of the score model and of the trunk's parts, in a prediction of the released model."""
    found: dict[str, Any] = {}
    hooks = []
    for name in (models.released.package.score, *(part for part in models.released.package.parts if part in PARTS)):

        def look(_: Any, args: Any, kwargs: Any, name: str = name) -> None:
            with torch.inference_mode(False):
                found[name] = mapped((args, kwargs), lambda t: torch.empty_like(t).copy_(t))

        module = models.released.model.get_submodule(name)
        hooks.append(module.register_forward_pre_hook(look, with_kwargs=True))
    models.released.run("float32")
    for hook in hooks:
        hook.remove()
    return found


def called(model: nn.Module, name: str, call: Any) -> list[Tensor]:
    args, kwargs = mapped(call, torch.clone)
    kwargs |= {"inplace_safe": False} if "inplace_safe" in kwargs else {}
    torch.manual_seed(2)
    with ran_in("float32", torch.device("cpu")):
        return [t for t in tree_leaves(model.get_submodule(name)(*args, **kwargs)) if isinstance(t, Tensor)]


def test_two_threads(models: Models) -> None:
    """In the score model, since the random numbers of a sampler are the process's."""
    name = models.released.package.score
    results: list[Tensor] = []
    barrier = threading.Barrier(2)
    args, kwargs = mapped(calls(models)[name], torch.clone)

    def of(model: nn.Module) -> Tensor:
        with torch.no_grad():
            out = tree_leaves(model.get_submodule(name)(*args, **kwargs))
        return next(leaf for leaf in out if isinstance(leaf, Tensor))

    def run() -> None:
        barrier.wait()
        results.extend(of(models.model) for _ in range(3))

    threads = [threading.Thread(target=run) for _ in range(2)]
    with ran_in("float32", torch.device("cpu")):
        expected = of(models.released.model)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(results) == 6
    for result in results:
        same({"score": result}, {"score": expected})


def swapped(model: nn.Module) -> dict[type, str]:
    """The name of the first module of each class that took a module's place."""
    found: dict[type, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, Replacement | Swapped):
            found.setdefault(type(module), name)
    return found


def test_hooks_added_later(models: Models) -> None:
    """On what took a module's place, they are called as on the released module, and may change the result."""
    new, old = models.copy(), copy.deepcopy(models.released.model)
    seen: dict[str, list[str]] = {"new": [], "old": []}
    for kind, model in (("new", new), ("old", old)):
        for name in swapped(models.model).values():

            def hook(_: Any, args: Any, out: Any, kind: str = kind, name: str = name) -> Any:
                seen[kind].append(name)
                return out * 1.1 if isinstance(out, Tensor) else None

            model.get_submodule(name).register_forward_hook(hook)
    same(models.of(new).run("float32"), models.of(old).run("float32"))
    assert sorted(seen["new"]) == sorted(seen["old"])


class Interrupts:
    """`F.linear` that raises in the call of that number."""

    def __init__(self, number: int = -1) -> None:
        self.calls, self._number, self._real = 0, number, F.linear

    def __call__(self, *args: Any) -> Tensor:
        self.calls += 1
        if self.calls == self._number:
            raise InterruptedError
        return self._real(*args)


def test_an_exception_half_way(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was half done, in the trunk or the sampler, the next prediction is right."""
    new, counted = models.of(models.copy()), Interrupts()
    with monkeypatch.context() as patched:
        patched.setattr(F, "linear", counted)
        new.run("float32")
    for part in range(1, 9):
        with monkeypatch.context() as patched:
            patched.setattr(F, "linear", Interrupts(counted.calls * part // 9))
            with pytest.raises(InterruptedError):
                new.run("float32")
    same(new.run("float32"), models.outputs)


def test_trained_after_inference(models: Models) -> None:
    """What inference prepared is not kept: gradients, and the prediction after the step, are the released ones."""
    results: list[dict[str, Tensor]] = []
    taken = calls(models)
    for model in (models.copy(), copy.deepcopy(models.released.model)):
        models.of(model).run("float32")
        model.train()
        for name, call in taken.items():
            outs = [t for t in called(model, name, call) if t.requires_grad]
            torch.autograd.backward([out.float().square().mean() for out in outs])
        results.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.05)
        results.append(models.of(model.eval()).run("float32"))
    ours, after, theirs, expected = results
    assert theirs.keys() == ours.keys() != set()
    size = max(gradient.norm() for gradient in theirs.values())  # those before a softmax may be 0 but for rounding
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).norm() <= 1e-3 * gradient.norm() + 1e-6 * size, name
    same(after, expected)


def test_a_swapped_module_compiled(models: Models) -> None:
    """One that is called in each recycle, and in a whole prediction."""
    new = models.copy()
    part = next(part for part in models.released.package.parts if part.startswith("pairformer"))
    swapped_in = next(m for m in new.get_submodule(part).modules() if isinstance(m, Replacement))
    swapped_in.compile(backend="eager")
    same(models.of(new).run("float32"), models.outputs)
    torch._dynamo.reset()

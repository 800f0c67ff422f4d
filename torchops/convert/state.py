"""What a recorded step depends on besides its arguments: the modules inside, their hooks, and their tensors.

It is looked at before every step, so the look is short: one comparison of dictionaries with their copies, which Python
does without a loop of ours, and the places of tensors. Only if that finds a difference, all modules are walked.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from torchops.convert.values import PLAIN
from torchops.nn.layers import has_hooks

_REGISTRIES = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class State(NamedTuple):
    """What is inside a module, as far as a recording depends on it."""

    ids: tuple[int, ...]
    pointers: tuple[Any, ...]
    attributes: tuple[Any, ...]
    hooks: bool
    optimizer_steps: int

    @classmethod
    def of(cls, module: nn.Module) -> State:
        ids, pointers, attributes, hooks = [], [], [], _has_global_hooks()
        for each in _inside(module):
            ids.append(id(each))
            hooks = hooks or (each is not module and (has_hooks(each) or "forward" in each.__dict__))
            for registry in (each._parameters, each._buffers):
                pointers += [_place(t) for t in registry.values() if t is not None]
            attributes += [_place(v) if isinstance(v, Tensor) else v for v in vars(each).values() if _is_attribute(v)]
        return cls(tuple(ids), tuple(pointers), tuple(attributes), hooks, _optimizer_steps.count)


class Watch:
    """The state of a module, again and again. Does not keep the module alive."""

    def __init__(self, module: nn.Module) -> None:
        _optimizer_steps.watch()
        self.state = State.of(module)
        modules = _inside(module)
        self._live = [vars(each) for each in modules]
        self._live += [vars(each)[name] for each in modules for name in _REGISTRIES]
        self._copies = [dict(live) for live in self._live]
        # Those of the module itself run around all of this.
        inside = [vars(each) for each in modules if each is not module]
        self._hooks = [each[name] for each in inside for name in _HOOKS]
        self._forwards = any("forward" in each for each in inside)
        held = [v for live in self._live for v in live.values()]
        self._tensors = [v for v in held if isinstance(v, Tensor)]
        self._places = list(map(_place, self._tensors))

    def now(self, module: nn.Module) -> State:
        """The state of the same module, the same object as before if nothing changed."""
        if not self._same():
            before = self.state
            self.__init__(module)  # type: ignore[misc]
            if self.state == before:
                self.state = before
        return self.state

    def _same(self) -> bool:
        try:
            same = self._live == self._copies
        except Exception:  # values that cannot be compared
            return False
        hooks = self._forwards or any(self._hooks) or _has_global_hooks()
        same = same and self.state.optimizer_steps == _optimizer_steps.count
        return same and hooks == self.state.hooks and list(map(_place, self._tensors)) == self._places


class _OptimizerSteps:
    """Of all optimizers: a fused one changes parameters, but not their versions."""

    count = 0
    _watched = False

    def watch(self) -> None:
        if not self._watched:
            self._watched = True
            register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():  # what is compiled changes versions
            self.count += 1


_optimizer_steps = _OptimizerSteps()


def _inside(module: nn.Module) -> list[nn.Module]:
    found, todo = [], [module]
    while todo:
        found.append(each := todo.pop())
        todo += [child for child in each._modules.values() if child is not None]
    return found


def _place(t: Tensor) -> Any:
    """Where a tensor is, and what changes with its content."""
    return t.data_ptr(), t.dtype, t.stride(), None if t.is_inference() else t._version


def _is_attribute(value: Any) -> bool:
    return isinstance(value, (Tensor, tuple, *PLAIN))


def _has_global_hooks() -> bool:
    hooks = torch.nn.modules.module
    return bool(hooks._global_forward_hooks or hooks._global_forward_pre_hooks)

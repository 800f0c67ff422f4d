"""Classes of modules with another forward, whose code came from a graph."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from torch import Tensor, fx, nn

from .gate_forms import unchanged

__all__ = ["LAYERS", "Imported", "Names", "Rewritten", "class_with_forward", "former_class", "guarded"]


class Imported(NamedTuple):
    """Stands for an imported module, which cannot be pickled."""

    name: str


Names = tuple[tuple[str, Any], ...]  # the globals of a forward

# Those that are added here, by names that no argument or part of a module should have.
LAYERS = "_torchops_layers"
_FORMER, _WITHOUT, _UNCHANGED = "_torchops_former", "_torchops_without", "_torchops_unchanged"
_ARE_TENSORS = "_torchops_are_tensors"


class Rewritten:
    """What classes with a rewritten forward add, so that they can be pickled."""

    _torchops_parts: tuple[type[nn.Module], str, Names]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if "_torchops_parts" not in vars(cls):  # the base, which may register its subclasses, has seen this class
            super().__init_subclass__(**kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As the base is pickled, with the base in place of this class, which cannot be found by its name."""
        reduced: Any = super().__reduce_ex__(max(protocol, 2))
        if isinstance(reduced, str):
            return reduced
        own, base = type(self), former_class(type(self))
        function, *args = (base if value is own else value for value in (reduced[0], *reduced[1]))
        return _rebuilt, (own._torchops_parts, function, args), *reduced[2:]


def _rebuilt(parts: Any, function: Callable[..., Any], args: list[Any]) -> Any:
    module = function(*args)
    module.__class__ = class_with_forward(*parts)
    return module


def former_class(kind: Any) -> Any:
    """`kind`, or the class that it was before the forward was rewritten."""
    return kind._torchops_parts[0] if issubclass(kind, Rewritten) else kind


@functools.cache  # copies share a class, since torch.fx keeps the globals of each forward
def class_with_forward(base: type[nn.Module], code: str, names: Names) -> type[nn.Module]:
    """A subclass of `base` with the method that `code` defines."""
    namespace = {
        name: importlib.import_module(value.name) if isinstance(value, Imported) else value for name, value in names
    }
    namespace |= {_FORMER: base.forward, _UNCHANGED: unchanged, _ARE_TENSORS: _are_tensors}
    exec(compile(code, f"<torchops.nn.replace: {base.__name__}>", "exec"), namespace)
    body = {"forward": namespace["forward"], "__module__": base.__module__, "_torchops_parts": (base, code, names)}
    return type(base.__name__, (Rewritten, base), body)


def _are_tensors(*values: Any) -> bool:
    """Or stand for tensors in a trace. A graph can't tell what a forward does with others, as in ``mask is False``."""
    return all(isinstance(value, (Tensor, fx.Proxy)) for value in values)


def guarded(code: str, base: type[nn.Module], graph: fx.Graph, optional: tuple[str, ...], without: str | None) -> str:
    """`code` that begins with a call of the former forward, for the case that a layer is no longer what it was, or that
    an argument whose default is not None is None. If all `optional` arguments are None, it calls the code `without`
    them; otherwise, if there is no such code or any is no tensor, the former forward."""
    parameters = inspect.signature(base.forward).parameters
    names = [str(node.target) for node in graph.find_nodes(op="placeholder")]
    only = {name for name, parameter in parameters.items() if parameter.kind is inspect.Parameter.KEYWORD_ONLY}

    def call(function: str, names: Collection[str], only: Collection[str]) -> str:
        arguments = sorted(
            (f"{name}={name}" if name in only else name for name in names),
            key=lambda text: (text.startswith("**"), "=" in text, text.startswith("*")),
        )
        return f"{function}({', '.join(['self', *arguments])})"

    former = call(_FORMER, names, only)
    tests = [f"{node.target} is None" for node in graph.find_nodes(op="placeholder") if node.args != (None,)]
    test = " or ".join([*(test for test in tests if not test.startswith("*")), f"not {_UNCHANGED}(self, {LAYERS})"])
    guards = [f"    if {test}: return {former}"]
    absent = [f"{name} is None" for name in optional]
    if without:
        rest = [name for name in names if name not in optional]
        guards.append(f"    if {' and '.join(absent)}: return {call(_WITHOUT, rest, ())}")
    if optional:
        guards.append(f"    if not {_ARE_TENSORS}({', '.join(optional)}): return {former}")
    lines = code.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("def forward("))
    lines[first + 1 : first + 1] = guards
    other = without.replace("def forward(", f"def {_WITHOUT}(", 1) if without else ""
    return "\n".join([other, *lines])

"""Errors of arguments of a wrong type, as PyTorch's functions raise them."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

__all__ = ["with_type_errors"]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_MISMATCH = re.compile(
    r"myops::\w+\(\) Expected a value of type '(.*)' for argument '(.*)' but instead found type '(.*)'\."
)
_NO_TENSOR = "There were no tensor arguments to this function"  # in inference mode
_TYPES = {
    "Optional[Tensor]": "Tensor or None",
    "Optional[float]": "float or None",
    "Optional[int]": "dtype or None",  # the only optional integers are out_dtype
    "List[int]": "tuple of ints",
}


def with_type_errors(function: Callable[_P, _R], name: str | None = None) -> Callable[_P, _R]:
    """A function that raises a ``TypeError`` for an argument of a wrong type, as PyTorch's functions do; its operators
    raise a ``RuntimeError``."""
    name = name or function.__name__
    told = _told

    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            reason = told(error, function)
            if reason is None:
                raise
            raise TypeError(f"{name}: expected {reason}") from None

    # torch.compile limits the graphs of a code object: functions that share one would share the limit. TorchScript
    # looks the names that `function` uses up in the globals of what it is given.
    code = call.__code__.replace(co_name=function.__name__)
    own_globals = function.__globals__ if inspect.isfunction(function) else globals()
    return functools.wraps(function)(FunctionType(code, own_globals, closure=call.__closure__))


def _told(error: RuntimeError, function: Callable[..., Any]) -> str | None:
    """Which argument had a wrong type, if that is what the error says."""
    # Where an operator has overloads, the text begins with another line, and the first schema is ours.
    if mismatch := _MISMATCH.search(str(error)):
        expected, argument, got = mismatch.groups()
    elif str(error).startswith(_NO_TENSOR) and inspect.isfunction(function):
        expected, argument, got = "Tensor", function.__code__.co_varnames[0], "NoneType"
    else:
        return None
    expected = _TYPES.get(expected, expected)
    if expected == "tuple of ints" and got in ("tuple", "list"):
        got += " of something else"
    return f"{argument} of type {expected}, got {got}"

"""What Python does with values of a trace and ``torch.fx`` cannot record, because no method of a proxy is called.

A trace runs a forward once. A comparison by ``is``, an exception that is caught and a parameter that is read past its
name are decided in that run and would never be decided again. Python tells which functions ran; their instructions tell
whether they do any of that. This refuses more than it has to, since it does not know which values are proxies.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import sys
from collections.abc import Iterator
from itertools import pairwise
from types import CodeType, FrameType
from typing import Any

__all__ = ["Watched", "watched"]

# Names by which a forward reads more of a value than a proxy shows, or parameters past their names in the module.
_READS = {
    *("id", "is_", "is_not", "type", "vars", "eval", "exec", "state_dict"),
    *("parameters", "named_parameters", "_parameters", "buffers", "named_buffers", "_buffers"),
}
# Whose functions no forward hands a value to, but torch calls on the way.
_LIBRARIES = {"torch", "torchops", "numpy", "sympy", "mpmath", "typing_extensions", *sys.stdlib_module_names}
_ENDS = (StopIteration, StopAsyncIteration, GeneratorExit)  # of loops, which are raised to be caught


class Watched:
    """The functions that ran, outside torch and the libraries that it calls, and whether an exception reached one."""

    def __init__(self) -> None:
        self._functions: dict[CodeType, None] = {}
        self._raised = self._imports = False

    def problem(self) -> str | None:
        """What they did that no graph shows; for a trace that ended without an exception."""
        if self._raised:
            return "its forward catches an exception, and goes on in another way"
        return next(filter(None, map(_unseen, self._functions)), None)

    def call(self, frame: FrameType, event: str, argument: Any) -> Any:
        """A trace function, as `sys.settrace` calls it."""
        frame.f_trace_lines = False
        if self._imports:
            return None
        if frame.f_code.co_name == "<module>":  # of a file that is imported, perhaps by torch
            self._imports = True
            return self._inside_import
        if frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
            return None
        self._functions[frame.f_code] = None
        return self._inside

    def _inside(self, frame: FrameType, event: str, argument: Any) -> Any:
        self._raised |= event == "exception" and not issubclass(argument[0], _ENDS)
        return self._inside

    def _inside_import(self, frame: FrameType, event: str, argument: Any) -> Any:
        self._imports &= event != "return"
        return self._inside_import


@contextlib.contextmanager
def watched() -> Iterator[Watched]:
    """Watches this thread. Meanwhile, debuggers and measurements of coverage that trace it see nothing."""
    found, former = Watched(), sys.gettrace()
    sys.settrace(found.call)
    try:
        yield found
    finally:
        sys.settrace(former)


@functools.cache
def _unseen(code: CodeType) -> str | None:
    ignored = ("CACHE", "EXTENDED_ARG", "PUSH_NULL", "PRECALL")
    instructions = [i for i in dis.get_instructions(code) if i.opname not in ignored]
    for value, literal, comparison in zip(instructions, instructions[1:], instructions[2:], strict=False):
        if comparison.opname == "IS_OP" and not _can_be_told(value, literal, code):
            return f"it compares by `is` in {code.co_name}, which no graph shows"
    for read, following in pairwise(instructions):
        if read.opname in _LOADS and read.argval in _READS and not _is_type_of_self(read, following, code):
            return f"it uses {read.argval} in {code.co_name}, which no graph shows"
    return None


_LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_ATTR", "LOAD_METHOD")


def _can_be_told(value: dis.Instruction, literal: dis.Instruction, code: CodeType) -> bool:
    """Whether a comparison by `is` is with None, or of an argument of the forward with True or False: calls with such
    arguments run the former forward."""
    if not literal.opname.startswith("LOAD_CONST"):
        return False
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    of_argument = value.opname.startswith("LOAD_FAST") and value.argval in arguments and code.co_name == "forward"
    return literal.argval is None or (isinstance(literal.argval, bool) and of_argument)


def _is_type_of_self(read: dis.Instruction, following: dis.Instruction, code: CodeType) -> bool:
    is_self = following.opname.startswith("LOAD_FAST") and following.argval in code.co_varnames[:1]
    return read.argval == "type" and is_self

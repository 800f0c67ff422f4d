"""Imported where Triton's kernels are interpreted: version 3.6 calls int() on arrays of one element, which NumPy 2.4
refuses."""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter

_patch_lang_tensor = interpreter._patch_lang_tensor


def _patched(tensor: Any, scope: Any) -> None:
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patched

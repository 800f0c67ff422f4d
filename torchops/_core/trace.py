"""What ``torch.jit.trace`` says of operators that it cannot record: it knows no lists of optional tensors."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from torchops._triangle_attention.update import operators as _attention_update_operators  # noqa: F401  (defines some of them)

__all__: list[str] = []

# By the name that users know.
_UNTRACEABLE = {
    "triangle_attention_update": (
        "_triangle_attention_update",
        "_triangle_attention_update_",
        "_triangle_attention_update_kept",
        "_triangle_attention_update_backward",
    ),
    "triangle_multiplicative_update": (
        "_triangle_multiplicative_update",
        "_triangle_multiplicative_update_",
        "_triangle_multiplicative_update_backward",
        "_triangle_rows_in",
        "_triangle_rows_in_backward",
        "_triangle_rows_out",
        "_triangle_rows_out_backward",
        "_triangle_rows_parameter_gradients",
    ),
}

_library = torch.library.Library("myops", "IMPL")


def _refuse(operator: str) -> Any:
    def call(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            f"{operator}: torch.jit.trace cannot record a list of optional tensors; use torch.export.export, and "
            "torch._inductor.aoti_compile_and_package to serve the program (docs/serving.md)"
        )

    return call


for _operator, _names in _UNTRACEABLE.items():
    for _name in _names:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"myops::{_name}", "Tracer"):  # another import has
            _library.impl(_name, _refuse(_operator), "Tracer")

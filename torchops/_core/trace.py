"""What ``torch.jit.trace`` says of operators that it cannot record: it knows no lists of optional tensors."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

__all__ = ["refuse"]

_library = torch.library.Library("myops", "IMPL")


def refuse(public: str, *names: str) -> None:
    """Lets the operators of these names raise. `public` is what users call."""

    def call(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            f"{public}: torch.jit.trace cannot record a list of optional tensors; use torch.export.export, and "
            "torch._inductor.aoti_compile_and_package to serve the program (docs/serving.md)"
        )

    for name in names:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"myops::{name}", "Tracer"):  # another import has
            _library.impl(name, call, "Tracer")

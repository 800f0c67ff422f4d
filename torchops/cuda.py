"""Switches for the CUDA kernels."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Literal

import torch
from torch.overrides import TorchFunctionMode

from torchops._triangle_attention.attention.operators import triangle_attention as _attention
from torchops._triangle_attention.update import operators as _update

__all__ = ["kernel_path"]

_PATHS = ("auto", "fused", "portable", "cublas")


class kernel_path:  # noqa: N801 (used as a function is, like torch.set_grad_enabled)
    """Sets the path that :func:`torchops.dense`, ``gate``, ``gate_``, ``glu``, ``square_matmul``, ``square_matmul_``,
    transitions, triangle updates and triangle attention take on CUDA, either from the call on or within a ``with``
    statement.

    - ``"fused"``: a kernel with bias and sigmoid in its epilogue, wherever one can run. For ``dense``, ``gate``,
      ``gate_`` and ``glu``, that is any rows of float16 or bfloat16 with contiguous features, and those of float32
      without TF32 that are aligned to 16 bytes, to a multiple of 4 features. For triangle updates, it is up to 128
      features and channels, multiples of 8, in rows aligned to 16 bytes, in 16 bits or TF32. For more, for transitions
      (in 16 bits, up to 128 features and 512 hidden ones), and for ``dense`` in TF32, it takes compute capability 9.0
      and such rows. On compute capability 8.0 and 9.0, products of float32 without TF32 are split products where
      tensors allow, and not by cuBLAS. For the forward pass of triangle attention, where Triton's kernels could run, it
      is heads of up to 64 features in 16 bits, in rows aligned to 16 bytes, on compute capability 9.0.
    - ``"cublas"``: a product by cuBLAS, and a pass for bias and sigmoid. (16-bit ``square_matmul_`` keeps its kernel.)
    - ``"auto"``: the faster of these.
    - ``"portable"``: the same, without kernels for a single architecture: what other GPUs get, on a Hopper GPU. It
      applies to float8 products too, but not in a traced function.

    On ``"auto"`` and ``"fused"``, gradients come from one pass over the rows if there is a kernel for that (compute
    capability 9.0; float16 or bfloat16; multiples of 8 features, at most 128 in and out; for ``dense`` also 192, or
    256 of one and 128 of the other). For any other ``dense`` of up to 256 features in, a pass makes all but the
    gradient of ``w``; on ``"auto"``, not for few rows of more than 512 features out.

    The path applies to the current thread, and backward takes the path of its forward pass. A thread starts with the
    path in the environment variable ``TORCHOPS_KERNEL_PATH``, or with ``"auto"``.

    In a function that ``torch.compile`` or ``torch.export`` traces, use the ``with`` statement, since a mere call is
    not part of the graph. The graph keeps the path, forward and backward. Only ``dense`` supports this; the other
    operators raise there. Around a compiled function, the path applies to the forward passes that run meanwhile, but
    not to their compiled backward.

    Raises:
        ValueError: there is no such path.
        NotImplementedError: an operator other than ``dense`` is called within the ``with`` statement of a traced
            function, unless the path is ``"auto"``.

    Example:

        >>> with torchops.cuda.kernel_path("cublas"):
        ...     y = torchops.dense(torch.zeros(2, 3), torch.ones(4, 3))
    """

    def __init__(self, path: Literal["auto", "fused", "portable", "cublas"]) -> None:
        if path not in _PATHS:
            raise ValueError(f"kernel_path: expected path auto, fused, portable or cublas, got {path}")
        self._traced = _OnPath(path) if torch.compiler.is_compiling() else None
        self._path = path
        self._formers: list[str] = []
        # The first `with` returns to the path from before the call.
        self._before: str | None = None if self._traced else torch.ops.myops._kernel_path(path)

    def __enter__(self) -> None:
        if self._traced:
            self._traced.__enter__()
            return
        former = torch.ops.myops._kernel_path(self._path)
        self._formers.append(former if self._before is None else self._before)
        self._before = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._traced:
            self._traced.__exit__(kind, error, trace)
        else:
            torch.ops.myops._kernel_path(self._formers.pop())


_myops = torch.ops.myops
# These are defined in Python.
_in_python = [op.overloadpacket for op in (_attention, _update.update, _update.update_, _update.update_kept)]
_OTHERS = (
    *(_myops.gate, _myops.gate_, _myops.glu, _myops.transition, _myops.add_transition_, _myops._add_transition),
    *(_myops.square_matmul, _myops.square_matmul_),
    *(_myops.triangle_multiplicative_update, _myops.add_triangle_multiplicative_update_),
    *(_myops._triangle_multiplicative_update, _myops._triangle_multiplicative_update_, *_in_python),
)
_NOT_IN_GRAPHS = (*_OTHERS, *(op.default for op in _OTHERS))


class _OnPath(TorchFunctionMode):
    """While a graph is traced: calls of ``dense`` become those of an operator that carries the path."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.myops.dense or func is torch.ops.myops.dense.default:
            return _on_path(self.path, *args, **kwargs)
        if self.path != "auto" and func in _NOT_IN_GRAPHS:
            raise NotImplementedError(f"kernel_path: expected dense within a traced function, got {func}")
        return func(*args, **kwargs)


def _on_path(path: str, x: Any, w: Any, b: Any = None) -> Any:
    return torch.ops.myops._dense_on_path(x, w, b, path)

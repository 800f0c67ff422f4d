"""Rewrites ``sigmoid(linear)`` to :func:`torchops.dense` in models compiled by ``torch.compile``, as they are.

Switch it on before the model is compiled, which is when it runs first, and read how many places were rewritten::

    torchops.inductor.enable()
    model = torch.compile(model)
    model(x)
    print(torchops.inductor.matches())

The pass works on Inductor's joint graph, through the hooks ``joint_custom_pre_pass`` and ``post_grad_custom_pre_pass``
of ``torch._inductor.config``. Autocast, in-place operators, tensor subclasses and ``torch.func`` are resolved into
functional ATen operators there, so one pattern covers every spelling of a linear layer (``nn.Linear``, ``F.linear``,
``addmm``, ``x @ w.T + b``, ``x @ w``, ``einsum``; two or more dimensions; with and without bias), for inference and for
training. The backward pass stays Inductor's own, with ``grad * y * (1 - y)`` fused into the kernels around it. The
pre-activation exists neither in the forward pass nor among the saved tensors.

A place is left as it is where

- the pre-activation has another user (as in SiLU, ``z * sigmoid(z)``);
- what is added is anything but one value per output feature, or ``addmm`` scales its terms;
- dtypes differ, or are not float32, float64, float16 or bfloat16;
- Inductor computes the product without a matrix multiplication (a single row on the CPU);
- on CUDA, the kernel with the sigmoid in its epilogue cannot run: it needs compute capability 9.0; float16, bfloat16 or
  float32 with TF32; in and out features whose rows are a multiple of 16 bytes. `dense` would be a product and a pass
  there, and Inductor fuses that pass with what surrounds it.

It pays where the gate itself is written to memory. On the CPU, a gate that is only multiplied by something is some
percent slower with it in inference (``docs/existing_models.md`` has figures).

``torch._logging.set_logs(modules={"torchops.inductor": logging.INFO})`` shows each place with its line of source, and
the reason where it was left.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

__all__ = ["Enabled", "disable", "enable", "matches", "options"]


class Enabled:
    """What :func:`enable` returns. The end of its ``with`` block switches the pass off, if that call switched it on."""

    def __init__(self, switched_on: bool) -> None:
        self._switched_on = switched_on

    def __enter__(self) -> Enabled:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._switched_on:
            disable()


def enable() -> Enabled:
    """Switches the pass on for everything that ``torch.compile`` and AOTInductor compile from now on.

    Graphs compiled before stay as they are (``torch.compiler.reset()`` discards them). Passes that the two hooks hold
    already are kept and run first; one that is set later replaces this one. Graphs stay cacheable on disk.

    Returns:
        An object for use in a ``with`` statement. The model has to run for the first time inside the block.

    Example::

        >>> with torchops.inductor.enable():
        ...     y = torch.compile(lambda x, w: torch.sigmoid(x @ w.T))(torch.zeros(2, 3), torch.ones(4, 3))
        >>> torchops.inductor.matches()
        1
    """
    from torch._dynamo.utils import counters
    from torch._inductor import config

    from . import _inductor_pass

    hooks = options()
    switched_on = any(getattr(config, hook) is not chain for hook, chain in hooks.items())
    if switched_on:
        counters["inductor"][_inductor_pass.COUNTER] = 0
    for hook, chain in hooks.items():
        setattr(config, hook, chain)
    return Enabled(switched_on)


def disable() -> None:
    """Switches the pass off and gives the hooks back to what held them."""
    from torch._inductor import config

    from . import _inductor_pass

    for hook in _inductor_pass.HOOKS:
        value = getattr(config, hook)
        if isinstance(value, _inductor_pass.Chain):
            setattr(config, hook, value.former)


def matches() -> int:
    """How many places have been rewritten since the pass was switched on.

    A place counts once for each graph that holds it, a recompilation for other shapes being another graph. Graphs
    that Inductor loads from its cache count as if they had been compiled. The number is
    ``torch._dynamo.utils.counters["inductor"]["torchops_dense"]``, so clearing those counters clears it.
    """
    from torch._dynamo.utils import counters

    from . import _inductor_pass

    return counters["inductor"][_inductor_pass.COUNTER]


def options() -> dict[str, Any]:
    """The pass for one model alone: ``torch.compile(model, options=torchops.inductor.options())``.

    The dictionary may be extended with other options. It holds the passes that the hooks hold now, before ours.
    """
    from . import _inductor_pass

    return {hook: _inductor_pass.chained(hook) for hook in _inductor_pass.HOOKS}

"""Puts :func:`torchops.gate`, :func:`torchops.glu` and :func:`torchops.dense` into compiled models.

Switch it on before the model is compiled, which is when it runs first, and read what became of its gates::

    torchops.inductor.enable()
    model = torch.compile(model)
    model(x)
    for place in torchops.inductor.report():
        print(place)

A place is rewritten only where a measurement says that it is faster: a table has rows for a device, a dtype, numbers of
features and of rows, for inference or training, with the times of both (``python -m benchmarks inductor`` makes them).
Everywhere else the graph stays as it is, and the report says why.

The forms are ``v * sigmoid(linear(x))`` (also with ``v = linear(o)``), ``linear(x) * sigmoid(linear(x))`` and
``linear(x) * silu(linear(x))`` with the factors in either order, the two layers separate or halves of one (``chunk``,
``split``, ``F.glu``; slices in inference), and ``sigmoid(linear(x))`` alone. Residuals, masks and dropout around them
stay Inductor's.

The pass works on Inductor's joint graph, through the hooks ``joint_custom_pre_pass`` and ``post_grad_custom_pre_pass``
of ``torch._inductor.config``. Autocast, in-place operators, tensor subclasses and ``torch.func`` are resolved into
functional ATen operators there, so one pattern covers every spelling of a linear layer (``nn.Linear``, ``F.linear``,
``addmm``, ``x @ w.T + b``, ``x @ w``; two or more dimensions; with and without bias), for inference and for training.
In training, a place is rewritten together with its gradients, which the operator computes from its inputs (``dense``:
and from its result): the expressions that autograd made are evaluated at random points, and have to agree with those of
the operator.

Besides what the table leaves, a place is left as it is where

- the pre-activation or the gate has another user;
- what is added to the product is anything but one value per output feature, or ``addmm`` scales its terms;
- dtypes differ, or are not float32, float64, float16 or bfloat16;
- what is gated is computed by Inductor in the kernel that gates it (``norm(a) * sigmoid(linear(s))``): the operator
  would have to read it from memory;
- in training, some of the gradients are not asked for, or are computed in a way that is not recognised;
- the number of rows is a symbol of which it is not known that it lies in the range that was measured.

``torch._logging.set_logs(modules={"torchops.inductor": logging.INFO})`` shows each place as it is compiled.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._inductor import Place

__all__ = ["Enabled", "disable", "enable", "matches", "options", "report"]


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

    Example:

        >>> with torchops.inductor.enable():
        ...     y = torch.compile(lambda x, w: torch.sigmoid(x @ w.T))(torch.zeros(2, 3), torch.ones(4, 3))
        >>> [place.rewritten for place in torchops.inductor.report()]  # nobody measured that two rows are faster
        [False]
    """
    from torch._dynamo.utils import counters
    from torch._inductor import config

    from . import _inductor

    hooks = options()
    switched_on = any(getattr(config, hook) is not chain for hook, chain in hooks.items())
    if switched_on:
        counters["inductor"][_inductor.COUNTER] = 0
        _inductor.REPORT.clear()
    for hook, chain in hooks.items():
        setattr(config, hook, chain)
    return Enabled(switched_on)


def disable() -> None:
    """Switches the pass off and gives the hooks back to what held them.

    Example:

        >>> enabled = torchops.inductor.enable()
        >>> torchops.inductor.disable()
    """
    from torch._inductor import config

    from . import _inductor

    for hook in _inductor.HOOKS:
        value = getattr(config, hook)
        if isinstance(value, _inductor.Chain):
            setattr(config, hook, value.former)


def matches() -> int:
    """How many places have been rewritten since the pass was switched on.

    A place counts once for each graph that holds it, a recompilation for other shapes being another graph. Graphs
    that Inductor loads from its cache count as if they had been compiled. The number is
    ``torch._dynamo.utils.counters["inductor"]["torchops"]``, so clearing those counters clears it.

    Example:

        >>> with torchops.inductor.enable():
        ...     print(torchops.inductor.matches())
        0
    """
    from torch._dynamo.utils import counters

    from . import _inductor

    return counters["inductor"][_inductor.COUNTER]


def report() -> tuple[Place, ...]:
    """What became of each gate that the pass has seen since it was switched on, in the order of compilation.

    Each has ``operator``, ``line`` (of the user's code), ``rewritten`` and, where it was left as it is, ``reason``. A
    graph that Inductor loads from its cache is not looked at again, and adds nothing here; :func:`matches` counts it.

    Example:

        >>> with torchops.inductor.enable():
        ...     y = torch.compile(lambda x, w: torch.sigmoid(x @ w.T))(torch.zeros(2, 5), torch.ones(3, 5))
        >>> for place in torchops.inductor.report():
        ...     print(place.operator, place.rewritten)
        dense False
    """
    from . import _inductor

    return tuple(_inductor.REPORT)


def options() -> dict[str, Any]:
    """The pass for one model alone: ``torch.compile(model, options=torchops.inductor.options())``.

    The dictionary may be extended with other options. It holds the passes that the hooks hold now, before ours.

    Example:

        >>> function = torch.compile(lambda x: x + 1, options=torchops.inductor.options())
        >>> function(torch.zeros(2))
        tensor([1., 1.])
    """
    from . import _inductor

    return {hook: _inductor.chained(hook) for hook in _inductor.HOOKS}

"""Puts :func:`torchops.gate`, :func:`torchops.glu` and :func:`torchops.dense` into compiled models.

Switch it on before the model is compiled, which happens at its first call, and see what became of its gates::

    torchops.inductor.enable()
    model = torch.compile(model)
    model(x)
    for match in torchops.inductor.report():
        print(match)

A place is rewritten only if a measurement says that this is faster. A table has rows for a device, a dtype, numbers of
features and of rows, for inference or training, with both times (``python -m benchmarks inductor`` measures them).
Everywhere else the graph stays as it is, and the report says why.

The pass recognises ``v * sigmoid(linear(x))`` (also with ``v = linear(o)``), ``linear(x) * sigmoid(linear(x))`` and
``linear(x) * silu(linear(x))``, with the factors in either order, and ``sigmoid(linear(x))`` alone. The two layers may
be separate or halves of one (``chunk``, ``split``, ``F.glu``; slices in inference). Residuals, masks and dropout around
them are left to Inductor.

The pass works on Inductor's joint graph, through the hooks ``joint_custom_pre_pass`` and ``post_grad_custom_pre_pass``
of ``torch._inductor.config``. Autocast, in-place operators, tensor subclasses and ``torch.func`` are resolved into
functional ATen operators there, so one pattern covers every spelling of a linear layer (``nn.Linear``, ``F.linear``,
``addmm``, ``x @ w.T + b``, ``x @ w``; two or more dimensions; with and without bias), for inference and for training.
In training, a place is rewritten together with its gradients, which the operator computes from its inputs (``dense``:
and from its result). The pass evaluates the expressions that autograd made at random points, where they have to agree
with those of the operator.

Besides what the table doesn't cover, a place is left as it is if

- the pre-activation or the gate has another user;
- what is added to the product is anything but one value per output feature, or ``addmm`` scales its terms;
- dtypes differ, or are not float32, float64, float16 or bfloat16;
- Inductor computes the gated value in the kernel that gates it (``norm(a) * sigmoid(linear(s))``), while the operator
  would have to read it from memory;
- in training, some of the gradients are not needed, or are computed in a way that is not recognised;
- the number of rows is a symbol that is not known to lie in the range that was measured.

``torch._logging.set_logs(modules={"torchops.inductor": logging.INFO})`` shows each place as it is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torchops._core.report import Report

if TYPE_CHECKING:
    from torch import fx

__all__ = ["Enabled", "backend", "disable", "enable", "matches", "options", "report"]


class Enabled:
    """What :func:`enable` returns. Its ``with`` block switches the pass off at the end, if that call switched it on."""

    def __init__(self, switched_on: bool) -> None:
        self._switched_on = switched_on

    def __enter__(self) -> Enabled:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._switched_on:
            disable()


def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """The pass as a backend of ``torch.compile`` that generates no code: ``torch.compile(model, backend="torchops")``.

    It replaces every gate that the pass recognises, without asking the table, whose times are those of generated code.
    All else in the model runs by the kernels of eager mode, so it compiles in a fraction of the time that Inductor
    takes, and needs no compiler. TorchDynamo guards what the model decides by (attributes, dtypes, hooks, autocast, the
    classes of weights) and compiles again where that changes. ``module.compile(backend="torchops")`` compiles one
    module in place.

    Graphs are functional: where the model overwrites a tensor, the graph makes a new one, and copies it to an argument.

    Args:
        module: a graph of TorchDynamo.
        inputs: its arguments.

    Returns:
        A function that computes the same as ``module``.

    Example:

        >>> model = nn.Sequential(nn.Linear(3, 4), nn.Sigmoid())
        >>> y = torch.compile(model, backend="torchops")(torch.zeros(2, 3))
        >>> torchops.inductor.report()[-1].replaced
        True
    """
    from torchops.inductor.eager_backend import compiled

    return compiled(module, inputs)


def enable() -> Enabled:
    """Switches the pass on for everything that ``torch.compile`` and AOTInductor compile from now on.

    Graphs compiled before stay as they are (``torch.compiler.reset()`` discards them). Passes that are already in the
    two hooks are kept and run first. A pass that you set later replaces this one. Graphs stay cacheable on disk.

    In torch 2.13 and 2.14, Inductor's settings belong to a thread: other threads compile without the pass until they
    call this as well, or pass :func:`options` to ``torch.compile``. What :func:`matches` and :func:`report` return is
    of the whole process.

    Returns:
        An object for use in a ``with`` statement. The model has to run for the first time inside the block.

    Example:

        >>> with torchops.inductor.enable():
        ...     y = torch.compile(lambda x, w: torch.sigmoid(x @ w.T))(torch.zeros(2, 3), torch.ones(4, 3))
        >>> [match.replaced for match in torchops.inductor.report()]  # nobody measured that two rows are faster
        [False]
    """
    from torch._dynamo.utils import counters
    from torch._inductor import config

    from torchops.inductor import passes

    hooks = options()
    switched_on = any(getattr(config, hook) is not chain for hook, chain in hooks.items())
    if switched_on:
        counters["inductor"][passes.COUNTER] = 0
        passes.REPORT.clear()
    for hook, chain in hooks.items():
        setattr(config, hook, chain)
    return Enabled(switched_on)


def disable() -> None:
    """Switches the pass off and restores what the hooks held before.

    Example:

        >>> enabled = torchops.inductor.enable()
        >>> torchops.inductor.disable()
    """
    from torch._inductor import config

    from torchops.inductor import passes

    for hook in passes.HOOKS:
        value = getattr(config, hook)
        if isinstance(value, passes.Chain):
            setattr(config, hook, value.former)


def matches() -> int:
    """Returns how many places have been rewritten since the pass was switched on.

    A place counts once for each graph that holds it, and a recompilation for other shapes is another graph. Graphs
    that Inductor loads from its cache count as if they had been compiled. The number is
    ``torch._dynamo.utils.counters["inductor"]["torchops"]``, so clearing those counters clears it.

    Example:

        >>> with torchops.inductor.enable():
        ...     print(torchops.inductor.matches())
        0
    """
    from torch._dynamo.utils import counters

    from torchops.inductor import passes

    return counters["inductor"][passes.COUNTER]


def report() -> Report:
    """Returns what became of each gate that the pass has seen since it was switched on, in the order of compilation.

    Those that ``backend="torchops"`` has seen are there, too. Each is a :class:`torchops.Match` with ``kind``,
    ``name`` (the line of your code), ``replaced`` and, if it was left as it is, ``reason``. A graph that Inductor loads
    from its cache is not examined again and adds nothing here, but :func:`matches` counts it.

    Example:

        >>> with torchops.inductor.enable():
        ...     y = torch.compile(lambda x, w: torch.sigmoid(x @ w.T))(torch.zeros(2, 5), torch.ones(3, 5))
        >>> for match in torchops.inductor.report():
        ...     print(match.kind, match.replaced)
        dense False
    """
    from torchops.inductor import passes

    return Report(passes.REPORT)


def options() -> dict[str, Any]:
    """Returns options that apply the pass to one model: ``torch.compile(model, options=torchops.inductor.options())``.

    You may add other options to the dictionary. It includes the passes that the hooks hold now, before ours.

    Example:

        >>> function = torch.compile(lambda x: x + 1, options=torchops.inductor.options())
        >>> function(torch.zeros(2))
        tensor([1., 1.])
    """
    from torchops.inductor import passes

    return {hook: passes.chained(hook) for hook in passes.HOOKS}

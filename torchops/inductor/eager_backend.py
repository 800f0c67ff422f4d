"""The pass as a backend of ``torch.compile`` that generates no code.

AOTAutograd makes a joint graph of forward and backward, the pass puts operators into it, and both halves run as they
are, one kernel of ATen after the other, as in eager mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from functorch.compile import default_partition, make_boxed_func  # type: ignore[import-untyped]
from torch import fx
from torch._decomp import get_decompositions
from torch._dynamo.backends.common import aot_autograd

from torchops.inductor.graph import aten
from torchops.inductor.passes import CountMatches, RewriteGates

# What the pass knows in another spelling only. Everything else stays the kernel that eager mode runs.
_DECOMPOSITIONS = get_decompositions([aten.t, aten.transpose, aten.glu_backward])


def compiled(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """`module`, a graph of TorchDynamo, with operators."""
    return aot_autograd(
        fw_compiler=_forward,
        bw_compiler=_as_it_is,
        inference_compiler=_inference,
        partition_fn=_partition,
        decompositions=_DECOMPOSITIONS,
        keep_inference_input_mutations=True,
    )(module, inputs)


def _rewrite(module: fx.GraphModule) -> None:
    RewriteGates(generates_code=False)(module.graph)
    module.graph.lint()
    module.recompile()


def _partition(joint: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
    """Keeps between forward and backward what autograd would; what a checkpoint recomputes is recomputed."""
    _rewrite(joint)
    return default_partition(joint, inputs, **options)


def _inference(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
    _rewrite(module)
    return _forward(module, inputs)


def _forward(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
    CountMatches()(module.graph)
    return _as_it_is(module, inputs)


def _as_it_is(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """Runs the graph, and lets go of each argument after its last use."""
    if (boxed := getattr(fx.graph, "_BoxedCodeGen", None)) is None:
        return make_boxed_func(module.forward)
    module.graph.set_codegen(boxed())
    module.recompile()

    def run(arguments: list[Any]) -> Any:
        return module.forward(arguments)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run

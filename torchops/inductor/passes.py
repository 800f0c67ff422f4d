"""The passes, and the hooks of Inductor that run them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from torchops._core.devices import has_kernel
from torchops._core.report import Match
from torchops.inductor import table
from torchops.inductor.dense import Dense
from torchops.inductor.gates import MARK, Gated
from torchops.inductor.gradients import Gradients
from torchops.inductor.graph import Refusal, aten, known, where

try:
    from torch._inductor.custom_graph_pass import CustomInferenceAwareGraphPass
except ImportError:  # torch 2.11, whose hooks don't tell passes whether a graph is for inference

    class CustomInferenceAwareGraphPass(CustomGraphPass):  # type: ignore[no-redef]
        pass


log = logging.getLogger("torchops.inductor")

COUNTER = "torchops"
_OPERATORS = tuple(getattr(torch.ops.myops, name).default for name in ("dense", "gate", "_gate", "glu", "_glu"))


REPORT: list[Match] = []


def _uuid() -> Any:
    """Identifies this code, its table and the capabilities of the library: a graph must not be reused by another
    build."""
    files = tuple(str(path) for path in sorted(Path(__file__).parent.glob("*.py")))
    on_cuda = torch._C._dispatch_has_kernel_for_dispatch_key("myops::dense", "CUDA")
    return get_hash_for_files(files, extra=f"{on_cuda} {table.TABLE.identity()} {torch.ops.myops._kernel_path()}")


def _has_tangents(graph: fx.Graph) -> bool:
    return any(node.name.startswith("tangents") for node in graph.find_nodes(op="placeholder"))


class RewriteGates(CustomGraphPass):
    """For ``joint_custom_pre_pass``: rewrites every place in a graph of ATen operators that a row of the table
    covers. If no code is generated for the graph, everything in it is in memory, and the table says nothing about
    it."""

    def __init__(self, generates_code: bool = True) -> None:
        self.generates_code = generates_code

    def __call__(self, graph: fx.Graph) -> None:
        training = _has_tangents(graph)
        results = [
            n for n in graph.nodes if n.op == "call_function" and n.target in (aten.mul.Tensor, aten.glu.default)
        ]
        left: dict[fx.Node, Match] = {}
        done: set[fx.Node] = set()
        for result in results:
            if result in done or result.graph is not graph or result._erased:
                continue
            gated = Gated(result)
            if not gated.found:
                continue
            assert gated.gate is not None
            product = gated.gate.linear.product
            # The backward pass multiplies by the same gate again.
            if product in done:
                continue
            done.add(product)
            place = self._gated(gated)
            if place.replaced:
                _tell(place)
            else:
                left[product] = place
        for sigmoid in graph.find_nodes(op="call_function", target=aten.sigmoid.default):
            dense = Dense(sigmoid)
            if not dense.found or (dense.linear.product in done and dense.linear.product not in left):
                continue
            place = self._dense(dense, training)
            # The reason for the whole gate says more than the one for its sigmoid alone.
            former = left.pop(dense.linear.product, place)
            done.add(dense.linear.product)
            _tell(place if place.replaced else former)
        for place in left.values():
            _tell(place)

    def _gated(self, gated: Gated) -> Match:
        line = where(gated.result)
        try:
            is_used = any(
                u is not gated.result and u not in gated.private for node in gated.private for u in node.users
            )
            use = gated.use(is_used, self.generates_code)
            gradients = Gradients(gated, partial=not self.generates_code) if is_used else None
            self._ask(use, known(gated.result).device)
            gated.rewrite(gradients)
        except Refusal as reason:
            return Match(line, gated.operator, False, str(reason))
        return Match(line, gated.operator, True)

    def _dense(self, dense: Dense, training: bool) -> Match:
        line = where(dense.sigmoid)
        try:
            self._ask(dense.use(training), known(dense.sigmoid).device)
            dense.rewrite()
        except Refusal as reason:
            return Match(line, "dense", False, str(reason))
        return Match(line, "dense", True)

    def uuid(self) -> Any:
        return _uuid()

    def _ask(self, use: table.Use, device: torch.device) -> None:
        if not self.generates_code:
            if not has_kernel("myops::glu", device):
                raise Refusal(f"torchops has no kernels for {device.type}")
            return
        if reason := table.TABLE.reason_against(use):
            raise Refusal(reason)
        if device.type == "cuda" and not table.has_kernels(device):
            raise Refusal("this build of torchops has no GEMM kernels for the GPU")
        if (path := torch.ops.myops._kernel_path()) != "auto":
            raise Refusal(f"torchops.cuda.kernel_path is {path}")


def _tell(place: Match) -> None:
    REPORT.append(place)
    log.info("%s", place)


class CountMatches(CustomGraphPass):
    """For ``post_grad_custom_pre_pass``: counts the rewrites, in the counters of ``torch._dynamo.utils``.

    Inductor stores the increments of its counters from here on with a compiled graph, and adds them again if the graph
    comes from the cache. That doesn't include passes on the joint graph.
    """

    def __call__(self, graph: fx.Graph) -> None:
        # In a backward graph, operators of the forward pass are recomputations.
        if _has_tangents(graph):
            return
        for target in _OPERATORS:
            for node in graph.find_nodes(op="call_function", target=target):
                counters["inductor"][COUNTER] += MARK in node.meta

    def uuid(self) -> Any:
        return _uuid()


class Chain(CustomInferenceAwareGraphPass):
    """Runs the passes of one hook in turn: first what it already had, then ours."""

    def __init__(self, former: Any, ours: CustomGraphPass) -> None:
        self.former = former
        before = former if isinstance(former, (list, tuple)) else [] if former is None else [former]
        self.passes = (*before, ours)

    def __call__(self, graph: fx.Graph, is_inference: bool = False) -> None:
        for graph_pass in self.passes:
            if isinstance(graph_pass, CustomInferenceAwareGraphPass):
                graph_pass(graph, is_inference)
            else:
                graph_pass(graph)

    def uuid(self) -> Any:
        """None, which keeps graphs out of Inductor's cache, if a pass has nothing that identifies it."""
        uuids = [p.uuid() if isinstance(p, CustomGraphPass) else None for p in self.passes]
        return None if None in uuids else tuple(uuids)


HOOKS = {"joint_custom_pre_pass": RewriteGates, "post_grad_custom_pre_pass": CountMatches}


def chained(hook: str) -> Chain:
    """The pass that `hook` holds while ours is on."""
    value = getattr(config, hook)
    return value if isinstance(value, Chain) else Chain(value, HOOKS[hook]())

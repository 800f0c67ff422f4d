"""Finds ``sigmoid(linear(x))`` in a graph and replaces it by `dense`."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from torchops.inductor import table
from torchops.inductor.dense_gradients import DenseGradients
from torchops.inductor.gates import MARK, is_fused
from torchops.inductor.graph import Refusal, aten, emit, erase_unused, holds, known, out_in, size_node
from torchops.inductor.linear import Linear

_dense = torch.ops.myops.dense.default


class Dense:
    """The nodes of one ``sigmoid(x @ w + b)``. `found` is false if there is no product."""

    def __init__(self, sigmoid: fx.Node) -> None:
        self.sigmoid = sigmoid
        self.linear = Linear(sigmoid.args[0])  # type: ignore[arg-type]
        self.found = self.linear.found
        self.gradients: DenseGradients | None = None

    def use(self, training: bool) -> table.Use:
        """What `dense` would compute; refuses what it doesn't support."""
        linear, sigmoid = self.linear, self.sigmoid
        y, before = known(sigmoid), known(sigmoid.args[0])
        if any(len(node.users) != 1 for node in linear.nodes):
            raise Refusal("the pre-activation has another user")
        linear.check()
        # The arrangements above the sigmoid are kept, and must produce the strides that the sigmoid did.
        strides = zip(y.shape, before.stride(), y.stride(), strict=True)
        if not all(holds(n == 1) or holds(a == c) for n, a, c in strides):
            raise Refusal("the result would have other strides")
        if y.dtype != before.dtype:
            raise Refusal("dtypes, devices or layouts differ")
        operator = "dense"
        if training:
            try:
                self.gradients = DenseGradients(self)
            except Refusal:
                operator = "dense, its gradients left to Inductor"
        n_in, n_out = linear.features()
        device, capability = table.runs_on(y.device)
        dtype = table.dtype_of(y)
        inner = self.gradients.inner if self.gradients else ()
        fused = is_fused(sigmoid, inner)
        return table.Use(operator, device, capability, dtype, n_in, n_out, linear.rows(), training, fused)

    def rewrite(self) -> None:
        linear, sigmoid = self.linear, self.sigmoid
        graph, product, add = sigmoid.graph, linear.product, linear.add
        x, w = linear.x, linear.w
        with graph.inserting_before(add or product):
            if linear.batched and holds(known(product).shape[0] == 1):
                # einsum writes a product of matrices as a batch of one.
                x, w = emit(product, aten.squeeze.dim, x, 0), emit(product, aten.squeeze.dim, w, 0)
                dense = emit(product, aten.unsqueeze.default, self._emit(x, w), 0)
            else:
                dense = self._emit(x, emit(product, aten.select.int, w, 0, 0) if linear.batched else w)
        # The arrangements between product, addition and sigmoid now apply to the result, so they move behind the bias.
        for node in reversed(linear.below):
            dense.append(node)
        product.replace_all_uses_with(dense)
        if add is not None:
            add.replace_all_uses_with(linear.below[-1] if linear.below else dense)
        nodes = {product, sigmoid, *([add] if add is not None else [])}
        if self.gradients is not None:
            nodes |= self.gradients.nodes
            # Not batched, so exactly one node was emitted.
            top = self.gradients.top
            with graph.inserting_before(top):
                rows = size_node(top, x, 0)
            self.gradients.rewrite(dense, x, dense.args[1], rows)  # type: ignore[arg-type]
        sigmoid.replace_all_uses_with(sigmoid.args[0])  # type: ignore[arg-type]
        erase_unused([node for node in graph.nodes if node in nodes])

    def _emit(self, x: fx.Node, w: fx.Node) -> fx.Node:
        """Emits `dense` of x (..., in) and w (in, out)."""
        product, b = self.linear.product, self.linear.bias
        w = out_in(product, w)
        if b is not None and known(b).dim() > 1:
            b = emit(product, aten.squeeze.dims, b, list(range(known(b).dim() - 1)))
        arguments: tuple[Any, ...] = (x, w, b)
        dense = emit(product, _dense, *arguments)
        dense.meta[MARK] = "dense"
        return dense

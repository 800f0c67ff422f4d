"""A linear layer in a graph of ATen operators, in whatever way it was written."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from torchops._core.checks import DTYPES
from torchops.inductor.graph import (
    PERMUTATIONS,
    RESHAPES,
    Refusal,
    aten,
    contiguous,
    holds,
    is_call,
    keeps_order,
    known,
    same_sizes,
    source,
    val,
)

_PRODUCTS = {aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default}


def _is_product(node: fx.Node) -> bool:
    return is_call(node, _PRODUCTS)


def _is_one(node: fx.Node, *names: str) -> bool:
    return all(node.kwargs.get(name, 1) == 1 for name in names)


class Linear:
    """The nodes of ``x @ w + b`` with its arrangements, upwards from `result`. `found` is false if there is no product.

    `check` refuses anything more general; callers check who else uses the nodes.
    """

    def __init__(self, result: fx.Node) -> None:
        self.result = result
        self.add: fx.Node | None = None
        self.bias: fx.Node | None = None
        self.below: list[fx.Node] = []  # between product and addition
        top, self.above = source(result, RESHAPES | PERMUTATIONS)
        self.product = top
        if top.target is aten.add.Tensor:
            self._take_addition(top)
        self.found = _is_product(self.product)

    def _take_addition(self, add: fx.Node) -> None:
        for term, other in (add.args[:2], add.args[1::-1]):
            if not isinstance(term, fx.Node):
                continue
            product, below = source(term, RESHAPES | PERMUTATIONS)
            # If both terms are products, the one that is broadcast is the bias.
            before, after = val(term), val(add)
            if before is None or after is None:
                continue
            if _is_product(product) and same_sizes(before.shape, after.shape):
                self.product, self.below, self.add = product, below, add
                self.bias = other if isinstance(other, fx.Node) else None
                if self._is_bias(self.bias):
                    return

    @property
    def nodes(self) -> list[fx.Node]:
        """Product, arrangements and addition, top to bottom."""
        return [self.product, *self.below, *([self.add] if self.add else []), *self.above]

    @property
    def in_order(self) -> bool:
        """Whether the elements of the result, read row by row, are those of the product."""
        return all(map(keeps_order, (*self.below, *self.above)))

    @property
    def batched(self) -> bool:
        return known(self.product).dim() == 3

    @property
    def x(self) -> fx.Node:
        return self.product.args[-2]  # type: ignore[return-value]

    @property
    def w(self) -> fx.Node:
        """The weight, (in, out), or a batch of these."""
        return self.product.args[-1]  # type: ignore[return-value]

    def _is_bias(self, bias: fx.Node | None) -> bool:
        """Whether it has one value per column of the product."""
        b, product = val(bias), val(self.product)
        return (
            b is not None
            and product is not None
            and b.dim() >= 1
            and holds(b.shape[-1] == product.shape[-1])
            and all(holds(n == 1) for n in b.shape[:-1])
        )

    def check(self) -> None:
        product = self.product
        *bias, x, w = product.args
        z, xv, wv, *_ = [known(node) for node in (product, x, w, *self.nodes)]
        if self.bias in (product, *self.below):
            raise Refusal("the pre-activation has another user")
        if not _is_one(product, "alpha", "beta"):
            raise Refusal("addmm scales its terms")
        if bias:
            if self.add is not None:
                raise Refusal("something is added to a layer that has its bias")
            self.bias = bias[0]  # type: ignore[assignment]
        if self.add is not None:
            if not _is_one(self.add, "alpha"):
                raise Refusal("the bias is scaled")
            if not all(map(keeps_order, self.below)):
                raise Refusal("the bias does not belong to the columns of the product")
        if (bias or self.add is not None) and not self._is_bias(self.bias):
            raise Refusal("what is added is not one value per output feature")
        b, result = val(self.bias), known(self.result)
        operands = [xv, wv, result] if b is None else [xv, wv, result, b]
        if any(t.dtype != z.dtype or t.device != z.device or t.layout != torch.strided for t in operands):
            raise Refusal("dtypes, devices or layouts differ")
        if z.dtype not in DTYPES:
            raise Refusal(f"there is no kernel for {z.dtype}")
        if z.dim() == 3 and not holds(z.shape[0] == 1) and not holds(wv.stride(0) == 0):
            raise Refusal("each matrix of the batch has its own weight")
        if z.dim() == 3 and not holds(z.shape[0] > 0):
            raise Refusal("the batch may hold no matrices")
        if not contiguous(z):
            raise Refusal("the result would have other strides")

    def features(self) -> tuple[Any, Any]:
        """The numbers of input and output features."""
        return known(self.x).shape[-1], known(self.product).shape[-1]

    def rows(self) -> Any:
        z: Tensor = known(self.product)
        return z.shape[0] if z.dim() == 2 else z.shape[0] * z.shape[1]

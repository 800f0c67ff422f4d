"""Finds ``v * sigmoid(linear(x))`` and ``linear(x) * act(linear(x))`` in a graph and replaces them by `gate` or
`glu`."""

from __future__ import annotations

import operator
from collections.abc import Container
from typing import Any

import torch
from torch import Tensor, fx

from torchops.inductor import table
from torchops.inductor.expressions import (
    ACTIVATIONS,
    Evaluator,
    UnknownError,
    Values,
    formula,
    points,
    root,
)
from torchops.inductor.gradients import Gradients
from torchops.inductor.graph import (
    PERMUTATIONS,
    VIEWS,
    Refusal,
    as_rows,
    aten,
    contiguous,
    emit,
    erase_unused,
    holds,
    is_call,
    key,
    known,
    out_in,
    same_sizes,
    size_node,
    val,
)
from torchops.inductor.linear import Linear
from torchops.inductor.terms import Term, term_of

_gate = torch.ops.myops.gate.default
_glu = torch.ops.myops.glu.default
_glu_with_products = torch.ops.myops._glu.default
_gate_with_product = torch.ops.myops._gate.default
_keeps_products = torch.ops.myops._keeps_products.default


# --- the pattern -----------------------------------------------------------------------------------------------------


class Gated:
    """One product of a gate and a value, `result`. `found` is false if there is none."""

    def __init__(self, result: fx.Node) -> None:
        self.result = result
        self.gate: Term | None = None
        self.value: Term | None = None
        self.v: fx.Node | None = None
        self.activation = ""
        self.private: set[fx.Node] = set()
        self.operator = ""
        self.sizes: list[Any] = []
        self.columns = 0
        if result.target is aten.glu.default:
            self._take_glu()
        elif is_call(result, {aten.mul.Tensor}) and len(result.all_input_nodes) == 2:
            a, b = result.args
            if not self._take(a, b):
                self._take(b, a)
        self.found = self.gate is not None

    def _take_glu(self) -> None:
        whole: Any = self.result.args[0]
        linear, value = Linear(whole), val(whole)
        dim = self.result.args[1] if len(self.result.args) > 1 else -1
        if not linear.found or not linear.in_order or value is None or dim not in (-1, value.dim() - 1):
            return
        n = value.shape[-1]
        if not isinstance(n, int) or not holds(n == known(linear.product).shape[-1]):
            return
        nodes = set(linear.nodes)
        self.value, self.gate = Term(whole, linear, 0, n // 2, nodes), Term(whole, linear, n // 2, n, nodes)
        self.activation, self.operator, self.private = "sigmoid", "glu sigmoid", nodes

    def _take(self, gate: Any, other: Any) -> bool:
        """Whether `gate` is an activation of a linear layer. `other` is what it is multiplied by."""
        terms: list[Term] = []
        inner: set[fx.Node] = set()

        def leaf(node: fx.Node) -> Values | None:
            term = term_of(node)
            if term is None:
                inner.add(node)
                return None
            if terms and not terms[0].same(term):
                raise UnknownError(node)
            terms.append(term)
            return points(0)

        evaluate = Evaluator(leaf)
        for name, function in ACTIVATIONS.items():
            if evaluate.is_formula(gate, formula(function, points(0))):
                self.activation = name
        if not self.activation or not terms:
            self.activation = ""
            return False
        # u * sigmoid(u) is SiLU, so it is the activation of another product.
        value = term_of(root(other))
        if value is not None and value.same(terms[0]):
            self.activation = ""
            return False
        glu = value is not None and _are_factors(value, terms[0])
        if not glu and self.activation != "sigmoid":
            self.activation = ""
            return False
        self.gate, self.private = terms[0], inner.union(*(term.nodes for term in terms))
        if glu:
            assert value is not None
            self.value, self.operator = value, f"glu {self.activation}"
            while other is not value.node:
                self.private.add(other)
                other = other.args[0]
            self.private |= value.nodes
        else:
            self.v, self.operator = other, "gate"
        return True

    def use(self, training: bool, generates_code: bool) -> table.Use:
        """What the operator would compute; refuses what it doesn't support."""
        assert self.gate is not None
        y = known(self.result)
        for term in filter(None, (self.gate, self.value)):
            term.linear.check()
            if term.linear.batched and not holds(known(term.linear.product).shape[0] == 1):
                raise Refusal("x is a batch of matrices, which would have to be copied to rows")
        linear = self.gate.linear
        z = known(linear.product)
        n_in, n_out = linear.features()
        if self.gate.end is not None:
            n_out = self.gate.end - self.gate.begin
            if linear.batched:
                raise Refusal("each matrix of the batch has its own weight")
        if not isinstance(n_in, int) or not isinstance(n_out, int):
            raise Refusal("the number of features is not known while compiling")
        if y.dtype != z.dtype or y.device != z.device:
            raise Refusal("dtypes, devices or layouts differ")
        operands = [known(n) for n in self.result.all_input_nodes]
        if not is_call(self.result, {aten.glu.default}) and not all(same_sizes(t.shape, y.shape) for t in operands):
            raise Refusal("what is gated has another shape than the gate")
        if self.v is not None:
            self._check_v(y, generates_code)
        if not contiguous(y):
            raise Refusal("the result would have other strides")
        self.columns = n_out
        self.sizes = self._sizes(y)
        device, capability = table.runs_on(y.device)
        dtype = table.dtype_of(y)
        return table.Use(
            self.operator, device, capability, dtype, n_in, n_out, linear.rows(), training, is_fused(self.result)
        )

    def _check_v(self, y: Tensor, generates_code: bool) -> None:
        assert self.v is not None
        v = known(self.v)
        if v.dtype != y.dtype or v.device != y.device or v.layout != torch.strided:
            raise Refusal("dtypes, devices or layouts differ")
        if not contiguous(v):
            raise Refusal("what is gated would have to be copied to rows")
        if generates_code and not is_in_memory(self.v):
            raise Refusal("what is gated is computed by Inductor, in the kernel that gates it")

    # --- its replacement ---------------------------------------------------------------------------------------------

    def rewrite(self, gradients: Gradients | None) -> None:
        assert self.gate is not None
        result, like = self.result, self.gate.linear.product
        with result.graph.inserting_before(result):
            x, w = self._operands(self.gate)
            b = self._bias(self.gate)
            rows, y = size_node(like, x, 0), known(result)
            products: list[fx.Node] = []
            keeps = gradients is not None and _keeps_products(known(x), known(w), self.v is None)
            if self.v is not None:
                arguments: tuple[Any, ...] = (as_rows(like, self.v, rows, self.columns), x, w, b)
                plain, keeping, activation = _gate, _gate_with_product, {}
            else:
                assert self.value is not None
                _, value_w = self._operands(self.value)
                arguments = (x, value_w, w, self._bias(self.value), b)
                plain, keeping, activation = _glu, _glu_with_products, {"activation": self.activation}
            call = new = emit(like, keeping if keeps else plain, *arguments, **activation)
            if keeps:
                results = range(len(keeping._schema.returns))
                new, *products = (emit(like, operator.getitem, call, i) for i in results)
            call.meta[MARK] = self.operator.split()[0]
            arranged = new if same_sizes(known(new).shape, y.shape) else emit(like, aten.view.default, new, self.sizes)
        if gradients is not None:
            gradients.rewrite(arguments, rows, products)
        result.replace_all_uses_with(arranged)
        nodes = {result, *self.private, *(gradients.nodes if gradients else ())}
        erase_unused([node for node in result.graph.nodes if node in nodes])

    def _operands(self, term: Term) -> tuple[fx.Node, fx.Node]:
        """x of shape (rows, in), and w of shape (out, in)."""
        linear = term.linear
        like, x, w = linear.product, linear.x, linear.w
        if linear.batched:
            x, w = emit(like, aten.squeeze.dim, x, 0), emit(like, aten.squeeze.dim, w, 0)
        w = out_in(like, w)
        return x, w if term.end is None else emit(like, aten.slice.Tensor, w, 0, term.begin, term.end)

    def _bias(self, term: Term) -> fx.Node | None:
        b, like = term.linear.bias, term.linear.product
        if b is None:
            return None
        if known(b).dim() > 1:
            b = emit(like, aten.squeeze.dims, b, list(range(known(b).dim() - 1)))
        return b if term.end is None else emit(like, aten.slice.Tensor, b, 0, term.begin, term.end)

    def _sizes(self, y: Tensor) -> list[Any]:
        """The shape of the result as arguments of a node. Symbols come from the views that made it."""
        if all(isinstance(n, int) for n in y.shape) or (y.dim() == 2 and holds(y.shape[-1] == self.columns)):
            return list(y.shape)
        for node in self.private:
            value = val(node)
            if is_call(node, VIEWS) and value is not None and same_sizes(value.shape[:-1], y.shape[:-1]):
                sizes = node.args[1]
                if isinstance(sizes, (list, tuple)) and len(sizes) == y.dim() and isinstance(y.shape[-1], int):
                    return [*sizes[:-1], y.shape[-1]]
        raise Refusal("the result has an unknown number of dimensions")


def _are_factors(value: Term, gate: Term) -> bool:
    """Whether both are computed from the same x with weights of the same shape: by two layers, or by the halves of
    one."""
    if value.linear.product is gate.linear.product:
        columns = known(gate.linear.product).shape[-1]
        halves = sorted([(value.begin, value.end), (gate.begin, gate.end)], key=str)
        return halves == sorted([(0, columns // 2), (columns // 2, columns)], key=str)
    return (
        value.end is None
        and gate.end is None
        and not value.linear.batched
        and not gate.linear.batched
        and key(value.linear.x) == key(gate.linear.x)
        and same_sizes(known(value.linear.w).shape, known(gate.linear.w).shape)
    )


MARK = "torchops"


# --- what surrounds it -----------------------------------------------------------------------------------------------

# What Inductor otherwise does without computing, by indexing memory.
_FREE = VIEWS | PERMUTATIONS | {aten.alias.default, aten.expand.default}
_ATEN_KERNELS = {
    *(aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default, aten.convolution.default),
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def is_kernel(node: fx.Node) -> bool:
    """Whether Inductor calls a kernel for the node, which reads and writes memory, instead of generating code."""
    if node.op in ("placeholder", "output"):
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return node.target in _ATEN_KERNELS or node.target.namespace not in ("aten", "prims")


def is_in_memory(node: fx.Node) -> bool:
    """Whether the value is in memory before it is gated."""
    while is_call(node, _FREE) or (is_call(node, {aten.clone.default}) and contiguous(known(node.args[0]))):
        node = node.args[0]  # type: ignore[assignment]
    if is_call(node, {operator.getitem}):
        node = node.args[0]  # type: ignore[assignment]
    # The kernel of a product also adds its bias.
    if node.target is aten.add.Tensor:
        linear = Linear(node)
        return linear.found and linear.add is node
    return node.op == "get_attr" or is_kernel(node)


def is_fused(node: fx.Node, besides: Container[fx.Node] = ()) -> bool:
    """Whether Inductor would compute `node` inside the generated code of one of its users, other than those in
    `besides`."""
    waiting = [node]
    users: list[fx.Node] = []
    while waiting:
        for user in waiting.pop().users:
            if user in besides:
                continue
            (waiting if is_call(user, _FREE) else users).append(user)
    return not all(map(is_kernel, users))

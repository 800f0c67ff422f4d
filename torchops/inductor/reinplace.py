"""In-place operators in graphs that Inductor compiles: which of them may work in place.

Functionalization records ``softmax_(x)`` as ``y = softmax(x)``, after which everything reads ``y``. If ``x`` is an
input of the graph, ``x.copy_(y)`` stands at its end (``overwrite_with_new()`` in src/autograd/recipe.h). The graph is
right, but needs memory for both. So this module registers a lowering for each functional operator: it runs the in-place
operator on the memory of its argument where no reader of the old value is left, and the functional operator elsewhere.
No reader is left if

- the argument is a tensor of the graph's own, made by an operator that returns no alias, or an input that the graph
  overwrites at its end with what these operators, one after the other, make of it, and that it does not return;
- nothing else in the graph reads it. A view of all of it may stand between, if nothing else reads the view.

Inductor would also find cases with readers before the operator ("reinplacing"), but wrong ones among them: it moves
reads of an input behind an operator that overwrites it (pytorch issues 197829 and 198031). Here, there is no read that
could move.

A functional call profits, too: ``torchops.softmax(scores)`` takes no memory if nothing else reads ``scores``.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import Node

_myops = torch.ops.myops

# Views of a whole tensor, in any order of its dimensions.
_VIEWS = ("alias", "detach", "permute", "reshape", "squeeze", "t", "transpose", "unsqueeze", "view", "_unsafe_view")


@functools.cache
def _pairs() -> dict[Any, Any]:
    """From each functional operator to the one that overwrites its first argument."""
    names = {
        **{name: f"{name}_" for name in ("gate", "layer_norm", "_layer_norm", "sigmoid", "softmax", "square_matmul")},
        "_add_transition": "add_transition_",
        "_triangle_multiplicative_update": "_triangle_multiplicative_update_",
        "_triangle_attention_update": "_triangle_attention_update_",
    }
    return {getattr(_myops, name).default: getattr(_myops, in_place).default for name, in_place in names.items()}


def register() -> None:
    """Register the lowerings, once ``torch._inductor.lowering`` is imported."""
    from torch._inductor import lowering
    from torch._library.utils import get_layout_constraint_tag

    for functional, in_place in _pairs().items():
        tag = get_layout_constraint_tag(functional, with_default=True)
        lowering.make_fallback(functional, layout_constraint=lowering.tag_to_layout_constraint(tag), warn=False)
        lowering.lowerings[functional] = _Lowering(functional, in_place, lowering.lowerings[functional])


class _Lowering:
    """The lowering of one functional operator. Of several results, the first is the new value of the first argument."""

    def __init__(self, functional: Any, in_place: Any, out_of_place: Callable[..., Any]) -> None:
        self.in_place, self.out_of_place = in_place, out_of_place
        self.arguments = functional._schema.arguments
        self.returns_more = len(functional._schema.returns) > 1

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from torch._inductor.lowering import fallback_handler
        from torch._inductor.virtualized import V

        given = {**{a.name: value for a, value in zip(self.arguments, args, strict=False)}, **kwargs}
        target = given[self.arguments[0].name]
        # add_transition_() and its like add to their argument. So does the functional operator if it is asked to.
        add_residual = given.get("add_residual", not any(a.name == "add_residual" for a in self.arguments))
        if not add_residual or not _is_last_reader(V.graph, V.graph.current_node, target):
            return self.out_of_place(*args, **kwargs)
        passed = [a for a in self.in_place._schema.arguments if a.name in given]
        others = fallback_handler(self.in_place, add_to_fallback_set=False)(
            *(given[a.name] for a in passed if not a.kwarg_only),
            **{a.name: given[a.name] for a in passed if a.kwarg_only},
        )
        if not self.returns_more:
            return target
        return (target, *(others if isinstance(others, (list, tuple)) else [others]))


def _is_last_reader(graph: Any, node: Node, target: Any) -> bool:
    """Whether ``node``, whose first argument has been lowered to ``target``, may overwrite it."""
    from torch._inductor import ir

    first = node.args[0] if node.args else None
    if not isinstance(first, Node) or _count(node, first) != 1 or not _same_metadata(node, first):
        return False
    chain = [first]  # views of one another, down to what has been made
    while _is_view(chain[-1]):
        chain.append(chain[-1].args[0])  # type: ignore[arg-type]
    made = chain[-1]
    readers = [set(part.users) - {user} for part, user in zip(chain, [node, *chain], strict=False)]
    if made.op == "placeholder":
        if len(chain) > 1 or not _ends_in(node, made, readers[0]):
            return False
    elif any(readers) or not _is_new(made):
        return False
    target.realize()
    memory = _memory(target)
    if not isinstance(memory, ir.Buffer):
        return False
    if made.op == "placeholder":
        return memory is _memory(graph.env[made])
    if isinstance(memory, ir.InputBuffer):  # which only an operator before this one can have put there
        source = made.args[0] if made.target is operator.getitem else made
        return isinstance(source, Node) and source.target in _pairs()
    # A constant is not the graph's own, and neither is a part of a concatenation (NonOwningLayout).
    if isinstance(memory, ir.ConstantBuffer) or type(memory.layout) not in (ir.FlexibleLayout, ir.FixedLayout):
        return False
    # A lowering may have returned its argument as it is, as a conversion to the same dtype does.
    if any(_memory(value) is memory for part, value in _values(graph.env) if part not in chain):
        return False
    # Reads of the same memory that are still to be computed, by a user of that argument.
    readings = graph.name_to_users.get(memory.get_name(), ())
    return all(isinstance(_memory(reading), ir.Buffer) for reading in readings)


def _count(node: Node, argument: Node) -> int:
    count = 0

    def add(each: Node) -> Node:
        nonlocal count
        count += each is argument
        return each

    torch.fx.map_arg((node.args, node.kwargs), add)
    return count


def _same_metadata(node: Node, argument: Node) -> bool:
    """Whether the new value has the dtype, the sizes and the strides of the old one."""
    old, new = argument.meta.get("val"), node.meta.get("val")
    if isinstance(new, (list, tuple)):
        new = new[0]
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
        return False
    return old.dtype == new.dtype and old.shape == new.shape and old.stride() == new.stride()


def _is_view(node: Node) -> bool:
    target = node.target
    return (
        isinstance(target, torch._ops.OpOverload)
        and target.namespace == "aten"
        and target._schema.name.removeprefix("aten::") in _VIEWS
        and isinstance(node.args[0], Node)
    )


def _is_new(node: Node) -> bool:
    """Whether ``node`` makes its value, according to the schema of its operator."""
    if node.target is operator.getitem and isinstance(node.args[0], Node):
        node = node.args[0]
    return isinstance(node.target, torch._ops.OpOverload) and all(
        returned.alias_info is None for returned in node.target._schema.returns
    )


def _ends_in(node: Node, placeholder: Node, others: set[Node]) -> bool:
    """Whether nothing but ``node`` reads the input ``placeholder``, and the graph overwrites that in the end with what
    ``node`` and others of these operators, one after the other, make of it."""
    if len(others) != 1:
        return False
    (copy,) = others
    if copy.target is not torch.ops.aten.copy_.default or copy.args[0] is not placeholder:
        return False
    pairs = _pairs()
    while True:
        value = node
        if len(node.target._schema.returns) > 1:  # type: ignore[union-attr]
            firsts = [user for user in node.users if user.target is operator.getitem and user.args[1] == 0]
            if len(firsts) != 1:
                return False
            (value,) = firsts
        if copy.args[1] is value:
            return not _is_returned(value)
        if len(value.users) != 1:
            return False
        (node,) = value.users
        if node.target not in pairs or not node.args or node.args[0] is not value or _count(node, value) != 1:
            return False


def _is_returned(node: Node) -> bool:
    """Whether the graph returns ``node`` or a view of it: a value that autograd saves, or of which Inductor has dropped
    a clone. It must not be the memory of an input, which the caller may overwrite. (A graph that returns the input
    itself returns the ``copy_``.)"""
    return any(
        user.op == "output" or (_returns_alias(user) and _is_returned(user))
        for user in node.users
        if user.target is not torch.ops.aten.copy_.default
    )


def _returns_alias(node: Node) -> bool:
    """Whether the result may share memory with an argument, according to the schema of its operator."""
    target = node.target
    if target is operator.getitem:
        return True
    return not isinstance(target, torch._ops.OpOverload) or any(r.alias_info for r in target._schema.returns)


def _memory(value: Any) -> Any:
    """What holds the elements of a lowered tensor: an ``ir.Buffer``, if they have been computed."""
    from torch._inductor import ir

    while isinstance(value, (ir.MutableBox, ir.BaseView)):
        value = value.data
    return value


def _values(env: dict[Node, Any]) -> Iterator[tuple[Node, Any]]:
    for node, lowered in env.items():
        for value in lowered if isinstance(lowered, (list, tuple)) else (lowered,):
            yield node, value

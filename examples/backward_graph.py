"""Draws the backward graph of a small model, for docs/in_place_and_autograd.md: `make graph`.

Autograd's graph has a node for each operator whose gradient will be computed. Those of torchops are C++ nodes, one for
a whole operator: the product, the bias and the sigmoid of a gate are three nodes in PyTorch and one here. An operator
that has overwritten a tensor is a node of that tensor's history like any other.

Needs torchviz (group `graph`) and the program dot of Graphviz.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from pathlib import Path

import graphviz
import torch
import torch.nn.functional as F
import torchviz
from torch import Tensor, nn
from torch.autograd.graph import Node

import torchops

PICTURE = Path(__file__).parents[1] / "docs/images/backward_graph.svg"
OURS, LEAF = "#d95f02", "#a6bddb"


class Block(nn.Module):
    """Attention's last steps in small: scores are overwritten by their softmax, and what they weigh is gated."""

    def __init__(self, features: int = 8) -> None:
        super().__init__()
        self.value = nn.Linear(features, features)
        self.gate = torchops.nn.Gate(features, features)

    def forward(self, x: Tensor) -> Tensor:
        scores = x @ x.T
        torchops.softmax_(scores)
        return self.gate(scores @ self.value(x), x)


def in_pytorch(model: Block, x: Tensor) -> Tensor:
    """What `model(x)` computes, in PyTorch's operators."""
    weighted = torch.softmax(x @ x.T, -1) @ model.value(x)
    return weighted * torch.sigmoid(F.linear(x, model.gate.weight, model.gate.bias))


def nodes(root: Node) -> dict[int, Node]:
    """The nodes of a backward graph, by the identity of their Python objects: that of torchviz's names."""
    found = {id(root): root}
    waiting = [root]
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is not None and id(node) not in found:
                found[id(node)] = node
                waiting.append(node)
    return found


def label(node: Node) -> str:
    """The name of a node, and of what the library has made a node of, that of its operator."""
    ours = re.fullmatch(r".*<torchops::autograd::(?:\(anonymous namespace\)::)?(.*)>", node.name())
    return f"torchops: {ours[1]}" if ours else node.name().removesuffix("Backward0")


def graph() -> graphviz.Digraph:
    """The backward graphs of the model and of the same in PyTorch's operators, side by side."""
    torch.manual_seed(0)
    model, x = Block(), torch.randn(5, 8, requires_grad=True)
    leaves = {**dict(model.named_parameters()), "x": x}
    both = graphviz.Digraph(graph_attr={"rankdir": "TB", "nodesep": "0.15", "ranksep": "0.25"})
    both.attr(
        "node", shape="box", style="filled", fillcolor="#eeeeee", color="#888888", fontname="sans-serif", fontsize="11"
    )
    for title, y in (("with torchops", model(x)), ("in PyTorch's operators", in_pytorch(model, x))):
        assert y.grad_fn is not None
        known = nodes(y.grad_fn)
        # Drawn from the result down to the leaves, as backward goes. Leaves stand for their AccumulateGrad.
        with both.subgraph(name=f"cluster {title}", graph_attr={"label": title, "color": "#cccccc"}) as part:
            numbers = {key: f"{title} {i}" for i, key in enumerate(known)}
            for line in torchviz.make_dot(y, params=leaves).body:
                if edge := re.fullmatch(r"\t(\d+) -> (\d+)\n", line):
                    source, target = int(edge[1]), int(edge[2])
                    if source in known and target in known:
                        part.edge(numbers[target], numbers[source])
            for key, node in known.items():
                name = label(node)
                variable = getattr(node, "variable", None)
                if variable is not None:
                    leaf = next(name for name, tensor in leaves.items() if tensor is variable)
                    part.node(numbers[key], leaf, fillcolor=LEAF)
                elif name.startswith("torchops: "):
                    part.node(numbers[key], name, fillcolor=OURS, fontcolor="white")
                else:
                    part.node(numbers[key], name)
    return both


def main() -> int:
    """Draws; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=PICTURE, help="default: where the page shows it")
    options = parser.parse_args()
    if shutil.which("dot") is None:
        print("backward_graph: dot is needed: install graphviz (apt install graphviz)", file=sys.stderr)
        return 2
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_bytes(graph().pipe(format=options.output.suffix[1:]))
    print(f"Picture: {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

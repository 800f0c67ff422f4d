"""Hooks, grad modes and checkpointing around operators that overwrite their argument, in one program.

    python examples/hooks_modes_checkpoints.py

Each part prints what it has seen. The operators behave as PyTorch's own in-place operators do: autograd, not torchops,
determines what a hook gets, what is saved, and what runs again.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import torchops

OPS = torch.ops.myops


class Block(nn.Module):
    """A sigmoid layer whose result is overwritten by its softmax."""

    def __init__(self, features: int = 8) -> None:
        super().__init__()
        self.dense = torchops.nn.Dense(features, features)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.dense(x) * 3
        torchops.softmax_(scores)
        return scores


def hooks() -> None:
    """Hooks of tensors see gradients, those of modules what goes in and out, those of saved tensors what is kept."""
    torch.manual_seed(0)
    model, x = Block(), torch.randn(4, 8, requires_grad=True)

    seen: list[str] = []
    scores = model.dense(x) * 3
    scores.register_hook(lambda grad: seen.append("before softmax_"))
    torchops.softmax_(scores)
    # A hook belongs to the value that the tensor had: this one sees the gradient of the softmax, and runs first.
    scores.register_hook(lambda grad: seen.append("after softmax_"))
    model.dense.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append("the weight has its gradient"))
    scores.square().sum().backward()
    print("gradients:", ", ".join(seen))

    shapes: list[str] = []

    def note(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        shapes.append(f"{type(module).__name__} {tuple(out.shape)}")

    with model.dense.register_forward_hook(note):
        model(x)
    print("modules:", *shapes)

    # What is kept for backward is kept in bfloat16, in half the memory, and the gradient is rounded with it.
    kept: list[Tensor] = []

    def pack(t: Tensor) -> tuple[torch.dtype, Tensor]:
        kept.append(t)
        return t.dtype, t.bfloat16()

    with saved_tensors_hooks(pack, lambda packed: packed[1].to(packed[0])):
        y = model(x)
    (rounded,) = torch.autograd.grad(y.square().sum(), x)
    (exact,) = torch.autograd.grad(model(x).square().sum(), x)
    print(f"saved: {len(kept)} tensors;", "close:", torch.allclose(rounded, exact, atol=2e-2))


def modes() -> None:
    """What is recorded, and what a version counter says."""
    torch.manual_seed(0)
    model, x = Block(), torch.randn(4, 8)

    y = model(x)
    with torch.no_grad():
        z = model(x)
        with torch.enable_grad():
            nested = model(x)
    with torch.inference_mode():
        t = model(x)
    print("recorded:", y.requires_grad, z.requires_grad, nested.requires_grad, t.requires_grad)

    # The version tells autograd that a saved value is gone. Tensors of inference mode have none.
    z = torch.randn(4, 8)
    before = z._version
    torchops.softmax_(z)
    print("version:", before, z._version, "inference tensor:", t.is_inference())

    leaf = torch.randn(4, 8, requires_grad=True)
    try:
        torchops.softmax_(leaf)
    except RuntimeError as error:
        print("a leaf:", str(error).splitlines()[0])
    with torch.no_grad():
        torchops.softmax_(leaf)  # as an initialisation, say
    w = torch.randn(4, 8, requires_grad=True)
    y = w * 2
    loss = (y * y).sum()  # keeps y
    torchops.softmax_(y)
    try:
        loss.backward()
    except RuntimeError as error:
        print("a saved value:", str(error).partition(" by ")[0])


class Calls(TorchDispatchMode):
    """Counts the operators of torchops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "myops":
            self.count[func.name().removeprefix("myops::")] += 1
        return func(*args, **(kwargs or {}))


def checkpoints() -> None:
    """A region keeps only its input, and runs again in backward; a policy says what else is kept."""
    torch.manual_seed(0)
    model, x = Block(), torch.randn(4, 8, requires_grad=True)
    contexts = partial(create_selective_checkpoint_contexts, [OPS.dense.default])
    expected = torch.autograd.grad(model(x).square().sum(), x)
    for name, region in (
        ("nothing", model),
        ("all", partial(checkpoint, model, use_reentrant=False)),
        ("all but dense", partial(checkpoint, model, use_reentrant=False, context_fn=contexts)),
    ):
        with Calls() as calls:
            grads = torch.autograd.grad(region(x).square().sum(), x)
        torch.testing.assert_close(grads, expected)
        # While a mode watches, softmax_ is what torch.compile would see: softmax, and a copy.
        print(f"checkpointing {name}: dense ran {calls.count['dense']} times, softmax {calls.count['softmax']}")


def main() -> None:
    """Runs all parts."""
    hooks()
    modes()
    checkpoints()


if __name__ == "__main__":
    main()

"""Whether a module computes what its replacement computes, decided by computing both."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torchops.adapters.triangle import TriangleUpdate

# Float32, a few additions in another order; whoever computes something else is off by far more.
TOLERANCE = 1e-4
# A value of size 1 and one at which eps decides what a layer norm makes of the product: the norm would hide any factor.
SCALES = (1.0, 0.05)


def probe(module: nn.Module, make: Callable[[nn.Module], TriangleUpdate]) -> str | None:
    """Why `make(module)` may not take the place of `module`; None if both compute the same.

    They are compared on copies on the CPU in float32, with random parameters (fresh modules end in a projection by 0),
    on a batch of 2 with a mask that is neither symmetric nor binary and without one, in training and in evaluation,
    with gradients; and for the further arguments in `probes()`, with what they leave in `x`.
    """
    try:
        with _plain_float32():
            generator = torch.Generator("cpu").manual_seed(0)
            original = copy.deepcopy(module).to_empty(device="cpu").float()
            for name, parameter in original.named_parameters():
                parameter.requires_grad_().data.copy_(_random_parameter(name, parameter, generator))
            return _difference(original, make(original), generator)
    except Exception as error:  # whatever code of others raises
        return f"computing it to compare raised {type(error).__name__}: {error}"


def _random_parameter(name: str, like: Tensor, generator: torch.Generator) -> Tensor:
    value = torch.randn(like.shape, generator=generator, device="cpu")
    if like.dim() > 1:
        return value / like.shape[-1] ** 0.5
    return 0.3 * value + name.endswith("weight")


@contextmanager
def _plain_float32() -> Iterator[None]:
    """Nothing that surrounds the call of `replace` changes what is computed here, or is changed by it."""
    precision = torch.get_float32_matmul_precision()
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autocast("cpu", enabled=False))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        try:
            torch.set_float32_matmul_precision("highest")
            yield
        finally:
            torch.set_float32_matmul_precision(precision)


def _difference(original: nn.Module, new: TriangleUpdate, generator: torch.Generator) -> str | None:
    c = new._get(new.names.g_out, "weight").shape[0]  # type: ignore[union-attr]
    n = 5 if c != 5 else 6
    x = torch.randn(2, n, n, c, generator=generator, device="cpu")
    mask = torch.randn(2, n, n, generator=generator, device="cpu")
    mask[torch.rand(mask.shape, generator=generator, device="cpu") < 0.2] = 0
    cotangent = torch.randn(x.shape, generator=generator, device="cpu")
    takes_none = "mask" not in _required(new)
    for training in (True, False):
        original.train(training)
        new.train(training)
        when = "training" if training else "evaluation"
        for scale in SCALES:
            theirs, ours = (_with_gradients(m, x, mask * scale, cotangent) for m in (original, new))
            if reason := _compared(theirs, ours, f"in {when}"):
                return reason
        masks = [mask * SCALES[0], *([None] if takes_none else [])]
        for value, arguments in ((value, arguments) for value in masks for arguments in new.probes()):
            theirs, ours = (_without_gradients(m, x, value, arguments) for m in (original, new))
            if reason := _compared(theirs, ours, f"in {when}, {_said(value, arguments)}"):
                return reason
    return None


def _required(new: nn.Module) -> set[str]:
    return {name for name, p in inspect.signature(new.forward).parameters.items() if p.default is p.empty}


def _said(mask: Tensor | None, arguments: Mapping[str, Any]) -> str:
    said = [f"{name}={value}" for name, value in arguments.items()]
    return ", ".join(["without a mask"] * (mask is None) + said) or "without gradients"


def _with_gradients(module: nn.Module, x: Tensor, mask: Tensor, cotangent: Tensor) -> dict[str, Any]:
    x = x.clone().requires_grad_()
    out = module(x, mask)
    if type(out) is not Tensor or out.shape != x.shape:
        return {"result": out}
    parameters = dict(module.named_parameters())
    grads = torch.autograd.grad(out, [x, *parameters.values()], cotangent)
    return {"result": out, **{f"gradient of {n}": g for n, g in zip(["its input", *parameters], grads, strict=True)}}


def _without_gradients(
    module: nn.Module, x: Tensor, mask: Tensor | None, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    x = x.clone()
    with torch.no_grad():
        return {"result": module(x, mask, **arguments), "input afterwards": x}


def _compared(theirs: dict[str, Any], ours: dict[str, Any], when: str) -> str | None:
    for name, value in theirs.items():
        if type(value) is not Tensor:
            return f"it returns a {type(value).__name__} {when}"
        if value.shape != ours[name].shape:
            return f"its {name} is of shape {tuple(value.shape)} {when}"
        error = (value - ours[name]).norm() / value.norm()
        if not error <= TOLERANCE:
            return f"it computes something else: its {name} {when} differs by {error.item():.1e} of its norm"
    return None

"""Decides whether a module computes what its replacement computes, by running both."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torchops.convert.registry import alone

if TYPE_CHECKING:
    from torchops.convert.module import Call, Replacement

# For float32 sums in another order. A module that computes something else is off by far more.
TOLERANCE = 1e-4


def probe(
    module: nn.Module, make: Callable[[nn.Module], Replacement], gpu_norms: tuple[type[nn.Module], ...] = ()
) -> str | None:
    """Why `make(module)` must not replace `module`; None if both compute the same.

    Runs copies of both on the CPU in float32, with random parameters (fresh modules end in a projection by 0), on the
    calls of `Replacement.calls` (batches of 2, masks that are not symmetric), in training and in evaluation. Compares
    results, gradients, what happens to the arguments, and how many random numbers are drawn. A layer of `gpu_norms` is
    taken for what its class says.
    """
    try:
        with alone, plain_float32():
            generator = torch.Generator("cpu").manual_seed(0)
            original = copy.deepcopy(module).to_empty(device="cpu").float()
            for name, parameter in original.named_parameters():
                parameter.requires_grad_().data.copy_(random_parameter(name, parameter, generator))
            for parent in original.modules() if gpu_norms else ():
                parent._modules.update({k: _plain(v) for k, v in parent._modules.items() if isinstance(v, gpu_norms)})
            return _difference(original, make(original), generator)
    except Exception as error:  # the package's code may raise anything
        return f"computing it to compare raised {type(error).__name__}: {error}"


def _plain(norm: Any) -> nn.LayerNorm:
    """PyTorch's layer norm with the parameters of another."""
    made = nn.LayerNorm(norm.normalized_shape, norm.eps, device="meta")
    made._parameters = norm._parameters
    return made


def random_parameter(name: str, like: Tensor, generator: torch.Generator) -> Tensor:
    value = torch.randn(like.shape, generator=generator, device="cpu")
    if like.dim() > 1:
        return value / like.shape[-1] ** 0.5
    return 0.3 * value + name.endswith("weight")


@contextmanager
def plain_float32() -> Iterator[None]:
    """Isolates the comparison from the global state around the call of `replace`, and that state from the
    comparison."""
    mkldnn: Any = torch.backends.mkldnn
    dtype, products = torch.get_default_dtype(), mkldnn.matmul
    precision = products.fp32_precision
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autocast("cpu", enabled=False))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        # The products are small. Beside other work, threads that wait for one another take a hundred times as long.
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        try:
            if precision not in ("none", "ieee"):
                products.fp32_precision = "ieee"
            torch.set_default_dtype(torch.float32)
            yield
        finally:
            # "none" has the value of the backend, or of all backends, also after these change.
            if products.fp32_precision != precision:
                inherited = precision == mkldnn.fp32_precision
                products.fp32_precision = "none" if inherited else precision
            torch.set_default_dtype(dtype)


def _difference(original: nn.Module, new: Replacement, generator: torch.Generator) -> str | None:
    for training in (True, False):
        original.train(training)
        new.train(training)
        for call in new.calls(generator):
            theirs, ours = (_results(module, call, new.outputs) for module in (original, new))
            said = call.said or ("" if call.gradients else "without gradients")
            when = f"in {'training' if training else 'evaluation'}{said and ', ' + said}"
            if reason := compared(theirs, ours, when):
                return reason
    return None


def _results(module: nn.Module, call: Call, outputs: int) -> dict[str, Any]:
    args = [a.clone() if isinstance(a, Tensor) else a for a in call.args]
    inputs = {"its input" if i == 0 else f"its argument {i}": args[i].requires_grad_() for i in call.gradients}
    torch.default_generator.manual_seed(0)
    with torch.set_grad_enabled(bool(call.gradients)):
        out = module(*args, **call.kwargs)
    outs = out if type(out) is tuple and outputs > 1 else (out,)
    if len(outs) != outputs or any(type(t) is not Tensor for t in outs) or outs[-1].shape != args[outputs - 1].shape:
        return {"result": out}
    results: dict[str, Any] = {"result" if i == 0 else f"result {i}": t for i, t in enumerate(outs)}
    if call.gradients:
        sources = inputs | dict(module.named_parameters())
        generator = torch.Generator("cpu").manual_seed(1)
        cotangents = [torch.randn(t.shape, generator=generator, device="cpu") for t in outs]
        grads = torch.autograd.grad(outs, list(sources.values()), cotangents)
        results |= {f"gradient of {name}": g for name, g in zip(sources, grads, strict=True)}
    else:
        results["input afterwards"] = args[0]
    return results | {"random number drawn next": torch.rand((), device="cpu")}


def compared(theirs: dict[str, Any], ours: dict[str, Any], when: str) -> str | None:
    # Without rounding, some gradients would be 0: those of anything that adds the same number to all scores of a
    # softmax.
    rounding = 1e-7 * max([g.norm().item() for name, g in theirs.items() if name.startswith("gradient")], default=0)
    for name, value in theirs.items():
        if type(value) is not Tensor:
            return f"it returns a {type(value).__name__} {when}"
        if name not in ours or value.shape != ours[name].shape:
            return f"its {name} is of shape {tuple(value.shape)} {when}"
        difference, norm = (value - ours[name]).norm().item(), value.norm().item()
        if not difference <= max(TOLERANCE * norm, rounding):
            error = f"{difference / norm:.1e} of its norm" if norm else f"{difference:.1e}"
            return f"it computes something else: its {name} {when} differs by {error}"
    return None

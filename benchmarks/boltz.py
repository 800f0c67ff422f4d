"""A stack of layers of the released Boltz before and after `torchops.replace`: `python -m benchmarks boltz`.

Four layers of its ``PairformerNoSeqModule`` with random parameters: chunks and checkpoints are those of the release (in
inference, chunks of 128 rows from N = 385 on; training is checkpointed by layer for N > 512, since four layers of the
original do not fit otherwise). "bf16-mixed" is a float32 stream under autocast. Before and after are interleaved;
times are medians. A deviation is the norm of the difference from the original in IEEE float32, over its norm, and the
largest element of the difference. Beside it is that of the original itself in the same precision, and in TF32.

Before that, every module of the packages that are installed, before and after, as a small problem (`--sizes ,` does
nothing else).

Boltz must be importable. From wheels, without its dependencies (of which these files want numpy, scipy and einops):

    pip install --no-deps --no-index --find-links WHEELS --target FOLDER boltz einops
    TORCHOPS_PEERS=FOLDER python -m benchmarks boltz --json FILE
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib
import os
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

import torchops

from . import options as shared
from . import timing
from .peak_memory import Peak
from .record import Record

LAYERS, FEATURES = 4, 128
CHECKPOINTED_FROM = 513
PRECISIONS = ("bf16-mixed", "float32")


def randomised(module: nn.Module) -> nn.Module:
    """Random parameters, because fresh modules end in projections by 0."""
    for name, parameter in module.named_parameters():
        value = torch.randn_like(parameter)
        parameter.data = value / value.shape[-1] ** 0.5 if value.dim() > 1 else value / 10 + name.endswith("weight")
    return module


def stacks(n: int, device: torch.device, features: int) -> dict[str, nn.Module]:
    file = importlib.import_module("boltz.model.layers.pairformer")
    torch.manual_seed(0)
    heads = max(1, features // 32)
    before = file.PairformerNoSeqModule(
        features, LAYERS, pairwise_num_heads=heads, activation_checkpointing=n >= CHECKPOINTED_FROM
    )
    before = randomised(before).to(device)
    after = copy.deepcopy(before)
    report = torchops.replace(after)
    if report.left or not {f"layers.{i}" for i in range(LAYERS)} <= set(report.replaced):
        raise AssertionError(f"not everything was replaced: {report}")
    return {"before": before, "after": after}


def problem(n: int, device: torch.device, features: int) -> tuple[Tensor, Tensor, Tensor]:
    """The pair tensor, a mask as Boltz makes it from tokens, without padding, and a cotangent."""
    generator = torch.Generator(device).manual_seed(1)
    shape = (1, n, n, features)
    z, cotangent = (torch.randn(shape, device=device, generator=generator) for _ in range(2))
    return z, torch.ones(shape[:3], device=device), cotangent


@contextmanager
def precision(name: str, device: torch.device) -> Iterator[None]:
    """`name`: bf16-mixed, float32 or tf32."""
    was = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    mixed = torch.autocast(device.type, torch.bfloat16) if name == "bf16-mixed" else nullcontext()
    try:
        with mixed:
            yield
    finally:
        torch.set_float32_matmul_precision(was)


def call(stack: nn.Module, inputs: tuple[Tensor, Tensor, Tensor], training: bool) -> tuple[Tensor, ...]:
    """The result; in training, also the gradients of the input and the parameters."""
    z, mask, cotangent = inputs
    stack.train(training)
    if not training:
        with torch.no_grad():
            return (stack(z, mask),)
    torch.manual_seed(2)  # the same dropout for all
    z = z.detach().requires_grad_()
    leaves = [z, *stack.parameters()]
    out = stack(z, mask)
    out.backward(cotangent)  # the release's reentrant checkpoints don't support torch.autograd.grad
    gradients = [t.grad for t in leaves if t.grad is not None]
    stack.zero_grad()
    return out.detach(), *gradients


def deviation(got: Sequence[Tensor], exact: Sequence[Tensor]) -> dict[str, Any]:
    """The deviation of the result; in training, also of the gradient of the input, and the worst of the parameters."""

    def of(a: Tensor, b: Tensor) -> dict[str, float]:
        a, b = a.double(), b.to(a.device).double()
        return {"norm": ((a - b).norm() / b.norm()).item(), "greatest": (a - b).abs().max().item()}

    made: dict[str, Any] = {"result": of(got[0], exact[0])}
    if len(got) > 1:
        made["gradient of the input"] = of(got[1], exact[1])
        made["gradients of parameters, the worst"] = max(
            (of(a, b) for a, b in zip(got[2:], exact[2:], strict=True)), key=lambda d: d["norm"]
        )
    return made


def measure(n: int, device: torch.device, features: int, rounds: int) -> Iterator[dict[str, Any]]:
    models, inputs = stacks(n, device, features), problem(n, device, features)
    for training in (False, True):
        runs = {which: partial(call, model, inputs, training) for which, model in models.items()}
        with precision("float32", device):
            exact = [t.cpu() for t in _unless_out_of_memory(runs["before"]) or ()]
        for name in PRECISIONS:
            with precision(name, device):
                result = _measured(runs, exact, device, rounds)
            if name == "float32" and exact and device.type == "cuda":
                with precision("tf32", device):
                    result["before"]["deviation in TF32"] = deviation(runs["before"](), exact)
            yield {"n": n, "precision": name, "task": "training" if training else "forward", **result}


Run = Callable[[], tuple[Tensor, ...]]


def _measured(runs: Mapping[str, Run], exact: list[Tensor], device: torch.device, rounds: int) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for which, run in runs.items():
        first = timing.once(partial(_unless_out_of_memory, run), device)
        peak = Peak(device) if device.type == "cuda" else None
        values = _unless_out_of_memory(run)
        result[which] = {"first call, s": first, "MiB": peak and peak.extra() / 2**20, "out of memory": values is None}
        if values is not None and exact:
            result[which]["deviation"] = deviation(values, exact)
        del values
    times: dict[str, list[float]] = {which: [] for which in runs if not result[which]["out of memory"]}
    for _ in range(rounds):
        for which in times:
            times[which].append(timing.once(runs[which], device))
    for which, seconds in times.items():
        result[which]["ms"] = statistics.median(seconds) * 1e3
    return result


def _unless_out_of_memory(run: Run) -> tuple[Tensor, ...] | None:
    try:
        return run()
    except torch.OutOfMemoryError:
        pass
    gc.collect()
    torch.cuda.empty_cache()
    return None


# --- each module -----------------------------------------------------------------------------------------------------

C, HEADS = 64, 2


def _esmfold(file: Any, name: str, **kwargs: Any) -> nn.Module:
    if name == "EsmFoldTriangleAttention":
        return file.EsmFoldTriangleAttention(C, C // HEADS, HEADS, **kwargs)

    class Config:
        pairwise_state_dim = C

    return file.EsmFoldTriangleMultiplicativeUpdate(Config(), **kwargs)


BOLTZ, OPENFOLD, OPENFOLD3 = "boltz.model.layers.", "openfold.model.", "openfold3.core.model.layers."
ESMFOLD = "transformers.models.esm."
MODULES: tuple[tuple[str, str, Callable[[Any], nn.Module]], ...] = (
    (f"{BOLTZ}triangular_mult", "triangle update, outgoing", lambda f: f.TriangleMultiplicationOutgoing(C)),
    (f"{BOLTZ}triangular_mult", "triangle update, incoming", lambda f: f.TriangleMultiplicationIncoming(C)),
    *(
        (
            f"{BOLTZ}triangular_attention.attention",
            f"triangle attention, {node} node",
            lambda f, node=node: getattr(f, f"TriangleAttention{node.title()}Node")(C, C // HEADS, HEADS),
        )
        for node in ("starting", "ending")
    ),
    (f"{BOLTZ}transition", "transition", lambda f: f.Transition(C, 4 * C)),
    *(
        (f"{package}triangular_multiplicative_update", f"triangle update, {direction}",
         lambda f, direction=direction: getattr(f, f"TriangleMultiplication{direction.title()}")(C, C))
        for package in (OPENFOLD, OPENFOLD3)
        for direction in ("outgoing", "incoming")
    ),
    *(
        (f"{package}triangular_attention", f"triangle attention, {node} node",
         lambda f, node=node: f.TriangleAttention(C, C // HEADS, HEADS, starting=node == "starting"))
        for package in (OPENFOLD, OPENFOLD3)
        for node in ("starting", "ending")
    ),
    (f"{OPENFOLD3}transition", "SwiGLU transition", lambda f: f.SwiGLUTransition(C, 4)),
    (f"{ESMFOLD}modeling_esmfold", "triangle update, outgoing",
     lambda f: _esmfold(f, "", _outgoing=True)),
    (f"{ESMFOLD}modeling_esmfold", "triangle update, incoming",
     lambda f: _esmfold(f, "", _outgoing=False)),
    (f"{ESMFOLD}modeling_esmfold", "triangle attention, starting node",
     lambda f: _esmfold(f, "EsmFoldTriangleAttention")),
    (f"{ESMFOLD}modeling_esmfold", "triangle attention, ending node",
     lambda f: _esmfold(f, "EsmFoldTriangleAttention", starting=False)),
)  # fmt: skip


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "source"


def modules(
    device: torch.device, n: int, packages: Sequence[str] = ("boltz", "openfold", "openfold3", "transformers")
) -> Iterator[dict[str, Any]]:
    """Before and after, in float32 and bf16-mixed. Deviations are from the original in float32."""
    for path, what, make in MODULES:
        package = path.partition(".")[0]
        if package not in packages or find_spec(package) is None:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                file = importlib.import_module(path)
            except ImportError as error:
                print(f"{path} cannot be imported: {error}")
                continue
        torch.manual_seed(3)
        before = randomised(make(file)).to(device).eval()
        model = nn.Sequential(copy.deepcopy(before))
        report = torchops.replace(model)
        row: dict[str, Any] = {"package": package, "version": _version(package), "module": what}
        row["class"] = type(before).__name__
        if report.replaced[:1] != ("0",):
            yield row | {"left": report.left["0"]}
            continue
        x = torch.randn(2, n, n, C, device=device)
        mask = (torch.rand(2, n, n, device=device) > 0.2) | torch.eye(n, device=device).bool()
        arguments = (x,) if "ransition" in what and package == "boltz" else (x, mask.float())
        with torch.no_grad():
            with precision("float32", device):
                exact = before(*arguments)
            row["greatest element"] = exact.abs().max().item()
            for name in PRECISIONS:
                with precision(name, device):
                    theirs, ours = before(*arguments).float(), model[0](*arguments).float()
                row[name] = {"greatest difference": (theirs - ours).abs().max().item()}
                if name != "float32":
                    row[name] |= {"deviation before": deviation((theirs,), (exact,))["result"]}
                    row[name] |= {"deviation after": deviation((ours,), (exact,))["result"]}
        yield row


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    shared.add(parser, "device", "sizes", "features", "rounds", "json", features=FEATURES, rounds=2)


def run(options: argparse.Namespace) -> int:
    """Measures single modules, then the stacks."""
    if folder := os.environ.get("TORCHOPS_PEERS"):
        sys.path.append(folder)
    if find_spec("boltz") is None:
        print("boltz is not installed: nothing is measured")
        return 0
    device, features = shared.device_of(options), options.features
    sizes = options.sizes if options.sizes is not None else [384, 768] if device.type == "cuda" else [64]
    facts = {"boltz": version("boltz"), "layers": LAYERS, "features": features}
    record = Record(options, device, **facts, results=[], modules=[])
    record.collect("modules", modules(device, 96), "modules")
    for n in sizes:
        record.collect("results", measure(n, device, features, options.rounds), f"stack, N = {n}")
    return 0

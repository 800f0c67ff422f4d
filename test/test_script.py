"""TorchScript: every operator scripted from its schema; modules scripted, traced, saved, loaded, frozen, trained."""

# No `from __future__ import annotations`: TorchScript does not resolve the types of attributes that are strings.
import io
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from checks import assert_all_close, gradients, random_like, to_float64
from op_db import OpCase, copy_like
from samples import Sample
from torch import Tensor, nn

import torchops

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning")

# The executor runs a function as it was written at first, and as it was optimised for what it has seen from then on.
RUNS = 3


def scripted(case: OpCase) -> Callable[..., Tensor]:
    """A scripted function with the parameters of the operator; one that overwrites returns what it has overwritten."""
    parameters = case.op._schema.arguments
    signature = ", ".join(f"{p.name}: {p.type.annotation_str}" for p in parameters)
    passed = ", ".join(f"{p.name}={p.name}" if p.kwarg_only else p.name for p in parameters)
    call = f"torch.ops.{case.without_overload.replace('::', '.')}({passed})"
    lines = [f"return {call}"] if case.mutates is None else [call, f"return {parameters[case.mutates].name}"]
    source = [f"def call({signature}):", *("    " + line for line in lines), ""]
    return torch.jit.CompilationUnit("\n".join(source)).call


def all_arguments(case: OpCase, arguments: Any) -> list[Any]:
    """Every argument by position, those that were left out with their defaults."""
    args, kwargs = arguments
    rest = case.op._schema.arguments[len(args) :]
    return [*args, *(kwargs.get(p.name, p.default_value) for p in rest)]


def saved_and_loaded(module: nn.Module) -> torch.jit.ScriptModule:
    file = io.BytesIO()
    torch.jit.save(module, file)
    file.seek(0)
    return torch.jit.load(file)


@pytest.mark.ops(large=False, dtypes=[torch.float32, torch.bfloat16])
def test_value(case: OpCase, device: str, dtype: torch.dtype, sample: Sample) -> None:
    function = scripted(case)
    for _ in range(RUNS):
        expected = case.wrapper(*(arguments := sample(dtype, device))[0], **arguments[1])
        passed = all_arguments(case, sample(dtype, device))
        got = function(*passed)
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
        if case.mutates is not None:
            torch.testing.assert_close(case.mutated(passed), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.ops(leaves=True, large=False, dtypes=[torch.float64])
def test_gradient(case: OpCase, device: str, dtype: torch.dtype, sample: Sample) -> None:
    function = scripted(case)

    def pure(*args: Any, **kwargs: Any) -> Tensor:
        values = all_arguments(case, (args, kwargs))
        if case.mutates is not None:
            values[case.mutates] = copy_like(values[case.mutates])
        return function(*values)

    arguments = sample(dtype, device, requires_grad=True)
    cotangent = random_like(case.reference(*arguments[0], **arguments[1]))
    _, expected = gradients(case.reference, to_float64(arguments), cotangent)
    for _ in range(RUNS):
        assert_all_close(gradients(pure, arguments, cotangent)[1], expected, atol=1e-10, rtol=1e-10)


class Block(nn.Module):
    """Wrappers that TorchScript compiles as they are, and operators of which the wrapper is too Pythonic for it."""

    state: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = torchops.nn.Dense(7, 6)
        self.bare = torchops.nn.Dense(6, 6, bias=False)
        self.gate = torchops.nn.Gate(6, 6)
        self.register_buffer("state", random_like(torch.empty(6, 6)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        t = self.layer(x) * 2
        torch.ops.myops.square_matmul_(t, self.state, transpose_b=True)
        u = self.bare(t + 1)  # of a copy, since the gradient reads it after t has been overwritten
        torch.ops.myops.layer_norm_(t, [6], self.layer.bias)
        torchops.softmax_(t[1:], dim=0)
        v = self.gate(torchops.softmax(torchops.dense(t, self.bare.weight)), t)
        torchops.gate_(v, torchops.gate(u, u, self.bare.weight), self.bare.weight)
        w = torchops.sigmoid_(torchops.sigmoid(t) * 2)
        return t * v, torch.ops.myops.square_matmul(u, self.state) + torch.ops.myops.layer_norm(w, [6])

    def reference(self, x: Tensor) -> tuple[Tensor, Tensor]:
        t = torch.sigmoid(nn.functional.linear(x, self.layer.weight, self.layer.bias)) * 2 @ self.state.mT
        u = torch.sigmoid((t + 1) @ self.bare.weight.mT)
        t = nn.functional.layer_norm(t, [6], self.layer.bias)
        t = torch.cat([t[:1], t[1:].softmax(0)])
        v = torch.sigmoid(t @ self.bare.weight.mT).softmax(-1)
        v = v * torch.sigmoid(nn.functional.linear(t, self.gate.weight, self.gate.bias))
        v = v * torch.sigmoid(u * torch.sigmoid(u @ self.bare.weight.mT) @ self.bare.weight.mT)
        w = torch.sigmoid(torch.sigmoid(t) * 2)
        return t * v, u @ self.state + nn.functional.layer_norm(w, [6])


def check(module: Callable[..., Sequence[Tensor]], model: Block) -> None:
    for rows in (5, 2, 17, 129) * RUNS:
        x = random_like(torch.empty(rows, 7, dtype=torch.float64), rows)
        assert_all_close(module(x), model.reference(x), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("how", ["script", "load", "freeze", "trace", "load_trace"])
def test_module(how: str) -> None:
    model = Block().double().eval().requires_grad_(False)
    module: Any
    if how in ("trace", "load_trace"):
        module = torch.jit.trace(model, (torch.randn(5, 7, dtype=torch.float64),))
    else:
        module = torch.jit.script(model)
    if how in ("load", "load_trace"):
        module = saved_and_loaded(module)
    if how == "freeze":
        module = torch.jit.freeze(module)
    check(module, model)


@pytest.mark.parametrize("loaded", [False, True], ids=["script", "load"])
def test_training(loaded: bool) -> None:
    model = Block().double()
    module: Any = torch.jit.script(model)
    if loaded:
        module = saved_and_loaded(module)
    parameters = dict(module.named_parameters())
    for rows in (5, 17, 2) * RUNS:
        x = random_like(torch.empty(rows, 7, dtype=torch.float64), rows).requires_grad_()
        cotangents = [random_like(torch.empty(rows, 6, dtype=torch.float64), seed) for seed in (1, 2)]
        names, leaves = zip(*model.named_parameters(), strict=True)
        expected = torch.autograd.grad(model.reference(x), [x, *leaves], cotangents)
        got = torch.autograd.grad(module(x), [x, *(parameters[n] for n in names)], cotangents)
        assert_all_close(got, expected, atol=1e-9, rtol=1e-9)


def test_error_text() -> None:
    @torch.jit.script
    def call(x: Tensor, w: Tensor) -> Tensor:
        return torch.ops.myops.dense(x, w)

    with pytest.raises(RuntimeError, match=r"dense: expected w of shape \(out, in\) with in = 7 to match x"):
        call(torch.zeros(5, 7), torch.zeros(3, 6))


@pytest.mark.parametrize("bias", [True, False])
def test_swapped_glu(bias: bool) -> None:
    """With the activation that it applies."""
    model = nn.Sequential(nn.Linear(7, 12, bias=bias), nn.GLU())
    x = random_like(torch.empty(5, 7))
    expected = model(x)
    assert torchops.replace(model).replaced == ("0",)
    torch.testing.assert_close(torch.jit.script(model)(x), expected)


class With(nn.Module):
    """A module called with keywords, on a tensor that may be overwritten."""

    def __init__(self, module: nn.Module, **kwargs: bool) -> None:
        super().__init__()
        self.module, self.kwargs = module, kwargs

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x * 1, **self.kwargs)


HOW: list[dict[str, bool]] = [{}, {"residual": True}, {"inplace": True}]


@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize(
    "module",
    [torchops.nn.Transition(6), torchops.nn.TriangleMultiplicativeUpdate(6, bias=True)],
    ids=lambda m: type(m).__name__,
)
def test_pair_modules_are_traced_or_say_why_not(module: nn.Module, how: dict[str, bool]) -> None:
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    model = With(module.eval(), **how).requires_grad_(False)
    x = torch.randn(3, 3, 6)
    if how == HOW[1] and isinstance(module, torchops.nn.TriangleMultiplicativeUpdate):
        with pytest.raises(RuntimeError, match=r"^triangle_multiplicative_update: .*use torch\.export\.export"):
            torch.jit.trace(model, (x,))
        return
    traced = torch.jit.trace(model, (x,))
    torch.testing.assert_close(traced(x), model(x))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("how", HOW, ids=str)
def test_triangle_attention_says_why_it_cannot_be_traced(how: dict[str, bool], grad: bool) -> None:
    with (
        torch.set_grad_enabled(grad),
        pytest.raises(RuntimeError, match=r"^triangle_attention_update: .*torch\.export"),
    ):
        torch.jit.trace(With(torchops.nn.TriangleAttention(6, 2, 3), **how), (torch.randn(3, 3, 6),))


def test_every_operator_that_cannot_be_traced_says_so() -> None:
    schemas = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("myops::")]
    untraceable = {s.name for s in schemas if any("Optional[Tensor]]" in str(a.type) for a in s.arguments)}
    assert len(untraceable) > 5
    assert {name for name in untraceable if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "Tracer")} == set()


def test_attention_pair_bias_names_what_to_use_instead() -> None:
    with pytest.raises(RuntimeError, match=r"torch\.jit\.trace cannot record this operator; use torch\.export\.export"):
        torch.jit.trace(torchops.nn.AttentionPairBias(8, 4, 2), (torch.randn(1, 3, 8), torch.randn(1, 3, 3, 4)))

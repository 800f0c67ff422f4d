"""torch.export (strict and not, decomposed, saved and loaded, dynamic and unbacked sizes) and AOTInductor packages."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import assert_all_close, random_like, tensors, with_tensors
from mutations import VARIANTS, InPlace, Reference, Variant
from op_db import OpCase
from samples import Sample
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export
from torch.fx.experimental.proxy_tensor import make_fx

import torchops

ROWS = (5, 6, 17, 129)


class Call(nn.Module):
    """Calls an operator with the arguments that are not tensors fixed."""

    def __init__(self, case: OpCase, arguments: Any):
        super().__init__()
        self.case, self.arguments = case, arguments

    def forward(self, *values: Tensor) -> Tensor:
        args, kwargs = with_tensors(self.arguments, values)
        return self.case.pure(*args, **kwargs)


def saved_and_loaded(program: ExportedProgram) -> ExportedProgram:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


@pytest.mark.ops(
    leaves=True,
    dtypes=[torch.float32],
    samples=["matrix", "four_dims", "strided_columns", "no_bias", "middle_dim"],
    where=lambda case, device, **_: case.differentiable or device == "cpu",  # sums in tensor cores have fewer digits
)
@pytest.mark.parametrize("strict", [False, True], ids=["non_strict", "strict"])
def test_round_trip(case: OpCase, device: str, dtype: torch.dtype, sample: Sample, strict: bool) -> None:
    arguments = sample(dtype, device)
    inputs = tuple(tensors(arguments))
    expected = case.reference(*arguments[0], **arguments[1])
    program = export(Call(case, arguments), inputs, strict=strict)
    operators = {node.target for node in program.graph.nodes if node.op == "call_function"}
    assert case.op in operators
    decomposed = program.run_decompositions()
    for one in (program, saved_and_loaded(program), decomposed, saved_and_loaded(decomposed)):
        assert_all_close([one.module()(*inputs)], [expected])
    # The operator stays whole: a backend sees it by name, whatever PyTorch decomposes around it.
    names = {str(node.target) for node in decomposed.graph.nodes if node.op == "call_function"}
    assert any(name.startswith("myops.") or "auto_functionalized" in name for name in names)


class Stack(nn.Module):
    """Dense layers, each followed by an operator that overwrites an intermediate, and a buffer that is overwritten."""

    state: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = torchops.nn.Dense(7, 6)
        self.second = torchops.nn.Dense(6, 6)
        self.register_buffer("state", random_like(torch.empty(6, 6)))

    def forward(self, x: Tensor) -> Tensor:
        t = self.first(x) * 2
        torchops.square_matmul_(t, self.state.clone())
        t = self.second(t) * 2
        torchops.layer_norm_(t, [6], self.first.bias, self.second.bias)
        torchops.softmax_(t)
        torchops.sigmoid_(self.state)
        return t

    def reference(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        t = torch.sigmoid(nn.functional.linear(x, self.first.weight, self.first.bias)) * 2 @ state
        t = torch.sigmoid(nn.functional.linear(t, self.second.weight, self.second.bias)) * 2
        t = nn.functional.layer_norm(t, [6], self.first.bias, self.second.bias)
        return torch.softmax(t, -1), torch.sigmoid(state)


@pytest.mark.parametrize("strict", [False, True], ids=["non_strict", "strict"])
@pytest.mark.parametrize("stage", ["exported", "decomposed", "loaded"])
def test_dynamic_rows_and_a_mutated_buffer(strict: bool, stage: str) -> None:
    model = Stack().eval()
    program = export(model, (torch.randn(5, 7),), dynamic_shapes=({0: Dim("rows")},), strict=strict)
    if stage == "decomposed":
        program = program.run_decompositions()
    if stage == "loaded":
        program = saved_and_loaded(program)
    module = program.module()
    state = model.state.clone()
    for rows in ROWS:
        x = random_like(torch.empty(rows, 7), rows)
        expected, state = model.reference(x, state)
        assert_all_close([module(x), dict(module.named_buffers())["state"]], [expected, state], atol=1e-5, rtol=1e-5)


def test_training_on_an_exported_graph() -> None:
    """`export` keeps the operators differentiable."""
    model = Stack()
    module = export(model, (torch.randn(5, 7),), dynamic_shapes=({0: Dim("rows")},)).module()
    x = random_like(torch.empty(11, 7))
    state = model.state.clone()
    names = [name for name, _ in model.named_parameters()]
    cotangent = random_like(torch.empty(11, 6))
    got = torch.autograd.grad(module(x), [dict(module.named_parameters())[n] for n in names], cotangent)
    expected = torch.autograd.grad(model.reference(x, state)[0], list(model.parameters()), cotangent)
    assert_all_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("strict", [False, True], ids=["non_strict", "strict"])
def test_what_training_keeps_limits_no_rows(strict: bool, residual: bool) -> None:
    """A transition keeps its products for a few rows, but an exported program takes any number of them."""
    layer = torchops.nn.Transition(8, 4096)
    nn.init.normal_(layer.fc3.weight)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x, residual=residual)

    program = export(Layer(), (torch.randn(5, 8),), dynamic_shapes=({0: Dim("rows")},), strict=strict)
    module = program.module()
    for rows in (5, 600):
        x, cotangent = (random_like(torch.empty(rows, 8), seed) for seed in range(2))
        results = []
        for function, parameters in ((module, module.named_parameters()), (Layer(), Layer().named_parameters())):
            leaves = [t for _, t in sorted(parameters)]
            y = function(x)
            results.append([y, *torch.autograd.grad(y, leaves, cotangent)])
        assert_all_close(*results, atol=1e-3, rtol=1e-3)


def test_what_training_keeps_limits_no_features() -> None:
    """A gate keeps its product of many features, but an exported program takes any number of them."""

    class Gates(nn.Module):
        def forward(self, v: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return (
                torchops.gate(v, x, w),
                torchops.glu(x, w, w),
                torchops.transition(x, gate_weight=w, up_weight=w, down_weight=w.t()),
            )

    for features in (140, 7):
        arguments = [random_like(torch.empty(shape)) for shape in ((5, 6), (5, features), (6, features))]
        leaves = [t.requires_grad_() for t in arguments]
        program = export(Gates(), tuple(leaves), dynamic_shapes=({}, {1: Dim("features")}, {1: Dim("features")}))
        for other in (7, 140):
            arguments = [random_like(torch.empty(shape)) for shape in ((5, 6), (5, other), (6, other))]
            assert_all_close(program.module()(*arguments), Gates()(*arguments), atol=1e-4, rtol=1e-4)


def overwriting(function: Callable[..., Tensor], *values: Tensor) -> list[Any]:
    """The operators that overwrite something in the traced gradients of `function`, which can be differentiated."""

    def gradients(*values: Tensor) -> Any:
        leaves = [t.detach().requires_grad_() for t in values]
        y = function(*leaves)
        return torch.autograd.grad(y, leaves, torch.ones_like(y), create_graph=True)

    targets = [node.target for node in make_fx(gradients)(*values).graph.nodes]
    return [op for op in targets if isinstance(op, torch._ops.OpOverload) and op._schema.is_mutable]


# torch.func.vjp, which the traced gradient of the attention update calls, adds gradients up in place.
@pytest.mark.ops(
    leaves=True,
    dtypes=[torch.float32],
    samples=["matrix", "vector_silu"],
    mutating=False,
    differentiable=True,
    where=lambda case, **_: case.name != "triangle_attention_update",
)
def test_differentiable_gradients_overwrite_nothing(
    case: OpCase, device: str, dtype: torch.dtype, sample: Sample
) -> None:
    """A program that is exported with its backward pass has such gradients, and may overwrite nothing."""
    arguments = sample(dtype, device)

    def call(*values: Tensor) -> Tensor:
        args, kwargs = with_tensors(arguments, values)
        return case.pure(*args, **kwargs)

    assert overwriting(call, *tensors(arguments)) == []


def test_differentiable_gradients_of_a_triangle_update_overwrite_nothing() -> None:
    layer = torchops.nn.TriangleMultiplicativeUpdate(4)
    names = [name for name, _ in layer.named_parameters()]

    def call(x: Tensor, *parameters: Tensor) -> Tensor:
        out: Tensor = torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))
        return out

    assert overwriting(call, torch.randn(3, 3, 4), *layer.parameters()) == []


@pytest.mark.parametrize("strict", [False, True], ids=["non_strict", "strict"])
def test_unbacked_sizes(strict: bool) -> None:
    """Sizes that come from `nonzero` and from `item`, which tracing knows nothing about."""

    class Unbacked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torchops.nn.Dense(5, 4)

        def forward(self, x: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
            chosen = x[(x[:, 0] > 0).nonzero().squeeze(1)]
            t = self.layer(chosen)
            torchops.layer_norm_(t, [4])
            torchops.square_matmul_(t, self.layer.weight[:, :4])
            n: Any = size.item()
            torch._check(n >= 2)
            u = x.new_ones(n, 5) * x[0]
            u = torchops.softmax(torchops.dense(u, self.layer.weight), 0)
            torchops.sigmoid_(u)
            torchops.softmax_(u)
            return t, u

        def reference(self, x: Tensor, size: int) -> tuple[Tensor, Tensor]:
            t = nn.functional.linear(x[x[:, 0] > 0], self.layer.weight, self.layer.bias).sigmoid()
            t = nn.functional.layer_norm(t, [4]) @ self.layer.weight[:, :4]
            u = nn.functional.linear(x.new_ones(size, 5) * x[0], self.layer.weight).sigmoid()
            return t, torch.softmax(torch.sigmoid(torch.softmax(u, 0)), -1)

    model = Unbacked().requires_grad_(False)
    program = export(model, (torch.randn(9, 5), torch.tensor(3)), dynamic_shapes=({0: Dim("rows")}, {}), strict=strict)
    for one in (program, program.run_decompositions(), saved_and_loaded(program)):
        for rows, size in ((9, 3), (40, 2), (40, 64)):
            x = random_like(torch.empty(rows, 5), rows)
            got, expected = one.module()(x, torch.tensor(size)), model.reference(x, size)
            assert_all_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_input_is_mutated(variant: Variant) -> None:
    """An exported program that overwrites its input does so in the caller's tensor."""
    x = variant.input().detach()
    parameters = variant.parameters(x)

    class Overwrite(nn.Module):
        def forward(self, t: Tensor) -> Tensor:
            InPlace(variant).whole(t, *parameters)
            return t.sum(0)

    program = export(Overwrite(), (x.clone(),))
    expected = Reference(variant).whole(x, *parameters)
    for one in (program, program.run_decompositions(), saved_and_loaded(program)):
        t = x.clone()
        assert_all_close([one.module()(t), t], [expected.sum(0), expected])


def test_aot_inductor_package(tmp_path: Path) -> None:
    """Compiled ahead of time for any number of rows: dense, and every operator in place."""

    class Served(nn.Module):
        matrix: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.layer = torchops.nn.Dense(7, 6)
            self.register_buffer("matrix", random_like(torch.empty(6, 6)) * 0.5)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            t = self.layer(x) * 3
            torchops.square_matmul_(t, self.matrix)
            a, b, c = t + 1, t + 2, t + 3
            torchops.softmax_(a, 0)
            torchops.layer_norm_(b, [6], self.layer.bias)
            torchops.sigmoid_(c)
            return t, a, b, c, torchops.dense(x, self.layer.weight)

        def reference(self, x: Tensor) -> tuple[Tensor, ...]:
            y = nn.functional.linear(x, self.layer.weight)
            bias = self.layer.bias
            assert bias is not None
            t = torch.sigmoid(y + bias) * 3 @ self.matrix
            b = nn.functional.layer_norm(t + 2, [6], bias)
            return t, torch.softmax(t + 1, 0), b, torch.sigmoid(t + 3), torch.sigmoid(y)

    model = Served().eval().requires_grad_(False)
    program = export(model, (torch.randn(5, 7),), dynamic_shapes=({0: Dim("rows")},))
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "served.pt2"))
    runner = torch._inductor.aoti_load_package(package)
    for rows in (*ROWS, 2, 1000):
        x = random_like(torch.empty(rows, 7), rows)
        assert_all_close(list(runner(x)), list(model.reference(x)), atol=1e-5, rtol=1e-5)


def test_aot_inductor_package_of_gates_and_pairs(tmp_path: Path) -> None:
    """Compiled ahead of time for any N: what gates, and what updates pairs, with and without overwriting."""

    class Served(nn.Module):
        matrices: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.gate, self.glu = torchops.nn.Gate(8, 8), torchops.nn.GLU(8, 8, activation="silu")
            self.update = torchops.nn.TriangleMultiplicativeUpdate(8, 4, "incoming", bias=True)
            self.transition = torchops.nn.Transition(8, 12)
            for parameter in (*self.update.parameters(), *self.transition.parameters()):
                nn.init.normal_(parameter, std=0.5)
            self.register_buffer("matrices", random_like(torch.empty(2, 8, 8)) * 0.5)

        def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
            y = self.gate(x, self.glu(x)) + self.update(x, mask)
            torchops.gate_(y, x, self.gate.weight, self.gate.bias)
            z = y * 2
            self.update(z, mask, inplace=True)
            self.transition(z, inplace=True)
            t = z.flatten(1, 2) * 1
            torchops.square_matmul_(t, self.matrices)
            return y, z, t, self.transition(z, residual=True), self.update(z, residual=True)

    model = Served().eval().requires_grad_(False)
    n = Dim("n", min=2, max=64)
    inputs = random_like(torch.empty(2, 5, 5, 8)), torch.rand(2, 5, 5)
    program = export(model, inputs, dynamic_shapes=({1: n, 2: n}, {1: n, 2: n}))
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "served.pt2"))
    runner = torch._inductor.aoti_load_package(package)
    for size in (5, 2, 33):
        x, mask = random_like(torch.empty(2, size, size, 8), size), torch.rand(2, size, size)
        expected = list(model(x, mask))
        for one in (runner, program.module(), saved_and_loaded(program).module()):
            assert_all_close(list(one(x, mask)), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("strict", [False, True], ids=["non_strict", "strict"])
def test_pair_layer(strict: bool, tmp_path: Path) -> None:
    """Attention is registered from Python: what is exported holds it, wherever torchops is imported."""
    layer = torchops.nn.PairLayer(8, heads=2, head_dim=4)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    layer.eval().requires_grad_(False)
    n = Dim("n", min=2)
    inputs = random_like(torch.empty(5, 5, 8)), torch.rand(5, 5) > 0.3
    program = export(layer, inputs, dynamic_shapes=({0: n, 1: n}, {0: n, 1: n}), strict=strict)
    for size in (5, 17):
        x, mask = random_like(torch.empty(size, size, 8)), torch.rand(size, size) > 0.3
        for one in (program, program.run_decompositions(), saved_and_loaded(program)):
            assert_all_close([one.module()(x, mask)], [layer(x, mask)], atol=1e-5, rtol=1e-5)
    if not strict:
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "layer.pt2"))
        assert_all_close([torch._inductor.aoti_load_package(package)(x, mask)], [layer(x, mask)], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("strict", [False, True], ids=["non_strict", "strict"])
@pytest.mark.parametrize("keywords", [{}, {"inplace": True}, {"residual": True}], ids=["new", "in_place", "residual"])
def test_triangle_update_of_any_size_that_could_train(keywords: dict[str, bool], strict: bool) -> None:
    """With gradients on, the graph has the product that backward reads, whose rows are padded by rules of their own."""

    class Update(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.update = torchops.nn.TriangleMultiplicativeUpdate(8)

        def forward(self, x: Tensor) -> Any:
            return self.update(x * 1, **keywords)

    model, n = Update(), Dim("n")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    program = export(model, (torch.randn(2, 5, 5, 8),), dynamic_shapes=({1: n, 2: n},), strict=strict)
    for size in (1, 17, 513):
        x = random_like(torch.empty(2, size, size, 8), size)
        torch.testing.assert_close(program.module()(x), model(x))

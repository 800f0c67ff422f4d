"""torchops.onnx against onnxruntime: every operator, dynamic shapes, opsets, dtypes, and what overwriting means."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import assert_all_close, random_like, tensors, with_tensors
from op_db import OPS, OpCase
from samples import Arguments, Sample
from torch import Tensor, nn
from torch.export import Dim

import torchops
import torchops.onnx

onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
pytest.importorskip("onnxscript", reason="onnxscript is not installed")

# onnxruntime's own limits: it refuses to normalise rows of no elements (1.23, the last for Python 3.10, also of one),
# and its fusions of a product with a bias reshape away empty dimensions.
REFUSED = {
    "layer_norm": {"zero_in", "one", "one_plain"},
    "layer_norm_": {"zero_in", "one", "one_plain"},
    "transition": {"zero_in", "one"},
    "add_transition_": {"zero_in", "one"},
    "dense": {"zero_rows_inside", "zero_in_vector"},
    "gate": {"zero_rows_inside"},
    "gate_": {"zero_rows_inside"},
    "glu": {"zero_rows_inside", "zero_rows_inside_silu"},
}


def run(program: torch.onnx.ONNXProgram, *inputs: Tensor) -> list[Tensor]:
    options = onnxruntime.SessionOptions()
    if any(t.dtype == torch.float64 for t in inputs):
        # By default, 1.23 fuses transpositions into products of a type for which it has no such kernel.
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString(), options)
    names = [i.name for i in session.get_inputs()]
    return [torch.from_numpy(a) for a in session.run(None, {n: t.numpy() for n, t in zip(names, inputs, strict=True)})]


class Calls(nn.Module):
    """Calls operators with the arguments that are not tensors fixed, and returns all results."""

    def __init__(self, calls: Sequence[tuple[OpCase, Arguments]]):
        super().__init__()
        self.calls = calls
        self.eval()

    def inputs(self) -> tuple[Tensor, ...]:
        return tuple(t for _, arguments in self.calls for t in tensors(arguments))

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        rest = iter(values)
        passed = [(case, with_tensors(arguments, rest)) for case, arguments in self.calls]
        return tuple(case.pure(*args, **kwargs) for case, (args, kwargs) in passed)

    def expected(self) -> list[Tensor]:
        return [case.reference(*args, **kwargs) for case, (args, kwargs) in self.calls]


def wanted(case: OpCase, sample: Sample) -> bool:
    return sample.leaves and not sample.large and sample.name not in REFUSED.get(case.name, ())


# Private operators are exported with their modules, below.
@pytest.mark.ops(differentiable=True, where=lambda case, **_: not case.private)
def test_operator(case: OpCase) -> None:
    calls = Calls([(case, sample(torch.float32, "cpu")) for sample in case.samples if wanted(case, sample)])
    inputs = calls.inputs()
    got = run(torchops.onnx.export(calls, inputs, verbose=False), *inputs)
    assert_all_close(got, calls.expected(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=["float64", "float16"])
def test_dtype(dtype: torch.dtype) -> None:
    names = {
        "matrix",
        "matrix_silu",
        "float32_x",
        "float32_both",
        "no_bias",
        "vector",
        "weight_only",
        "middle_dim",
        "default",
    }
    calls = Calls([(c, s(dtype, "cpu")) for c in OPS for s in c.samples if s.name in names and wanted(c, s)])
    inputs = calls.inputs()
    got = run(torchops.onnx.export(calls, inputs, verbose=False), *inputs)
    # The eps of a layer norm is a float32 in ONNX.
    tolerance = {torch.float64: 1e-11, torch.float16: 4e-3}[dtype]
    assert_all_close(got, calls.expected(), atol=tolerance, rtol=tolerance)


class Triangles(nn.Module):
    """Both updates, with and without biases, the second in place; and triangle attention of a row without keys."""

    def __init__(self) -> None:
        super().__init__()
        self.outgoing = torchops.nn.TriangleMultiplicativeUpdate(8, 6)
        self.incoming = torchops.nn.TriangleMultiplicativeUpdate(8, direction="incoming", bias=True)
        for parameter in self.parameters():
            nn.init.normal_(parameter)
        self.eval().requires_grad_(False)

    def forward(self, x: Tensor, mask: Tensor, q: Tensor, kv: Tensor, bias: Tensor, keys: Tensor) -> tuple[Tensor, ...]:
        updated = x + self.outgoing(x, mask)
        self.incoming(updated, inplace=True)
        k, v = kv.unbind()
        attended = torchops.triangle_attention(q, k, v, bias, keys), torchops.triangle_attention(q, k, v, bias)
        return updated, *attended


def test_triangles() -> None:
    model = Triangles()
    keys = torch.rand(2, 3, 1, 1, 7) > 0.5
    keys[0, 1] = False
    sizes = (2, 5, 5, 8), (2, 5, 5), (2, 3, 2, 5, 4), (2, 2, 3, 2, 7, 4), (2, 1, 2, 5, 7)
    inputs = (*(random_like(torch.empty(size), seed) for seed, size in enumerate(sizes)), keys)
    program = torchops.onnx.export(model, inputs, verbose=False)
    assert_all_close(run(program, *inputs), list(model(*inputs)), atol=1e-4, rtol=1e-5)


def test_triangle_products_beyond_float16() -> None:
    model = torchops.nn.TriangleMultiplicativeUpdate(4, bias=True).half().eval().requires_grad_(False)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    model.p_in.bias.fill_(64)
    model.g_in.bias.fill_(10)
    x = torch.randn(64, 64, 4).half()
    (got,) = run(torchops.onnx.export(model, (x,), verbose=False), x)
    exact = model.double()(x.double())
    assert (got.double() - exact).norm() < 0.1 * exact.norm()


class PairModules(nn.Module):
    """The operators beneath the modules of a pair layer: sums with x and in place, parameters apart as in OpenFold."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.layer = torchops.nn.PairLayer(8, heads=2, head_dim=3, hidden=12, bias=bias)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.5)
        self.eval().requires_grad_(False)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        apart: list[Tensor | None] = list(self.layer.tri_mul_in._parameters_beneath())
        for place in (2, 3, 6, 7):  # of a weight, its bias, and those of its gate
            if (packed := apart[place]) is not None:
                apart[place], apart[place + 2] = packed.chunk(2)
        y = x * 2
        torch.ops.myops._triangle_multiplicative_update_(y, mask, apart, False, 1e-5)
        z = x * 3
        self.layer(z, mask, inplace=True)
        return self.layer(x, mask), self.layer.tri_att_end(x), y, z


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "biases"])
def test_modules_of_pairs(bias: bool) -> None:
    """One of the rows has no key; any N, and a batch of two or none."""
    model = PairModules(bias)
    x, mask = random_like(torch.empty(2, 5, 5, 8)), (torch.rand(2, 5, 5) > 0.3).float()
    mask[0, 2] = 0
    n = Dim("n", min=2)
    for inputs in ((x, mask), (x[0], mask[0] > 0)):
        shapes = tuple({t.dim() - 2 - (t is inputs[0]): n, t.dim() - 1 - (t is inputs[0]): n} for t in inputs)
        program = torchops.onnx.export(model, inputs, dynamic_shapes=shapes, verbose=False)
        for given in (inputs, tuple(t[..., :4, :4, :] if t is inputs[0] else t[..., :4, :4] for t in inputs)):
            contiguous = [t.contiguous() for t in given]
            assert_all_close(run(program, *contiguous), list(model(*contiguous)), atol=1e-4, rtol=1e-4)


def test_attention_pair_bias() -> None:
    """Of samples, and of windows with other keys."""
    model = torchops.nn.AttentionPairBias(8, 6, heads=2, initial_norm=True).eval().requires_grad_(False)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    s, z, keys = (random_like(torch.empty(size)) for size in ((2, 3, 5, 8), (2, 5, 7, 6), (2, 3, 7, 8)))
    mask = torch.rand(2, 3, 7) > 0.3
    mask[0, 1] = False
    windows = s[:, 0], z, mask[:, 0], keys[:, 0]
    for inputs in ((s, z, mask, keys), windows, (s, z[:, :, :5], mask[..., :5])):
        contiguous = tuple(t.contiguous() for t in inputs)
        program = torchops.onnx.export(model, contiguous, verbose=False)
        assert_all_close(run(program, *contiguous), [model(*contiguous)], atol=1e-4, rtol=1e-4)


def test_pair_layer_in_mixed_precision() -> None:
    """16-bit parameters, and a float32 stream."""
    layer = torchops.nn.PairLayer(8, heads=2, head_dim=3, hidden=12).half()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    layer.eval().requires_grad_(False)
    x = random_like(torch.empty(5, 5, 8))
    (got,) = run(torchops.onnx.export(layer, (x,), verbose=False), x)
    assert got.dtype == torch.float32
    assert_all_close([got], [layer.float()(x)], atol=2e-2, rtol=2e-2)


class Overwriting(nn.Module):
    """Overwrites an intermediate, a view of one, its input and a buffer, and reads all of them afterwards."""

    state: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = torchops.nn.Dense(7, 6)
        self.register_buffer("state", random_like(torch.empty(6, 6)))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        torchops.layer_norm_(x, [7])
        t = self.layer(x) * 2
        torchops.softmax_(t[:, 1:5])
        torch.ops.myops.square_matmul_(a=t, b=self.layer.weight[:, :6], transpose_b=True)
        torchops.sigmoid_(self.state)
        return t, t + self.state[2], x

    def reference(self, x: Tensor) -> tuple[Tensor, ...]:
        x = nn.functional.layer_norm(x, [7])
        t = torch.sigmoid(nn.functional.linear(x, self.layer.weight, self.layer.bias)) * 2
        t = torch.cat([t[:, :1], t[:, 1:5].softmax(-1), t[:, 5:]], 1) @ self.layer.weight[:, :6].mT
        return t, t + torch.sigmoid(self.state)[2], x


def check(program: torch.onnx.ONNXProgram, model: Overwriting) -> None:
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    (x,) = session.get_inputs()
    assert isinstance(x.shape[0], str), "the number of rows is dynamic"
    assert {opset.domain for opset in program.model_proto.opset_import} == {""}
    assert not program.model_proto.functions
    for rows in (1, 2, 5, 17, 129):
        value = random_like(torch.empty(rows, 7), rows)
        # The same each time: a buffer starts from its exported value at every run.
        assert_all_close(run(program, value), model.reference(value), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("opset", [18, 21])
def test_overwriting_model_of_dynamic_size(opset: int, tmp_path: Path) -> None:
    model = Overwriting().eval().requires_grad_(False)
    kept = copy.deepcopy(model)
    program = torchops.onnx.export(
        model, (torch.randn(5, 7),), dynamic_shapes=({0: "rows"},), opset_version=opset, verbose=False
    )
    assert {o.version for o in program.model_proto.opset_import} == {opset}
    check(program, kept)
    assert_all_close([model.state], [kept.state])
    program.save(tmp_path / "model.onnx")
    x = torch.randn(3, 7)
    (got, *_) = onnxruntime.InferenceSession(tmp_path / "model.onnx").run(None, {"x": x.numpy()})
    assert_all_close([torch.from_numpy(got)], [kept.reference(x)[0]], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("strict", [False, True], ids=["non_strict", "strict"])
def test_exported_program(strict: bool) -> None:
    model = Overwriting().eval().requires_grad_(False)
    exported = torch.export.export(model, (torch.randn(5, 7),), dynamic_shapes=({0: Dim("rows")},), strict=strict)
    check(torchops.onnx.export(exported, verbose=False), model)
    check(torchops.onnx.export(exported.run_decompositions(), verbose=False), model)


class _Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.ops.myops._linear(x, self.weight, self.bias)
        return result


@pytest.mark.parametrize("bias", [True, False])
def test_linear_layers_of_swapped_modules(bias: bool) -> None:
    model, x = _Linear(7, 6, bias=bias).requires_grad_(False), random_like(torch.empty(5, 7))
    program = torchops.onnx.export(model, (x,), verbose=False)
    assert_all_close(run(program, x), [model(x)], atol=1e-6, rtol=1e-5)


def test_table_alone_serves_operators_that_overwrite_nothing() -> None:
    model = torchops.nn.Dense(7, 6).eval()
    x = random_like(torch.empty(5, 7))
    table = torchops.onnx.translation_table()
    names = "triangle_multiplicative_update", "triangle_attention", "_add_transition", "_linear"
    beneath = "_triangle_multiplicative_update", "_triangle_attention_update"
    of_pairs = {getattr(torch.ops.myops, name).default for name in (*names, *beneath)}
    assert set(table) == {case.op for case in OPS if case.mutates is None} | of_pairs
    program = torch.onnx.export(model, (x,), dynamo=True, custom_translation_table=table, verbose=False)
    assert program is not None
    assert model.bias is not None
    assert_all_close(run(program, x), [torch.sigmoid(x @ model.weight.mT + model.bias)], atol=1e-6, rtol=1e-5)


def test_translation_of_the_user_wins() -> None:
    from onnxscript import opset18 as op

    def without_bias(x: Any, w: Any, b: Any = None) -> Any:
        return op.MatMul(x, op.Transpose(w, perm=[1, 0]))

    model = torchops.nn.Dense(7, 6).eval()
    x = random_like(torch.empty(5, 7))
    table = {torch.ops.myops.dense.default: without_bias}
    program = torchops.onnx.export(model, (x,), custom_translation_table=table, verbose=False)
    assert_all_close(run(program, x), [x @ model.weight.mT], atol=1e-6, rtol=1e-5)


def test_import_loads_no_onnx() -> None:
    code = "import sys, torchops.onnx; print({'onnx', 'onnxscript', 'onnxruntime', 'onnx_ir'} & set(sys.modules))"
    path = str(Path(torchops.__file__).parents[1])
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {path!r}); {code}"], capture_output=True, text=True
    )
    assert result.stdout == "set()\n", result.stderr

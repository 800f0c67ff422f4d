"""Models with layers of torchops, quantized by torchao: their weights, and their exported graphs."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchops

torchao: Any = pytest.importorskip("torchao.quantization", reason="needs torchao (dependency group quantization)")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = torchops.nn.Dense(64, 96)
        self.gate = torchops.nn.Gate(96, 64)
        self.glu = torchops.nn.GLU(64, 32, activation="silu")

    def forward(self, x: Tensor) -> Tensor:
        return self.glu(self.gate(x, self.dense(x)))


class Written(nn.Module):
    """The same with PyTorch's operators, of the same layers."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.dense, self.gate, self.value, self.of_value = (
            self.linear(m) for m in (model.dense, model.gate, model.glu.value, model.glu.gate)
        )

    @staticmethod
    def linear(layer: nn.Linear | torchops.nn.Dense | torchops.nn.Gate) -> nn.Linear:
        copied = nn.Linear(layer.in_features, layer.out_features, dtype=layer.weight.dtype)
        copied.load_state_dict(layer.state_dict())
        return copied

    def forward(self, x: Tensor) -> Tensor:
        v = x * torch.sigmoid(self.gate(torch.sigmoid(self.dense(x))))
        return self.value(v) * torch.nn.functional.silu(self.of_value(v))


def models(dtype: torch.dtype) -> tuple[Model, Written, Tensor]:
    torch.manual_seed(0)
    model = Model().eval().to(dtype)
    return model, Written(model).eval(), torch.randn(5, 7, 64, dtype=dtype)


@pytest.mark.parametrize(
    "config", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"]
)
def test_weights(config: str) -> None:
    model, written, x = models(torch.bfloat16)
    exact = model(x)
    for m in (model, written):
        torchao.quantize_(m, getattr(torchao, config)(), filter_fn=torchops.quantization.quantizable)
    assert type(model.dense.weight) is type(written.dense.weight)
    assert type(model.dense.weight) not in (Tensor, nn.Parameter)
    y = model(x)
    assert torch.equal(y, written(x))
    assert not torch.equal(y, exact)
    torch.testing.assert_close(y, exact, rtol=0.1, atol=0.1)


def test_without_the_filter_gates_are_left() -> None:
    model, written, x = models(torch.bfloat16)
    for m in (model, written):
        torchao.quantize_(m, torchao.Int8WeightOnlyConfig())
    assert type(model.dense.weight) is type(model.gate.weight) is nn.Parameter
    written.dense, written.gate = (Written.linear(layer) for layer in (model.dense, model.gate))
    torch.testing.assert_close(model(x), written(x), rtol=0.02, atol=0.02)


def test_the_filter_leaves_out_what_needs_plain_weights() -> None:
    model = nn.ModuleDict({"pair": torchops.nn.PairLayer(16, 2, 8), "attention": nn.MultiheadAttention(16, 2)})
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig(), filter_fn=torchops.quantization.quantizable)
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert model["pair"](torch.randn(3, 3, 16)).shape == (3, 3, 16)


@pytest.mark.parametrize("replaced", [False, True])
def test_what_replaces_linear_layers_leaves_gates(replaced: bool) -> None:
    """Conversion to float8, and quantization-aware training, which refuses what it is told to take."""
    from torchao.float8 import convert_to_float8_training
    from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

    x = torch.randn(5, 64)
    model = nn.Sequential(nn.Linear(64, 64), nn.Sigmoid(), torchops.nn.Dense(64, 64), nn.Linear(64, 32))
    if replaced:
        assert torchops.replace(model).replaced == ("0",)
    training = QATConfig(weight_config=IntxFakeQuantizeConfig(torch.int8, "per_channel"), step="prepare")
    for change in (convert_to_float8_training, lambda m: torchao.quantize_(m, training)):
        changed = copy.deepcopy(model)
        change(changed)
        assert [type(a) is type(b) for a, b in zip(changed, model, strict=True)] == [replaced, True, True, False]
        assert torch.equal(changed[2](x), model[2](x))
    with pytest.raises(ValueError, match="Dense"):
        torchao.quantize_(model, training, filter_fn=torchops.quantization.quantizable)


class SwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(64, 96), nn.Linear(64, 96)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.silu(self.gate(x)) * self.up(x)


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(64, 96)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.both(x).chunk(2, -1)
        return value * torch.sigmoid(gate)


class FusedSwiGLU(nn.Module):
    def __init__(self, of: SwiGLU) -> None:
        super().__init__()
        self.gate, self.up = of.gate, of.up

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.up, self.gate
        return torchops.glu(x, value.weight, gate.weight, value.bias, gate.bias, activation="silu")


class FusedHalves(nn.Module):
    def __init__(self, of: Halves) -> None:
        super().__init__()
        self.both = of.both

    def forward(self, x: Tensor) -> Tensor:
        weights, biases = self.both.weight.chunk(2), self.both.bias.chunk(2)
        return torchops.glu(x, *weights, *biases)


@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"])
@pytest.mark.parametrize("activation", [SwiGLU, Halves])
def test_weights_after_replace(activation: type[nn.Module], config: str) -> None:
    """The layers run as they were written."""
    model = nn.Sequential(activation())
    former, x = copy.deepcopy(model), torch.randn(5, 64)
    assert torchops.replace(model, {SwiGLU: FusedSwiGLU, Halves: FusedHalves}).replaced == ("0",)
    for m in (model, former):
        torchao.quantize_(m, getattr(torchao, config)())
    assert type(next(model.parameters())) is type(next(former.parameters())) is not nn.Parameter
    assert torch.equal(model(x), former(x))


@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"])
@pytest.mark.parametrize("activation", [nn.Sigmoid, nn.GLU])
def test_weights_of_pairs(activation: type[nn.Module], config: str) -> None:
    """The layer in the place of a pair computes both as written."""
    model = nn.Sequential(nn.Linear(64, 96), activation())
    former, x = copy.deepcopy(model), torch.randn(5, 64)
    assert torchops.replace(model).replaced == ("0",)
    torchao.quantize_(model, getattr(torchao, config)(), filter_fn=lambda m, name: name == "0")
    torchao.quantize_(former, getattr(torchao, config)())
    assert type(model[0].weight) is type(former[0].weight) is not nn.Parameter
    torch.testing.assert_close(model(x), former(x))


@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"])
@pytest.mark.parametrize(
    "kind", ["Transition", "TriangleMultiplicativeUpdate", "TriangleAttention", "AttentionPairBias"]
)
def test_weights_of_pair_layers(kind: str, config: str) -> None:
    """Which are called, as written."""
    torch.manual_seed(0)
    of_pairs = kind == "AttentionPairBias"  # which are x too
    module: Any = getattr(torchops.nn, kind)(*[32] * (1 + of_pairs))
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.2)
    exact, x = copy.deepcopy(module), torch.randn(1, 6, 6, 32)
    given = (x, x) if of_pairs else (x,)
    torchao.quantize_(module, getattr(torchao, config)())
    with torch.no_grad():
        y, expected = module(*given), exact(*given)
    assert not torch.equal(y, expected)
    assert (y - expected).norm() <= 0.05 * expected.norm()


def test_errors() -> None:
    """Those of the operators."""
    layer = nn.Linear(8, 4)
    torchao.quantize_(layer, torchao.Int8WeightOnlyConfig())
    x = torch.randn(3, 8)
    calls: list[tuple[Any, Any]] = [
        (ValueError, lambda w: torchops.glu(x, w, w, activation="relu")),  # type: ignore[arg-type]
        (RuntimeError, lambda w: torchops.gate(torch.randn(4), x, w)),
        (RuntimeError, lambda w: torch.ops.myops.gate.default(torch.randn(1, 4), x, w)),
    ]
    for kind, call in calls:
        texts = []
        for w in (torch.randn(4, 8), layer.weight):
            with torch.no_grad(), pytest.raises(kind) as error:
                call(w)
            texts.append(str(error.value).splitlines()[0])
        assert texts[0] == texts[1]


def test_gradient_of_the_input() -> None:
    model, written, x = models(torch.bfloat16)
    gradients: list[Tensor] = []
    for m in (model, written):
        torchao.quantize_(m, torchao.Int8WeightOnlyConfig(), filter_fn=torchops.quantization.quantizable)
        leaf = x.clone().requires_grad_()
        m(leaf).sum().backward()
        assert leaf.grad is not None
        gradients.append(leaf.grad)
    assert torch.equal(gradients[0], gradients[1])
    assert gradients[0].abs().sum() > 0


def test_compile() -> None:
    model, _, x = models(torch.bfloat16)
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig(), filter_fn=torchops.quantization.quantizable)
    with torch.no_grad():
        y = torch.compile(model, fullgraph=True)(x)
        torch.testing.assert_close(y, model(x), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("order", ["import torchao.quantization, torchops", "import torchops, torchao.quantization"])
def test_either_import_first(order: str) -> None:
    code = f"""
import torch
{order}
layer = torchops.nn.Dense(32, 32).to(torch.bfloat16)
torchao.quantization.quantize_(
    layer, torchao.quantization.Int8WeightOnlyConfig(), filter_fn=torchops.quantization.quantizable
)
print(tuple(layer(torch.zeros(2, 32, dtype=torch.bfloat16)).shape))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[-2] == "(2, 32)"


def test_exported_graph() -> None:
    """A quantizer finds all products in a graph that is written out, and none of our operators."""
    import torchao.quantization.pt2e.quantizer.x86_inductor_quantizer as x86
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    model, written, x = models(torch.float32)
    quantized = []
    for m in (model, written):
        with torch.no_grad():
            graph = torchops.quantization.written_out(torch.export.export(m, (x,))).module()
        quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
        prepared = prepare_pt2e(graph, quantizer)
        prepared(x)
        quantized.append(convert_pt2e(prepared))
    targets = [str(node.target) for node in quantized[0].graph.nodes if node.op == "call_function"]
    assert not any("myops" in target for target in targets)
    assert sum("dequantize_per_channel" in target for target in targets) == 4
    assert torch.equal(quantized[0](x), quantized[1](x))
    torch.testing.assert_close(quantized[0](x), copy.deepcopy(model)(x), rtol=0.1, atol=0.1)

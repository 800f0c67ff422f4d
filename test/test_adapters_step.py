"""A step of a sampler that is recorded: what depends on the trunk and on parameters alone is computed once, and what
depends on the conditioning alone by one product for all layers. Something that calls the function again stands in for
the graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checks import assert_all_close
from test_adapters_sampling import ATOMS, HEADS, TOKENS, C, conditions, packages, sampler
from test_step_graph import again
from torch import Tensor, nn

from torchops.convert import step_graph
from torchops.convert.conditioning import conditioned, given
from torchops.convert.diffusion import DiffusionLayer

pytestmark = [pytest.mark.xdist_group("adapters")]

LAYERS = 2  # of the transformer of tokens


@pytest.fixture(autouse=True)
def graphs_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        **{"DEVICE": "cpu", "_capture": again, "_settings": torch.is_inference_mode_enabled},
        **{"_drawn": lambda: torch.get_rng_state().tolist(), "_capturing": bool, "_available": lambda: 2**40},
    }.items():
        monkeypatch.setattr(step_graph, name, value)


def stepped(model: Any, new: Any, package: str, call: dict[str, Any], steps: int = 1, tolerance: float = 1e-3) -> None:
    """Both are the same in steps of other noise."""
    for _ in range(steps):
        call |= {"r_noisy": torch.randn(3, ATOMS, 3), "times": torch.rand(1).expand(3)}
        got, expected = new.score_model(**call), model.score_model(**call)
        got, expected = (value["r_update"] if package == "boltzgen" else value for value in (got, expected))
        assert_all_close([got], [expected], atol=tolerance, rtol=tolerance)


def recording(new: Any) -> Any:
    (kind,) = step_graph._graphs(new.score_model).kinds.values()
    return kind.recording


@packages
@pytest.mark.parametrize("inference", [True, False], ids=["inference mode", "no_grad"])
def test_a_step_computes_nothing_again(package: str, inference: bool) -> None:
    model, new = sampler(package)
    with torch.inference_mode() if inference else torch.no_grad():
        stepped(model, new, package, conditions(package) | {"multiplicity": 3}, steps=5)
    steps = recording(new).constants
    ran = [s.operator._schema.name.partition("::")[2] for s in steps if s.results is None]
    assert "repeat_interleave" not in ran
    kept = [t for step in steps for t in step.kept.values()]
    assert sum(t.shape == (1, HEADS, TOKENS, TOKENS) for t in kept) == LAYERS  # scores, by heads
    # Two products with a sigmoid, of all layers; the atoms' conditioning comes from the trunk.
    assert ran.count("dense") == 2
    packed = [t.shape for t in kept if t.dim() == 2 and len(t) == LAYERS * 2 * 2 * C]
    assert packed == [(LAYERS * 2 * 2 * C, 2 * C)] * 3


@packages
def test_a_step_notices_new_values_of_parameters(package: str) -> None:
    model, new = sampler(package)
    call = conditions(package) | {"multiplicity": 3}
    with torch.no_grad():
        stepped(model, new, package, call, steps=4)
        former = recording(new)
        for module in (model, new):
            for name, parameter in module.score_model.token_transformer.named_parameters():
                if "s_scale" in name:
                    parameter.add_(1)
        stepped(model, new, package, call, steps=1)
        assert recording(new) is None
        stepped(model, new, package, call, steps=3)
    assert recording(new) not in (None, former)


def layers_of(new: Any) -> list[Any]:
    return [m for m in new.score_model.token_transformer.modules() if isinstance(m, DiffusionLayer)]


def test_conditions_of_all_layers_are_those_of_each() -> None:
    _, new = sampler("boltz")
    layers = layers_of(new)
    s = torch.randn(1, TOKENS, 2 * C)
    with torch.no_grad():
        expected = [layer._conditions(s, samples=1) for layer in layers]
        with conditioned(layers, s):
            found = [given(layer, s) for layer in layers]
            assert given(layers[0], s.clone()) is None
        assert given(layers[0], s) is None
    for got, each in zip(found, expected, strict=True):
        assert got is not None
        assert_all_close(list(got), list(each))


@pytest.mark.parametrize("part", ["eps", "bias", "norm", "weight"])
def test_layers_that_differ_compute_their_own(part: str) -> None:
    _, new = sampler("boltz")
    layers = layers_of(new)
    last = layers[-1]
    if part == "eps":
        last._eps["adaln.s_norm"] *= 2
    elif part == "bias":
        last.adaln.s_bias.register_parameter("bias", nn.Parameter(torch.randn(2 * C)))
    elif part == "norm":
        last.adaln.s_norm.register_parameter("bias", nn.Parameter(torch.randn(2 * C)))
    else:
        last.adaln.s_bias.weight = nn.Parameter(Other(torch.randn(2 * C, 2 * C)))
    s = torch.randn(1, TOKENS, 2 * C)
    with torch.no_grad(), conditioned(layers, s):
        assert given(last, s) is None


class Other(Tensor):
    """Of which nothing is known."""


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_notices_an_optimizer(fused: bool) -> None:
    """A fused one changes no versions."""
    model, new = sampler("boltz")
    call = conditions("boltz") | {"multiplicity": 3}
    with torch.no_grad():
        stepped(model, new, "boltz", call, steps=5)
        for module in (model, new):
            parameters = [*module.score_model.parameters()]
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            torch.optim.AdamW(parameters, lr=0.05, fused=fused).step()
        stepped(model, new, "boltz", call, steps=5)


class Wrapper(nn.Module):
    """As adapters wrap a layer."""

    def __init__(self, of: nn.Module) -> None:
        super().__init__()
        self.of = of

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.of(x)
        return out


@pytest.mark.filterwarnings("ignore:DiffusionTransformerLayer runs as released")
def test_a_wrapped_layer_runs_as_released() -> None:
    model, new = sampler("boltz")
    for layer in layers_of(new)[:1]:
        layer.adaln.s_scale = Wrapper(nn.Linear(2 * C, 2 * C))
        model.score_model.token_transformer.layers[0].adaln.s_scale = layer.adaln.s_scale
    with torch.no_grad():
        stepped(model, new, "boltz", conditions("boltz") | {"multiplicity": 3}, steps=5)

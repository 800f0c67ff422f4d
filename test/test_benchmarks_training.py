"""`python -m benchmarks whole --train`, in small sizes."""

from __future__ import annotations

import argparse
import copy
import importlib
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import whole_models
from torch import Tensor, nn

import torchops
from benchmarks.__main__ import main
from benchmarks.peak_memory import supported
from benchmarks.progress import Progress
from benchmarks.whole import frame, training

CPU = torch.device("cpu")
SIZES = frame.Sizes(tokens=8, msa=4, blocks=1, steps=0, samples=2, recycling=1)
HOW = ["whole", "--train", "--device", "cpu", "--tokens", "8", "--msa", "4", "--blocks", "1", "--samples", "2"]
boltz = pytest.mark.skipif(find_spec("boltz") is None, reason="boltz is not installed")


@boltz
@pytest.mark.xdist_group("adapters")
def test_boltz(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each variant has a time for each round, and deviations of bfloat16 that are those of a rounding."""
    file = importlib.import_module("benchmarks.whole.boltz_training")
    monkeypatch.setattr(file, "BoltzTraining", whole_models.BoltzTraining)
    torch.manual_seed(0)
    assert main([*HOW, "--rounds", "2", "--variants", "replaced,released", "--output", str(tmp_path)]) == 0
    document = json.loads((tmp_path / "whole-boltz-8-2-training.json").read_text())
    assert document["sizes"]["recycling"] == 0
    assert 0 < document["gradients, bytes"] <= document["parameters, bytes"]
    assert list(document["variants"]) == ["released", "replaced"]
    for result in document["variants"].values():
        assert len(result["seconds"]) == 2
        for step, *parts in zip(result["seconds"], result["forward, s"], result["backward, s"], strict=True):
            assert sum(parts) == pytest.approx(step)
            assert min(parts) > 0
        assert ("peak beyond, bytes" in result) == supported(CPU)
        assert {"loss", "all gradients", "gradients of structure_module"} <= set(result["deviations"])
        assert all(0 < judged["norm"] < 0.2 for judged in result["deviations"].values())
    assert any("pairformer_module.layers.* PairformerLayer" in name for name in document["replace"]["replaced"])
    page = (tmp_path / "whole-boltz-8-2-training.md").read_text()
    assert "| step, median of 2 |" in page
    assert "| gradients of msa_module |" in page
    assert (tmp_path / "whole-boltz-8-2-training.png").exists() == (find_spec("matplotlib") is not None)


@pytest.fixture
def subject() -> Any:
    package = whole_models.BoltzTraining("boltz")
    torch.manual_seed(0)
    try:
        model = package.build(SIZES, CPU).train()
        frame.draw_parameters(model, CPU)
        yield frame.Subject(package, model, package.features(SIZES, CPU), SIZES, CPU)
    finally:
        package.forget()


@boltz
@pytest.mark.xdist_group("adapters")
@pytest.mark.filterwarnings("ignore")
def test_the_step_is_the_released_one(subject: frame.Subject) -> None:
    """Loss and gradients are those of `Boltz2.training_step`, and after `replace` the same but for a rounding."""
    assert all(isinstance(subject.model.get_submodule(name), nn.ModuleList) for name in subject.package.compiled)
    judge = training.Judge(subject)
    model: Any = copy.deepcopy(subject.model)

    class Arguments(dict[str, Any]):
        __getattr__ = dict.__getitem__

    weights = {"confidence_loss_weight": 0.003, "diffusion_loss_weight": 4.0, "distogram_loss_weight": 0.03}
    steps = {"recycling_steps": 1, "sampling_steps": 2, "diffusion_multiplicity": 2, "diffusion_samples": 1}
    model.training_args, model.no_random_recycling_training = Arguments(weights | steps), True
    # Whether there is a confidence model is looked at in the forward, and for the loss.
    model.register_forward_hook(lambda *_: setattr(model, "confidence_prediction", False))

    def released(model: Any, features: frame.Features, sizes: frame.Sizes) -> Tensor:
        samples = {"sample_atom_coords": features["coords"]}
        step = mock.patch.object(type(model), "global_step", 1, create=True)  # in the first, something is logged
        with step, mock.patch.object(model.structure_module, "sample", return_value=samples):
            return model.training_step(features, 0)

    with mock.patch.object(subject.package, "loss", released):
        found = judge.deviations(subject._replace(model=model), "float32")
    assert found["loss"]["norm"] < 1e-6
    assert found["all gradients"]["norm"] < 1e-6
    torchops.replace(subject.model)
    found = judge.deviations(subject, "float32")
    assert all(judged["norm"] < 1e-4 for judged in found.values())


class Scaled(nn.Module):
    """Multiplies, and notes in which precision it does so."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.other = (nn.Parameter(torch.ones(3)) for _ in range(2))
        self.autocast: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.autocast.append(torch.is_autocast_enabled("cpu"))
        out = self.weight * x
        out.register_hook(lambda _: self.autocast.append(torch.is_autocast_enabled("cpu")))
        return out


class Small(frame.Trained):
    root, parts, compiled, sampler, score, trunk = __name__, (), ("",), "", "", ()

    def build(self, sizes: frame.Sizes, device: torch.device) -> nn.Module:
        return nn.Sequential(Scaled(), Scaled())

    def features(self, sizes: frame.Sizes, device: torch.device) -> frame.Features:
        return {"x": torch.ones(3)}

    def call(self, model: nn.Module, features: frame.Features, sizes: frame.Sizes) -> dict[str, Tensor]:
        raise NotImplementedError

    def loss(self, model: nn.Module, features: frame.Features, sizes: frame.Sizes) -> Tensor:
        return model(features["x"]).sum()


def small() -> frame.Subject:
    package = Small("none")
    return frame.Subject(package, package.build(SIZES, CPU), package.features(SIZES, CPU), SIZES, CPU)


def test_autocast_ends_before_the_backward_pass() -> None:
    one = small()
    training.run(one, "bf16-mixed")
    assert one.model.get_submodule("0").autocast == [True, False]


def test_variants_share_the_parameters() -> None:
    """Each adds to the same gradients, and nothing else of one is the other's. Compiled ones are not judged."""
    one, document = small(), dict[str, Any]()
    variants = {"variants": ["released", "compiled"], "backend": "eager", "rounds": 2}
    options = argparse.Namespace(package="none", precision="float32", no_deviations=False, **variants)
    training.measured(one, options, document, Progress(4))
    assert document["parameters, bytes"] == 2 * document["gradients, bytes"]  # half of them are never used
    released, compiled = document["variants"].values()
    assert released["deviations"]["all gradients"]["norm"] == 0
    assert "deviations" not in compiled
    assert len(compiled["seconds"]) == 2
    assert one.model.get_submodule("0").autocast == [False, False]  # of the step that deviations are measured from


def test_deviations_of_gradients() -> None:
    """Also after other steps have added to the gradients, and where a gradient is missing."""
    one = small()
    judge = training.Judge(one)
    training.run(one, "float32")
    found = judge.deviations(one, "float32")
    assert all(judged["norm"] == 0 for judged in found.values())
    first, second = (one.model.get_submodule(name) for name in "01")
    hook = first.register_forward_hook(lambda module, args, out: out * 1.5)
    found = judge.deviations(one, "float32")
    assert found["all gradients"] == {"norm": pytest.approx(0.5), "greatest": 0.5, "of": 1.0}
    hook.remove()
    second.register_forward_hook(lambda module, args, out: args[0])
    found = judge.deviations(one, "float32")
    assert found["gradients of 0"]["norm"] == 0
    assert found["gradients of 1"]["norm"] == 1


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--package", "protenix"], "--train knows boltz, not protenix"),
        (["--steps", "2"], "are of predictions"),
        (["--no-kernels"], "are of predictions"),
        (["--rounds", "0"], "expected --rounds of at least 1"),
    ],
)
def test_refused_options(options: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["whole", "--train", *options]) == 2
    assert reason in capsys.readouterr().err

"""`python -m benchmarks whole`, in small sizes."""

from __future__ import annotations

import importlib
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import whole_models
from torch import nn

from benchmarks.__main__ import main
from benchmarks.whole import deviations, frame
from benchmarks.whole.clock import Clock

SMALL = {"tokens": 24, "msa": 8, "blocks": 2, "steps": 2, "recycling": 0, "rounds": 1}


@pytest.mark.skipif(find_spec("boltz") is None, reason="boltz is not installed")
@pytest.mark.xdist_group("adapters")
def test_boltz(tmp_path: Path) -> None:
    """The parts add up to the whole, what `replace` did is in the document, and deviations are those of a rounding."""
    sizes = [f"--{name}={value}" for name, value in SMALL.items()]
    how = ["--device", "cpu", "--variants", "released,replaced,replaced-16", "--precision", "float32", "--no-plots"]
    assert main(["whole", "--package", "boltz", *sizes, *how, "--output", str(tmp_path)]) == 0
    document = json.loads((tmp_path / "whole-boltz-24-1.json").read_text())
    assert list(document["variants"]) == ["released", "replaced", "replaced-16"]
    in_16_bits = document["variants"]["replaced-16"]["deviations"]["score model, from float64"]["norm"]
    assert 1e-4 < in_16_bits < 1e-1
    for result in [document["variants"][name] for name in ("released", "replaced")]:
        assert {"sampling", "pairformer_module", "msa_module", "confidence_module"} <= set(result["parts, s"])
        assert sum(result["parts, s"].values()) == pytest.approx(result["seconds"][0])
        judged = result["deviations"]
        assert judged["z"]["norm"] < 1e-4
        assert judged["score model, from float64"]["norm"] < 1e-5
    assert document["variants"]["released"]["deviations"]["z"]["norm"] == 0
    assert any("pairformer_module.layers.* PairformerLayer" in name for name in document["replace"]["replaced"])
    classes = document["variants"]["replaced"]["classes, s"]
    assert any(name == "pairformer_module|TriangleMultiplicationOutgoing" for name in classes)
    page = (tmp_path / "whole-boltz-24-1.md").read_text()
    assert "own optional kernels are off" in page
    assert "| pairformer_module |" in page


@pytest.mark.skipif(find_spec("openfold3") is None, reason="openfold3 is not installed")
@pytest.mark.xdist_group("adapters")
def test_openfold3(tmp_path: Path) -> None:
    sizes = [f"--{name}={value}" for name, value in (SMALL | {"tokens": 12, "blocks": 1, "rounds": 0}).items()]
    how = ["--device", "cpu", "--variants", "released,replaced", "--precision", "float32", "--no-plots"]
    what = ["whole", "--package", "openfold3", "--no-deviations"]
    assert main([*what, *sizes, *how, "--output", str(tmp_path)]) == 0
    document = json.loads((tmp_path / "whole-openfold3-12-1.json").read_text())
    for result in document["variants"].values():
        assert {"sample_diffusion", "pairformer_stack", "msa_module", "aux_heads"} <= set(result["parts, s"])
    assert any("pairformer_stack" in name for name in document["replace"]["replaced"])


@pytest.mark.skipif(find_spec("protenix") is None, reason="protenix is not installed")
@pytest.mark.xdist_group("adapters")
def test_protenix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole configuration, but for the widths and depths, with which its 230 million parameters take a minute."""
    monkeypatch.setattr(importlib.import_module("benchmarks.whole.protenix"), "Protenix", whole_models.Protenix)
    sizes = [f"--{name}={value}" for name, value in (SMALL | {"tokens": 8, "blocks": 1, "rounds": 0}).items()]
    how = ["--device", "cpu", "--variants", "released,replaced", "--precision", "float32", "--no-plots"]
    assert main(["whole", "--package", "protenix", *sizes, *how, "--output", str(tmp_path)]) == 0
    document = json.loads((tmp_path / "whole-protenix-8-1.json").read_text())
    result = document["variants"]["replaced"]
    assert {"sampling", "template_embedder", "pairformer_stack", "confidence_head"} <= set(result["parts, s"])
    assert {"s", "z", "coordinate", "score model, from float64"} <= set(result["deviations"])
    assert all(judged["norm"] < 1e-4 for judged in result["deviations"].values())
    assert any("pairformer_stack.blocks.*.tri_att_start" in name for name in document["replace"]["replaced"])


class Inner(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Inner(), Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class Released(frame.Package):
    root = __name__
    parts = ("first", "second")
    compiled = ()
    sampler = ""
    score = "second"
    trunk = ("x",)
    reads: ClassVar = {"missing_base": {"Base": nn.Module}}

    def build(self, sizes: frame.Sizes, device: torch.device) -> nn.Module:
        return Model()

    def features(self, sizes: frame.Sizes, device: torch.device) -> frame.Features:
        return {"x": torch.zeros(3)}

    def call(self, model: nn.Module, features: frame.Features, sizes: frame.Sizes) -> dict[str, torch.Tensor]:
        return {"x": model(features["x"])}


def subject() -> frame.Subject:
    package, sizes, cpu = Released("none"), frame.Sizes(3, 1, 1, 1, 1, 0), torch.device("cpu")
    return frame.Subject(package, Model(), package.features(sizes, cpu), sizes, cpu)


def test_clock_leaves_nothing_behind() -> None:
    one = subject()
    clock = Clock(one, {name: type(module).__name__ for name, module in one.model.named_modules()})
    one.run("float32")
    seconds = clock.finish()
    assert {part for part, _ in seconds} == {"first", "second", "(rest)"}
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in one.model.modules())


def test_deviations_of_what_is_exact_and_of_what_is_not() -> None:
    one = subject()
    judge = deviations.Judge(one)
    assert judge.deviations(one, "float32")["x"]["norm"] == 0
    one.model.get_submodule("second").register_forward_hook(lambda module, args, out: out * 1.5)
    found = judge.deviations(one, "float32")
    assert found["x"]["norm"] == pytest.approx(0.5)
    assert found["score model, from float64"]["norm"] == pytest.approx(0.5)


def test_the_score_model_is_judged_as_it_is_called() -> None:
    """With rows that share memory where the sampler gives it such."""
    one, strides = subject(), []
    judge = deviations.Judge(one)
    first, second = (one.model.get_submodule(name) for name in ("first", "second"))
    first.register_forward_hook(lambda module, args, out: out[:1].expand(3))
    second.register_forward_pre_hook(lambda module, args: strides.append(args[0].stride()))
    assert judge.deviations(one, "float32")["score model, from float64"]["norm"] == 0
    assert strides == [(0,), (0,)]


def test_stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For what is missing, not for what the package itself lacks."""
    lines = ["import missing_top.inner", "from missing_base import Base", "from missing_other import decorate", ""]
    lines += ["class Mine(Base):", "    pass", "", "@decorate(1)", "def twice(x):", "    return 2 * x"]
    (tmp_path / "published.py").write_text("\n".join(lines) + "\n")
    (tmp_path / "broken.py").write_text("import broken.nothing\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    package = Released("none")
    file: Any = package.imported("published")
    assert issubclass(file.Mine, nn.Module)
    assert file.twice(2) == 4
    assert package.stand_ins == ["missing_top", "missing_top.inner", "missing_base", "missing_other"]
    monkeypatch.setattr(package, "root", "broken")
    with pytest.raises(ModuleNotFoundError):
        package.imported("broken")


def test_compiled_layers_are_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the document has a bar for each variant, in the order in which one does not change the next."""
    package = Released("none")
    monkeypatch.setattr(package, "version", lambda: "1")
    monkeypatch.setattr(Released, "compiled", ("",))
    model = Model()
    monkeypatch.setattr(Released, "build", lambda self, sizes, device: model)
    monkeypatch.setattr(importlib.import_module("benchmarks.whole.boltz"), "package", lambda name: package)
    how = ["--device", "cpu", "--backend", "eager", "--variants", "compiled,released", "--output", str(tmp_path)]
    assert main(["whole", *how]) == 0
    document = json.loads((tmp_path / "whole-boltz-256-1.json").read_text())
    assert list(document["variants"]) == ["released", "compiled"]
    assert not any(module._compiled_call_impl for module in model.modules())
    assert "classes, s" not in document["variants"]["compiled"]
    assert (tmp_path / "whole-boltz-256-1.png").exists() == (find_spec("matplotlib") is not None)


def test_what_is_not_installed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    package = Released("none")
    monkeypatch.setattr(Released, "needs", ("missing_dependency",))
    monkeypatch.setattr(importlib.import_module("benchmarks.whole.boltz"), "package", lambda name: package)
    assert main(["whole"]) == 2
    assert "boltz needs missing_dependency, not installed here" in capsys.readouterr().err


def test_unknown_variants(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["whole", "--variants", "released,faster"]) == 2
    assert "got faster" in capsys.readouterr().err

"""A whole prediction of a released model before and after `torchops.replace`, or with `--train`, a training step:
`python -m benchmarks whole`.

The model has random weights and synthetic features, since time and memory depend on neither. "Released" means the
package as published with its own optional kernels off. It is measured as released, with its layers under
``torch.compile``, and after `replace`. A package needs no more than what its forward calls: whatever else it imports,
and is not installed, is an empty stand-in, which the results list. So on a machine without a network, wheels suffice:

    pip install --no-deps --no-index --find-links WHEELS --target FOLDER boltz einops
    python -m benchmarks whole --package boltz --packages-from FOLDER --tokens 768
"""

from __future__ import annotations

import argparse
import gc
import sys
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from .. import machine
from .. import options as shared
from ..progress import Progress
from ..record import write
from . import deviations, frame, measure, report, training

# Each package's file.
PACKAGES = {
    **{"boltz": "boltz", "boltz-community": "boltz", "boltzgen": "boltz"},
    **{"openfold3": "openfold3", "protenix": "protenix"},
}
TRAINED = {"boltz": "boltz_training"}
VARIANTS = ("released", "compiled", "replaced", "replaced-16")  # the last with diffusion_dtype=torch.bfloat16
SIZES = {"tokens": 256, "msa": 1024, "blocks": 0, "steps": 200, "samples": 1, "recycling": 3, "rounds": 1}
OF_TRAINING = {"tokens": 384, "steps": 0, "samples": 16, "recycling": 0, "rounds": 5}
TEXTS = {
    "tokens": "tokens of the input",
    "msa": "sequences of the alignment",
    "blocks": "layers of the trunk, 0 for as many as released",
    "steps": "steps of the sampler",
    "samples": "structures, or noise levels of a training step",
    "recycling": "recycles of the trunk",
    "rounds": "further times of the whole forward, or times of a training step",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--package", choices=PACKAGES, default="boltz")
    parser.add_argument("--train", action="store_true", help="a training step, of boltz, instead of a prediction")
    parser.add_argument("--packages-from", type=Path, metavar="FOLDER", help="a folder to import packages from first")
    shared.add(parser, "device", "no-plots", "output", output=Path("build/whole"))
    for name, value in SIZES.items():
        trained = f", {OF_TRAINING[name]} with --train" if name in OF_TRAINING else ""
        parser.add_argument(f"--{name}", type=int, help=f"{TEXTS[name]} (default: {value}{trained})")
    parser.add_argument("--precision", choices=("bf16-mixed", "float32", "tf32"), default="bf16-mixed")
    variants = f"by comma: {','.join(VARIANTS)} (default: all but the last)"
    parser.add_argument("--variants", type=lambda text: text.split(","), default=list(VARIANTS[:-1]), help=variants)
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--no-deviations", action="store_true", help="without the runs in float32 and float64")
    parser.add_argument("--no-kernels", action="store_true", help="without the profiler's run")


def run(options: argparse.Namespace) -> int:
    """Measures one package in one size; writes JSON, a page and a picture."""
    if reason := _refusal(options):
        return shared.refused("whole", reason)
    options.variants = [v for v in VARIANTS if v in options.variants]
    for size, value in (SIZES | (OF_TRAINING if options.train else {})).items():
        if getattr(options, size) is None:
            setattr(options, size, value)
    if options.packages_from:
        sys.path.insert(0, str(options.packages_from))
    device = shared.device_of(options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        file = (TRAINED if options.train else PACKAGES)[options.package]
        package: frame.Package = import_module(f".{file}", __name__).package(options.package)
        if missing := package.missing():
            return shared.refused("whole", f"{options.package} needs {', '.join(missing)}, not installed here")
        try:
            document = _measured(package, options, device)
        finally:
            package.forget()
    name = f"whole-{options.package}-{options.tokens}-{options.samples}" + ("-training" if options.train else "")
    write(options.output / f"{name}.json", document)
    page = report.page(document)
    (options.output / f"{name}.md").write_text(page)
    print(page)
    if not options.no_plots:
        print(report.draw(document, options.output / f"{name}.png"))
    return 0


def _refusal(options: argparse.Namespace) -> str:
    """Why these options do not fit together, if they don't."""
    if unknown := set(options.variants) - set(VARIANTS):
        return f"expected some of {', '.join(VARIANTS)}, got {', '.join(unknown)}"
    if not options.train:
        return ""
    if options.package not in TRAINED:
        return f"--train knows {', '.join(TRAINED)}, not {options.package}"
    if options.steps is not None or options.no_kernels:
        return "--steps and --no-kernels are of predictions: leave them out with --train"
    if options.rounds is not None and options.rounds < 1:
        return f"expected --rounds of at least 1 with --train, got {options.rounds}"
    return ""


def _measured(package: frame.Package, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    sizes = frame.Sizes(**{name: getattr(options, name) for name in frame.Sizes._fields})
    progress = Progress(len(options.variants) + 2)
    progress.case(options.package)
    progress.state("building it")
    model = package.build(sizes, device).train(options.train)
    if not options.train:
        model.requires_grad_(False)
    frame.draw_parameters(model, device)
    features = package.features(sizes, device)
    subject = frame.Subject(package, model, features, sizes, device)
    progress.finished()
    document: dict[str, Any] = {
        **machine.describe(device),
        "command": options.command,
        "package": options.package,
        "version": package.version(),
        "stand-ins": package.stand_ins,
        "precision": options.precision,
        "sizes": sizes._asdict(),
        "parameters": {name: sum(p.numel() for p in child.parameters()) for name, child in model.named_children()},
    }
    (training.measured if options.train else _predicted)(subject, options, document, progress)
    return document


def _predicted(
    subject: frame.Subject, options: argparse.Namespace, document: dict[str, Any], progress: Progress
) -> None:
    kinds = measure.classes(subject)  # as released, also for what takes their place
    judge = None
    if not options.no_deviations:
        progress.case("float32")
        progress.state("the run that deviations are measured from")
        judge = deviations.Judge(subject)
        progress.finished()
    document["variants"] = {}
    for variant in options.variants:  # replace() changes the model, so it is last
        progress.case(variant)
        with measure.prepared(subject, variant, options.backend, document, progress):
            by_class = {} if variant == "compiled" else kinds  # a compiled layer calls no modules
            document["variants"][variant] = measure.measured(
                subject, options.precision, options.rounds, not options.no_kernels, by_class, progress
            )
            if judge is not None:
                progress.state("deviations")
                document["variants"][variant]["deviations"] = judge.deviations(subject, options.precision)
        progress.finished()
        gc.collect()

"""The models that `python -m benchmarks whole` knows, with few and narrow layers."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from benchmarks.whole import boltz, boltz_training, frame, openfold3, protenix

SIZES = frame.Sizes(tokens=8, msa=4, blocks=1, steps=3, samples=2, recycling=0)


def _set(values: Any, of: dict[str, Any]) -> Any:
    """Sets values by their paths, in dictionaries or in what is indexed like one."""
    for path, value in of.items():
        inner, *names = values, *path.split(".")
        for name in names[:-1]:
            inner = inner[name]
        inner[names[-1]] = value
    return values


_BOLTZ = {
    **{"token_s": 32, "token_z": 16, "atom_s": 32, "msa_args.msa_s": 16, "msa_args.msa_blocks": 1},
    **{"template_args": {"template_dim": 16, "template_blocks": 1}, "pairformer_args.num_heads": 4},
    **{f"embedder_args.atom_encoder_{k}": v for k, v in (("depth", 1), ("heads", 2))},
    **{f"score_model_args.atom_{k}_depth": 1 for k in ("encoder", "decoder")},
    **{"score_model_args.token_transformer_depth": 2, "score_model_args.token_transformer_heads": 4},
    **{f"confidence_model_args.pairformer_args.num_{k}": v for k, v in (("blocks", 1), ("heads", 4))},
}


class Boltz(boltz.Boltz):
    def arguments(self) -> dict[str, Any]:
        return _set(copy.deepcopy(super().arguments()), _BOLTZ)


class BoltzTraining(boltz_training.BoltzTraining):
    def arguments(self) -> dict[str, Any]:
        return _set(super().arguments(), _BOLTZ)


class BoltzGen(boltz.BoltzGen):
    def arguments(self) -> dict[str, Any]:
        return _set(copy.deepcopy(super().arguments()), _BOLTZ)


_PAIRS = {"c_hidden_mul": 16, "c_hidden_pair_att": 8, "no_heads_pair": 2, "no_blocks": 1}
_OPENFOLD3 = {
    **{"shared.c_s": 32, "shared.c_z": 16, "msa.msa_module.c_m": 16, "msa.msa_module.c_hidden_opm": 8},
    **{"template.c_t": 16, "template.template_pair_stack.no_blocks": 1},
    **{"diffusion_module.diffusion_module.c_token": 64, "input_embedder.atom_attn_enc.c_token": 32},
    **{f"msa.msa_module.{k}": v for k, v in _PAIRS.items()},
    **{
        f"{stack}.{k}": v
        for stack in ("pairformer", "heads.pairformer_embedding.pairformer")
        for k, v in {**_PAIRS, "c_hidden_pair_bias": 8, "no_heads_pair_bias": 4}.items()
    },
    **{
        f"{atoms}.{k}": v
        for atoms in (
            "input_embedder.atom_attn_enc",
            "diffusion_module.atom_attn_enc",
            "diffusion_module.atom_attn_dec",
        )
        for k, v in {"c_atom": 32, "c_hidden": 16, "no_heads": 2, "no_blocks": 1}.items()
    },
    **{
        f"diffusion_module.diffusion_transformer.{k}": v
        for k, v in {"c_hidden": 16, "no_heads": 4, "no_blocks": 2}.items()
    },
}


class OpenFold3(openfold3.OpenFold3):
    def config(self) -> Any:
        return _set(super().config(), {f"architecture.{k}": v for k, v in _OPENFOLD3.items()})


_PROTENIX = {
    **{f"model.{module}.c_z": 32 for module in ("relative_position_encoding", "template_embedder", "msa_module")},
    **{f"model.{module}.c_z": 32 for module in ("pairformer", "diffusion_module", "confidence_head", "distogram_head")},
    **{"c_z": 32, "c_s": 32, "c_token": 32, "c_s_inputs": 97, "c_atom": 32, "model.msa_module.c_m": 16},
    **{"model.template_embedder.c": 32, "model.template_embedder.n_blocks": 1, "model.msa_module.n_blocks": 2},
    **{"model.confidence_head.n_blocks": 1, "model.pairformer.n_heads": 4, "model.diffusion_module.c_token": 64},
    **{f"model.diffusion_module.atom_{k}.n_blocks": 1 for k in ("encoder", "decoder")},
    **{"model.diffusion_module.transformer.n_blocks": 2, "model.diffusion_module.transformer.n_heads": 4},
}


class Protenix(protenix.Protenix):
    def values(self) -> dict[str, Any]:
        return _set(super().values(), _PROTENIX)


PACKAGES: dict[str, type[frame.Package]] = {
    "boltz": Boltz,
    "boltzgen": BoltzGen,
    "openfold3": OpenFold3,
    "protenix": Protenix,
}


def subject(name: str) -> tuple[frame.Subject, dict[str, Tensor]]:
    """A model in evaluation, with random parameters, and its outputs."""
    package, cpu = PACKAGES[name](name), torch.device("cpu")
    try:
        model = package.build(SIZES, cpu).eval()
        frame.draw_parameters(model, cpu)
        made = frame.Subject(package, model, package.features(SIZES, cpu), SIZES, cpu)
        return made, made.run("float32")
    finally:
        package.forget()

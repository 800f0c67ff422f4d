"""A training step of Boltz-2: what `Boltz2.training_step` computes, from the forward to the sum of the losses.

Dropout and weights of the losses are those of the training configuration that Boltz publishes, of Boltz-1: there
is none of Boltz-2. Activations are checkpointed wherever the model has an option for it. Each sample has a noise level
of its own. The confidence model is off, and so is the head of B-factors, whose loss has a weight of 0 by default.
"""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .boltz import Boltz
from .frame import Features, Package, Sizes, Trained

_CHECKPOINTED = {"activation_checkpointing": True}
TRAINING: dict[str, dict[str, Any]] = {
    "embedder_args": _CHECKPOINTED,
    "template_args": _CHECKPOINTED,
    "msa_args": _CHECKPOINTED | {"msa_dropout": 0.15, "z_dropout": 0.25},
    "pairformer_args": _CHECKPOINTED | {"dropout": 0.25},
    "score_model_args": _CHECKPOINTED,
    "diffusion_process_args": {"synchronize_sigmas": False},
}
DIFFUSION_WEIGHT, DISTOGRAM_WEIGHT = 4.0, 0.03
DIFFUSION_LOSS = {"add_smooth_lddt_loss": True, "nucleotide_loss_weight": 5.0, "ligand_loss_weight": 10.0}


class _NoConfidence(nn.Module):
    def forward(self, **_: Any) -> dict[str, Tensor]:
        return {}


class BoltzTraining(Boltz, Trained):
    """Boltz-2 in training."""

    # Of the score model the layers, since what calls them checkpoints.
    compiled = (
        "template_module.pairformer.layers",
        "msa_module.layers",
        "pairformer_module.layers",
        "structure_module.score_model.atom_attention_encoder.atom_encoder.diffusion_transformer.layers",
        "structure_module.score_model.token_transformer.layers",
        "structure_module.score_model.atom_attention_decoder.atom_decoder.diffusion_transformer.layers",
    )

    def arguments(self) -> dict[str, Any]:
        made = copy.deepcopy(super().arguments())
        for name, changed in TRAINING.items():
            made[name] |= changed
        return made | {"confidence_prediction": False, "predict_bfactor": False}

    def build(self, sizes: Sizes, device: torch.device) -> nn.Module:
        model: Any = super().build(sizes, device)
        # In training, the release prepares the diffusion only if a confidence model follows: one that does nothing.
        model.confidence_prediction, model.confidence_module = True, _NoConfidence()
        made: nn.Module = model
        return made

    def features(self, sizes: Sizes, device: torch.device) -> Features:
        made = super().features(sizes, device)
        places = made["token_to_rep_atom"].float() @ made["coords"][:, 0]
        edges = torch.linspace(2.0, 22.0, 63, device=device)
        bins = (torch.cdist(places, places)[..., None] > edges).sum(-1)
        made["disto_target"] = F.one_hot(bins, 64)[:, :, :, None].float()
        return made | {"token_disto_mask": made["token_pad_mask"]}

    def loss(self, model: Any, features: Features, sizes: Sizes) -> Tensor:
        def sampled(**_: Any) -> dict[str, Tensor]:
            """In place of the samples that the confidence model would judge."""
            return {"sample_atom_coords": features["coords"]}

        with mock.patch.object(model.structure_module, "sample", sampled):
            out = model(features, recycling_steps=sizes.recycling, multiplicity_diffusion_train=sizes.samples)
        losses = self.imported(self.model[0])
        distogram, _ = losses.distogram_loss(out, features, aggregate_distogram=model.aggregate_distogram)
        diffusion = model.structure_module.compute_loss(features, out, multiplicity=sizes.samples, **DIFFUSION_LOSS)
        total: Tensor = DIFFUSION_WEIGHT * diffusion["loss"] + DISTOGRAM_WEIGHT * distogram
        return total


def package(distribution: str) -> Package:
    """The one that is published under this name."""
    return BoltzTraining(distribution)

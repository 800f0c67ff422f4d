"""Boltz-2: boltz 2.2.1, boltz-community, the maintained fork, and BoltzGen, of the same architecture."""

from __future__ import annotations

import copy
import re
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .frame import Features, Package, Sizes, accepted

# As `boltz predict` sets them (main.py: msa_args, pairformer_args, diffusion_process_args) or as in the checkpoint.
HPARAMS: dict[str, Any] = {
    "atom_s": 128,
    "atom_z": 16,
    "token_s": 384,
    "token_z": 128,
    "num_bins": 64,
    "atom_feature_dim": 388,
    "training_args": {},
    "validation_args": {},
    "diffusion_loss_args": {},
    "template_args": {"template_dim": 64, "template_blocks": 2},
    "embedder_args": {
        "atom_encoder_depth": 3,
        "atom_encoder_heads": 4,
        "add_method_conditioning": True,
        "add_modified_flag": True,
        "add_cyclic_flag": True,
        "add_mol_type_feat": True,
    },
    "msa_args": {
        "msa_s": 64,
        "msa_blocks": 4,
        "msa_dropout": 0.0,
        "z_dropout": 0.0,
        "use_paired_feature": True,
        "pairwise_head_width": 32,
        "pairwise_num_heads": 4,
        "subsample_msa": True,
        "num_subsampled_msa": 1024,
    },
    "pairformer_args": {"num_blocks": 64, "num_heads": 16, "dropout": 0.0, "v2": True},
    "score_model_args": {
        "sigma_data": 16,
        "dim_fourier": 256,
        "atom_encoder_depth": 3,
        "atom_encoder_heads": 4,
        "token_transformer_depth": 24,
        "token_transformer_heads": 16,
        "atom_decoder_depth": 3,
        "atom_decoder_heads": 4,
        "conditioning_transition_layers": 2,
    },
    "diffusion_process_args": {
        "gamma_0": 0.8,
        "gamma_min": 1.0,
        "noise_scale": 1.003,
        "rho": 7,
        "step_scale": 1.5,
        "sigma_min": 0.0001,
        "sigma_max": 160.0,
        "sigma_data": 16.0,
        "P_mean": -1.2,
        "P_std": 1.5,
        "coordinate_augmentation": True,
        "alignment_reverse_diff": True,
        "synchronize_sigmas": True,
    },
    "confidence_model_args": {
        "num_dist_bins": 64,
        "max_dist": 22,
        "add_s_to_z_prod": True,
        "add_s_input_to_s": True,
        "add_z_input_to_z": True,
        "pairformer_args": {"num_blocks": 8, "num_heads": 16, "dropout": 0.0},
        "confidence_args": {"num_plddt_bins": 50, "num_pde_bins": 64, "num_pae_bins": 64, "use_separate_heads": True},
    },
    "steering_args": {"fk_steering": False, "physical_guidance_update": False, "contact_guidance_update": False},
    "use_templates": True,
    "use_templates_v2": True,
    "bond_type_feature": True,
    "cyclic_pos_enc": True,
    "fix_sym_check": True,
    "predict_bfactor": True,
    "validate_structure": False,
}
HEAVY_ATOMS = (5, 11, 8, 8, 6, 9, 9, 4, 10, 8, 8, 9, 8, 11, 7, 6, 7, 14, 12, 7)  # of ALA, ARG, ... VAL
_LIGHTNING = type("LightningModule", (nn.Module,), {"save_hyperparameters": lambda self, *args, **kwargs: None})


class Boltz(Package):
    """Boltz-2."""

    root = "boltz"
    model = "boltz.model.models.boltz2", "Boltz2"
    parts = (
        "input_embedder",
        "rel_pos",
        "contact_conditioning",
        "template_module",
        "msa_module",
        "pairformer_module",
        "distogram_module",
        "diffusion_conditioning",
        "structure_module",
        "bfactor_module",
        "confidence_module",
    )
    compiled: ClassVar[tuple[str, ...]] = (
        "template_module.pairformer.layers",
        "msa_module.layers",
        "pairformer_module.layers",
        "confidence_module.pairformer_stack.layers",
        "structure_module",
    )
    sampler = "structure_module.sample"
    score = "structure_module.score_model"
    trunk = ("s", "z")
    outputs = (*trunk, "pdistogram", "sample_atom_coords", "pbfactor", "plddt", "pde", "pae")
    needs = ("einops",)
    reads: ClassVar[dict[str, dict[str, Any]]] = {
        "pytorch_lightning": {"LightningModule": _LIGHTNING},
        "torchmetrics": {"MeanMetric": nn.Module, "Metric": nn.Module},
    }

    def build(self, sizes: Sizes, device: torch.device) -> nn.Module:
        # Slow, and all weights are drawn again.
        self.imported(f"{self.root}.model.layers.initialize").trunc_normal_init_ = lambda *args, **kwargs: None
        file, name = self.model
        model = getattr(self.imported(file), name)
        arguments: dict[str, Any] = accepted(model, copy.deepcopy(self.arguments()))
        if sizes.blocks:
            arguments["pairformer_args"]["num_blocks"] = sizes.blocks
        while True:
            try:
                with torch.device(device):
                    made: nn.Module = model(**arguments)
                return made
            except TypeError as error:  # a release that has another set of options than Boltz 2.2.1
                unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
                if unknown is None or not _dropped(arguments, unknown[1]):
                    raise

    def arguments(self) -> dict[str, Any]:
        """Of the model."""
        return HPARAMS

    def features(self, sizes: Sizes, device: torch.device) -> Features:
        return {name: value[None].to(device) for name, value in _features(sizes.tokens, sizes.msa).items()}

    def call(self, model: nn.Module, features: Features, sizes: Sizes) -> dict[str, Tensor]:
        how = {
            "run_confidence_sequentially": True,
            "return_z_feats": True,
            "num_sampling_steps": sizes.steps,
            "diffusion_samples": sizes.samples,
        }
        out = model(features, recycling_steps=sizes.recycling, **accepted(type(model).forward, how))
        return {name: out[name] for name in self.outputs if isinstance(out.get(name), Tensor)}


class BoltzGen(Boltz):
    """BoltzGen's folding model."""

    root = "boltzgen"
    model = "boltzgen.model.models.boltz", "Boltz"

    trunk = ("s_trunk", "z_feats")
    outputs = (*trunk, *Boltz.outputs[2:])

    def arguments(self) -> dict[str, Any]:
        return HPARAMS | {
            "use_miniformer": False,
            "training_args": SimpleNamespace(),
            "confidence_prediction": True,
            "structure_prediction_training": True,
        }

    def features(self, sizes: Sizes, device: torch.device) -> Features:
        made = super().features(sizes, device)
        n, atoms = sizes.tokens, made["ref_pos"].shape[1]
        none = torch.zeros(1, n, device=device)
        named = {"design_mask": none, "chain_design_mask": none, "binding_type": none.long(), "ss_type": none.long()}
        named |= {"feature_residue_index": made["residue_index"], "feature_asym_id": made["asym_id"], "cyclic": none}
        named |= {"temp_feature": none.long(), "ph_feature": none.long(), "fake_atom_mask": none.new_zeros(1, atoms)}
        named |= {"center_coords": none.new_zeros(1, n, 3), "token_distance_mask": none.new_zeros(1, n, n)}
        return made | named


def _dropped(arguments: dict[str, Any], name: str) -> bool:
    """Whether an option was there, and is no longer."""
    found = arguments.pop(name, None) is not None
    nested = [_dropped(value, name) for value in arguments.values() if isinstance(value, dict)]
    return found or any(nested)


def package(distribution: str) -> Package:
    """The one that is published under this name."""
    return BoltzGen(distribution) if distribution == "boltzgen" else Boltz(distribution)


def _features(n: int, depth: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1)

    def drawn(count: int, *shape: int) -> Tensor:
        return torch.randint(count, shape, generator=g)

    kind, chain, zero, zeros = drawn(20, n), (torch.arange(n) >= n // 2).long(), torch.zeros(n).long(), torch.zeros(n)
    atoms = torch.tensor(HEAVY_ATOMS)[kind]
    first, token, a = atoms.cumsum(0) - atoms, torch.arange(n).repeat_interleave(atoms), int(atoms.sum())

    def padded(x: Tensor, dim: int = 0) -> Tensor:
        return F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, -a % 32))

    msa = torch.cat([kind[None], drawn(20, depth - 1, n)]) + 2
    deletion = torch.pi / 2 * torch.arctan((drawn(13, depth, n) - 9).clamp(min=0) / 3)
    f = dict(
        token_index=torch.arange(n),
        residue_index=torch.arange(n) - chain * (n // 2),
        asym_id=chain,
        entity_id=chain,
        sym_id=zero,
        mol_type=zero,
        res_type=F.one_hot(kind + 2, 33),
        token_bonds=torch.zeros(n, n, 1),
        type_bonds=torch.zeros(n, n).long(),
        token_pad_mask=zeros + 1,
        method_feature=zero + 1,
        modified=zero,
        contact_conditioning=F.one_hot(torch.zeros(n, n).long(), 5),
        contact_threshold=torch.zeros(n, n),
        cyclic_period=zeros,
        frames_idx=(first[:, None] + torch.arange(3))[None],
        ref_charge=padded(torch.zeros(a)),
        ref_pos=padded(torch.randn(a, 3, generator=g) * 2),
        atom_resolved_mask=padded(torch.ones(a).bool()),
        ref_atom_name_chars=padded(F.one_hot(drawn(64, a, 4), 64)),
        ref_element=padded(F.one_hot(drawn(128, a), 128)),
        ref_space_uid=padded(token),
        coords=padded(torch.randn(1, a, 3, generator=g) * 16, 1),
        atom_pad_mask=padded(torch.ones(a)),
        atom_to_token=padded(F.one_hot(token, n)),
        visibility_ids=zeros[None],
        token_to_rep_atom=padded(F.one_hot(first + (atoms - 1).clamp(max=4), a), 1),
        msa=msa,
        has_deletion=deletion > 0,
        msa_paired=torch.zeros(depth, n),
        deletion_value=deletion,
        deletion_mean=deletion.mean(0),
        msa_mask=torch.ones_like(msa),
        profile=F.one_hot(msa, 33).float().mean(0),
        template_restype=F.one_hot(zero[None], 33),
        template_frame_rot=torch.zeros(1, n, 3, 3),
        **{f"template_{k}": torch.zeros(1, n, 3) for k in ("frame_t", "cb", "ca")},
        **{f"template_{k}": torch.zeros(1, n) for k in ("mask_cb", "mask_frame", "mask")},
    )
    return f

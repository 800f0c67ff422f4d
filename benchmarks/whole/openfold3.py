"""OpenFold-3: openfold3 0.5."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .boltz import HEAVY_ATOMS
from .frame import Features, Package, Sizes


class OpenFold3(Package):
    """OpenFold-3."""

    root = "openfold3"
    parts = (
        "input_embedder",
        "template_embedder",
        "msa_module_embedder",
        "msa_module",
        "pairformer_stack",
        "sample_diffusion",
        "aux_heads",
    )
    compiled = (
        "template_embedder.template_pair_stack.blocks",
        "msa_module.blocks",
        "pairformer_stack.blocks",
        "sample_diffusion",
    )
    sampler = ""
    score = "sample_diffusion.diffusion_module"
    trunk = ("si_trunk", "zij_trunk")
    needs = ("ml_collections", "pydantic")
    outputs = (*trunk, "atom_positions_predicted", "plddt_logits", "pde_logits", "pae_logits", "distogram_logits")

    def build(self, sizes: Sizes, device: torch.device) -> nn.Module:
        # Slow, and all weights are drawn again.
        initialization = self.imported("openfold3.core.model.primitives.initialization")
        initialization.trunc_normal_init_ = lambda *args, **kwargs: None
        config = self.config()
        if sizes.blocks:
            config.architecture.pairformer.no_blocks = sizes.blocks
        for kernels in ("use_deepspeed_evo_attention", "use_cueq_triangle_kernels", "use_triton_triangle_kernels"):
            config.settings.memory.eval[kernels] = False
        shared = config.architecture.shared
        shared.num_recycles, shared.diffusion.no_full_rollout_steps = sizes.recycling, sizes.steps
        shared.diffusion.no_full_rollout_samples = sizes.samples
        with torch.device(device):
            model: nn.Module = self.imported("openfold3.projects.of3_all_atom.model").OpenFold3(config)
        return model

    def config(self) -> Any:
        """The configuration of its command line."""
        entry = self.imported("openfold3.projects.of3_all_atom.project_entry").OF3ProjectEntry()
        return entry.get_model_config_with_presets()

    def features(self, sizes: Sizes, device: torch.device) -> Features:
        made = _features(sizes.tokens, sizes.msa)
        return {name: value[None].to(device) for name, value in made.items()}

    def call(self, model: Any, features: Features, sizes: Sizes) -> dict[str, Tensor]:
        shared = model.shared
        shared.num_recycles, shared.diffusion.no_full_rollout_steps = sizes.recycling, sizes.steps
        _, out = model(features)
        return {name: out[name] for name in self.outputs if isinstance(out.get(name), Tensor)}


def _features(n: int, depth: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)

    def drawn(count: int, *shape: int) -> Tensor:
        return torch.randint(count, shape, generator=generator)

    kind, chain = drawn(20, n), (torch.arange(n) >= n // 2).int()
    counts = torch.tensor(HEAVY_ATOMS)[kind]
    token = torch.repeat_interleave(torch.arange(n), counts)
    atoms = len(token)
    ones, zeros = torch.ones(n), torch.zeros(n).int()
    aligned = F.one_hot(drawn(20, depth, n), 32)
    return {
        **{"residue_index": torch.arange(n).int() % (n // 2), "token_index": torch.arange(n).int()},
        **{"asym_id": chain, "entity_id": chain, "sym_id": zeros, "restype": F.one_hot(kind, 32).int()},
        **{"is_protein": ones.int(), "is_dna": zeros, "is_rna": zeros, "is_ligand": zeros, "is_atomized": zeros},
        **{"ref_pos": torch.randn(atoms, 3, generator=generator), "ref_mask": torch.ones(atoms).int()},
        **{"ref_element": F.one_hot(5 + drawn(3, atoms), 119).int(), "ref_charge": torch.zeros(atoms)},
        "ref_atom_name_chars": F.one_hot(drawn(64, atoms, 4), 64).int(),
        **{"ref_space_uid": token, "atom_to_token_index": token, "atom_mask": torch.ones(atoms)},
        **{"msa": aligned.int(), "has_deletion": torch.zeros(depth, n), "deletion_value": torch.zeros(depth, n)},
        **{"msa_mask": torch.ones(depth, n), "num_paired_seqs": torch.tensor(depth // 2)},
        **{"profile": aligned.float().mean(0), "deletion_mean": torch.zeros(n)},
        **{"template_restype": F.one_hot(drawn(20, 1, n), 32).int(), "template_pseudo_beta_mask": torch.ones(1, n)},
        "template_backbone_frame_mask": torch.ones(1, n),
        "template_distogram": F.one_hot(drawn(39, 1, n, n), 39).float(),
        "template_unit_vector": F.normalize(torch.randn(1, n, n, 3, generator=generator), dim=-1),
        **{"token_bonds": torch.zeros(n, n).int(), "token_mask": ones, "cyclic_mask": torch.zeros(n).bool()},
        **{"start_atom_index": (counts.cumsum(0) - counts).int(), "num_atoms_per_token": counts.int()},
    }


def package(distribution: str) -> Package:
    """The one that is published under this name."""
    return OpenFold3(distribution)

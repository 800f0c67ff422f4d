"""Protenix-v2: protenix 2.0.

Built with random weights from the package's own configuration. What its data pipeline needs is not: the dictionary of
chemical components (a download), and with it the features, which are drawn here; the constraint embedder and the
language model of other checkpoints, which this one does not have. Its own kernels are off: triangle operators of
cuEquivariance, DeepSpeed and Triton, and the norms that it compiles with nvcc when it is imported.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .boltz import HEAVY_ATOMS
from .frame import Features, Package, Sizes

MODEL = "protenix-v2"


class Protenix(Package):
    """Protenix-v2."""

    root = "protenix"
    parts = ("input_embedder", "template_embedder", "msa_module", "pairformer_stack", "confidence_head")
    compiled = (
        "template_embedder.pairformer_stack.blocks",
        "msa_module.blocks",
        "pairformer_stack.blocks",
        "confidence_head.pairformer_stack.blocks",
        "diffusion_module",
    )
    sampler = "sample_diffusion"
    score = "diffusion_module"
    trunk = ("s", "z")
    outputs = ("coordinate", "contact_probs", "plddt", "pae", "pde")
    needs = ("ml_collections", "numpy", "scipy")
    # It makes a table of the names of the elements.
    reads: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "rdkit.Chem": {"GetPeriodicTable": lambda: SimpleNamespace(GetElementSymbol=str)}
    }

    def build(self, sizes: Sizes, device: torch.device) -> nn.Module:
        os.environ["LAYERNORM_TYPE"] = "torch"  # read when it is imported
        model, config = self.imported("protenix.model.protenix"), self._config(sizes)
        with ExitStack() as stack:
            for file in ("triangular.layers", "modules.primitives"):  # slow, and all weights are drawn again
                drawing = mock.patch.object(self.imported(f"protenix.model.{file}"), "trunc_normal_init_", _nothing)
                stack.enter_context(drawing)
            stack.enter_context(torch.device(device))
            made: nn.Module = model.Protenix(config)
        return made

    def values(self) -> dict[str, Any]:
        """The configuration of its command line, before what it refers to is filled in."""
        values: dict[str, Any] = dict(copy.deepcopy(self.imported("configs.configs_base").configs))
        values["data"] = copy.deepcopy(self.imported("configs.configs_data").data_configs)
        values |= copy.deepcopy(self.imported("configs.configs_inference").inference_configs)
        _update(values, copy.deepcopy(self.imported("configs.configs_model_type").model_configs[MODEL]))
        return values

    def _config(self, sizes: Sizes) -> Any:
        values = self.values()
        config = self.imported("protenix.config.config").parse_configs(values, fill_required_with_null=True)
        config.triangle_multiplicative = config.triangle_attention = "torch"
        if sizes.blocks:
            config.model.pairformer.n_blocks = sizes.blocks
        config.data.msa.min_size.test = sizes.msa  # it draws how many sequences it reads, at least so many
        return config

    def features(self, sizes: Sizes, device: torch.device) -> Features:
        return {name: value.to(device) for name, value in _features(sizes.tokens, sizes.msa).items()}

    def call(self, model: Any, features: Features, sizes: Sizes) -> dict[str, Tensor]:
        model.N_cycle = sizes.recycling + 1
        model.configs.sample_diffusion.N_step, model.configs.sample_diffusion.N_sample = sizes.steps, sizes.samples
        # Its sampler rotates by random numbers of NumPy.
        self.imported("numpy").random.seed(2)
        trunk: list[tuple[Tensor, Tensor]] = []
        hook = model.pairformer_stack.register_forward_hook(lambda _, args, out: trunk.__setitem__(slice(None), [out]))
        try:
            # It drops a part of the recycled pairs by chance, with random numbers of Python.
            out, _, _ = model(features, None, None, mode="inference", mc_dropout_apply_rate=0.0)
        finally:
            hook.remove()
        return dict(zip(self.trunk, trunk[0], strict=True)) | {name: out[name] for name in self.outputs}


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _update(values: dict[str, Any], others: Mapping[str, Any]) -> None:
    for name, value in others.items():
        if isinstance(value, Mapping) and isinstance(values.get(name), dict):
            _update(values[name], value)
        else:
            values[name] = value


def _features(n: int, depth: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)

    def drawn(count: int, *shape: int) -> Tensor:
        return torch.randint(count, shape, generator=generator)

    kind, chain = drawn(20, n), (torch.arange(n) >= n // 2).long()
    counts = torch.tensor(HEAVY_ATOMS)[kind]
    first, token = counts.cumsum(0) - counts, torch.arange(n).repeat_interleave(counts)
    atoms = len(token)
    within = torch.arange(atoms) - first[token]
    aligned = torch.cat([kind[None], drawn(20, depth - 1, n)])
    return {
        **{"token_index": torch.arange(n), "residue_index": torch.arange(n) - chain * (n // 2)},
        **{"asym_id": chain, "entity_id": chain, "sym_id": torch.zeros(n).long(), "restype": F.one_hot(kind, 32)},
        **{"ref_pos": torch.randn(atoms, 3, generator=generator), "ref_mask": torch.ones(atoms).long()},
        **{"ref_element": F.one_hot(5 + drawn(3, atoms), 128), "ref_charge": torch.zeros(atoms).long()},
        "ref_atom_name_chars": F.one_hot(drawn(64, atoms, 4), 64),
        **{"ref_space_uid": token, "atom_to_token_idx": token, "atom_to_tokatom_idx": within},
        **{"has_frame": torch.ones(n).long(), "is_ligand": torch.zeros(atoms).long()},
        "distogram_rep_atom_mask": (within == (counts[token] - 1).clamp(max=4)).long(),
        **{"msa": aligned, "has_deletion": torch.zeros(depth, n), "deletion_value": torch.zeros(depth, n)},
        **{"profile": F.one_hot(aligned, 32).float().mean(0), "deletion_mean": torch.zeros(n)},
        **{"token_bonds": torch.zeros(n, n), "template_aatype": drawn(20, 1, n)},
        "template_distogram": F.one_hot(drawn(39, 1, n, n), 39).float(),
        "template_unit_vector": F.normalize(torch.randn(1, n, n, 3, generator=generator), dim=-1),
        **{f"template_{k}_mask": torch.ones(1, n, n) for k in ("pseudo_beta", "backbone_frame")},
    }


def package(distribution: str) -> Package:
    """The one that is published under this name."""
    return Protenix(distribution)

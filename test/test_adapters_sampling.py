"""Samplers and score models of public packages: what is the same for all samples of a step is computed once, with the
same random numbers and results.

The packages are those of test_adapters.py.
"""

from __future__ import annotations

import copy
import functools
import importlib
import pickle
from types import FunctionType
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from checks import assert_all_close
from test_adapters_diffusion import Products, released
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchops import replace
from torchops.convert import denoising, sampling
from torchops.convert.denoising import rotation
from torchops.convert.sampling import Sampler, ScoreModel

pytestmark = [pytest.mark.xdist_group("adapters")]

FILES = {"boltz": "boltz.model.modules.diffusionv2", "boltzgen": "boltzgen.model.modules.diffusion"}
packages = pytest.mark.parametrize("package", FILES)
C, HEADS, TOKENS, ATOMS, WINDOWS = 8, 2, 6, 64, 2
SCORE = {
    **{"token_s": C, "atom_s": C, "dim_fourier": C, "token_transformer_depth": 2, "token_transformer_heads": HEADS},
    **{f"atom_{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("depth", 1), ("heads", HEADS))},
}
NO_STEERING = {"fk_steering": False, "physical_guidance_update": False, "contact_guidance_update": False}


def sampler(package: str) -> tuple[Any, Any]:
    model = released(FILES[package], "AtomDiffusion", SCORE, num_sampling_steps=3).eval()
    new: Any = copy.deepcopy(model)
    report = replace(new)
    assert {"0", "0.score_model"} <= set(report.replaced)
    assert isinstance(new[0], Sampler)
    assert isinstance(new[0].score_model, ScoreModel)
    return model[0], new[0]  # type: ignore[index]


def conditions(package: str) -> dict[str, Any]:
    """What the sampler gives the score model."""
    encoders = importlib.import_module(f"{package}.model.modules.encoders{'v2' if package == 'boltz' else ''}")
    indices = encoders.get_indexing_matrix(WINDOWS, 32, 128, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    conditioning = {
        **{"q": draw(1, ATOMS, C), "c": draw(1, ATOMS, C)},
        "to_keys": functools.partial(encoders.single_to_keys, indexing_matrix=indices, W=32, H=128),
        "atom_enc_bias": draw(1, WINDOWS, 32, 128, HEADS),
        "atom_dec_bias": draw(1, WINDOWS, 32, 128, HEADS),
        "token_trans_bias": draw(1, TOKENS, TOKENS, 2 * HEADS),
    }
    of_tokens = nn.functional.one_hot(torch.arange(ATOMS) * TOKENS // ATOMS, TOKENS)[None]
    feats = {
        **{"ref_pos": draw(1, ATOMS, 3), "atom_pad_mask": torch.ones(1, ATOMS), "atom_to_token": of_tokens},
        **{"token_pad_mask": torch.tensor([[1.0] * (TOKENS - 1) + [0.0]]), "coords": draw(3, ATOMS, 3)},
    }
    trunk = {"s_inputs": draw(1, TOKENS, C), "s_trunk": draw(1, TOKENS, C)}
    return {**trunk, "feats": feats, "diffusion_conditioning": conditioning}


def sampled(
    module: Any, package: str, samples: int = 3, steps: int = 3, mask: Tensor | None = None, **changed: Any
) -> Tensor:
    torch.manual_seed(1)
    given = conditions(package)
    mask = given["feats"]["atom_pad_mask"] if mask is None else mask
    given |= {"steering_args": NO_STEERING} if package == "boltz" else {}
    with torch.no_grad():
        out = module.sample(mask, num_sampling_steps=steps, multiplicity=samples, **given | changed)
    coords: Tensor = out["sample_atom_coords"]
    return coords


@packages
def test_samples(package: str) -> None:
    """The same structures; and of a step's products, those with the conditioning are of one sample."""
    model, new = sampler(package)
    expected = sampled(model, package)
    with Products() as products:
        got = sampled(new, package)
    assert_all_close([got], [expected], atol=1e-4, rtol=1e-4)
    of_tokens = [x.numel() // x.shape[-1] for x in products.inputs if x.dim() == 3 and x.shape[-2] == TOKENS]
    assert of_tokens.count(TOKENS) >= 3 * 2 * 6  # steps, layers, products
    assert_all_close([sampled(new, package, 1)], [sampled(model, package, 1)], atol=1e-4, rtol=1e-4)


class Looks(TorchDispatchMode):
    """Counts the values that the host reads, and decompositions, which check their result there."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.name in ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::_linalg_svd")
        return func(*args, **(kwargs or {}))


def test_a_step_reads_no_value_on_the_host() -> None:
    model, new = sampler("boltz")

    def looks(module: Any, steps: int) -> int:
        with Looks() as seen:
            sampled(module, "boltz", steps=steps)
        return seen.count

    assert looks(new, 6) == looks(new, 3)
    assert looks(model, 6) > looks(model, 3)


@pytest.mark.parametrize("alignment", [True, False])
def test_many_steps(alignment: bool) -> None:
    """With atoms that are not there, which the alignment leaves out."""
    model, new = sampler("boltz")
    for module in (model, new):
        module.alignment_reverse_diff = alignment
    mask = torch.ones(1, ATOMS)
    mask[:, -9:] = 0
    got, expected = (sampled(module, "boltz", steps=20, mask=mask) for module in (new, model))
    assert_all_close([got], [expected], atol=1e-4 * expected.abs().max().item(), rtol=0)


def test_what_the_loop_does_not_know_is_the_released_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another alignment or loop, three atoms, samples in parts, other keywords of the steering."""
    model, new = sampler("boltz")
    assert denoises(new, monkeypatch)
    assert not denoises(new, monkeypatch, mask=(torch.arange(ATOMS) < 3).float()[None])
    assert not denoises(new, monkeypatch, max_parallel_samples=2)
    assert denoises(new, monkeypatch, steering_args={**NO_STEERING, "num_particles": 3})
    assert not denoises(new, monkeypatch, steering_args={**NO_STEERING, "other": 3})
    for steering, message in ((None, "NoneType"), ({}, "fk_steering")):
        with pytest.raises((TypeError, KeyError), match=message):
            sampled(new, "boltz", steering_args=steering)
    loop = type(model).sample
    other = FunctionType((lambda _, mask, **kw: {"sample_atom_coords": 2 * mask}).__code__, loop.__globals__)
    for patched in (
        lambda patch: patch.setitem(loop.__globals__, "weighted_rigid_align", lambda x, *_: x),
        lambda patch: patch.setattr(type(model), "sample", other),
    ):
        with monkeypatch.context() as patch:
            patched(patch)
            assert not denoises(new, monkeypatch)
            assert_all_close([sampled(new, "boltz")], [sampled(model, "boltz")], atol=1e-4, rtol=1e-4)
            assert not denoises(sampler("boltz")[1], monkeypatch)  # replaced while it is another one


@pytest.mark.parametrize("contacts", [0, 2])
def test_contacts_that_packages_guide_to_by_default(contacts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are none, nothing is guided."""
    model, new = sampler("boltz")
    feats = conditions("boltz")["feats"] | {
        "contact_pair_index": torch.tensor([[0, 5], [9, 30]])[None, :, :contacts],
        "contact_union_index": torch.arange(contacts)[None],
        "contact_negation_mask": torch.ones(1, contacts, dtype=torch.bool),
        "contact_thresholds": torch.full((1, contacts), 1e-3),
    }
    steering = NO_STEERING | {"contact_guidance_update": True, "num_gd_steps": 2}
    assert denoises(new, monkeypatch, steering_args=steering, feats=feats) == (not contacts)
    got, expected = (sampled(module, "boltz", steering_args=steering, feats=feats) for module in (new, model))
    assert_all_close([got], [expected], atol=1e-4, rtol=1e-4)
    assert torch.equal(expected, sampled(model, "boltz")) == (not contacts)
    for module in (new, model):
        with pytest.raises(KeyError, match="contact_pair_index"):
            sampled(module, "boltz", steering_args=steering)
        with pytest.raises(KeyError, match="num_gd_steps"):
            sampled(module, "boltz", steering_args=NO_STEERING | {"contact_guidance_update": True}, feats=feats)


def test_a_function_in_another_s_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """It computes the same, but has no name under which a copy in another process finds it."""
    align = importlib.import_module(FILES["boltz"]).weighted_rigid_align
    wrapped = functools.wraps(align)(lambda *args: align(*args))
    monkeypatch.setattr(importlib.import_module(FILES["boltz"]), "weighted_rigid_align", wrapped)
    model, new = sampler("boltz")
    copied = pickle.loads(pickle.dumps(new))
    assert_all_close([sampled(copied, "boltz")], [sampled(model, "boltz")], atol=1e-4, rtol=1e-4)


def test_random_numbers_after_replace() -> None:
    model = released(FILES["boltz"], "AtomDiffusion", SCORE).eval()
    before = torch.get_rng_state()
    replace(model)
    assert torch.equal(torch.get_rng_state(), before)


def test_coordinates_that_are_no_numbers() -> None:
    """The released decomposition raises, in the step after; without an alignment they are the result."""
    for module in sampler("boltz"):
        module.alignment_reverse_diff = True
        module.score_model.register_forward_hook(lambda _, args, out: out * torch.nan)
        with pytest.raises(torch.linalg.LinAlgError):  # type: ignore[attr-defined]
            sampled(module, "boltz")
        module.alignment_reverse_diff = False
        assert sampled(module, "boltz").isnan().all()


def test_a_gradient_of_a_constant() -> None:
    """Aligned coordinates have none. What a call in inference mode keeps for later ones takes part in theirs."""
    results = []
    for module in sampler("boltz"):
        module.alignment_reverse_diff = True
        denoising._horn.cache_clear()
        with torch.inference_mode():
            sampled(module, "boltz")
        module.sigma_max, module.step_scale = 1.0, torch.tensor(1.5, requires_grad=True)
        given = conditions("boltz") | {"steering_args": NO_STEERING, "num_sampling_steps": 3}
        torch.manual_seed(1)
        out = module.sample(given["feats"]["atom_pad_mask"], **given)["sample_atom_coords"]
        results.append(torch.autograd.grad(out.square().mean(), module.step_scale))
    assert_all_close(*results, atol=1e-3, rtol=1e-3)


def test_a_network_that_writes_to_its_argument() -> None:
    model, new = sampler("boltz")
    for module in (model, new):
        module.preconditioned_network_forward = lambda x, sigma, network_condition_kwargs: x.mul_(0.5).tanh()
    assert_all_close([sampled(new, "boltz")], [sampled(model, "boltz")], atol=1e-4, rtol=1e-4)


def test_the_alignment_is_exact_under_autocast() -> None:
    """In 16 bits, sums over atoms would be infinite."""
    _, new = sampler("boltz")
    new.alignment_reverse_diff = True
    with torch.autocast("cpu", torch.float16):
        assert sampled(new, "boltz").isfinite().all()


def test_a_score_model_without_an_argument() -> None:
    _, new = sampler("boltz")
    call = conditions("boltz") | {"multiplicity": 3, "r_noisy": torch.randn(3, ATOMS, 3)}
    for missing in ("feats", "s_inputs"):
        rest = {name: value for name, value in call.items() if name != missing}
        with torch.no_grad(), pytest.raises(TypeError, match=missing):
            new.score_model(times=torch.rand(1).expand(3), **rest)


def denoises(module: Any, monkeypatch: pytest.MonkeyPatch, **changed: Any) -> bool:
    """Whether a call runs our loop."""
    with monkeypatch.context() as patch:
        loop = Mock(side_effect=denoising.denoise)
        patch.setattr(sampling, "denoise", loop)
        sampled(module, "boltz", **changed)
    return loop.called


@pytest.mark.parametrize("sign", [1, -1], ids=["proper", "mirrored"])
def test_rotation(sign: int) -> None:
    c = sign * torch.randn(100, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    u, s, v = torch.linalg.svd(c)
    d = torch.ones(100, 3, dtype=torch.float64)
    d[:, 2] = torch.det(u @ v)
    unique = s[:, 1] + d[:, 2] * s[:, 2] > 1e-2 * s[:, 0]
    assert unique.sum() > 90
    assert_all_close([rotation(c)[unique]], [(u * d[:, None] @ v)[unique]], atol=1e-11, rtol=0)


def test_a_rotation_that_is_not_unique_is_one() -> None:
    flat = torch.zeros(3, 3, 3)
    flat[1, 0, 0] = 1e-30
    flat[2, 0, 1] = 1e30
    r = rotation(flat)
    assert_all_close([r @ r.mT], [torch.eye(3, dtype=r.dtype).expand(3, 3, 3)], atol=1e-12, rtol=0)
    assert torch.equal(r[0], torch.eye(3, dtype=r.dtype))


@packages
def test_training_draws_a_level_for_each_sample(package: str) -> None:
    model, new = sampler(package)
    given = conditions(package)
    results = []
    for module in (model, new):
        torch.manual_seed(1)
        out = module(**given, multiplicity=3)["denoised_atom_coords"]
        weights = [p for p in module.score_model.single_conditioner.parameters() if p.requires_grad]
        results.append([out, *torch.autograd.grad(out.square().mean(), weights)])
    assert_all_close(*results, atol=1e-3, rtol=1e-3)


@packages
def test_levels_in_other_memory_are_not_looked_at(package: str) -> None:
    """They may differ."""
    model, new = sampler(package)
    call = conditions(package) | {"multiplicity": 3, "r_noisy": torch.randn(3, ATOMS, 3)}
    for times in (torch.rand(3), torch.rand(1).expand(3)):
        with torch.no_grad():
            got, expected = (m.score_model(times=times, **call) for m in (new, model))
        got, expected = (value["r_update"] if package == "boltzgen" else value for value in (got, expected))
        assert_all_close([got], [expected], atol=1e-3, rtol=1e-3)


def test_methods_and_properties_are_the_released_ones() -> None:
    model, new = sampler("boltz")
    assert new.device == model.device
    assert torch.equal(new.sample_schedule(5), model.sample_schedule(5))
    assert new.state_dict().keys() == model.state_dict().keys()
    with pytest.raises(AttributeError, match="nothing"):
        _ = new.nothing
    for copied in (copy.deepcopy(new), pickle.loads(pickle.dumps(new))):
        assert_all_close([sampled(copied, "boltz")], [sampled(model, "boltz")], atol=1e-4, rtol=1e-4)


def test_a_hook_sees_all_samples() -> None:
    model, new = sampler("boltz")
    expected, seen = sampled(model, "boltz"), []
    new.score_model.single_conditioner.norm_single.register_forward_hook(lambda _, args, out: seen.append(len(args[0])))
    assert_all_close([sampled(new, "boltz")], [expected], atol=1e-4, rtol=1e-4)
    assert seen == [3, 3, 3]


def test_a_compiled_score_model() -> None:
    """Dynamo walks the modules inside, those that stand for a part in one call among them."""
    model, new = sampler("boltz")
    new.score_model.compile(backend="eager")
    try:
        assert_all_close([sampled(new, "boltz")], [sampled(model, "boltz")], atol=1e-4, rtol=1e-4)
    finally:
        torch._dynamo.reset()


def test_a_score_model_that_calls_its_parts_otherwise_shares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a later release might."""
    kind = importlib.import_module(FILES["boltz"]).DiffusionModule
    forward = kind.forward

    def later(self: Any, s_inputs: Tensor, s_trunk: Tensor, **rest: Any) -> Any:
        return forward(self, s_inputs=s_inputs, s_trunk=2 * s_trunk, **rest)

    monkeypatch.setattr(kind, "forward", later)
    model, new = sampler("boltz")
    assert not new.score_model.shares
    assert_all_close([sampled(new, "boltz")], [sampled(model, "boltz")], atol=1e-4, rtol=1e-4)

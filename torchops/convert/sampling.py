"""The sampler of a diffusion model and the score model that it calls in every step (Abramson et al. 2024, algorithms
18 and 20), and their replacements.

A sampler gives all samples of a step the same noise level. So what the score model computes from the noise level and
the trunk alone is the same for all samples, and one of them suffices. That all are the same is known on the host where
the sampler has the noise level as a number. From there it is passed on as a layout: equal rows share memory, with a
stride of 0, and no value is looked at. Rows that differ, as in training, never share memory.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchops.convert import constants
from torchops.convert.conditioning import conditioned
from torchops.convert.denoising import LEAST_POINTS, denoise
from torchops.convert.diffusion import DiffusionLayer
from torchops.convert.module import Replacement, once, restored
from torchops.convert.probe import compared, plain_float32
from torchops.convert.registry import like
from torchops.convert.signature import Signature
from torchops.convert.step_graph import GraphAdapter, StepGraph
from torchops.nn.layers import has_hooks

SCORE, NOISE, CONDITIONER, TRANSFORMER = "score_model", "c_noise", "single_conditioner", "token_transformer"


class Sampler(Replacement):
    """Replaces a sampler by itself, but for two things. The noise levels that it gives the score model share memory if
    they are one number. And samples come from a loop in which the host does not wait for the GPU
    (:mod:`torchops.convert.denoising`), unless the call steers them or computes them in parts.

    It has all methods and properties of the released class.
    """

    operator = "none"

    @classmethod
    def of(cls, module: nn.Module, loops: bool = False) -> Sampler:
        """`loops`: whether the released loop computes what ours computes."""
        made = like(module, cls)
        vars(made).update({"_class": type(module), "_functions": _functions(type(module)) if loops else None})
        return made

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        """As released, with the same random numbers. Of structures without a unique alignment it says nothing, unless
        they have less than four atoms."""
        released = self._released("sample")
        functions = self.__dict__["_functions"]
        known = not self.training and functions is not None and functions == _functions(self.__dict__["_class"])
        call = _Call.of(released, args, kwargs) if known else None
        if call is None:
            return released(*args, **kwargs)
        mask = call.atom_mask.repeat_interleave(call.multiplicity, 0)
        if not len(mask) == call.multiplicity > 0 or (mask.sum(-1) < LEAST_POINTS).any():
            return released(*args, **kwargs)
        steps = self.num_sampling_steps if call.num_sampling_steps is None else call.num_sampling_steps
        return {"sample_atom_coords": denoise(self, functions[0], mask, steps, call.network), "diff_token_repr": None}

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            found = inspect.getattr_static(self.__dict__.get("_class"), name, None)
            if found is None or name.startswith("__"):
                raise
        return found.__get__(self, type(self)) if hasattr(type(found), "__get__") else found

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._released("forward")(*args, **kwargs)

    def preconditioned_network_forward(
        self, noised_atom_coords: Tensor, sigma: Any, *args: Any, **kwargs: Any
    ) -> Tensor:
        """The released one, to which a number means this tensor, too."""
        if isinstance(sigma, float):
            rows = noised_atom_coords.shape[0]
            sigma = torch.full((1,), sigma, device=noised_atom_coords.device).expand(rows)
        result: Tensor = self._released("preconditioned_network_forward")(noised_atom_coords, sigma, *args, **kwargs)
        return result

    def c_noise(self, sigma: Tensor) -> Tensor:
        """What the score model takes for a noise level."""
        noise: Tensor = self._released(NOISE)(once(sigma))
        return noise.expand(sigma.shape)

    def _released(self, name: str) -> Any:
        return getattr(self.__dict__["_class"], name).__get__(self, type(self))


class SamplerAdapter(GraphAdapter):
    """Samplers. They stay what they are, so there is nothing to compare."""

    def made(self, module: nn.Module) -> Replacement | str:
        if not isinstance(module._modules.get(SCORE), ScoreModel):
            return f"its {SCORE} is not replaced"
        if any(not inspect.isfunction(getattr(type(module), name, None)) for name in _OVERRIDDEN):
            return f"it has no method {' or '.join(_OVERRIDDEN)}"
        return Sampler.of(module, _loops_as_known(module))


class _Call(NamedTuple):
    """The arguments of a sampler's method, of a call that our loop computes."""

    atom_mask: Tensor
    multiplicity: int
    num_sampling_steps: Any
    network: dict[str, Any]

    @classmethod
    def of(cls, method: Any, args: Any, kwargs: Any) -> _Call | None:
        try:
            given = inspect.signature(method).bind(*args, **kwargs).arguments
            network = given.pop("network_condition_kwargs")
            atom_mask, multiplicity = given.pop("atom_mask"), given.pop("multiplicity", 1)
            at_once = given.pop("max_parallel_samples", None)
            in_parts = at_once is not None and at_once < multiplicity
            steers = _steers(method, given.pop("steering_args", None), network)
        except Exception:  # the released method raises it, or another one
            return None
        steps = given.pop("num_sampling_steps", None)
        if given or in_parts or steers or not isinstance(atom_mask, Tensor):
            return None
        return cls(atom_mask, multiplicity, steps, network)


_STEERING = dict.fromkeys(("fk_steering", "physical_guidance_update", "contact_guidance_update"), False)
# What says how to steer. Releases differ in what they say of other keys.
_UNUSED = {"num_particles", "fk_lambda", "fk_resampling_interval", "num_gd_steps"}


def _steers(method: Any, steering: Any, network: Mapping[str, Any]) -> bool:
    """Whether a call changes what a step computes, or may. Contacts and templates, which packages turn on by default,
    do so only where the features have some."""
    known = isinstance(steering, Mapping) and _STEERING.keys() <= steering.keys() <= _STEERING.keys() | _UNUSED
    if not known or steering["fk_steering"] or steering["physical_guidance_update"]:
        return True
    if not steering["contact_guidance_update"] or not range(steering["num_gd_steps"]):
        return False
    potentials = method.__globals__["get_potentials"](steering, boltz2=True)
    found = (p.compute_args(network["feats"], p.compute_parameters(1.0))[0] for p in potentials)
    return any(index.shape[1] > 0 for index in found)


def _functions(kind: type) -> tuple[Any, ...]:
    """What the loop of a released sampler calls, as its file names it, and the loop: they may be exchanged."""
    loop: Any = kind.sample  # type: ignore[attr-defined]
    names = ("compute_random_augmentation", "weighted_rigid_align", "get_potentials")
    return *(getattr(loop, "__globals__", {}).get(name) for name in names), loop


def _loops_as_known(module: nn.Module) -> bool:
    """Whether a sampler's loop computes what ours computes, with a network that is a simple function."""

    def run(sampler: Any, contacts: bool) -> dict[str, Tensor]:
        levels = []
        steering = _STEERING | {"contact_guidance_update": contacts, "num_gd_steps": 1}

        def network(x: Tensor, level: float, network_condition_kwargs: dict[str, Any]) -> Tensor:
            levels.append(level)
            if network_condition_kwargs != {"multiplicity": 2, "feats": feats}:
                raise ValueError("it passes on other keywords")
            return 0.75 * x.roll(1, -1) + x.sin()

        vars(sampler)["preconditioned_network_forward"] = network
        torch.default_generator.manual_seed(0)
        mask = torch.ones(1, 9, device="cpu")
        mask[0, 6:] = 0
        result = sampler.sample(mask, num_sampling_steps=4, multiplicity=2, steering_args=steering, feats=feats)
        if set(result) != {"sample_atom_coords", "diff_token_repr"} or result["diff_token_repr"] is not None:
            raise ValueError("it returns something else")
        after = {"levels": torch.tensor(levels), "random number drawn next": torch.rand((), device="cpu")}
        return {"result": result["sample_atom_coords"], **after}

    released: Any = like(module, type(module))
    released.training = False
    none = torch.empty(1, 0, device="cpu")
    feats = {f"contact_{name}": none for name in ("union_index", "negation_mask", "thresholds")}
    feats["contact_pair_index"] = torch.empty(1, 2, 0, dtype=torch.long, device="cpu")
    try:
        pickle.dumps(_functions(type(module)))  # a replaced sampler holds them, and copies of it in other processes
        with plain_float32(), torch.no_grad():
            released._modules = {SCORE: nn.Linear(1, 1, device="cpu")}
            for released.alignment_reverse_diff, contacts in ((True, False), (False, True)):
                if compared(run(released, contacts), run(Sampler.of(released, True), contacts), ""):
                    return False
            return True
    except Exception:  # the package's code may raise anything
        return False


_OVERRIDDEN = ("preconditioned_network_forward", NOISE)


class ScoreModel(StepGraph):
    """Replaces a score model by itself. If the noise levels of all samples share memory, what depends on them and the
    trunk is computed for one sample, and given to the layers as rows that share memory."""

    def released(self, *args: Any, **kwargs: Any) -> Any:
        former: nn.Module = restored(self.__dict__["_former"], self)
        if not args and self.shares and _of_one_level(kwargs) and not self._seen():
            _share(former, kwargs)
        if constants.keeps() and isinstance(transformer := former._modules.get(TRANSFORMER), nn.Module):
            former._modules[TRANSFORMER] = _Conditioned(transformer)
        return former(**kwargs) if not args else former(*args, **kwargs)

    @property
    def shares(self) -> bool:
        """Whether its released class calls its parts as is known."""
        known: bool = self.__dict__["_shares"]
        return known

    def _seen(self) -> bool:
        """Whether a hook would see fewer rows."""
        return any(has_hooks(module) for module in self._modules[CONDITIONER].modules())  # type: ignore[union-attr]


class ScoreAdapter(GraphAdapter):
    """Score models."""

    def made(self, module: nn.Module) -> Replacement | str:
        new = ScoreModel(module, self.names, Signature((), (), {}, {}, {}))
        vars(new)["_shares"] = _calls_as_known(module)
        return new


def _of_one_level(call: Mapping[str, Any]) -> bool:
    times, trunk = call.get("times"), call.get("s_trunk")
    samples = call.get("multiplicity", 1)
    return (
        isinstance(times, Tensor)
        and isinstance(trunk, Tensor)
        and times.shape == (samples,)
        and samples > 1
        and times.stride() == (0,)
        and trunk.shape[0] == 1
        and {"s_inputs", "feats"} <= call.keys()
    )


def _share(former: nn.Module, call: Mapping[str, Any]) -> None:
    """Gives a score model parts for one call, with these arguments, that compute one sample."""
    parts = former._modules
    held: Any = SimpleNamespace(**call)
    parts[CONDITIONER] = _Conditioner(parts[CONDITIONER], held.times, held.s_trunk, held.s_inputs)
    parts[TRANSFORMER] = _Transformer(parts[TRANSFORMER], held.feats["token_pad_mask"])


class _Conditioner(nn.Module):
    """The part that is called with the trunk's outputs repeated for each sample."""

    def __init__(self, of: Any, times: Tensor, s_trunk: Tensor, s_inputs: Tensor) -> None:
        super().__init__()
        self.of, self.times, self.s_trunk, self.s_inputs = of, times, s_trunk, s_inputs

    def forward(self, *_: Any, **__: Any) -> Any:
        result = self.of(times=once(self.times), s_trunk=self.s_trunk, s_inputs=self.s_inputs)
        samples = len(self.times)
        return pytree.tree_map_only(Tensor, lambda t: t.expand(samples, *t.shape[1:]), result)


class _Transformer(nn.Module):
    """The part that is called with the mask repeated for each sample."""

    def __init__(self, of: Any, mask: Tensor) -> None:
        super().__init__()
        self.of, self.mask = of, mask

    def forward(self, *args: Any, mask: Tensor, **kwargs: Any) -> Any:
        return self.of(*args, mask=self.mask.to(mask.dtype).expand(mask.shape), **kwargs)


class _Conditioned(nn.Module):
    """The same part, for whose layers all that depends on the conditioning alone is computed before."""

    def __init__(self, of: nn.Module) -> None:
        super().__init__()
        self.of = of

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        s = kwargs.get("s")
        layers = [module for module in self.of.modules() if isinstance(module, DiffusionLayer)]
        layers = [layer for layer in layers if layer.why_not() is None]
        if not layers or not isinstance(s, Tensor):
            return self.of(*args, **kwargs)
        with conditioned(layers, s):
            return self.of(*args, **kwargs)


class _SeenError(Exception):
    """Ends a forward whose first calls were seen."""


def _calls_as_known(module: nn.Module) -> bool:
    """Whether the forward of a score model repeats the trunk's outputs, and the mask, for each sample, and gives them
    to these parts. It is called with parts that only look, and ends there."""
    calls: dict[str, Any] = {}
    trunk, inputs, s = (torch.arange(n * 6.0).view(1, 3, 2 * n) for n in (1, 2, 3))
    mask, times = torch.tensor([[1.0, 0.0, 1.0]]), torch.tensor([0.5, 0.25])

    def conditioner(times: Tensor, s_trunk: Tensor, s_inputs: Tensor) -> tuple[Tensor, Tensor]:
        calls[CONDITIONER] = times, s_trunk, s_inputs
        return s.expand(2, -1, -1), times

    def transformer(*_: Any, mask: Tensor, s: Tensor, **__: Any) -> None:
        calls[TRANSFORMER] = mask, s
        raise _SeenError

    encoded = torch.zeros(2, 3, 6), torch.zeros(2, 1, 1), torch.zeros(2, 1, 1), None
    looking: Any = like(module, type(module))
    looking._modules = {
        CONDITIONER: conditioner,
        "atom_attention_encoder": lambda **_: encoded,
        "s_to_a_linear": lambda s: s,
        TRANSFORMER: transformer,
    }
    none = dict.fromkeys(("q", "c", "atom_enc_bias", "atom_dec_bias", "token_trans_bias"), torch.zeros(1, 1, 1))
    looking.training = False
    try:
        looking(
            s_inputs=inputs,
            s_trunk=trunk,
            r_noisy=torch.zeros(2, 1, 3),
            times=times,
            feats={"token_pad_mask": mask},
            diffusion_conditioning={**none, "to_keys": None},
            multiplicity=2,
        )
    except _SeenError:
        expected = times, *(t.repeat(2, 1, 1) for t in (trunk, inputs)), mask.repeat(2, 1), s.expand(2, -1, -1)
        return all(map(torch.equal, (*calls[CONDITIONER], *calls[TRANSFORMER]), expected))
    except Exception:  # the package's code may raise anything
        return False
    return False

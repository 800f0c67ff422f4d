"""What the packages have in common: how to import, build, fill and call a model."""

from __future__ import annotations

import importlib
import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import metadata
from importlib.util import find_spec
from typing import Any, ClassVar, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

Features = dict[str, Any]


class Sizes(NamedTuple):
    """The sizes of a problem. `blocks` of 0 is as many layers of the trunk as the release has."""

    tokens: int
    msa: int
    blocks: int
    steps: int
    samples: int
    recycling: int


class _Nothing:
    """What a stand-in has under any name: a class, a function or a decorator that is never needed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, function: Any = None, *args: Any, **kwargs: Any) -> Any:
        return function


class _StandIn(types.ModuleType):
    """For a module that is not installed."""

    def __init__(self, name: str, members: Mapping[str, Any]) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        vars(self).update(members)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_Nothing,), {})


class Package(ABC):
    """A released package.

    Attributes:
        root: the name that Python imports.
        parts: the submodules between which time is split.
        compiled: the submodules whose children are compiled.
        sampler: the method that runs the diffusion, by the path to it, if that isn't the forward of a part.
        score: the submodule that the sampler calls in each step.
        trunk: the outputs before the sampler.
        needs: what else must be installed, since building or calling the model uses it.
        reads: what the package derives from or looks at in modules that may be missing.
    """

    root: ClassVar[str]
    parts: ClassVar[tuple[str, ...]]
    compiled: ClassVar[tuple[str, ...]]
    sampler: ClassVar[str]
    score: ClassVar[str]
    trunk: ClassVar[tuple[str, ...]]
    needs: ClassVar[tuple[str, ...]] = ()
    reads: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    def __init__(self, distribution: str) -> None:
        self.distribution = distribution
        self.stand_ins: list[str] = []

    def version(self) -> str:
        """The version that is installed."""
        return metadata.version(self.distribution)

    def missing(self) -> list[str]:
        """What is not installed, and has no stand-in that would do."""
        return [name for name in (self.root, *self.needs) if find_spec(name) is None]

    def imported(self, name: str) -> Any:
        """A module of the package, with stand-ins for what it imports and is not installed."""
        while True:
            try:
                return importlib.import_module(name)
            except ModuleNotFoundError as error:
                missing = error.name or ""
                if missing.partition(".")[0] == self.root or missing in self.stand_ins or not missing:
                    raise
                sys.modules[missing] = _StandIn(missing, self.reads.get(missing, {}))
                self.stand_ins.append(missing)

    def forget(self) -> None:
        """Takes the stand-ins out of Python's modules, where others would find them."""
        for name in self.stand_ins:
            sys.modules.pop(name, None)

    @abstractmethod
    def build(self, sizes: Sizes, device: torch.device) -> nn.Module:
        """The model in the release's configuration. Weights are drawn again afterwards."""

    @abstractmethod
    def features(self, sizes: Sizes, device: torch.device) -> Features:
        """What the package's featuriser makes of two protein chains: same keys, shapes and dtypes."""

    @abstractmethod
    def call(self, model: nn.Module, features: Features, sizes: Sizes) -> dict[str, Tensor]:
        """A prediction with the package's own kernels off; its outputs by name, those of `trunk` among them."""


class Trained(Package):
    """A released package of which a training step is known. `Sizes.samples` is how many noise levels it draws."""

    @abstractmethod
    def loss(self, model: nn.Module, features: Features, sizes: Sizes) -> Tensor:
        """The loss of a training step. The release may change `features`."""


class Subject(NamedTuple):
    """A model with its input."""

    package: Package
    model: nn.Module
    features: Features
    sizes: Sizes
    device: torch.device

    def run(self, precision: str, **changed: int) -> dict[str, Tensor]:
        """One prediction, with the same random numbers each time. `changed` sizes replace the subject's."""
        torch.manual_seed(2)
        sizes = self.sizes._replace(**changed)
        with ran_in(precision, self.device), torch.inference_mode():
            return self.package.call(self.model, dict(self.features), sizes)


class _CpuAutocast(torch.autocast):
    """Packages turn autocast of "cuda" off in places. On a CPU, that has to mean the CPU's."""

    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        super().__init__("cpu" if device_type == "cuda" else device_type, *args, **kwargs)


@contextmanager
def settings(precision: str, device: torch.device) -> Iterator[None]:
    """What `precision` sets besides autocast: precision of products, and on a CPU, the meaning of "cuda"."""
    was = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    with ExitStack() as stack:
        if device.type == "cpu":
            for module in (torch, torch.amp):
                stack.enter_context(mock.patch.object(module, "autocast", _CpuAutocast))
        stack.callback(torch.set_float32_matmul_precision, was)
        yield


def cast(precision: str, device: torch.device) -> torch.autocast:
    """Autocast as `precision` has it."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16-mixed")


@contextmanager
def ran_in(precision: str, device: torch.device) -> Iterator[None]:
    """`precision`: bf16-mixed, float32 or tf32."""
    with settings(precision, device), cast(precision, device):
        yield


def draw_parameters(model: nn.Module, device: torch.device) -> None:
    """Random parameters. Those that are 0 at first close a residual or a gate, and stay smaller."""
    generator = torch.Generator(device).manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, device=device)
        scale = (1.0 if parameter.any() else 0.3) / max(1, parameter.shape[-1] if parameter.dim() else 1) ** 0.5
        parameter.data = noise * scale if parameter.dim() > 1 else parameter.data + 0.1 * noise


def accepted(function: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `arguments` that a release's function names."""
    import inspect

    return {name: value for name, value in arguments.items() if name in inspect.signature(function).parameters}

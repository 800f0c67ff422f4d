"""torchops.replace: what is declared for a class, and left because it is wrong or because a module does more; modules
whose code names an activation; and modules that are sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checks import assert_all_close
from test_replace_declared import LATER, Fused, SwiGLU, x
from torch import Tensor, nn

import torchops
from torchops import replace


class Wrong(Fused):
    def forward(self, x: Tensor) -> Tensor:
        return 1.01 * super().forward(x)


class WrongInHalf(Fused):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 if x.dtype == torch.float32 else 2)


class WrongUnderAutocast(Fused):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if torch.is_autocast_enabled("cpu") else 1)


class OtherDtype(Fused):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float()


class WrongInEvaluation(Fused):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 if self.training else 2)


class WrongGradient(Fused):
    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(x.detach())


class OverwritesInput(Fused):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if not torch.is_grad_enabled():
            x.zero_()
        return out


class Draws(Fused):
    def forward(self, x: Tensor) -> Tensor:
        torch.rand(1)
        return super().forward(x)


class Copies(Fused):
    def __init__(self, of: SwiGLU) -> None:
        super().__init__(of)
        self.scale = nn.Parameter(of.scale.detach().clone())


class Fails(Fused):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("not today")


class Pairs(Fused):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), None


FACTORIES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "wrong": (Wrong, "it computes something else: its result in training differs by 1.0e-02 of its norm"),
    "half": (WrongInHalf, "it computes something else: its result in bfloat16"),
    "autocast": (WrongUnderAutocast, "it computes something else: its result under autocast"),
    "dtype": (OtherDtype, "its dtype of result is torch.bfloat16, and that of its replacement torch.float32"),
    "evaluation": (WrongInEvaluation, "it computes something else: its result in evaluation"),
    "gradient": (WrongGradient, "it computes something else: its gradient of its argument 0 in training"),
    "input": (OverwritesInput, "it computes something else: its argument 0 afterwards"),
    "draws": (Draws, "it computes something else: its random number drawn next"),
    "copies": (Copies, "what is to replace it has another scale"),
    "fails": (Fails, "computing it to compare raised ValueError: not today"),
    "pairs": (Pairs, "its structure is "),
    "no module": (lambda of: of.forward, "what is to replace it is a method"),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_factories_that_are_wrong(name: str) -> None:
    factory, reason = FACTORIES[name]
    model = nn.ModuleList([SwiGLU()])
    report = replace(model, {SwiGLU: factory})
    assert report.replaced == ()
    assert report.left["0"].startswith(reason)
    assert type(model[0]) is SwiGLU


class Derived(SwiGLU):
    pass


MODULES: dict[str, tuple[Callable[[Any], object], str]] = {
    "hook": (lambda m: m.up.register_forward_hook(lambda *a: None), "up: Linear has hooks"),
    "hook of the module": (lambda m: m.register_forward_hook(lambda *a: None), "SwiGLU has hooks"),
    "parametrized": (lambda m: nn.utils.parametrizations.weight_norm(m.up), "up is parametrized"),
    "subclass": (LATER["tensor subclass"], "up.weight is a Tagged"),
    "derived class": (lambda m: setattr(m, "__class__", Derived), "Derived is not SwiGLU itself"),
    "own forward": (lambda m: setattr(m, "forward", lambda x: x), "SwiGLU has a forward of its own"),
    "compiled": (lambda m: m.compile(backend="eager"), "SwiGLU has a forward of its own"),
    "lazy": (lambda m: setattr(m, "down", nn.LazyLinear(6)), "down: LazyLinear has hooks"),
    "complex": (lambda m: m.to(torch.complex64), "scale is of torch.complex64"),
}


@pytest.mark.filterwarnings("ignore:Complex modules", "ignore:Lazy modules")
@pytest.mark.parametrize("name", MODULES)
def test_modules_that_do_more(name: str) -> None:
    change, reason = MODULES[name]
    model = nn.ModuleDict({"left": SwiGLU(), "right": SwiGLU()})
    change(model["left"])
    report = replace(model, {SwiGLU: Fused})
    assert report.replaced == ("right",)
    assert list(report.left) == ["left"]
    assert reason in report.left["left"]


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.xdist_group("one rank")
def test_sharded_modules() -> None:
    """Before, they are left, with a reason; later, what they were runs, or operators on gathered parameters."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    model: Any = nn.ModuleDict({"whole": SwiGLU(), "layer": SwiGLU(), "pair": nn.Sequential(nn.Linear(6, 6), nn.GLU())})
    fully_shard(model["whole"], mesh=mesh)
    fully_shard(model["layer"].up, mesh=mesh)
    fully_shard(model["pair"], mesh=mesh)
    report = replace(model, {SwiGLU: Fused})
    assert report.replaced == ()
    assert report.left["whole"] == "FSDPSwiGLU is not SwiGLU itself"
    assert report.left["layer"].startswith("up: FSDPLinear has hooks")
    assert report.left["pair.0"] == "Linear has hooks"

    for shard in (lambda m: fully_shard(m, mesh=mesh), lambda m: fully_shard(m.up, mesh=mesh)):
        later: Any = nn.ModuleList([SwiGLU()])
        expected = later[0](x())
        replace(later, {SwiGLU: Fused})
        shard(later[0])
        assert_all_close([later[0](x())], [expected], atol=1e-5, rtol=1e-4)

    later = nn.ModuleList([SwiGLU()])
    expected = later[0](x())
    replace(later, {SwiGLU: Fused})
    for parameters in [part._parameters for part in later[0].modules() if part._parameters]:
        for name, parameter in parameters.items():
            if parameter is not None:
                parameters[name] = nn.Parameter(distribute_tensor(parameter.detach(), mesh))
    later[0].shift = distribute_tensor(later[0].shift, mesh)
    got = later[0](distribute_tensor(x(), mesh))
    assert isinstance(got, DTensor)
    assert_all_close([got.full_tensor()], [expected], atol=1e-5, rtol=1e-4)
    assert not later[0].is_unchanged()


def test_the_model_itself() -> None:
    assert replace(SwiGLU(), {SwiGLU: Fused}).left == {"": "it is the model itself"}


def test_a_factory_may_decline() -> None:
    report = replace(nn.ModuleList([SwiGLU()]), {SwiGLU: lambda of: None})
    assert report.replaced == ()
    assert list(report.left) == ["0"]  # its forward names a SiLU
    with pytest.raises(TypeError, match="expected classes of modules in declared, got 3"):
        replace(SwiGLU(), {3: Fused})  # type: ignore[dict-item]


class Choosy(nn.Module):
    """Takes a mask of the rows, of which no layer has the size."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 6)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if mask.shape != x.shape[:-1] or mask.dtype != torch.bool:
            raise ValueError("a mask of the rows")
        return x * self.gate(x).sigmoid() * mask[..., None]


class FusedChoosy(nn.Module):
    def __init__(self, of: Choosy) -> None:
        super().__init__()
        self.gate = of.gate

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return torchops.gate(x, x, self.gate.weight, self.gate.bias) * mask[..., None]


def test_examples() -> None:
    """Of calls that cannot be guessed."""
    model = nn.ModuleList([Choosy()])
    report = replace(model, {Choosy: FusedChoosy})
    assert report.left == {"0": "no call of it could be guessed: declare (function, example) for its class"}

    def example(of: Choosy) -> tuple[Tensor, Tensor]:
        rows = torch.randn(4, of.gate.in_features)
        return rows, rows[:, 0] > 0

    assert replace(model, {Choosy: (FusedChoosy, example)}).replaced == ("0",)


# --- what the code names ---------------------------------------------------------------------------------------------


class Plain(nn.Module):
    """Speaks of a sigmoid, and calls none."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).relu()  # not sigmoid(x)


class ByModule(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.activation = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.layer(x)) * x


class Inside(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.gated(x)

    def gated(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.layer(x))


class Inherits(Inside):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.layer])
        del self.layer


SOURCES = [(Plain, None), (ByModule, "SiLU"), (Inside, "sigmoid"), (Inherits, "sigmoid"), (SwiGLU, "silu")]


@pytest.mark.parametrize(("kind", "called"), SOURCES)
def test_forwards_that_may_gate(kind: type[nn.Module], called: str | None) -> None:
    """Are named, and what to do."""
    report = replace(nn.ModuleDict({"it": kind()}))
    assert report.replaced == ()
    assert list(report.left) == (["it"] if called else [])
    if called:
        assert f"may gate by {called}," in report.left["it"]
        assert 'backend="torchops"' in report.left["it"]

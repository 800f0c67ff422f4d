"""Modules whose operators read the parameters of layers, where a layer does more than its parameters say: the layers
are called then."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_adapters import randomised
from test_adapters_layers import PARTS, _run, _stack, _streams, needs_boltz
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import prune, spectral_norm, weight_norm

from torchops import replace
from torchops.nn import GLU, AttentionPairBias, PairLayer, Transition, TriangleAttention, TriangleMultiplicativeUpdate

C = 6
MODULES: dict[str, Callable[[], nn.Module]] = {
    "glu": lambda: GLU(C, C),
    "swiglu": lambda: GLU(C, C, activation="silu"),
    "pair_bias": lambda: AttentionPairBias(C, C, 2, 4, initial_norm=True),
    "transition": lambda: Transition(C, 8, bias=True),
    "outgoing": lambda: TriangleMultiplicativeUpdate(C, 4, bias=True),
    "incoming": lambda: TriangleMultiplicativeUpdate(C, 4, "incoming", bias=True),
    "starting": lambda: TriangleAttention(C, 2, 4, bias=True),
    "ending": lambda: TriangleAttention(C, 2, 4, "ending", bias=True),
    "layer": lambda: PairLayer(C, 2, 4, 8, bias=True),
}


class Doubles(Tensor):
    """Knows ``linear``, and nothing else."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, w, *b = args
            return 2 * F.linear(x, w.as_subclass(Tensor), *b)
        if func is not F.glu and func.__name__ not in ("split", "chunk", "dense", "gate", "glu", "transition"):
            return super().__torch_function__(func, types, args, kwargs or {})
        raise NotImplementedError(f"Doubles knows no {func.__name__}")


def pruned(layer: Any) -> None:
    prune.random_unstructured(layer, "weight", 0.4)
    with torch.no_grad():
        layer.weight_orig *= 2  # from now on, the weight is stale until the hook has run


def normed(layer: Any) -> None:
    weight_norm(layer)
    with torch.no_grad():
        layer.weight_g *= 2


def offloaded(layer: Any) -> None:
    """As accelerate does: parameters come for the call, and go."""
    values = {name: 2 * parameter.detach() for name, parameter in layer.named_parameters()}
    for name in values:
        layer._parameters[name] = nn.Parameter(torch.empty_like(values[name], device="meta"))

    def forward(x: Tensor) -> Tensor:
        return torch.func.functional_call(copied, values, x)

    copied = copy.deepcopy(layer)
    layer.forward = forward


def of_a_subclass(layer: Any) -> None:
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Doubles), requires_grad=False)


CHANGES: dict[str, Callable[[Any], object]] = {
    "forward hook": lambda layer: layer.register_forward_hook(lambda m, args, out: 2 * out),
    "forward pre-hook": lambda layer: layer.register_forward_pre_hook(lambda m, args: (2 * args[0],)),
    "prune": pruned,
    "weight_norm": normed,
    "spectral_norm": spectral_norm,
    "forward": lambda layer: setattr(layer, "forward", lambda x: 2 * type(layer).forward(layer, x)),
    "offload": offloaded,
    "subclass": of_a_subclass,
    "fully_shard": fully_shard,
}


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def arguments(name: str, *batch: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*batch, 5, 5, C, generator=generator, dtype=torch.float64)
    mask = (torch.rand(*batch, 5, 5, generator=generator) > 0.3).double()
    if name == "pair_bias":
        return x.roll(1, -2), x, mask
    return (x,) if name in ("glu", "swiglu", "transition") else (x, mask)


def plain(layer: Any) -> Any:
    """A layer without hooks that computes what calls of `layer` do: it is affine."""
    is_linear = isinstance(layer, nn.Linear)
    n = layer.in_features if is_linear else layer.normalized_shape[0]
    with torch.no_grad():
        b = layer(torch.zeros(1, n, dtype=torch.float64))[0]
        if is_linear:
            w = (layer(torch.eye(n, dtype=torch.float64)) - b).T
            new: nn.Module = nn.Linear(n, w.shape[0], dtype=torch.float64)
        else:
            x = torch.randn(1, n, dtype=torch.float64)
            w = (layer(x)[0] - b) / F.layer_norm(x, (n,), eps=layer.eps)[0]
            new = nn.LayerNorm(n, layer.eps, dtype=torch.float64)
        new.weight, new.bias = nn.Parameter(w.clone()), nn.Parameter(b.clone())
    return new


def same(module: Any, expected: Callable[[], Any], *args: Tensor) -> None:
    """`module` is called first, since a call of its layers alone may bring their parameters up to date."""
    x, *mask = args
    results = []
    for make in (lambda: module, expected):
        m = make()
        leaf = x.clone().requires_grad_()
        out = m(leaf, *mask)
        results.append([out, *torch.autograd.grad(out.sin().sum(), leaf)])
        for way in sorted({"inplace", "residual"} & inspect.signature(m.forward).parameters.keys()):
            with torch.no_grad():
                given = x.clone()
                results[-1].append(m(given, *mask, **{way: True}))
                assert (results[-1][-1] is given) == (way == "inplace")
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", MODULES)
def test_layers_that_do_more(name: str, change: str) -> None:
    """Each of them, in its module, computes what it does if it is called."""
    original = randomised(MODULES[name](), 1).double().eval()
    kinds = (nn.Linear, nn.LayerNorm) if change in ("forward hook", "fully_shard") else (nn.Linear,)
    layers = [path for path, layer in original.named_modules() if isinstance(layer, kinds)]
    for path in layers if name != "layer" else layers[::5]:
        module = copy.deepcopy(original)
        layer = module.get_submodule(path)
        CHANGES[change](layer)

        def expected(path: str = path, layer: nn.Module = layer) -> nn.Module:
            whole = copy.deepcopy(original)
            above, _, last = path.rpartition(".")
            setattr(whole.get_submodule(above), last, plain(layer))
            return whole

        same(module, expected, *arguments(name, 2))


@pytest.mark.parametrize("batch", [(), (2,), (2, 3), (0,)])
@pytest.mark.parametrize("name", MODULES)
def test_calls_of_layers_compute_the_same(name: str, batch: tuple[int, ...]) -> None:
    """And without hooks, the operator runs."""
    module = randomised(MODULES[name](), 1).double().eval()
    hooked = copy.deepcopy(module)
    ran: list[str] = []
    for path, layer in hooked.named_modules():
        if isinstance(layer, nn.Linear | nn.LayerNorm):
            layer.register_forward_hook(lambda m, args, out, path=path: ran.append(path))
    same(hooked, lambda: module, *arguments(name, *batch))
    assert set(ran) == {p for p, m in module.named_modules() if isinstance(m, nn.Linear | nn.LayerNorm)}
    calls = []
    for m in (module, hooked):
        with torch.profiler.profile() as profile, torch.no_grad():
            m(*arguments(name, 2))
        calls.append(sum(event.count for event in profile.key_averages() if event.key == "aten::linear"))
    assert calls[0] < calls[1]


@pytest.mark.parametrize("name", MODULES)
def test_half_of_the_bits(name: str) -> None:
    """With 16-bit parameters, x may be float32, also where the layers are called."""
    module = randomised(MODULES[name](), 1).bfloat16().eval()
    hooked = copy.deepcopy(module)
    for layer in hooked.modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(lambda m, args, out: None)
    args = arguments(name, 2)
    exact = copy.deepcopy(module).double()(*args)
    ours, theirs = (m(*(t.float() for t in args)) for m in (hooked, module))
    assert ours.dtype == theirs.dtype
    assert (ours - exact).norm() <= 4 * (theirs - exact).norm()


@pytest.mark.parametrize("norm", [weight_norm, spectral_norm])
def test_training_steps(norm: Callable[[nn.Module], nn.Module]) -> None:
    """Of the parameters from which hooks make the weights."""
    module: Any = randomised(Transition(C), 1).double()
    norm(module.fc1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    (x,) = arguments("transition", 2)
    before = copy.deepcopy(module.fc1.state_dict())
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = module(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > losses[1] > losses[2]
    trained = [n for n, value in module.fc1.state_dict().items() if not torch.equal(value, before[n])]
    assert {"weight_g", "weight_v"} <= {*trained} or "weight_orig" in trained


def test_hooks_of_the_heads() -> None:
    """The layers of an attention are in a module of their own."""
    module: Any = randomised(TriangleAttention(C, 2, 4), 1).double().eval()
    x, mask = arguments("starting", 2)
    expected = 2 * module(x, mask)
    module.mha.register_forward_hook(lambda m, args, out: 2 * out)
    torch.testing.assert_close(module(x, mask), expected)


@pytest.mark.parametrize("name", MODULES)
def test_compiled(name: str) -> None:
    module: Any = randomised(MODULES[name](), 1).double().eval()
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(lambda m, args, out: 2 * out)
    args = arguments(name)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(module, fullgraph=True, backend="aot_eager")(*args), module(*args))


ADDED: dict[str, Callable[[Any], object]] = {
    "a forward hook": lambda layer: layer.register_forward_hook(lambda m, args, out: 2 * out),
    "a forward pre-hook": lambda layer: layer.register_forward_pre_hook(lambda m, args: None),
    "a backward hook": lambda layer: layer.register_full_backward_hook(lambda m, g, o: None),
    "prune": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    "weight_norm": weight_norm,
    "spectral_norm": spectral_norm,
    "a forward": lambda layer: setattr(layer, "forward", lambda x: x),
    "fully_shard": fully_shard,
}


@needs_boltz
@pytest.mark.parametrize("added", ADDED)
@pytest.mark.parametrize("part", PARTS)
def test_replaced_modules_say_so(part: str, added: str) -> None:
    """Their layers hold parameters and cannot be called, so what is added later raises."""
    stack = _stack(1).eval()
    assert replace(stack).replaced
    streams, masks = _streams(whole=False)
    layers = [p for p, m in stack[0].get_submodule(part).named_modules() if "weight" in m._parameters]
    for path in layers if added == "a forward hook" else layers[-1:]:
        changed = copy.deepcopy(stack)
        layer = changed[0].get_submodule(part).get_submodule(path)
        ADDED[added](layer)
        with torch.no_grad(), pytest.raises(RuntimeError, match=rf"expected {path}, .* without hooks .*, got "):
            _run(changed, *streams, masks=masks)


@pytest.mark.parametrize("name", [name for name in MODULES if "glu" not in name])  # GLU has neither
def test_layers_with_other_settings(name: str) -> None:
    """A bias that the operator has no parameter for, and a norm with an eps of its own, are not left out."""
    for path, layer in MODULES[name]().named_modules():
        if isinstance(layer, nn.LayerNorm):
            other: nn.Module = nn.LayerNorm(layer.normalized_shape, eps=0.5)
        elif isinstance(layer, nn.Linear) and layer.bias is None:
            other = nn.Linear(layer.in_features, layer.out_features)
        else:
            continue
        module = MODULES[name]()
        parent, _, last = path.rpartition(".")
        setattr(module.get_submodule(parent), last, other)
        module = module.double().eval()
        for parameter in module.parameters():
            nn.init.normal_(parameter)
        called = copy.deepcopy(module)
        called.get_submodule(path).register_forward_hook(lambda *_: None)  # so the layers are called
        same(module, lambda called=called: called, *arguments(name))  # type: ignore[misc]

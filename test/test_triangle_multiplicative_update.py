"""The triangle multiplicative update: values and gradients against float64, transforms, what training computes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import triangle_reference
from checks import assert_all_close
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from triangle_samples import SHAPES, arguments, beneath, distance, parameters, run, small, to_leaves

import torchops

OPS = torch.ops.myops
reference: Any = triangle_reference.triangle_multiplicative_update
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]

# ATen's products in float16 are slow on the CPU.
CASES = [
    (shape, dtype, device)
    for shape in SHAPES
    for dtype in DTYPES
    for device in DEVICES
    if device == "cuda" or dtype != torch.float16 or SHAPES[shape][1] < 64
]


@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
@pytest.mark.parametrize(("shape", "dtype", "device"), CASES, ids=str)
def test_values_and_gradients(shape: str, direction: str, dtype: torch.dtype, device: str) -> None:
    x, given = arguments(shape, dtype, device)
    cotangent = torch.randn_like(x)
    leaves, exact_leaves, aten_leaves = to_leaves(x, given), to_leaves(x, given, torch.float64), to_leaves(x, given)
    got = run(torchops.triangle_multiplicative_update, leaves[0], direction, leaves[1], cotangent)
    exact = run(reference, exact_leaves[0], direction, exact_leaves[1], cotangent)
    aten = run(reference, aten_leaves[0], direction, aten_leaves[1], cotangent)
    eps = torch.finfo(dtype).eps
    for name, expected in exact.items():
        assert got[name].dtype == dtype, name
        # Gradients add rounded terms in another order than ATen's. In the smallest tensors, where a layer norm is over
        # five channels, both errors are those of a few roundings, and either may be several times the other.
        strict = name == "out" and x.shape[-2] >= 64
        times = 1.1 if strict else 2 if x.numel() > 1000 else 5
        allowed = times * distance(aten[name], expected) + (0.25 if strict else 4) * eps
        assert distance(got[name], expected) <= max(allowed, 128 * eps if dtype == torch.float64 else 0), name
    in_place = x.clone()
    overwrite: Any = torchops.add_triangle_multiplicative_update_
    assert overwrite(in_place, direction, **given) is in_place
    if x.numel():
        # In float64, what is called exact has errors of its own, and ATen's distance from it is 0.
        roundings = 8 if dtype == torch.float64 else 2
        allowed = roundings * eps + (1.1 if x.numel() > 1000 else 5) * distance(aten["out"], exact["out"])
        assert distance(in_place, x.double() + exact["out"]) <= allowed


@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
@pytest.mark.parametrize("device", DEVICES)
def test_accuracy_of_long_sums(direction: str, device: str) -> None:
    """Of bfloat16, as the same operations in eager mode; on the CPU fewer positions, for its sake."""
    torch.manual_seed(0)
    n, c = (512, 128) if device == "cuda" else (160, 128)
    given = parameters(c, c, dtype=torch.bfloat16, device=device)
    given["mask"] = (torch.rand(n, n) > 0.1).to(device)
    x = torch.randn(n, n, c, dtype=torch.float64).to(device, torch.bfloat16)
    wide = {name: t.double() if t.is_floating_point() else t for name, t in given.items()}
    exact = reference(x.double(), direction, **wide)
    update: Any = torchops.triangle_multiplicative_update
    got, aten = (function(x, direction, **given) for function in (update, reference))
    assert distance(got, exact) <= 1.1 * distance(aten, exact)


# --- beyond values ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kept", ["x", "mask", "p_in_weight", "g_out_bias", "norm_out_weight", "norm_in_bias", "p_out_weight"]
)
def test_one_gradient_alone(kept: str) -> None:
    """What is not wanted is not computed, and changes nothing of what is."""
    x, given = small(requires_grad=True)
    everything = {"x": x} | given
    grad = torch.randn_like(x)
    whole = torch.autograd.grad(OPS.triangle_multiplicative_update(x, **given), everything[kept], grad)
    for name, t in everything.items():
        t.requires_grad_(name == kept)
    alone = torch.autograd.grad(OPS.triangle_multiplicative_update(x, **given), everything[kept], grad)
    assert torch.equal(alone[0], whole[0])


def test_flops() -> None:
    """Products that nobody asked for are not computed."""
    x, given = small(torch.float32)
    pairs, n, c, d = 2 * 4 * 4, 4, 3, 2

    def count(*trained: Tensor) -> int:
        for t in trained:
            t.requires_grad_()
        with FlopCounterMode(display=False) as counter:
            out = OPS.triangle_multiplicative_update(x, **given)
            if trained:
                out.sum().backward()
        for t in trained:
            t.requires_grad_(False)
        return counter.get_total_flops() // (2 * pairs)

    forward = 4 * c * d + n * d + c * d + c * c
    assert count() == forward
    assert count(given["p_out_weight"]) == forward + 2 * c * d + c * c
    assert count(given["g_out_bias"]) == forward + c * d + c * c
    assert count(given["g_out_weight"]) == forward + c * d + 2 * c * c
    assert count(given["norm_out_bias"]) == forward + 2 * c * d + c * c
    assert count(given["p_in_weight"]) == forward + 2 * c * d + c * c + 10 * c * d + 2 * n * d
    assert count(x) == forward + 2 * c * d + 2 * c * c + 12 * c * d + 2 * n * d
    assert count(x, *given.values()) == forward + 3 * c * d + 3 * c * c + 16 * c * d + 2 * n * d


@pytest.mark.parametrize(
    ("wanted", "products", "tensors"),
    [
        pytest.param(16, 0, 0, id="g_out_weight"),
        pytest.param(14, 0, 0, id="p_out_weight"),
        pytest.param(12, 0, 0, id="norm_out_weight"),
        pytest.param(4, 2, 3, id="a_p_weight"),
        pytest.param(1, 2, 3, id="mask"),
        pytest.param(0, 2, 4, id="x"),
    ],
)
def test_one_gradient_takes_what_it_needs(wanted: int, products: int, tensors: int) -> None:
    """What comes behind o takes none of the products of matrices and no tensor of the size of x. The rest takes d(o), a
    and b, two of which become da and db; and x takes dx."""
    n, c, d = 300, 8, 8  # several panels
    given = parameters(c, d, dtype=torch.float32) | {"mask": torch.rand(n, n)}
    x = torch.randn(n, n, c)
    _, product = OPS._triangle_multiplicative_update(x, given["mask"], beneath(given), True, 1e-5, True)
    output_mask = [i == wanted for i in range(18)]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        OPS._triangle_multiplicative_update_backward(
            x, x, [product], given["mask"], beneath(given), True, 1e-5, output_mask
        )
    events = profiler.events()
    groups = -(-d // (2**20 // (4 * n * n)))  # of channels, whose matrices take a MiB at most
    assert sum(event.name == "aten::bmm" for event in events) == products * groups
    assert sum(event.name == "aten::empty" and event.self_cpu_memory_usage >= x.nbytes for event in events) == tensors


def test_empty_batch_needs_no_memory() -> None:
    """Not even for the product of one element, which would have more bytes than any machine."""
    x = torch.empty(0, 1_000_000, 1_000_000, 8)
    given: Any = parameters(8, 8, dtype=torch.float32)
    assert torchops.triangle_multiplicative_update(x, **given).shape == x.shape
    assert torchops.add_triangle_multiplicative_update_(x, **given) is x


def test_opcheck_of_private_operators() -> None:
    x, given = small(torch.float32)
    parameters = beneath(given)
    for op in (OPS._triangle_multiplicative_update, OPS._triangle_multiplicative_update_):
        torch.library.opcheck(op.default, (x, given["mask"], parameters, True, 1e-5, True))
    _, product = OPS._triangle_multiplicative_update(x, given["mask"], parameters, True, 1e-5, True)
    output_mask = [True] * 18
    torch.library.opcheck(
        OPS._triangle_multiplicative_update_backward.default,
        (torch.randn_like(x), x, [product], given["mask"], parameters, True, 1e-5, output_mask),
    )


@pytest.mark.parametrize("op", ["", "_"])
def test_ways_through_a_graph(op: str) -> None:
    """What was saved is there as long as a graph may be asked again, also for those who run it themselves."""
    x, given = small(requires_grad=True)
    cotangent, leaves = torch.ones_like(x), [x, *given.values()]
    call: Any = torchops.add_triangle_multiplicative_update_ if op else torchops.triangle_multiplicative_update

    def update(x: Tensor) -> Tensor:
        return call(x + 0, **given)

    y = update(x)
    expected = torch.autograd.grad(y, leaves, cotangent, retain_graph=True)
    assert all(map(torch.equal, torch.autograd.grad(y, leaves, cotangent), expected))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(y, leaves, cotangent)

    def through(run: Any) -> None:
        for t in leaves:
            t.grad = None
        run()
        assert_all_close([t.grad for t in leaves if t.grad is not None], expected)

    for reentrant in (False, True):
        through(checkpoint(update, x, use_reentrant=reentrant).sum().backward)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        through(update(x).sum().backward)


@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
def test_training_in_place(direction: str) -> None:
    x, given = small(requires_grad=True)
    cotangent = torch.randn_like(x)
    expected_x, expected_given = to_leaves(x, given)
    out = expected_x * 1.5
    out = out + reference(out, direction, **expected_given)
    expected = torch.autograd.grad(out, [expected_x, *expected_given.values()], cotangent)
    hidden = x * 1.5
    overwrite: Any = torchops.add_triangle_multiplicative_update_
    result = overwrite(hidden, direction, **given)
    assert result is hidden
    torch.testing.assert_close(result, out)
    got = torch.autograd.grad(result, [x, *given.values()], cotangent)
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e)


def test_training_in_place_with_a_mask_in_the_same_memory() -> None:
    x, given = small(torch.float32)
    memory = torch.zeros(x.numel() + 8)
    memory.view(torch.uint8)[: given["mask"].numel()] = (given["mask"] > 0.5).flatten()
    target = memory[: x.numel()].view_as(x)
    given["mask"] = memory.view(torch.uint8)[: given["mask"].numel()].view(torch.bool).view_as(given["mask"])
    given["p_out_weight"].requires_grad_()
    mask = given["mask"].clone()
    expected = target + reference(target.clone(), **given | {"mask": mask})
    OPS.add_triangle_multiplicative_update_(target, **given)
    torch.testing.assert_close(target, expected)


def test_compiled() -> None:
    """One graph for all sizes, with the operator in it; training and in place too."""
    _, given = small(torch.float32, requires_grad=True)
    del given["mask"]

    def model(x: Tensor) -> Tensor:
        h = x * 2
        torchops.add_triangle_multiplicative_update_(h, **given)  # type: ignore[arg-type]
        return h + torchops.triangle_multiplicative_update(h, "incoming", **given)  # type: ignore[arg-type]

    def expected_model(x: Tensor) -> Tensor:
        h = x * 2
        h = h + reference(h, **given)
        return h + reference(h, "incoming", **given)

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for n in (4, 5, 9):
        x = torch.randn(n, n, 3, requires_grad=True)
        out, expected = compiled(x), expected_model(x)
        torch.testing.assert_close(out, expected)
        leaves = [x, *given.values()]
        cotangent = torch.randn_like(out)
        got = torch.autograd.grad(out, leaves, cotangent)
        for g, e in zip(got, torch.autograd.grad(expected, leaves, cotangent), strict=True):
            torch.testing.assert_close(g, e, rtol=1e-3, atol=1e-3)


def test_float32_stream() -> None:
    """float32 x with weights of 16 bits, given or cast by autocast: sum and gradient stay float32."""
    x, given = small(torch.float32)
    low = {name: t if name.startswith("norm_") else t.bfloat16() for name, t in given.items()}
    out = OPS.triangle_multiplicative_update(x, **low)
    assert out.dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(OPS.triangle_multiplicative_update(x, **given), out)
        in_place = x.clone()
        OPS.add_triangle_multiplicative_update_(in_place, **given)
        below = OPS._triangle_multiplicative_update(x, given["mask"], beneath(given), True, 1e-5)[0]
    assert torch.equal(below, out)
    torch.testing.assert_close(in_place, x + out.float())
    leaf = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(OPS.triangle_multiplicative_update(leaf, **low), leaf, torch.ones_like(out))
    exact = x.double().requires_grad_()
    (expected,) = torch.autograd.grad(
        reference(exact, **{name: t.double() for name, t in low.items()}), exact, torch.ones_like(exact)
    )
    assert grad.dtype == torch.float32
    assert distance(grad, expected) < 0.15


def test_products_beyond_float16() -> None:
    """o has elements that float16 has no number for: 400 products of 20 * 20."""
    x = torch.ones(400, 400, 4, dtype=torch.float16)
    x[..., 0] = torch.linspace(-3, 3, 400).half()
    torch.manual_seed(0)
    given = parameters(4, 4, norm=False, dtype=torch.float16)
    given["p_in_bias"] = torch.full((8,), 20.0, dtype=torch.float16)
    given["g_in_bias"] = torch.full((8,), 10.0, dtype=torch.float16)
    exact = reference(x.double(), **{name: t.double() for name, t in given.items()})
    got = OPS.triangle_multiplicative_update(x, **given)
    assert got.isfinite().all()
    assert distance(got, exact) < 0.05


def test_products_beyond_float16_where_sizes_are_symbols() -> None:
    """There the update is taken apart, into operators of ATen that scale nothing."""
    x, given = torch.randn(2, 64, 64, 4).half(), parameters(4, 4, norm=False, dtype=torch.float16)
    given["p_in_bias"] = 64 + torch.randn(8).half()
    given["g_in_bias"] = torch.full((8,), 10.0, dtype=torch.float16)

    def batched(x: Tensor, *values: Tensor) -> Tensor:
        update = partial(OPS.triangle_multiplicative_update, **dict(zip(given, values, strict=True)))
        return torch.func.vmap(update)(x)

    graph = make_fx(batched, tracing_mode="symbolic")(x, *given.values())
    exact = reference(x.double(), **{name: t.double() for name, t in given.items()})
    assert distance(graph(x, *given.values()), exact) < 0.1


LAZY = {"negative": lambda t: torch._neg_view(-t), "zero": lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype)}


@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
@pytest.mark.parametrize("lazy", LAZY)
def test_lazy_bits_in_training(lazy: str, direction: str) -> None:
    """The operators beneath take the parameters as a list, into which ATen's fallbacks for such tensors do not look."""
    x, given = small()
    cotangent = torch.randn_like(x)
    for name in ("x", *given):
        everything = {"x": x, **given}
        everything = {n: LAZY[lazy](t) if n == name else t for n, t in everything.items()}
        values = {n: t.clone() for n, t in everything.items()}
        leaves = [t.requires_grad_() for t in everything.values() if not t._is_zerotensor()]
        kept = [values[n].requires_grad_() for n, t in everything.items() if not t._is_zerotensor()]
        out = OPS.triangle_multiplicative_update(direction=direction, **everything)
        expected = reference(direction=direction, **values)
        torch.testing.assert_close(out, expected)
        got = torch.autograd.grad(out, leaves, cotangent)
        torch.testing.assert_close(got, torch.autograd.grad(expected, kept, cotangent))


def test_repeatable() -> None:
    x, given = arguments("panels", torch.float32, "cpu")
    runs = []
    for _ in range(2):
        leaf, leaves = to_leaves(x, given)
        runs.append(run(torchops.triangle_multiplicative_update, leaf, "incoming", leaves, x))
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])

"""Operators with folded layer norms whose weights and biases are float32 beside weights of 16 bits, given like that or
left so by autocast: values and gradients against float64, beside the formula in PyTorch's operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import attention_update_samples
import pytest
import torch
import triangle_reference
from torch import Tensor
from torch.nn.functional import layer_norm
from transition_samples import transition_reference
from triangle_samples import distance

import torchops
from torchops import AttentionWeights, triangle_attention_update

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"))]
LOW = torch.bfloat16
HEADS = 4


class Case(NamedTuple):
    function: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    shapes: Callable[[int], dict[str, tuple[int, ...]]]


def _transition_shapes(c: int) -> dict[str, tuple[int, ...]]:
    weights = {"gate_weight": (4 * c, c), "up_weight": (4 * c, c), "down_weight": (c, 4 * c)}
    return {"norm_weight": (c,), "norm_bias": (c,), **weights}


def _triangle_shapes(c: int) -> dict[str, tuple[int, ...]]:
    weights = {"p_in_weight": (2 * c, c), "g_in_weight": (2 * c, c), "p_out_weight": (c, c), "g_out_weight": (c, c)}
    norms = [f"norm_{where}_{kind}" for where in ("in", "out") for kind in ("weight", "bias")]
    return {**dict.fromkeys(norms, (c,)), **weights}


def _attention_shapes(c: int) -> dict[str, tuple[int, ...]]:
    products = dict.fromkeys(("q", "k", "v", "gate", "out"), (c, c))
    return {"norm_weight": (c,), "norm_bias": (c,), "bias_weight": (HEADS, c), **products}


def _weights(given: dict[str, Any]) -> AttentionWeights:
    return AttentionWeights(**given, gate_bias=None, out_bias=None, heads=HEADS)


def _attention(node: Any) -> Case:
    def function(x: Tensor, **given: Tensor) -> Tensor:
        return triangle_attention_update(x, None, _weights(given), node)

    def reference(x: Tensor, **given: Tensor) -> Tensor:
        return attention_update_samples.reference(x, None, _weights(given), node)

    return Case(function, reference, _attention_shapes)


def _triangle(direction: Any) -> Case:
    def function(x: Tensor, **given: Any) -> Tensor:
        return torchops.triangle_multiplicative_update(x, direction, **given)

    def reference(x: Tensor, **given: Any) -> Tensor:
        return triangle_reference.triangle_multiplicative_update(x, direction, **given)

    return Case(function, reference, _triangle_shapes)


CASES = {
    "transition": Case(torchops.transition, transition_reference, _transition_shapes),
    "outgoing": _triangle("outgoing"),
    "incoming": _triangle("incoming"),
    "starting": _attention("starting"),
    "ending": _attention("ending"),
}

# Sizes of the kernels for 16 bits, of the panels beside these, and of the kernels for more features.
SIZES = [(24, 64), (19, 20), (24, 128), (12, 160)]


def _arguments(case: Case, n: int, c: int, device: str, seed: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def random(name: str, *shape: int) -> Tensor:
        values = torch.randn(*shape, generator=generator)
        if len(shape) == 2:
            return (values * shape[1] ** -0.5).to(device)
        # Halfway to the next number of bfloat16, nearly: rounded parameters would be smaller, all of them.
        exact = (1 + 0.3 * values.abs() if name.endswith("weight") else 0.3 * values).to(LOW).float()
        return (exact * (1 + 2**-9) if name.endswith("weight") else exact).to(device)

    given = {name: random(name, *shape) for name, shape in case.shapes(c).items()}
    return torch.randn(n, n, c, generator=generator).to(device), given


def _run(
    function: Callable[..., Tensor], x: Tensor, given: dict[str, Tensor], autocast: bool = False
) -> dict[str, Tensor]:
    """The result and the gradients of all arguments, of a fixed cotangent."""
    leaves = {name: t.detach().clone().requires_grad_() for name, t in {"x": x, **given}.items()}
    with torch.autocast(x.device.type, LOW, enabled=autocast):
        out = function(leaves["x"], **{name: leaves[name] for name in given})
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(LOW).to(out)
    gradients = torch.autograd.grad(out, list(leaves.values()), cotangent)
    return {"out": out.detach()} | dict(zip(leaves, gradients, strict=True))


def _to(dtype: torch.dtype, given: dict[str, Tensor], norms: torch.dtype | None = None) -> dict[str, Tensor]:
    return {name: t.to(norms if norms and name.startswith("norm") else dtype) for name, t in given.items()}


def _shift(got: Tensor, exact: Tensor) -> float:
    """How much larger the result is on average, relative to it: roundings of elements nearly cancel in it, but not
    those of parameters."""
    return float(((got.double() - exact) * exact).sum() / exact.square().sum())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("x_dtype", [LOW, torch.float32], ids=str)
@pytest.mark.parametrize(("n", "c"), SIZES)
@pytest.mark.parametrize("name", CASES)
def test_float32_norms_beside_16_bits(name: str, n: int, c: int, x_dtype: torch.dtype, device: str) -> None:
    """Norms that are float32 are used unrounded, and have float32 gradients."""
    case = CASES[name]
    x, given = _arguments(case, n, c, device)
    mixed = _to(LOW, given, torch.float32)
    got = _run(case.function, x.to(x_dtype), mixed)
    rounded = _run(case.function, x.to(x_dtype), _to(LOW, given))
    exact = _run(case.reference, x.to(x_dtype).double(), _to(torch.float64, mixed))
    assert got["out"].dtype == LOW
    for leaf, t in {"x": x.to(x_dtype), **mixed}.items():
        assert got[leaf].dtype == t.dtype, leaf
        assert distance(got[leaf], exact[leaf]) < 0.03, leaf
    # Norms rounded to bfloat16 have weights that are 0.2% smaller.
    assert abs(_shift(got["out"], exact["out"])) < 8e-4
    assert abs(_shift(rounded["out"], exact["out"])) > 1.6e-3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_as_exact_as_the_formula_under_autocast(name: str, device: str) -> None:
    """A float32 stream under autocast: errors of the result, and of the gradients together, for one of a few elements
    may be off by chance."""
    case = CASES[name]
    squares = {"got": 0.0, "formula": 0.0}
    for seed in range(3):
        x, given = _arguments(case, 32, 64, device, seed)
        exact = _run(case.reference, x.double(), _to(torch.float64, given))
        got, formula = (_run(function, x, given, autocast=True) for function in (case.function, case.reference))
        for leaf, expected in exact.items():
            assert leaf == "out" or got[leaf].dtype == torch.float32
            error, theirs = distance(got[leaf], expected), distance(formula[leaf], expected)
            if leaf == "out":
                assert error <= 1.1 * theirs
            else:
                squares["got"] += error**2
                squares["formula"] += theirs**2
    assert squares["got"] <= 1.25**2 * squares["formula"]


@pytest.mark.parametrize("device", DEVICES)
def test_layer_norm_of_16_bits(device: str) -> None:
    """The operator that the others call takes float32 parameters, too, one or both."""
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*shape, generator=generator).to(device) for shape in ((50, 96), (96,), (96,)))
    x = x.to(LOW)
    for w, b in ((weight, bias), (weight, bias.to(LOW)), (None, bias), (weight, None)):
        given = {name: t for name, t in (("weight", w), ("bias", b)) if t is not None}
        got = _run(lambda x, **given: torchops.layer_norm(x, [96], **given), x, given)
        exact = _run(lambda x, **given: layer_norm(x, [96], **given), x.double(), _to(torch.float64, given))
        for leaf, t in {"out": x, "x": x, **given}.items():
            assert got[leaf].dtype == t.dtype
            assert distance(got[leaf], exact[leaf]) < (4e-3 if t.dtype == LOW or w is None else 1e-5)

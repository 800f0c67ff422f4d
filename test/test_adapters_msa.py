"""Parts of Boltz's MSA and diffusion modules that stay as they are inside: released and by operators."""

from __future__ import annotations

import copy
import importlib
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from checks import assert_all_close, random_like
from torch import Tensor, nn

from torchops import replace

pytestmark = [
    pytest.mark.xdist_group("adapters"),
    pytest.mark.skipif(find_spec("boltz") is None, reason="boltz is not installed"),
]

OPERATORS = {
    "norm": {"layer_norm", "gate"},
    "transition": {"layer_norm", "gate", "glu"},
    "averaging": {"layer_norm", "gate"},
    "products": {"layer_norm", "outer_product_mean"},
}
parts = pytest.mark.parametrize("part", OPERATORS)


def released() -> Any:
    blocks = importlib.import_module("boltz.model.modules.transformersv2")
    averaging, products = (
        importlib.import_module(f"boltz.model.layers.{name}") for name in ("pair_averaging", "outer_product_mean")
    )
    model: Any = nn.ModuleDict(
        {
            "norm": blocks.AdaLN(8, 6),
            "transition": blocks.ConditionedTransitionBlock(8, 6),
            "averaging": averaging.PairWeightedAveraging(8, 4, 3, 2),
            "products": products.OuterProductMean(8, 3, 4),
        }
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(random_like(parameter, parameter.numel()))
    return model.eval()


def both() -> tuple[Any, Any]:
    former = released()
    model = copy.deepcopy(former)
    report = replace(model)
    assert report.replaced == tuple(OPERATORS)
    assert report.left == {}
    return model, former


def arguments(part: str) -> tuple[Tensor, ...]:
    if part in ("norm", "transition"):
        return random_like(torch.empty(2, 5, 8), 1), random_like(torch.empty(2, 5, 6), 2)
    m = random_like(torch.empty(2, 3, 5, 8))
    if part == "averaging":
        return m, random_like(torch.empty(2, 5, 5, 4)), torch.ones(2, 5, 5)
    return m, (random_like(torch.empty(2, 3, 5), 3) > -0.5).float()


KEYWORDS: dict[str, list[dict[str, Any]]] = {
    "averaging": [{}, {"chunk_heads": True}, {"chunk_heads": False}],
    "products": [{}, {"chunk_size": 1}],
}


@parts
@pytest.mark.parametrize("training", [False, True])
def test_results_and_gradients(part: str, training: bool) -> None:
    """Also of the released chunks in evaluation."""
    model, former = (m.train(training) for m in both())
    args = arguments(part)
    for more in KEYWORDS.get(part, [{}]):
        results = []
        for m in (model[part], former[part]):
            leaf = args[0].clone().requires_grad_()
            out = m(leaf, *args[1:], **more)
            results.append([out, *torch.autograd.grad(out, [leaf, *m.parameters()], random_like(out, 5))])
        assert_all_close(*results, atol=3e-5, rtol=5e-4)


@parts
def test_compiled_modules_take_operators(part: str) -> None:
    """In one graph, of any sizes."""
    model, former = both()
    names: list[str] = []

    def backend(module: Any, inputs: Any) -> Any:
        names.extend(str(node.target) for node in module.graph.nodes if node.op == "call_function")
        return module

    try:
        compiled = torch.compile(model[part], backend=backend, fullgraph=True, dynamic=True)
        for rows in (1, 2):
            args = tuple(t.repeat_interleave(rows, 1) if part in ("norm", "transition") else t for t in arguments(part))
            with torch.no_grad():
                assert_all_close([compiled(*args)], [former[part](*args)], atol=3e-5, rtol=5e-4)
    finally:
        torch._dynamo.reset()
    assert {f"myops.{name}" for name in OPERATORS[part]} <= set(names)


def test_export_with_any_number_of_sequences() -> None:
    model, former = both()
    m, z, mask = arguments("averaging")
    sequences = torch.export.Dim("sequences", min=2, max=100)
    shapes = ({1: sequences}, None, None, None)
    program = torch.export.export(model["averaging"], (m, z, mask, True), dynamic_shapes=(shapes,))
    for size in (2, 11):
        m = random_like(torch.empty(2, size, 5, 8))
        got, want = program.module()(m, z, mask, True), former["averaging"](m, z, mask, True)
        assert_all_close([got], [want], atol=3e-5, rtol=5e-4)


@parts
def test_on_the_meta_device(part: str) -> None:
    model, former = (m.to("meta") for m in both())
    args = [t.to("meta") for t in arguments(part)]
    got, want = model[part](*args), former[part](*args)
    assert (got.shape, got.dtype, got.device) == (want.shape, want.dtype, want.device)


@parts
@pytest.mark.parametrize("training", [False, True])
def test_dtypes_under_autocast(part: str, training: bool) -> None:
    model, former = (m.train(training) for m in both())
    for more in KEYWORDS.get(part, [{}]):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            got, want = (m[part](*arguments(part), **more) for m in (model, former))
        assert got.dtype == want.dtype
        assert (got - want).norm() < 0.02 * want.norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_outer_products_of_many_sequences(dtype: torch.dtype) -> None:
    """Sums of which overflow float16, and whose number has more digits than bfloat16."""
    model, former = both()
    model, former = model["products"].to(dtype), former["products"].to(dtype)
    with torch.no_grad():
        for m in (model, former):
            m.norm.weight.fill_(8)
        x = random_like(torch.empty(1, 1, 5, 8)).expand(1, 8192, 5, 8).to(dtype)
        kept = torch.ones(1, 8192, 5, dtype=dtype)
        kept[:, 5000:, 0] = 0
        got, want = model(x, kept), former.float()(x.float(), kept.float())
    assert got.dtype == dtype
    assert_all_close([got.float()], [want], atol=0.02 * float(want.abs().max()), rtol=0.02)


def test_pair_layers_on_the_meta_device() -> None:
    """In training, with dropout, and in 16 bits, where they switch autocast off."""
    pairformer = importlib.import_module("boltz.model.layers.pairformer")
    model: Any = nn.ModuleList([pairformer.PairformerNoSeqLayer(8, pairwise_head_width=4, pairwise_num_heads=2)])
    assert "0" in replace(model).replaced
    for dtype in (torch.float32, torch.bfloat16):
        layer = model.to("meta", dtype)[0]
        z, mask = torch.empty(1, 5, 5, 8, device="meta", dtype=dtype), torch.ones(1, 5, 5, device="meta")
        for training in (True, False):
            assert layer.train(training)(z, mask).shape == z.shape
        for part in (layer.tri_mul_out, layer.tri_att_start):
            assert part(z, mask).shape == z.shape
        assert layer.transition_z(z).shape == z.shape

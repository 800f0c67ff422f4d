"""torchops.nn.PairLayer beside the layer as papers write it."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import assert_all_close, random_like
from torch import Tensor, nn

from torchops.nn import PairLayer

sys.path.append(str(Path(__file__).parents[1] / "examples/models"))

import alphafold3_pair_layer as written

N = 6
MASK = random_like(torch.empty(2, N, N)) > -1


def layers() -> tuple[nn.Module, Any]:
    """As written, and ours with its state dict."""
    plain: nn.Module = written.PairLayer(8, 2, 4)
    for i, parameter in enumerate(plain.parameters()):
        parameter.data = random_like(parameter.data, i) * 0.3 + (parameter.dim() == 1)
    ours = PairLayer(8, 2, 4)
    ours.load_state_dict(plain.state_dict())
    return plain, ours


def results(layer: nn.Module, x: Tensor, **how: bool) -> list[Tensor]:
    """The result and all gradients."""
    x = x.clone().requires_grad_()
    out = layer(x * 1, MASK.float(), **how)
    parameters = [parameter for _, parameter in sorted(layer.named_parameters())]  # their order differs
    return [out, *torch.autograd.grad(out, [x, *parameters], random_like(out.detach(), 3))]


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_values_and_gradients(inplace: bool, checkpoint: bool) -> None:
    """With the state dict of the other; a mask of bool is one of numbers; in inference also in place."""
    plain, ours = layers()
    ours.dropout, ours.checkpoint = 0.0, checkpoint
    x = random_like(torch.empty(2, N, N, 8), 50)
    expected = results(plain, x)
    for got, exact in zip(results(ours, x, inplace=inplace), expected, strict=True):
        assert ((got - exact).norm() <= 1e-4 * exact.norm()).item()
    y = x.clone()
    with torch.no_grad():
        out = ours(y, MASK, inplace=inplace)
    assert (out is y) == inplace
    assert_all_close([out], expected[:1], rtol=1e-4, atol=1e-4)
    assert inplace or torch.equal(x, y)


def test_without_a_mask_and_batches() -> None:
    _, ours = layers()
    x = random_like(torch.empty(2, 3, N, N, 8))
    out = ours.eval()(x)
    assert_all_close([out], [ours(x, torch.ones(x.shape[:-1]))], rtol=1e-5, atol=1e-5)
    assert_all_close([out[1, 2]], [ours(x[1, 2])], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("name", ["tri_mul_out", "tri_mul_in", "tri_att_start", "tri_att_end", "transition_z"])
def test_dropout(name: str, inplace: bool) -> None:
    """Of whole rows, of the ending node columns, the others scaled; of the transition nothing."""
    _, layer = layers()
    layer.dropout = 0.5
    for other, module in layer.named_children():
        if other != name:  # adds 0
            last = {"tri_mul": "p_out", "tri_att": "mha.linear_o", "transit": "fc3"}[other[:7]]
            nn.init.zeros_(module.get_submodule(last).weight)
    x = random_like(torch.empty(4, N, N, 8))
    torch.manual_seed(0)
    with torch.no_grad():
        whole = layer.eval()(x) - x
        dropped = layer.train()(x.clone(), inplace=inplace) - x
    if name == "transition_z":
        assert_all_close([dropped], [whole], rtol=1e-5, atol=1e-5)
        return
    left_out = ~dropped.flatten(3).any(-1) if name == "tri_att_end" else ~dropped.any(-1)
    alike = left_out.all(1) if name == "tri_att_end" else left_out.all(2)
    assert 0 < alike.sum() < alike.numel()
    assert_all_close([alike], [left_out.any(1) if name == "tri_att_end" else left_out.any(2)])
    factors = 2.0 * ~(alike[:, None, :, None] if name == "tri_att_end" else alike[:, :, None, None])
    assert_all_close([dropped], [whole * factors], rtol=1e-4, atol=1e-5)


def test_checkpoint_with_dropout() -> None:
    """What is computed again has the same rows left out."""
    _, kept = layers()
    kept.dropout = 0.5
    again = copy.deepcopy(kept)
    again.checkpoint = True
    x = random_like(torch.empty(2, N, N, 8))
    made = []
    for layer in (kept, again):
        torch.manual_seed(1)
        made.append(results(layer, x))
    assert_all_close(*made, rtol=1e-4, atol=1e-5)


def test_what_is_kept() -> None:
    """With checkpoint an update keeps its input and nothing else of that size."""
    _, layer = layers()
    layer.dropout, x = 0.0, random_like(torch.empty(1, 12, 12, 8)).requires_grad_()

    def kept() -> int:
        found: dict[int, int] = {}

        def pack(t: Tensor) -> Tensor:
            found[t.untyped_storage()._cdata] = t.numel()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = layer(x)
        del out
        return sum(numel >= x.numel() for numel in found.values())

    without = kept()
    layer.checkpoint = True
    assert kept() <= 5 < without


def test_errors() -> None:
    with pytest.raises(ValueError, match="PairLayer: expected dropout of at least 0 and below 1, got 1"):
        PairLayer(8, dropout=1.0)
    with pytest.raises(RuntimeError, match="expected x of shape"):
        PairLayer(8, 2, 4)(torch.zeros(2, 3, 8))
    with pytest.raises(RuntimeError, match=r"PairLayer: expected x of shape \(\.\.\., N, N, c\), got \(3, 8\)"):
        PairLayer(8, 2, 4)(torch.zeros(3, 8))


def test_no_features() -> None:
    x = torch.zeros(3, 3, 0)
    assert PairLayer(0)(x).shape == x.shape


def test_start() -> None:
    """It starts as the identity."""
    x = random_like(torch.empty(2, N, N, 8))
    assert torch.equal(PairLayer(8, 2, 4, bias=True).eval()(x), x)
    assert "dropout=0.25, checkpoint=False" in repr(PairLayer(8, 2, 4))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_in_place_keeps_the_dtype(dtype: torch.dtype) -> None:
    """Parameters but those of norms are cast to a 16-bit x, which cannot be cast itself, whatever the lower precision
    is."""
    _, ours = layers()
    ours = ours.to(dtype).float()  # norms, which are not cast, have the same values too
    ours.dropout = 0.0
    x = random_like(torch.empty(2, N, N, 8), 50).to(dtype)
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            got = ours(x.clone(), MASK.float(), inplace=True)
        expected = ours.to(dtype)(x.clone(), MASK.float(), inplace=True)
    assert_all_close([got], [expected])

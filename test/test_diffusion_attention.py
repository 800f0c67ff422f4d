"""The attention of diffusion layers, by either of its ways, beside float64."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from torchops.convert import diffusion
from torchops.convert.constants import Constants

CUDA = torch.cuda.is_available()
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not CUDA, reason="no CUDA"))]
HEADS, D = 3, 24
Arguments = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def arguments(biases: int, rows: int, queries: int, keys: int, device: str, mask: str) -> Arguments:
    generator = torch.Generator().manual_seed(queries)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    q, k, v = (random(biases * rows, n, HEADS, D) for n in (queries, keys, keys))
    bias, kept = random(biases, queries, keys, HEADS), (random(biases * rows, keys) > -0.5).float()
    kept[:, 0] = 1
    if mask == "shared":
        kept = kept[:1].expand_as(kept)
    elif mask == "fractions":
        kept[:, 1:] *= 0.5
    elif mask == "none":
        kept[0] = 0
    return q, k, v, bias, kept


def exact(q: Any, k: Any, v: Any, bias: Any, mask: Tensor, rows: int) -> Any:
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    scores = (q @ k.mT) * D**-0.5 + bias.double().permute(0, 3, 1, 2).repeat_interleave(rows, 0)
    kept = mask == mask.amax(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(~kept[:, None, None], -torch.inf), -1).matmul(v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("triangles", [False, True], ids=["fused", "triangles"])
@pytest.mark.parametrize("mask", ["own", "shared", "fractions", "none"])
@pytest.mark.parametrize(
    ("biases", "rows", "queries", "keys"), [(1, 1, 7, 7), (1, 4, 130, 130), (2, 3, 33, 70), (6, 1, 32, 128)], ids=str
)
def test_values_and_gradients(
    monkeypatch: pytest.MonkeyPatch, biases: int, rows: int, queries: int, keys: int, mask: str, triangles: bool,
    device: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(diffusion, "_takes_triangles", lambda *_: triangles)
    args: Any
    *args, kept = arguments(biases, rows, queries, keys, device, mask)
    got: Any
    want: Any
    got, want = ([t.clone().requires_grad_() for t in args] for _ in range(2))
    # Rows without a key have scores that are rounded beside -inf.
    inf = 1e4 if mask == "none" else 1e6
    out = diffusion.attention(*(*got, kept, inf, rows))
    reference = exact(*(*want, kept, rows))
    tolerance = 2e-3 if mask == "none" else 2e-5
    torch.testing.assert_close(out.double(), reference, atol=tolerance, rtol=0)
    cotangent = torch.randn_like(out)
    grads: Any = torch.autograd.grad(out, got, cotangent)
    exact_grads = torch.autograd.grad(reference, want, cotangent.double())
    for g, e in zip(grads, exact_grads, strict=True):
        assert (g.double() - e).norm() <= tolerance * (e.norm() + cotangent.norm())


@pytest.mark.parametrize("device", DEVICES)
def test_what_broadcasts(device: str) -> None:
    """One sample although there are to be several, and none, by PyTorch."""
    q, k, v, bias, mask = arguments(1, 3, 9, 9, device, "shared")
    one = diffusion.attention(q[:1], k[:1], v[:1], bias, mask, 1e6, 3)
    assert one.shape == (1, 9, HEADS * D)
    assert diffusion.attention(q[:0], k[:0], v[:0], bias, mask[:0], 1e6, 3).shape == (0, 9, HEADS * D)


@pytest.mark.skipif(not CUDA, reason="no CUDA")
def test_triangles_are_taken_on_cuda() -> None:
    q, k, v, bias, mask = arguments(2, 3, 33, 70, "cuda", "own")
    with torch.profiler.profile() as profiler:
        diffusion.attention(q, k, v, bias, mask, 1e6, 3)
    assert "myops::triangle_attention" in {event.name for event in profiler.events() or ()}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not CUDA, reason="no CUDA"))])
@pytest.mark.parametrize("biases", [(), ("q",), ("q", "k", "v")], ids=str)
@pytest.mark.parametrize("own_keys", [False, True])
def test_packed_projections(device: str, biases: tuple[str, ...], own_keys: bool) -> None:
    """Of a recorded step."""

    class Layer(diffusion._WithAttention):
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)
            linear = functools.partial(torch.nn.Linear, device=device)
            self.layers = {f"proj_{name}": linear(16, 24, bias=name in biases) for name in "qkvg"}
            self.layers["proj_o"] = linear(24, 16)

        def weights(self, layer: str) -> Any:
            return self.layers[layer].weight, self.layers[layer].bias

    layer = Layer()
    s, keys, bias = (torch.randn(2, 5, c, device=device) for c in (16, 16, 15))
    bias, mask, k_in = bias.unflatten(-1, (5, HEADS)), torch.ones(2, 5, device=device), keys if own_keys else s
    with torch.no_grad():
        q, k, v, g = (layer.layers[f"proj_{name}"](x) for name, x in zip("qkvg", (s, k_in, k_in, s), strict=True))
        q, k, v = (t.unflatten(-1, (HEADS, -1)) for t in (q, k, v))
        o = diffusion.attention(q, k, v, bias, mask, 1e6, 1)
        want = layer.layers["proj_o"](o * g.sigmoid())
        with Constants([]) as recorded:
            got = layer.attend("", s, bias, mask, k_in, HEADS, 1e6, 1)
    assert ("aten::cat" in [step.operator._schema.name for step in recorded.steps]) == ("k" not in biases)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)

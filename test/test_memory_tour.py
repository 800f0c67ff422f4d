"""The pictures of docs/tour.md: they are what the example draws, of what PyTorch's operators read and write."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import memory_tour
import pytest
import torch
from memory_tour import Picture, diffusion, kernels, pair_layer, traffic, units
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import torchops

sys.path.append(str(Path(__file__).parents[1] / "examples/models"))

import alphafold3_pair_layer as written


class Record(TorchDispatchMode):
    """What each operator that makes a tensor reads and writes, in units, without tensors of up to `least` units."""

    def __init__(self, unit: Tensor, least: float, without: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.unit, self.least, self.without = unit, least, {t.untyped_storage().data_ptr() for t in without}
        self.found: Counter[tuple[float, float]] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        of = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        new = [t for t in tree_leaves(made) if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in of]
        if written := self.size(new):
            self.found[self.size(tree_leaves((args, kwargs))), written] += 1
        return made

    def size(self, leaves: list[Any]) -> float:
        total = 0.0
        for t in leaves:
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in self.without:
                once = t.as_strided([n if step else 1 for n, step in zip(t.shape, t.stride(), strict=True)], t.stride())
                size = once.numel() / self.unit.numel()
                total += size if size > self.least else 0
        return round(total, 6)


def listed(boxes: Any, picture: Picture) -> Counter[tuple[float, float]]:
    sizes = picture.sizes
    return Counter((round(units(k.reads, sizes), 6), round(units(k.writes, sizes), 6)) for k in kernels(boxes))


@pytest.mark.parametrize("picture", memory_tour.pictures(), ids=lambda picture: picture.file)
def test_picture(picture: Picture) -> None:
    assert (memory_tour.IMAGES / picture.file).read_text() == memory_tour.draw(picture), (
        "python examples/memory_tour.py draws it anew"
    )


def test_page_has_every_picture() -> None:
    page = (memory_tour.IMAGES.parent / "tour.md").read_text()
    assert all(f"](images/{picture.file})" in page for picture in memory_tour.pictures())


@pytest.mark.parametrize(
    ("picture", "eager"),
    [
        (memory_tour.DENSE, lambda v, x, w, b: torch.sigmoid(F.linear(x, w, b))),
        (memory_tour.GATE, lambda v, x, w, b: v * torch.sigmoid(F.linear(x, w, b))),
    ],
    ids=["dense", "gate"],
)
def test_operator(picture: Picture, eager: Callable[..., Tensor]) -> None:
    v, x, w, b = torch.randn(500, 8), torch.randn(500, 8), torch.randn(8, 8), torch.randn(8)
    with Record(x, 0, without=(w, b)) as record:
        eager(v, x, w, b)
    assert record.found == listed(picture.before, picture)


def test_triangle_update() -> None:
    """Nine passes, as docs/triangle_update_stages.md says, where eager mode makes nineteen tensors."""
    picture = memory_tour.TRIANGLE
    layer, x, mask = (
        written.TriangleMultiplication(16, outgoing=True),
        torch.randn(2, 12, 12, 16),
        torch.ones(2, 12, 12),
    )
    with torch.no_grad(), Record(x, 1 / 16, without=layer.parameters()) as record:
        layer(x, mask)
    assert record.found == listed(picture.before, picture)
    assert sum(units(kernel.writes, picture.sizes) for kernel in kernels(picture.before)) == 19
    assert traffic(picture.after, picture.sizes) == 9


def test_pair_layer() -> None:
    n, c, heads = 24, 64, 4
    layer, x, mask = written.PairLayer(c, heads, c // heads), torch.randn(2, n, n, c), torch.ones(2, n, n)
    with torch.no_grad(), Record(x, 1 / c, without=layer.parameters()) as record:
        layer(x, mask)
    picture = pair_layer(n, c, heads)
    assert record.found == listed(picture.before, picture)
    assert traffic(picture.after, picture.sizes) == 2 * 9 + 2 * (12 + 2 * heads / c) + 2


def test_layer_of_a_diffusion_step() -> None:
    """Before and after `replace`, which also prepares the bias of the scores, once for all steps."""
    transformers = pytest.importorskip("boltz.model.modules.transformersv2")
    samples, n, c, heads = 5, 24, 32, 2
    model: nn.Module = transformers.DiffusionTransformer(1, heads, c, c).eval()
    a, s, bias, mask = torch.randn(samples, n, c), torch.randn(1, n, c), torch.randn(1, n, n, heads), torch.ones(1, n)
    picture = diffusion(samples, n, c, heads)

    def found(s: Tensor, mask: Tensor) -> Counter[tuple[float, float]]:
        with torch.no_grad(), Record(a, heads / c) as record:
            model(a, s, bias, mask, multiplicity=samples)
        return record.found

    # As released, each sample has a copy; after `replace`, the sampler expands the one that they share.
    assert found(s.repeat(samples, 1, 1), mask.repeat(samples, 1)) == listed(picture.before, picture)
    assert torchops.replace(model).replaced == ("layers.0",)
    size = picture.sizes["bias"]
    prepared = Counter({(size, size): 2})  # its heads first, and the mask added
    assert found(s.expand(samples, -1, -1), mask.expand(samples, -1)) - prepared == listed(picture.after, picture)

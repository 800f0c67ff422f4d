"""Which triangle updates torchops.replace takes for what they are named: those that compute the same.

A release of a package that does not exist stands in for it here, and differs from the known ones in one thing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from torchops import replace
from torchops.convert import triangle_update
from torchops.convert.triangle import TriangleUpdate
from torchops.nn import TriangleMultiplicativeUpdate

FILE = "boltz.model.layers.triangular_mult"


class Update(nn.Module):
    """The names of Boltz; each method is one thing that a release could do otherwise."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.norm_in, self.norm_out = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.p_in, self.g_in = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(dim, 2 * dim, bias=False)
        self.p_out, self.g_out = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        nn.init.zeros_(self.p_out.weight)

    def split(self, ab: Tensor) -> tuple[Tensor, ...]:
        return ab.chunk(2, -1)

    def masked(self, ab: Tensor, mask: Tensor) -> Tensor:
        return ab * mask.unsqueeze(-1)

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.einsum("bikd,bjkd->bijd", a, b)

    def output(self, o: Tensor, z: Tensor, x: Tensor) -> Any:
        return self.p_out(self.norm_out(o)) * self.g_out(z).sigmoid()

    def forward(self, x: Tensor, mask: Tensor, use_kernels: bool = False) -> Any:
        z = self.norm_in(x)
        a, b = self.split(self.masked(self.p_in(z) * self.g_in(z).sigmoid(), mask))
        return self.output(self.product(a, b), z, x)


def with_method(name: str, method: Callable[..., Any]) -> type[nn.Module]:
    return type("TriangleMultiplicationOutgoing", (Update,), {name: method})


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Makes a class the one that the package's own file defines."""

    def make(cls: type[nn.Module]) -> type[nn.Module]:
        file: Any = ModuleType(FILE)
        file.nn, file.TriangleMultiplicationOutgoing = nn, cls
        monkeypatch.setitem(sys.modules, "boltz", ModuleType("boltz"))
        monkeypatch.setitem(sys.modules, FILE, file)
        return cls

    return make


Release = Callable[[type[nn.Module]], type[nn.Module]]

DIFFERENT = "it computes something else"
OTHERS: dict[str, tuple[str, Callable[..., Any], str]] = {
    "b_first": ("split", lambda self, ab: ab.chunk(2, -1)[::-1], DIFFERENT),
    "interleaved": ("split", lambda self, ab: (ab[..., ::2], ab[..., 1::2]), DIFFERENT),
    "incoming": ("product", lambda self, a, b: torch.einsum("bkid,bkjd->bijd", a, b), DIFFERENT),
    # The norm that follows would hide these, if the product were large.
    "divided_by_n": ("product", lambda self, a, b: Update.product(self, a, b) / a.shape[1], DIFFERENT),
    "divided_by_its_std": ("product", lambda self, a, b: Update.product(self, a / a.std(), b / b.std()), DIFFERENT),
    "masked_in_value_only": ("masked", lambda self, ab, mask: ab * (mask != 0).unsqueeze(-1), DIFFERENT),
    "mask_transposed": ("masked", lambda self, ab, mask: Update.masked(self, ab, mask.mT), DIFFERENT),
    "mask_of_another_batch": ("masked", lambda self, ab, mask: Update.masked(self, ab, mask[:1]), DIFFERENT),
    "gate_reads_the_product": (
        "output",
        lambda self, o, z, x: self.p_out(self.norm_out(o)) * self.g_out(self.norm_out(o)).sigmoid(),
        DIFFERENT,
    ),
    "gate_before_the_projection": (
        "output",
        lambda self, o, z, x: self.p_out(self.norm_out(o) * self.g_out(z).sigmoid()),
        DIFFERENT,
    ),
    "gate_reads_x": ("output", lambda self, o, z, x: Update.output(self, o, x, x), DIFFERENT),
    "adds_x": ("output", lambda self, o, z, x: x + Update.output(self, o, z, x), DIFFERENT),
    "gate_left_to_the_caller": (
        "output",
        lambda self, o, z, x: (self.p_out(self.norm_out(o)), self.g_out(z).sigmoid()),
        "it returns a tuple in training",
    ),
    "tuple": ("output", lambda self, o, z, x: (Update.output(self, o, z, x),), "it returns a tuple in training"),
    "in_evaluation": (
        "output",
        lambda self, o, z, x: Update.output(self, o, z, x) * (1 if self.training else 2),
        "its result in evaluation differs by 5.0e-01",
    ),
    "gradient": (
        "output",
        lambda self, o, z, x: Update.output(self, o, z.detach(), x),
        "its gradient of its input in training differs",
    ),
    "frees_no_gradient": ("output", lambda self, o, z, x: Update.output(self, o, z, x).detach(), "raised RuntimeError"),
    "overwrites_x": ("output", lambda self, o, z, x: x.copy_(Update.output(self, o, z, x)), "raised RuntimeError"),
    "overwrites_x_without_grad": (
        "output",
        lambda self, o, z, x: (y := Update.output(self, o, z, x), x.requires_grad or x.copy_(y))[0],
        "its input afterwards in training",
    ),
    "raises": ("output", lambda self, o, z, x: 1 / 0, "computing it to compare raised ZeroDivisionError"),
    "needs_another_argument": (
        "forward",
        lambda self, x, mask, chunk: Update.forward(self, x, mask),
        "its forward takes (x, mask, chunk), which no known release does",
    ),
    "takes_anything": (
        "forward",
        lambda self, x, mask, *args, **kwargs: Update.forward(self, x, mask),
        "its forward takes (x, mask, args, kwargs), which no known release does",
    ),
    "another_default_that_it_uses": (
        "forward",
        lambda self, x, mask, factor=2: factor * Update.forward(self, x, mask),
        DIFFERENT,
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_refuses(release: Release, name: str) -> None:
    method, change, reason = OTHERS[name]
    model = nn.Sequential(release(with_method(method, change))())
    kept = model[0]
    report = replace(model)
    assert report.replaced == ()
    assert list(report.left) == ["0"]
    assert reason in report.left["0"]
    assert model[0] is kept


@pytest.mark.parametrize("dim", [5, 8])
def test_replaces_what_is_the_same(release: Release, dim: int) -> None:
    """In another order of the same operations, too; and whatever surrounds the call."""

    def output(self: Any, o: Tensor, z: Tensor, x: Tensor) -> Tensor:
        return self.g_out(z).sigmoid().mul(self.p_out(self.norm_out(o)))

    cls = release(with_method("output", output))
    model = nn.ModuleDict({"a": cls(dim), "b": nn.Sequential(cls(dim)), "meta": cls(dim).to("meta")})
    model["c"] = model["a"]
    model["bits16"] = cls(dim).half()
    model["frozen"] = cls(dim).requires_grad_(False)
    values = [p.detach().clone() for p in model["a"].parameters()]
    state, precision = torch.get_rng_state(), torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    torch.set_default_dtype(torch.float64)
    try:
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
            report = replace(model)
        assert torch.get_float32_matmul_precision() == "medium"
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision(precision)
    assert report.replaced == ("a", "b.0", "meta", "c", "bits16", "frozen")
    assert report.left == {}
    assert torch.equal(torch.get_rng_state(), state)
    assert model["a"] is model["c"]
    assert type(model["a"]) is TriangleUpdate
    assert all(torch.equal(p, v) and p.grad is None for p, v in zip(model["a"].parameters(), values, strict=True))
    assert not any(p.requires_grad for p in model["frozen"].parameters())
    assert {p.dtype for p in model["bits16"].parameters()} == {torch.half}


@pytest.mark.parametrize("of_all", ["none", "tf32"])
@pytest.mark.parametrize("of_products", ["none", "ieee", "bf16"])
def test_leaves_the_precision_of_products(release: Release, of_all: Any, of_products: Any) -> None:
    """Set by torch's new interface, which the old one raises after. What is inherited still is."""
    backends: Any = torch.backends
    precisions = [backends, backends.cuda.matmul, backends.mkldnn.matmul]
    formers = [each.fp32_precision for each in precisions]
    try:
        for each, value in zip(precisions, (of_all, "none", of_products), strict=True):
            each.fp32_precision = value
        before = [each.fp32_precision for each in precisions]
        assert replace(nn.Sequential(release(with_method("output", Update.output))())).left == {}
        assert [each.fp32_precision for each in precisions] == before
        backends.fp32_precision = "none" if of_all == "tf32" else "tf32"
        now = backends.fp32_precision
        assert precisions[1].fp32_precision == now
        assert precisions[2].fp32_precision == (now if of_products == "none" else of_products)
    finally:
        for each, value in zip(precisions, formers, strict=True):
            each.fp32_precision = value


def test_refuses_what_only_looks_alike(release: Release) -> None:
    """Where the package is imported and where it is not; a class by the same name of another file; our own never."""

    class TriangleMultiplicationOutgoing(Update):
        pass

    model = nn.Sequential(TriangleMultiplicationOutgoing(), TriangleMultiplicativeUpdate(8))
    expected = {"0": "TriangleMultiplicationOutgoing has the layers of a triangle update, but is of no known package"}
    assert replace(model).left == expected
    release(with_method("product", Update.product))
    assert replace(model).left == expected
    with pytest.raises(TypeError, match="got TriangleMultiplicationOutgoing has the layers"):
        triangle_update(model[0])
    with pytest.raises(TypeError, match=r"got torch\.nn\.modules\.linear\.Linear"):
        triangle_update(nn.Linear(3, 4))


def test_the_model_itself_is_not_replaced(release: Release) -> None:
    model = release(with_method("product", Update.product))()
    assert replace(model).left == {"": "it is the model itself"}


def test_shapes_that_do_not_fit(release: Release) -> None:
    cls = release(with_method("product", Update.product))
    model = nn.Sequential(cls())
    model[0].g_in = nn.Linear(8, 12, bias=False)
    assert replace(model).left == {"0": "g_in.weight is of shape (12, 8) and not (16, 8)"}
    model[0].register_module("g_in", None)
    assert replace(model).left == {"0": "it has no g_in"}


def test_parameters_cannot_be_called(release: Release) -> None:
    """What reads them is the operator. A tool that wraps layers finds none to wrap."""
    model: Any = nn.Sequential(release(with_method("product", Update.product))())
    replace(model)
    with pytest.raises(NotImplementedError):
        model[0].p_in(torch.zeros(8))
    assert not any(isinstance(m, nn.Linear) for m in model.modules())
    assert "p_in" in repr(model)


def test_compiles(release: Release) -> None:
    """In one graph, and for other sizes in no more than one further."""
    model = nn.Sequential(release(with_method("product", Update.product))(8))
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=torch.Generator().manual_seed(0)) / 3
    replace(model)
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model[0], backend=graphs, fullgraph=True)
    for n in (5, 6, 9):
        x, mask = torch.randn(2, n, n, 8, requires_grad=True), torch.rand(2, n, n)
        outs = compiled(x, mask), model[0](x, mask)
        results = [[out, *torch.autograd.grad(out.sum(), [x, *model.parameters()])] for out in outs]
        for got, expected in zip(*results, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert graphs.frame_count <= 2

"""Tensors whose memory is not what their indices say: lazy bits, other layouts, elements and tensors that overlap."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import assert_all_close, random_like, tensors
from op_db import OPS, SCALED, OpCase
from scaled_samples import EIGHT
from torch import Tensor, nn
from torch.autograd import forward_ad

import torchops

MUTATING = [case for case in OPS if case.mutates is not None]
mutating = pytest.mark.parametrize("op", MUTATING, ids=lambda case: case.name)


def arguments_of(op: OpCase, x: Tensor) -> list[Any]:
    """x and what the operator takes beside it, all of one size."""
    if op.name == "triangle_attention":
        q = x.unflatten(-2, (1, -1, 1, 8))
        return [q, q, q, random_like(x.new_empty(1, 1, 1, 8, 8), 5)]
    if op.name == "outer_product_mean":
        a = x.unflatten(-2, (-1, 8))
        b, norm = random_like(a[..., :2, :3].contiguous(), 5), x.new_ones(*x.shape[:-2], 8, 2)
        weight = random_like(x.new_empty(4, 3 * x.shape[-1]), 6) / x.shape[-2]
        return [a, b, weight, random_like(x.new_empty(4), 7), norm]
    n = x.shape[-1]
    matrix, vector = random_like(x.new_empty(n, n), 5), random_like(x.new_empty(n), 6)
    if not op.differentiable:
        x8, w, scale_x, scale_w = x.to(EIGHT), matrix.to(EIGHT), x[..., :1], x.new_ones(1, n)
        if op.name == "glu.scaled":
            return [x8, w, w, scale_x, scale_w, scale_w, vector, vector]
        return [*([x] if op.name == "gate.scaled" else []), x8, w, scale_x, scale_w, vector]
    rest: dict[str, list[Any]] = {
        "dense": [matrix, vector],
        "gate": [random_like(x, 7), matrix, vector],
        "glu": [matrix, random_like(matrix, 8), vector, vector],
        "layer_norm": [[n], vector, vector],
        "transition": [vector, vector, matrix / n, vector, matrix / n, vector, matrix, vector],
        "square_matmul": [matrix],
        "triangle_multiplicative_update": [
            *(vector, vector, torch.cat([matrix] * 2) / n, vector.repeat(2), torch.cat([matrix] * 2), vector.repeat(2)),
            *(vector, vector, matrix, vector, matrix, vector),
        ],
    }
    return [x, *rest.get(op.name.removeprefix("add_").rstrip("_"), [])]


# --- lazy bits and lazy clones ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS, ids=lambda case: case.name)
def test_lazy_clones(op: OpCase) -> None:
    """A clone that shares memory until one of both is written may not be copied inside a parallel region."""
    args = arguments_of(op, random_like(torch.empty(4096, 64)))
    before = [a.clone() if isinstance(a, Tensor) else a for a in args]
    got = op.call(op.wrapper, *(torch._lazy_clone(a) if isinstance(a, Tensor) else a for a in args))
    assert_all_close([got], [op.call(op.reference, *before)], atol=1e-4, rtol=1e-4)
    assert_all_close(tensors(args), tensors(before), atol=0, rtol=0)


def negative(base: Tensor) -> Tensor:
    """The imaginary part of a conjugate: a view with the negative bit."""
    return base.conj().imag


def complex_base(seed: int = 1) -> Tensor:
    return random_like(torch.empty(6, 8, 2), seed).view(torch.cfloat).squeeze(-1)


@mutating
def test_negative_bit(op: OpCase) -> None:
    """Many times: what was written past the end of the dispatcher's stack shows only now and then."""
    for seed in range(50):
        base = complex_base(seed)
        x = negative(base)
        args = arguments_of(op, x)
        expected = op.call(op.reference, *(a.clone() if isinstance(a, Tensor) else a for a in args))
        assert op.call(op.wrapper, *args) is x
        assert x.is_neg()
        assert x._version == 1
        assert_all_close([x, -base.imag], [expected, expected])


@mutating
def test_negative_bit_of_the_other_arguments(op: OpCase) -> None:
    x = random_like(torch.empty(8, 8))
    args = [negative(torch.complex(a, -a)) if isinstance(a, Tensor) and a is not x else a for a in arguments_of(op, x)]
    expected = op.call(op.reference, *(a.clone() if isinstance(a, Tensor) else a for a in args))
    op.call(op.wrapper, *args)
    assert_all_close([x], [expected])


# Compiling for Inductor takes seconds for each graph, so there it is one graph for all.
@pytest.mark.parametrize(
    ("ops", "backend"),
    [*(([op], backend) for op in MUTATING for backend in (None, "aot_eager")), (MUTATING, "inductor")],
    ids=[*(f"{backend}-{op.name}" for op in MUTATING for backend in (None, "aot_eager")), "inductor"],
)
def test_negative_bit_in_training(ops: list[OpCase], backend: str | None) -> None:
    def overwrite(bases: list[Tensor], others: list[list[Any]]) -> list[Tensor]:
        outs = []
        for op, base, args in zip(ops, bases, others, strict=True):
            x = negative(base * 1)
            op.call(op.op, x, *args)
            outs.append(x * 2)
        return outs

    bases = [complex_base().requires_grad_() for _ in ops]
    others = [arguments_of(op, negative(complex_base()))[1:] for op in ops]
    leaves = [*bases, *(a.requires_grad_() for a in tensors(others))]
    rows = zip(ops, bases, others, strict=True)
    expected = [op.call(op.reference, negative(base), *args) * 2 for op, base, args in rows]
    cotangents = [random_like(t.detach(), 3) for t in expected]
    expected_grads = torch.autograd.grad(expected, leaves, cotangents)
    out = (torch.compile(overwrite, backend=backend) if backend else overwrite)(bases, others)
    assert_all_close([*out, *torch.autograd.grad(out, leaves, cotangents)], [*expected, *expected_grads])


@mutating
def test_negative_bit_of_a_compiled_input(op: OpCase) -> None:
    """Not with Inductor, which writes such an input as if it had no bit, with ATen's own operators too (2.13)."""
    x = negative(complex_base())
    args = arguments_of(op, x)
    expected = op.call(op.reference, x.clone(), *args[1:])
    torch.compile(lambda *a: op.call(op.op, *a), backend="aot_eager")(*args)
    assert_all_close([x], [expected])


@mutating
def test_negative_bit_under_vmap(op: OpCase) -> None:
    x = negative(complex_base().repeat(3, 1, 1))
    _, *rest = arguments_of(op, x[0])
    expected = torch.stack([op.call(op.reference, part.clone(), *rest) for part in x])
    torch.vmap(lambda part: op.call(op.wrapper, part, *rest))(x)
    assert_all_close([x], [expected])


@mutating
def test_inference_mode(op: OpCase) -> None:
    with torch.inference_mode():
        x = negative(complex_base())
        args = arguments_of(op, x)
        expected = op.call(op.reference, x.clone(), *args[1:])
        op.call(op.wrapper, *args)
        assert_all_close([x], [expected])


def test_private_operator_with_negative_bit() -> None:
    for seed in range(50):
        x = negative(complex_base(seed))
        y, mean, rstd = torch.ops.myops._layer_norm(x, [8], None, None, 1e-5)
        assert_all_close(torch.ops.myops._layer_norm_(x, [8], None, None, 1e-5), [mean, rstd])
        assert_all_close([x], [y])


@mutating
def test_zero_tensors(op: OpCase) -> None:
    """They have no memory that could be written; as another argument they are zeros."""
    zero = torch._efficientzerotensor((8, 8))
    with pytest.raises(RuntimeError, match="ZeroTensors are immutable"):
        op.call(op.wrapper, *arguments_of(op, zero))
    x = random_like(torch.empty(8, 8))
    args = arguments_of(op, x)
    expected = op.call(
        op.reference, x.clone(), *(torch.zeros_like(a) if isinstance(a, Tensor) else a for a in args[1:])
    )
    op.call(op.wrapper, x, *(torch._efficientzerotensor(a.shape) if isinstance(a, Tensor) else a for a in args[1:]))
    assert_all_close([x], [expected])


def test_every_operator_that_overwrites_or_takes_a_list_has_kernels_for_lazy_bits() -> None:
    for name in map(str, torch._C._dispatch_get_all_op_names()):
        if not name.startswith("myops::"):
            continue
        packet, _, overload = name.partition(".")
        arguments = torch._C._get_schema(packet, overload).arguments
        writes = any(a.alias_info is not None and a.alias_info.is_write for a in arguments)
        takes_list = any(str(a.type) == "List[Optional[Tensor]]" for a in arguments)
        for key in ("Negative", "Conjugate", "ZeroTensor"):
            has = torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
            assert has == (writes or takes_list), (name, key)


# --- other layouts ---------------------------------------------------------------------------------------------------

LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "sparse_coo": (Tensor.to_sparse, "sparse_coo"),
    "sparse_csr": (Tensor.to_sparse_csr, "sparse_csr"),
    "mkldnn": (lambda t: t.to_mkldnn(), "_mkldnn"),
    "nested": (lambda t: torch.nested.as_nested_tensor([t, t]), "a nested tensor"),
    "jagged": (lambda t: torch.nested.as_nested_tensor([t, t], layout=torch.jagged), "jagged"),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("op", "layout", "inference"),
    [
        *((op, layout, False) for op in OPS for layout in LAYOUTS),
        # These have a kernel for what they do not take, in inference mode too. Jagged tensors dispatch in Python.
        *((op, layout, mode) for op in SCALED for layout in LAYOUTS if layout != "jagged" for mode in (False, True)),
    ],
    ids=lambda value: value.name if isinstance(value, OpCase) else None,
)
def test_layout_is_named(op: OpCase, layout: str, inference: bool) -> None:
    """Of every argument, before anything else is asked of it; and nothing has happened."""
    convert, shown = LAYOUTS[layout]
    x = random_like(torch.empty(8, 8))
    names = [a.name for a in op.op._schema.arguments]
    args = arguments_of(op, x)
    for i, name in enumerate(names[: len(args)]):
        if not isinstance(args[i], Tensor) or (args[i].dim() < 2 and layout not in ("sparse_coo", "mkldnn")):
            continue
        message = f"^{op.name}: expected {name} of layout strided, got {shown}"
        with torch.inference_mode(inference):
            given = [*args[:i], convert(args[i].float()), *args[i + 1 :]]  # few layouts have elements of eight bits
            with pytest.raises(RuntimeError, match=message):
                op.call(op.wrapper, *given)
    assert x._version == 0


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr", "to_mkldnn"])
def test_sparse_inputs_after_a_swap(layout: str) -> None:
    x = torch.eye(5, 8)
    for after in (nn.Sigmoid(), nn.GLU()):
        model = nn.Sequential(nn.Linear(8, 8), after)
        expected = model(x)
        if layout == "to_mkldnn" and isinstance(after, nn.GLU):
            continue  # not supported by PyTorch's either
        assert torchops.replace(model).replaced == ("0",)
        out = model(getattr(x, layout)())
        torch.testing.assert_close(out.to_dense() if out.layout is not torch.strided else out, expected)


def test_nested_inputs_after_a_swap() -> None:
    """A model that took them takes them still, forward and backward."""
    parts = [random_like(torch.empty(rows, 6)) for rows in (2, 5)]
    model = nn.Sequential(nn.Linear(6, 4), nn.Sigmoid())
    results = []
    for _ in range(2):
        out = model(torch.nested.as_nested_tensor(parts, layout=torch.jagged))
        assert out.is_nested
        results.append([out.values(), *torch.autograd.grad(out.values().square().sum(), list(model.parameters()))])
        torchops.replace(model)
    assert isinstance(model[0], torchops.nn.Dense)
    assert_all_close(*results)


# --- elements that share a place -------------------------------------------------------------------------------------


def overlaps(sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    places = [
        sum(i * s for i, s in zip(index, strides, strict=True)) for index in itertools.product(*map(range, sizes))
    ]
    return len(set(places)) < len(places)


def accepted(x: Tensor) -> bool:
    try:
        torchops.sigmoid_(x)
    except RuntimeError as error:
        assert "more than one element of the written-to tensor" in str(error)  # noqa: PT017
        return False
    return True


def test_overlap_is_decided() -> None:
    """Sizes and strides at random, one to five dimensions: refused exactly where two indices are one place."""
    generator = random.Random(0)
    seen = {True: 0, False: 0}
    for _ in range(4000):
        dims = generator.randint(1, 5)
        sizes = tuple(generator.choice([0, 1, 2, 2, 3, 4, 5]) for _ in range(dims))
        strides = tuple(generator.choice([0, 1, 2, 3, 4, 5, 6, 7, 9, 12, 15, 20, 31, 60]) for _ in range(dims))
        expected = overlaps(sizes, strides)
        seen[expected] += 1
        assert accepted(torch.zeros(1000).as_strided(sizes, strides)) != expected, (sizes, strides)
    assert min(seen.values()) > 500


@pytest.mark.parametrize(
    ("sizes", "strides", "expected"),
    [
        ((1 << 20, 1 << 20), (1 << 20, 1), False),
        ((1 << 20, 1 << 20), ((1 << 20) - 1, 1), True),
        ((1000, 3001), (3000, 1), True),
        ((3, 1000), (2, 3), False),  # 2 i = 3 j has no solution with i below 3
        ((4, 1000), (2, 3), True),
        ((1009, 1013), (1013, 1009), False),
        ((1010, 1014), (1013, 1009), True),
        ((1000, 1000, 1000), (1_000_000, 1000, 1), False),
        ((1001, 1001, 1000), (1_000_000, 1000, 1), True),
    ],
)
def test_overlap_of_large_tensors_is_decided(sizes: Any, strides: Any, expected: bool) -> None:
    """By arithmetic, not by counting places."""
    assert accepted(torch.empty_strided(sizes, strides, device="meta")) != expected


def test_what_cannot_be_decided_is_refused() -> None:
    """Four interleaved dimensions, in which the search for a place that is taken twice is given up."""
    x = torch.empty_strided((40, 40, 40, 40), (1000003, 1618033, 2718281, 3141592), device="meta")
    with pytest.raises(RuntimeError, match="it could not be ruled out that more than one element"):
        torchops.sigmoid_(x)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "columns": lambda t: t[:, ::2],
    "rows": lambda t: t[::3],
    "transposed": Tensor.t,
    "block": lambda t: t[2:7, 3:9],
    "diagonal": lambda t: t.diagonal(),
    "windows": lambda t: t.unfold(1, 4, 4),
    "spread": lambda t: t.unfold(0, 2, 3),
    "moved": lambda t: t.view(3, 4, 12).permute(2, 0, 1)[::2],
    "interleaved": lambda t: t.flatten().as_strided((3, 2), (2, 3)),
}


@mutating
@pytest.mark.parametrize("view", VIEWS)
def test_views_without_overlap_go_on_working(op: OpCase, view: str) -> None:
    base = random_like(torch.empty(12, 12))
    x = VIEWS[view](base)
    args = arguments_of(op, x)
    expected = op.call(op.reference, x.clone(), *args[1:])
    op.call(op.wrapper, *args)
    assert_all_close([x], [expected])


@mutating
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_overlap_between_examples(op: OpCase, dim: int) -> None:
    """Under vmap, there may be no example, and none may share its memory with another."""
    shape = [5, 5]
    shape.insert(dim, 0)
    args = arguments_of(op, random_like(torch.empty(5, 5)))

    def overwritten(x: Tensor) -> Tensor:
        x = x * 1
        op.call(op.wrapper, x, *args[1:])
        return x

    assert torch.func.vmap(overwritten, dim)(torch.zeros(shape)).shape == (0, 5, 5)
    for strides in ((0, 5, 1), (5, 5, 1)):
        x = torch.zeros(100).as_strided((4, 5, 5), strides)
        with pytest.raises(RuntimeError, match=r"expected . without internal overlap, got shape \(4, 5, 5\)"):
            torch.func.vmap(lambda x: op.call(op.wrapper, x, *args[1:]))(x)


# --- strides of results ----------------------------------------------------------------------------------------------


# The result of triangle attention has the order of its first argument; the update by it has cases of its own.
@pytest.mark.ops(differentiable=True, where=lambda case, **_: "triangle_attention" not in case.name)
def test_results_are_contiguous_with_a_tangent(case: OpCase) -> None:
    """Where the operator is written out in ATen's, which follow the strides of what they get, as well as elsewhere."""
    x = random_like(torch.empty(8, 8, 8)).transpose(0, 1)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, random_like(x, 2))
        y = forward_ad.unpack_dual(case.call(case.pure, *arguments_of(case, dual)))
    assert y.primal.is_contiguous() == (case.mutates is None)
    assert y.tangent is not None


# --- tensors that share memory ---------------------------------------------------------------------------------------


def shared(rows: int, start: int, count: int, how: str) -> tuple[Tensor, Tensor]:
    """A tensor, and another over some of the same memory that has a storage of its own."""
    array = random_like(torch.empty(rows, 8)).numpy()
    if how == "from_numpy":
        return torch.from_numpy(array), torch.from_numpy(array[start : start + count])
    whole = torch.from_numpy(array)
    return whole, torch.utils.dlpack.from_dlpack(whole[start : start + count])


@pytest.mark.parametrize("how", ["from_numpy", "from_dlpack"])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("rows", [8, 50, 20_000])
@pytest.mark.parametrize("name", ["square_matmul_", "layer_norm_"])
def test_arguments_over_the_same_memory(name: str, rows: int, training: bool, how: str) -> None:
    """What overlaps the overwritten tensor is read first, whichever storage says so."""
    (op,) = (case for case in MUTATING if case.name == name)
    count = 8 if name == "square_matmul_" else 1
    x, last = shared(rows, rows - count, count, how)
    rest: list[Any] = [last] if name == "square_matmul_" else [[8], last[0], last[0]]
    assert x.untyped_storage()._cdata != rest[-1].untyped_storage()._cdata
    old, *old_rest = (a.clone() if isinstance(a, Tensor) else a for a in (x, *rest))
    expected = op.call(op.reference, old.requires_grad_(training), *old_rest)
    leaf = torch.zeros_like(x, requires_grad=training)
    op.call(op.wrapper, x.add_(leaf), *rest)
    assert_all_close([x], [expected], rtol=1e-4, atol=1e-5)
    if training:
        cotangent = random_like(expected.detach(), 3)
        got, wanted = (torch.autograd.grad(y, of, cotangent) for y, of in ((x, leaf), (expected, old)))
        assert_all_close(got, wanted, rtol=1e-4, atol=1e-4)

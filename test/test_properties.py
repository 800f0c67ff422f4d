"""Every operator against ATen on arguments that nobody thought of: shapes, strides, dtypes, aliasing, autograd state.

The examples are the same in every run. `TORCHOPS_PROPERTIES=nightly` draws new ones for a few minutes; a failure prints
the smallest example that it found.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from checks import tensors, worst
from norm_errors import Norm
from op_db import OPS, OpCase
from samples import Arguments, arguments
from torch import Tensor
from torch.utils._pytree import tree_map_only

pytest.importorskip("hypothesis", reason="hypothesis is not installed")

from hypothesis import HealthCheck, assume, given, note, settings
from hypothesis import strategies as st

settings.register_profile(
    "fixed",
    max_examples=60,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
)
settings.register_profile("nightly", settings.get_profile("fixed"), max_examples=1000, derandomize=False)
settings.load_profile(os.environ.get("TORCHOPS_PROPERTIES", "fixed"))

Draw = Callable[[st.SearchStrategy[Any]], Any]
Shape = tuple[int, ...]

# --- shapes ----------------------------------------------------------------------------------------------------------

SIZE = st.one_of(st.integers(1, 9), st.just(0), st.sampled_from([1, 16, 17, 31, 33, 64, 67]))
# Many rows reach other threads and panels; the product of all sizes stays small.
LEADING = st.one_of(st.lists(SIZE, max_size=3).map(tuple), st.sampled_from([(257,), (3, 129), (1031,)]))


@dataclass(frozen=True)
class Call:
    """The shapes of the tensor arguments, of which None is not given, and what makes arguments of the tensors."""

    shapes: tuple[Shape | None, ...]
    build: Callable[[Sequence[Tensor | None]], Arguments]
    wide: tuple[int, ...] = ()  # which arguments may be float32 where the others have 16 bits


def dense_call(draw: Draw) -> Call:
    leading, inner, out = draw(LEADING), draw(SIZE), draw(SIZE)
    bias = (out,) if draw(st.booleans()) else None
    return Call(((*leading, inner), (out, inner), bias), lambda t: arguments(*t))


def sigmoid_call(draw: Draw) -> Call:
    return Call((draw(LEADING),), lambda t: arguments(*t))


def square_matmul_call(draw: Draw) -> Call:
    leading, n, transposed = draw(LEADING), draw(SIZE), draw(st.booleans())
    # One matrix, or one for each matrix of a.
    batch = leading[:-1] if draw(st.booleans()) else ()
    return Call(((*leading, n), (*batch, n, n)), lambda t: arguments(*t, transpose_b=transposed))


def softmax_call(draw: Draw) -> Call:
    shape = (*draw(LEADING), *draw(st.sampled_from([(), (1,), (67,)])))
    dim = draw(st.integers(-max(len(shape), 1), max(len(shape), 1) - 1))
    return Call((shape,), lambda t: arguments(*t, dim))


def layer_norm_call(draw: Draw) -> Call:
    # ATen's layer_norm has no gradient where there is nothing to normalise.
    normalized = draw(st.lists(SIZE.filter(bool), min_size=1, max_size=2).map(tuple))
    affine = (draw(st.sampled_from([normalized, None])), draw(st.sampled_from([normalized, None])))
    eps = draw(st.sampled_from([1e-5, 0.1]))
    shape = (*draw(LEADING), *normalized)
    return Call((shape, *affine), lambda t: arguments(t[0], list(normalized), *t[1:], eps))


def gate_call(draw: Draw) -> Call:
    leading, inner, out = draw(LEADING), draw(SIZE), draw(SIZE)
    bias = (out,) if draw(st.booleans()) else None
    return Call(((*leading, out), (*leading, inner), (out, inner), bias), lambda t: arguments(*t), wide=(0, 1))


def glu_call(draw: Draw) -> Call:
    leading, inner, out = draw(LEADING), draw(SIZE), draw(SIZE)
    biases = [(out,) if draw(st.booleans()) else None for _ in range(2)]
    activation = draw(st.sampled_from(["sigmoid", "silu"]))
    shapes = ((*leading, inner), (out, inner), (out, inner), *biases)
    return Call(shapes, lambda t: arguments(*t, activation=activation), wide=(0,))


def transition_call(draw: Draw) -> Call:
    # ATen's layer_norm has no gradient where there is nothing to normalise.
    leading, c, hidden = draw(LEADING), draw(SIZE.filter(bool)), draw(SIZE)

    def optional(*shape: int) -> Shape | None:
        return shape if draw(st.booleans()) else None

    shapes: dict[str, Shape | None] = {
        "x": (*leading, c),
        "norm_weight": optional(c),
        "norm_bias": optional(c),
        "gate_weight": (hidden, c),
        "gate_bias": optional(hidden),
        "up_weight": (hidden, c),
        "up_bias": optional(hidden),
        "down_weight": (c, hidden),
        "down_bias": optional(c),
    }
    eps = draw(st.sampled_from([1e-5, 0.1]))
    names = list(shapes)[1:]
    return Call(
        tuple(shapes.values()),
        lambda t: arguments(t[0], **dict(zip(names, t[1:], strict=True)), eps=eps),
        wide=(0,),
    )


def outer_product_mean_call(draw: Draw) -> Call:
    batch, *sizes = draw(st.sampled_from([(), (), (2,), (3, 1), (0,)])), *(draw(SIZE) for _ in range(6))
    s, n, m, c, d, out = sizes
    assume(n * c * m * d <= 1 << 17)
    bias = (out,) if draw(st.booleans()) else None
    norm = (*batch, n, m) if draw(st.booleans()) else None
    return Call(((*batch, s, n, c), (*batch, s, m, d), (out, c * d), bias, norm), lambda t: arguments(*t), wide=(4,))


CALLS: dict[str, Callable[[Draw], Call]] = {
    "dense": dense_call,
    "gate": gate_call,
    "glu": glu_call,
    "sigmoid": sigmoid_call,
    "square_matmul": square_matmul_call,
    "softmax": softmax_call,
    "layer_norm": layer_norm_call,
    "outer_product_mean": outer_product_mean_call,
    "transition": transition_call,
}


ELSEWHERE = {"triangle_attention"}  # test_properties_of_pairs.py


def here(case: OpCase, **_: Any) -> bool:
    return (case.twin or case.name) in CALLS


def test_every_operator_has_calls() -> None:
    assert {case.twin or case.name for case in OPS} - ELSEWHERE == CALLS.keys()


def call(case: OpCase, draw: Draw) -> Call:
    drawn = CALLS[case.twin or case.name](draw)
    assume(all(torch.Size(shape).numel() <= 1 << 17 for shape in drawn.shapes if shape is not None))
    note(f"shapes {drawn.shapes}")
    return drawn


# --- memory ----------------------------------------------------------------------------------------------------------


def strided(
    draw: Draw, shape: Shape, dtype: torch.dtype, device: str, *, expand: bool = True, negate: bool = True
) -> Tensor:
    """Normal values under any strides: permuted, with steps and margins, expanded, negated by a bit, seldom NaN."""
    order = draw(st.permutations(range(len(shape))))
    kinds = ["plain", "plain", "plain", "step", "margin", *(["expanded"] if expand else [])]
    picked = [draw(st.sampled_from(kinds)) for _ in shape]
    sizes = {"plain": lambda n: n, "step": lambda n: 3 * n, "margin": lambda n: n + 3, "expanded": lambda n: 1}
    scale = draw(st.sampled_from([1.0, 1.0, 8.0]))
    base = torch.randn([sizes[picked[d]](shape[d]) for d in order], dtype=torch.float64) * scale
    if base.numel() and draw(st.integers(0, 9)) == 0:
        base.view(-1)[draw(st.integers(0, base.numel() - 1))] = draw(
            st.sampled_from([torch.inf, -torch.inf, torch.nan])
        )
    view = base.to(dtype).to(device).permute([order.index(d) for d in range(len(shape))])
    for d, kind in enumerate(picked):
        if kind == "step":
            view = view[(slice(None),) * d + (slice(1, None, 3),)]
        elif kind == "margin":
            view = view.narrow(d, 2, shape[d])
    view = view.expand(shape)
    if negate and draw(st.integers(0, 9)) == 0:
        view = torch._neg_view(view)
    note(f"{tuple(view.shape)} with strides {view.stride()}, offset {view.storage_offset()}, neg {view.is_neg()}")
    return view


def overlapping(draw: Draw, shapes: Sequence[Shape | None], dtype: torch.dtype, device: str) -> list[Tensor | None]:
    """Contiguous pieces of one storage, anywhere in it."""
    sizes = [torch.Size(shape).numel() for shape in shapes if shape is not None]
    base = torch.randn(max(sizes) + 7, dtype=torch.float64).to(dtype).to(device)
    pieces: list[Tensor | None] = []
    for shape in shapes:
        if shape is None:
            pieces.append(None)
            continue
        size = torch.Size(shape).numel()
        start = draw(st.integers(0, base.numel() - size))
        pieces.append(base[start : start + size].view(shape))
    note(f"pieces {[p if p is None else (p.storage_offset(), tuple(p.shape)) for p in pieces]} of {base.numel()}")
    return pieces


def drawn_arguments(case: OpCase, data: st.DataObject, dtype: torch.dtype, device: str) -> Arguments:
    """Any arguments that are allowed: what is overwritten may not have two elements in one place."""
    drawn = call(case, data.draw)
    torch.manual_seed(data.draw(st.integers(0, 99)))
    if data.draw(st.integers(0, 3)) == 0:
        return drawn.build(overlapping(data.draw, drawn.shapes, dtype, device))
    # ATen's fallback for the key Negative writes past the stack for an operator that returns nothing.
    negatable = torch._C._dispatch_has_kernel_for_dispatch_key(case.qualified, "Negative")
    made: list[Tensor | None] = []
    for number, shape in enumerate(drawn.shapes):
        written = number == case.mutates
        options = {"expand": not written, "negate": not written or negatable}
        wider = number in drawn.wide and dtype.itemsize == 2 and data.draw(st.booleans())
        of = torch.float32 if wider else dtype
        made.append(None if shape is None else strided(data.draw, shape, of, device, **options))
    return drawn.build(made)


def fresh(values: Arguments, dtype: torch.dtype | None = None) -> Arguments:
    """The same values in memory of their own."""
    return tree_map_only(Tensor, lambda t: t.detach().to(dtype or t.dtype, copy=True).resolve_neg(), values)


def assert_like_aten(
    case: OpCase,
    got: Tensor,
    aten: Tensor,
    exact: Tensor,
    amplified: Tensor | float = 0.0,
    rounded: torch.dtype | None = None,
) -> None:
    """At most a few roundings to the dtype `rounded` (by default that of the result), and the error `amplified` of each
    element, farther from the value in float64 than ATen; not finite in the same places."""
    assert (got.shape, got.dtype, got.device) == (aten.shape, aten.dtype, aten.device)
    finite = aten.isfinite() & exact.isfinite()
    # A rounding error that is left of 0 makes infinity of 0 * inf.
    assert bool(((got.isnan() == aten.isnan()) | (got.isnan() == exact.isnan())).all())
    assert torch.equal(got.isfinite() & exact.isfinite(), finite)
    scale = max(1.0, exact[finite].abs().max().item()) if finite.any() else 1.0
    # The value nearest to `got` that is within `amplified` of `exact`.
    most = torch.as_tensor(amplified, dtype=exact.dtype, device=exact.device)
    allowed = exact + (got - exact).clamp(-most, most)
    got, aten, allowed, exact = got[finite], aten[finite], allowed[finite], exact[finite]
    rounded = rounded or got.dtype
    roundings = 4 * case.slack[rounded] * torch.finfo(rounded).eps * scale
    assert worst(got, allowed) <= 3 * worst(aten, exact) + roundings


DTYPE = st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16])

# --- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.ops(differentiable=True, where=here)
@given(data=st.data())
def test_values(case: OpCase, device: str, data: st.DataObject) -> None:
    """Nothing else changes: not the other arguments, nor the memory between the elements of the one overwritten."""
    dtype = data.draw(DTYPE)
    args, kwargs = drawn_arguments(case, data, dtype, device)
    # A gate that ATen rounds to 0 makes NaN of an infinite value, one that is not rounded leaves it infinite.
    assume(not case.recomputes or all(t.isfinite().all() for t in tensors((args, kwargs))))
    exact_args, exact_kwargs = fresh((args, kwargs), torch.float64)
    aten_args, aten_kwargs = fresh((args, kwargs))
    exact, aten = case.reference(*exact_args, **exact_kwargs), case.reference(*aten_args, **aten_kwargs)
    # Of the numbers beyond float16, a chain of operators has some in between that a kernel has not, or the other way.
    assume(not case.recomputes or bool((aten.isfinite() & (aten.abs() < torch.finfo(aten.dtype).max / 8)).all()))
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().clone() for t in tensors((args, kwargs))}
    versions = [t._version for t in tensors((args, kwargs))]

    out = case.op(*args, **kwargs)

    if case.mutates is None:
        assert out.is_contiguous()
        assert [t._version for t in tensors((args, kwargs))] == versions
    else:
        assert out is None
        out = case.mutated(args)
        assert out._version == versions[0] + 1
    assert_like_aten(case, out, aten, exact)
    for now in tensors((args, kwargs)):
        bytes_now, bytes_then = (
            torch.empty(0, dtype=now.dtype, device=device).set_(s)
            for s in (now.untyped_storage(), storages[now.untyped_storage().data_ptr()])
        )
        changed = torch.zeros(bytes_now.numel(), dtype=torch.bool, device=device)
        if case.mutates is not None and now.untyped_storage().data_ptr() == out.untyped_storage().data_ptr():
            changed.as_strided(out.shape, out.stride(), out.storage_offset()).fill_(True)
        torch.testing.assert_close(bytes_now[~changed], bytes_then[~changed], rtol=0, atol=0, equal_nan=True)


# --- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.ops(differentiable=True, where=here)
@given(data=st.data())
def test_gradients(case: OpCase, device: str, data: st.DataObject) -> None:
    """For any of the arguments that require one, and a cotangent of any strides."""
    dtype = data.draw(DTYPE)
    args, kwargs = drawn_arguments(case, data, dtype, device)
    assume(all(t.isfinite().all() for t in tensors((args, kwargs))))
    wanted = [data.draw(st.booleans()) for _ in tensors((args, kwargs))]
    assume(any(wanted))
    copied_args, copied_kwargs = fresh((args, kwargs))
    like = case.reference(*copied_args, **copied_kwargs)
    cotangent = strided(data.draw, tuple(like.shape), like.dtype, device)
    assume(bool(cotangent.isfinite().all()))

    def gradients(function: Callable[..., Tensor], values: Arguments, g: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.requires_grad_() for t, needed in zip(tensors(values), wanted, strict=True) if needed]
        out = function(*values[0], **values[1])
        assert out.requires_grad
        return torch.autograd.grad(out, leaves, g)

    got = gradients(case.pure, tree_map_only(Tensor, lambda t: t.detach(), (args, kwargs)), cotangent)
    aten = gradients(case.reference, fresh((args, kwargs)), cotangent)
    # Of the numbers beyond float16, a chain of operators has some in between that a kernel has not.
    assume(not case.recomputes or all(g.isfinite().all() for g in aten))
    exact, errors = exact_gradients(
        case, (args, kwargs), dtype, wanted[0], lambda of: gradients(case.reference, of, cotangent.double())
    )
    for values in zip(got, aten, exact, errors, strict=True):
        # With 16-bit weights, the factors of products are rounded to 16 bits for the gradient of a float32 tensor, too.
        assert_like_aten(case, *values, rounded=dtype if case.recomputes else None)


def exact_gradients(
    case: OpCase,
    values: Arguments,
    dtype: torch.dtype,
    of_first: bool,
    gradients: Callable[[Arguments], Sequence[Tensor]],
) -> tuple[Sequence[Tensor], Sequence[Tensor | float]]:
    """In float64, and how far the norm of an operator that has one may move each by its roundings. `of_first` says
    whether the first is that of the first argument."""
    if "layer_norm" not in case.name and "transition" not in case.name:
        exact = gradients(fresh(values, torch.float64))
        return exact, [0.0] * len(exact)
    eps = torch.finfo(dtype).eps
    of_moments = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    with Norm() as norm:
        exact = gradients(fresh(values, torch.float64))
    errors: list[Any] = [0.0] * len(exact)
    for seed in range(3):  # errors of several rows may cancel
        with Norm(of_moments, seed):
            moved = gradients(fresh(values, torch.float64))
        errors = [max(most, 4 * worst(one, other)) for most, one, other in zip(errors, moved, exact, strict=True)]
    if of_first:
        # Without weight and bias, layer_norm_ saves nothing but its result, which has the digits of its dtype.
        args = values[0]
        from_result = case.name == "layer_norm_" and args[2] is None and args[3] is None
        errors[0] += norm.error_of_dx(eps if case.recomputes else of_moments, of_moments, eps if from_result else 0.0)
    return exact, errors

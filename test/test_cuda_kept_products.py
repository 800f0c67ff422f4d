"""Products that training of gate and glu keeps on CUDA: when, and that gradients read them rightly."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from cuda_checks import assert_accurate, double, gradients, random
from product_samples import gate_reference, glu_reference
from test_gates import saved
from torch import Tensor

import torchops
from torchops._core import _build_info

if not torch.cuda.is_available() or not _build_info.cuda_version:
    pytest.skip("needs a GPU and a build with CUDA", allow_module_level=True)

OPS = torch.ops.myops
HALF = torch.bfloat16
# dtype, features in and out, whether products are kept by glu, and by gate
WHEN = [
    (HALF, 1032, 8, True, True),
    (torch.float16, 1025, 7, True, True),
    (HALF, 1024, 8, False, False),
    (HALF, 129, 127, False, True),
    (HALF, 129, 128, False, False),
    (HALF, 127, 127, False, False),
    (HALF, 128, 130, False, True),
    (HALF, 100, 100, False, True),
    (HALF, 260, 260, False, False),
    (torch.float32, 260, 8, True, True),
    (torch.float32, 256, 8, False, False),
    (torch.float32, 130, 8, True, True),
    (torch.float32, 128, 6, True, True),
    (torch.float64, 64, 6, False, False),
    (torch.float64, 64, 7, True, True),
]


@pytest.mark.parametrize(("dtype", "k", "n", "by_glu", "by_gate"), WHEN)
def test_when(dtype: torch.dtype, k: int, n: int, by_glu: bool, by_gate: bool) -> None:
    x = random(6, k, dtype=dtype).requires_grad_()
    v, w, wg = random(6, n, dtype=dtype), random(n, k, dtype=dtype), random(n, k, dtype=dtype)

    def like_v(gated: Callable[[], Tensor]) -> int:
        return sum(t.shape == v.shape and t.data_ptr() != x.data_ptr() for t in saved(gated))

    assert like_v(lambda: torchops.glu(x, w, wg)) == 2 * by_glu
    assert like_v(lambda: torchops.gate(v, x, w)) == 1 + by_gate
    assert like_v(lambda: torchops.gate_(v.clone(), x, w)) == 1
    assert [OPS._keeps_products(x, w, of_glu) for of_glu in (True, False)] == [by_glu, by_gate]


@pytest.mark.parametrize("rows", [5, 300, 4099])
@pytest.mark.parametrize(
    ("dtype", "k", "n"),
    [
        (HALF, 1033, 1035),
        (HALF, 1032, 1035),
        (torch.float16, 1040, 136),
        (torch.float32, 1001, 1003),
        (torch.float32, 264, 256),
        (torch.float64, 33, 35),
    ],
)
def test_gradients(dtype: torch.dtype, k: int, n: int, rows: int) -> None:
    x, v, grad = (random(rows, size, dtype=dtype) for size in (k, n, n))
    w, wg = (random(n, k, dtype=dtype, scale=k**-0.5) for _ in range(2))
    b, bg = (random(n, dtype=dtype) for _ in range(2))
    for ours, eager, arguments in (
        (torchops.gate, gate_reference, (v, x, w, b)),
        (torchops.glu, glu_reference, (x, w, wg, b, bg)),
    ):
        got, theirs = gradients(ours, arguments, grad), gradients(eager, arguments, grad)
        for one, other, exact in zip(got, theirs, gradients(eager, double(*arguments), grad.double()), strict=True):
            if dtype.itemsize == 2:
                assert_accurate(one, other, exact)
            else:  # eager mode in float64 is `exact`
                limit = 1e-5 if dtype == torch.float32 else 1e-12
                assert (one - exact).norm() <= limit * exact.norm()


@pytest.mark.parametrize(("dtype", "k", "n"), [(HALF, 72, 64), (HALF, 129, 127), (torch.float32, 64, 40)])
def test_given_and_recomputed_products(dtype: torch.dtype, k: int, n: int) -> None:
    """They may be given for any size, and are not written."""
    rows = 20_011
    x, v, grad = (random(rows, size, dtype=dtype) for size in (k, n, n))
    w, wg = (random(n, k, dtype=dtype, scale=k**-0.5) for _ in range(2))
    b, bg = (random(n, dtype=dtype) for _ in range(2))
    y, z = OPS._gate(v, x, w, b)
    _, value, gate = OPS._glu(x, w, wg, b, bg, "silu")
    before = [t.clone() for t in (z, value, gate)]
    limit = 0.02 if dtype == HALF else 1e-4

    def assert_same(op: torch._ops.OpOverloadPacket, arguments: tuple[object, ...], given: tuple[object, ...]) -> None:
        for one, other in zip(op(*arguments, *given), op(*arguments), strict=True):
            scale = other.abs().max() if other.numel() else 1
            torch.testing.assert_close(one / scale, other / scale, rtol=limit, atol=limit)

    def elsewhere(t: torch.Tensor) -> torch.Tensor:
        return t.T.contiguous().T

    assert_same(OPS._gate_backward, (grad, v, x, w, b, [True] * 4, False), (elsewhere(z),))
    given = elsewhere(value), elsewhere(gate)
    assert_same(OPS._glu_backward, (grad, x, w, wg, b, bg, "silu", [True] * 5), given)
    for output_mask in itertools.product([False, True], repeat=4):
        for values, v_is_y in ((v, False), (y, True)):
            assert_same(OPS._gate_backward, (grad, values, x, w, b, list(output_mask), v_is_y), (z,))
    for output_mask in itertools.product([False, True], repeat=5):
        assert_same(OPS._glu_backward, (grad, x, w, wg, b, bg, "silu", list(output_mask)), (value, gate))
    assert all(torch.equal(t, former) for t, former in zip((z, value, gate), before, strict=True))

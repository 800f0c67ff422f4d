"""The triangle update where it is large, and where it is not alone on the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import pytest
import torch
from cuda_checks import assert_same_bits, error
from torch import Tensor

import torchops

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

update: Callable[..., Tensor] = torchops.triangle_multiplicative_update
update_: Callable[..., Tensor] = torchops.add_triangle_multiplicative_update_
C, MIB = 128, 1 << 20


@pytest.fixture(autouse=True, params=["auto", "portable"])
def _on_path(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.manual_seed(0)
    path: Literal["auto", "portable"] = request.param
    with torchops.cuda.kernel_path(path):
        yield
    torch.cuda.empty_cache()


def weights(dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    def random(*shape: int) -> Tensor:
        return (torch.randn(shape, device="cuda") / (shape[-1] ** 0.5 if len(shape) == 2 else 5)).to(dtype)

    norms = {f"norm_{side}_{kind}": random(C) for side in ("in", "out") for kind in ("weight", "bias")}
    norms = {name: t + 1 if name.endswith("weight") else t for name, t in norms.items()}
    packed = {name: random(2 * C, C) for name in ("p_in_weight", "g_in_weight")}
    return norms | packed | {name: random(C, C) for name in ("p_out_weight", "g_out_weight")}


def exact_at(rows_i: Tensor, rows_j: Tensor, positions: Tensor, weights: dict[str, Tensor]) -> Tensor:
    """The update at some positions (count, c), from the rows (count, N, c) that each hears of, in float64."""
    w = {name: t.double() for name, t in weights.items()}

    def normed(x: Tensor, layer: str) -> Tensor:
        return torch.nn.functional.layer_norm(x, x.shape[-1:], w[f"{layer}_weight"], w[f"{layer}_bias"])

    def half(rows: Tensor, which: int) -> Tensor:
        z = normed(rows.double(), "norm_in")
        return z @ w["p_in_weight"].chunk(2)[which].T * (z @ w["g_in_weight"].chunk(2)[which].T).sigmoid()

    o = (half(rows_i, 0) * half(rows_j, 1)).sum(1)
    gate = (normed(positions.double(), "norm_in") @ w["g_out_weight"].T).sigmoid()
    return normed(o, "norm_out") @ w["p_out_weight"].T * gate


@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
def test_more_elements_than_an_int_counts(direction: str) -> None:
    n = 4104
    if torch.cuda.mem_get_info()[0] < 18 << 30:
        pytest.skip("needs 18 GiB of free memory")
    w = weights()
    x = torch.randn(n, n, C, device="cuda", dtype=torch.bfloat16)
    assert x.numel() > 2**31
    last = n - 1
    i = torch.tensor([0, 0, last, last, 4095, 17, 2052, 3000], device="cuda")
    j = torch.tensor([0, last, 0, last, 4090, 4100, 2051, 1], device="cuda")
    of_direction = x if direction == "outgoing" else x.transpose(0, 1)
    want = exact_at(of_direction[i], of_direction[j], x[i, j], w)
    old = x[i, j].double()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        update_(x, direction, **w)
    assert torch.cuda.max_memory_allocated() - before <= 2.1 * x.nbytes + 64 * MIB
    assert error(x[i, j].double() - old, want) < 0.02


# Warpgroups of a kernel take turns, and a mask makes some warps late: with 384 positions a masked step in once hung.
@pytest.mark.parametrize(("n", "masked"), [(200, False), (200, True), (384, True), (385, True)])
@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
def test_the_same_bits_beside_other_work(training: bool, n: int, masked: bool) -> None:
    w = weights()
    x = torch.randn(n, n, C, device="cuda", dtype=torch.bfloat16)
    mask = (torch.rand(n, n, device="cuda") > 0.1).to(x.dtype) if masked else None
    grad = torch.randn_like(x)
    leaves = {"x": x, **w}
    for leaf in leaves.values():
        leaf.requires_grad_(training)

    def run() -> tuple[Tensor, ...]:
        y = update(**leaves, mask=mask)
        return torch.autograd.grad(y, [*leaves.values()], grad) if training else (y,)

    assert_same_bits(run)

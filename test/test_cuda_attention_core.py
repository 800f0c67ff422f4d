"""The kernel of triangle attention for compute capability 9.0 (src/cuda/gemm/sm90/attention), by its private operator,
and behind the public one."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from attention_samples import arguments, exact
from attention_update_samples import TOLERANCE as TOLERANCES
from attention_update_samples import assert_near, leaves_of, weights, with_gradients
from attention_update_samples import reference as update_reference
from checks import random_like
from cuda_checks import assert_same_bits, poisoned_memory
from torch import Tensor
from triangle_attention_samples import attention_reference as reference

import torchops
from torchops import triangle_attention_update
from torchops._core.devices import capability
from torchops._core.triton.plan import Plans, _Step
from torchops._triangle_attention.update import operators
from torchops.cuda import kernel_path

core = torch.ops.myops._triangle_attention_core.default
CUDA = torch.cuda.is_available()
pytestmark = pytest.mark.skipif(not CUDA or capability(0) != (9, 0), reason="needs a GPU of compute capability 9.0")

DTYPES = [torch.bfloat16, torch.float16]
LOG2E = 1.4426950408889634
# Of a row. Eager, which rounds scores to 16 bits, is off by about as much in most of its rows, and by more in some.
TOLERANCE = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
Outputs = tuple[Tensor, Tensor]


def prepared(bias: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Bias and mask as the operator takes them."""
    keys = bias.shape[-1]
    width = -(-keys // 64) * 64
    padded = torch.nn.functional.pad(bias.squeeze(1), (0, width - keys), value=float("-inf"))
    if mask is None:
        return padded, None
    kept = mask[:, :, 0, 0]
    kept = kept | ~kept.any(-1, keepdim=True)
    added = torch.zeros(*kept.shape[:2], width, device=bias.device)
    added[..., :keys].masked_fill_(~kept, float("-inf"))
    return padded, added


def attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, scale: float, *, scaled: bool = False
) -> Outputs:
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:4], dtype=torch.float32)
    with kernel_path("fused"):  # also where Triton's kernel is faster
        assert core(q, k, v, *prepared(bias, mask), scale, scaled, out, lse)
    return out, lse


def expected(args: Any, scale: float) -> Outputs:
    q, k, v, bias, mask = exact(args)
    s = (q @ k.mT) * scale + bias
    if mask is not None:
        s = s.masked_fill(~(mask | ~mask.any(-1, keepdim=True)), float("-inf"))
    return torch.softmax(s, -1) @ v, torch.logsumexp(s, -1)


def assert_right(got: Outputs, args: Any, scale: float, *, scaled: bool = False) -> None:
    """Each row of each head by itself: a wrong tile would not show in the norm of all."""
    out, lse = (t.detach() for t in expected(args, scale))
    distance = (got[0].double() - out).norm(dim=-1) / out.norm(dim=-1).clamp_min(0.1)
    assert distance.max().item() <= TOLERANCE[got[0].dtype] * (2 if scaled else 1)
    torch.testing.assert_close(got[1].double(), lse, rtol=1e-5, atol=5e-2 if scaled else 1e-4)


SIZES = [
    # queries, keys, rows, heads, d: full tiles; one number of each; ends of tiles of each kind; many steps
    (128, 64, 2, 1, 32),
    (1, 1, 1, 1, 8),
    (65, 129, 3, 2, 16),
    (129, 63, 1, 3, 24),
    (64, 65, 5, 4, 40),
    (200, 1000, 2, 2, 32),
    (63, 641, 4, 2, 64),
    (257, 384, 7, 2, 48),
]


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_values_on_cuda(sizes: tuple[int, ...], dtype: torch.dtype, masked: bool) -> None:
    n, keys, rows, heads, d = sizes
    args = arguments(n, d, batch=2, rows=rows, keys=keys, heads=heads, dtype=dtype, device="cuda", masked=masked)
    with poisoned_memory():
        got = attend(*args, d**-0.5)
    assert_right(got, args, d**-0.5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scaled_inputs_on_cuda(dtype: torch.dtype) -> None:
    q, k, v, bias, mask = arguments(150, 32, rows=3, dtype=dtype, device="cuda", masked=True)
    got = attend((q * 32**-0.5 * LOG2E).to(dtype), k, v, (bias * LOG2E).to(dtype), mask, 32**-0.5, scaled=True)
    assert_right(got, (q, k, v, bias, mask), 32**-0.5, scaled=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_that_grow_on_cuda(dtype: torch.dtype) -> None:
    """Exponents are relative to the first keys' largest score, until sums grow by 1024: scores that grow by little, by
    much, and fall."""
    q, k, v, bias, _ = arguments(100, 32, rows=2, keys=640, dtype=dtype, device="cuda")
    steps = torch.arange(640, device="cuda") // 64
    for slope in (0.5, 4.0, 30.0, -30.0, 400.0):
        args = q, k, v, (bias + slope * steps).to(dtype), None
        assert_right(attend(*args, 32**-0.5), args, 32**-0.5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_infinite_and_nan_on_cuda(dtype: torch.dtype) -> None:
    q, k, v, bias, _ = arguments(70, 32, rows=2, keys=200, dtype=dtype, device="cuda")
    bias[..., :128] = float("-inf")  # whole steps
    bias[..., 3, 150:] = float("-inf")
    args = q, k, v, bias, None
    assert_right(attend(*args, 32**-0.5), args, 32**-0.5)
    bias[..., 5, 190] = float("nan")
    bias[..., 6, 190] = float("inf")
    bias[..., 7, :] = float("-inf")  # no key at all, as in eager
    out, _ = attend(*args, 32**-0.5)
    wrong = out.isnan().all(-1)[0, 0, 0]
    assert wrong.nonzero().flatten().tolist() == [5, 6, 7]


def test_large_biases_on_cuda() -> None:
    """Of which the differences are not exact in float32."""
    q, k, v, bias, _ = arguments(70, 32, rows=2, keys=200, dtype=torch.bfloat16, device="cuda")
    bias[..., :64] = -1e10
    bias[..., 3, :] = 1e20
    out, lse = attend(q, k, v, bias, None, 32**-0.5)
    assert out.isfinite().all()
    # Beside such a bias, no score counts, as in eager.
    torch.testing.assert_close(out[..., 3, :].float(), v.float().mean(-2), rtol=0, atol=1e-2)
    rest = q, k, v, bias[..., :3, :], None
    assert_right((out[..., :3, :], lse[..., :3]), (q[..., :3, :], *rest[1:]), 32**-0.5)


@pytest.mark.parametrize("d", [32, 64])
def test_steps_without_a_key_on_cuda(d: int) -> None:
    """Of 64 keys: at the end, as in padding, at the start, between others, for some rows alone, and nearly all."""
    args = arguments(150, d, rows=7, keys=450, dtype=torch.bfloat16, device="cuda")
    mask = torch.ones(1, 7, 1, 1, 450, dtype=torch.bool, device="cuda")
    mask[:, 0, ..., 200:] = mask[:, 1, ..., :128] = mask[:, 2, ..., 64:320] = mask[:, 3, ..., 1:] = False
    mask[:, 4, ..., :449] = mask[:, 5, ..., ::2] = mask[:, 5, ..., 100:400] = False
    q, k, v, bias, _ = args
    assert_right(attend(q, k, v, bias, mask, d**-0.5), (q, k, v, bias, mask), d**-0.5)


def test_graphs_and_streams_on_cuda() -> None:
    args = arguments(100, 32, rows=6, dtype=torch.float16, device="cuda", masked=True)
    q, k, v, bias, mask = args
    expected = attend(*args, 32**-0.5)
    out, lse = torch.empty_like(expected[0]), torch.empty_like(expected[1])
    padded, added = prepared(bias, mask)

    def call() -> None:
        with kernel_path("fused"):
            assert core(q, k, v, padded, added, 32**-0.5, False, out, lse)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.inference_mode(), torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.testing.assert_close((out, lse), expected, rtol=0, atol=0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    out.zero_()
    graph.replay()
    torch.testing.assert_close((out, lse), expected, rtol=0, atol=0)


@pytest.mark.parametrize("scale", [0.0, -0.5, 1e-3, 20.0])
def test_scales_on_cuda(scale: float) -> None:
    args = arguments(90, 16, rows=2, dtype=torch.float16, device="cuda", masked=True)
    q, k, v, bias, mask = args
    q, k = q / 4, k / 4
    assert_right(attend(q, k, v, bias, mask, scale), (q, k, v, bias, mask), scale)


def test_strides_on_cuda() -> None:
    """Heads beside rows, features of q, k and v in one tensor, an expanded batch, and a gap after each row."""
    generator = torch.Generator("cuda").manual_seed(0)
    packed = torch.randn(2, 5, 70, 3, 4, 40, device="cuda", generator=generator).half()[..., :32]
    q, k, v = (packed[:, :, :, i].transpose(2, 3) for i in range(3))
    k, v = k[:, :1].expand_as(q), v[..., :1, :, :].expand_as(q)
    bias = torch.randn(1, 1, 4, 70, 70, device="cuda", generator=generator).half()
    padded = prepared(bias, None)[0].expand(2, -1, -1, -1)
    out = torch.empty(2, 5, 70, 4, 40, device="cuda", dtype=torch.float16)[..., :32].transpose(2, 3)
    out.fill_(float("nan"))
    beyond = out.as_strided((2, 5, 70, 4, 8), (70 * 5 * 160, 70 * 160, 160, 40, 1), out.storage_offset() + 32)
    beyond.fill_(7.0)
    lse = torch.empty(2, 5, 4, 70, device="cuda")
    with kernel_path("fused"):
        assert core(q, k, v, padded, None, 0.2, False, out, lse)
    assert_right((out, lse), (q, k, v, bias, None), 0.2)
    assert (beyond == 7).all()


@pytest.mark.parametrize("d", [16, 24, 32, 64])
def test_out_may_be_q_on_cuda(d: int) -> None:
    """With k and v in other columns of the same rows."""
    packed = torch.randn(2, 5, 131, 3, 2, d, device="cuda").bfloat16()
    q, k, v = (packed[:, :, :, i].transpose(2, 3) for i in range(3))
    bias, others = torch.randn(2, 1, 2, 131, 131, device="cuda").bfloat16(), packed[:, :, :, 1:].clone()
    want, lse = attend(q, k, v, bias, None, 0.2)
    again = torch.empty_like(lse)
    with kernel_path("fused"):
        assert core(q, k, v, *prepared(bias, None), 0.2, False, q, again)
    assert torch.equal(q, want)
    assert torch.equal(again, lse)
    assert torch.equal(packed[:, :, :, 1:], others)


@pytest.mark.parametrize("panels", ["whole", "panels"])
@pytest.mark.parametrize("masked", [False, True], ids=["full", "masked"])
@pytest.mark.parametrize("node", ["starting", "ending"])
def test_updates_take_it_on_cuda(
    monkeypatch: pytest.MonkeyPatch, node: Literal["starting", "ending"], masked: bool, panels: str
) -> None:
    """In a plan, which is another one for each path, and runs several times."""
    if panels == "panels":  # several, of which the last one is smaller
        budget = 70 * 30 * (3 * 64 * 2 + 8)
        monkeypatch.setattr("torchops._triangle_attention.update.triton_fused.budget", lambda *_: budget)
        monkeypatch.setattr(operators, "plans", Plans())
    w = weights(64, 2, 32, dtype=torch.bfloat16, device="cuda")
    x = random_like(torch.empty(70, 70, 64, dtype=torch.float64), 20).cuda().bfloat16()
    mask = (random_like(torch.empty(70, 70)) > -0.5).cuda() if masked else None
    want = with_gradients(update_reference, x.double().requires_grad_(), mask, leaves_of(w, torch.float64), node)
    forward: dict[str, Tensor] = {}
    for path in ("fused", "portable", "fused", "portable", "fused"):
        with kernel_path(path):
            got = with_gradients(triangle_attention_update, x.clone().requires_grad_(), mask, leaves_of(w), node)
            assert_near(got, want, TOLERANCES[torch.bfloat16])
            y = x.clone()
            with torch.no_grad():
                updates = triangle_attention_update(x, mask, w, node), got[0]
                assert triangle_attention_update(y, mask, w, node, inplace=True) is y
            for update in updates:
                assert torch.equal(forward.setdefault(path, update), update)
            torch.testing.assert_close(y.double(), x.double() + want[0], rtol=2**-7, atol=2e-2)
    assert not torch.equal(forward["fused"], forward["portable"])


def test_a_refused_launch_in_a_plan_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's kernel runs instead, in the same plan."""
    w, x = weights(64, 2, 32, dtype=torch.bfloat16, device="cuda"), torch.randn(70, 70, 64, device="cuda").bfloat16()
    with torch.no_grad(), kernel_path("portable"):
        want = triangle_attention_update(x, None, w, "starting")
    with torch.no_grad(), kernel_path("fused"):
        taken = triangle_attention_update(x, None, w, "starting")
        monkeypatch.setattr(_Step, "is_computed", lambda *_: False)
        other = triangle_attention_update(x, None, w, "starting")
    assert torch.equal(other, want)
    assert not torch.equal(taken, want)


def test_what_the_kernel_cannot_read_on_cuda() -> None:
    """It says so, and writes nothing; the public operator takes another kernel."""
    q, k, v, bias, _ = arguments(70, 32, rows=2, dtype=torch.float16, device="cuda")
    padded, _ = prepared(bias, None)
    out, lse = torch.zeros_like(q), torch.zeros(1, 2, 2, 70, device="cuda")

    def refuses(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, out: Tensor) -> bool:
        with kernel_path("fused"):
            taken = core(q, k, v, bias, None, 1.0, False, out, lse)
        return not (taken or out.any() or lse.any())

    shifted = torch.empty(k.numel() + 1, dtype=k.dtype, device="cuda")[1:].view_as(k).copy_(k)
    assert refuses(q, shifted, v, padded, out)
    assert refuses(q.mT.contiguous().mT, k, v, padded, out)
    assert refuses(q, k, v, padded.float(), out)
    assert refuses(q, k, v, padded[..., :70], out)
    wide = [torch.nn.functional.pad(t, (0, 40)) for t in (q, k, v, out)]
    assert refuses(wide[0], wide[1], wide[2], padded, wide[3])
    assert refuses(*(t.float() for t in (q, k, v, padded, out)))
    odd = arguments(50, 13, rows=2, dtype=torch.float16, device="cuda", masked=True)
    torch.testing.assert_close(torchops.triangle_attention(*odd).double(), reference(*exact(odd)), rtol=0, atol=5e-3)
    mask = torch.zeros(1 + 2 * 128, device="cuda")[1:].view(1, 2, 128)
    with kernel_path("fused"):
        assert not core(q, k, v, padded, mask, 1.0, False, out, lse)
    for path in ("portable", "cublas", "auto"):  # the last one because Triton's kernel is faster at these sizes
        with kernel_path(path):
            assert not core(q, k, v, padded, None, 1.0, False, out, lse)
    assert not out.any()


# Many steps of a few tiles, and many tiles of a step.
@pytest.mark.parametrize(("d", "n", "rows"), [(32, 385, 40), (64, 260, 40), (16, 38, 230)], ids=str)
def test_same_bits_on_cuda(d: int, n: int, rows: int) -> None:
    args = arguments(n, d, rows=rows, heads=4, dtype=torch.bfloat16, device="cuda", masked=True)
    q, k, v, bias, mask = args
    assert_same_bits(lambda: list(attend(q, k, v, bias, mask, d**-0.5)))
    assert_right(attend(*args, d**-0.5), args, d**-0.5)


def test_faster_kernel_is_taken_on_cuda() -> None:
    """Without a path, by predicted times: for many scores; not for a single row, of which a CTA takes three."""
    for rows, n, heads, d, taken in ((256, 256, 4, 32, True), (16, 16, 4, 32, False), (1, 768, 16, 48, False)):
        q, k, v, bias, _ = arguments(n, d, rows=rows, heads=heads, dtype=torch.bfloat16, device="cuda")
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:4], dtype=torch.float32)
        assert core(q, k, v, *prepared(bias, None), 0.2, False, out, lse) == taken


@pytest.mark.parametrize("op", ["triangle_attention", "gradients"])
def test_public_operator_takes_it_on_cuda(op: str) -> None:
    """And its backward pass finds the sums that it expects."""
    needs_grad = op == "gradients"
    args = arguments(100, 32, rows=6, dtype=torch.bfloat16, device="cuda", masked=True, requires_grad=needs_grad)
    with kernel_path("portable"):
        other = torchops.triangle_attention(*args)
    with kernel_path("fused"):
        out = torchops.triangle_attention(*args)
    assert not torch.equal(out, other)
    cotangent = torch.randn_like(out)
    if out.requires_grad:
        got, want = (torch.autograd.grad(y, args[:4], cotangent, retain_graph=True) for y in (out, other))
        for g, w in zip(got, want, strict=True):
            assert (g - w).norm() <= 1e-2 * w.norm()

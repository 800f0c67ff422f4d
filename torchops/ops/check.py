"""``python -m torchops --check``: the operators on each device, forward and backward, beside float64.

For a report: the table says whether this installation computes right on this machine. Formulas are those of the
documentation, in PyTorch's own operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor

from torchops._core.devices import capability
from torchops.ops.attention import triangle_attention
from torchops.ops.gates import dense, dense_scaled, gate, gate_, glu, sigmoid, sigmoid_
from torchops.ops.matmul import square_matmul, square_matmul_
from torchops.ops.pair import (
    add_transition_,
    add_triangle_multiplicative_update_,
    outer_product_mean,
    transition,
    triangle_multiplicative_update,
)
from torchops.ops.rows import layer_norm, layer_norm_, softmax, softmax_

Function = Callable[..., Tensor]
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# With these sizes, operators take their own kernels where a device has some.
_ROWS, _FEATURES, _N, _HEADS, _D = 512, 128, 24, 4, 32

_OF_TRANSITION = ("norm_weight", "norm_bias", "gate_weight", "up_weight", "down_weight")
_OF_TRIANGLE = ("p_in_weight", "g_in_weight", "p_out_weight", "g_out_weight")


@dataclass(frozen=True)
class _Case:
    """An operator, the formula that it computes, and the shapes of its arguments."""

    ours: Function
    formula: Function
    shapes: Sequence[tuple[int, ...]]
    in_place: bool = False
    keywords: tuple[str, ...] = ()  # of the arguments after the first, if they have no places

    @property
    def name(self) -> str:
        return str(getattr(self.ours, "func", self.ours).__name__)

    def __call__(self, first: Tensor, *rest: Tensor) -> Tensor:
        first = first.clone() if self.in_place else first
        if self.keywords:
            return self.ours(first, **dict(zip(self.keywords, rest, strict=True)))
        return self.ours(first, *rest)


@dataclass(frozen=True)
class Result:
    """One line of the table: the greater of the relative errors of the result and the gradients, in the norm, beside
    that of PyTorch's operators in the same dtype; or the error that was raised."""

    device: str
    name: str
    dtype: str
    error: float
    of_pytorch: float
    seconds: float
    raised: str = ""

    @property
    def ok(self) -> bool:
        """Whether the error is at most twice PyTorch's, plus one eps: PyTorch may have a result exactly."""
        eps = torch.finfo(getattr(torch, self.dtype)).eps
        return not self.raised and self.error <= 2 * self.of_pytorch + eps


def _transition(x: Tensor, norm: Tensor, shift: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    z = F.layer_norm(x, x.shape[-1:], norm, shift)
    return F.linear(F.silu(F.linear(z, gate)) * F.linear(z, up), down)


def _triangle(x: Tensor, p_in: Tensor, g_in: Tensor, p_out: Tensor, g_out: Tensor) -> Tensor:
    z = F.layer_norm(x, x.shape[-1:])
    a, b = (F.linear(z, p_in) * torch.sigmoid(F.linear(z, g_in))).chunk(2, -1)
    o = torch.einsum("ikd,jkd->ijd", a, b)
    return F.linear(F.layer_norm(o, o.shape[-1:]), p_out) * torch.sigmoid(F.linear(z, g_out))


def _outer_product_mean(a: Tensor, b: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(torch.einsum("sic,sjd->ijcd", a, b).flatten(-2), weight, bias)


def _attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5 + bias, -1).to(v.dtype) @ v


def _added(formula: Function, x: Tensor, *parameters: Tensor) -> Tensor:
    return x + formula(x, *parameters)


def _norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def _cases() -> Iterator[_Case]:
    rows, weight, vector = (_ROWS, _FEATURES), (_FEATURES, _FEATURES), (_FEATURES,)
    layer, norm, pair = (rows, weight, vector), (rows, vector, vector), (_N, _N, _FEATURES)
    hidden, down = (4 * _FEATURES, _FEATURES), (_FEATURES, 4 * _FEATURES)
    of_transition = (rows, vector, vector, hidden, hidden, down)
    of_triangle = (pair, (2 * _FEATURES, _FEATURES), (2 * _FEATURES, _FEATURES), weight, weight)
    heads = (1, _N, _HEADS, _N, _D)

    yield _Case(dense, lambda x, w, b: torch.sigmoid(F.linear(x, w, b)), layer)
    yield _Case(glu, lambda x, w, wg: F.linear(x, w) * torch.sigmoid(F.linear(x, wg)), (rows, weight, weight))
    for function, overwriting, formula, shapes in (
        (gate, gate_, lambda v, x, w, b: v * torch.sigmoid(F.linear(x, w, b)), (rows, *layer)),
        (sigmoid, sigmoid_, torch.sigmoid, (rows,)),
        (softmax, softmax_, lambda x: torch.softmax(x, -1), (rows,)),
        (square_matmul, square_matmul_, torch.matmul, (rows, weight)),
    ):
        yield _Case(function, formula, shapes)
        yield _Case(overwriting, formula, shapes, in_place=True)
    for norm_of, in_place in ((layer_norm, False), (layer_norm_, True)):
        of_rows = partial(norm_of, normalized_shape=vector)
        yield _Case(of_rows, _norm, norm, in_place, ("weight", "bias"))
    yield _Case(transition, _transition, of_transition, keywords=_OF_TRANSITION)
    yield _Case(add_transition_, partial(_added, _transition), of_transition, True, _OF_TRANSITION)
    update, adding = triangle_multiplicative_update, add_triangle_multiplicative_update_
    yield _Case(update, _triangle, of_triangle, keywords=_OF_TRIANGLE)
    yield _Case(adding, partial(_added, _triangle), of_triangle, True, _OF_TRIANGLE)
    projected = (_D, _N, _D)
    yield _Case(outer_product_mean, _outer_product_mean, (projected, projected, (_FEATURES, _D * _D), vector))
    yield _Case(triangle_attention, _attention, (heads, heads, heads, (1, 1, _HEADS, _N, _N)))


def _values(case: _Case, dtype: torch.dtype) -> list[Tensor]:
    """Random arguments: the same on every device, with weights for sums of about 1."""
    generator = torch.Generator().manual_seed(0)
    scales = [shape[-1] ** -0.5 if len(shape) == 2 and shape[0] != _ROWS else 1.0 for shape in case.shapes]
    return [
        (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)
        for shape, scale in zip(case.shapes, scales, strict=True)
    ]


def _results(function: Function, arguments: Sequence[Tensor]) -> list[Tensor]:
    """The result and all gradients, for a random cotangent."""
    leaves = [t.detach().requires_grad_() for t in arguments]
    y = function(*leaves)
    generator = torch.Generator().manual_seed(1)
    cotangent = torch.randn(y.shape, generator=generator).to(y.device, y.dtype)
    return [y.detach(), *torch.autograd.grad(y, leaves, cotangent)]


def _error(got: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    def of(t: Tensor, u: Tensor) -> float:
        difference = t.to("cpu", torch.float64) - u
        return float(difference.norm() / u.norm()) if difference.isfinite().all() else math.inf

    return max(of(t, u) for t, u in zip(got, exact, strict=True))


def _measured(device: str, name: str, dtype: torch.dtype, of_pytorch: float, error: Callable[[], float]) -> Result:
    """Calls `error`, which may raise."""
    start, value, raised = perf_counter(), math.nan, ""
    try:
        value = error()
    except Exception as failure:  # whatever it is belongs in the report
        raised = f"{type(failure).__name__}: {str(failure).splitlines()[0]}"
    return Result(device, name, str(dtype).removeprefix("torch."), value, of_pytorch, perf_counter() - start, raised)


def _checked(case: _Case, device: str, dtype: torch.dtype) -> Result:
    arguments = _values(case, dtype)
    exact = _results(case.formula, [t.double() for t in arguments])
    here = [t.to(device) for t in arguments]
    of_pytorch = _error(_results(case.formula, here), exact)
    return _measured(device, case.name, dtype, of_pytorch, lambda: _error(_results(case, here), exact))


def _checked_float8(device: str) -> Result:
    """``dense_scaled``, beside float64 of the same numbers of eight bits. PyTorch's error is that of rounding to
    bfloat16."""
    eight = torch.float8_e4m3fn
    x, w = (t.to(device, eight) for t in _values(_Case(dense, dense, ((_ROWS, 128), (128, 128))), torch.float32))
    scale = torch.ones((), device=device)
    exact = torch.sigmoid(F.linear(x.to("cpu", torch.float64), w.to("cpu", torch.float64)))
    of_pytorch = _error([exact.bfloat16()], [exact])
    return _measured(
        device,
        dense_scaled.__name__,
        torch.bfloat16,
        of_pytorch,
        lambda: _error([dense_scaled(x, w, scale, scale)], [exact]),
    )


def check() -> list[Result]:
    """Calls the operators on the CPU and on each GPU in each dtype, forward and backward. Takes seconds, and more where
    kernels are compiled at the first call."""
    gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    results = []
    for device in ("cpu", *gpus):
        results += [_checked(case, device, dtype) for case in _cases() for dtype in _DTYPES]
        if device == "cpu" or capability(torch.device(device)) >= (8, 9):
            results.append(_checked_float8(device))
    return results


def report(results: Sequence[Result]) -> str:
    """The results as a table, and a line that says how many are right."""
    width = max(len(result.name) for result in results)
    lines = [f"{'':9}{'operator':{width}}  dtype     error    PyTorch's  ms"]
    for r in results:
        end = r.raised or ("ok" if r.ok else "WRONG")
        figures = f"{r.error:.1e}  {r.of_pytorch:.1e}    {r.seconds * 1e3:6.0f}"
        lines.append(f"{r.device:9}{r.name:{width}}  {r.dtype:8}  {figures}  {end}")
    right = sum(result.ok for result in results)
    return "\n".join([*lines, f"{right} of {len(results)} right"])

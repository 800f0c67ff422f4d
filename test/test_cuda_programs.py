"""On a GPU: compiled programs of in-place operators, also as CUDA graphs, grids of many blocks in each dimension,
and models on several GPUs."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from checks import assert_all_close
from compiled_programs import PROGRAMS, Operators, Program, random_program
from cuda_checks import random
from test_compiled_programs import check
from torch import nn

import torchops
from torchops._core import _build_info

if not torch.cuda.is_available() or not _build_info.cuda_version:
    pytest.skip("needs a GPU and a build with CUDA", allow_module_level=True)

MODES = ["default", "reduce-overhead"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_by_hand(program: Program, mode: str) -> None:
    check(program, PROGRAMS[program], False, Operators(), torch.no_grad, "cuda", mode=mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(12))
def test_by_chance(seed: int, mode: str) -> None:
    check(random_program(seed), 2, seed % 2 == 0, Operators(), torch.no_grad, "cuda", mode=mode)


# The second and third dimension of a grid have at most 65,535 blocks.
MANY = 65_537


@pytest.mark.parametrize("shape", [(MANY, 3, 5), (3, MANY, 5), (3, 5, MANY)], ids=["first", "second", "third"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_many_rows_and_columns(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = random(*shape, dtype=dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for dim in range(3):
        y = torchops.softmax_(x.clone(), dim)
        assert_all_close([y.double()], [x.double().softmax(dim)], atol=tolerance, rtol=tolerance)
    y = torchops.layer_norm_(x.clone(), [shape[-1]])
    expected = nn.functional.layer_norm(x.double(), shape[-1:])
    assert_all_close([y.double()], [expected], atol=3 * tolerance, rtol=3 * tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_many_matrices(dtype: torch.dtype) -> None:
    a, b = random(MANY, 3, 16, dtype=dtype), random(MANY, 16, 16, dtype=dtype)
    tolerance = 1e-2 if dtype == torch.float32 else 8e-2  # TF32 may be on
    expected = a.double() @ b.double()
    assert_all_close([torchops.square_matmul_(a, b).double()], [expected], atol=tolerance * 4, rtol=tolerance)


@pytest.mark.parametrize("n", [3, 40])
def test_many_examples_of_pairs(n: int) -> None:
    """Batches of pair tensors: attention has a program for each row of each example."""
    torch.manual_seed(0)
    batch = math.ceil(MANY / n)
    for module in (torchops.nn.TriangleMultiplicativeUpdate(8), torchops.nn.TriangleAttention(8, 1, 8)):
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.3)
        module = module.to("cuda", torch.bfloat16)
        x = random(batch, n, n, 8, dtype=torch.bfloat16)
        with torch.no_grad():
            y, last = module(x), module(x[-2:].clone())
        assert_all_close([y[-2:].float()], [last.float()], atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("n", [3000, 4100])
def test_long_inputs_of_the_triangle_update(n: int) -> None:
    """Against rows of the formula, where the whole would not fit: the incoming update of a few columns."""
    free, _ = torch.cuda.mem_get_info()
    c = 16
    if free < 12 * n * n * c * 4:
        pytest.skip("needs more memory on the GPU")
    torch.manual_seed(0)
    module = torchops.nn.TriangleMultiplicativeUpdate(c).cuda()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    module = module.bfloat16()
    x = random(1, n, n, c, dtype=torch.bfloat16)
    z = nn.functional.layer_norm(x.float(), (c,), module.norm_in.weight.float(), module.norm_in.bias.float())
    z = z.bfloat16().float()
    weights = {name: p.float() for name, p in module.named_parameters()}
    ab = nn.functional.linear(z, weights["p_in.weight"]) * torch.sigmoid(
        nn.functional.linear(z, weights["g_in.weight"])
    )
    a, b = ab.chunk(2, -1)
    rows = torch.tensor([0, 1, n // 2, n - 1], device="cuda")
    o = torch.einsum("bikc,bjkc->bijc", a[:, rows], b[:, rows])
    o = nn.functional.layer_norm(o, (c,), weights["norm_out.weight"], weights["norm_out.bias"])
    expected = nn.functional.linear(o, weights["p_out.weight"]) * torch.sigmoid(
        nn.functional.linear(z[:, rows][:, :, rows], weights["g_out.weight"])
    )
    with torch.no_grad():
        got = module(x)[:, rows][:, :, rows].float()
    assert (got - expected).norm() <= 2e-2 * expected.norm()


def test_data_parallel() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(torchops.nn.Dense(24, 24), torchops.nn.Transition(24), torchops.nn.GLU(24, 8)).cuda()
    x = random(16, 24, dtype=torch.float32)
    copied = copy.deepcopy(model)
    parallel = nn.DataParallel(copied)
    y, expected = parallel(x), model(x)
    y.square().sum().backward()
    expected.square().sum().backward()
    got, grads = ([p.grad for p in m.parameters() if p.grad is not None] for m in (copied, model))
    assert_all_close([y, *got], [expected, *grads])
